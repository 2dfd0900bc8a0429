"""The numbers the FP8 kernels multiply, modelled in plain JAX in the natural layout.

Same steps in the same float32 order as the quantise kernel: rotation, means, powers of two for
query and key, a range factor for value. `_reference` multiplies them; tests compare them with the
kernel's images.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa3 import _masks
from jax_fa3._quantize import (
    FORMAT_MAX,
    SMALLEST_AMAX,
    Quantization,
    exact_exp2,
    power_of_two_exponent,
    range_factors,
    round_to_format,
)
from jax_fa3._shapes import Config, Dims, Operands, dims_of, is_float8, uses_hadamard

LOG2_E = math.log2(math.e)
# Rows of query and key that share a factor with granularity "block".
BLOCK = 128
# Means, and the scales of a value's channels, come from one key in _KEY_SAMPLE of a sequence longer
# than _SHORT_SEQLEN. A value may then be _SAMPLE_ROOM times its channel's largest sampled one.
_KEY_SAMPLE, _SHORT_SEQLEN = 8, 1024
_SAMPLE_ROOM = 32.0
# Stages of the rotation.
_ROTATION_BITS = (0, 3, 4, 1, 2, 5, 6, 7)
# Fixed signs of the rotation, bit d for coordinate d, least significant word first.
_SIGN_WORDS = (0x9E3779B97F4A7C15, 0xF39CC0605CEDC834, 0x1082276BF3A27251, 0xF86C6A11D0C18E95)


def query_key_range(head_dim: int) -> float:
    """Largest stored magnitude of query and key: range^2 * head_dim stays inside half precision."""
    return 16.0 if head_dim <= 128 else 8.0


class QuantizedOperands(NamedTuple):
    """FP8 numbers (as float32, all on the format's grid) and what undoes them.

    logits_log2[row, key] = <query[row], key[key]> * query_descale * key_descale + query_shift
    value[key, channel] = value[key, channel] * value_descale + value_mean
    """

    query: jax.Array  # [batch, seqlen_q, num_heads_q, head_dim]; NaN rows for non-finite input
    query_descale: jax.Array  # [batch, num_heads_q, seqlen_q]
    query_shift: jax.Array  # [batch, num_heads_q, seqlen_q], log2 units; 0 without smoothing
    key: jax.Array  # [batch, seqlen_k, num_heads_kv, head_dim]; NaN rows for non-finite k or v
    key_descale: jax.Array  # [batch, num_heads_kv, seqlen_k], constant over granules of 128 keys
    value: jax.Array  # [batch, seqlen_k, num_heads_kv, head_dim_v]; 0 for non-finite input
    value_descale: jax.Array  # [batch, num_heads_kv, head_dim_v]
    value_mean: jax.Array  # [batch, num_heads_kv, head_dim_v]; 0 without centring


class EffectiveOperands(NamedTuple):
    """What attention multiplies: finite float32 arrays, in log2 units where they make logits.

    query [batch, seqlen_q, num_heads_q, head_dim], key and value alike with num_heads_kv.
    query_shift [batch, num_heads_q, seqlen_q] or None, value_mean [batch, num_heads_kv, head_dim_v]
    or None. query_bad bool [batch, num_heads_q, seqlen_q], key_bad bool [batch, num_heads_kv,
    seqlen_k]: where the input (for keys also the value) was not finite.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    query_shift: jax.Array | None
    value_mean: jax.Array | None
    query_bad: jax.Array
    key_bad: jax.Array


class _Prepared(NamedTuple):
    """Inputs before rounding: finite, rotated, centred; differentiable."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    query_shift: jax.Array | None
    value_mean: jax.Array | None
    factor: jax.Array  # [batch, num_heads_kv] or []
    value_factor: jax.Array | None  # [batch, num_heads_kv], float8 value only
    query_bad: jax.Array  # bool [batch, seqlen_q, num_heads_q]
    key_bad: jax.Array  # bool [batch, seqlen_k, num_heads_kv]: the key row itself
    value_bad: jax.Array  # bool [batch, seqlen_k, num_heads_kv]


def quantize_operands(operands: Operands, config: Config) -> QuantizedOperands:
    """Quantises checked rank-4 operands as the kernels do; see QuantizedOperands for the layout."""
    dims = dims_of(operands)
    prepared = jax.lax.stop_gradient(_prepare(operands, config, dims))
    query, query_descale, key, key_descale, value, value_descale = _codes(
        operands, config, dims, prepared
    )
    if is_float8(operands.query):
        query_descale = query_descale * _per_query_head(prepared.factor, dims)[:, None, :, None]
    if prepared.value_factor is not None:
        value_descale = value_descale * prepared.value_factor[:, None, :, None]
    batch, num_heads_q, num_heads_kv = dims.batch, dims.num_heads_q, dims.num_heads_kv
    value_shape = (batch, num_heads_kv, dims.head_dim_v)
    shift = prepared.query_shift
    mean = _corrected_mean(operands, dims, prepared, value * value_descale)
    if shift is None:
        shift = jnp.zeros((batch, num_heads_q, dims.seqlen_q), jnp.float32)
    if mean is None:
        mean = jnp.zeros(value_shape, jnp.float32)
    return QuantizedOperands(
        query=jnp.where(prepared.query_bad[..., None], jnp.nan, query),
        query_descale=_rows(query_descale, (batch, dims.seqlen_q, num_heads_q, 1)),
        query_shift=shift,
        key=jnp.where((prepared.key_bad | prepared.value_bad)[..., None], jnp.nan, key),
        key_descale=_rows(key_descale, (batch, dims.seqlen_k, num_heads_kv, 1)),
        value=value,
        value_descale=jnp.broadcast_to(value_descale[:, 0], value_shape),
        value_mean=mean,
    )


def effective_operands(operands: Operands, config: Config) -> EffectiveOperands:
    """The dequantised operands, with gradients that pass straight through every rounding."""
    dims = dims_of(operands)
    prepared = _prepare(operands, config, dims)
    query, query_descale, key, key_descale, value, value_descale = _codes(
        operands, config, dims, jax.lax.stop_gradient(prepared)
    )
    # Descales of query and key are powers of two, so these products are exact.
    query = straight_through(prepared.query, query * query_descale)
    key = straight_through(prepared.key, key * key_descale)
    value = straight_through(prepared.value, value * value_descale)
    if is_float8(operands.query):
        query = query * _per_query_head(prepared.factor, dims)[:, None, :, None]
    if prepared.value_factor is not None:
        value = value * prepared.value_factor[:, None, :, None]
    return EffectiveOperands(
        query,
        key,
        value,
        prepared.query_shift,
        _corrected_mean(operands, dims, prepared, value),
        jnp.swapaxes(prepared.query_bad, 1, 2),
        jnp.swapaxes(prepared.key_bad | prepared.value_bad, 1, 2),
    )


@jax.custom_jvp
def straight_through(x: jax.Array, rounded: jax.Array) -> jax.Array:
    """`rounded` exactly, with the derivative of x."""
    return rounded


@straight_through.defjvp
def _straight_through_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    return straight_through(*primals), tangents[0]


def logits_factor(operands: Operands) -> jax.Array:
    """softmax_scale * log2(e) * query_descale * key_descale: float32 [batch, num_heads_kv], or []
    where there are no descales and the examples share softmax_scale."""
    factor: jax.Array = operands.softmax_scale * np.float32(LOG2_E)
    if factor.ndim:
        dims = dims_of(operands)
        factor = jnp.broadcast_to(factor, (dims.batch, dims.num_heads_kv))
    for descale in (operands.query_descale, operands.key_descale):
        factor = factor if descale is None else factor * descale
    return factor


def finite_part(x: Any) -> tuple[jax.Array, jax.Array]:
    """(float32 x with non-finite numbers as 0, bool: rows of the last axis that held one)."""
    wide = jnp.asarray(x).astype(jnp.float32)
    finite = jnp.isfinite(wide)
    return jnp.where(finite, wide, 0.0), ~jnp.all(finite, axis=-1)


def hadamard(x: jax.Array) -> jax.Array:
    """Signs, then the unnormalised Sylvester transform of the last axis.

    Float32 additions in the kernel's order of the index bits: the first five come from its tensor
    cores, which may cut off other last bits of a sum than float32 does.
    """
    head_dim = x.shape[-1]
    y = x * hadamard_signs(head_dim)
    for half in (1 << bit for bit in _ROTATION_BITS if 1 << bit < head_dim):
        pairs = y.reshape(*x.shape[:-1], head_dim // (2 * half), 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = jnp.stack([a + b, a - b], axis=-2).reshape(x.shape)
    return y


def hadamard_signs(head_dim: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """float32 [head_dim] of +1 and -1."""
    bits = [(_SIGN_WORDS[d // 64] >> (d % 64)) & 1 for d in range(head_dim)]
    return np.array([-1.0 if bit else 1.0 for bit in bits], np.float32)


def _prepare(operands: Operands, config: Config, dims: Dims) -> _Prepared:
    quantization = config.quantization
    query, query_bad = finite_part(operands.query)
    key, key_bad = finite_part(operands.key)
    value, value_bad = finite_part(operands.value)
    valid = _masks.key_valid(operands, dims)
    factor = logits_factor(operands)
    query_factor = _per_query_head(factor, dims)[:, None, :, None]
    query_shift = mean = None
    if quantization.smooth_key and not is_float8(operands.key):
        mean = _sampled_mean(operands.key, valid)
        query_shift = jnp.einsum(
            "bqhgd,bhd->bhgq",
            (query * query_factor).reshape(
                dims.batch, dims.seqlen_q, dims.num_heads_kv, -1, dims.head_dim
            ),
            mean,
            precision=jax.lax.Precision.HIGHEST,
        ).reshape(dims.batch, dims.num_heads_q, dims.seqlen_q)
    value_mean = None
    value_factor = operands.value_descale
    if quantization.center_value and not is_float8(operands.value):
        value_mean = _sampled_mean(operands.value, valid)
        value = value - value_mean[:, None]
    rotates = uses_hadamard(config, operands.query, operands.key)
    if rotates:
        query = jnp.where(query_bad[..., None], 0.0, query)
        query = hadamard(query) * (query_factor / dims.head_dim)
        key = hadamard(key)
    elif not is_float8(operands.query):
        query = query * query_factor
    if mean is not None:
        key = key - (hadamard(mean) if rotates else mean)[:, None]
    # A rotated row with a non-finite number is non-finite throughout: it counts as 0.
    key = jnp.where(key_bad[..., None], 0.0, key) if rotates else key
    if valid is not None:
        # Padding may hold anything; it must not set a scale nor meet a zero gradient as infinity.
        key = jnp.where(valid[..., None], key, 0.0)
        value = jnp.where(valid[..., None], value, 0.0)
    # The derivative of the (discrete) choice of non-finite values is 0: bad rows stop here.
    value = jnp.where(jnp.isfinite(operands.value.astype(jnp.float32)), value, 0.0)
    return _Prepared(
        query,
        key,
        value,
        query_shift,
        value_mean,
        factor,
        value_factor,
        query_bad,
        key_bad,
        value_bad,
    )


def _codes(
    operands: Operands, config: Config, dims: Dims, prepared: _Prepared
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Codes and descales (without factors of float8 inputs), natural layout, size 1 axes kept."""
    quantization = config.quantization
    rows_valid = _masks.query_valid(operands, dims)
    for_amax = prepared.query
    if rows_valid is not None:
        for_amax = jnp.where(rows_valid[:, :, None, None], for_amax, 0.0)
    query_amax = _row_amax(for_amax, quantization.query)
    key_amax = _row_amax(prepared.key, quantization.key)
    value_axes = {"channel": (1,), "head": (1, 3), "tensor": (0, 1, 2, 3)}[quantization.value]
    value_amax = jnp.max(jnp.abs(prepared.value), axis=value_axes, keepdims=True)

    def power_of_two(x: jax.Array, amax: jax.Array, limit: float, closed: bool) -> Any:
        exponent = power_of_two_exponent(amax, limit, closed=closed)
        codes = round_to_format(x * exact_exp2(-exponent), quantization.dtype)
        return codes, exact_exp2(exponent)

    limit = query_key_range(dims.head_dim)
    query, query_descale = power_of_two(prepared.query, query_amax, limit, False)
    key, key_descale = power_of_two(prepared.key, key_amax, limit, False)
    limit = FORMAT_MAX[quantization.dtype]
    if is_float8(operands.value):
        value, value_descale = power_of_two(prepared.value, value_amax, limit, True)
    else:
        value, value_descale = _value_codes(prepared.value, value_amax, quantization)
    return query, query_descale, key, key_descale, value, value_descale


def _value_codes(
    value: jax.Array, amax: jax.Array, quantization: Quantization
) -> tuple[jax.Array, jax.Array]:
    """Codes and descales of 16-bit values, whose largest magnitudes are amax."""
    limit = FORMAT_MAX[quantization.dtype]

    def with_range(amax: jax.Array) -> tuple[jax.Array, jax.Array]:
        descale, inverse = range_factors(amax, limit)
        return round_to_format(value * inverse, quantization.dtype), descale

    if quantization.value != "channel" or value.shape[1] <= _SHORT_SEQLEN:
        return with_range(amax)
    sampled = jnp.max(jnp.abs(value[:, _sampled_keys(value.shape[1])]), axis=1, keepdims=True)
    codes, descale = with_range(jnp.maximum(sampled, SMALLEST_AMAX) * np.float32(_SAMPLE_ROOM))
    # A head with a value beyond the room is scaled for all its values.
    clips = jnp.any(jnp.abs(codes) == limit, axis=(1, 3), keepdims=True)
    all_codes, all_descale = with_range(amax)
    return jnp.where(clips, all_codes, codes), jnp.where(clips, all_descale, descale)


def _row_amax(x: jax.Array, granularity: str) -> jax.Array:
    """Largest magnitude of each granule, broadcastable to [batch, seqlen, heads, 1]."""
    magnitude = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    if granularity == "row":
        return magnitude
    if granularity == "head":
        return jnp.max(magnitude, axis=1, keepdims=True)
    if granularity == "tensor":
        return jnp.max(magnitude, keepdims=True)
    batch, seqlen, heads, _ = x.shape
    blocks = -(-seqlen // BLOCK)
    padded = jnp.pad(magnitude, ((0, 0), (0, blocks * BLOCK - seqlen), (0, 0), (0, 0)))
    per_block = jnp.max(padded.reshape(batch, blocks, BLOCK, heads, 1), axis=2)
    return jnp.repeat(per_block, BLOCK, axis=1)[:, :seqlen]


def _corrected_mean(
    operands: Operands, dims: Dims, prepared: _Prepared, value: jax.Array
) -> jax.Array | None:
    """What is added to the output: what value was centred by, and the mean of what rounding took.

    Rounding moves the mean of the centred values. With this the mean over all keys is exact, and
    what is left of the rounding errors averages out. `value`: rounded. Non-finite numbers are 0 in
    it and in prepared.value, so they have no error.
    """
    if prepared.value_mean is None:
        return None
    errors = prepared.value - value
    return prepared.value_mean + _mean(errors, _masks.key_valid(operands, dims))


def key_mean(key: Any) -> jax.Array:
    """What smoothing takes from [batch, seqlen_k, num_heads_kv, head_dim] keys without padding:
    float32 [batch, num_heads_kv, head_dim]; non-finite numbers count as 0."""
    return _sampled_mean(key, None)


def _sampled_mean(x: Any, valid: jax.Array | None) -> jax.Array:
    """Mean of the keys or values of a sample, where the sequence is long: any vector would do."""
    if x.shape[1] > _SHORT_SEQLEN:
        keys = _sampled_keys(x.shape[1])
        x = x[:, keys]
        valid = valid if valid is None or valid.shape[1] == 1 else valid[:, keys]
    return _mean(finite_part(x)[0], valid)


def _sampled_keys(seqlen_k: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Which keys are in the sample: in turn of every remainder, as data may have a period."""
    i = np.arange(-(-seqlen_k // _KEY_SAMPLE), dtype=np.int32)
    keys = _KEY_SAMPLE * i + i % _KEY_SAMPLE
    return keys[keys < seqlen_k]


def _mean(x: jax.Array, valid: jax.Array | None) -> jax.Array:
    """Mean over valid keys: [batch, seqlen_k, heads, dim] to [batch, heads, dim]; no gradient.

    A shift common to all keys leaves softmax as it is, so its derivative would cancel anyway.
    """
    x = jax.lax.stop_gradient(x)
    if valid is None:
        return jnp.sum(x, axis=1) / np.float32(max(x.shape[1], 1))
    valid = jnp.broadcast_to(valid, x.shape[:3])
    count = jnp.maximum(jnp.sum(valid, axis=1), 1).astype(jnp.float32)
    return jnp.sum(jnp.where(valid[..., None], x, 0.0), axis=1) / count[..., None]


def _per_query_head(factor: jax.Array, dims: Dims) -> jax.Array:
    """[batch, num_heads_kv] or [] to [batch, num_heads_q]."""
    factor = jnp.broadcast_to(factor, (dims.batch, dims.num_heads_kv))
    return jnp.repeat(factor, dims.num_heads_q // dims.num_heads_kv, axis=1)


def _rows(descale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[batch, seqlen, heads, 1] with broadcast axes to a full [batch, heads, seqlen]."""
    return jnp.swapaxes(jnp.broadcast_to(descale, shape)[..., 0], 1, 2)
