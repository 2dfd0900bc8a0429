"""Who sees whom: positions, windows, lengths, segments and dense masks, one block at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_fa3._shapes import Config, Dims, Operands


class Rules(NamedTuple):
    """What decides visibility beside positions, ids and the dense mask of a block.

    query_seqlens, key_seqlens: int32 [batch] clipped to the array's length, or None.
    offset: int or int32 [batch]; key `row + offset` lies on the diagonal of `row`.
    """

    config: Config
    dims: Dims
    query_seqlens: jax.Array | None
    key_seqlens: jax.Array | None
    offset: Any


def make_rules(operands: Operands, config: Config, dims: Dims) -> Rules:
    """Clips the lengths, places the diagonal: bottom_right ends at the last valid row and key."""
    query_seqlens = _clip(operands.query_seqlens, dims.seqlen_q)
    key_seqlens = _clip(operands.key_seqlens, dims.seqlen_k)
    offset: Any = 0
    if config.causal_alignment == "bottom_right":
        rows = dims.seqlen_q if query_seqlens is None else query_seqlens
        keys = dims.seqlen_k if key_seqlens is None else key_seqlens
        offset = keys - rows
    return Rules(config, dims, query_seqlens, key_seqlens, offset)


def query_valid(operands: Operands, dims: Dims) -> jax.Array | None:
    """bool [batch, seqlen_q]: rows that are not padding; None when there is none."""
    lengths = _clip(operands.query_seqlens, dims.seqlen_q)
    return _valid(lengths, operands.query_segment_ids, dims.seqlen_q)


def key_valid(operands: Operands, dims: Dims) -> jax.Array | None:
    """bool [batch, seqlen_k or 1, num_heads_kv or 1]: keys that some row may see by length, segment
    id and dense mask; None when none of these was given. Triangles and windows do not count.
    """
    lengths = _clip(operands.key_seqlens, dims.seqlen_k)
    valid = _valid(lengths, operands.key_segment_ids, dims.seqlen_k)
    valid = None if valid is None else valid[:, :, None]
    if operands.mask is None:
        return valid
    seen = jnp.any(operands.mask, axis=2)
    if seen.shape[1] != 1:
        groups = dims.num_heads_q // dims.num_heads_kv
        grouped = seen.reshape(seen.shape[0], dims.num_heads_kv, groups, seen.shape[2])
        seen = jnp.any(grouped, axis=2)
    seen = jnp.swapaxes(seen, 1, 2)
    return seen if valid is None else valid & seen


def visible(rules: Rules, rows: dict[str, Any], keys: dict[str, Any]) -> jax.Array | None:
    """Visibility of one block: bool, broadcastable to [batch, num_heads_kv, group, rows, keys].

    Args:
      rows: "position" int32 [rows]; "segment_ids" int32 [batch, rows] or None.
      keys: the same for keys, and "mask" bool [.., .., .., rows or 1, keys or 1] or None;
        "padded" tells (statically) whether positions may reach past seqlen_k.
    Returns: None when every row sees every key.
    """
    config = rules.config
    row = rows["position"][:, None]
    key = keys["position"][None, :]
    terms: list[jax.Array] = []
    if keys["padded"]:
        terms.append(key < rules.dims.seqlen_k)
    left, right = config.window_size or (None, None)
    if config.is_causal:
        right = 0 if right is None else min(right, 0)
    if left is not None or right is not None:
        offset = rules.offset if isinstance(rules.offset, int) else rules.offset[:, None, None]
        diagonal = row + offset
        if right is not None:
            terms.append(key - diagonal <= min(right, _FAR))
        if left is not None:
            terms.append(diagonal - key <= min(left, _FAR))
    if rules.query_seqlens is not None:
        terms.append(row < rules.query_seqlens[:, None, None])
    if rules.key_seqlens is not None:
        terms.append(key < rules.key_seqlens[:, None, None])
    if rows["segment_ids"] is not None:
        row_ids = rows["segment_ids"][:, :, None]
        terms.append((row_ids == keys["segment_ids"][:, None, :]) & (row_ids >= 0))
    wide = [term if term.ndim == 2 else term[:, None, None] for term in terms]
    if keys["mask"] is not None:
        wide.append(keys["mask"])
    if not wide:
        return None
    joined = wide[0]
    for term in wide[1:]:
        joined = joined & term
    return joined


# Windows beyond any array: keeps int32 comparisons in range.
_FAR = 2**31 - 1


def _clip(lengths: Any, limit: int) -> jax.Array | None:
    return None if lengths is None else jnp.clip(lengths, 0, limit).astype(jnp.int32)


def _valid(lengths: Any, segment_ids: Any, seqlen: int) -> jax.Array | None:
    valid = None
    if lengths is not None:
        valid = jnp.arange(seqlen, dtype=jnp.int32)[None, :] < lengths[:, None]
    if segment_ids is not None:
        valid = segment_ids >= 0 if valid is None else valid & (segment_ids >= 0)
    return valid
