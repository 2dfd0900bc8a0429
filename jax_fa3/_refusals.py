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

    same: jax.Array = _GUARD.bind(x, error=error, message=message)
    return same


def _raise(platforms: str, error: type[Exception], message: str) -> Any:
    raise error(message.format(platforms=platforms))


_REFUSE: Any = _compat.linear_identity("jax_fa3_refuse", _raise)
# Linear: transposing it leaves nothing, so reverse mode never meets the message. Nor does it map a
# tangent; `jax.jacfwd` does, and there JAX's own rules would raise before anything is lowered.
_REFUSE_TANGENT: Any = _compat.linear_identity("jax_fa3_refuse_tangent", _raise, mappable=False)
_GUARD: Any = _compat.identity("jax_fa3_reverse_mode_only", _REFUSE_TANGENT.bind)
