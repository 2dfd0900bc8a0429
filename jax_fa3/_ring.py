"""Attention over keys that come step by step, one shard of another device at each.

Step 0 are the device's own keys, step s those of device index - s. `Steps` says what a step adds;
`over` merges the steps and leaves the gradient to JAX, `attend` has a backward pass of its own.

A shard is sent on while the device attends to it. XLA keeps one transfer in flight at a time, so
all arrays of a shard travel as one; see `Steps.next`.

The ring's backward pass sends the shards around again. The gradient that other devices have for a
shard follows it, from the first of them to the last and home: memory stays that of one shard. No
step's result is needed again: probabilities come from the whole logsumexp.

Zigzag: rows and shards are in halves that lie one behind the other in the batch ("pieces"), every
early half before every late one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jax_fa3 import _compat, _refusals, _vjp
from jax_fa3._grad import Results
from jax_fa3._merge import merge_attention
from jax_fa3._parts import Gradients, Part, Partial, Tree

_T = TypeVar("_T")

FORWARD_MODE = (
    "context_parallel_attention: shards that travel are differentiable in reverse mode; got "
    'forward-mode differentiation. Pass strategy="ulysses", or precision="native" with '
    'strategy="all_gather".'
)
SECOND_ORDER = (
    "context_parallel_attention: quantised shards and the CUDA path are differentiable once; got "
    'second-order differentiation. Pass implementation="xla" with precision="native" or '
    'strategy="ulysses".'
)


@dataclasses.dataclass(frozen=True)
class Steps:
    """What the steps of one call compute.

    Attributes:
      part: attention of one device's rows and one shard's keys.
      axis_name, size: the mesh axis, and its number of devices.
      is_causal, zigzag: which blocks a row sees; see `context_parallel_attention`.
      gathered: shards come by one gather instead of hop by hop.
    """

    part: Part
    axis_name: Any
    size: int
    is_causal: bool
    zigzag: bool
    gathered: bool

    def prepare(
        self, query: jax.Array, key: jax.Array, value: jax.Array, scale: jax.Array
    ) -> tuple[Tree, Tree]:
        """(rows, shard) of [batch, seqlen, heads, head_dim] operands."""
        if self.zigzag:
            query, key, value = (_pieces(x, 1) for x in (query, key, value))
        return self.part.prepare(query, key, value, scale)

    def start(self, shard: Tree) -> Tree:
        """What `next` takes: the shards of all devices where they are gathered, else this one."""
        if self.gathered:
            # NOTE: along an axis of size 1; a gather that adds one takes no symbolic batch.
            return jax.tree.map(
                lambda x: jax.lax.all_gather(x[None], self.axis_name, tiled=True), shard
            )
        return _packed(shard)

    def next(
        self, held: Tree, like: Tree, index: jax.Array, step: int, done: _T
    ) -> tuple[Tree, Tree, _T]:
        """The step's shard, in the form of like; what the next step takes; and done.

        done: results of the step before. Its calls run beside the transfer, so nothing computes
        with the shard before they are there, and it is not sent on before. Otherwise XLA, which
        does not know how long a call takes, begins with all transfers.
        """
        held = held if self.gathered else self.hand_on(held)
        held, done = jax.lax.optimization_barrier((held, done))
        if not self.gathered:
            return _unpacked(held, like), held, done
        at = (index - step) % self.size
        return jax.tree.map(lambda x: x[at], held), held, done

    def hand_on(self, x: jax.Array) -> jax.Array:
        """That of the device before."""
        to_next = [(device, (device + 1) % self.size) for device in range(self.size)]
        received: jax.Array = jax.lax.ppermute(x, self.axis_name, to_next)
        return received

    def home(self, of_steps: list[Tree], index: jax.Array) -> Tree:
        """What all devices have for this one's shard, from what this one has for that of each
        step."""

        def one(*arrays: jax.Array) -> jax.Array:
            by_device = (index - jnp.arange(self.size)) % self.size
            ordered = jnp.take(jnp.stack(arrays), by_device, axis=0)
            total: jax.Array = jax.lax.psum_scatter(ordered, self.axis_name, tiled=True)
            return total[0]

        return jax.tree.map(one, *of_steps)

    def first(self, rows: Tree, shard: Tree, scale: jax.Array) -> Partial:
        """The device's own keys."""
        own = self.part.forward(rows, shard, scale, is_causal=self.is_causal, is_own=True)
        if not self.zigzag:
            return own
        (_, late_rows), (early_shard, _) = _halves(rows), _halves(shard)
        part = self.part.forward(late_rows, early_shard, scale, is_causal=False, is_own=False)
        early, late = _halves(own)
        return _join(early, _merged(late, part))

    def add(
        self,
        step: int,
        state: Partial,
        rows: Tree,
        shard: Tree,
        scale: jax.Array,
        index: jax.Array,
    ) -> Partial:
        """state, and what the step's shard adds to it."""

        def seen(rows: Tree, shard: Tree) -> Partial:
            return self.part.forward(rows, shard, scale, is_causal=False, is_own=False)

        def plain(state: Partial, shard: Tree) -> Partial:
            return _merged(state, seen(rows, shard))

        if not self.is_causal:
            return plain(state, shard)
        from_earlier = index >= step  # else the ring wrapped around, to later parts of the sequence
        if not self.zigzag:
            kept: Partial = jax.lax.cond(from_earlier, plain, lambda s, _: s, state, shard)
            return kept
        # (late, early) is always visible; then (early, early) or (late, late).
        first, first_lse = seen(_halves(rows)[1], _halves(shard)[0])
        second, second_lse = seen(_either(from_earlier, rows), _either(from_earlier, shard))
        early, late = _halves(state)
        hidden = jnp.full_like(second_lse, -jnp.inf)
        of_early = second, jnp.where(from_earlier, second_lse, hidden)
        of_late = second, jnp.where(from_earlier, hidden, second_lse)
        return _join(_merged(early, of_early), _merged(late, (first, first_lse), of_late))

    def first_gradients(
        self, rows: Tree, shard: Tree, scale: jax.Array, whole: Results
    ) -> Gradients:
        """`first`, backwards."""
        own = self.part.backward(rows, shard, scale, whole, is_causal=self.is_causal, is_own=True)
        if not self.zigzag:
            return own
        (_, late_rows), (early_shard, _) = _halves(rows), _halves(shard)
        late_whole = _halves(whole)[1]
        more = self.part.backward(
            late_rows, early_shard, scale, late_whole, is_causal=False, is_own=False
        )
        zeros = jax.tree.map(jnp.zeros_like, (more.rows, more.shard))
        more = Gradients(_join(zeros[0], more.rows), _join(more.shard, zeros[1]), more.scale)
        return _sum(own, more)

    def add_gradients(
        self,
        step: int,
        own: Gradients,
        rows: Tree,
        shard: Tree,
        scale: jax.Array,
        whole: Results,
        index: jax.Array,
    ) -> Gradients:
        """own, and what the step's shard adds to it."""

        def plain(own: Gradients, shard: Tree) -> Gradients:
            more = self.part.backward(rows, shard, scale, whole, is_causal=False, is_own=False)
            return _sum(own, more)

        if not self.is_causal:
            return plain(own, shard)
        from_earlier = index >= step
        if not self.zigzag:
            kept: Gradients = jax.lax.cond(from_earlier, plain, lambda g, _: g, own, shard)
            return kept
        (_, late_rows), (early_shard, _) = _halves(rows), _halves(shard)
        first, second = (
            self.part.backward(*operands, is_causal=False, is_own=False)
            for operands in (
                (late_rows, early_shard, scale, _halves(whole)[1]),
                (
                    _either(from_earlier, rows),
                    _either(from_earlier, shard),
                    scale,
                    _either(from_earlier, whole),
                ),
            )
        )

        def where(tree: Tree, of_early: bool) -> Tree:
            keep = from_earlier if of_early else ~from_earlier
            return jax.tree.map(lambda x: jnp.where(keep, x, 0.0), tree)

        of_rows = _join(where(second.rows, True), _sum(first.rows, where(second.rows, False)))
        of_keys = _join(_sum(first.shard, where(second.shard, True)), where(second.shard, False))
        return _sum(own, Gradients(of_rows, of_keys, _sum(first.scale, second.scale)))


def over(steps: Steps, rows: Tree, shard: Tree, scale: jax.Array, index: jax.Array) -> Partial:
    """The own keys and those of all other devices; out in float32."""
    out, logsumexp = steps.first(rows, shard, scale)
    held = steps.start(shard)
    for step in range(1, steps.size):
        shard, held, logsumexp = steps.next(held, shard, index, step, logsumexp)
        out, logsumexp = steps.add(step, (out, logsumexp), rows, shard, scale, index)
    return (_whole(out, 1), _whole(logsumexp, 2)) if steps.zigzag else (out, logsumexp)


def attend(
    steps: Steps,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scale: jax.Array,
    index: jax.Array,
) -> Partial:
    """`over` with a backward pass that keeps one shard; out of query's dtype."""
    dtypes = [x.dtype for x in (query, key, value, scale)]
    once = _once if steps.part.first_order else _as_it_is

    def forward(rows: Tree, shard: Tree, scale: jax.Array, index: jax.Array) -> Partial:
        out, logsumexp = over(steps, rows, shard, scale, index)
        return out.astype(dtypes[0]), logsumexp

    def backward(
        rows: Tree, shard: Tree, scale: jax.Array, index: jax.Array, *whole: jax.Array
    ) -> tuple[jax.Array, ...]:
        results = Results(*whole)
        if steps.zigzag:
            results = Results(*(_pieces(x, 1 if x.ndim == 4 else 2) for x in results))
        total = _add_gradients(steps, rows, shard, scale, index, results)
        *grads, dscale = steps.part.finish(rows, scale, total, results)
        if steps.zigzag:
            grads = [_whole(x, 1) for x in grads]
        return tuple(g.astype(t) for g, t in zip((*grads, dscale), dtypes, strict=True))

    @jax.custom_vjp
    def op(
        query: jax.Array, key: jax.Array, value: jax.Array, scale: jax.Array, index: jax.Array
    ) -> Partial:
        return forward(*steps.prepare(query, key, value, scale), scale, index)

    def fwd(*operands: jax.Array) -> tuple[Partial, Any]:
        scale, index = operands[3:]
        rows, shard = once(steps.prepare)(*operands[:4])
        if steps.part.first_order:
            out, logsumexp = once(forward)(rows, shard, scale, index)
        else:  # by op, so that gradients of results may be differentiated again
            out, logsumexp = op(*operands)
        out = _compat.named_residual(out, _vjp.OUT_NAME)
        logsumexp = _compat.named_residual(logsumexp, _vjp.LOGSUMEXP_NAME)
        kept = rows, shard, scale, index
        return (out, logsumexp), (kept, out, logsumexp)

    def bwd(saved: Any, cotangents: Partial) -> tuple[jax.Array | None, ...]:
        kept, out, logsumexp = saved
        return (*once(backward)(*kept, out, logsumexp, *cotangents), None)

    op.defvjp(fwd, bwd)
    guarded = [
        _refusals.reverse_mode_only(x, NotImplementedError, FORWARD_MODE)
        for x in (query, key, value, scale)
    ]
    out, logsumexp = op(*guarded, index)
    return out, logsumexp


def _add_gradients(
    steps: Steps, rows: Tree, shard: Tree, scale: jax.Array, index: jax.Array, whole: Results
) -> Gradients:
    """What all steps add up, each shard's gradient back on its device."""
    # The barrier keeps XLA from taking the shards of the forward pass, which would have to stay.
    shard, whole = jax.lax.optimization_barrier((shard, whole))
    own = steps.first_gradients(rows, shard, scale, whole)
    held, zeros = steps.start(shard), jax.tree.map(jnp.zeros_like, own.shard)
    shard, held, mine = steps.next(held, shard, index, 1, own.shard)
    total = own._replace(shard=zeros)
    total = steps.add_gradients(1, total, rows, shard, scale, whole, index)
    of_steps = [mine, total.shard]
    for step in range(2, steps.size):
        sent = _packed(total.shard)
        shard, held, sent = steps.next(held, shard, index, step, sent)
        start = zeros if steps.gathered else _unpacked(steps.hand_on(sent), zeros)
        total = total._replace(shard=start)
        total = steps.add_gradients(step, total, rows, shard, scale, whole, index)
        of_steps.append(total.shard)
    if steps.gathered:
        return total._replace(shard=steps.home(of_steps, index))
    of_others = _unpacked(steps.hand_on(_packed(total.shard)), zeros)
    return total._replace(shard=_sum(mine, of_others))


def _packed(tree: Tree) -> jax.Array:
    """All arrays of a tree one behind the other: in their dtype, or as bytes where they differ."""
    arrays = jax.tree.leaves(tree)
    if len({x.dtype for x in arrays}) > 1:
        arrays = [jax.lax.bitcast_convert_type(x, jnp.uint8) for x in arrays]
    return jnp.concatenate([x.reshape(-1) for x in arrays])


def _unpacked(packed: jax.Array, like: Tree) -> Tree:
    """Inverse of `_packed`, for a tree of like's shapes and dtypes."""
    arrays, start = [], 0
    for x in jax.tree.leaves(like):
        width = x.dtype.itemsize // packed.dtype.itemsize
        end = start + x.size * width
        shape = x.shape if width == 1 else (*x.shape, width)
        piece = packed[start:end].reshape(shape)
        same = piece.dtype == x.dtype
        arrays.append(piece if same else jax.lax.bitcast_convert_type(piece, x.dtype))
        start = end
    return jax.tree.unflatten(jax.tree.structure(like), arrays)


def _once(fn: Callable[..., Any]) -> Callable[..., Any]:
    return _vjp.first_order_only(fn, SECOND_ORDER)


def _as_it_is(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def _merged(*parts: Partial) -> Partial:
    return merge_attention([out for out, _ in parts], [logsumexp for _, logsumexp in parts])


def _sum(a: _T, b: _T) -> _T:
    total: _T = jax.tree.map(jnp.add, a, b)
    return total


def _either(is_early: jax.Array, tree: Tree) -> Tree:
    """The early or the late half."""
    early, late = _halves(tree)
    return jax.tree.map(lambda a, b: jnp.where(is_early, a, b), early, late)


def _halves(tree: _T) -> tuple[_T, _T]:
    """The early and the late pieces."""
    first = jax.tree.map(lambda x: x[: x.shape[0] // 2], tree)
    return first, jax.tree.map(lambda x: x[x.shape[0] // 2 :], tree)


def _join(early: _T, late: _T) -> _T:
    """Inverse of `halves`."""
    joined: _T = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), early, late)
    return joined


def _pieces(x: jax.Array, axis: int) -> jax.Array:
    """Halves along axis as [2 batch, ...]."""
    batch, size = x.shape[0], x.shape[axis]
    x = x.reshape(*x.shape[:axis], 2, size // 2, *x.shape[axis + 1 :])
    x = jnp.moveaxis(x, axis, 0)
    return x.reshape(2 * batch, *x.shape[2:])


def _whole(x: jax.Array, axis: int) -> jax.Array:
    """Inverse of `_pieces`."""
    x = jnp.moveaxis(x.reshape(2, -1, *x.shape[1:]), 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
