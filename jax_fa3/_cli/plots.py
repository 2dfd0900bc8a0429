"""Plots of result rows; matplotlib is optional (extra "bench")."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from jax_fa3._cli.results import variant
from jax_fa3._cli.text import UsageError

_LEAST = 1e-4
Lines = dict[str, dict[int, float]]  # points of each label; the first row of a place counts


def require() -> None:
    """Raises UsageError when matplotlib is missing, before any work is done."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError('--plot needs matplotlib: pip install "jax_fa3[bench]"')


def speed(rows: list[dict[str, Any]], path: Path, columns: int = 2) -> None:
    """TFLOP/s over seqlen, a panel per head_dim and mask; square grids of a forward only, with as
    many key heads as query heads."""
    panels: dict[str, Lines] = {}
    same = ("seqlen_q", "seqlen_k"), ("num_heads_q", "num_heads_kv")
    rows = [r for r in rows if r["kind"] == "fwd" and all(r[a] == r[b] for a, b in same)]
    # By batch too: the grid's point of a length counts, not the larger headline's.
    for row in sorted(rows, key=lambda row: (row["head_dim"], row["is_causal"], row["batch"])):
        title = f"head_dim {row['head_dim']}, {'causal' if row['is_causal'] else 'no mask'}"
        lines = panels.setdefault(title, {})
        lines.setdefault(variant(row), {}).setdefault(row["seqlen_q"], row["tflops"])
    _plot(panels, path, columns, "seqlen", "TFLOP/s", "linear")


def accuracy(rows: list[dict[str, Any]], path: Path, columns: int = 3) -> None:
    """Relative L2 error over the number of keys, a panel per head_dim and distribution.

    Less than _LEAST counts as that: sums that come out exactly would hide all others.
    """
    panels: dict[str, Lines] = {}
    rows = [r for r in rows if r["kind"] == "accuracy" and r["rel_l2"] is not None]
    for row in sorted(rows, key=lambda row: (row["head_dim"], row["data"])):
        lines = panels.setdefault(f"head_dim {row['head_dim']}, {row['data']}", {})
        error = max(row["rel_l2"], _LEAST)
        lines.setdefault(variant(row), {}).setdefault(row["seqlen_k"], error)
    _plot(panels, path, columns, "keys", "relative L2 error", "log")


def _count(number: int) -> str:
    """512, 1k, 128k."""
    return f"{number // 1024}k" if number % 1024 == 0 else str(number)


def _plot(panels: dict[str, Lines], path: Path, columns: int, x: str, y: str, y_scale: str) -> None:
    """A panel per title; a label has one colour in all of them, and one legend stands below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(max(len(panels), 1), columns)
    rows = -(-max(len(panels), 1) // columns)
    figure, axes = pyplot.subplots(
        rows,
        columns,
        figsize=(5.5 * columns, 3.8 * rows + 0.8),
        squeeze=False,
        layout="constrained",
    )
    flat = list(axes.flat)
    for axis in flat[len(panels) :]:
        axis.set_axis_off()
    labels = sorted({label for lines in panels.values() for label in lines})
    colour = pyplot.get_cmap("tab10" if len(labels) <= 10 else "tab20")
    handles: dict[str, Any] = {}
    for axis, (title, lines) in zip(flat, panels.items(), strict=False):
        for label, points in sorted(lines.items()):
            ours = label.startswith("jax_fa3")
            (handles[label],) = axis.plot(
                *zip(*sorted(points.items()), strict=True),
                color=colour(labels.index(label) % colour.N),
                marker="o" if ours else "x",
                linestyle="-" if ours else "--",
            )
        axis.set_title(title)
        axis.set_xscale("log", base=2)
        ticks = sorted({place for points in lines.values() for place in points})
        axis.set_xticks(ticks, [_count(place) for place in ticks])
        axis.set_yscale(y_scale)
        if y_scale == "linear":
            axis.set_ylim(bottom=0)
        axis.set_xlabel(x)
        axis.set_ylabel(y)
        axis.grid(alpha=0.3)
    longest = 0.6 + 0.08 * max(map(len, labels), default=0)  # inches of a line of the legend
    figure.legend(
        [handles[label] for label in labels],
        labels,
        loc="outside lower center",
        ncols=max(1, min(columns + 1, int(5.5 * columns / longest))),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
