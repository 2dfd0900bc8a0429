"""What train_gpt.py writes about its runs: facts of the machine, a table, a plot."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np
from gpt_model import Settings
from gpt_text import Text

matplotlib.use("Agg")
from matplotlib import pyplot as plt

FINAL = 50  # steps that the final loss is the mean of


def meta(text: Text) -> dict[str, Any]:
    """What ran where; the keys of the files in benchmarks/results."""
    packages = ("jax_fa3", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
    versions = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "card": jax.devices()[0].device_kind,
        # Set by whoever publishes the result.
        **({"commit": commit} if (commit := os.environ.get("JAX_FA3_COMMIT")) else {}),
        "versions": versions,
        # Without the folders of this machine.
        "command": shlex.join(Path(a).name if os.path.isabs(a) else a for a in sys.argv),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "text": {
            "what": "sources of the standard library of Python, bytes",
            "train_bytes": len(text.train),
            "held_out_bytes": len(text.held_out),
            "sha256": text.sha256,
        },
    }


def row(settings: Settings, losses: Sequence[float], step_ms: Sequence[float]) -> dict[str, Any]:
    """What is known of a run from its settings and its steps; keys as in benchmarks/results."""
    ms = statistics.median(step_ms)
    return {
        "kind": "train",
        "attention": settings.attention,
        "batch": settings.batch,
        "seqlen_q": settings.seqlen,
        "seqlen_k": settings.seqlen,
        "num_heads_q": settings.num_heads,
        "num_heads_kv": settings.num_heads,
        "head_dim": settings.head_dim,
        "is_causal": True,
        "layers": settings.layers,
        "width": settings.width,
        "learning_rate": settings.learning_rate,
        "seed": settings.seed,
        "steps": len(losses),
        "ms": ms,
        "ms_lo": min(step_ms),
        "ms_hi": max(step_ms),
        "tokens_per_s": 1e3 * settings.batch * settings.seqlen / ms,
        "final_loss": statistics.fmean(losses[-FINAL:]),
        "losses": list(losses),
        "step_ms": list(step_ms),
    }


COLUMNS = ("attention", "steps", "final loss", "held-out loss", "step ms", "tokens/s", "compile s")


def table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """One line of text per run, in the order of COLUMNS."""
    return [
        [
            row["attention"],
            str(row["steps"]),
            f"{row['final_loss']:.4f}",
            "-" if row["held_out_loss"] is None else f"{row['held_out_loss']:.4f}",
            f"{row['ms']:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['compile_s']:.1f}",
        ]
        for row in rows
    ]


def as_text(rows: Sequence[dict[str, Any]]) -> str:
    """The table with aligned columns."""
    lines = [list(COLUMNS), *table(rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Loss curves, their distance from the last run's, and the table."""
    figure, (curves, gaps, below) = plt.subplots(
        3, 1, figsize=(9, 9), height_ratios=(4, 2, 1.2), layout="constrained"
    )
    gaps.sharex(curves)
    reference = rows[-1]
    for row in rows:
        (line,) = curves.plot(*smooth(row["losses"]), label=row["attention"])
        curves.plot(row["losses"], color=line.get_color(), alpha=0.15, linewidth=0.5)
        if row is not reference:
            both = zip(row["losses"], reference["losses"], strict=False)
            gaps.plot(*smooth([a - b for a, b in both]), color=line.get_color())
    curves.set(ylabel="loss, nats per byte", title="GPT on the standard library of Python")
    curves.legend()
    gaps.axhline(0.0, color="grey", linewidth=0.8)
    gaps.set(xlabel="step", ylabel=f"loss - loss of {reference['attention']}")
    if len(rows) == 1:
        gaps.remove()
        curves.set(xlabel="step")
    below.axis("off")
    below.table(table(rows), colLabels=COLUMNS, loc="center")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def smooth(values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """(steps, means over up to 20 values around them)."""
    span = min(20, len(values))
    means = np.convolve(values, np.ones(span) / span, mode="valid")
    return np.arange(len(means)) + (span - 1) / 2, means
