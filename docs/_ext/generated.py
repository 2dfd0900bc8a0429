"""Sphinx extension: writes docs/_generated before the pages are read.

From the result files of the benchmarks: tables and plots. From the CUDA sources: the table of
kernels, the table of barriers and the pictures. From the command line: its help.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import collect  # benchmarks/
import goals  # benchmarks/
import kernel_figures
import kernel_source
import row_tables  # benchmarks/
import soak_table  # benchmarks/
import table  # benchmarks/

from jax_fa3._cli import main, plots

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
Meta = dict[str, Any]
Rows = list[dict[str, Any]]


def write_all(folder: Path) -> None:
    """Everything the pages include, into folder."""
    folder.mkdir(parents=True, exist_ok=True)
    kernels, barriers = kernel_source.kernels(), kernel_source.barriers()
    _write(folder / "kernels.md", kernel_table(kernels))
    _write(folder / "barriers.md", barrier_table(barriers))
    kernel_figures.save(kernel_figures.shared_memory, folder / "shared_memory.svg", kernels)
    kernel_figures.save(kernel_figures.barrier_picture, folder / "barriers.svg", barriers)
    pipeline = folder / "pipeline.svg"
    stages = max(kernel.constants["kNumStages"] for kernel in kernels)
    kernel_figures.save(kernel_figures.pipeline, pipeline, kernel_source.steps(), stages)
    for draw in (kernel_figures.turns, kernel_figures.call):
        kernel_figures.save(draw, folder / f"{draw.__name__}.svg")
    _write(folder / "command_line.md", command_line_help())
    pages: dict[str, list[str]] = {name: [] for name in PAGES}
    for path in sorted(RESULTS.glob("*.json")):
        meta, rows = collect.merge([path])
        for name, make in PAGES.items():
            pages[name] += make(path, meta, rows, folder)
    for name, parts in pages.items():
        _write(folder / f"{name}.md", "\n\n".join(parts))


def command_line_help() -> str:
    """What `--help` prints for each command, under a heading of its own."""
    parts = []
    top = main.parser()
    (commands,) = (a for a in top._actions if isinstance(a, argparse._SubParsersAction))
    with mock.patch.dict(os.environ, {"COLUMNS": "84", "NO_COLOR": "1"}):
        parts.append(f"```text\n{top.format_help().rstrip()}\n```")
        for name, parser in commands.choices.items():
            parts.append(f"## {name}\n\n```text\n{parser.format_help().rstrip()}\n```")
    return "\n\n".join(parts)


def kernel_table(kernels: list[kernel_source.Kernel]) -> str:
    """A line per kernel: tile, stages, threads, registers, shared memory."""
    header = ["kernel", "q rows", "keys", "stages", "threads", "registers: load, math", "pipeline"]
    lines = []
    for kernel in kernels:
        c = kernel.constants
        registers = f"{c['kLoadRegisters']}, {c['kMathRegisters']}"
        numbers = (c["kBlockQ"], c["kBlockKv"], c["kNumStages"], c["kThreads"])
        lines.append([f"`{kernel.name}`", *map(str, numbers), registers, kernel.pipeline])
    return row_tables.markdown(header, lines)


def barrier_table(barriers: list[kernel_source.Barrier]) -> str:
    """The table above the kernel, as Markdown."""
    lines = [[f"`{b.name}`", b.arrivals, b.waiter, b.meaning] for b in barriers]
    head = ["barrier", "arrivals", "waiter", "meaning"]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * 4, *lines])


def benchmark_section(path: Path, meta: Meta, rows: Rows, folder: Path) -> list[str]:
    """One result file: plots of its forward speed, then every table."""
    parts = [f"## {path.name}"]
    for regime in sorted({r["regime"] for r in rows if r["kind"] == "fwd"}):
        image = folder / f"{path.stem}_{regime}.svg"
        plots.speed([r for r in rows if r.get("regime") == regime], image, columns=2)
        parts.append(_figure(image, f"Forward speed, {regime}"))
    parts.append(table.full(meta, rows))
    random = [row for row in rows if row["kind"] == "soak"]
    if random:
        parts += [f"{soak_table.sentence(meta)} Largest errors:", *soak_table.tables(random)]
    return parts


def errors(path: Path, meta: Meta, rows: Rows, folder: Path) -> list[str]:
    """Errors against float64: plot and table."""
    shown = [row for row in rows if row["kind"] == "accuracy"]
    if not shown:
        return []
    image = folder / f"{path.stem}_accuracy.svg"
    plots.accuracy(rows, image, columns=2)
    figure = _figure(image, "Relative L2 error over the number of keys")
    parts = [figure, table.source_line(meta), row_tables.error_table(shown)]
    model = row_tables.model_table(shown)
    return [*parts, "Errors of the kernels over those of the model:", model] if model else parts


def training(_: Path, meta: Meta, rows: Rows, __: Path) -> list[str]:
    """Models of examples/train_gpt.py."""
    shown = [row for row in rows if row["kind"] == "train"]
    return [row_tables.train_table(shown), table.source_line(meta)] if shown else []


def gradients(_: Path, meta: Meta, rows: Rows, __: Path) -> list[str]:
    """Speed of backward passes and of training steps on one GPU, and next to rivals."""
    parts = []
    for kind in ("bwd", "step"):
        timed = [row for row in rows if row["kind"] == kind and row.get("regime") == "sustained"]
        timed = row_tables.in_order([row for row in timed if row.get("devices", 1) == 1])
        if timed:
            parts += [f"TFLOP/s of {row_tables.TIMED[kind][0]}:", row_tables.speed_table(timed)]
        if any(row["ratio"] for row in timed):
            parts += ["Our speed over a rival's:", row_tables.ratio_table(timed)]
    return [*parts, table.source_line(meta)] if parts else []


def ablation(_: Path, meta: Meta, rows: Rows, __: Path) -> list[str]:
    """Variants of the forward kernels."""
    shown = [row for row in rows if row["kind"] == "ablation"]
    return [row_tables.ablation_table(shown), table.source_line(meta)] if shown else []


def numbers(kind: str) -> Callable[..., list[str]]:
    """Makes the table of rows of a kind of row_tables.MORE."""

    def make(_: Path, meta: Meta, rows: Rows, __: Path) -> list[str]:
        shown = [row for row in rows if row["kind"] == kind]
        words, corner, columns = row_tables.MORE[kind]
        tables = [words, row_tables.number_table(shown, corner, columns), table.source_line(meta)]
        return tables if shown else []

    return make


def reached(page: str) -> Callable[..., list[str]]:
    """Makes what speeds reach of the goals of a page of the design notes."""

    def make(_: Path, meta: Meta, rows: Rows, __: Path) -> list[str]:
        found = goals.goals_table(page, rows)
        return [found, table.source_line(meta)] if found else []

    return make


def fixed_order(_: Path, meta: Meta, rows: Rows, __: Path) -> list[str]:
    """What a fixed order of additions costs the backward pass."""
    found = goals.order_table(rows)
    return [found, table.source_line(meta)] if found else []


def soak(_: Path, meta: Meta, rows: Rows, __: Path) -> list[str]:
    """Random calls of every kernel."""
    return [soak_table.sentence(meta)] if any(row["kind"] == "soak" for row in rows) else []


# What is made of the result files: name of the page's part, and what one file adds to it.
PAGES = {
    "benchmarks": benchmark_section,
    "accuracy": errors,
    "training": training,
    "gradients": gradients,
    "ablation": ablation,
    "utilisation": numbers("pipe"),
    "gradient_errors": numbers("gradient_error"),
    "soak": soak,
    "goals_forward": reached("forward"),
    "goals_backward": reached("backward"),
    "goals_quantiser": reached("quantiser"),
    "fixed_order": fixed_order,
}


def _figure(image: Path, words: str) -> str:
    return f"```{{figure}} _generated/{image.name}\n:alt: {words}\n:class: wide\n\n{words}\n```"


def _write(path: Path, text: str) -> None:
    """Leaves an unchanged file alone, so that Sphinx does not read its pages again."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _before_reading(app: Any) -> None:
    write_all(Path(app.srcdir) / "_generated")


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", _before_reading)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
