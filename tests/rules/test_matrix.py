"""Precision and dtype x transformation x sharding: every pair of two of them occurs in some case.

All 6 x 6 x 6 cases would take minutes. The 36 here are a Latin square: each (dtype, precision) has
each transformation once, and each of both has each sharding once. Float8 keys and values, whose
gradient is that of query alone, come with each transformation and each sharding once. What is
compared with is dense attention in float32 on one device, written here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rules.support import HEAD_DIM, attend, collectives

import jax_fa3

pytestmark = [
    pytest.mark.usefixtures("extension"),
    pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="needs eight CPU devices"),
]

# Query's spec, then that of key and value. "wide": query heads over more devices than KV heads.
SHARDINGS: dict[str, tuple[Any, Any, Any]] = {
    "batch": (P("dp"), P("dp"), P("dp")),
    "both": (P("dp", None, "tp"), P("dp", None, "tp"), P("dp", None, "tp")),
    "wide": (P(None, None, ("tp", "dp")), P(), P()),
    "mixed": (P("dp"), P(None, None, "tp"), P()),
    "explicit": (P("dp", None, "tp"), P("dp", None, "tp"), P("dp", None, "tp")),
    "shard_map": (P("dp", None, "tp"), P("dp", None, "tp"), P("dp", None, "tp")),
}
COMBINATIONS = [
    (dtype, precision)
    for precision in ("fp8", "native")
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
]
# Largest error over the largest value: rounding of the inputs' dtype, and of float8.
LIMITS = {"fp8": 0.2, jnp.bfloat16: 0.04, jnp.float16: 0.01, jnp.float32: 1e-4}
MAPPED = 3


def dense(query: Any, key: Any, value: Any) -> Any:
    """Causal attention (seqlen_q == seqlen_k) with whole matrices."""
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key, precision="highest") * HEAD_DIM**-0.5
    logits = jnp.where(jnp.tri(query.shape[1], dtype=bool), logits, -jnp.inf)
    probabilities = jax.nn.softmax(logits)
    out = jnp.einsum("bhqk,bkhd->bqhd", probabilities, value, precision="highest")
    return out, jax.nn.logsumexp(logits, axis=-1)


def jit(fn: Any) -> Callable[..., Any]:
    return lambda query, key, value, dout, dlse: fn(query, key, value)


def grad(fn: Any) -> Callable[..., Any]:
    def run(query: Any, key: Any, value: Any, dout: Any, dlse: Any) -> Any:
        results, pull = jax.vjp(fn, query, key, value)
        return results, pull((dout, dlse))

    return run


def scan_remat(fn: Any) -> Callable[..., Any]:
    """Two layers, the named residuals saved; gradients of the first query and of key and value."""

    def run(query: Any, key: Any, value: Any, dout: Any, dlse: Any) -> Any:
        def layers(query: Any, key: Any, value: Any) -> Any:
            def layer(x: Any, weight: Any) -> Any:
                return fn(x * weight, key, value)[0].astype(x.dtype), None

            body = jax.checkpoint(layer, policy=jax_fa3.checkpoint_policy())
            return jax.lax.scan(body, query, jnp.array([1.0, 0.5], query.dtype))[0]

        out, pull = jax.vjp(layers, query, key, value)
        return out, pull(dout)

    return run


TRANSFORMS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "jit": jit,
    "grad": grad,
    "vmap": lambda fn: jit(jax.vmap(fn)),
    "vmap_of_grad": lambda fn: jax.vmap(grad(fn)),
    "grad_of_vmap": lambda fn: grad(jax.vmap(fn)),
    "scan_remat": scan_remat,
}
CASES = [
    pytest.param(
        dtype,
        precision,
        transform,
        [*SHARDINGS][(i + j) % len(SHARDINGS)],
        id=f"{jnp.dtype(dtype).name}-{precision}-{transform}-{[*SHARDINGS][(i + j) % 6]}",
    )
    for i, (dtype, precision) in enumerate(COMBINATIONS)
    for j, transform in enumerate(TRANSFORMS)
]


@functools.cache
def arrays(mapped: bool, heads_kv: int) -> tuple[Any, ...]:
    """query, key, value, dout, dlogsumexp in float32; each head and example its own magnitude."""
    rng = np.random.default_rng(4)
    lead = (MAPPED, 4) if mapped else (4,)

    def draw(heads: int) -> Any:
        size = (1 + 0.2 * np.arange(heads))[:, None]
        return (rng.normal(size=(*lead, 6, heads, HEAD_DIM)) * size).astype(jnp.bfloat16)

    main = [np.asarray(draw(heads), np.float32) for heads in (8, heads_kv, heads_kv, 8)]
    return (*main, rng.normal(size=(*lead, 8, 6)).astype(np.float32))


@functools.cache
def expected(transform: str, heads_kv: int) -> Any:
    run = jax.jit(TRANSFORMS[transform](dense))
    return jax.tree.map(np.asarray, run(*arrays("vmap" in transform, heads_kv)))


@pytest.mark.parametrize(("dtype", "precision", "transform", "sharding"), CASES)
def test_case(dtype: Any, precision: str, transform: str, sharding: str) -> None:
    heads_kv, is_mapped = 2 if sharding == "wide" else 4, "vmap" in transform
    kind = AxisType.Explicit if sharding == "explicit" else AxisType.Auto
    mesh = Mesh(
        np.array(jax.devices("cpu")[:8]).reshape(2, 4), ("dp", "tp"), axis_types=(kind,) * 2
    )
    specs = SHARDINGS[sharding]
    logsumexp_spec = P(specs[0][0], specs[0][2] if len(specs[0]) > 2 else None)
    fn = attend(precision=precision, is_causal=True)
    if sharding == "shard_map":
        fn = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=(specs[0], logsumexp_spec))
    run = TRANSFORMS[transform](fn)
    with jax.set_mesh(mesh) if sharding == "explicit" else contextlib.nullcontext():
        args = []
        for x, spec in zip(
            arrays(is_mapped, heads_kv), (*specs, specs[0], logsumexp_spec), strict=True
        ):
            own = P(None, *spec) if is_mapped else spec
            narrow = x if spec is logsumexp_spec else x.astype(dtype)
            args.append(jax.device_put(narrow, NamedSharding(mesh, own)))
        got = jax.jit(run)(*args)
        if transform in ("jit", "vmap") and sharding != "mixed":
            assert collectives(run, *args) == []
    limit = LIMITS["fp8"] if precision == "fp8" else LIMITS[dtype]
    wanted = jax.tree.leaves(expected(transform, heads_kv))
    for a, b in zip(jax.tree.leaves(got), wanted, strict=True):
        assert a.shape == b.shape
        assert a.dtype in (dtype, jnp.float32)
        error = np.abs(np.asarray(a, np.float64) - b).max() / np.abs(b).max()
        assert error < limit, error


def of_query(run: Callable[..., Any], fn: Any) -> Callable[..., Any]:
    """run of fn(query, rest), where rest are the operands without a gradient."""

    def of_all(query: Any, key: Any, value: Any, scale: Any, dout: Any, dlse: Any) -> Any:
        rest = key, value, scale
        return run(lambda query, rest: fn(query, *rest), query, rest, dout, dlse)

    return of_all


def pulled(fn: Any, query: Any, rest: Any, dout: Any, dlse: Any) -> Any:
    results, pull = jax.vjp(lambda x: fn(x, rest), query)
    return results, pull((dout.astype(results[0].dtype), dlse))


def scanned(fn: Any, query: Any, rest: Any, dout: Any, dlse: Any) -> Any:
    def layers(query: Any) -> Any:
        def layer(x: Any, weight: Any) -> Any:
            out, logsumexp = fn(x * weight, rest)
            return out.astype(x.dtype), logsumexp

        body = jax.checkpoint(layer, policy=jax_fa3.checkpoint_policy())
        return jax.lax.scan(body, query, jnp.array([1.0, 0.5], query.dtype))

    results, pull = jax.vjp(layers, query)
    return results, pull((dout.astype(results[0].dtype), jnp.stack([dlse, -dlse])))


OF_FLOAT8: dict[str, Callable[..., Any]] = {
    "jit": lambda fn, query, rest, dout, dlse: fn(query, rest),
    "grad": pulled,
    "vmap": lambda fn, query, rest, dout, dlse: jax.vmap(fn)(query, rest),
    "vmap_of_grad": lambda fn, *args: jax.vmap(functools.partial(pulled, fn))(*args),
    "grad_of_vmap": lambda fn, *args: pulled(jax.vmap(fn), *args),
    "scan_remat": scanned,
}


@pytest.mark.parametrize(("transform", "sharding"), [*zip(OF_FLOAT8, SHARDINGS, strict=True)])
def test_float8_keys_and_values(transform: str, sharding: str) -> None:
    """Of both kinds, with a factor for each example and head; query is float8 where it may be."""
    heads_kv, is_mapped = 2 if sharding == "wide" else 4, "vmap" in transform
    is_narrow = transform in ("jit", "vmap")
    kind = AxisType.Explicit if sharding == "explicit" else AxisType.Auto
    mesh = Mesh(
        np.array(jax.devices("cpu")[:8]).reshape(2, 4), ("dp", "tp"), axis_types=(kind,) * 2
    )
    specs = SHARDINGS[sharding]
    by_heads = [P(s[0] if len(s) else None, s[2] if len(s) > 2 else None) for s in specs]
    query, key, value, dout, dlse = arrays(is_mapped, heads_kv)
    query, key, value = (
        jnp.asarray(query, jnp.float8_e4m3fn if is_narrow else jnp.bfloat16),
        jnp.asarray(key, jnp.float8_e4m3fn),
        jnp.asarray(value, jnp.float8_e5m2),
    )
    scale = np.linspace(0.5, 1.5, key.size // 6 // HEAD_DIM, dtype=np.float32)
    scale = scale.reshape(*key.shape[:-3], heads_kv)

    def fn(query: Any, key: Any, value: Any, scale: Any) -> Any:
        options = {"query_descale": 0.7} if is_narrow else {}
        return attend(is_causal=True, key_descale=scale, value_descale=scale, **options)(
            query, key, value
        )

    def plain(query: Any, key: Any, value: Any, scale: Any) -> Any:
        wide = (x.astype(jnp.float32) for x in (query, key, value))
        factors = (0.7 if is_narrow else 1.0), *[scale[..., None, :, None]] * 2
        return dense(*(x * factor for x, factor in zip(wide, factors, strict=True)))

    operands = query, key, value, scale, dout, dlse
    want = jax.jit(of_query(OF_FLOAT8[transform], plain))(*operands)
    if sharding == "shard_map":
        fn = jax.shard_map(
            fn, mesh=mesh, in_specs=(*specs, by_heads[1]), out_specs=(specs[0], by_heads[0])
        )
    run = of_query(OF_FLOAT8[transform], fn)
    with jax.set_mesh(mesh) if sharding == "explicit" else contextlib.nullcontext():
        of_all = (*specs, by_heads[1], specs[0], by_heads[0])
        own = [P(None, *spec) if is_mapped else spec for spec in of_all]
        args = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(operands, own, strict=True)
        ]
        got = jax.jit(run)(*args)
        if transform == "jit":
            assert collectives(run, *args) == []
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        error = np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max()
        assert error < LIMITS["fp8"] * np.abs(np.asarray(b, np.float64)).max(), error


def test_every_pair_occurs() -> None:
    cases = [case.values for case in CASES]
    for one in (lambda c: c[:2], lambda c: c[2]):
        pairs = {(one(case), case[3]) for case in cases}
        assert len(pairs) == 36
    assert len({(case[:2], case[2]) for case in cases}) == 36


def test_the_limits_reject_what_is_wrong() -> None:
    """Zeros, a swapped head and a lost sum over devices are further off than float8 is."""
    _, (dquery, dkey, _) = expected("grad", 4)
    for wrong, right in (
        (dquery * 0, dquery),
        (dquery[:, :, ::-1], dquery),
        (dkey / 2, dkey),
        (dkey[::-1], dkey),
    ):
        assert np.abs(wrong - right).max() / np.abs(right).max() > LIMITS["fp8"]
