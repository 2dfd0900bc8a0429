"""Reverse mode: what the forward pass saves and how the backward pass uses it.

Saved are the operands, `out` and `logsumexp`; the last two carry the names below for remat
policies. The backward pass recomputes the probabilities from them (`_grad`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from jax_fa3 import _batching, _compat
from jax_fa3._local import Call

OUT_NAME = "jax_fa3_out"
LOGSUMEXP_NAME = "jax_fa3_logsumexp"

SECOND_ORDER = (
    "{function}: the CUDA path is differentiable once, in reverse mode; got second-order or "
    'forward-mode differentiation. Pass implementation="xla".'
)

Arrays = tuple[jax.Array, ...]


def checkpoint_policy() -> Callable[..., Any]:
    """Policy for `jax.checkpoint` that keeps attention's results, so the kernel is not run twice.

    `jax.checkpoint(layer, policy=jax_fa3.checkpoint_policy())` saves only the residuals named
    "jax_fa3_out" and "jax_fa3_logsumexp"; combine it with others by
    `jax.checkpoint_policies.save_from_both_policies`.

    Returns: a policy as `jax.checkpoint` takes it.
    """
    policy: Callable[..., Any] = jax.checkpoint_policies.save_only_these_names(
        OUT_NAME, LOGSUMEXP_NAME
    )
    return policy


@functools.cache
def build(call: Call) -> Callable[..., Arrays]:
    """The differentiable op for one set of options and operands, under jit.

    Returned function: arrays in the order of call.names, each [batch, ...] (softmax_scale and sinks
    with a leading 1) -> (out, logsumexp).
    """
    run_forward = _batching.forward(call)
    of_gradient = call._replace(keeps_images=call.config.precision == "fp8")
    forward_once = first_order_only(
        _batching.forward(of_gradient),
        SECOND_ORDER.format(function=call.function),
    )
    backward_once = first_order_only(
        _batching.backward(call), SECOND_ORDER.format(function=call.function)
    )

    @jax.custom_vjp
    def op(*arrays: jax.Array) -> Arrays:
        return run_forward(*arrays)

    def fwd(*arrays: jax.Array) -> tuple[Arrays, tuple[Arrays, jax.Array, jax.Array]]:
        out, logsumexp = forward_once(*arrays)
        out = _compat.named_residual(out, OUT_NAME)
        logsumexp = _compat.named_residual(logsumexp, LOGSUMEXP_NAME)
        return (out, logsumexp), (arrays, out, logsumexp)

    def bwd(
        saved: tuple[Arrays, jax.Array, jax.Array], cotangents: Arrays
    ) -> tuple[jax.Array | None, ...]:
        arrays, out, logsumexp = saved
        grads = iter(backward_once(*arrays, out, logsumexp, *cotangents))
        return tuple(
            next(grads) if call.wants_gradient(name, x) else None
            for name, x in zip(call.names, arrays, strict=True)
        )

    op.defvjp(fwd, bwd)

    def jax_fa3_attention(*arrays: jax.Array) -> Arrays:
        return op(*arrays)

    # Without jit an eager call on JAX 0.10 lowers the program again every time.
    return jax.jit(jax_fa3_attention)


def first_order_only(fn: Callable[..., Arrays], refusal: str) -> Callable[..., Arrays]:
    """fn, with one sentence in place of JAX's message when it is differentiated."""

    @jax.custom_vjp
    def once(*arrays: jax.Array) -> Arrays:
        return fn(*arrays)

    def refuse(*arrays: jax.Array) -> Any:
        raise NotImplementedError(refusal)

    once.defvjp(refuse, refuse)
    return once
