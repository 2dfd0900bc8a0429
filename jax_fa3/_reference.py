"""Attention in plain JAX, block by block: the oracle, the FP8 model and implementation="xla".

Memory is O(seqlen) forward and backward: an outer loop over query blocks that are recomputed in the
backward pass (jax.checkpoint), an inner scan over key blocks with an online softmax. Everything is
ordinary JAX, so any order of grad, jvp and vmap works on any backend.
Source: FlashAttention-2 and -3, arXiv:2307.08691 and arXiv:2407.08608.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa3 import _masks
from jax_fa3._fp8_model import (
    LOG2_E,
    EffectiveOperands,
    effective_operands,
    finite_part,
    logits_factor,
    straight_through,
)
from jax_fa3._quantize import exact_exp2, round_to_format
from jax_fa3._shapes import Config, Dims, Operands, dims_of

# Probabilities are scaled by 2^8 before the cast to e4m3, so that small ones survive.
P_OFFSET = 8.0
# By how much a logit may pass its row's base, in log2 units: 2^8.75 is below 448.
P_SLACK = 0.75
# log2 of how much the linear exponential overstates a probability in the mean, 0.5 / ln(2)^2.
LINEAR_BIAS = 0.05757
# A call of at most this many logits is one block: no loop, quick to compile.
_ONE_BLOCK_LOGITS = 2**22
_BLOCK_Q = 256
_BLOCK_KV = 512


class _State(NamedTuple):
    """Running softmax of a query block, all float32."""

    base: jax.Array  # [batch, num_heads_kv, group, rows]: log2 of what sums are divided by; -inf
    total: jax.Array  # [batch, num_heads_kv, group, rows]
    acc: jax.Array  # [batch, num_heads_kv, group, rows, head_dim_v]
    bad: jax.Array  # bool [batch, num_heads_kv, group, rows]: the row saw a non-finite key or value


def attention(
    operands: Operands, config: Config, *, block_sizes: tuple[int, int] | None = None
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention of checked rank-4 operands.

    precision="native" computes in float32 on the inputs' values (probabilities are not rounded).
    precision="fp8" computes the quantised model of the kernels; gradients pass straight through
    every rounding. Soft cap acts on the scaled logits, bias is added after it, then come masks.
    A non-finite number in a query, key or value row makes every row that sees it NaN, and touches
    no other row; NaN rows pass no gradient to keys and values.

    Args:
      operands: see Operands.   config: see Config.
      block_sizes: (rows, keys) of a block; None chooses. The result does not depend on it beyond
        float32 rounding and the e4m3 rounding of probabilities below 2^-13 of a row's largest.
    Returns: (out [batch, seqlen_q, num_heads_q, head_dim_v] of config.out_dtype, logsumexp float32
      [batch, num_heads_q, seqlen_q], natural log, sinks included). Rows that see no key are 0 and
      -inf, with sinks too.
    """
    dims = dims_of(operands)
    if dims.is_empty:
        return _empty(dims, config)
    if config.precision == "fp8":
        effective = effective_operands(operands, config)
    else:
        effective = _native_operands(operands, dims)
    return of_effective(effective, operands, config, block_sizes=block_sizes)


def of_effective(
    effective: EffectiveOperands,
    operands: Operands,
    config: Config,
    *,
    block_sizes: tuple[int, int] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`attention` of numbers that are dequantised already; of operands, query, key and value give
    the sizes alone, and the rest counts as there."""
    dims = dims_of(operands)
    block_q, block_kv = block_sizes or _choose_blocks(dims)
    num_q, num_kv = -(-dims.seqlen_q // block_q), -(-dims.seqlen_k // block_kv)
    rules = _masks.make_rules(operands, config, dims)
    rows = _row_blocks(operands, effective, dims, num_q, block_q)
    keys = _key_blocks(operands, effective, num_kv, block_kv)
    padded = num_kv * block_kv != dims.seqlen_k
    mean = effective.value_mean

    def query_block(block: dict[str, Any], keys: dict[str, Any], mean: Any) -> tuple[Any, Any]:
        state = _scan_keys(rules, block, keys, num_kv, padded)
        return _finish(config, state, block, operands.sinks, mean, dims)

    if num_q == 1:
        first = {name: None if x is None else x[0] for name, x in rows.items()}
        out, logsumexp = query_block(first, keys, mean)
    else:
        # checkpoint: the backward pass keeps one query block's probabilities at a time.
        recomputed = jax.checkpoint(query_block, prevent_cse=False)
        outs, logsumexps = jax.lax.map(lambda block: recomputed(block, keys, mean), rows)
        out = _join(outs, axis=3, seqlen=dims.seqlen_q)
        logsumexp = _join(logsumexps, axis=3, seqlen=dims.seqlen_q)
    out = out.reshape(dims.batch, dims.num_heads_q, dims.seqlen_q, dims.head_dim_v)
    logsumexp = logsumexp.reshape(dims.batch, dims.num_heads_q, dims.seqlen_q)
    return jnp.swapaxes(out, 1, 2).astype(config.out_dtype), logsumexp


def _empty(dims: Dims, config: Config) -> tuple[jax.Array, jax.Array]:
    out = jnp.zeros((dims.batch, dims.seqlen_q, dims.num_heads_q, dims.head_dim_v))
    logsumexp = jnp.full((dims.batch, dims.num_heads_q, dims.seqlen_q), -jnp.inf, jnp.float32)
    return out.astype(config.out_dtype), logsumexp


def _native_operands(operands: Operands, dims: Dims) -> EffectiveOperands:
    query, query_bad = finite_part(operands.query)
    key, key_bad = finite_part(operands.key)
    value, value_bad = finite_part(operands.value)
    factor = jnp.broadcast_to(logits_factor(operands), (dims.batch, dims.num_heads_kv))
    factor = jnp.repeat(factor, dims.num_heads_q // dims.num_heads_kv, axis=1)
    query = query * factor[:, None, :, None]
    if operands.value_descale is not None:
        value = value * operands.value_descale[:, None, :, None]
    valid = _masks.key_valid(operands, dims)
    if valid is not None:
        # Padding may be huge: its product with a zero gradient must not become NaN.
        key = jnp.where(valid[..., None], key, 0.0)
        value = jnp.where(valid[..., None], value, 0.0)
    query_bad, key_bad = jnp.swapaxes(query_bad, 1, 2), jnp.swapaxes(key_bad | value_bad, 1, 2)
    return EffectiveOperands(query, key, value, None, None, query_bad, key_bad)


def _choose_blocks(dims: Dims) -> tuple[int, int]:
    heads = dims.batch * dims.num_heads_q
    # A symbolic batch size (jax.export) cannot be compared with a number.
    heads = heads if isinstance(heads, int) else 1
    if heads * dims.seqlen_q * dims.seqlen_k <= _ONE_BLOCK_LOGITS:
        return dims.seqlen_q, dims.seqlen_k
    num_q, num_kv = -(-dims.seqlen_q // _BLOCK_Q), -(-dims.seqlen_k // _BLOCK_KV)
    return -(-dims.seqlen_q // num_q), -(-dims.seqlen_k // num_kv)


def _row_blocks(
    operands: Operands, effective: EffectiveOperands, dims: Dims, num: int, size: int
) -> dict[str, Any]:
    """Everything that has a query axis, as [num blocks, ..., size, ...]; None stays None."""

    def grouped(x: jax.Array) -> jax.Array:
        return x.reshape(dims.batch, dims.num_heads_kv, -1, *x.shape[2:])

    shift = effective.query_shift
    return {
        "query": _split(grouped(jnp.swapaxes(effective.query, 1, 2)), 3, num, size),
        "bad": _split(grouped(effective.query_bad), 3, num, size),
        "shift": None if shift is None else _split(grouped(shift), 3, num, size),
        "position": jnp.arange(num * size, dtype=jnp.int32).reshape(num, size),
        "segment_ids": _split(operands.query_segment_ids, 1, num, size),
        "mask": _split_dense(operands.mask, dims, num, size),
        "bias": _split_dense(operands.bias, dims, num, size),
    }


def _key_blocks(
    operands: Operands, effective: EffectiveOperands, num: int, size: int
) -> dict[str, Any]:
    return {
        "key": _split(jnp.swapaxes(effective.key, 1, 2), 2, num, size),
        "value": _split(jnp.swapaxes(effective.value, 1, 2), 2, num, size),
        "bad": _split(effective.key_bad, 2, num, size),
        "position": jnp.arange(num * size, dtype=jnp.int32).reshape(num, size),
        "segment_ids": _split(operands.key_segment_ids, 1, num, size),
    }


def _scan_keys(
    rules: _masks.Rules, block: dict[str, Any], keys: dict[str, Any], num: int, padded: bool
) -> _State:
    keys = dict(keys)
    size = keys["position"].shape[1]
    for name in ("mask", "bias"):
        dense = block[name]
        if dense is not None and dense.shape[-1] != 1:
            dense = _split(dense, 4, num, size)
        elif dense is not None:
            dense = jnp.broadcast_to(dense, (num, *dense.shape))
        keys[name] = dense

    def step(state: _State | None, key_block: dict[str, Any]) -> _State:
        return _update(rules, state, block, {**key_block, "padded": padded})

    first = {name: None if x is None else x[0] for name, x in keys.items()}
    # The first block stands before the scan: it gives the carry its types, varying axes included.
    state = step(None, first)
    if num == 1:
        return state
    rest = {name: None if x is None else x[1:] for name, x in keys.items()}
    return jax.lax.scan(lambda carry, x: (step(carry, x), None), state, rest)[0]


def _update(
    rules: _masks.Rules, state: _State | None, block: dict[str, Any], keys: dict[str, Any]
) -> _State:
    """One online softmax step over a block of keys."""
    config = rules.config
    fp8 = config.precision == "fp8"
    logits = jnp.einsum(
        "bhgqd,bhkd->bhgqk", block["query"], keys["key"], precision=jax.lax.Precision.HIGHEST
    )
    if config.logits_soft_cap is not None:
        cap = np.float32(config.logits_soft_cap * LOG2_E)
        # The cap bends absolute logits, so what key smoothing took out returns first.
        absolute = logits if block["shift"] is None else logits + block["shift"][..., None]
        logits = cap * jnp.tanh(absolute / cap)
    if keys["bias"] is not None:
        # A finite bias, also the lowest float32, must stay finite in log2 units.
        bias = keys["bias"].astype(jnp.float32)
        lowest = np.float32(0.5 * np.finfo(np.float32).min / LOG2_E)
        bias = jnp.where(jnp.isneginf(bias), bias, jnp.maximum(bias, lowest))
        logits = logits + bias * np.float32(LOG2_E)
    seen = _masks.visible(rules, block, keys)
    if seen is not None:
        logits = jnp.where(seen, logits, -jnp.inf)
    # A bias of -inf hides a key as a mask does.
    bad = jnp.any(keys["bad"][:, :, None, None, :] & (logits > -jnp.inf), axis=-1)
    largest = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    old = jnp.full_like(largest, -jnp.inf) if state is None else state.base
    base = jnp.maximum(old, jnp.ceil(largest - P_SLACK) if fp8 else largest)
    # Rows that saw no key yet have base -inf; any finite number serves there.
    safe_base = jnp.where(jnp.isneginf(base), 0.0, base)
    p = _probabilities(config, logits - safe_base[..., None])
    total = jnp.sum(p, axis=-1)
    acc = jnp.einsum("bhgqk,bhkd->bhgqd", p, keys["value"], precision=jax.lax.Precision.HIGHEST)
    if state is None:
        return _State(base, total, acc, bad)
    difference = jnp.where(jnp.isneginf(old), -jnp.inf, old - safe_base)
    rescale = exact_exp2(difference) if fp8 else jnp.exp2(difference)
    total = state.total * rescale + total
    acc = state.acc * rescale[..., None] + acc
    return _State(base, total, acc, state.bad | bad)


def _probabilities(config: Config, log2_p: jax.Array) -> jax.Array:
    """2^log2_p; with precision="fp8" 2^(log2_p + 8) on the e4m3 grid."""
    if config.precision == "native":
        return jnp.exp2(log2_p)
    exact = jnp.exp2(log2_p + P_OFFSET)
    if config.quantization.softmax == "exact":
        return straight_through(exact, round_to_format(jax.lax.stop_gradient(exact), "e4m3"))
    return straight_through(exact, linear_exp2(jax.lax.stop_gradient(log2_p) + P_OFFSET))


def linear_exp2(x: jax.Array) -> jax.Array:
    """The e4m3 number whose byte is rint(max(0, 8 x + 56)): 2^x, linear between powers of two."""
    byte = jnp.round(jnp.maximum(8.0 * x + 56.0, 0.0))
    exponent = jnp.floor(byte / 8.0)
    fraction = byte / 8.0 - exponent
    subnormal = byte * 2.0**-9
    return jnp.where(byte < 8.0, subnormal, (1.0 + fraction) * exact_exp2(exponent - 7.0))


def _finish(
    config: Config,
    state: _State,
    block: dict[str, Any],
    sinks: jax.Array | None,
    mean: jax.Array | None,
    dims: Dims,
) -> tuple[jax.Array, jax.Array]:
    """Divides by the row sum: (out [batch, num_heads_kv, group, rows, head_dim_v], logsumexp)."""
    fp8 = config.precision == "fp8"
    offset = P_OFFSET if fp8 else 0.0
    bias = LINEAR_BIAS if fp8 and config.quantization.softmax == "linear" else 0.0
    # With a soft cap the logits are absolute already.
    shift = None if config.logits_soft_cap is not None else block["shift"]
    empty = state.total == 0.0
    base = jnp.where(empty, 0.0, state.base)
    acc, key_total = state.acc, state.total
    total = key_total
    if sinks is not None:
        sink = sinks.reshape(1, dims.num_heads_kv, -1, 1) * np.float32(LOG2_E)
        sink = sink if shift is None else sink - shift
        sink = jnp.broadcast_to(sink, base.shape)
        raised = jnp.maximum(base, jax.lax.stop_gradient(jnp.ceil(sink)))
        rescale = jnp.exp2(base - raised)
        acc, key_total, base = acc * rescale[..., None], key_total * rescale, raised
        total = key_total + jnp.exp2(sink - raised + offset + bias)
    safe_total = jnp.where(empty, 1.0, total)
    out = acc / safe_total[..., None]
    if mean is not None:
        # Values were centred: their mean returns times the mass that fell on keys, not on sinks.
        share = 1.0 if sinks is None else (key_total / safe_total)[..., None]
        out = out + share * mean[:, :, None, None, :]
    logsumexp = base - offset - bias + jnp.log2(safe_total)
    if shift is not None:
        logsumexp = logsumexp + shift
    out = jnp.where(empty[..., None], 0.0, out)
    logsumexp = jnp.where(empty, -jnp.inf, logsumexp * np.float32(math.log(2.0)))
    # Non-finite numbers were computed with as 0; the rows that saw one become NaN here, with a NaN
    # gradient for their query, and nothing flows from them into keys and values.
    bad = (state.bad | block["bad"]) & ~empty
    nan = jnp.sum(block["query"], axis=-1) * jnp.where(bad, jnp.nan, 1.0)
    return jnp.where(bad[..., None], nan[..., None], out), jnp.where(bad, nan, logsumexp)


def _split(x: jax.Array | None, axis: int, num: int, size: int) -> Any:
    """Pads an axis with zeros to num * size and brings the blocks to the front."""
    if x is None:
        return None
    missing = num * size - x.shape[axis]
    if missing:
        x = jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)])
    x = x.reshape(*x.shape[:axis], num, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _split_dense(x: jax.Array | None, dims: Dims, num: int, size: int) -> Any:
    """[batch or 1, num_heads_q or 1, rows or 1, keys or 1] to blocks of
    [batch or 1, num_heads_kv or 1, group or 1, rows or 1, keys or 1]."""
    if x is None:
        return None
    group = dims.num_heads_q // dims.num_heads_kv
    heads = (1, 1) if x.shape[1] == 1 else (dims.num_heads_kv, group)
    x = x.reshape(x.shape[0], *heads, *x.shape[2:])
    if x.shape[3] == 1:
        return jnp.broadcast_to(x, (num, *x.shape))
    return _split(x, 3, num, size)


def _join(blocks: jax.Array, axis: int, seqlen: int) -> jax.Array:
    """Undoes _split along `axis` of a block and drops the padding."""
    x = jnp.moveaxis(blocks, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, seqlen, axis=axis)
