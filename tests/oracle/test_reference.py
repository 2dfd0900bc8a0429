"""The XLA path against float64 NumPy: every case, every input kind."""

from __future__ import annotations

import cases
import jax
import ml_dtypes
import numpy as np
import pytest
import tolerances
from oracle import helpers
from oracle import numpy_reference as oracle

F32 = np.dtype(np.float32)
NAMES = [case.name for case in cases.CASES]


@pytest.mark.parametrize("name", NAMES)
def test_native_float32(name: str) -> None:
    case = cases.by_name(name)
    inputs = cases.make_inputs(case, F32)
    out, logsumexp = helpers.attend(**inputs, **case.options(), precision="native")
    expected, expected_logsumexp = oracle.attention(**inputs, **case.options())
    assert out.dtype == np.float32
    assert logsumexp.dtype == np.float32
    tolerances.check_close(out, expected, tolerances.NATIVE_F32)
    tolerances.check_logsumexp(logsumexp, expected_logsumexp, tolerances.NATIVE_F32)


@pytest.mark.parametrize("name", ["causal", "d128", "everything"])
@pytest.mark.parametrize(
    ("dtype", "limit"),
    [
        (cases.BFLOAT16, tolerances.NATIVE_BF16),
        (cases.FLOAT16, tolerances.NATIVE_F16),
        (cases.E4M3, tolerances.NATIVE_BF16),
        (cases.E5M2, tolerances.NATIVE_BF16),
    ],
)
def test_native_narrow_inputs(name: str, dtype: np.dtype, limit: tolerances.Limit) -> None:
    case = cases.by_name(name)
    inputs = cases.make_inputs(case, dtype)
    out, logsumexp = helpers.attend(**inputs, **case.options(), precision="native")
    expected, expected_logsumexp = oracle.attention(**inputs, **case.options())
    assert out.dtype == (dtype if dtype.itemsize == 2 else cases.BFLOAT16)
    tolerances.check_close(out, expected, limit)
    tolerances.check_logsumexp(logsumexp, expected_logsumexp, limit)


@pytest.mark.parametrize("precision", ["native", "fp8"])
@pytest.mark.parametrize("name", ["d128_causal", "everything"])
def test_result_does_not_depend_on_blocks(name: str, precision: str) -> None:
    case = cases.by_name(name)
    inputs = cases.make_inputs(case, F32)
    limit = tolerances.BLOCKS_NATIVE if precision == "native" else tolerances.BLOCKS_FP8
    arguments = {**inputs, **case.options(), "precision": precision}
    one = helpers.in_blocks((case.seqlen_q, case.seqlen_k), **arguments)
    out, logsumexp = helpers.in_blocks((16, 24), **arguments)
    tolerances.check_close(out, one[0], limit)
    tolerances.check_logsumexp(logsumexp, one[1], limit)


@pytest.mark.parametrize("dtype", [cases.BFLOAT16, cases.E4M3])
@pytest.mark.parametrize("precision", ["native", "fp8"])
def test_ranks_and_leading_axes(dtype: np.dtype, precision: str) -> None:
    """Rank 3 is one example; leading axes are a batch."""
    case = cases.Case("leading", batch=6, head_dim=16, features=("key_seqlens", "sinks", "bias"))
    inputs = cases.make_inputs(case, dtype)
    inputs["mask"] = np.arange(case.seqlen_k) % 5 != 2
    flat = helpers.attend(**inputs, precision=precision)
    shared = ("sinks", "mask")
    folded = {n: x if n in shared else x.reshape(2, 3, *x.shape[1:]) for n, x in inputs.items()}
    deep = helpers.attend(**folded, precision=precision)
    np.testing.assert_array_equal(deep[0].reshape(flat[0].shape), flat[0])
    np.testing.assert_array_equal(deep[1].reshape(flat[1].shape), flat[1])
    single = {n: x if n in shared else x[4] for n, x in inputs.items()}
    one = helpers.attend(**single, precision=precision)
    tolerances.check_close(one[0][None], flat[0][4:5], tolerances.FP8_AGAINST_MODEL_BF16)


@pytest.mark.parametrize("head_dim", [8, 16, 40, 72, 80, 96, 160, 192, 256])
def test_any_head_dim_keeps_its_own_scale(head_dim: int) -> None:
    """The default scale is that of the unpadded head_dim."""
    case = cases.Case("dims", seqlen_q=9, seqlen_k=21, head_dim=head_dim, head_dim_v=24)
    inputs = cases.make_inputs(case)
    expected, _ = oracle.attention(**inputs)
    out, _ = helpers.attend(**inputs, precision="native")
    tolerances.check_close(out, expected, tolerances.NATIVE_BF16)
    if head_dim in (8, 72, 96, 256):
        out, _ = helpers.attend(**inputs)
        tolerances.check_close(out, expected, tolerances.FP8_AGAINST_EXACT)


@pytest.mark.parametrize("scale", [1, np.float32(0.1), np.float64(0.1), ml_dtypes.bfloat16(0.25)])
def test_scale_types(scale: object) -> None:
    """Any real scalar."""
    inputs = cases.make_inputs(cases.Case("scales", seqlen_q=5, seqlen_k=7, head_dim=16), F32)
    expected, _ = oracle.attention(**inputs, softmax_scale=float(scale))
    out, _ = helpers.attend(**inputs, softmax_scale=scale, precision="native")
    tolerances.check_close(out, expected, tolerances.NATIVE_F32)


def test_the_lowest_bias_is_not_a_mask() -> None:
    """A row of the lowest float32 throughout averages the values; -inf would empty it."""
    inputs = cases.make_inputs(cases.by_name("plain"), np.dtype(np.float32))
    bias = np.zeros((37, 53), np.float32)
    bias[2] = np.finfo(np.float32).min
    out, logsumexp = helpers.attend(**inputs, bias=bias, precision="native")
    values = np.repeat(inputs["value"], 2, axis=2).mean(axis=1)
    np.testing.assert_allclose(out[:, 2], values, rtol=1e-4, atol=1e-5)
    assert np.isfinite(logsumexp).all()


@pytest.mark.parametrize(
    ("mask_shape", "bias_shape"),
    [
        ((2, 1, 1, 53), (1, 6, 37, 53)),
        ((37, 53), (53,)),
        ((6, 37, 1), (2, 1, 37, 1)),
        ((1, 1, 1, 1), ()),
    ],
)
def test_mask_and_bias_broadcast(mask_shape: tuple, bias_shape: tuple) -> None:
    """Every broadcastable shape, with a float32 bias beside bfloat16 inputs."""
    inputs = cases.make_inputs(cases.by_name("plain"))
    rng = np.random.default_rng(5)
    mask = rng.random(mask_shape) < 0.8
    bias = rng.normal(size=bias_shape).astype(np.float32)
    expected, expected_logsumexp = oracle.attention(**inputs, mask=mask, bias=bias)
    out, logsumexp = helpers.attend(**inputs, mask=mask, bias=bias, precision="native")
    tolerances.check_close(out, expected, tolerances.NATIVE_BF16)
    tolerances.check_logsumexp(logsumexp, expected_logsumexp, tolerances.NATIVE_BF16)


@pytest.mark.parametrize("precision", ["native", "fp8"])
def test_x64_mode_changes_nothing(precision: str) -> None:
    case = cases.by_name("everything")
    inputs = cases.make_inputs(case)
    arguments = {**inputs, **case.options(), "precision": precision}
    expected = helpers.in_blocks(None, **arguments)
    with jax.enable_x64(True):
        got = helpers.in_blocks(None, **arguments)
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == e.dtype
        np.testing.assert_allclose(g.astype(F32), e.astype(F32), rtol=1e-2, atol=1e-5)
