"""Speed of gradients over the FlashAttention-3 grid, next to rivals, as JSON rows.

python benchmarks/bench_backward.py --json benchmarks/results/bwd.json

Two kinds of rows. "bwd": the backward pass alone, from saved results (2.5 times the FLOPs of the
forward). "step": forward and backward from bf16 inputs, as a training step runs them (3.5 times).
In fp8 the step quantises; its backward recomputes from the same quantised query and key.
"""

from __future__ import annotations

import harness  # isort: skip  # sets how JAX allocates, before JAX is imported

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import contested
import jax
import jax.numpy as jnp
from rivals import RIVALS, JaxRival

from jax_fa3._cli import bench, contenders, text
from jax_fa3._cli.contenders import Contender
from jax_fa3._cli.grid import Shape
from jax_fa3._cli.timing import Side, jax_side

OURS = ("native", "deterministic", "accurate", "fast")
KINDS = ("bwd", "step")
JAX_RIVALS = tuple(
    key for key, r in RIVALS.items() if isinstance(r, JaxRival) and "bf16" in r.precisions
)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    bench.add_grid_flags(made)
    text.add_list_flag(made, "--ours", ["native", "accurate"], of=OURS)
    text.add_list_flag(made, "--kinds", KINDS, of=KINDS)
    text.add_list_flag(made, "--rivals", ["cudnn", "fa3jax"], of=(*JAX_RIVALS, "none"))
    contested.add_flag(made)
    return made


def gradients(function: Callable[..., Any], shape: Shape, kind: str) -> Side:
    """function(query, key, value) differentiated, on bf16 inputs of a shape."""
    operands = contenders.inputs(shape, jnp.bfloat16)
    dout = contenders.inputs(shape, jnp.bfloat16, seed=1)[0]
    if kind == "step":
        return jax_side(lambda *x: jax.vjp(function, *x[:3])[1](x[3]), *operands, dout)
    _, pull = jax.jit(lambda *x: jax.vjp(function, *x))(*operands)
    return jax_side(lambda pull, dout: pull(dout), pull, dout)


def ours(preset: str, kind: str) -> Contender:
    """`jax_fa3.attention` differentiated; the XLA path where no kernel runs."""
    name = contenders.our_name(preset)

    def build(shape: Shape) -> Side:
        return gradients(contenders.our_call(preset, is_causal=shape.is_causal), shape, kind)

    return Contender(**name, with_quantize=name["precision"] == "fp8", build=build)


def rival(key: str, kind: str) -> Contender:
    """A rival that is a JAX function, differentiated."""
    found = RIVALS[key]
    assert isinstance(found, JaxRival)

    def side(shape: Shape) -> Side:
        return gradients(found.function("bf16", is_causal=shape.is_causal), shape, kind)

    return found.contender("bf16", side)


def main(arguments: Sequence[str] | None = None) -> int:
    flags = parser().parse_args(arguments)
    shapes = bench.shapes_of(flags)
    record = bench.recorder(flags)
    for kind in flags.kinds:
        group = [ours(preset, kind) for preset in flags.ours]
        group += [rival(key, kind) for key in flags.rivals if key != "none"]
        more = contested.more_rounds(flags, kind)
        bench.time_shapes(flags, shapes, [group], record, kind, more)
    return bench.finish(flags, record)


if __name__ == "__main__":
    sys.exit(harness.exit_with_usage(main))
