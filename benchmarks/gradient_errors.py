"""Errors of gradients against float64, head by head next to cuDNN's, as JSON rows.

python benchmarks/gradient_errors.py --json benchmarks/results/gradient_errors.json
"""

from __future__ import annotations

import harness  # isort: skip  # sets how JAX allocates, before JAX is imported

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import float64
import jax
import jax.numpy as jnp
import numpy as np
from rivals import RIVALS

from jax_fa3._cli import bench, contenders, grid, results, text
from jax_fa3._cli.progress import progress

NAMES = ("dquery", "dkey", "dvalue")
PRESETS = ("native", "deterministic", "accurate")


def by_head(found: Any, expected: Any) -> np.ndarray[Any, Any]:
    """Relative L2 error, [gradient, batch, head]."""
    errors = []
    for a, e in zip(found, expected, strict=True):
        difference = np.asarray(a).astype(np.float64) - e
        errors.append(np.linalg.norm(difference, axis=(1, 3)) / np.linalg.norm(e, axis=(1, 3)))
    return np.stack(errors)


def measure(shape: grid.Shape, cudnn: bool) -> list[dict[str, Any]]:
    """A row for each of ours, and cuDNN's where it runs."""
    size = (shape.batch, shape.seqlen_q, shape.num_heads_q, shape.head_dim)
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal(size, np.float32), jnp.bfloat16) for _ in range(4)]
    expected = float64.gradients(*arrays, is_causal=shape.is_causal)

    def errors(attend: Any) -> np.ndarray[Any, Any]:
        def gradients(q: Any, k: Any, v: Any, dout: Any) -> Any:
            return jax.vjp(attend, q, k, v)[1](dout)

        return by_head(jax.jit(gradients)(*arrays), expected)

    def row(name: dict[str, Any], own: Any, of_cudnn: Any) -> dict[str, Any]:
        worst = dict(zip(NAMES, own.max(axis=(1, 2)).tolist(), strict=True))
        return {
            "kind": "gradient_error", **name, **dataclasses.asdict(shape), **worst,
            "of_cudnn": of_cudnn,
        }  # fmt: skip

    rows = []
    theirs = None
    if cudnn:
        theirs = errors(RIVALS["cudnn"].function("bf16", is_causal=shape.is_causal))
        name = {"impl": "cudnn", "precision": "bf16", "preset": None}
        rows.append(row(name, theirs, None))
    for preset in PRESETS:
        own = errors(contenders.our_call(preset, is_causal=shape.is_causal))
        ratio = None if theirs is None else float((own / theirs).max())
        rows.append(row(contenders.our_name(preset), own, ratio))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    bench.add_head_dims_flag(parser)
    text.add_list_flag(parser, "--seqlens", (512, 2048), about="query and key alike")
    add("--json", type=Path, metavar="FILE", help="write a result file")
    add("--dry-run", action="store_true", help="tiny sizes on any device, without cuDNN")
    flags = parser.parse_args(arguments)
    if not flags.dry_run:
        contenders.require_gpu()
    seqlens = [64] if flags.dry_run else flags.seqlens
    record = results.Recorder(flags.json, dry_run=bool(flags.dry_run))
    work = [*itertools.product(flags.head_dims, seqlens, (False, True))]
    for head_dim, seqlen, is_causal in progress(work, "gradients"):
        shape = grid.square(2, seqlen, 4, head_dim, is_causal)
        record.add(measure(shape, cudnn=not flags.dry_run))
    record.close()
    header = ["shape", "variant", *NAMES, "over cuDNN's, worst head"]
    lines = [
        [
            grid.Shape.of(row).name,
            results.variant(row),
            *(f"{row[name]:.2e}" for name in NAMES),
            "-" if row["of_cudnn"] is None else f"{row['of_cudnn']:.3f}",
        ]
        for row in record.rows
    ]
    print(text.table(header, lines))
    return 0


if __name__ == "__main__":
    sys.exit(harness.exit_with_usage(main))
