"""Gradients against hand-derived float64 ones; forward mode, second order, vmap, blocks."""

from __future__ import annotations

from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from oracle import helpers
from oracle import numpy_reference as oracle

from jax_fa3 import _reference

F32 = np.dtype(np.float32)
MAIN = ("query", "key", "value")


def cotangents_of(case: cases.Case) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(11)
    dim_v = case.head_dim_v or case.head_dim
    dout = rng.normal(size=(case.batch, case.seqlen_q, case.num_heads_q, dim_v))
    dlogsumexp = rng.normal(size=(case.batch, case.num_heads_q, case.seqlen_q))
    return dout.astype(np.float32), dlogsumexp.astype(np.float32)


def check(name: str, actual: Any, expected: Any, limit: tolerances.Limit) -> None:
    if name in MAIN:
        tolerances.check_close(actual, expected, limit)
    else:
        error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
        assert error <= limit.rel_l2, (name, error)


@pytest.mark.parametrize("blocks", [None, (10, 12)])
@pytest.mark.parametrize("name", ["causal_more_rows", "everything"])
def test_native(name: str, blocks: Any) -> None:
    """Every differentiable argument, through out and logsumexp, in one block and in many."""
    case = cases.by_name(name)
    inputs = cases.make_inputs(case, F32)
    inputs["softmax_scale"] = np.float32(0.11)
    wanted = (*MAIN, "softmax_scale", *(n for n in ("sinks", "bias") if n in inputs))
    cotangents = cotangents_of(case)
    grads = helpers.gradients(
        cotangents, wanted, block_sizes=blocks, **inputs, **case.options(), precision="native"
    )
    expected = oracle.attention_gradients(
        *(inputs[n] for n in MAIN),
        *cotangents,
        **{n: x for n, x in inputs.items() if n not in MAIN},
        **case.options(),
    )
    for argument in wanted:
        check(argument, grads[argument], expected[argument], tolerances.GRADIENT_NATIVE_F32)


@pytest.mark.parametrize(("heads", "kv"), [(6, 2), (5, 1), (7, 7), (12, 4), (40, 8)])
def test_group_sum(heads: int, kv: int) -> None:
    """dk and dv sum over the query heads of a group."""
    case = cases.Case("group", seqlen_q=9, seqlen_k=13, num_heads_q=heads, num_heads_kv=kv,
                      head_dim=16)  # fmt: skip
    inputs = cases.make_inputs(case, F32)
    cotangents = cotangents_of(case)
    grads = helpers.gradients(cotangents, MAIN, **inputs, precision="native")
    expected = oracle.attention_gradients(*(inputs[n] for n in MAIN), *cotangents)
    for argument in MAIN:
        check(argument, grads[argument], expected[argument], tolerances.GRADIENT_NATIVE_F32)


@pytest.mark.parametrize("name", ["causal", "everything"])
def test_fp8_is_straight_through(name: str) -> None:
    """Gradients have the inputs' dtype and stay near the exact ones."""
    case = cases.by_name(name)
    inputs = cases.make_inputs(case)
    cotangents = cotangents_of(case)
    grads = helpers.gradients(cotangents, MAIN, **inputs, **case.options())
    expected = oracle.attention_gradients(
        *(inputs[n] for n in MAIN),
        *cotangents,
        **{n: x for n, x in inputs.items() if n not in MAIN},
        **case.options(),
    )
    for argument in MAIN:
        assert grads[argument].dtype == cases.BFLOAT16
        check(argument, grads[argument], expected[argument], tolerances.GRADIENT_FP8)


def test_fp8_gradients_do_not_depend_on_blocks() -> None:
    case = cases.by_name("sinks_causal")
    inputs = cases.make_inputs(case, F32)
    cotangents = cotangents_of(case)
    wanted = (*MAIN, "sinks")
    one, many = (
        helpers.gradients(cotangents, wanted, block_sizes=b, **inputs, **case.options())
        for b in ((case.seqlen_q, case.seqlen_k), (16, 16))
    )
    for argument in wanted:
        check(argument, many[argument], one[argument], tolerances.BLOCKS_FP8)


def small(precision: str) -> tuple[Any, Any]:
    """(f of (query, key, value), arguments) for transformation tests, two blocks each way."""
    case = cases.Case("small", batch=1, seqlen_q=4, seqlen_k=6, num_heads_q=2, num_heads_kv=1,
                      head_dim=8, is_causal=True)  # fmt: skip
    inputs = cases.make_inputs(case, F32)

    def f(query: Any, key: Any, value: Any) -> Any:
        operands, config = helpers.operands_and_config(
            query=query, key=key, value=value, is_causal=True, precision=precision
        )
        out, logsumexp = _reference.attention(operands, config, block_sizes=(2, 3))
        return jnp.sum(jnp.sin(out)) + jnp.sum(logsumexp**2)

    return f, tuple(jnp.asarray(inputs[n]) for n in MAIN)


@pytest.mark.parametrize("precision", ["native", "fp8"])
def test_forward_mode_agrees_with_reverse(precision: str) -> None:
    f, arguments = small(precision)
    rng = np.random.default_rng(2)
    tangents = tuple(jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in arguments)
    _, forward = jax.jit(lambda a, t: jax.jvp(f, a, t))(arguments, tangents)
    grads = jax.jit(jax.grad(f, (0, 1, 2)))(*arguments)
    reverse = sum(jnp.vdot(g, t) for g, t in zip(grads, tangents, strict=True))
    np.testing.assert_allclose(forward, reverse, rtol=2e-5)


def test_second_order() -> None:
    """A Hessian-vector product, forward over reverse and reverse over reverse."""
    f, arguments = small("native")
    rng = np.random.default_rng(3)
    direction = tuple(jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in arguments)
    gradient = jax.grad(f, (0, 1, 2))

    def along(*a: Any) -> Any:
        return sum(jnp.vdot(g, d) for g, d in zip(gradient(*a), direction, strict=True))

    forward = jax.jit(lambda a, t: jax.jvp(gradient, a, t)[1])(arguments, direction)
    reverse = jax.jit(jax.grad(along, (0, 1, 2)))(*arguments)
    step = 1e-2
    ahead, behind = (
        jax.jit(gradient)(*(a + s * d for a, d in zip(arguments, direction, strict=True)))
        for s in (step, -step)
    )
    for one, two, up, down in zip(forward, reverse, ahead, behind, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-4)
        difference = (np.asarray(up) - np.asarray(down)) / (2 * step)
        assert np.linalg.norm(one - difference) < 0.02 * np.linalg.norm(difference)


@pytest.mark.parametrize("precision", ["native", "fp8"])
def test_vmap_of_grad(precision: str) -> None:
    f, arguments = small(precision)
    stacked = tuple(jnp.stack([x, 2 * x, -x]) for x in arguments)
    gradient = jax.grad(f, (0, 1, 2))
    batched = jax.jit(jax.vmap(gradient))(*stacked)
    one = jax.jit(gradient)
    for i in range(3):
        for g, e in zip(batched, one(*(x[i] for x in stacked)), strict=True):
            np.testing.assert_allclose(g[i], e, rtol=1e-4, atol=1e-5)


def test_memory_is_linear_in_seqlen() -> None:
    """Reverse mode keeps no seqlen_q x seqlen_k array: temporaries grow about linearly."""

    def temporaries(seqlen: int) -> int:
        x = jax.ShapeDtypeStruct((1, seqlen, 8, 16), jnp.float32)
        operands, config = helpers.operands_and_config(
            **dict.fromkeys(MAIN, np.zeros((1, 2, 8, 16), F32)), precision="native"
        )

        def loss(query: Any, key: Any, value: Any) -> Any:
            whole = operands._replace(query=query, key=key, value=value)
            return jnp.sum(_reference.attention(whole, config)[0] ** 2)

        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    short, long = temporaries(2048), temporaries(8192)
    assert long < 5 * short
    assert long < 8192 * 8192 * 8 * 4 / 4
