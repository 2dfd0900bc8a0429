"""`dot_product_attention`: the signature and meaning of `jax.nn.dot_product_attention`."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa3 import _attention, _option_checks
from jax_fa3._quantize import Quantization

_NAME = "dot_product_attention"
# Arguments of `attention` that have other names here.
_SPELLED = {
    "softmax_scale": "scale",
    "query_seqlens": "query_seq_lengths",
    "key_seqlens": "key_value_seq_lengths",
    "window_size": "local_window_size",
}


class DotProductOptions(TypedDict, total=False):
    """Keywords of `dot_product_attention` beside return_residual, for the overloads below."""

    scale: Any
    is_causal: bool
    query_seq_lengths: Any
    key_value_seq_lengths: Any
    local_window_size: int | tuple[int, int] | None
    implementation: Literal["xla", "cuda"] | None
    precision: Literal["fp8", "native"] | None
    quantization: Quantization | None


@overload
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = ...,
    mask: Any = ...,
    *,
    return_residual: Literal[False] = ...,
    **options: Unpack[DotProductOptions],
) -> jax.Array: ...


@overload
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = ...,
    mask: Any = ...,
    *,
    return_residual: Literal[True],
    **options: Unpack[DotProductOptions],
) -> tuple[jax.Array, jax.Array]: ...


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cuda"] | None = None,
    return_residual: bool = False,
    precision: Literal["fp8", "native"] | None = None,
    quantization: Quantization | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Drop-in for `jax.nn.dot_product_attention`, so that changing one import is enough.

    Three things differ from jax.nn:

    * A row that sees no key gives 0, with gradient 0 and residual -inf; jax.nn averages the values.
    * 16-bit inputs are computed in FP8 unless precision="native".
    * implementation "cudnn" is not accepted; "cuda" is the kernel of this package.

    Args:
      query: [batch, seqlen_q, num_heads_q, head_dim], or rank 3 without batch; bfloat16, float16 or
        float32.
      key, value: [batch, seqlen_k, num_heads_kv, head_dim] of query's dtype; num_heads_kv divides
        num_heads_q.
      bias: float, added to the scaled logits; broadcastable to [batch, num_heads_q, seqlen_q,
        seqlen_k].
      mask: bool of those shapes, True attends.
      scale: factor on the logits; None means head_dim ** -0.5.
      is_causal: row i sees keys <= i (top-left, also when seqlen_q != seqlen_k).
      query_seq_lengths, key_value_seq_lengths: int32 [batch]; what is beyond them is padding.
      local_window_size: (left, right), inclusive, around i; an int means both sides.
      implementation: None, "xla" or "cuda", as in `jax_fa3.attention`.
      return_residual: also return the logsumexp, [batch, seqlen_q, num_heads_q] of the input dtype,
        not differentiable (as in jax.nn).
      precision: "fp8" or "native" as in `jax_fa3.attention`; None means "fp8" for 16-bit inputs and
        "native" for float32.
      quantization: how FP8 is made, as in `jax_fa3.attention`.
    Returns: out like query; with return_residual (out, residual).
    Raises:
      ValueError, TypeError, NotImplementedError, RuntimeError: as `jax_fa3.attention`.
    """
    is_name = implementation is None or isinstance(implementation, str)
    if not is_name or implementation not in (None, "xla", "cuda"):
        raise ValueError(
            f'{_NAME}: implementation must be None, "xla" or "cuda"; got '
            f"{_option_checks.describe(implementation)}. "
            '"cuda" is the kernel of this package; jax.nn.dot_product_attention reaches cuDNN.'
        )
    _option_checks.check_flag(_NAME, "return_residual", return_residual)
    for argument, x in {"query": query, "key": key, "value": value}.items():
        _option_checks.check_convertible(_NAME, argument, x)
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    if query.ndim not in (3, 4):
        raise ValueError(
            f"{_NAME}: query must have shape [batch, seqlen_q, num_heads_q, head_dim] or "
            f"[seqlen_q, num_heads_q, head_dim]; got {_option_checks.show(query.shape)}."
        )
    if precision is None:
        precision = "native" if query.dtype == jnp.float32 else "fp8"
    window = local_window_size
    if isinstance(window, (int, np.integer)) and not isinstance(window, bool):
        window = (int(window), int(window))
    out, logsumexp = _attention.run(
        _NAME,
        query,
        key,
        value,
        arrays={
            "softmax_scale": scale,
            "query_seqlens": _lengths("query_seq_lengths", query_seq_lengths, query.ndim),
            "key_seqlens": _lengths("key_value_seq_lengths", key_value_seq_lengths, query.ndim),
            "mask": _dense("mask", mask, query.ndim),
            "bias": _dense("bias", bias, query.ndim),
        },
        static={
            "is_causal": is_causal,
            "causal_alignment": "top_left",
            "window_size": window,
            "precision": precision,
            "quantization": quantization,
        },
        return_logsumexp=return_residual,
        implementation=implementation,
        spelled=_SPELLED,
    )
    if not return_residual:
        return out
    residual = jnp.swapaxes(logsumexp, -1, -2).astype(out.dtype)
    return out, jax.lax.stop_gradient(residual)


def _lengths(argument: str, lengths: Any, rank: int) -> Any:
    """jax.nn wants [1] with rank-3 inputs; `attention` wants a scalar there."""
    if lengths is None:
        return None
    _option_checks.check_convertible(_NAME, argument, lengths)
    if not isinstance(lengths, jax.Array):
        lengths = np.asarray(lengths)  # jnp would wrap what int32 cannot hold
    return lengths.reshape(()) if rank == 3 and lengths.shape == (1,) else lengths


def _dense(argument: str, array: Any, rank: int) -> Any:
    """With rank-3 inputs a mask or bias may still have a batch axis of 1."""
    if array is None:
        return None
    _option_checks.check_convertible(_NAME, argument, array)
    array = jnp.asarray(array)
    return array[0] if rank == 3 and array.ndim == 4 and array.shape[0] == 1 else array
