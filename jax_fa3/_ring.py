"""Attention over keys that come step by step, one shard of another device at each.

Step 0 are the device's own keys, step s those of device index - s. `Steps` says what a step adds;
`over` merges the steps and leaves the gradient to JAX, `ring` has a backward pass of its own.

The ring's backward pass sends the shards around again, each with the gradient that the devices
have added to it, and one more hop brings that home: memory stays that of one shard, and gradients
of key and value are added up in float32. A step's partial result is computed again, because its
share of the whole one, exp(its logsumexp - the whole logsumexp), depends on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jax_fa3 import _compat, _refusals, _vjp
from jax_fa3._merge import merge_attention

Partial = tuple[jax.Array, jax.Array]  # out f32 [batch, rows, heads, head_dim_v], logsumexp
# (query, key, value, softmax_scale, is_causal=...) on one device
Local = Callable[..., Partial]
Shards = Iterator[tuple[jax.Array, jax.Array]]  # key and value of other devices, step by step

FORWARD_MODE = (
    "context_parallel_attention: the ring is differentiable in reverse mode; got forward-mode "
    'differentiation. Pass strategy="all_gather".'
)


@dataclasses.dataclass(frozen=True)
class Steps:
    """What the steps of one call compute.

    Attributes:
      local: attention of one device's rows and one shard's keys.
      axis_name, size: the mesh axis, and its number of devices.
      is_causal, zigzag: which blocks a row sees; see `context_parallel_attention`.
    """

    local: Local
    axis_name: Any
    size: int
    is_causal: bool
    zigzag: bool

    def visible(self, step: int, index: jax.Array) -> jax.Array | None:
        """Whether this device sees anything of the step's shard; None for always."""
        if step == 0 or self.zigzag or not self.is_causal:
            return None
        return index >= step  # else the ring wrapped around, to a later part of the sequence

    def part(
        self,
        step: int,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        scale: jax.Array,
        index: jax.Array,
    ) -> Partial:
        """The step's partial result for all rows, where it is visible."""
        if step > 0 and self.zigzag:
            return self._two_blocks(index >= step, query, key, value, scale)
        return self.local(query, key, value, scale, is_causal=self.is_causal and step == 0)

    def _two_blocks(
        self,
        from_earlier: jax.Array,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        scale: jax.Array,
    ) -> Partial:
        """Both visible blocks of a zigzag step in one local call."""
        early_query, late_query = halves(query, 1)
        early_key, late_key = halves(key, 1)
        early_value, late_value = halves(value, 1)
        part, part_lse = self.local(
            _join(late_query, jnp.where(from_earlier, early_query, late_query)),
            _join(early_key, jnp.where(from_earlier, early_key, late_key)),
            _join(early_value, jnp.where(from_earlier, early_value, late_value)),
            scale,
            is_causal=False,
        )
        # first: (late, early). second: (early, early) or (late, late); empty for the other rows.
        (first, second), (first_lse, second_lse) = halves(part, 0), halves(part_lse, 0)
        for_early = jnp.where(from_earlier, second_lse, -jnp.inf)
        for_late = jnp.where(from_earlier, -jnp.inf, second_lse)
        late, late_lse = merge_attention([first, second], [first_lse, for_late])
        return (
            jnp.concatenate([second, late], axis=1),
            jnp.concatenate([for_early, late_lse], axis=2),
        )


def over(
    steps: Steps,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scale: jax.Array,
    index: jax.Array,
    shards: Shards,
) -> Partial:
    """The own keys and those of all shards; out in float32."""
    out, logsumexp = steps.part(0, query, key, value, scale, index)
    for step, (other_key, other_value) in enumerate(shards, start=1):

        def seen(state: Partial, key: jax.Array, value: jax.Array, step: int = step) -> Partial:
            out, logsumexp = state
            part, part_lse = steps.part(step, query, key, value, scale, index)
            return merge_attention([out, part], [logsumexp, part_lse])

        def unseen(state: Partial, key: jax.Array, value: jax.Array) -> Partial:
            return state

        visible = steps.visible(step, index)
        state = (out, logsumexp)
        if visible is None:
            out, logsumexp = seen(state, other_key, other_value)
        else:
            out, logsumexp = jax.lax.cond(visible, seen, unseen, state, other_key, other_value)
    return out, logsumexp


def ring(
    steps: Steps,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scale: jax.Array,
    index: jax.Array,
) -> Partial:
    """`over` shards that travel around the axis; out of query's dtype."""

    @jax.custom_vjp
    def op(
        query: jax.Array, key: jax.Array, value: jax.Array, scale: jax.Array, index: jax.Array
    ) -> Partial:
        shards = _travelling(steps, key, value)
        out, logsumexp = over(steps, query, key, value, scale, index, shards)
        return out.astype(query.dtype), logsumexp

    def fwd(*operands: jax.Array) -> tuple[Partial, Any]:
        out, logsumexp = op(*operands)
        out = _compat.named_residual(out, _vjp.OUT_NAME)
        logsumexp = _compat.named_residual(logsumexp, _vjp.LOGSUMEXP_NAME)
        return (out, logsumexp), (operands, out, logsumexp)

    def bwd(saved: Any, cotangents: Partial) -> tuple[jax.Array | None, ...]:
        operands, out, logsumexp = saved
        return (*_backward(steps, operands, (out, logsumexp), cotangents), None)

    op.defvjp(fwd, bwd)
    guarded = [
        _refusals.reverse_mode_only(x, NotImplementedError, FORWARD_MODE)
        for x in (query, key, value, scale)
    ]
    out, logsumexp = op(*guarded, index)
    return out, logsumexp


def _backward(
    steps: Steps, operands: tuple[jax.Array, ...], results: Partial, cotangents: Partial
) -> tuple[jax.Array, ...]:
    """Cotangents of query, key, value and scale, each in the operand's dtype."""
    query, key, value, scale, index = operands
    # The barrier keeps XLA from taking the shards of the forward pass, which would have to stay.
    (key, value), cotangents = jax.lax.optimization_barrier(((key, value), cotangents))
    wide = [x.astype(jnp.float32) for x in (*results, *cotangents)]

    def add(
        own: tuple[jax.Array, ...], key: jax.Array, value: jax.Array, step: int
    ) -> tuple[jax.Array, ...]:
        """own (gradients of query, key, value, scale in float32) and what the step gives."""

        def part(query: jax.Array, key: jax.Array, value: jax.Array, scale: jax.Array) -> Partial:
            return steps.part(step, query, key, value, scale, index)

        partial, pull = jax.vjp(part, query, key, value, scale)
        more = pull(_of_partial(partial, *wide))
        return tuple(x + y.astype(jnp.float32) for x, y in zip(own, more, strict=True))

    zeros = [jnp.zeros(x.shape, jnp.float32) for x in (query, key, value, scale)]
    *zeros, _ = _compat.mark_varying([*zeros, query])
    dquery, dkey, dvalue, dscale = add(tuple(zeros), key, value, 0)
    for step, (other_key, other_value) in enumerate(_travelling(steps, key, value), start=1):
        dkey, dvalue = _hand_on(steps, dkey), _hand_on(steps, dvalue)
        own: tuple[jax.Array, ...] = (dquery, dkey, dvalue, dscale)
        visible = steps.visible(step, index)
        if visible is None:
            own = add(own, other_key, other_value, step)
        else:
            own = jax.lax.cond(
                visible,
                lambda own, key, value, step=step: add(own, key, value, step),
                lambda own, key, value: own,
                own,
                other_key,
                other_value,
            )
        dquery, dkey, dvalue, dscale = own
    grads = (dquery, _hand_on(steps, dkey), _hand_on(steps, dvalue), dscale)
    return tuple(g.astype(x.dtype) for g, x in zip(grads, operands[:4], strict=True))


def _of_partial(
    partial: Partial, out: jax.Array, logsumexp: jax.Array, dout: jax.Array, dlogsumexp: jax.Array
) -> Partial:
    """Cotangents of a partial result from those of the whole one, as merging it gives them.

    out = sum of share * part_out with share = exp(part_lse - logsumexp), so that
    d out / d part_lse = share * (part_out - out) and d logsumexp / d part_lse = share.
    """
    part_out, part_lse = partial
    seen = ~jnp.isneginf(part_lse)
    share = jnp.where(seen, jnp.exp(jnp.where(seen, part_lse - logsumexp, 0.0)), 0.0)
    moved = jnp.swapaxes(jnp.sum(dout * (part_out - out), axis=-1), 1, 2)
    dpart_lse = jnp.where(seen, share * (moved + dlogsumexp), 0.0)
    dpart_out = jnp.where(
        jnp.swapaxes(seen, 1, 2)[..., None], jnp.swapaxes(share, 1, 2)[..., None] * dout, 0.0
    )
    return dpart_out, dpart_lse


def _travelling(steps: Steps, key: jax.Array, value: jax.Array) -> Shards:
    """Every device hands on what it holds; key and value apart, a permute takes one dtype."""
    for _ in range(1, steps.size):
        key, value = _hand_on(steps, key), _hand_on(steps, value)
        yield key, value


def _hand_on(steps: Steps, x: jax.Array) -> jax.Array:
    to_next = [(device, (device + 1) % steps.size) for device in range(steps.size)]
    received: jax.Array = jax.lax.ppermute(x, steps.axis_name, to_next)
    return received


def halves(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Both halves along an axis of even size."""
    first, second = jnp.split(x, 2, axis=axis)
    return first, second


def _join(first: jax.Array, second: jax.Array) -> jax.Array:
    return jnp.concatenate([first, second], axis=0)
