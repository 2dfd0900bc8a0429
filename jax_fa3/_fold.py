"""Folds the leading batch axes of checked inputs into one, and unfolds the results."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa3._option_checks import is_number
from jax_fa3._shapes import Operands, is_float8, leading_axes


def fold_operands(
    query: Any,
    key: Any,
    value: Any,
    *,
    softmax_scale: Any = None,
    sinks: Any = None,
    query_segment_ids: Any = None,
    key_segment_ids: Any = None,
    query_seqlens: Any = None,
    key_seqlens: Any = None,
    mask: Any = None,
    bias: Any = None,
    query_descale: Any = None,
    key_descale: Any = None,
    value_descale: Any = None,
) -> Operands:
    """Turns inputs that passed `check_attention` into rank-4 Operands (None stays None).

    softmax_scale None becomes head_dim ** -0.5; scalar and [num_heads_kv] descales are broadcast
    to [batch, num_heads_kv]; mask and bias get rank 4 with axes of size 1 where they broadcast.
    """
    leading = leading_axes(query)
    num_heads_kv = key.shape[-2]
    if softmax_scale is None:
        softmax_scale = np.float32(query.shape[-1] ** -0.5)
    return Operands(
        query=_fold(query, leading),
        key=_fold(key, leading),
        value=_fold(value, leading),
        softmax_scale=jnp.asarray(softmax_scale).astype(jnp.float32),
        query_descale=_fold_descale(query, query_descale, leading, num_heads_kv),
        key_descale=_fold_descale(key, key_descale, leading, num_heads_kv),
        value_descale=_fold_descale(value, value_descale, leading, num_heads_kv),
        sinks=None if sinks is None else jnp.asarray(sinks).astype(jnp.float32),
        query_segment_ids=_fold_integers(query_segment_ids, leading),
        key_segment_ids=_fold_integers(key_segment_ids, leading),
        query_seqlens=_fold_integers(query_seqlens, leading),
        key_seqlens=_fold_integers(key_seqlens, leading),
        mask=_fold_dense(mask, leading),
        bias=_fold_dense(bias, leading),
    )


def as_operand(name: str, x: Any) -> Any:
    """x as an array: Python's numbers in float32, what counts and numbers tokens cut to int32 (a
    length beyond it means all of them)."""
    if is_number(x):
        return np.float32(x)
    if not name.endswith(("seqlens", "segment_ids")):
        return x
    info = np.iinfo(x.dtype)
    low, high = max(info.min, -(2**31)), min(info.max, 2**31 - 1)
    module: Any = np if isinstance(x, (np.ndarray, np.generic)) else jnp
    return module.clip(x, low, high).astype(np.int32)


def unfold(folded: jax.Array, leading: tuple[int, ...]) -> jax.Array:
    """[batch, ...] back to [*leading, ...]; leading () drops the axis of size 1."""
    unfolded: jax.Array = folded.reshape(*leading, *folded.shape[1:])
    return unfolded


def _fold(array: Any, leading: tuple[int, ...]) -> jax.Array:
    folded: jax.Array = jnp.asarray(array)
    if len(leading) != 1:
        folded = folded.reshape(math.prod(leading), *folded.shape[len(leading) :])
    return folded


def _fold_integers(array: Any, leading: tuple[int, ...]) -> jax.Array | None:
    return None if array is None else _fold(jnp.asarray(array).astype(jnp.int32), leading)


def _fold_descale(
    array: Any, descale: Any, leading: tuple[int, ...], num_heads_kv: int
) -> jax.Array | None:
    if not is_float8(array):
        return None
    full = (*leading, num_heads_kv)
    return _fold(jnp.broadcast_to(jnp.asarray(descale).astype(jnp.float32), full), leading)


def _fold_dense(array: Any, leading: tuple[int, ...]) -> jax.Array | None:
    if array is None:
        return None
    dense: jax.Array = jnp.asarray(array)
    dense = dense.reshape((1,) * (len(leading) + 3 - dense.ndim) + dense.shape)
    if all(size == 1 for size in dense.shape[: len(leading)]):
        return dense.reshape(1, *dense.shape[-3:])
    return _fold(jnp.broadcast_to(dense, (*leading, *dense.shape[-3:])), leading)
