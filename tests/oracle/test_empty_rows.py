"""Rows without keys, tiny and empty sizes, NaN in places that nobody may see."""

from __future__ import annotations

from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from oracle import helpers
from oracle import numpy_reference as oracle

F32 = np.dtype(np.float32)
MAIN = ("query", "key", "value")
PRECISIONS = ["native", "fp8"]


def ones_like_results(case: cases.Case) -> tuple[np.ndarray, np.ndarray]:
    shape = (case.batch, case.seqlen_q, case.num_heads_q, case.head_dim_v or case.head_dim)
    rng = np.random.default_rng(3)
    return (
        rng.normal(size=shape).astype(np.float32),
        rng.normal(size=(shape[0], shape[2], shape[1])).astype(np.float32),
    )


@pytest.mark.parametrize("precision", PRECISIONS)
def test_causal_rows_before_the_first_key(precision: str) -> None:
    """5 rows and 2 keys, bottom right: rows 0..2 see nothing."""
    case = cases.Case("b03", batch=2, seqlen_q=5, seqlen_k=2, num_heads_q=4, num_heads_kv=2)
    inputs = cases.make_inputs(case, F32)
    out, logsumexp = helpers.attend(**inputs, is_causal=True, precision=precision)
    assert (out[:, :3] == 0).all()
    assert (out[:, 3:] != 0).all()
    assert np.isneginf(logsumexp[:, :, :3]).all()
    assert np.isfinite(logsumexp[:, :, 3:]).all()
    cotangents = ones_like_results(case)
    grads = helpers.gradients(cotangents, MAIN, **inputs, is_causal=True, precision=precision)
    assert (grads["query"][:, :3] == 0).all()
    later = {**inputs, "query": inputs["query"][:, 3:]}
    short = (cotangents[0][:, 3:], cotangents[1][:, :, 3:])
    alone = helpers.gradients(short, MAIN, **later, is_causal=True, precision=precision)
    for name in ("key", "value"):
        np.testing.assert_allclose(grads[name], alone[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("reason", ["no_keys", "length_0", "window", "segment", "mask", "bias"])
def test_logsumexp_of_empty_rows(reason: str, precision: str) -> None:
    """-inf, never +inf, NaN or a large number; out exactly 0."""
    case = cases.Case("b05", seqlen_q=6, seqlen_k=7, head_dim=16)
    inputs: dict[str, Any] = cases.make_inputs(case)
    empty = np.zeros((2, 6), bool)
    if reason == "no_keys":
        inputs = {n: x if n == "query" else x[:, :0] for n, x in inputs.items()}
        empty[:] = True
    elif reason == "length_0":
        inputs["key_seqlens"] = np.array([0, 7])
        empty[0] = True
    elif reason == "window":
        inputs |= {"query": np.repeat(inputs["query"], 2, axis=1), "window_size": (2, 0)}
        empty = np.zeros((2, 12), bool)
        empty[:, :5] = True
    elif reason == "segment":
        inputs["query_segment_ids"] = np.array([[1, 1, 4, 2, 2, 2]] * 2)
        inputs["key_segment_ids"] = np.array([[1, 1, 2, 2, 2, 3, 3]] * 2)
        empty[:, 2] = True
    elif reason == "mask":
        inputs["mask"] = np.ones((2, 1, 6, 7), bool)
        inputs["mask"][1, :, 4] = False
        empty[1, 4] = True
    else:
        inputs["bias"] = np.zeros((2, 1, 6, 7), np.float32)
        inputs["bias"][1, :, 4] = -np.inf
        empty[1, 4] = True
    out, logsumexp = helpers.attend(**inputs, precision=precision)
    expected = np.broadcast_to(empty[:, None], logsumexp.shape)
    np.testing.assert_array_equal(np.isneginf(logsumexp), expected)
    assert np.isfinite(logsumexp[~expected]).all()
    assert (out[empty] == 0).all()
    assert (out[~empty] != 0).any(axis=-1).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_sinks_do_not_fill_empty_rows(precision: str) -> None:
    case = cases.Case("sink_rows", seqlen_q=5, seqlen_k=3, head_dim=16, features=("sinks",))
    inputs = cases.make_inputs(case, F32)
    out, logsumexp = helpers.attend(**inputs, is_causal=True, precision=precision)
    assert (out[:, :2] == 0).all()
    assert np.isneginf(logsumexp[:, :, :2]).all()
    grads = helpers.gradients(
        ones_like_results(case), ("sinks",), **inputs, is_causal=True, precision=precision
    )
    assert np.isfinite(grads["sinks"]).all()


@pytest.mark.parametrize("sink", [-1e4, 1e4, -np.inf])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_extreme_sinks(sink: float, precision: str) -> None:
    inputs = cases.make_inputs(cases.Case("far_sink", seqlen_q=4, seqlen_k=9, head_dim=16), F32)
    plain, _ = helpers.attend(**inputs, precision=precision)
    sinks = np.full(6, sink, np.float32)
    out, logsumexp = helpers.attend(**inputs, sinks=sinks, precision=precision)
    if sink > 0:
        assert (out == 0).all()
        np.testing.assert_allclose(logsumexp, sink)
    else:
        np.testing.assert_allclose(out, plain, rtol=1e-6)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("size", [(0, 16, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0)])
def test_zero_sizes(size: tuple[int, int, int], precision: str) -> None:
    """Forward and gradient of every zero-sized call."""
    batch, rows, keys = size
    arrays = {
        "query": np.ones((batch, rows, 4, 64), cases.BFLOAT16),
        "key": np.ones((batch, keys, 2, 64), cases.BFLOAT16),
        "value": np.ones((batch, keys, 2, 32), cases.BFLOAT16),
    }
    out, logsumexp = helpers.attend(**arrays, is_causal=True, precision=precision)
    assert out.shape == (batch, rows, 4, 32)
    assert out.dtype == cases.BFLOAT16
    assert logsumexp.shape == (batch, 4, rows)
    assert (out == 0).all()
    assert np.isneginf(logsumexp).all()
    cotangents = (np.ones(out.shape, np.float32), np.ones(logsumexp.shape, np.float32))
    grads = helpers.gradients(cotangents, MAIN, **arrays, is_causal=True, precision=precision)
    for name in MAIN:
        assert grads[name].shape == arrays[name].shape
        assert (grads[name] == 0).all()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (17, 1), (1, 17), (3, 2)])
def test_tiny_sizes(rows: int, keys: int, precision: str) -> None:
    """With one key softmax is 1, so dq and dk are 0."""
    case = cases.Case("tiny", batch=1, seqlen_q=rows, seqlen_k=keys, num_heads_q=2,
                      num_heads_kv=1, head_dim=16)  # fmt: skip
    inputs = cases.make_inputs(case, cases.FLOAT16)
    inputs = {n: (x * 3).astype(cases.FLOAT16) for n, x in inputs.items()}
    expected, _ = oracle.attention(**inputs)
    out, _ = helpers.attend(**inputs, precision=precision)
    limit = tolerances.NATIVE_F16 if precision == "native" else tolerances.FP8_AGAINST_EXACT
    tolerances.check_close(out, expected, limit)
    cotangents = (ones_like_results(case)[0], np.zeros((1, 2, rows), np.float32))
    grads = helpers.gradients(cotangents, MAIN, **inputs, precision=precision)
    assert all(np.isfinite(g).all() for g in grads.values())
    if keys == 1:
        assert np.abs(grads["query"]).max() < 1e-5
        assert np.abs(grads["key"]).max() < 1e-5


def _hidden_nan(place: str, inputs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(inputs with finite numbers, the same with NaN where nobody looks)."""
    rows, keys = inputs["query"].shape[1], inputs["key"].shape[1]
    options: dict[str, Any] = {}
    if place == "key_seqlens":
        options = {
            "key_seqlens": np.array([keys - 4, keys - 9]),
            "query_seqlens": np.array([rows - 3] * 2),
        }
        hidden_k, hidden_q = slice(keys - 4, None), slice(rows - 3, None)
    elif place == "segments":
        q_ids, k_ids = np.ones((2, rows), int), np.ones((2, keys), int)
        q_ids[:, -3:], k_ids[:, -4:] = -1, -7
        options = {"query_segment_ids": q_ids, "key_segment_ids": k_ids}
        hidden_k, hidden_q = slice(-4, None), slice(-3, None)
    elif place == "mask":
        mask = np.ones((2, 1, rows, keys), bool)
        mask[..., 5:8] = False
        mask[:, :, 2:4] = False
        options, hidden_k, hidden_q = {"mask": mask}, slice(5, 8), slice(2, 4)
    elif place == "bias":
        bias = np.zeros((1, 1, rows, keys), np.float32)
        bias[..., 5:8] = -np.inf
        options, hidden_k, hidden_q = {"bias": bias}, slice(5, 8), slice(0, 0)
    else:  # keys outside every row's window
        options = {"window_size": (rows, 0), "causal_alignment": "top_left"}
        hidden_k, hidden_q = slice(rows, None), slice(0, 0)
    dirty = {n: x.copy() for n, x in inputs.items()}
    dirty["query"][:, hidden_q] = np.nan
    dirty["key"][:, hidden_k] = np.inf
    dirty["value"][:, hidden_k] = np.nan
    dirty["value"][:, hidden_k, :, ::2] = -np.inf
    return {**inputs, **options}, {**dirty, **options}


@pytest.mark.parametrize(
    ("place", "precision"),
    [
        *(("key_seqlens", "native"), ("segments", "native"), ("mask", "native")),
        *(
            ("window", "native"),
            ("bias", "native"),
            ("segments", "fp8"),
            ("mask", "fp8"),
            ("window", "fp8"),
        ),
    ],
)
def test_hidden_nan_reaches_nothing(place: str, precision: str) -> None:
    case = cases.Case("hidden", seqlen_q=23, seqlen_k=37, logits_soft_cap=5.0)
    clean, dirty = _hidden_nan(place, cases.make_inputs(case, F32))
    atol = 1e-6
    if precision == "fp8" and place == "window":
        # Keys that only a window hides still count in the means; compare with NaN counted as 0.
        for name in ("key", "value"):
            clean[name] = np.where(np.isfinite(dirty[name]), dirty[name], np.float32(0))
        # A 0 is rounded like every value, and the mean of the rounding errors is given back.
        atol = 5e-2
    options = {**case.options(), "precision": precision}
    expected, expected_logsumexp = helpers.attend(**{**clean, **options})
    out, logsumexp = helpers.attend(**{**dirty, **options})
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=atol)
    np.testing.assert_allclose(logsumexp, expected_logsumexp, rtol=1e-5, atol=1e-6)
    cotangents = ones_like_results(case)
    grads = helpers.gradients(cotangents, MAIN, **{**dirty, **options})
    expected_grads = helpers.gradients(cotangents, MAIN, **{**clean, **options})
    for name in MAIN:
        np.testing.assert_allclose(grads[name], expected_grads[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("where", MAIN)
def test_visible_nan_stays_in_its_rows(where: str, precision: str) -> None:
    """Causal: a NaN key or value makes exactly the rows that see it NaN; so do gradients."""
    case = cases.Case("seen", seqlen_q=11, seqlen_k=11, is_causal=True)
    clean = cases.make_inputs(case, F32)
    dirty = {n: x.copy() for n, x in clean.items()}
    head = 1 if where == "query" else 0
    dirty[where][1, 6, head, 3] = np.nan
    options = {**case.options(), "precision": precision}
    bad = np.zeros((2, 11, 6), bool)
    if where == "query":
        bad[1, 6, head] = True
    else:
        bad[1, 6:, :2] = True  # the two query heads of kv head 0
    for block_sizes in ((11, 11), (4, 3)) if where == "value" else ((4, 3),):
        out, logsumexp = helpers.in_blocks(block_sizes, **dirty, **options)
        np.testing.assert_array_equal(np.isnan(out), np.broadcast_to(bad[..., None], out.shape))
        np.testing.assert_array_equal(np.isnan(logsumexp), bad.transpose(0, 2, 1))
    cotangents = ones_like_results(case)
    grads = helpers.gradients(cotangents, MAIN, **dirty, **options)
    assert np.isfinite(grads["query"][~bad]).all()
    if where != "query":
        assert np.isnan(grads["query"][bad]).any(axis=-1).all()
    # Keys and values get what the clean rows alone would give them.
    spared = (
        np.where(bad[..., None], np.float32(0), cotangents[0]),
        np.where(bad.transpose(0, 2, 1), np.float32(0), cotangents[1]),
    )
    zeroed = {n: np.where(np.isfinite(x), x, np.float32(0)) for n, x in dirty.items()}
    expected = helpers.gradients(spared, MAIN, **zeroed, **options)
    for name in ("key", "value"):
        np.testing.assert_allclose(grads[name], expected[name], rtol=1e-4, atol=1e-5)


def test_fully_masked_row_is_not_the_mean_of_values() -> None:
    """jax.nn averages the values of such a row; the rule here is 0."""
    inputs = cases.make_inputs(cases.Case("b31", seqlen_q=4, seqlen_k=6, head_dim=16), F32)
    mask = np.ones((2, 6, 4, 6), bool)
    mask[:, :, 2] = False
    out, _ = helpers.attend(**inputs, mask=mask, precision="native")
    theirs = np.asarray(jax.nn.dot_product_attention(**inputs, mask=jnp.asarray(mask)))
    assert (out[:, 2] == 0).all()
    assert (theirs[:, 2] != 0).all()
    np.testing.assert_allclose(out[:, [0, 1, 3]], theirs[:, [0, 1, 3]], rtol=1e-4, atol=1e-6)
