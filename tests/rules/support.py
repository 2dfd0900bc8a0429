"""Shared by the tests of transformations, lowering and sharding."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_fa3

BATCH, SEQLEN_Q, SEQLEN_K, HEADS_Q, HEADS_KV, HEAD_DIM = 2, 5, 7, 6, 3, 64

_COLLECTIVE = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast)"
    r"(?:-start)?\("
)


def inputs(
    *,
    lead: tuple[int, ...] = (BATCH,),
    seqlen_q: int = SEQLEN_Q,
    seqlen_k: int = SEQLEN_K,
    heads_q: int = HEADS_Q,
    heads_kv: int = HEADS_KV,
    dtype: Any = jnp.bfloat16,
    seed: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """query, key, value; every head has a magnitude of its own."""
    rng = np.random.default_rng(seed)

    def one(seqlen: int, heads: int) -> jax.Array:
        x = rng.standard_normal((*lead, seqlen, heads, HEAD_DIM))
        return jnp.asarray(x * (1 + 0.3 * np.arange(heads))[:, None], dtype)

    return one(seqlen_q, heads_q), one(seqlen_k, heads_kv), one(seqlen_k, heads_kv)


@jax.jit  # eager, its operations and those of its gradient would be twenty programs
def _weighted(out: jax.Array, logsumexp: jax.Array) -> jax.Array:
    weight = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
    lse_weight = jnp.sin(jnp.arange(logsumexp.size, dtype=jnp.float32)).reshape(logsumexp.shape)
    finite = jnp.where(jnp.isfinite(logsumexp), logsumexp, 0.0)
    return jnp.sum(out.astype(jnp.float32) * weight) + jnp.sum(finite * lse_weight)


def loss_of(fn: Callable[..., Any]) -> Callable[..., jax.Array]:
    """A loss that sees every element of fn's (out, logsumexp) with a weight of its own."""

    def loss(*args: Any) -> jax.Array:
        return _weighted(*fn(*args))

    return loss


def attend(implementation: str | None = None, **options: Any) -> Callable[..., Any]:
    """attention(query, key, value) -> (out, logsumexp) with these options."""

    def fn(query: Any, key: Any, value: Any) -> Any:
        return jax_fa3.attention(
            query, key, value, return_logsumexp=True, implementation=implementation, **options
        )

    return fn


def assert_close(got: Any, want: Any, tolerance: float = 2e-2) -> None:
    """Trees are equal up to rounding, leaf by leaf, measured against the leaf's largest value."""
    got_leaves, want_leaves = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got_leaves) == len(want_leaves)
    for a, b in zip(got_leaves, want_leaves, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_array_equal(np.isfinite(x), np.isfinite(y))
        scale = np.abs(y[np.isfinite(y)]).max(initial=1e-6)
        np.testing.assert_allclose(x, y, atol=tolerance * scale, rtol=0)


def cuda_text(fn: Callable[..., Any], *args: Any) -> str:
    """StableHLO of fn lowered for CUDA; no GPU is needed. Factors of the quantiser have the shapes
    that its handler takes, in every program."""
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    for types in re.findall(r"custom_call @jax_fa3_quantize\w*\(.* : \((.*)\) -> ", text):
        _, key, _, *factors = re.findall(r"tensor<([^>]*)>", types)
        batch, _, heads_kv, *_ = key.split("x")
        assert set(factors) <= {"f32", f"{batch}x{heads_kv}xf32"}, factors
    return text


def calls(text: str) -> list[str]:
    """Custom-call targets of this package in lowered text, in order."""
    return re.findall(r"custom_call @(jax_fa3_\w+)", text)


def executions(text: str, target: str) -> int:
    """How often one run of the lowered program calls target (functions are shared in the text)."""
    bodies: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        start = re.search(r"func\.func (?:public |private )?@([\w.]+)\(", line)
        name = start.group(1) if start else name
        bodies.setdefault(name, []).append(line)

    def count(function: str) -> int:
        total = 0
        for line in bodies[function]:
            total += line.count(f"custom_call @{target}(")
            total += sum(count(callee) for callee in re.findall(r" call @([\w.]+)\(", line))
        return total

    return count("main")


def collectives(fn: Callable[..., Any], *args: Any) -> list[str]:
    """Collective operations in the compiled program."""
    return _COLLECTIVE.findall(jax.jit(fn).lower(*args).compile().as_text())
