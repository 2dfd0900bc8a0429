"""What the benchmark programs share. Import this before jax: torch rivals need room on the GPU.

Timing, card state and result files live in `jax_fa3._cli`, because `python -m jax_fa3 bench` uses
them too. Here are the parts that only the programs of this folder need.
"""

from __future__ import annotations

import os

# JAX and torch share one GPU here: JAX must not take most of its memory at the start.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_fa3._cli import results, text


def exit_with_usage(program: Any, arguments: Sequence[str] | None = None) -> int:
    """Runs program(arguments); bad usage becomes a sentence and exit code 2."""
    try:
        return int(program(arguments))
    except text.UsageError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2


def existing_results(text_path: str) -> Path:
    """An argparse type: the path of a readable result file."""
    path = Path(text_path)
    try:
        results.read(path)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def committed_speeds() -> list[Path]:
    """Result files of the grid in results/, newest first: what one holds counts before the next."""
    folder = Path(__file__).with_name("results")
    return [folder / "h200.json", *sorted(folder.glob("h200_older*.json"))]


# What must agree before results may stand in one table; versions of packages must too.
FACTS = ("card", "driver", "power_limit_w", "commit")
# What one meta block tells of the card besides.
_CARD = ("backend", "compute_capability", "memory_mib", "max_sm_clock_mhz")
# What a soak counts: parts with seeds of their own add up.
_COUNTS = ("seconds", "cases", "calls", "failures", "died", "cut")
# What tells a measurement from every other one.
IDENTITY = (
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
        shared = (*FACTS, "dry_run", "versions", "runs", *_CARD)
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
    return (*(row.get(name) for name in IDENTITY), *sorted(row.get("ratio", ())))


def _require_same(merged: dict[str, Any], block: dict[str, Any], path: Path) -> None:
    pairs = {name: (merged.get(name), block.get(name)) for name in FACTS}
    pairs["dry_run"] = tuple(bool(x.get("dry_run")) for x in (merged, block))
    versions = block.get("versions", {})
    for package in merged["versions"].keys() & versions.keys():
        pairs[package] = (merged["versions"][package], versions[package])
    for name, (before, here) in pairs.items():
        if before != here:
            raise text.UsageError(
                f"result files must agree in {name}; got {before}, and {here} in {path.name}"
            )
