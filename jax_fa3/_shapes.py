"""The dimension bundle, the static options and the checks of attention's inputs. No JAX here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from jax_fa3 import _option_checks as options
from jax_fa3._quantize import Quantization

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)
FLOAT8_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_E5M2 = np.dtype(ml_dtypes.float8_e5m2)
FLOAT8_DTYPES = (FLOAT8_E4M3, FLOAT8_E5M2)
SIXTEEN_BIT_DTYPES = (BFLOAT16, FLOAT16)
SERVED_DTYPES = (BFLOAT16, FLOAT16, FLOAT32, *FLOAT8_DTYPES)


class Dims(NamedTuple):
    """Sizes of one attention call after every leading batch axis is folded into `batch`."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int

    @property
    def is_empty(self) -> bool:
        """Whether a size is zero, so that the result is known without any computation."""
        return self.batch == 0 or self.seqlen_q == 0 or self.seqlen_k == 0


@dataclasses.dataclass(frozen=True)
class Config:
    """The static, hashable options of one attention call, already checked and normalised."""

    is_causal: bool
    causal_alignment: Literal["bottom_right", "top_left"]
    window_size: tuple[int | None, int | None] | None
    logits_soft_cap: float | None
    precision: Literal["fp8", "native"]
    quantization: Quantization
    deterministic: bool
    out_dtype: np.dtype[Any]


class Operands(NamedTuple):
    """The arrays of one attention call with one batch axis; None where the user gave nothing.

    query [batch, seqlen_q, num_heads_q, head_dim]; key [batch, seqlen_k, num_heads_kv, head_dim];
    value [batch, seqlen_k, num_heads_kv, head_dim_v]; softmax_scale float32 [], for the quantiser
    alone also [batch, 1];
    *_descale float32 [batch, num_heads_kv], None for inputs wider than 8 bits; sinks float32
    [num_heads_q]; segment ids int32 [batch, seqlen]; seqlens int32 [batch]; mask bool and bias
    float, both broadcastable to [batch, num_heads_q, seqlen_q, seqlen_k] and of rank 4.
    """

    query: Any
    key: Any
    value: Any
    softmax_scale: Any
    query_descale: Any = None
    key_descale: Any = None
    value_descale: Any = None
    sinks: Any = None
    query_segment_ids: Any = None
    key_segment_ids: Any = None
    query_seqlens: Any = None
    key_seqlens: Any = None
    mask: Any = None
    bias: Any = None


def leading_axes(query: Any) -> tuple[int, ...]:
    """The batch axes of query as the user gave it: () for rank 3."""
    return tuple(query.shape[:-3])


def dims_of(operands: Operands) -> Dims:
    """The sizes of checked rank-4 operands."""
    batch, seqlen_q, num_heads_q, head_dim = operands.query.shape
    seqlen_k, num_heads_kv, head_dim_v = operands.value.shape[1:]
    return Dims(batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim, head_dim_v)


def is_float8(array: Any) -> bool:
    """Whether the array holds one of the two float8 kinds served here."""
    return np.dtype(array.dtype) in FLOAT8_DTYPES


def uses_hadamard(config: Config, query: Any, key: Any) -> bool:
    """Whether query and key are rotated: on request, or "auto" with a head_dim of 64, 128, 256."""
    if is_float8(query) or is_float8(key):
        return False
    if config.quantization.hadamard == "auto":
        return query.shape[-1] in (64, 128, 256)
    return bool(config.quantization.hadamard)


def check_attention(
    function_name: str,
    query: Any,
    key: Any,
    value: Any,
    *,
    softmax_scale: Any = None,
    is_causal: Any = False,
    causal_alignment: Any = "bottom_right",
    window_size: Any = None,
    logits_soft_cap: Any = None,
    sinks: Any = None,
    query_segment_ids: Any = None,
    key_segment_ids: Any = None,
    query_seqlens: Any = None,
    key_seqlens: Any = None,
    mask: Any = None,
    bias: Any = None,
    precision: Any = "fp8",
    quantization: Any = None,
    query_descale: Any = None,
    key_descale: Any = None,
    value_descale: Any = None,
    return_logsumexp: Any = False,
    deterministic: Any = False,
    implementation: Any = None,
    spelled: Mapping[str, str] | None = None,
) -> tuple[Dims, Config]:
    """Checks everything a caller of attention can get wrong, from shapes and dtypes alone.

    Args:
      function_name: the public function, first word of every message.
      query, key, value: arrays or ShapeDtypeStructs as the user gave them, rank 3 or more.
      the rest: the options of `jax_fa3.attention`, as the user gave them.
      spelled: names of that function's own for some of them, for the messages.
    Returns: the sizes with all leading axes folded into one, and the normalised static options.
    Raises:
      ValueError: inputs contradict each other.   TypeError: wrong dtype or kind.
      NotImplementedError: valid, but served by no path.
    """
    name = function_name
    own = dict(spelled or {})
    dims = _check_shapes(name, query, key, value)
    _check_dtypes(name, query, key, value)
    leading = leading_axes(query)
    options.check_scalar(name, own.get("softmax_scale", "softmax_scale"), softmax_scale)
    checked_precision = options.check_choice(name, "precision", precision, ("fp8", "native"))
    checked_quantization = _check_quantization(name, quantization, precision, query, key)
    options.check_flag(name, "return_logsumexp", return_logsumexp)
    options.check_choice(name, "implementation", implementation, (None, "cuda", "xla"))
    descales = {"query": query_descale, "key": key_descale, "value": value_descale}
    for operand, array in {"query": query, "key": key, "value": value}.items():
        _check_descale(name, operand, array, descales[operand], leading, dims.num_heads_kv)
    _check_integers(
        name,
        {
            "query_segment_ids": (query_segment_ids, (*leading, dims.seqlen_q)),
            "key_segment_ids": (key_segment_ids, (*leading, dims.seqlen_k)),
            own.get("query_seqlens", "query_seqlens"): (query_seqlens, leading),
            own.get("key_seqlens", "key_seqlens"): (key_seqlens, leading),
        },
    )
    if (query_segment_ids is None) != (key_segment_ids is None):
        missing = "query_segment_ids" if query_segment_ids is None else "key_segment_ids"
        given = "key_segment_ids" if query_segment_ids is None else "query_segment_ids"
        raise ValueError(f"{name}: {missing} must be given together with {given}; got None.")
    _check_sinks(name, sinks, dims.num_heads_q)
    full = (*leading, dims.num_heads_q, dims.seqlen_q, dims.seqlen_k)
    _check_dense(name, "mask", mask, full)
    _check_dense(name, "bias", bias, full)
    config = Config(
        is_causal=options.check_flag(name, "is_causal", is_causal),
        causal_alignment=options.check_choice(
            name, "causal_alignment", causal_alignment, ("bottom_right", "top_left")
        ),
        window_size=options.check_window(name, own.get("window_size", "window_size"), window_size),
        logits_soft_cap=options.check_soft_cap(name, logits_soft_cap),
        precision=checked_precision,
        quantization=checked_quantization,
        deterministic=options.check_flag(name, "deterministic", deterministic),
        out_dtype=BFLOAT16 if is_float8(query) else np.dtype(query.dtype),
    )
    return dims, config


def _check_shapes(name: str, query: Any, key: Any, value: Any) -> Dims:
    for operand, array in {"query": query, "key": key, "value": value}.items():
        if not options.has_shape(array):
            raise TypeError(f"{name}: {operand} must be an array; got {type(array).__name__}.")
        options.dtype_of(name, operand, array)
        check_known_sizes(name, operand, array)
    if len(query.shape) < 3:
        raise ValueError(
            f"{name}: query must have shape [..., seqlen_q, num_heads_q, head_dim] (rank 3 or"
            f" more); got {options.show(query.shape)}."
        )
    leading = leading_axes(query)
    seqlen_q, num_heads_q, head_dim = query.shape[-3:]
    for what, size in {"num_heads_q": num_heads_q, "head_dim": head_dim}.items():
        if size == 0:
            raise ValueError(
                f"{name}: query must have a {what} of at least 1; got {options.show(query.shape)}."
            )
    key_rule = [*leading, "seqlen_k", "num_heads_kv", head_dim]
    if len(key.shape) != len(key_rule) or (*key.shape[:-3], key.shape[-1]) != (*leading, head_dim):
        raise ValueError(
            f"{name}: key must have shape {options.show(key_rule)} (batch and head_dim of query);"
            f" got {options.show(key.shape)}."
        )
    seqlen_k, num_heads_kv = key.shape[-3:-1]
    value_rule = [*leading, seqlen_k, num_heads_kv, "head_dim_v"]
    if len(value.shape) != len(value_rule) or value.shape[:-1] != key.shape[:-1]:
        raise ValueError(
            f"{name}: value must have shape {options.show(value_rule)} (all but head_dim_v of"
            f" key); got {options.show(value.shape)}."
        )
    if value.shape[-1] == 0:
        raise ValueError(
            f"{name}: value must have a head_dim_v of at least 1; got {options.show(value.shape)}."
        )
    if num_heads_kv == 0 or num_heads_q % num_heads_kv != 0:
        raise ValueError(
            f"{name}: key must have a num_heads_kv that divides num_heads_q = {num_heads_q};"
            f" got {num_heads_kv}."
        )
    batch = math.prod(leading)
    return Dims(batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim, value.shape[-1])


def check_known_sizes(name: str, operand: str, array: Any) -> None:
    """Batch and heads may be symbolic (`jax.export`); the loop over blocks needs the others."""
    shape = tuple(array.shape)
    for axis, what in ((-3, "seqlen"), (-1, "head_dim")):
        if len(shape) >= 3 and not isinstance(shape[axis], (int, np.integer)):
            raise NotImplementedError(
                f"{name}: {operand} must have a {what} known at trace time (only batch and heads"
                f" may be symbolic); got {options.show(shape)}."
            )
    if len(shape) >= 3 and shape[-3] >= 2**31:
        raise NotImplementedError(
            f"{name}: {operand} must have a seqlen below 2^31; got {options.show(shape)}."
        )


def _check_dtypes(name: str, query: Any, key: Any, value: Any) -> None:
    for operand, array in {"query": query, "key": key, "value": value}.items():
        if np.dtype(array.dtype) not in SERVED_DTYPES:
            raise TypeError(
                f"{name}: {operand} must be bfloat16, float16, float32, float8_e4m3fn or"
                f" float8_e5m2; got {array.dtype}."
            )
    if is_float8(key) != is_float8(value):
        raise TypeError(
            f"{name}: value must be float8 exactly when key is ({key.dtype}); got {value.dtype}."
        )
    if is_float8(key):
        if not is_float8(query) and np.dtype(query.dtype) not in SIXTEEN_BIT_DTYPES:
            raise TypeError(
                f"{name}: query must be bfloat16, float16 or float8 when key and value are"
                f" float8; got {query.dtype}."
            )
        return
    if is_float8(query):
        raise TypeError(
            f"{name}: key must be float8 when query is ({query.dtype}); got {key.dtype}."
        )
    for operand, array in {"key": key, "value": value}.items():
        if np.dtype(array.dtype) != np.dtype(query.dtype):
            raise TypeError(
                f"{name}: {operand} must have the dtype of query ({query.dtype}) or be float8;"
                f" got {array.dtype}."
            )


def _check_quantization(
    name: str, quantization: Any, precision: Any, query: Any, key: Any
) -> Quantization:
    if quantization is None:
        return Quantization.accurate()
    if not isinstance(quantization, Quantization):
        raise TypeError(
            f"{name}: quantization must be a jax_fa3.Quantization or None; got"
            f" {options.describe(quantization)}."
        )
    if precision == "native":
        raise ValueError(
            f'{name}: quantization must be None with precision="native"; got {quantization!r}.'
        )
    head_dim = query.shape[-1]
    if quantization.hadamard is True and (is_float8(query) or is_float8(key)):
        raise ValueError(
            f'{name}: quantization must have hadamard="auto" or False with float8 query or key;'
            " got hadamard=True."
        )
    if quantization.hadamard is True and head_dim & (head_dim - 1):
        raise ValueError(
            f"{name}: quantization must have hadamard=True only when head_dim is a power of two;"
            f' got head_dim {head_dim}. Pass hadamard="auto" or False.'
        )
    if quantization.hadamard is True and head_dim > 256:
        raise NotImplementedError(
            f"{name}: quantization with hadamard=True serves head_dim up to 256; got {head_dim}."
        )
    return quantization


def _check_descale(
    name: str, operand: str, array: Any, descale: Any, leading: tuple[int, ...], num_heads_kv: int
) -> None:
    argument = f"{operand}_descale"
    if not is_float8(array):
        if descale is not None:
            raise ValueError(
                f"{name}: {argument} must be None when {operand} is {array.dtype} (descales belong"
                f" to float8 inputs); got {options.describe(descale)}."
            )
        return
    full = (*leading, num_heads_kv)
    if descale is None:
        raise ValueError(
            f"{name}: {argument} must be given when {operand} is {array.dtype}: a scalar,"
            f" {options.show(full)} or [{num_heads_kv}]; got None."
        )
    shape, dtype = options.shape_and_dtype(name, argument, descale)
    options.check_size(name, argument, descale)
    if not options.is_number(descale) and (
        not options.is_floating(dtype) or dtype in FLOAT8_DTYPES
    ):
        raise TypeError(f"{name}: {argument} must be float32; got {dtype}.")
    if shape not in ((), full, (num_heads_kv,)):
        raise ValueError(
            f"{name}: {argument} must be a scalar or have shape {options.show(full)} (batch,"
            f" num_heads_kv) or [{num_heads_kv}]; got {options.show(shape)}."
        )


def _check_integers(name: str, arguments: Mapping[str, tuple[Any, tuple[int, ...]]]) -> None:
    for argument, (array, rule) in arguments.items():
        if array is None:
            continue
        shape, dtype = options.shape_and_dtype(name, argument, array)
        if not np.issubdtype(dtype, np.integer):
            raise TypeError(f"{name}: {argument} must be int32; got {dtype}.")
        is_ids = argument.endswith("ids")
        if shape != rule:
            what = "batch and seqlen" if is_ids else "batch axes of query"
            raise ValueError(
                f"{name}: {argument} must have shape {options.show(rule)} ({what}); got"
                f" {options.show(shape)}."
            )
        # Ids beyond int32 would meet others when cut; lengths beyond it only mean "all".
        if is_ids and isinstance(array, np.ndarray) and array.size:
            largest = max(int(array.max()), -int(array.min()) - 1)
            if largest > np.iinfo(np.int32).max:
                raise ValueError(f"{name}: {argument} must fit int32; got {largest}.")


def _check_sinks(name: str, sinks: Any, num_heads_q: int) -> None:
    if sinks is None:
        return
    shape, dtype = options.shape_and_dtype(name, "sinks", sinks)
    if not options.is_floating(dtype) or dtype in FLOAT8_DTYPES:
        raise TypeError(f"{name}: sinks must be float32; got {dtype}.")
    if shape != (num_heads_q,):
        raise ValueError(
            f"{name}: sinks must have shape [{num_heads_q}] (num_heads_q); got"
            f" {options.show(shape)}."
        )


def _check_dense(name: str, argument: str, array: Any, full: tuple[int, ...]) -> None:
    if array is None:
        return
    shape, dtype = options.shape_and_dtype(name, argument, array)
    if argument == "mask" and dtype != np.dtype(bool):
        raise TypeError(f"{name}: mask must be bool (True = attend); got {dtype}.")
    if argument == "bias" and (not options.is_floating(dtype) or dtype in FLOAT8_DTYPES):
        raise TypeError(f"{name}: bias must be bfloat16, float16 or float32; got {dtype}.")
    tail = full[len(full) - len(shape) :] if len(shape) <= len(full) else ()
    if len(tail) != len(shape) or any(a not in (1, b) for a, b in zip(shape, tail, strict=True)):
        raise ValueError(
            f"{name}: {argument} must be broadcastable to {options.show(full)} (batch,"
            f" num_heads_q, seqlen_q, seqlen_k); got {options.show(shape)}."
        )
