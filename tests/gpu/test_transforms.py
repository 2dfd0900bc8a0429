"""vmap, grad and jit around the kernels on CUDA arrays; memory layouts that XLA may choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu import reference
from gpu.reference import assert_same_bits, attend, run

import jax_fa3

pytestmark = pytest.mark.gpu
PRESETS = ("accurate", "native")


def examples() -> dict[str, Any]:
    """Three mapped examples of batch 2, each of its own magnitude."""
    rng = np.random.default_rng(3)

    def draw(*shape: int) -> Any:
        sizes = np.arange(1, 1 + shape[0]).reshape(-1, 1, 1, 1, 1) * 0.4
        return (rng.normal(size=shape) * sizes).astype(cases.BFLOAT16)

    return {
        "query": draw(3, 2, 70, 4, 64),
        "key": draw(3, 2, 90, 2, 64),
        "value": draw(3, 2, 90, 2, 64),
    }


def call(preset: str) -> Callable[[Any, Any, Any], Any]:
    def fn(query: Any, key: Any, value: Any) -> Any:
        x = {"query": query, "key": key, "value": value}
        return tuple(attend(x, causal="bottom_right", **reference.PRESETS[preset]))

    return fn


def stacked(fn: Any, axes: tuple[Any, ...], *arrays: Any) -> Any:
    """fn over a Python loop in place of vmap."""
    size = next(x.shape[a] for x, a in zip(arrays, axes, strict=True) if a is not None)

    def pick(x: Any, axis: Any, i: int) -> Any:
        return x if axis is None else jnp.take(x, i, axis=axis)

    results = [fn(*(pick(x, a, i) for x, a in zip(arrays, axes, strict=True))) for i in range(size)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)


def test_vmap_equals_the_loop() -> None:
    """Every in_axes, shared keys, two nested vmaps: the same bits, whatever is folded where."""
    x = examples()
    q, k, v = x.values()

    def every(q: Any, k: Any, v: Any) -> Any:
        pairs = {}
        for preset in PRESETS:
            fn = call(preset)
            front, second = (0, 0, 0), (1, 0, 2)
            moved = (jnp.moveaxis(q, 0, 1), k, jnp.moveaxis(v, 0, 2))
            shared, one_query = (0, None, None), (None, 0, 0)
            for name, axes, arrays in (
                ("front", front, (q, k, v)),
                ("moved", second, moved),
                ("shared keys", shared, (q, k[0], v[0])),
                ("shared query", one_query, (q[0], k, v)),
            ):
                pairs[preset, name] = jax.vmap(fn, axes)(*arrays), stacked(fn, axes, *arrays)
            twice = jax.vmap(jax.vmap(fn, (0, None, None)), (None, 0, 0))(q, k, v)
            loop = stacked(lambda k, v, fn=fn: stacked(fn, (0, None, None), q, k, v), (0, 0), k, v)
            pairs[preset, "nested"] = twice, loop
        return pairs

    for name, (mapped, loop) in run(every, q, k, v).items():
        try:
            assert_same_bits(mapped, loop)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_vmap_of_scale_and_descales() -> None:
    """A softmax_scale or a descale per example equals the loop."""
    x = examples()
    scales = np.array([0.05, 0.2, -0.1], np.float32)
    narrow = {name: a.astype(cases.E4M3) for name, a in x.items()}
    descale = np.linspace(0.5, 4.0, 12).reshape(3, 2, 2).astype(np.float32)
    one = np.ones((), np.float32)

    def scaled(q: Any, k: Any, v: Any, scale: Any) -> Any:
        return [
            tuple(attend({"query": q, "key": k, "value": v, "softmax_scale": scale},
                         **reference.PRESETS[p]))
            for p in PRESETS
        ]  # fmt: skip

    def descaled(q: Any, k: Any, v: Any, descale: Any) -> Any:
        operands = {"query": q, "key": k, "value": v, "query_descale": one, "key_descale": descale}
        return tuple(attend({**operands, "value_descale": descale}))

    def every(wide: Any, narrow: Any, scales: Any, descale: Any) -> Any:
        axes = (0, 0, 0, 0)
        main = [[x[n] for n in ("query", "key", "value")] for x in (wide, narrow)]
        arrays = {"scale": (*main[0], scales), "descale": (*main[1], descale)}
        functions = {"scale": scaled, "descale": descaled}
        return {
            name: (jax.vmap(fn, axes)(*arrays[name]), stacked(fn, axes, *arrays[name]))
            for name, fn in functions.items()
        }

    for mapped, loop in run(every, x, narrow, scales, descale).values():
        assert_same_bits(mapped, loop)
        assert not np.array_equal(np.asarray(jax.tree.leaves(loop)[0][0], np.float32),
                                  np.asarray(jax.tree.leaves(loop)[0][1], np.float32))  # fmt: skip


@pytest.mark.parametrize("preset", PRESETS)
def test_vmap_and_grad_in_any_order(preset: str) -> None:
    """Three examples of batch 2; each example gets its own gradient."""
    x = examples()
    weights = np.random.default_rng(8).normal(size=x["query"].shape).astype(np.float32)

    def loss(q: Any, k: Any, v: Any, w: Any) -> Any:
        out, logsumexp = call(preset)(q, k, v)
        return jnp.sum(out.astype(jnp.float32) * w) + jnp.sum(logsumexp**2)

    def every(q: Any, k: Any, v: Any, w: Any) -> Any:
        grad = jax.grad(loss, (0, 1, 2))
        loop = stacked(grad, (0, 0, 0, 0), q, k, v, w)
        moved = jax.vmap(grad, (1, 0, 2, 0))(jnp.moveaxis(q, 0, 1), k, jnp.moveaxis(v, 0, 2), w)
        whole = jax.grad(lambda *a: jnp.sum(jax.vmap(loss)(*a)), (0, 1, 2))(q, k, v, w)
        return loop, {"vmap(grad)": jax.vmap(grad)(q, k, v, w), "moved": moved, "grad(vmap)": whole}

    loop, others = run(every, *x.values(), weights)
    for name, grads in others.items():
        for got, expected in zip(grads, loop, strict=True):
            got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
            for i in range(3):
                error = np.linalg.norm(got[i] - expected[i]) / np.linalg.norm(expected[i])
                assert error < 5e-3, (name, i, error)  # sums in another order, bfloat16 results


@pytest.mark.parametrize("preset", PRESETS)
def test_gradient_of_a_scan_with_remat(preset: str) -> None:
    """Layers in a scan, saved by name or computed again: the gradient of the loop over them."""
    x = examples()
    query, key, value = (jnp.asarray(a[0]) for a in x.values())
    weights = jnp.array([1.0, 0.5, 2.0], jnp.bfloat16)
    options = {**reference.PRESETS[preset], "causal": "bottom_right", "deterministic": True}

    def layer(x: Any, weight: Any) -> Any:
        return attend({"query": x * weight, "key": key, "value": value}, **options).out, None

    def looped(x: Any) -> Any:
        for i in range(3):
            x = layer(x, weights[i])[0]
        return jnp.sum(x.astype(jnp.float32) ** 2)

    def scanned(policy: Any) -> Any:
        body = jax.checkpoint(layer, policy=policy)
        return lambda x: jnp.sum(jax.lax.scan(body, x, weights)[0].astype(jnp.float32) ** 2)

    def every(x: Any) -> Any:
        policies = (None, jax_fa3.checkpoint_policy())
        return [jax.grad(f)(x) for f in (looped, *map(scanned, policies))]

    expected, *others = (np.asarray(g, np.float64) for g in run(every, query))
    assert np.linalg.norm(expected) > 0
    for got in others:
        assert np.linalg.norm(got - expected) < 5e-3 * np.linalg.norm(expected)


def test_traced_scale_does_not_recompile() -> None:
    """New values of softmax_scale reuse the program; each value counts."""
    x = jax.tree.map(jnp.asarray, {n: a[0] for n, a in examples().items()})
    traces = []

    @jax.jit
    def fn(x: Any, scale: Any) -> Any:
        traces.append(None)
        return {p: attend(x, softmax_scale=scale, **reference.PRESETS[p]) for p in PRESETS}

    results = [fn(x, jnp.float32(s)) for s in (0.1, 0.2, -0.3, 0.0)]
    assert len(traces) == 1
    means = np.array([[float(jnp.mean(r[p].logsumexp)) for p in PRESETS] for r in results])
    assert (np.abs(np.diff(means, axis=0)) > 1e-3).all()
    static = jax.jit(lambda x: {p: attend(x, softmax_scale=0.2, **reference.PRESETS[p])
                                for p in PRESETS})  # fmt: skip
    assert_same_bits(results[1], static(x))


def test_memory_layouts() -> None:
    """Split, transposed, broadcast and strided operands equal contiguous copies, twice."""
    rng = np.random.default_rng(9)
    packed = rng.normal(size=(2, 300, 3, 8, 64)).astype(cases.BFLOAT16)
    heads_first = rng.normal(size=(2, 8, 300, 64)).astype(cases.BFLOAT16)
    columns = rng.normal(size=(64, 8, 300, 2)).astype(cases.BFLOAT16)
    one_head = rng.normal(size=(2, 300, 1, 64)).astype(cases.BFLOAT16)

    def operands(packed: Any, heads_first: Any, columns: Any, one_head: Any) -> Any:
        q, k, v = (packed[:, :, i] for i in range(3))
        turned = jnp.transpose(heads_first, (0, 2, 1, 3))
        reversed_axes = jnp.transpose(columns, (3, 2, 1, 0))
        wide = jnp.broadcast_to(one_head, (2, 300, 4, 64))
        strided = packed.reshape(2, 300, 24, 64)[:, 1::2, ::6]
        return {
            "packed": (q, k, v),
            "turned": (turned, k, reversed_axes),
            "reversed": (reversed_axes, turned, v),
            "broadcast": (q, wide, wide),
            "strided": (q, strided, strided[:, ::-1]),
        }

    def every(*arrays: Any) -> Any:
        return {
            name: {
                p: attend(dict(zip(("query", "key", "value"), x, strict=True)),
                          causal="bottom_right", **reference.PRESETS[p])
                for p in PRESETS
            }
            for name, x in operands(*arrays).items()
        }  # fmt: skip

    arrays = jax.tree.map(jnp.asarray, (packed, heads_first, columns, one_head))
    program = jax.jit(every)
    found, again = program(*arrays), program(*arrays)
    assert_same_bits(again, found)
    copies = jax.tree.map(lambda x: jnp.array(np.asarray(x)), operands(*arrays))
    contiguous = jax.jit(
        lambda many: {
            name: {
                p: attend(dict(zip(("query", "key", "value"), x, strict=True)),
                          causal="bottom_right", **reference.PRESETS[p])
                for p in PRESETS
            }
            for name, x in many.items()
        }
    )(copies)  # fmt: skip
    assert_same_bits(found, contiguous)
