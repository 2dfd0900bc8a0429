"""Attention and its gradients in float64 on the default device: what errors are taken to.

As many heads of keys as of queries; one head at a time, since float64 scores are large.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = np.ndarray[Any, Any]
_ROWS_AT_ONCE = 256


def attention(query: Any, key: Any, value: Any) -> Array:
    """[batch, seqlen_q, num_heads, head_dim], without a mask."""
    with jax.enable_x64(True):
        heads = [
            np.concatenate(
                [
                    np.asarray(_of_head(query[:, i : i + _ROWS_AT_ONCE], key, value, head))
                    for i in range(0, query.shape[1], _ROWS_AT_ONCE)
                ],
                axis=1,
            )
            for head in range(query.shape[2])
        ]
    return np.stack(heads, axis=2)


def gradients(
    query: Any, key: Any, value: Any, dout: Any, *, is_causal: bool
) -> tuple[Array, Array, Array]:
    """dquery, dkey and dvalue, each like its input; as many keys as queries."""
    with jax.enable_x64(True):
        heads = [
            _gradients_of_head(query, key, value, dout, head, is_causal=is_causal)
            for head in range(query.shape[2])
        ]
        dquery, dkey, dvalue = (np.stack(x, axis=2) for x in zip(*heads, strict=True))
    return dquery, dkey, dvalue


@jax.jit
def _of_head(query: jax.Array, key: jax.Array, value: jax.Array, head: int) -> jax.Array:
    return _formula(*_pick(head, query, key, value), is_causal=False)


@functools.partial(jax.jit, static_argnames="is_causal")
def _gradients_of_head(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    dout: jax.Array,
    head: int,
    *,
    is_causal: bool,
) -> Any:
    *operands, cotangent = _pick(head, query, key, value, dout)
    formula = functools.partial(_formula, is_causal=is_causal)
    return jax.vjp(formula, *operands)[1](cotangent)


def _pick(head: int, *arrays: jax.Array) -> list[jax.Array]:
    """One head of each in float64, [batch, seqlen, head_dim]."""
    return [
        jax.lax.dynamic_index_in_dim(x, head, axis=2, keepdims=False).astype(jnp.float64)
        for x in arrays
    ]


def _formula(q: jax.Array, k: jax.Array, v: jax.Array, *, is_causal: bool) -> jax.Array:
    logits = jnp.einsum("bqd,bkd->bqk", q, k, precision="highest") / math.sqrt(q.shape[-1])
    if is_causal:
        logits = jnp.where(jnp.tri(*logits.shape[1:], dtype=bool), logits, -jnp.inf)
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(logits), v, precision="highest")
