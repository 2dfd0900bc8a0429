"""Each limit must reject zeros, out * 1.1, swapped heads, a mask off by one and a lost descale."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import pytest
import tolerances
from oracle import numpy_reference as oracle

LIMITS = {n: x for n, x in vars(tolerances).items() if isinstance(x, tolerances.Limit)}
CASE = cases.by_name("causal")


@pytest.fixture(scope="module")
def exact() -> tuple[dict[str, Any], Any, Any]:
    inputs = cases.make_inputs(CASE, cases.E4M3)
    out, logsumexp = oracle.attention(**inputs, **CASE.options())
    return inputs, out, logsumexp


def wrong_results(inputs: dict[str, Any], out: Any) -> dict[str, Any]:
    keys = inputs["key"].shape[1]
    lost = {n: x for n, x in inputs.items() if n != "value_descale"}
    lost_key = {**inputs, "key_descale": np.ones((2, 3), np.float32)}
    # One more key than causal allows: the diagonal moved by one.
    shifted = np.tri(CASE.seqlen_q, keys, keys - CASE.seqlen_q + 1, bool)
    return {
        "zeros": np.zeros_like(out),
        "times 1.1": out * 1.1,
        "heads swapped": out[:, :, ::-1],
        "batch swapped": out[::-1],
        "mask off by one": oracle.attention(**inputs, mask=shifted)[0],
        "value_descale lost": oracle.attention(**lost, **CASE.options())[0],
        "key_descale lost": oracle.attention(**lost_key, **CASE.options())[0],
        "one head wrong": np.concatenate([out[:, :, :-1], 1.1 * out[:, :, -1:]], axis=2),
        "a NaN": np.where(np.arange(out.shape[1])[:, None, None] == 3, np.nan, out),
    }


def accepts(actual: Any, expected: Any, limit: tolerances.Limit) -> bool:
    try:
        tolerances.check_close(actual, expected, limit)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_limit_rejects(name: str, exact: Any) -> None:
    inputs, out, logsumexp = exact
    limit = LIMITS[name]
    tolerances.check_close(out, out, limit)
    accepted = [
        what for what, wrong in wrong_results(inputs, out).items() if accepts(wrong, out, limit)
    ]
    assert accepted == []
    if limit.logsumexp == 0.0:
        return
    lost_key = {**inputs, "key_descale": np.ones((2, 3), np.float32)}
    for wrong in (
        np.zeros_like(logsumexp),
        logsumexp / np.log(2.0),  # base 2
        logsumexp[:, ::-1],
        oracle.attention(**lost_key, **CASE.options())[1],
    ):
        with pytest.raises(AssertionError):
            tolerances.check_logsumexp(wrong, logsumexp, limit)


def test_fp8_gradient_limit_rejects() -> None:
    """On gradients: a factor of 1.1, a sign, swapped heads or batches, a mask left out."""
    rng = np.random.default_rng(0)
    case = cases.Case("gradient", seqlen_q=11, seqlen_k=17, head_dim=16)
    inputs = cases.make_inputs(case, np.float32)
    dout = rng.normal(size=(2, 11, 6, 16))
    none = np.zeros((2, 6, 11))
    exact = oracle.attention_gradients(*inputs.values(), dout, none)
    for name in ("query", "key", "value"):
        g = exact[name]
        for wrong in (np.zeros_like(g), 1.1 * g, g[:, :, ::-1], g[::-1], -g):
            with pytest.raises(AssertionError):
                tolerances.check_close(wrong, g, tolerances.GRADIENT_FP8)
    causal = oracle.attention_gradients(*inputs.values(), dout, none, is_causal=True)
    with pytest.raises(AssertionError):
        tolerances.check_close(causal["key"], exact["key"], tolerances.GRADIENT_FP8)


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_limits_stand_above_what_was_measured(name: str) -> None:
    limit = LIMITS[name]
    assert 0 < limit.measured[0] < limit.rel_l2
    assert limit.measured[1] <= limit.logsumexp
    assert limit.reason


def test_oracle_gradients_against_differences() -> None:
    """The hand-derived gradients against central differences of the float64 oracle."""
    case = cases.Case("diff", batch=2, seqlen_q=3, seqlen_k=5, num_heads_q=4, num_heads_kv=2,
                      head_dim=4, features=("sinks", "bias"))  # fmt: skip
    inputs = {n: x.astype(np.float64) for n, x in cases.make_inputs(case, np.float32).items()}
    options = {"is_causal": True, "logits_soft_cap": 1.5}
    rng = np.random.default_rng(6)
    dout, dlse = rng.normal(size=inputs["query"].shape), rng.normal(size=(2, 4, 3))
    main = [inputs[n] for n in ("query", "key", "value")]
    extra = {n: inputs[n] for n in ("sinks", "bias")}
    grads = oracle.attention_gradients(*main, dout, dlse, **extra, **options, softmax_scale=0.4)

    def loss(scale: float = 0.4, **changed: Any) -> float:
        out, logsumexp = oracle.attention(**{**inputs, **changed}, **options, softmax_scale=scale)
        return float((out * dout).sum() + (logsumexp * dlse).sum())

    for name, x in inputs.items():
        direction = rng.normal(size=x.shape)
        up, down = (loss(**{name: x + s * direction}) for s in (1e-5, -1e-5))
        np.testing.assert_allclose((up - down) / 2e-5, (grads[name] * direction).sum(), rtol=1e-6)
    slope = (loss(0.4 + 1e-5) - loss(0.4 - 1e-5)) / 2e-5
    np.testing.assert_allclose(slope, grads["softmax_scale"], rtol=1e-6)
