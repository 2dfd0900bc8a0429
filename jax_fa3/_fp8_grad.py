"""From gradients of the quantised numbers to those of query, key and softmax_scale.

A gradient passes straight through every rounding; what quantisation did before it (a factor and a
rotation of query, a rotation and a mean of key) is linear and undone here.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa3 import _fp8_model


class InputGradients(NamedTuple):
    """All float32; dscale is None where query was not given."""

    dquery: jax.Array  # [batch, seqlen_q, num_heads_q, head_dim]
    dkey: jax.Array  # [batch, seqlen_k, num_heads_kv, head_dim]
    dscale: jax.Array | None  # [batch]


def of_inputs(
    dquery: jax.Array,
    dkey: jax.Array,
    *,
    softmax_scale: jax.Array,
    rotated: bool,
    key_mean: jax.Array | None,
    row_sums: jax.Array | None,
    query: jax.Array | None,
) -> InputGradients:
    """Gradients of the inputs.

    Args:
      dquery, dkey: of the quantised query (in log2 units) and key, natural layout.
      softmax_scale: f32 [].
      rotated: whether query and key were rotated.
      key_mean: f32 [batch, num_heads_kv, head_dim], what was taken from key; None for nothing. Each
        logit holds query . key_mean as well.
      row_sums: f32 [batch, num_heads_q, seqlen_q], each row's sum of the gradients of its natural
        logits; read with key_mean.
      query: the input, where the gradient of softmax_scale is wanted.
    """
    # d query / factor: factor multiplies query in the logits, which are linear in it.
    per_factor = dquery.astype(jnp.float32)
    if rotated:
        per_factor = _rotate_back(dquery) / np.float32(dquery.shape[-1])
        dkey = _rotate_back(dkey)
    if key_mean is not None and row_sums is not None:
        mean = jnp.repeat(key_mean, dquery.shape[2] // key_mean.shape[1], axis=1)
        weight = row_sums * np.float32(1 / _fp8_model.LOG2_E)
        per_factor += jnp.swapaxes(weight, 1, 2)[..., None] * mean[:, None]
    dscale = None
    if query is not None:
        products = query.astype(jnp.float32) * per_factor
        dscale = jnp.sum(products, axis=(1, 2, 3)) * np.float32(_fp8_model.LOG2_E)
    factor = softmax_scale * np.float32(_fp8_model.LOG2_E)
    return InputGradients(per_factor * factor, dkey.astype(jnp.float32), dscale)


def _rotate_back(x: jax.Array) -> jax.Array:
    """Transpose of the rotation on the last axis, as one product; float32."""
    matrix = _fp8_model.hadamard(jnp.eye(x.shape[-1], dtype=jnp.float32))  # +1 and -1
    matrix = matrix.astype(x.dtype)
    back: jax.Array = jnp.einsum("...j,ij->...i", x, matrix, preferred_element_type=jnp.float32)
    return back
