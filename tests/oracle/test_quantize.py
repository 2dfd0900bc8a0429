"""quantize and dequantize, exact rounding, the butterfly, and the quantised operands."""

from __future__ import annotations

from typing import Any

import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tolerances
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import helpers
from oracle import numpy_reference as oracle

import jax_fa3
from jax_fa3 import _fp8_model, _quantize, _reference

F32 = np.dtype(np.float32)
FORMATS = ["e4m3", "e5m2"]
_round = jax.jit(_quantize.round_to_format, static_argnums=1)


@pytest.mark.parametrize("format_name", FORMATS)
def test_rounding_of_every_float8_and_what_lies_between(format_name: str) -> None:
    """Grid points stay, midpoints go to even, neighbours of midpoints to the nearer side."""
    dtype, limit = oracle.FORMATS[format_name]
    grid = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    grid = np.unique(grid[np.isfinite(grid)])
    middle = (grid[1:] + grid[:-1]) / 2
    x = np.concatenate([grid, middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)])
    np.testing.assert_array_equal(_round(x, format_name), oracle.cast(x, format_name))
    beyond = np.array([limit * 1.03, 1e30, np.inf, -np.inf, np.nan], np.float32)
    expected = np.array([limit, limit, limit, -limit, np.nan], np.float32)
    np.testing.assert_array_equal(_round(beyond, format_name), expected)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=8, max_size=8))
def test_rounding_of_any_float(values: list[float]) -> None:
    x = np.array(values, np.float32)
    for format_name in FORMATS:
        np.testing.assert_array_equal(_round(x, format_name), oracle.cast(x, format_name))


def test_powers_of_two_are_exact() -> None:
    n = np.arange(-126, 128)
    np.testing.assert_array_equal(_quantize.exact_exp2(jnp.asarray(n)), np.ldexp(np.float32(1), n))
    assert _quantize.exact_exp2(jnp.float32(-jnp.inf)) == 0


@pytest.mark.parametrize(("limit", "closed"), [(16.0, False), (448.0, True), (57344.0, True)])
def test_power_of_two_interval(limit: float, closed: bool) -> None:
    amax = np.array([1e-20, 0.3, 1, 7.99, 8, 16, 448, 449, 896, 57344, 6e4, 1e30], np.float32)
    e = np.asarray(_quantize.power_of_two_exponent(jnp.asarray(amax), limit, closed=closed))
    scaled = amax.astype(np.float64) * np.exp2(-e.astype(np.float64))
    assert (scaled <= limit).all()
    assert (scaled >= limit / 2).all()
    assert (scaled != (limit / 2 if closed else limit)).all()
    assert _quantize.power_of_two_exponent(jnp.float32(0), limit, closed=closed) == 0


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_butterfly(head_dim: int) -> None:
    """Bit-equal to the pairwise additions of the contract; close to the matrix product."""
    x = np.random.default_rng(head_dim).normal(size=(3, 5, head_dim)).astype(np.float32)
    got = np.asarray(jax.jit(_fp8_model.hadamard)(x))
    np.testing.assert_array_equal(got, oracle.butterfly(x))
    matrix = oracle.hadamard_matrix(head_dim)
    np.testing.assert_array_equal(matrix @ matrix.T, head_dim * np.eye(head_dim))
    np.testing.assert_allclose(got, x @ matrix.T, atol=1e-4)


def test_signs_are_the_constant() -> None:
    """Bits of the four words, least significant word first."""
    signs = _fp8_model.hadamard_signs(256)
    words = (0x9E3779B97F4A7C15, 0xF39CC0605CEDC834, 0x1082276BF3A27251, 0xF86C6A11D0C18E95)
    for d in (0, 1, 2, 63, 64, 130, 255):
        assert signs[d] == (-1.0 if words[d // 64] >> (d % 64) & 1 else 1.0)
    np.testing.assert_array_equal(signs, oracle.signs(256))


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize(
    ("granularity", "shape"),
    [("tensor", ()), ("head", (2, 6)), ("row", (2, 37, 6)), ("channel", (2, 6, 64))],
)
def test_quantize_and_back(granularity: Any, shape: tuple[int, ...], format_name: str) -> None:
    x = cases.make_inputs(cases.by_name("plain"))["query"]
    q = jax_fa3.quantize(x, granularity=granularity, dtype=format_name)
    dtype, limit = oracle.FORMATS[format_name]
    assert q.values.dtype == dtype
    assert q.values.shape == x.shape
    assert q.descale.shape == shape
    assert q.descale.dtype == np.float32
    # Every part with a factor of its own reaches the largest number of the format.
    axes = {"tensor": (0, 1, 2, 3), "head": (1, 3), "row": (3,), "channel": (1,)}[granularity]
    assert (np.abs(np.asarray(q.values, np.float32)).max(axis=axes) == limit).all()
    back = np.asarray(jax_fa3.dequantize(q))
    wide = x.astype(np.float32)
    step = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}[format_name]
    amax = np.abs(wide).max(axis=axes, keepdims=True)
    tiny = {"e4m3": 2.0**-10 / 448, "e5m2": 2.0**-17 / 57344}[format_name]
    assert (np.abs(back - wide) <= np.abs(wide) * step * 1.001 + amax * tiny).all()
    assert jax_fa3.dequantize(q, jnp.bfloat16).dtype == jnp.bfloat16


def test_quantize_for_grouped_query_heads() -> None:
    """num_heads_kv gives query_descale the shape attention asks for, and attention takes it."""
    inputs = cases.make_inputs(cases.by_name("plain"))
    parts = {
        "query": jax_fa3.quantize(inputs["query"], num_heads_kv=3),
        "key": jax_fa3.quantize(inputs["key"]),
        "value": jax_fa3.quantize(inputs["value"]),
    }
    assert all(p.descale.shape == (2, 3) for p in parts.values())
    arguments = {n: p.values for n, p in parts.items()}
    arguments |= {f"{n}_descale": p.descale for n, p in parts.items()}
    out, _ = helpers.attend(**arguments, precision="native")
    wide = {n: np.asarray(jax_fa3.dequantize(p)) for n, p in parts.items()}
    expected, _ = oracle.attention(**wide)
    np.testing.assert_allclose(out.astype(np.float32), expected, rtol=8e-3, atol=1e-3)


def test_quantize_edge_values() -> None:
    x = np.zeros((2, 3, 2, 4), np.float32)
    q = jax_fa3.quantize(x)
    np.testing.assert_array_equal(q.descale, np.ones((2, 2)))
    np.testing.assert_array_equal(np.asarray(q.values, np.float32), x)
    x[0, 1, 0, 2], x[0, 2, 0, 1], x[0, 0, 0, 0] = np.nan, -np.inf, 3.0
    values = np.asarray(jax_fa3.quantize(x).values, np.float32)
    assert values[0, 0, 0, 0] == 448
    np.testing.assert_array_equal(np.isnan(values), ~np.isfinite(x))
    tiny = np.full((1, 2, 1, 4), 1e-38, np.float32)
    assert np.isfinite(np.asarray(jax_fa3.dequantize(jax_fa3.quantize(tiny)))).all()
    assert jax_fa3.quantize(np.zeros((1, 0, 2, 4), np.float32)).descale.shape == (1, 2)


@pytest.mark.parametrize("granularity", ["tensor", "head", "row", "channel"])
def test_quantized_tensor_is_a_pytree(granularity: Any) -> None:
    x = np.random.default_rng(0).normal(size=(3, 2, 5, 4, 8)).astype(np.float32)
    both = jax.jit(jax.vmap(lambda y: jax_fa3.quantize(y, granularity=granularity)))(x)
    back = np.asarray(jax.jit(jax_fa3.dequantize)(both))
    for i in range(3):
        one = jax_fa3.quantize(x[i], granularity=granularity)
        np.testing.assert_array_equal(np.asarray(both.values[i], F32), np.asarray(one.values, F32))
        np.testing.assert_array_equal(back[i], jax_fa3.dequantize(one))
    leaves, tree = jax.tree.flatten(both)
    assert len(leaves) == 2
    assert jax.tree.unflatten(tree, leaves).granularity == granularity


def test_presets() -> None:
    accurate = jax_fa3.Quantization.accurate()
    assert accurate == jax_fa3.Quantization()
    assert hash(accurate) == hash(jax_fa3.Quantization(smooth_key=np.bool_(True)))
    assert jax_fa3.Quantization.fast().softmax == "linear"
    plain = jax_fa3.Quantization.per_tensor()
    assert {plain.query, plain.key, plain.value} == {"tensor"}
    assert not any((plain.smooth_key, plain.center_value, plain.hadamard))
    block = jax_fa3.Quantization.block()
    assert (block.query, block.key, block.value) == ("block", "block", "head")


@pytest.mark.parametrize(
    ("name", "format_name", "dtype"),
    [
        *(("plain", "e4m3", F32), ("d128", "e4m3", cases.BFLOAT16), ("d128", "e5m2", F32)),
        *(("many_rows", "e4m3", cases.FLOAT16), ("odd_dim", "e4m3", cases.BFLOAT16)),
        *(
            ("plain", "e4m3", cases.E4M3),
            ("d128", "e4m3", cases.E5M2),
            ("d128", "e5m2", cases.E5M2),
        ),
    ],
)
def test_operands_against_numpy(name: str, format_name: Any, dtype: np.dtype) -> None:
    case = cases.by_name(name)
    inputs = cases.make_inputs(case, dtype)
    quantization = jax_fa3.Quantization(dtype=format_name)
    got = helpers.quantized(**inputs, quantization=quantization)
    rotate = case.head_dim in (64, 128, 256)
    expected = oracle.quantize(**inputs, format_name=format_name, rotate=rotate)
    for field in ("query", "query_descale", "key_descale", "value_descale"):
        g, e = getattr(got, field), getattr(expected, field)
        assert g.shape == e.shape
        np.testing.assert_allclose(g, e, rtol=1e-6, err_msg=field)
    for field in ("query_shift", "value_mean"):
        np.testing.assert_allclose(
            getattr(got, field), getattr(expected, field), rtol=2e-5, atol=2e-6, err_msg=field
        )
    for field in ("key", "value"):
        # The means differ in the last float32 bit, which may move a code that stands on a tie.
        assert (getattr(got, field) != getattr(expected, field)).mean() < 2e-4, field
    # Codes lie on the grid of the format and inside the promised ranges.
    for field in ("query", "key", "value"):
        codes = getattr(got, field)
        np.testing.assert_array_equal(codes, oracle.cast(codes, format_name))
    assert np.abs(got.query).max() <= 16
    assert np.abs(got.key).max() <= 16


def test_long_sequences_take_their_scales_from_a_sample() -> None:
    """Of one key in eight; a head with a value beyond 32 times as much is scaled anew."""
    rng = np.random.default_rng(3)
    q = rng.standard_normal((1, 3, 2, 64))
    k, v = rng.standard_normal((2, 1, 1100, 2, 64))
    v += 3 * rng.standard_normal((1, 1, 2, 64))
    v[:, 5, 0, 7] = 20  # inside the room
    v[:, 12, 1, 7] = 2000  # outside
    inputs = {
        name: x.astype(cases.BFLOAT16) for name, x in (("query", q), ("key", k), ("value", v))
    }
    got, expected = helpers.quantized(**inputs), oracle.quantize(**inputs)
    np.testing.assert_allclose(got.value_descale, expected.value_descale, rtol=1e-5)
    np.testing.assert_allclose(got.value_mean, expected.value_mean, rtol=2e-5, atol=2e-6)
    assert (got.value != expected.value).mean() < 2e-4
    largest = np.abs(got.value).max(axis=(0, 1, 3))
    assert largest[0] < 448
    assert largest[1] == 448
    # As close to the values, and with their mean, as when all of them set the scales.
    value = inputs["value"].astype(np.float64)
    back = got.value.astype(np.float64) * got.value_descale[:, None] + got.value_mean[:, None]
    centred = value - value.mean(axis=1, keepdims=True)
    error, size = (np.square(x).sum(axis=(0, 1, 3)) for x in (back - value, centred))
    assert (np.sqrt(error / size) < 0.04).all()
    np.testing.assert_allclose(back.mean(axis=1), value.mean(axis=1), atol=1e-5)


def test_float8_codes_keep_their_value() -> None:
    """Powers of two only: codes times descale give back the input, 2^-14 of the maximum aside."""
    inputs = cases.make_inputs(cases.by_name("plain"), cases.E4M3)
    got = helpers.quantized(**inputs)
    scale = np.float32(64**-0.5 * np.log2(np.e))
    factor = np.repeat(inputs["query_descale"] * inputs["key_descale"] * scale, 2, axis=1)
    real = got.query * got.query_descale.transpose(0, 2, 1)[..., None]
    expected = inputs["query"].astype(np.float32) * factor[:, None, :, None]
    row_max = np.abs(expected).max(axis=-1, keepdims=True)
    assert (np.abs(real - expected) <= row_max * 2.0**-13).all()
    real = got.value * got.value_descale[:, None]
    expected = inputs["value"].astype(np.float32) * inputs["value_descale"][:, None, :, None]
    np.testing.assert_allclose(real, expected, rtol=1e-6)


def test_non_finite_rows_become_nan_codes() -> None:
    inputs = cases.make_inputs(cases.by_name("plain"), F32)
    inputs["query"][1, 4, 2, 0] = np.inf
    inputs["key"][0, 5, 1, 3] = np.nan
    inputs["value"][1, 7, 2, 9] = -np.inf
    got = helpers.quantized(**inputs)
    bad_q, bad_k = np.zeros((2, 37, 6), bool), np.zeros((2, 53, 3), bool)
    bad_q[1, 4, 2] = bad_k[0, 5, 1] = bad_k[1, 7, 2] = True
    np.testing.assert_array_equal(
        np.isnan(got.query), np.broadcast_to(bad_q[..., None], got.query.shape)
    )
    np.testing.assert_array_equal(
        np.isnan(got.key), np.broadcast_to(bad_k[..., None], got.key.shape)
    )
    assert got.value[1, 7, 2, 9] == 0
    assert all(np.isfinite(x).all() for x in got[1:3] + got[4:])


@pytest.mark.parametrize("granularity", ["row", "block", "head", "tensor"])
def test_granularity_of_query_and_key(granularity: Any) -> None:
    case = cases.Case("grains", seqlen_q=150, seqlen_k=300, head_dim=16)
    inputs = cases.make_inputs(case, F32)
    quantization = jax_fa3.Quantization(query=granularity, key=granularity, value="tensor")
    got = helpers.quantized(**inputs, quantization=quantization)
    for descale in (got.query_descale, got.key_descale):
        same_row = (descale == descale[..., :1]).all()
        same_block = (descale[..., :128] == descale[..., :1]).all()
        assert same_row or granularity in ("row", "block")
        assert same_block or granularity == "row"
        assert (np.unique(descale).size == 1) == (granularity == "tensor")
    assert np.unique(got.value_descale).size == 1
    assert 8 <= np.abs(got.key).max() <= 16


@pytest.mark.parametrize("value", ["channel", "head", "tensor"])
def test_granularity_of_value(value: Any) -> None:
    inputs = cases.make_inputs(cases.by_name("plain"), F32)
    got = helpers.quantized(**inputs, quantization=jax_fa3.Quantization(value=value))
    count = {"channel": 2 * 3 * 64, "head": 6, "tensor": 1}[value]
    assert np.unique(got.value_descale).size == count
    expected = oracle.attention(**inputs)[0]
    out, _ = helpers.attend(**inputs, quantization=jax_fa3.Quantization(value=value))
    tolerances.check_close(out, expected, tolerances.FP8_AGAINST_EXACT)


def test_padding_sets_no_scale() -> None:
    """Huge numbers past key_seqlens change neither means nor maxima."""
    inputs = cases.make_inputs(cases.by_name("key_seqlens"), F32)
    quantization = jax_fa3.Quantization(query="head", key="tensor")
    before = helpers.quantized(**inputs, quantization=quantization)
    for name in ("key", "value"):
        inputs[name] = inputs[name].copy()
        for b in range(2):
            inputs[name][b, inputs["key_seqlens"][b] :] = 3e30
    after = helpers.quantized(**inputs, quantization=quantization)
    for name in ("query_shift", "key_descale", "value_descale", "value_mean"):
        np.testing.assert_array_equal(getattr(before, name), getattr(after, name))


def test_linear_exponential_is_the_byte_rule() -> None:
    x = np.linspace(-20, 8, 5001).astype(np.float32)
    got = np.asarray(jax.jit(_reference.linear_exp2)(x))
    byte = np.rint(np.maximum(8 * x + 56, 0)).astype(np.uint8)
    np.testing.assert_array_equal(got, byte.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert _reference.linear_exp2(jnp.float32(-jnp.inf)) == 0
    assert jnp.isnan(_reference.linear_exp2(jnp.float32(jnp.nan)))
