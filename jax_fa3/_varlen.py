"""`attention_varlen`: many sequences of different lengths, packed along one axis."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa3 import _attention, _compat, _option_checks, _partition, _shapes
from jax_fa3._quantize import Quantization

_NAME = "attention_varlen"


class VarlenOptions(_attention.SharedOptions, _attention.InputOptions, total=False):
    """Keywords of `attention_varlen` that have defaults, beside return_logsumexp."""


@overload
def attention_varlen(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    return_logsumexp: Literal[False] = ...,
    **options: Unpack[VarlenOptions],
) -> jax.Array: ...


@overload
def attention_varlen(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    return_logsumexp: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[jax.Array, jax.Array]: ...


@_compat.any_rank
def attention_varlen(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: Any = None,
    is_causal: bool = False,
    causal_alignment: Literal["bottom_right", "top_left"] = "bottom_right",
    window_size: tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    sinks: Any = None,
    precision: Literal["fp8", "native"] = "fp8",
    quantization: Quantization | None = None,
    query_descale: Any = None,
    key_descale: Any = None,
    value_descale: Any = None,
    return_logsumexp: bool = False,
    deterministic: bool = False,
    implementation: Literal["cuda", "xla"] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`attention` of every sequence of a packed batch on its own.

    Sequence i has rows cu_seqlens_q[i] : cu_seqlens_q[i + 1] of query and the like of key and
    value. Sequences of length 0 are allowed; rows that belong to no sequence are 0 (logsumexp
    -inf).

    Args:
      query: [total_q, num_heads_q, head_dim]; dtypes as in `attention`.
      key: [total_k, num_heads_kv, head_dim]; num_heads_kv divides num_heads_q.
      value: [total_k, num_heads_kv, head_dim_v].
      cu_seqlens_q, cu_seqlens_k: int32 [num_sequences + 1], first entry 0, not decreasing; traced
        allowed.
      max_seqlen_q, max_seqlen_k: at least the longest sequence; static. Rows and keys of a longer
        sequence beyond it would be ignored, so it is checked where the lengths are known.
      query_descale, key_descale, value_descale: a scalar, [num_heads_kv] or [num_sequences,
        num_heads_kv].
      the rest: as in `attention`, per sequence (the diagonal is that of the sequence).
    Returns: out [total_q, num_heads_q, head_dim_v]; with return_logsumexp also float32
      [num_heads_q, total_q].
    Raises:
      ValueError, TypeError: as `attention`; the lengths contradict each other or the arrays.
      NotImplementedError: implementation="cuda", which no kernel serves yet.
    """
    _option_checks.check_choice(_NAME, "implementation", implementation, (None, "cuda", "xla"))
    _option_checks.check_flag(_NAME, "return_logsumexp", return_logsumexp)
    if implementation == "cuda":
        raise NotImplementedError(
            f'{_NAME}: packed sequences are not served by the kernels; got implementation="cuda". '
            'Pass implementation="xla" or None.'
        )
    for argument, x in {"query": query, "key": key, "value": value}.items():
        _option_checks.check_convertible(_NAME, argument, x)
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    for argument, x in {"query": query, "key": key, "value": value}.items():
        if x.ndim != 3:
            raise ValueError(
                f"{_NAME}: {argument} must have shape [total, num_heads, head_dim]; "
                f"got {_option_checks.show(x.shape)}."
            )
        _shapes.check_known_sizes(_NAME, argument, x)
    query, key, value = (
        _whole(argument, x) for argument, x in {"query": query, "key": key, "value": value}.items()
    )
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"{_NAME}: key must have shape [total_k, num_heads_kv, {query.shape[2]}] (head_dim of "
            f"query); got {_option_checks.show(key.shape)}."
        )
    if value.shape[:2] != key.shape[:2]:
        raise ValueError(
            f"{_NAME}: value must have shape [{key.shape[0]}, {key.shape[1]}, head_dim_v] (all but "
            f"head_dim_v of key); got {_option_checks.show(value.shape)}."
        )
    max_q = _check_max("max_seqlen_q", max_seqlen_q)
    max_k = _check_max("max_seqlen_k", max_seqlen_k)
    starts_q, lengths_q = _lengths(
        "cu_seqlens_q", cu_seqlens_q, query.shape[0], "max_seqlen_q", max_q
    )
    starts_k, lengths_k = _lengths(
        "cu_seqlens_k", cu_seqlens_k, key.shape[0], "max_seqlen_k", max_k
    )
    if starts_q.shape != starts_k.shape:
        raise ValueError(
            f"{_NAME}: cu_seqlens_k must have shape [{starts_q.shape[0] + 1}] (that of "
            f"cu_seqlens_q); got [{starts_k.shape[0] + 1}]."
        )
    out, logsumexp = _attention.run(
        _NAME,
        _unpack(query, starts_q, max_q),
        _unpack(key, starts_k, max_k),
        _unpack(value, starts_k, max_k),
        arrays={
            "softmax_scale": softmax_scale,
            "sinks": sinks,
            "query_seqlens": lengths_q,
            "key_seqlens": lengths_k,
            "query_descale": query_descale,
            "key_descale": key_descale,
            "value_descale": value_descale,
        },
        static={
            "is_causal": is_causal,
            "causal_alignment": causal_alignment,
            "window_size": window_size,
            "logits_soft_cap": logits_soft_cap,
            "precision": precision,
            "quantization": quantization,
            "deterministic": deterministic,
        },
        return_logsumexp=return_logsumexp,
        implementation="xla",
    )
    total = query.shape[0]
    packed = _pack(out, starts_q, lengths_q, total, 0)
    if not return_logsumexp:
        return packed
    rows = _pack(jnp.swapaxes(logsumexp, 1, 2), starts_q, lengths_q, total, -jnp.inf)
    return packed, jnp.swapaxes(rows, 0, 1)


def _whole(argument: str, x: jax.Array) -> jax.Array:
    """x; packed rows that are split are refused, as soon as it is known that they are."""
    _partition.refuse_sharded(_NAME, argument, x.shape, _compat.known_split(x))
    is_typed = _compat.in_manual_region() or _compat.is_explicit(x)
    if is_typed or not isinstance(x, jax.core.Tracer):
        return x
    return _attention.whole(_NAME, argument, x)


def _check_max(argument: str, value: Any) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(
            f"{_NAME}: {argument} must be an int known at trace time; got "
            f"{_option_checks.describe(value)}."
        )
    if not 0 <= int(value) < 2**31:
        raise ValueError(f"{_NAME}: {argument} must be at least 0 and below 2^31; got {value}.")
    return int(value)


def _lengths(
    argument: str, cu_seqlens: Any, total: int, limit_name: str, limit: int
) -> tuple[jax.Array, jax.Array]:
    """Start and length of every sequence, int32 [num_sequences]."""
    _option_checks.check_convertible(_NAME, argument, cu_seqlens)
    is_known = not isinstance(cu_seqlens, jax.core.Tracer)
    # Known bounds are checked before int32 could wrap them.
    bounds = np.asarray(cu_seqlens) if is_known else cu_seqlens
    if not jnp.issubdtype(bounds.dtype, jnp.integer):
        raise TypeError(f"{_NAME}: {argument} must be int32; got {bounds.dtype}.")
    if bounds.ndim != 1 or bounds.shape[0] == 0:
        raise ValueError(
            f"{_NAME}: {argument} must have shape [num_sequences + 1]; got"
            f" {_option_checks.show(bounds.shape)}."
        )
    if is_known and bounds.size > 1:
        wide = bounds.astype(object)  # Python's ints: differences of unsigned ones may be negative
        known = wide[1:] - wide[:-1]
        if known.min() < 0 or int(bounds[0]) != 0:
            raise ValueError(f"{_NAME}: {argument} must start at 0 and not decrease; got {bounds}.")
        if int(bounds[-1]) > total:
            raise ValueError(
                f"{_NAME}: {argument} must end at or before the {total} packed rows; "
                f"got {int(bounds[-1])}."
            )
        if known.max() > limit:
            raise ValueError(
                f"{_NAME}: {limit_name} must be at least the longest sequence ({known.max()}); "
                f"got {limit}."
            )
    narrow: jax.Array = jnp.asarray(bounds.astype(np.int32))
    return narrow[:-1], narrow[1:] - narrow[:-1]


def _unpack(packed: jax.Array, starts: jax.Array, length: int) -> jax.Array:
    """[total, ...] -> [num_sequences, length, ...]; what lies past a sequence is arbitrary."""
    if packed.shape[0] == 0:
        return jnp.zeros((starts.shape[0], length, *packed.shape[1:]), packed.dtype)
    index = starts[:, None] + jnp.arange(length, dtype=jnp.int32)
    return jnp.take(packed, index, axis=0, mode="clip")


def _pack(
    padded: jax.Array, starts: jax.Array, lengths: jax.Array, total: int, fill: float
) -> jax.Array:
    """Inverse of `_unpack`: rows of no sequence get fill."""
    sequences, length = padded.shape[:2]
    if 0 in (total, sequences, length):
        return jnp.full((total, *padded.shape[2:]), fill, padded.dtype)
    rows = jnp.arange(total, dtype=jnp.int32)
    # The last sequence that starts at or before the row: empty ones start with their successor.
    sequence = jnp.searchsorted(starts, rows, side="right").astype(jnp.int32) - 1
    offset = rows - starts[sequence]
    owned = offset < jnp.minimum(lengths[sequence], length)
    flat = padded.reshape(sequences * length, *padded.shape[2:])
    # A gather, which keeps heads where an explicit mesh has them; a scatter would name no sharding.
    picked = jnp.take(flat, sequence * length + offset, axis=0, mode="clip")
    return jnp.where(owned.reshape(total, *(1,) * (flat.ndim - 1)), picked, fill)
