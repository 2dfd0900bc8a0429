"""`merge_attention`: the exact union of attention over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa3 import _compat
from jax_fa3._option_checks import check_array, dtype_of, has_shape, is_floating, show


@_compat.any_rank
def merge_attention(outs: Sequence[Any], logsumexps: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
    """Joins partial results over disjoint key sets into the result over all their keys.

    out = sum_i exp(logsumexp_i - logsumexp) * out_i,   logsumexp = log(sum_i exp(logsumexp_i)).

    Args:
      outs: one or more [..., seqlen_q, num_heads_q, head_dim_v] of one dtype.
      logsumexps: as many float32 [..., num_heads_q, seqlen_q], natural log, -inf for rows that saw
        no key; the out of such a row is ignored, whatever it holds.
    Returns: (out in the dtype of outs, logsumexp float32). Rows that saw no key in any part are 0
      and -inf. Sinks belong into one part only.
      Differentiable in every argument; gradients of empty parts are 0.
    Raises:
      ValueError: number or shapes of the parts do not fit together.
      TypeError: a part is no array, or of the wrong dtype.
    """
    outs, logsumexps = _parts("outs", outs), _parts("logsumexps", logsumexps)
    _check(outs, logsumexps)
    for index, pair in enumerate(zip(outs, logsumexps, strict=True)):
        for argument, part in zip(("outs", "logsumexps"), pair, strict=True):
            check_array("merge_attention", f"{argument}[{index}]", part)
    stacked = jnp.stack([jnp.asarray(part, jnp.float32) for part in logsumexps])
    largest = jax.lax.stop_gradient(jnp.max(stacked, axis=0))
    empty = jnp.isneginf(largest)
    largest = jnp.where(empty, 0.0, largest)
    present = ~jnp.isneginf(stacked)
    # Double where: the inner one keeps exp's derivative away from -inf.
    weights = jnp.where(present, jnp.exp(jnp.where(present, stacked - largest, 0.0)), 0.0)
    total = jnp.sum(weights, axis=0)
    safe_total = jnp.where(empty, 1.0, total)
    shares = weights / safe_total
    out = jnp.zeros((), jnp.float32)
    for index, part in enumerate(outs):
        clean = jnp.where(_by_row(present[index]), jnp.asarray(part).astype(jnp.float32), 0.0)
        out = out + _by_row(shares[index]) * clean
    logsumexp = jnp.where(empty, -jnp.inf, largest + jnp.log(safe_total))
    return out.astype(outs[0].dtype), logsumexp


def cotangents_of_part(
    part: tuple[jax.Array, jax.Array],
    out: jax.Array,
    logsumexp: jax.Array,
    dout: jax.Array,
    dlogsumexp: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Cotangents of one part (out, logsumexp) from those of the whole result, as merging gives
    them; of the part's dtypes.

    out = sum of share * part_out with share = exp(part_lse - logsumexp), so that
    d out / d part_lse = share * (part_out - out) and d logsumexp / d part_lse = share.
    """
    part_out, part_lse = part
    out, dout = out.astype(jnp.float32), dout.astype(jnp.float32)
    seen = ~jnp.isneginf(part_lse)
    share = jnp.where(seen, jnp.exp(jnp.where(seen, part_lse - logsumexp, 0.0)), 0.0)
    moved = jnp.swapaxes(jnp.sum(dout * (part_out.astype(jnp.float32) - out), axis=-1), -1, -2)
    dpart_lse = jnp.where(seen, share * (moved + dlogsumexp), 0.0)
    dpart_out = jnp.where(_by_row(seen), _by_row(share) * dout, 0.0)
    return dpart_out.astype(part_out.dtype), dpart_lse


def _by_row(x: jax.Array) -> jax.Array:
    """[..., heads, seqlen] as [..., seqlen, heads, 1]."""
    return jnp.swapaxes(x, -1, -2)[..., None]


def _parts(argument: str, given: Any) -> tuple[Any, ...]:
    is_single = has_shape(given) and len(given.shape) == 0
    if is_single or isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise TypeError(
            f"merge_attention: {argument} must be a sequence of arrays; got {type(given).__name__}."
        )
    return tuple(given)


def _check(outs: tuple[Any, ...], logsumexps: tuple[Any, ...]) -> None:
    name = "merge_attention"
    if len(outs) == 0:
        raise ValueError(f"{name}: outs must hold at least one part; got 0.")
    if len(outs) != len(logsumexps):
        raise ValueError(
            f"{name}: logsumexps must hold as many parts as outs ({len(outs)}); got"
            f" {len(logsumexps)}."
        )
    named = [(f"outs[{i}]", x) for i, x in enumerate(outs)]
    named += [(f"logsumexps[{i}]", x) for i, x in enumerate(logsumexps)]
    for argument, array in named:
        if not has_shape(array):
            raise TypeError(f"{name}: {argument} must be an array; got {type(array).__name__}.")
        dtype_of(name, argument, array)
    first = outs[0]
    if len(first.shape) < 3:
        raise ValueError(
            f"{name}: outs[0] must have shape [..., seqlen_q, num_heads_q, head_dim_v]; got"
            f" {show(first.shape)}."
        )
    *leading, seqlen_q, num_heads_q, _ = first.shape
    rule = (*leading, num_heads_q, seqlen_q)
    for argument, array in named:
        is_out = argument.startswith("outs")
        expected = tuple(first.shape) if is_out else rule
        if tuple(array.shape) != expected:
            what = "the shape of outs[0]" if is_out else "num_heads_q, seqlen_q of outs"
            raise ValueError(
                f"{name}: {argument} must have shape {show(expected)} ({what}); got"
                f" {show(array.shape)}."
            )
        if is_out and (array.dtype != first.dtype or not is_floating(np.dtype(array.dtype))):
            raise TypeError(
                f"{name}: {argument} must be floating and have one dtype with all outs"
                f" ({first.dtype}); got {array.dtype}."
            )
        if not is_out and array.dtype != np.float32:
            raise TypeError(f"{name}: {argument} must be float32; got {array.dtype}.")
