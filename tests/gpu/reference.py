"""What the GPU tests compare with, and how they run the kernels.

The references are NumPy, whole matrices at a time, and compile nothing: `exact` in float64,
`native_model` and `fp8_model` with the roundings of the kernels. `tests/oracle` holds the same
formulas row by row; `test_references.py` compares the two without a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from oracle import numpy_reference

import jax_fa3

Array = np.ndarray[Any, Any]
IMPLEMENTATION = "cuda"
LOG2_E = np.float64(np.log2(np.e))
P_OFFSET = 8  # P is stored as 2^8 times the probability, kProbabilityOffset of the kernels
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
MAIN = ("query", "key", "value")
DESCALES = ("query_descale", "key_descale", "value_descale")

# Options of jax_fa3.attention by name: each is another kernel.
PRESETS: dict[str, dict[str, Any]] = {
    "accurate": {},
    "fast": {"quantization": jax_fa3.Quantization.fast()},
    "e5m2": {"quantization": jax_fa3.Quantization(dtype="e5m2")},
    "native": {"precision": "native"},
}


class Result(NamedTuple):
    """out [batch, seqlen_q, num_heads_q, head_dim], logsumexp [batch, num_heads_q, seqlen_q]."""

    out: Any
    logsumexp: Any


# ---- references --------------------------------------------------------------------------------


def visible(seqlen_q: int, seqlen_k: int, causal: str | None) -> Array:
    """bool [seqlen_q, seqlen_k]; causal is None, "bottom_right" or "top_left"."""
    if causal is None:
        return np.ones((seqlen_q, seqlen_k), bool)
    diagonal = seqlen_k - seqlen_q if causal == "bottom_right" else 0
    return np.tri(seqlen_q, seqlen_k, diagonal, dtype=bool)


def descale(inputs: dict[str, Any], name: str) -> Array:
    """[batch, num_heads_kv] float32 of a descale in any of its shapes."""
    batch, _, heads_kv, _ = inputs["key"].shape
    return np.broadcast_to(np.asarray(inputs.get(name, 1.0), np.float32), (batch, heads_kv))


def exact(
    inputs: dict[str, Any], *, causal: str | None = None, softmax_scale: float | None = None
) -> Result:
    """Float64 attention on the (dequantised) values of the inputs."""
    return _each_head(inputs, causal, softmax_scale, np.float64, lambda p: p)


def native_model(
    inputs: dict[str, Any], *, causal: str | None = None, softmax_scale: float | None = None
) -> Result:
    """`exact` in float32, with P and the output rounded to the inputs' 16-bit dtype."""
    dtype = inputs["query"].dtype
    out, logsumexp = _each_head(
        inputs, causal, softmax_scale, np.float32, lambda p: p.astype(dtype)
    )
    return Result(out.astype(dtype), logsumexp)


def _each_head(
    inputs: dict[str, Any],
    causal: str | None,
    softmax_scale: float | None,
    dtype: Any,
    rounded: Any,
) -> Result:
    query, key, value = (inputs[n].astype(dtype) for n in MAIN)
    b, sq, hq, d = query.shape
    sk, hk = key.shape[1:3]
    scale = d**-0.5 if softmax_scale is None else float(softmax_scale)
    factor = scale * descale(inputs, "query_descale").astype(np.float64)
    factor *= descale(inputs, "key_descale")
    v_factor = descale(inputs, "value_descale")
    seen = visible(sq, sk, causal)
    out, logsumexp = np.zeros((b, sq, hq, value.shape[-1]), dtype), np.full((b, hq, sq), -np.inf)
    some = seen.any(axis=1)
    for ib, ih in np.ndindex(b, hq):
        kv = ih // (hq // hk)
        logits = query[ib, :, ih] @ key[ib, :, kv].T * dtype(factor[ib, kv])
        logits[~seen] = -np.inf
        top = np.where(some, logits.max(axis=1, initial=-np.inf), 0)
        p = np.exp(logits - top[:, None])
        total = np.where(some, p.sum(axis=1), 1)
        p = rounded(p).astype(dtype)
        out[ib, :, ih] = p @ value[ib, :, kv] * dtype(v_factor[ib, kv]) / total[:, None]
        logsumexp[ib, ih] = np.where(some, top + np.log(total), -np.inf)
    return Result(out, logsumexp)


def fp8_noise(
    inputs: dict[str, Any],
    *,
    causal: str | None,
    softmax_scale: float | None,
    p_unit: float,
    operand_unit: float,
) -> tuple[Array, Array]:
    """(cost, errors) of [batch, num_heads_q]: the relative L2 error of out that rounding is
    expected to make, and of how many independent errors of one size it is the sum.

    The units are relative rms errors of P and of smoothed queries, keys and values; float8 inputs
    are taken as they are. One draw of a few keys may be far nearer by chance, or farther.
    """
    exact_out, logsumexp = exact(inputs, causal=causal, softmax_scale=softmax_scale)
    query, key, value = (inputs[n].astype(np.float64) for n in MAIN)
    q_unit, k_unit, v_unit = (operand_unit * (inputs[n].dtype.itemsize > 1) for n in MAIN)
    head_dim, group = query.shape[3], query.shape[2] // key.shape[2]
    scale = head_dim**-0.5 if softmax_scale is None else float(softmax_scale)
    factor = scale * descale(inputs, "query_descale") * descale(inputs, "key_descale")
    seen = visible(query.shape[1], key.shape[1], causal)
    cost, errors = np.zeros(query.shape[:3:2]), np.ones(query.shape[:3:2])
    for ib, ih in np.ndindex(cost.shape):
        kv = ih // group
        q, k, out = query[ib, :, ih], key[ib, :, kv], exact_out[ib, :, ih]
        v = value[ib, :, kv] * np.float64(descale(inputs, "value_descale")[ib, kv])
        level = np.where(seen.any(axis=1), logsumexp[ib, ih], 0)
        logits = np.where(seen, q @ k.T * factor[ib, kv] - level[:, None], -np.inf)
        sizes = (q**2).sum(axis=1)[:, None] * ((k - k.mean(axis=0)) ** 2).sum(axis=1) / head_dim
        of_p = p_unit**2 + (q_unit**2 + k_unit**2) * factor[ib, kv] ** 2 * sizes
        away = (v**2).sum(axis=1) - 2 * out @ v.T + (out**2).sum(axis=1)[:, None]
        of_v = v_unit**2 * ((v - v.mean(axis=0)) ** 2).sum(axis=1)
        squares = np.exp(2 * logits) * (of_p * np.maximum(away, 0) + of_v)
        cost[ib, ih] = np.sqrt(squares.sum()) / (np.linalg.norm(out) or 1)
        rows, fourths = squares.sum(axis=1), (squares**2).sum(axis=1)
        # P (v - out) of a row's keys add up to 0: one of them follows from the others.
        of_row = np.maximum(rows**2 / np.where(fourths > 0, fourths, 1) - 1, 1)
        errors[ib, ih] = max(rows.sum() ** 2 / ((rows**2 / of_row).sum() or 1), 1)
    return cost, errors


def quantized(
    inputs: dict[str, Any],
    *,
    softmax_scale: float | None = None,
    quantization: jax_fa3.Quantization | None = None,
) -> numpy_reference.Quantized:
    """What the kernels multiply."""
    steps = quantization or jax_fa3.Quantization()
    main = [inputs[n] for n in MAIN]
    descales = {name: descale(inputs, name) for name in DESCALES if name in inputs}
    return numpy_reference.quantize(
        *main,
        softmax_scale=softmax_scale,
        format_name=steps.dtype,
        rotate=steps.hadamard is not False,
        smooth_key=steps.smooth_key,
        center_value=steps.center_value,
        **descales,
    )


def fp8_model(
    operands: numpy_reference.Quantized,
    *,
    causal: str | None = None,
    linear: bool = False,
    out_dtype: Any = np.float32,
) -> Result:
    """Attention on quantised operands: P rounded to e4m3 below an integer base."""
    b, sq, hq, _ = operands.query.shape
    sk, hk = operands.key.shape[1:3]
    seen = visible(sq, sk, causal)
    some = seen.any(axis=1)
    excess = np.float32(0.05757 if linear else 0.0)
    out = np.zeros((b, sq, hq, operands.value.shape[-1]), np.float32)
    logsumexp = np.full((b, hq, sq), -np.inf)
    for ib, ih in np.ndindex(b, hq):
        kv = ih // (hq // hk)
        y = operands.query[ib, :, ih] @ operands.key[ib, :, kv].T
        y *= operands.query_descale[ib, ih][:, None] * operands.key_descale[ib, kv]
        y[~seen] = -np.inf
        base = np.where(some, np.ceil(y.max(axis=1, initial=-np.inf) - 0.75), 0)
        exponent = y - base[:, None].astype(np.float32) + P_OFFSET
        if linear:
            codes = np.rint(np.maximum(8 * exponent + 56, 0)).astype(np.uint8)
            p = codes.view(E4M3).astype(np.float32)
        else:
            p = np.exp2(exponent).astype(E4M3).astype(np.float32)
        total = np.where(some, p.sum(axis=1, dtype=np.float64), 1)
        mean = np.where(some[:, None], operands.value_mean[ib, kv], 0)
        sums = p @ operands.value[ib, :, kv] / total[:, None]
        out[ib, :, ih] = sums * operands.value_descale[ib, kv] + mean
        level = (base - P_OFFSET - excess + np.log2(total) + operands.query_shift[ib, ih]) / LOG2_E
        logsumexp[ib, ih] = np.where(some, level, -np.inf)
    return Result(out.astype(out_dtype), logsumexp)


def model(preset: str, inputs: dict[str, Any], *, causal: str | None, softmax_scale: Any) -> Result:
    """The model of one of PRESETS."""
    return model_of(PRESETS[preset], inputs, causal=causal, softmax_scale=softmax_scale)


def model_of(
    options: dict[str, Any], inputs: dict[str, Any], *, causal: str | None, softmax_scale: Any
) -> Result:
    """The model of a call with these options, of which precision and quantization count."""
    if options.get("precision") == "native":
        return native_model(inputs, causal=causal, softmax_scale=softmax_scale)
    steps = options.get("quantization") or jax_fa3.Quantization()
    exact_steps = dataclasses.replace(steps, softmax="exact")  # quantised alike
    operands = _quantized_once(_Inputs(inputs), softmax_scale, exact_steps)
    dtype = inputs["query"].dtype
    dtype = dtype if dtype.itemsize == 2 else np.dtype(ml_dtypes.bfloat16)
    return fp8_model(operands, causal=causal, linear=steps.softmax == "linear", out_dtype=dtype)


class _Inputs:
    """Inputs as a cache key: the same dictionary, not equal numbers."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        self.inputs = inputs

    def __hash__(self) -> int:
        return id(self.inputs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Inputs) and self.inputs is other.inputs


@functools.lru_cache(maxsize=2)
def _quantized_once(
    inputs: _Inputs, scale: Any, steps: jax_fa3.Quantization
) -> numpy_reference.Quantized:
    return quantized(inputs.inputs, softmax_scale=scale, quantization=steps)


# ---- runs --------------------------------------------------------------------------------------


def attend(inputs: dict[str, Any], *, causal: str | None = None, **options: Any) -> Result:
    """The public function on the kernels; inputs by argument name."""
    main = [inputs[n] for n in MAIN]
    rest = {n: x for n, x in inputs.items() if n not in MAIN}
    if causal is not None:
        options = {**options, "is_causal": True, "causal_alignment": causal}
    out, logsumexp = jax_fa3.attention(
        *main, return_logsumexp=True, implementation=IMPLEMENTATION, **rest, **options
    )
    return Result(out, logsumexp)


@functools.cache
def _junk() -> Any:
    sizes = (2**25, 2**20, 2**16, 2**12, 2**8)
    return jax.jit(lambda: [jnp.full(n, jnp.nan, jnp.float32) for n in sizes]).lower().compile()


def poison() -> None:
    """Leaves NaN in the memory that the next call gets for its results and its workspace.

    XLA gives no access to the buffers of a custom call before it runs. Its allocator hands out the
    best fitting free chunk, and takes it from the low end: what was filled and freed last.
    """
    junk = jax.block_until_ready(_junk()())
    for buffer in junk:
        buffer.delete()


def run(fn: Any, *arguments: Any) -> Any:
    """fn(*arguments) under jit on poisoned memory; results as NumPy arrays."""
    arguments = jax.block_until_ready(jax.tree.map(jnp.asarray, arguments))
    compiled = jax.jit(fn).lower(*arguments).compile()
    poison()
    return jax.tree.map(np.asarray, compiled(*arguments))


def run_presets(
    presets: Any, inputs: dict[str, Any], *, causal: str | None = None, softmax_scale: Any = None
) -> dict[str, Result]:
    """`attend` for several presets in one program."""
    if softmax_scale is not None and not isinstance(softmax_scale, float):
        inputs = {**inputs, "softmax_scale": softmax_scale}  # an array: traced
        softmax_scale = None
    static = {} if softmax_scale is None else {"softmax_scale": softmax_scale}

    def every(arrays: dict[str, Any]) -> dict[str, Result]:
        return {n: attend(arrays, causal=causal, **static, **PRESETS[n]) for n in presets}

    return run(every, inputs)


def count_different(a: Any, b: Any) -> jax.Array:
    """Number of elements whose bits differ, over all leaves."""

    def bits(x: jax.Array) -> jax.Array:
        kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
        return jax.lax.bitcast_convert_type(x, kind)

    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return sum((jnp.sum(bits(x) != bits(y)) for x, y in pairs), start=jnp.int32(0))


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Both trees hold the same bits (NaN equals the same NaN)."""
    actual, expected = jax.tree.map(np.asarray, (actual, expected))
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == e.shape, (a.shape, e.shape)
        assert a.dtype == e.dtype, (a.dtype, e.dtype)
        kind = np.dtype(f"u{a.dtype.itemsize}")
        different = np.ascontiguousarray(a).view(kind) != np.ascontiguousarray(e).view(kind)
        if different.any():
            raise AssertionError(
                f"{different.mean():.2%} differ, first {np.argwhere(different)[0]}"
            )
