"""Forward mode and second order: served on the XLA path, one sentence on that of CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rules.support import assert_close, attend, inputs, loss_of

pytestmark = pytest.mark.usefixtures("extension")


def in_scan(fn: Any, args: Any, query: Any) -> Any:
    """fn twice in a row, over the same key and value."""

    def layer(x: Any, _: Any) -> Any:
        return fn(x, *args[1:])[0], None

    return jax.lax.scan(layer, query, None, length=2)[0]


def test_forward_mode_names_the_xla_path() -> None:
    args = inputs()
    with pytest.raises(NotImplementedError, match=r'forward-mode.*implementation="xla"'):
        jax.jvp(attend(), args, args)
    jax.jvp(attend("xla", precision="native"), args, args)


@pytest.mark.parametrize(
    "mode",
    ["jvp_of_jit", "jit_of_jvp", "scan", "linearize", "jacfwd_of_jit", "jacfwd_of_scan"],
)
def test_forward_mode_through_other_transformations(mode: str) -> None:
    args = inputs()
    fn = attend(precision="native")
    layers = functools.partial(in_scan, fn, args)
    runs: dict[str, Callable[[], Any]] = {
        "jvp_of_jit": lambda: jax.jvp(jax.jit(fn), args, args),
        "jit_of_jvp": lambda: jax.jit(lambda *x: jax.jvp(fn, x, x))(*args),
        "scan": lambda: jax.jvp(layers, args[:1], args[:1]),
        "linearize": lambda: jax.linearize(jax.jit(fn), *args)[1](*args),
        "jacfwd_of_jit": lambda: jax.jacfwd(jax.jit(fn))(*args),
        "jacfwd_of_scan": lambda: jax.jit(jax.jacfwd(layers))(args[0]),
    }
    with pytest.raises(NotImplementedError, match=r"^attention: .* got forward-mode diff"):
        runs[mode]()


def test_second_order_names_the_xla_path() -> None:
    query, key, value = inputs()

    def first(implementation: str | None) -> Any:
        loss = loss_of(attend(implementation, precision="native"))
        grad = jax.grad(loss)
        return lambda x: jnp.sum(grad(x, key, value).astype(jnp.float32) ** 2)

    with pytest.raises(NotImplementedError, match=r'second-order.*implementation="xla"'):
        jax.grad(first(None))(query)
    with pytest.raises(NotImplementedError, match=r'second-order.*implementation="xla"'):
        jax.jit(jax.grad(first(None)))(query)
    assert bool(jnp.any(jax.grad(first("xla"))(query)))


def test_second_order_through_a_scan() -> None:
    """Where JAX forgets the rules of custom_jvp functions."""
    args = inputs(seqlen_q=7, dtype=jnp.float32)
    narrow = inputs(seqlen_q=7)

    def norm(fn: Any, args: Any) -> Any:
        grad = jax.grad(lambda x: jnp.sum(in_scan(fn, args, x)))
        return jax.jit(jax.grad(lambda x: jnp.sum(grad(x) ** 2)))(args[0])

    def unrolled(query: Any) -> Any:
        fn = attend("xla", precision="native")
        return jnp.sum(fn(fn(query, *args[1:])[0], *args[1:])[0])

    want = jax.grad(lambda x: jnp.sum(jax.grad(unrolled)(x) ** 2))(args[0])
    assert_close(norm(attend("xla", precision="native"), args), want, 1e-4)
    with pytest.raises(NotImplementedError, match=r'^attention: .*implementation="xla"'):
        norm(attend(precision="native"), narrow)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_float8_gradient_asks_for_16_bit_inputs(implementation: str | None) -> None:
    args = [x.astype(jnp.float8_e4m3fn) for x in inputs()]
    descales = {"query_descale": 1.0, "key_descale": 1.0, "value_descale": 1.0}
    loss = loss_of(attend(implementation, **descales))
    for argument, name in enumerate(("query", "key", "value")):
        with pytest.raises(TypeError, match=f"attention: {name} must be a 16-bit array"):
            jax.grad(loss, argument)(*args)
        with pytest.raises(TypeError, match="Pass 16-bit inputs"):
            jax.jit(jax.grad(loss, argument))(*args)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_wide_query_over_float8_keys_has_a_gradient(implementation: str | None) -> None:
    query, key, value = inputs()
    cache = key.astype(jnp.float8_e4m3fn), value.astype(jnp.float8_e4m3fn)
    loss = loss_of(attend(implementation, key_descale=1.0, value_descale=1.0))
    grad = jax.jit(jax.grad(loss))(query, *cache)
    assert grad.dtype == query.dtype
    assert bool(jnp.any(grad))
