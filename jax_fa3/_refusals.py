"""Identities that raise one sentence when a program that holds them would run where it cannot.

A platform and a mode of differentiation are known later than shapes: at lowering, or when a tangent
is computed. The message waits there in place of an array and is dropped wherever the program turns
out to be fine.
"""

from __future__ import annotations

from typing import Any

import jax

from jax_fa3 import _compat


def on_lowering(x: jax.Array, error: type[Exception], message: str) -> jax.Array:
    """x; lowering or computing it raises error(message), "{platforms}" filled in."""
    refused: jax.Array = _REFUSE.bind(x, error=error, message=message)
    return refused


def reverse_mode_only(x: jax.Array, error: type[Exception], message: str) -> jax.Array:
    """x; its tangent may be transposed, as reverse mode does, but computing it raises."""

    @jax.custom_jvp
    def identity(x: jax.Array) -> jax.Array:
        return x

    @identity.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        return primals[0], on_lowering(tangents[0], error, message)

    same: jax.Array = identity(x)
    return same


def _raise(platforms: str, error: type[Exception], message: str) -> Any:
    raise error(message.format(platforms=platforms))


# Linear in its operand: transposing it leaves nothing, so reverse mode never meets the message.
_REFUSE: Any = _compat.linear_identity("jax_fa3_refuse", _raise)
