"""vmap: the mapped axis goes to the front of every operand; folding it is left to the local op.

An operand that is not mapped gets an axis of size 1 instead of being repeated, so no copy of key
and value is made for `vmap(f, in_axes=(0, None, None))`. Folding only after partitioning keeps both
a sharded batch and a sharded mapped axis free of collectives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jax_fa3 import _partition
from jax_fa3._local import Call

Arrays = tuple[jax.Array, ...]


@functools.cache
def forward(call: Call) -> Callable[..., Arrays]:
    """(out, logsumexp) of the operands in call.names, each [*batch, ...]; may be vmapped any number
    of times."""
    return _with_rule(functools.partial(_partition.forward, call))


@functools.cache
def backward(call: Call) -> Callable[..., Arrays]:
    """Cotangents of the operands that want one, from the operands in call.names, then out,
    logsumexp, dout and dlogsumexp."""
    return _with_rule(functools.partial(_partition.backward, call))


@functools.cache
def whole(function: str, argument: str) -> Callable[..., Arrays]:
    """`_partition.whole`, mapped any number of times."""
    return _with_rule(_partition.whole(function, argument))


def _with_rule(run: Callable[..., Arrays]) -> Callable[..., Arrays]:
    @custom_vmap
    def op(*arrays: jax.Array) -> Arrays:
        return run(*arrays)

    @op.def_vmap
    def rule(
        axis_size: int, in_batched: Sequence[bool], *arrays: jax.Array
    ) -> tuple[Arrays, tuple[bool, ...]]:
        del axis_size
        expanded = [
            x if mapped else jnp.expand_dims(x, 0)
            for x, mapped in zip(arrays, _flat(in_batched), strict=True)
        ]
        outs = tuple(op(*expanded))
        return outs, (True,) * len(outs)

    return op


def _flat(in_batched: Any) -> list[bool]:
    return [bool(mapped) for mapped in jax.tree.leaves(in_batched)]
