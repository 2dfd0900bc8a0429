"""Shared by the tests of context_parallel_attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from rules.support import (
    attend,
    loss_of,
)

import jax_fa3

NEEDS_EIGHT = pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="needs eight CPU devices")
STRATEGIES = ("ring", "all_gather", "ulysses")
COLLECTIVE = {"ring": "collective-permute", "all_gather": "all-gather", "ulysses": "all-to-all"}
# Six query heads on three KV heads: with "ulysses" on two devices the groups straddle devices.
SIZES: dict[str, Any] = {"dtype": jnp.float32, "heads_q": 6, "heads_kv": 3}
# Two KV heads on four or eight devices: "ulysses" repeats them.
WIDE: dict[str, Any] = {"dtype": jnp.float32, "heads_q": 8, "heads_kv": 2}
EXACT = 1e-5


def mesh_of(*shape: int) -> Mesh:
    """Devices along "cp"; with two sizes along "dp" and "cp"."""
    names = ("dp", "cp")[2 - len(shape) :]
    devices = np.array(jax.devices("cpu")[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(shape))


def parallel(
    mesh: Mesh, *, batch: str | None = None, axis: Any = "cp", check: bool = True, **options: Any
) -> Callable[..., Any]:
    """(query, key, value) in the layout's order -> (out, logsumexp) in that order."""
    options = {"precision": "native", **options}

    def local(query: Any, key: Any, value: Any) -> Any:
        return jax_fa3.context_parallel_attention(
            query, key, value, axis_name=axis, return_logsumexp=True, **options
        )

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(batch, axis),) * 3,
        out_specs=(P(batch, axis), P(batch, None, axis)),
        check_vma=check,
    )


def natural(fn: Callable[..., Any], layout: str, size: int) -> Callable[..., Any]:
    """fn on sequences in natural order."""
    if layout == "contiguous":
        return fn

    def reordered(*args: Any) -> Any:
        out, logsumexp = fn(*(jax_fa3.zigzag_shard(x, size) for x in args))
        return (
            jax_fa3.zigzag_unshard(out, size),
            jax_fa3.zigzag_unshard(logsumexp, size, axis=2),
        )

    return reordered


@functools.cache
def single(is_causal: bool) -> Callable[..., Any]:
    return jax.jit(attend("xla", precision="native", is_causal=is_causal))


def pull(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Results and gradients by one compilation."""

    def both(*args: Any) -> Any:
        results, back = jax.vjp(fn, *args)
        cotangents = jax.grad(loss_of(lambda *both: both), (0, 1))(*results)
        return results, back(cotangents)

    return jax.jit(both)
