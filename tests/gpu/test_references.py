"""What the GPU tests compare with, and that their limits reject what is wrong; needs no GPU."""

from __future__ import annotations

import contextlib

import cases
import numpy as np
import pytest
import tolerances
from gpu import reference
from oracle import numpy_reference as oracle


@pytest.mark.parametrize("causal", [None, "bottom_right", "top_left"])
def test_references_agree_with_the_oracle(causal: str | None) -> None:
    """Whole matrices here, row by row in tests/oracle."""
    masks = {} if causal is None else {"is_causal": True, "causal_alignment": causal}
    for dtype, size in ((cases.BFLOAT16, (37, 29)), (cases.E4M3, (11, 150))):
        case = cases.Case("reference", seqlen_q=size[0], seqlen_k=size[1])
        inputs = cases.make_inputs(case, dtype)
        for got, expected in zip(
            reference.exact(inputs, causal=causal), oracle.attention(**inputs, **masks), strict=True
        ):
            np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-9)
        operands = reference.quantized(inputs)
        for linear in (False, True):
            got = reference.fp8_model(operands, causal=causal, linear=linear)
            expected = oracle.attention_fp8(operands, linear=linear, **masks)
            # A few P stand on a tie of float32 and float64.
            assert tolerances.rel_l2(got.out, expected[0]).max() < 2e-3
            np.testing.assert_allclose(got.logsumexp, expected[1], atol=5e-3)


@pytest.mark.parametrize("preset", ["accurate", "native"])
def test_kernel_limits_reject(preset: str) -> None:
    """Zeros, a factor of 1.1, swapped heads, a mask off by one, a lost descale, one bad head."""
    case = cases.by_name("causal")
    native = preset == "native"
    inputs = cases.make_inputs(case, cases.BFLOAT16 if native else cases.E4M3)
    limit = tolerances.KERNEL_NATIVE if native else tolerances.KERNEL_FP8
    options = {"causal": "bottom_right", "softmax_scale": None}
    exact = reference.exact(inputs, **options)
    model = reference.model(preset, inputs, **options)
    tolerances.check_kernel(model, exact, model, limit)
    out, logsumexp = model.out.astype(np.float64), model.logsumexp
    shifted = oracle.attention(**inputs, mask=np.tri(37, 53, 17, dtype=bool))
    wrong = {
        "zeros": (np.zeros_like(out), logsumexp),
        "times 1.1": (1.1 * out, logsumexp),
        "heads swapped": (out[:, :, ::-1], logsumexp),
        "batch swapped": (out[::-1], logsumexp),
        "mask off by one": shifted,
        "mask off by one in out only": (shifted[0], logsumexp),
        "one head wrong": (np.concatenate([out[:, :, :-1], 1.1 * out[:, :, -1:]], 2), logsumexp),
        "a NaN": (np.where(np.arange(37)[:, None, None] == 3, np.nan, out), logsumexp),
        "logsumexp zero": (out, np.zeros_like(logsumexp)),
        "logsumexp in base 2": (out, logsumexp / np.log(2)),
        "logsumexp of other heads": (out, logsumexp[:, ::-1]),
        "logsumexp +inf": (out, np.where(np.arange(37) == 3, np.inf, logsumexp)),
    }
    for lost in (name for name in reference.DESCALES if name in inputs):
        wrong[f"{lost} lost"] = reference.exact({**inputs, lost: 1.0}, **options)
    accepted = []
    for what, result in wrong.items():
        with contextlib.suppress(AssertionError):
            tolerances.check_kernel(result, exact, model, limit)
            accepted.append(what)
    assert accepted == []


def test_a_head_of_one_row_may_show_one_step_of_e4m3() -> None:
    """Of P beside 1: log(1 + 1/8) at most. Twice that is too much, and the message says where."""
    out = np.ones((2, 1, 3, 64))
    exact = model = (out, np.zeros((2, 3, 1)))
    step = np.zeros((2, 3, 1))
    step[1, 2] = np.log(1.125)
    tolerances.check_kernel((out, step), exact, model, tolerances.SOAK_FP8)
    with pytest.raises(AssertionError, match=r"logsumexp_rms 0\.294 .* at \(1, 2\)"):
        tolerances.check_kernel((out, 2.5 * step), exact, model, tolerances.SOAK_FP8)


def test_kernel_limits_reject_a_lost_empty_row() -> None:
    """An empty row that holds something, or whose logsumexp is finite or +inf."""
    inputs = cases.make_inputs(cases.Case("empty", seqlen_q=9, seqlen_k=5))
    exact = reference.exact(inputs, causal="bottom_right")
    model = reference.model("native", inputs, causal="bottom_right", softmax_scale=None)
    for number in (0.0, np.inf, np.nan):
        logsumexp = np.where(np.isneginf(model.logsumexp), number, model.logsumexp)
        with pytest.raises(AssertionError):
            tolerances.check_kernel((model.out, logsumexp), exact, model, tolerances.KERNEL_NATIVE)
    out = model.out.astype(np.float64)
    out[0, 0] = out[0, 8]
    with pytest.raises(AssertionError):
        tolerances.check_kernel((out, model.logsumexp), exact, model, tolerances.KERNEL_NATIVE)
