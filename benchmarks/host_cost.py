"""What a jitted call costs the host, next to a jitted addition, as JSON rows.

python benchmarks/host_cost.py --json benchmarks/results/host.json

The arrays are small and few calls are queued before the next wait, so that nobody waits for the
device: what is measured is the way from Python into the queue. "wall" adds the wait, which holds
what the device does. XLA launches five operations or more in a row as one CUDA graph; rows with
"graph" ask for one here too, where fewer stand alone.
"""

from __future__ import annotations

import harness  # isort: skip  # sets how JAX allocates, before JAX is imported

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rivals import RIVALS

from jax_fa3._cli import contenders, grid, results, text

QUEUED = 16  # calls between two waits; JAX itself waits when more than 32 are in flight
SHAPE = grid.square(1, 256, 2, 64, True)
PRESETS = ("native", "accurate")
GRAPH = {"xla_gpu_graph_min_graph_size": 1}


def calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """Name: jitted function, its arguments, and impl, precision, preset of its row."""
    operands = contenders.inputs(SHAPE, jnp.bfloat16)

    def other(impl: str) -> dict[str, Any]:
        return {"impl": impl, "precision": "bf16", "preset": None}

    # As many arguments as attention has.
    found = {"add": (jax.jit(lambda q, k, v: q + k + v), operands, other("add"))}
    for preset in PRESETS:
        call = contenders.our_call(preset, is_causal=SHAPE.is_causal)
        row = contenders.our_name(preset)
        found[preset] = (jax.jit(call), operands, row)
        if contenders.kernels_run():
            jitted = jax.jit(call, compiler_options=GRAPH)
            found[f"{preset} graph"] = (jitted, operands, {**row, "graph": True})
    cudnn = RIVALS["cudnn"]
    if cudnn.unavailable("bf16", SHAPE.head_dim) is None:
        jitted = jax.jit(cudnn.function("bf16", is_causal=SHAPE.is_causal))
        found["cudnn"] = (jitted, operands, other("cudnn"))
    return found


def measure(rounds: int) -> list[dict[str, Any]]:
    """A row of each call: microseconds until queued and until done, and their ratio to "add"."""
    entrants = calls()
    for function, operands, _ in entrants.values():
        jax.block_until_ready(function(*operands))
    queued: dict[str, list[float]] = {name: [] for name in entrants}
    wall: dict[str, list[float]] = {name: [] for name in entrants}
    names = list(entrants)
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            function, operands, _ = entrants[name]
            start = time.perf_counter()
            for _ in range(QUEUED):
                out = function(*operands)
            middle = time.perf_counter()
            jax.block_until_ready(out)
            end = time.perf_counter()
            queued[name].append(1e6 * (middle - start) / QUEUED)
            wall[name].append(1e6 * (end - start) / QUEUED)

    def over_add(us: dict[str, list[float]], name: str) -> float:
        return statistics.median(a / b for a, b in zip(us[name], us["add"], strict=True))

    return [
        {
            "kind": "host",
            **who,
            **dataclasses.asdict(SHAPE),
            "rounds": rounds,
            "us": round(statistics.median(queued[name]), 2),
            "us_lo": round(min(queued[name]), 2),
            "us_wall": round(statistics.median(wall[name]), 2),
            "over_add": round(over_add(queued, name), 3),
            "wall_over_add": round(over_add(wall, name), 3),
        }
        for name, (_, _, who) in entrants.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rounds", type=text.positive_int, default=1000, metavar="N", help="default 1000")
    add("--json", type=Path, metavar="FILE", help="write a result file")
    add("--dry-run", action="store_true", help="any device; its numbers mean nothing")
    flags = parser.parse_args(arguments)
    if not flags.dry_run:
        contenders.require_gpu()
    record = results.Recorder(flags.json, dry_run=bool(flags.dry_run))
    record.add(measure(min(flags.rounds, 3) if flags.dry_run else flags.rounds))
    record.close()
    header = ["call", "us", "least", "with the wait", "over add", "with the wait"]
    numbers = ("us", "us_lo", "us_wall", "over_add", "wall_over_add")
    lines = [
        [
            results.variant(row),
            *(f"{row[n]:.2f}" for n in numbers),
        ]
        for row in record.rows
    ]
    print(text.table(header, lines))
    return 0


if __name__ == "__main__":
    sys.exit(harness.exit_with_usage(main))
