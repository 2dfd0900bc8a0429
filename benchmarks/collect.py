"""Puts several result files and the outcome of a check's phases into one result file.

Parts of one grid, taken by several runs, become one grid; files of another card, driver, commit or
set of versions are refused.

python benchmarks/collect.py fwd.json accuracy.json --phases phases.tsv --out all.json

phases.tsv: one line per phase, "name<TAB>status<TAB>seconds<TAB>detail".
"""

from __future__ import annotations

import harness  # isort: skip  # sets how JAX allocates, before JAX is imported

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_fa3._cli import results


def read_phases(path: Path) -> list[dict[str, Any]]:
    """The phases in order; status is passed, failed, timeout, missing or skipped."""
    phases = []
    for line in path.read_text(encoding="utf-8").splitlines():
        name, status, seconds, detail = line.split("\t")
        entry = {"name": name, "status": status, "seconds": float(seconds), "detail": detail}
        phases.append(entry)
    return phases


def main(arguments: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("files", type=harness.existing_results, nargs="*", help="result files")
    made.add_argument("--phases", type=Path, help="outcome of each phase")
    made.add_argument("--command", help="what to note as the command")
    made.add_argument("--out", type=Path, required=True, help="the file to write")
    flags = made.parse_args(arguments)
    meta, rows = harness.merge(flags.files) if flags.files else (results.meta(), [])
    if flags.phases is not None:
        meta["phases"] = read_phases(flags.phases)
    if flags.command is not None:
        meta["command"] = flags.command
    results.write(flags.out, meta, rows)
    print(f"wrote {flags.out}: {len(rows)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(harness.exit_with_usage(main))
