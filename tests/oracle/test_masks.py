"""Who sees whom, read off the output: with equal logits and value = identity, the row's weights."""

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


def seen_by(seqlen_q: int, seqlen_k: int, *, precision: str = "native", **options: Any) -> Any:
    """bool [seqlen_q, seqlen_k] (or [batch, ...] when an option has a batch axis)."""
    arrays = [np.asarray(x) for x in options.values() if isinstance(x, np.ndarray)]
    batch = arrays[0].shape[0] if arrays else 1
    value = np.broadcast_to(np.eye(seqlen_k)[None, :, None], (batch, seqlen_k, 1, seqlen_k))
    out, logsumexp = helpers.attend(
        query=np.zeros((batch, seqlen_q, 1, 8), cases.FLOAT16),
        key=np.zeros((batch, seqlen_k, 1, 8), cases.FLOAT16),
        value=value.astype(cases.FLOAT16),
        precision=precision,
        **options,
    )
    seen = out[:, :, 0] > 1e-3
    # Each row's weights are equal and logsumexp counts the keys.
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(logsumexp[:, 0], np.log(seen.sum(-1)), atol=1e-6)
    return seen if arrays else seen[0]


def picture(seen: np.ndarray) -> list[str]:
    return ["".join("x" if s else "." for s in row) for row in seen]


def test_window_is_inclusive() -> None:
    """(3, 2) spans i - 3 .. i + 2."""
    assert picture(seen_by(10, 10, window_size=(3, 2))) == [
        "xxx.......",
        "xxxx......",
        "xxxxx.....",
        "xxxxxx....",
        ".xxxxxx...",
        "..xxxxxx..",
        "...xxxxxx.",
        "....xxxxxx",
        ".....xxxxx",
        "......xxxx",
    ]


def test_window_follows_the_diagonal() -> None:
    """With seqlen_q != seqlen_k the window moves by seqlen_k - seqlen_q unless top_left."""
    assert picture(seen_by(2, 5, window_size=(1, 0))) == ["..xx.", "...xx"]
    assert picture(seen_by(2, 5, window_size=(1, 0), causal_alignment="top_left")) == [
        "x....",
        "xx...",
    ]
    assert picture(seen_by(5, 2, window_size=(0, 1))) == ["..", "..", "x.", "xx", ".x"]
    last = seen_by(1, 800, window_size=(200, None))
    assert np.flatnonzero(last[0]).tolist() == list(range(599, 800))


def test_window_of_self_returns_value() -> None:
    inputs = cases.make_inputs(cases.Case("self", seqlen_q=7, seqlen_k=7, head_dim=16))
    for precision in ("native", "fp8"):
        out, _ = helpers.attend(**inputs, window_size=(0, 0), precision=precision)
        expected = np.repeat(inputs["value"], 2, axis=2).astype(np.float32)
        limit = tolerances.NATIVE_BF16 if precision == "native" else tolerances.FP8_AGAINST_EXACT
        tolerances.check_close(out, expected, limit)


@pytest.mark.parametrize("window", [(99, 99), (2**31 - 1, 2**40), (None, None), [99, np.int64(99)]])
def test_oversized_window_is_none(window: Any) -> None:
    assert seen_by(6, 9, window_size=window).all()


def test_right_window_is_cut_by_causal() -> None:
    both = seen_by(6, 6, window_size=(1, 4), is_causal=np.bool_(True))
    np.testing.assert_array_equal(both, seen_by(6, 6, window_size=(1, 0)))


@pytest.mark.parametrize(("rows", "keys"), [(1, 4), (3, 128), (128, 3), (2, 5), (5, 2), (127, 129)])
def test_causal_alignment(rows: int, keys: int) -> None:
    """Both corners, against a triangle built by numpy."""
    corner = np.tri(rows, keys, keys - rows, bool)
    np.testing.assert_array_equal(seen_by(rows, keys, is_causal=True), corner)
    top_left = seen_by(rows, keys, is_causal=True, causal_alignment="top_left")
    np.testing.assert_array_equal(top_left, np.tri(rows, keys, 0, bool))


def test_top_left_is_what_jax_nn_does() -> None:
    case = cases.Case("jax_nn", seqlen_q=5, seqlen_k=8, head_dim=16)
    inputs = cases.make_inputs(case, np.float32)
    out, _ = helpers.attend(
        **inputs, is_causal=True, causal_alignment="top_left", precision="native"
    )
    expected = jax.nn.dot_product_attention(**inputs, is_causal=True)
    tolerances.check_close(out, expected, tolerances.NATIVE_F32)


def test_lengths_move_the_diagonal() -> None:
    """bottom_right ends at the last valid row and key of each example."""
    seen = seen_by(
        4, 6, is_causal=True, query_seqlens=np.array([4, 2]), key_seqlens=np.array([3, 5])
    )
    assert picture(seen[0]) == ["......", "x.....", "xx....", "xxx..."]
    assert picture(seen[1]) == ["xxxx..", "xxxxx.", "......", "......"]


def test_lengths_beyond_the_array_are_clipped() -> None:
    seen = seen_by(4, 6, key_seqlens=np.array([7, -1, 6]))
    assert seen[0].all()
    assert not seen[1].any()
    assert seen[2].all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_segments_equal_separate_runs(is_causal: bool) -> None:
    """Ids that end off tile edges; padding rows are 0."""
    lengths, seqlen = (70, 129, 85), 300
    ids = np.concatenate([np.full(n, i + 1) for i, n in enumerate(lengths)] + [np.full(16, -1)])
    case = cases.Case("packed", batch=1, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=16)
    inputs = cases.make_inputs(case, np.float32)
    segment_ids = {"query_segment_ids": ids[None], "key_segment_ids": ids[None]}
    out, logsumexp = helpers.attend(
        **inputs, **segment_ids, is_causal=is_causal, precision="native"
    )
    start = 0
    for n in lengths:
        part = {name: x[:, start : start + n] for name, x in inputs.items()}
        alone, alone_logsumexp = oracle.attention(**part, is_causal=is_causal)
        tolerances.check_close(out[:, start : start + n], alone, tolerances.NATIVE_F32)
        tolerances.check_logsumexp(
            logsumexp[:, :, start : start + n], alone_logsumexp, tolerances.NATIVE_F32
        )
        start += n
    assert (out[:, start:] == 0).all()
    assert np.isneginf(logsumexp[:, :, start:]).all()


def test_a_token_changes_only_its_segment() -> None:
    ids = np.array([[1, 1, 1, 2, 2, 3, -1, -1]])
    inputs = cases.make_inputs(cases.Case("tokens", batch=1, seqlen_q=8, seqlen_k=8, head_dim=16))
    segment_ids = {"query_segment_ids": ids, "key_segment_ids": ids}
    before, _ = helpers.attend(**inputs, **segment_ids, precision="native")
    for name in ("key", "value"):
        inputs[name] = inputs[name].copy()
        inputs[name][:, 3] = 7.0
    after, _ = helpers.attend(**inputs, **segment_ids, precision="native")
    changed = (before != after).any(axis=(0, 2, 3))
    np.testing.assert_array_equal(changed, ids[0] == 2)


def test_key_ids_may_differ_from_query_ids() -> None:
    seen = seen_by(
        3, 4, query_segment_ids=np.array([[5, 0, -1]]), key_segment_ids=np.array([[0, 5, -1, 5]])
    )
    assert picture(seen[0]) == [".x.x", "x...", "...."]


def test_mask_and_window_meet() -> None:
    mask = np.ones((1, 1, 4, 4), bool)
    mask[..., 2] = False
    assert picture(seen_by(4, 4, window_size=(1, 0), mask=mask)[0]) == [
        "x...",
        "xx..",
        ".x..",
        "...x",
    ]


def test_traced_lengths_and_scale_compile_once() -> None:
    inputs = cases.make_inputs(
        cases.Case("traced", seqlen_q=6, seqlen_k=9, head_dim=16), np.float32
    )
    arrays = {n: jnp.asarray(x) for n, x in inputs.items()}
    traces = []

    @jax.jit
    def run(arrays: Any, scale: Any, lengths: Any) -> Any:
        traces.append(1)
        operands, config = helpers.operands_and_config(
            **arrays, softmax_scale=scale, key_seqlens=lengths, precision="native"
        )
        return helpers._reference.attention(operands, config)[0]

    for scale, lengths in ((0.1, [9, 4]), (0.7, [2, 0])):
        out = run(arrays, scale, np.array(lengths, np.int32))
        expected, _ = oracle.attention(**inputs, softmax_scale=scale, key_seqlens=np.array(lengths))
        tolerances.check_close(out, expected, tolerances.NATIVE_F32)
    assert len(traces) == 1
