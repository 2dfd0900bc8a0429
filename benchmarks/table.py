"""Writes the tables between the markers of README.md and benchmarks/README.md from result files.

python benchmarks/table.py                                        # from the committed results
python benchmarks/table.py --check                                # 1 if they would change
python benchmarks/table.py benchmarks/results/a.json [b.json ...]

README.md gets short tables of all files, benchmarks/README.md every row, file by file. They
stand under the sentence that says where their numbers come from; collect.py makes one file of
several.
"""

from __future__ import annotations

import harness  # isort: skip  # sets how JAX allocates, before JAX is imported

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import collect
from row_tables import (
    MORE,
    TIMED,
    Rows,
    ablation_table,
    accuracy_table,
    error_table,
    in_order,
    lead_table,
    number_table,
    ratio_table,
    speed_table,
    sustained,
    train_table,
)

from jax_fa3._cli import grid, text

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"
LEAD = "Our speed over the fastest rival's in the same turns, by seqlen, without a mask / causal"
ALONE = "; FP8 is the kernel alone, as the rivals' is"
# Variants of the short version.
USUAL = (("fwd", "accurate", "fp8"), ("fwd", None, "bf16"), ("bwd", None, "bf16"))


def lead(rows: Rows) -> list[str]:
    """The table of the lead under its sentence; nothing without a rival."""
    found = lead_table(rows)
    alone = any(r["ratio"] and r["precision"] == "fp8" and not r["with_quantize"] for r in rows)
    return [f"{LEAD}{ALONE if alone else ''}:", found] if found else []


def commits_of(meta: dict[str, Any]) -> list[str]:
    """The commit of a file, or those of all that `together` joined."""
    commits: list[str] = meta.get("commits", [meta["commit"]] if "commit" in meta else [])
    return commits


def source_line(meta: dict[str, Any]) -> str:
    """Where the numbers come from, in one sentence."""
    versions = meta.get("versions", {})
    parts = [str(meta.get("card", "unknown card"))]
    if "driver" in meta:
        parts.append(f"driver {meta['driver']}")
    if "power_limit_w" in meta:
        parts.append(f"{meta['power_limit_w']:.0f} W")
    parts += [f"{name} {versions[name]}" for name in ("jax", "jax_fa3") if name in versions]
    commits = commits_of(meta)
    if commits:
        parts.append(f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}")
    date = meta.get("date", "")[:10] or "unknown date"
    return f"{', '.join(parts)}; {date}."


def together(found: list[tuple[dict[str, Any], Rows]]) -> list[tuple[dict[str, Any], Rows]]:
    """Files, newest first, that differ in their commit alone as one, with all `commits` in meta."""
    joined: dict[str, tuple[dict[str, Any], Rows]] = {}
    for meta, rows in found:
        source = source_line({**meta, "commits": [], "date": ""})
        first, all_rows = joined.setdefault(source, ({**meta, "commits": []}, []))
        first["commits"] = list(dict.fromkeys([*first["commits"], *commits_of(meta)]))
        first["date"] = max(first.get("date", ""), meta.get("date", ""))
        all_rows += rows
    return list(joined.values())


def command_lines(meta: dict[str, Any]) -> str:
    """The command of every run; one that was stopped says so."""
    runs = meta.get("runs", [meta])
    lines = [
        f"`{run.get('command', 'unknown')}`"
        + (" (stopped before its end)" if run.get("partial") else "")
        for run in runs
    ]
    if len(lines) == 1:
        return f"Command: {lines[0]}."
    return "\n".join(["Commands:", "", *(f"- {line}" for line in lines)])


def short(meta: dict[str, Any], rows: Rows) -> str:
    """For README.md: sustained speed at the longest seqlen of each kind and at batch 16; errors of
    head_dim 128 at 2k and 128k keys. Empty where a file has neither."""
    speed = {kind: [r for r in sustained(rows) if r["kind"] == kind] for kind in TIMED}
    for kind, timed in speed.items():
        longest = max((r["seqlen_q"] for r in timed), default=0)
        speed[kind] = [
            r for r in timed if r["seqlen_q"] == longest or r["batch"] * r["seqlen_q"] > grid.TOKENS
        ]
    accurate = [
        r
        for r in rows
        if r["kind"] == "accuracy"
        and r["seqlen_k"] in (2048, 131_072)
        and r["head_dim"] == 128
        and r["data"] not in ("uniform", "shifted")
        and r["preset"] not in ("uncentred", "block")
    ]
    # Beside its own kernel a model is a detail.
    kernels = {(r["data"], r["seqlen_k"], r["preset"]) for r in accurate if "over_model" in r}
    accurate = [
        r
        for r in accurate
        if r["impl"] != "jax_fa3_xla" or (r["data"], r["seqlen_k"], r["preset"]) not in kernels
    ]
    if not any(speed.values()) and not accurate:
        return ""
    parts = [source_line(meta)]
    if len(commits_of(meta)) > 1:
        parts[0] += " A table for each commit stands in benchmarks/README.md."
    usual = [r for r in sustained(rows) if (r["kind"], r["preset"], r["precision"]) in USUAL]
    parts += lead(usual)
    for kind, timed in speed.items():
        if timed:
            parts += [
                f"TFLOP/s of {TIMED[kind][0]}, sustained (causal counts half):",
                speed_table(timed),
            ]
    if accurate:
        words = "Relative L2 error against float64, head_dim 128"
        if any(r["impl"] == "jax_fa3_xla" for r in accurate):
            words += "; jax_fa3_xla is the kernels' quantised model, computed through XLA"
        parts += [f"{words}:", error_table(accurate)]
    return "\n\n".join(parts)


def full(meta: dict[str, Any], rows: Rows) -> str:
    """For benchmarks/README.md: everything."""
    parts = [source_line(meta), command_lines(meta)]
    parts += lead(sustained(rows))
    for kind, regime in itertools.product(TIMED, ("sustained", "burst")):
        timed = in_order([r for r in rows if r["kind"] == kind and r.get("regime") == regime])
        if timed:
            parts += [
                f"TFLOP/s of {TIMED[kind][0]}, {regime} (causal counts half):",
                speed_table(timed),
            ]
            if any(r["ratio"] for r in timed):
                parts += ["Our speed over a rival's, interleaved pairs:", ratio_table(timed)]
    for kind, (words, corner, columns) in MORE.items():
        found = [r for r in rows if r["kind"] == kind]
        if found:
            parts += [words, number_table(found, corner, columns)]
    ablation = [r for r in rows if r["kind"] == "ablation"]
    if ablation:
        parts += ["TFLOP/s of kernels with one choice changed:", ablation_table(ablation)]
    trained = [r for r in rows if r["kind"] == "train"]
    if trained:
        words = "A GPT, trained with each kind of attention from the same weights and batches:"
        parts += [words, train_table(trained)]
    errors = [r for r in rows if r["kind"] == "accuracy"]
    if errors:
        parts += ["Errors against float64:", accuracy_table(errors)]
    return "\n\n".join(parts)


def committed_speeds() -> list[Path]:
    """Result files of the grid in results/, newest first: what one holds counts before the next."""
    return [RESULTS / "h200.json", *sorted(RESULTS.glob("h200_older*.json"))]


def committed() -> list[Path]:
    """The result files whose tables the READMEs show, in order."""
    others = ("errors", "utilisation", "ablation")
    return [*committed_speeds(), *(RESULTS / f"h200_{name}.json" for name in others)]


def replaced(content: str, body: str, name: str) -> str:
    """content with what stands between the markers exchanged."""
    if content.count(BEGIN) != 1 or content.count(END) != 1:
        raise text.UsageError(f"{name} must hold {BEGIN} and {END} once each")
    before, rest = content.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{body}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = made.add_argument
    about = "result files (default: those in results/ whose tables the READMEs show)"
    add("files", type=harness.existing_results, nargs="*", help=about)
    add("--readme", type=Path, default=ROOT / "README.md", help="gets short tables")
    details = ROOT / "benchmarks" / "README.md"
    add("--details", type=Path, default=details, help="gets every row (that of benchmarks/)")
    add("--check", action="store_true", help="write nothing; 1 if a table is old")
    flags = made.parse_args(arguments)
    found = [collect.merge([path]) for path in flags.files or committed()]
    if any(meta.get("dry_run") for meta, _ in found):
        raise text.UsageError("these files come from a dry run")
    old = []
    for path, make, files in ((flags.readme, short, together(found)), (flags.details, full, found)):
        content = path.read_text(encoding="utf-8")
        parts = [part for meta, rows in files if (part := make(meta, rows))]
        if not parts:
            raise text.UsageError(f"no row for {path.name}: speed, or errors of head_dim 128")
        updated = replaced(content, "\n\n".join(parts), path.name)
        if updated == content:
            continue
        old.append(path.name)
        if not flags.check:
            path.write_text(updated, encoding="utf-8")
    print(f"{'would change' if flags.check else 'changed'}: {', '.join(old) or 'nothing'}")
    return 1 if flags.check and old else 0


if __name__ == "__main__":
    sys.exit(harness.exit_with_usage(main))
