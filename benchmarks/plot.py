"""Plots from result files: speed over seqlen per head_dim, error over the number of keys.

python benchmarks/plot.py benchmarks/results/a.json [b.json ...] --out docs/plots
"""

from __future__ import annotations

import harness  # isort: skip  # sets how JAX allocates, before JAX is imported

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import collect

from jax_fa3._cli import plots, text


def main(arguments: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("files", type=harness.existing_results, nargs="+", help="result files")
    made.add_argument("--out", type=Path, default=Path("plots"), help="folder (default plots)")
    flags = made.parse_args(arguments)
    plots.require()
    _, rows = collect.merge(flags.files)
    written = []
    for regime in sorted({r["regime"] for r in rows if r["kind"] == "fwd"}):
        path = flags.out / f"fwd_{regime}.png"
        plots.speed([r for r in rows if r.get("regime") == regime], path)
        written.append(path)
    if any(r["kind"] == "accuracy" for r in rows):
        plots.accuracy(rows, flags.out / "accuracy.png")
        written.append(flags.out / "accuracy.png")
    if not written:
        raise text.UsageError("the files hold neither speed nor accuracy rows")
    for path in written:
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(harness.exit_with_usage(main))
