"""Peak device memory of a forward and backward pass over the sequence's length, as JSON rows.

python benchmarks/memory.py --json benchmarks/results/memory.json

"peak": the device allocator's high-water mark. "planned": arguments, results and temporaries by
XLA's plan. Lengths grow and the cheaper call comes first, so that each peak is above all before it;
where it is not, there is no peak in the row.
"""

from __future__ import annotations

import harness  # isort: skip  # sets how JAX allocates, before JAX is imported

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jax_fa3._cli import contenders, grid, results, text
from jax_fa3._cli.progress import progress

SEQLENS = (16_384, 65_536, 262_144)
PRESETS = ("native", "accurate")
MIB = 2.0**20


def peak_bytes() -> int | None:
    """High-water mark of the first device's allocator; None where it keeps none."""
    found = jax.local_devices()[0].memory_stats() or {}
    return found.get("peak_bytes_in_use")


def measure(shape: grid.Shape, preset: str) -> dict[str, Any]:
    """A row: one forward and backward pass."""
    call = contenders.our_call(preset, is_causal=shape.is_causal)

    def step(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(call, q, k, v)
        return out, pull(dout)

    like = jax.ShapeDtypeStruct(
        (shape.batch, shape.seqlen_q, shape.num_heads_q, shape.head_dim), jnp.bfloat16
    )
    compiled = jax.jit(step).lower(like, like, like, like).compile()
    plan = compiled.memory_analysis()
    before = peak_bytes()
    key = jax.random.key(0)
    draw = jax.jit(lambda key: jax.random.normal(key, like.shape, like.dtype))
    operands = [draw(x) for x in jax.random.split(key, 4)]
    jax.block_until_ready(compiled(*operands))
    peak = peak_bytes()
    if peak is not None and peak == before:
        peak = None
    operand_bytes = 4 * operands[0].nbytes  # query, key, value, dout; results are as large again
    return {
        "kind": "memory",
        **contenders.our_name(preset),
        **dataclasses.asdict(shape),
        "operands_mib": round(2 * operand_bytes / MIB, 1),
        "temporaries_mib": round(plan.temp_size_in_bytes / MIB, 1),
        "peak_mib": None if peak is None else round(peak / MIB, 1),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    text.add_list_flag(parser, "--seqlens", SEQLENS, about="rising")
    add("--heads", type=text.positive_int, default=2, metavar="N", help="default 2")
    add("--head-dim", type=text.positive_int, default=128, metavar="N", help="default 128")
    add("--json", type=Path, metavar="FILE", help="write a result file")
    add("--dry-run", action="store_true", help="tiny sizes on any device")
    flags = parser.parse_args(arguments)
    if not flags.dry_run:
        contenders.require_gpu()
    seqlens = [64, 256] if flags.dry_run else sorted(flags.seqlens)
    record = results.Recorder(flags.json, dry_run=bool(flags.dry_run))
    work = [(seqlen, preset) for seqlen in seqlens for preset in PRESETS]
    for seqlen, preset in progress(work, "memory"):
        shape = grid.square(1, seqlen, flags.heads, flags.head_dim, True)
        record.add([measure(shape, preset)])
    record.close()
    header = ["shape", "variant", "operands MiB", "temporaries MiB", "peak MiB"]
    lines = [
        [
            grid.Shape.of(row).name,
            row["preset"] or row["precision"],
            row["operands_mib"],
            row["temporaries_mib"],
            "-" if row["peak_mib"] is None else row["peak_mib"],
        ]
        for row in record.rows
    ]
    print(text.table(header, lines))
    return 0


if __name__ == "__main__":
    sys.exit(harness.exit_with_usage(main))
