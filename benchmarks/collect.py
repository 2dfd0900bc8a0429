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

from jax_fa3._cli import results, text

# What must agree before results may stand in one table; versions of packages must too.
_FACTS = ("card", "driver", "power_limit_w", "commit")
# What one meta block tells of the card besides.
_CARD = ("backend", "compute_capability", "memory_mib", "max_sm_clock_mhz")
# What a soak counts: parts with seeds of their own add up.
_COUNTS = ("seconds", "cases", "calls", "failures", "died", "cut")
# What tells a measurement from every other one.
_IDENTITY = (
    "kind",
    "impl",
    "precision",
    "preset",
    "regime",
    "with_quantize",
    "batch",
    "seqlen_q",
    "seqlen_k",
    "num_heads_q",
    "num_heads_kv",
    "head_dim",
    "is_causal",
    "data",
    "attention",
    "check",
    "seed",
    "devices",
    "strategy",
    "device",
    "kernel",
    "variant",
    "graph",
)


def merge(paths: Sequence[Path]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One meta block and the rows of all files, in order.

    Files must come from one card, driver, commit and set of versions. Their own commands, dates,
    gaps and counts stand under "runs", with the sums of counts above. What a later file measured
    again, next to the same rivals, replaces the earlier rows.

    Raises: UsageError naming what differs.
    """
    merged: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    for path in paths:
        block, more = results.read(path)
        if not merged:
            merged = {**block, "versions": dict(block.get("versions", {}))}
        _require_same(merged, block, path)
        merged["versions"].update(block.get("versions", {}))
        again = {identity(row) for row in more}
        rows = [row for row in rows if identity(row) not in again] + more
        shared = (*_FACTS, "dry_run", "versions", "runs", *_CARD)
        own = {key: value for key, value in block.items() if key not in shared}
        runs += block.get("runs", [own])
    if len(runs) > 1:
        merged["runs"] = runs
        merged["skipped"] = [entry for run in runs for entry in run.get("skipped", [])]
        merged["partial"] = any(run.get("partial", False) for run in runs)
        merged["date"] = max(str(run.get("date", "")) for run in runs)
        merged = {name: value for name, value in merged.items() if name not in (*_COUNTS, "seed")}
        for name in _COUNTS:
            if all(name in run for run in runs):
                merged[name] = round(sum(run[name] for run in runs), 1)
    return merged, rows


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    """Without a rival a call is not the same measurement as beside one."""
    return (*(row.get(name) for name in _IDENTITY), *sorted(row.get("ratio", ())))


def _require_same(merged: dict[str, Any], block: dict[str, Any], path: Path) -> None:
    pairs = {name: (merged.get(name), block.get(name)) for name in _FACTS}
    pairs["dry_run"] = tuple(bool(x.get("dry_run")) for x in (merged, block))
    versions = block.get("versions", {})
    for package in merged["versions"].keys() & versions.keys():
        pairs[package] = (merged["versions"][package], versions[package])
    for name, (before, here) in pairs.items():
        if before != here:
            raise text.UsageError(
                f"result files must agree in {name}; got {before}, and {here} in {path.name}"
            )


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
    meta, rows = merge(flags.files) if flags.files else (results.meta(), [])
    if flags.phases is not None:
        meta["phases"] = read_phases(flags.phases)
    if flags.command is not None:
        meta["command"] = flags.command
    results.write(flags.out, meta, rows)
    print(f"wrote {flags.out}: {len(rows)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(harness.exit_with_usage(main))
