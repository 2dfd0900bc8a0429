"""Float to (float8, descale): the options, the public pair quantize/dequantize, exact rounding.

The model of what the kernels quantise lives in `_fp8_model`; both use the helpers below.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_fa3 import _option_checks

QueryGranularity = Literal["row", "block", "head", "tensor"]
KeyGranularity = Literal["row", "block", "head", "tensor"]
ValueGranularity = Literal["channel", "head", "tensor"]
Granularity = Literal["tensor", "head", "row", "channel"]
Format = Literal["e4m3", "e5m2"]

FORMAT_DTYPES: dict[str, np.dtype[Any]] = {
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
# Per format: stored mantissa bits, exponent of the smallest normal number, largest value.
_MANTISSA_BITS = {"e4m3": 3, "e5m2": 2}
_MIN_EXPONENT = {"e4m3": -6, "e5m2": -14}
FORMAT_MAX = {"e4m3": 448.0, "e5m2": 57344.0}
# Below this, range / amax would overflow float32; such a channel is as good as zero.
SMALLEST_AMAX = 2.0**-100


@dataclasses.dataclass(frozen=True)
class Quantization:
    """How attention makes FP8 out of wider inputs. Frozen and hashable, so it may be a jit static.

    Every step keeps softmax exact up to rounding: subtracting the key mean shifts a row's logits
    by a constant, the value mean is added back, and a rotation of query and key cancels.

    Attributes:
      dtype: format of query, key and value; probabilities are always e4m3.
      query: one scale per "row", per "block" of 128 rows, per (batch, "head") or per "tensor".
      key: one scale per "block" of 128 keys, or "row" (per key), "head", "tensor".
      value: one scale per "channel" of each (batch, head), per (batch, "head") or per "tensor".
      smooth_key: subtract each channel's mean over the keys before rounding.
      center_value: the same for values; the mean is added to the output.
      hadamard: rotate query and key; "auto" does so for head_dim 64, 128 and 256.
      accumulate: "two_level" promotes partial sums to float32, "one_level" leaves them to the
        tensor cores. The XLA path always sums in float32.
      softmax: "exact" exponential, or "linear" between powers of two (faster, coarser).
    Raises:
      ValueError: a value outside the sets above.
    Source: rotation and scales per block from FlashAttention-3, arXiv:2407.08608; removing the key
      mean from SageAttention, arXiv:2410.02367; two-level sums from SageAttention2,
      arXiv:2411.10958.
    """

    dtype: Format = "e4m3"
    query: QueryGranularity = "row"
    key: KeyGranularity = "block"
    value: ValueGranularity = "channel"
    smooth_key: bool = True
    center_value: bool = True
    hadamard: bool | Literal["auto"] = "auto"
    accumulate: Literal["two_level", "one_level"] = "two_level"
    softmax: Literal["exact", "linear"] = "exact"

    def __post_init__(self) -> None:
        choices: dict[str, tuple[Any, ...]] = {
            "dtype": get_args(Format),
            "query": get_args(QueryGranularity),
            "key": get_args(KeyGranularity),
            "value": get_args(ValueGranularity),
            "smooth_key": (True, False),
            "center_value": (True, False),
            "hadamard": ("auto", True, False),
            "accumulate": ("two_level", "one_level"),
            "softmax": ("exact", "linear"),
        }
        for field, allowed in choices.items():
            given = getattr(self, field)
            if isinstance(given, np.bool_):
                given = bool(given)
                object.__setattr__(self, field, given)
            if not isinstance(given, (str, bool)) or given not in allowed:
                listed = " or ".join(f'"{c}"' if isinstance(c, str) else str(c) for c in allowed)
                raise ValueError(
                    f"Quantization: {field} must be {listed}; got {_option_checks.describe(given)}."
                )

    @classmethod
    def accurate(cls) -> Quantization:
        """The default: fine scales, key smoothing, centred values, rotation, exact exponential."""
        return cls()

    @classmethod
    def fast(cls) -> Quantization:
        """`accurate` with the piecewise linear exponential."""
        return cls(softmax="linear")

    @classmethod
    def per_tensor(cls) -> Quantization:
        """One scale per tensor and nothing else: what FA3 and cuDNN do."""
        return cls(
            query="tensor",
            key="tensor",
            value="tensor",
            smooth_key=False,
            center_value=False,
            hadamard=False,
        )

    @classmethod
    def block(cls) -> Quantization:
        """A scale per tile of 128 rows of query and key, per head of value, and nothing else."""
        return cls(
            query="block",
            key="block",
            value="head",
            smooth_key=False,
            center_value=False,
            hadamard=False,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """A float8 array and the factors that undo it: real value = values * descale. A pytree.

    Attributes:
      values: [..., seqlen, num_heads, head_dim], float8_e4m3fn or float8_e5m2.
      descale: float32; [] for "tensor", [..., num_heads (or num_heads_kv)] for "head",
        [..., seqlen, num_heads] for "row", [..., num_heads, head_dim] for "channel".
      granularity: which of these; static.
    """

    values: Any
    descale: Any
    granularity: Granularity = dataclasses.field(metadata={"static": True})


def quantize(
    x: Any,
    *,
    granularity: Granularity = "head",
    dtype: Any = "e4m3",
    num_heads_kv: int | None = None,
) -> QuantizedTensor:
    """Rounds to float8 with a factor that brings the largest magnitude to the format's maximum.

    Args:
      x: [..., seqlen, num_heads, head_dim], bfloat16, float16 or float32.
      granularity: what shares a factor: the whole "tensor", each (batch, "head"), each "row" of
        head_dim numbers, or each "channel" of a (batch, head). `attention` takes the first two.
      dtype: "e4m3" or "e5m2", or the float8 dtype itself.
      num_heads_kv: with granularity="head", the query heads of a group share one factor, so that
        the descale has the [..., num_heads_kv] shape that `attention` wants for query_descale.
    Returns: a QuantizedTensor. Casts saturate, all-zero parts have descale 1, non-finite numbers
      become NaN (and do not count for the maximum).
    Raises:
      TypeError: x is no array, or not bfloat16, float16 or float32.
      ValueError: rank, granularity, dtype or num_heads_kv breaks its rule.
    """
    format_name = _check_quantize(x, granularity, dtype, num_heads_kv)
    _option_checks.check_array("quantize", "x", x)
    x = jnp.asarray(x)
    heads = x.shape[-2]
    groups = heads if num_heads_kv is None else num_heads_kv
    wide = x.astype(jnp.float32)
    grouped = wide.reshape(*x.shape[:-2], groups, heads // groups, x.shape[-1])
    axes: dict[str, tuple[int, ...]] = {
        "tensor": tuple(range(grouped.ndim)),
        "head": (-4, -2, -1),
        "row": (-2, -1),
        "channel": (-4, -2),
    }
    reduced = axes[granularity]
    finite = jnp.isfinite(grouped)
    amax = jnp.max(jnp.abs(jnp.where(finite, grouped, 0.0)), axis=reduced, keepdims=True, initial=0)
    descale, inverse = range_factors(amax, FORMAT_MAX[format_name])
    values = round_to_format(jnp.where(finite, grouped * inverse, jnp.nan), format_name)
    values = values.astype(FORMAT_DTYPES[format_name]).reshape(x.shape)
    return QuantizedTensor(values, jnp.squeeze(descale, reduced), granularity)


def dequantize(quantized: QuantizedTensor, dtype: Any = jnp.float32) -> jax.Array:
    """The real numbers behind a QuantizedTensor: values * descale.

    Args:
      quantized: what `quantize` returned.
      dtype: of the result; the product is float32.
    Returns: an array of the shape of quantized.values.
    Raises:
      TypeError: quantized is no QuantizedTensor or holds no arrays, or dtype is no float.
      ValueError: descale has not the shape that granularity asks for.
    """
    if not isinstance(quantized, QuantizedTensor):
        raise TypeError(
            f"dequantize: quantized must be a QuantizedTensor; got {type(quantized).__name__}."
        )
    dtype = _check_dequantize(quantized, dtype)
    for name, part in (("values", quantized.values), ("descale", quantized.descale)):
        if _option_checks.has_shape(part):
            _option_checks.check_array("dequantize", name, part)
    values, descale = quantized.values, quantized.descale
    heads = values.shape[-2]
    if quantized.granularity == "tensor":
        factor = descale.reshape(descale.shape + (1,) * (values.ndim - descale.ndim))
    elif quantized.granularity == "head":
        # Not jnp.repeat, which asks for a sharding on explicit meshes.
        group = heads // descale.shape[-1]
        grouped = jnp.broadcast_to(descale[..., None], (*descale.shape, group))
        factor = grouped.reshape(*descale.shape[:-1], heads)[..., None, :, None]
    elif quantized.granularity == "row":
        factor = descale[..., None]
    else:
        factor = descale[..., None, :, :]
    real: jax.Array = (values.astype(jnp.float32) * factor).astype(dtype)
    return real


def round_to_format(x: jax.Array, format_name: str) -> jax.Array:
    """Rounds float32 to the nearest float8 number (ties to even), saturating; NaN stays NaN.

    The result is float32, so that a cast to float8 is exact on every backend (XLA's own cast does
    not saturate, and may round twice).
    """
    mantissa_bits = _MANTISSA_BITS[format_name]
    min_exponent = _MIN_EXPONENT[format_name]
    limit = FORMAT_MAX[format_name]
    step = 2.0 ** (min_exponent - mantissa_bits)
    # Ties at the limit: clipping first keeps 448..464 at 448 and infinities in range.
    clipped = jnp.clip(x, -limit, limit)
    normal = jax.lax.reduce_precision(clipped, exponent_bits=8, mantissa_bits=mantissa_bits)
    subnormal = jnp.round(clipped * (1.0 / step)) * step
    return jnp.where(jnp.abs(clipped) < 2.0**min_exponent, subnormal, normal)


def exact_exp2(exponent: jax.Array) -> jax.Array:
    """2^exponent for integer-valued float32 or int32, exact; 0 below -126, 2^127 above 127."""
    clamped = jnp.clip(exponent, -127, 127).astype(jnp.int32)
    return jax.lax.bitcast_convert_type((clamped + 127) << 23, jnp.float32)


def power_of_two_exponent(amax: jax.Array, limit: float, *, closed: bool) -> jax.Array:
    """The int32 e that brings amax / 2^e under `limit`: into (limit/2, limit] when closed, else
    into [limit/2, limit). 0 for amax 0."""
    # amax = fraction * 2^exponent by its bits; a subnormal one ends at the clip in any case.
    # NOTE: not jnp.frexp, whose gradient trace breaks in shard_map with checks on (JAX 0.12).
    bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
    fraction = jax.lax.bitcast_convert_type((bits & 0x7FFFFF) | 0x3F000000, jnp.float32)
    exponent = (bits >> 23) - 126
    limit_fraction, limit_exponent = math.frexp(limit)
    over = fraction > limit_fraction if closed else fraction >= limit_fraction
    e = exponent - limit_exponent + over.astype(jnp.int32)
    # 2^e and 2^-e must both be float32 numbers.
    return jnp.where(amax > 0, jnp.clip(e, -126, 126), 0)


def range_factors(amax: jax.Array, limit: float) -> tuple[jax.Array, jax.Array]:
    """(descale, inverse) = (amax / limit, limit / amax); both 1 where amax is 0."""
    nonzero = amax > 0
    safe = jnp.where(nonzero, jnp.maximum(amax, SMALLEST_AMAX), limit)
    # Not safe / limit: XLA turns a division by a constant into this product, but only under jit.
    descale = safe * np.float32(1.0 / limit)
    return jnp.where(nonzero, descale, 1.0), jnp.where(nonzero, limit / safe, 1.0)


def _check_dequantize(quantized: QuantizedTensor, dtype: Any) -> Any:
    """The dtype of the result; the parts of a tensor made by hand may not fit together."""
    parts = {"values": quantized.values, "descale": quantized.descale}
    (shape, stored), (given, _) = (
        _option_checks.shape_and_dtype("dequantize", name, part) for name, part in parts.items()
    )
    if len(shape) < 3:
        raise ValueError(
            "dequantize: values must have shape [..., seqlen, num_heads, head_dim] (rank 3 or"
            f" more); got {_option_checks.show(shape)}."
        )
    if stored not in FORMAT_DTYPES.values():
        raise TypeError(f"dequantize: values must be float8_e4m3fn or float8_e5m2; got {stored}.")
    *lead, _, heads, dim = shape
    fits = {
        "tensor": given == shape[: min(len(given), len(lead))],
        "head": given[:-1] == tuple(lead) and (0, *given)[-1] > 0 and heads % given[-1] == 0,
        "row": given == shape[:-1],
        "channel": given == (*lead, heads, dim),
    }
    _check_granularity("dequantize", quantized.granularity)
    if not fits[quantized.granularity]:
        raise ValueError(
            f'dequantize: descale must have the shape that granularity "{quantized.granularity}"'
            f" asks for with values {_option_checks.show(shape)}; got {_option_checks.show(given)}."
        )
    try:
        found = np.dtype(object if dtype is None or _option_checks.has_shape(dtype) else dtype)
    except (TypeError, ValueError):
        found = np.dtype(object)
    if not _option_checks.is_floating(found) or found.itemsize > 8:
        raise TypeError(f"dequantize: dtype must be a float; got {_option_checks.describe(dtype)}.")
    return found


def _check_granularity(function: str, granularity: Any) -> None:
    _option_checks.check_choice(function, "granularity", granularity, get_args(Granularity))


def _check_quantize(x: Any, granularity: Any, dtype: Any, num_heads_kv: Any) -> str:
    if not _option_checks.has_shape(x):
        raise TypeError(f"quantize: x must be an array; got {type(x).__name__}.")
    wide = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32))
    if _option_checks.dtype_of("quantize", "x", x) not in wide:
        raise TypeError(f"quantize: x must be bfloat16, float16 or float32; got {x.dtype}.")
    shape = _option_checks.show(x.shape)
    if len(x.shape) < 3:
        raise ValueError(
            "quantize: x must have shape [..., seqlen, num_heads, head_dim] (rank 3 or more);"
            f" got {shape}."
        )
    if x.shape[-2] == 0 or x.shape[-1] == 0:
        what = "num_heads" if x.shape[-2] == 0 else "head_dim"
        raise ValueError(f"quantize: x must have a {what} of at least 1; got {shape}.")
    _check_granularity("quantize", granularity)
    if num_heads_kv is not None:
        if granularity != "head":
            raise ValueError(
                'quantize: num_heads_kv must be None unless granularity is "head"; got'
                f" {_option_checks.describe(num_heads_kv)}."
            )
        is_int = isinstance(num_heads_kv, (int, np.integer)) and not isinstance(num_heads_kv, bool)
        if not is_int or num_heads_kv < 1 or x.shape[-2] % num_heads_kv:
            raise ValueError(
                f"quantize: num_heads_kv must divide num_heads = {x.shape[-2]}; got"
                f" {_option_checks.describe(num_heads_kv)}."
            )
    for format_name, format_dtype in FORMAT_DTYPES.items():
        if isinstance(dtype, str) and dtype == format_name:
            return format_name
        if _option_checks.has_shape(dtype):  # an array has a dtype and is none
            continue
        try:
            if np.dtype(dtype) == format_dtype:
                return format_name
        except (TypeError, ValueError):
            continue
    raise ValueError(
        f'quantize: dtype must be "e4m3" or "e5m2" (or that float8 dtype); got'
        f" {_option_checks.describe(dtype)}."
    )
