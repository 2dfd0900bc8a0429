"""Calls of the XLA path for the oracle tests: NumPy arrays in, NumPy arrays out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from oracle import numpy_reference

import jax_fa3
from jax_fa3 import _fold, _fp8_model, _reference, _shapes

Array = np.ndarray[Any, Any]
_ARRAYS = frozenset(_shapes.Operands._fields)


def attend(**arguments: Any) -> tuple[Array, Array]:
    """(out, logsumexp) of the public function on the XLA path, arguments by name."""
    query, key, value = (jnp.asarray(arguments.pop(n)) for n in ("query", "key", "value"))
    out, logsumexp = jax_fa3.attention(
        query, key, value, return_logsumexp=True, implementation="xla", **arguments
    )
    return np.asarray(out), np.asarray(logsumexp)


def operands_and_config(**arguments: Any) -> tuple[_shapes.Operands, _shapes.Config]:
    """Checked and folded internals of a call."""
    query, key, value = (jnp.asarray(arguments.pop(n)) for n in ("query", "key", "value"))
    _, config = _shapes.check_attention("attention", query, key, value, **arguments)
    arrays = {name: x for name, x in arguments.items() if name in _ARRAYS}
    return _fold.fold_operands(query, key, value, **arrays), config


@functools.cache
def _in_blocks(config: _shapes.Config, block_sizes: tuple[int, int] | None) -> Callable[..., Any]:
    return jax.jit(lambda x: _reference.attention(x, config, block_sizes=block_sizes))


def in_blocks(block_sizes: tuple[int, int] | None, **arguments: Any) -> tuple[Array, Array]:
    """The reference with given block sizes."""
    operands, config = operands_and_config(**arguments)
    out, logsumexp = _in_blocks(config, block_sizes)(operands)
    return np.asarray(out), np.asarray(logsumexp)


def attend_and_operands(**arguments: Any) -> tuple[Array, Array, numpy_reference.Quantized]:
    """(out, logsumexp) of precision="fp8" and the quantised operands, one compilation for both."""
    operands, config = operands_and_config(**arguments)

    def run(x: _shapes.Operands) -> Any:
        return _reference.attention(x, config), _fp8_model.quantize_operands(x, config)

    (out, logsumexp), images = jax.tree.map(np.asarray, jax.jit(run)(operands))
    return out, logsumexp, numpy_reference.Quantized(*images)


def quantized(**arguments: Any) -> numpy_reference.Quantized:
    """The package's quantised operands as the NumPy model takes them."""
    operands, config = operands_and_config(**arguments)
    run = jax.jit(lambda x: _fp8_model.quantize_operands(x, config))
    return numpy_reference.Quantized(*(np.asarray(x) for x in run(operands)))


@functools.cache
def _gradients(block_sizes: Any, **static: Any) -> Callable[..., Any]:
    """The program of `gradients` for these options, compiled once for every call of one shape."""

    def loss(differentiable: dict[str, Any], others: dict[str, Any], cotangents: Any) -> Any:
        both = {**others, **differentiable}
        if block_sizes is None:
            main = [both.pop(n) for n in ("query", "key", "value")]
            out, logsumexp = jax_fa3.attention(
                *main, return_logsumexp=True, implementation="xla", **both, **static
            )
        else:
            operands, config = operands_and_config(**both, **static)
            out, logsumexp = _reference.attention(operands, config, block_sizes=block_sizes)
        finite = jnp.where(jnp.isneginf(logsumexp), 0.0, logsumexp)
        return jnp.sum(out.astype(jnp.float32) * cotangents[0]) + jnp.sum(finite * cotangents[1])

    return jax.jit(jax.grad(loss))


def gradients(
    cotangents: tuple[Array, Array],
    wanted: tuple[str, ...],
    *,
    block_sizes: Any = None,
    **arguments: Any,
) -> dict[str, Array]:
    """Gradients of <out, c0> + <logsumexp, c1> (empty rows of logsumexp left out) by name."""
    static = {name: x for name, x in arguments.items() if name not in _ARRAYS}
    arrays = {name: jnp.asarray(x) for name, x in arguments.items() if name in _ARRAYS}
    differentiable = {name: arrays.pop(name) for name in wanted}
    result = _gradients(block_sizes, **static)(differentiable, arrays, cotangents)
    return {name: np.asarray(x) for name, x in result.items()}
