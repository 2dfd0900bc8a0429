"""Plots of result rows; matplotlib is optional (extra "bench")."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from jax_fa3._cli.text import UsageError


def require() -> None:
    """Raises UsageError when matplotlib is missing, before any work is done."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError('--plot needs matplotlib: pip install "jax_fa3[bench]"')


def speed(rows: list[dict[str, Any]], path: Path) -> None:
    """TFLOP/s over seqlen, a panel per head_dim and mask; square grids of a forward only."""
    rows = [r for r in rows if r["kind"] == "fwd" and r["seqlen_q"] == r["seqlen_k"]]
    panels = sorted({(r["head_dim"], r["is_causal"]) for r in rows})
    figure, axes = _figure(len(panels))
    for axis, (head_dim, is_causal) in zip(axes, panels, strict=False):
        lines: dict[str, list[tuple[int, float]]] = {}
        for row in rows:
            if (row["head_dim"], row["is_causal"]) == (head_dim, is_causal):
                label = f"{row['impl']} {row['preset'] or row['precision']}"
                label += " + quantise" if row["with_quantize"] else ""
                lines.setdefault(label, []).append((row["seqlen_q"], row["tflops"]))
        _draw(axis, lines, "TFLOP/s")
        axis.set_ylim(bottom=0)
        axis.set_title(f"head_dim {head_dim}, {'causal' if is_causal else 'no mask'}")
        axis.set_xlabel("seqlen")
    _save(figure, path)


def accuracy(rows: list[dict[str, Any]], path: Path) -> None:
    """Relative L2 error over the number of keys, a panel per head_dim and distribution."""
    rows = [r for r in rows if r["kind"] == "accuracy" and r["rel_l2"] is not None]
    panels = sorted({(r["head_dim"], r["data"]) for r in rows})
    figure, axes = _figure(len(panels))
    for axis, (head_dim, data) in zip(axes, panels, strict=False):
        lines: dict[str, list[tuple[int, float]]] = {}
        for row in rows:
            if (row["head_dim"], row["data"]) == (head_dim, data):
                label = f"{row['impl']} {row['preset'] or row['precision']}"
                lines.setdefault(label, []).append((row["seqlen_k"], row["rel_l2"]))
        _draw(axis, lines, "relative L2 error")
        axis.set_yscale("log")
        axis.set_title(f"head_dim {head_dim}, {data}")
        axis.set_xlabel("keys")
    _save(figure, path)


def _figure(panels: int) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(max(panels, 1), 3)
    lines = -(-max(panels, 1) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(5.5 * columns, 4.2 * lines), squeeze=False, layout="constrained"
    )
    flat = list(axes.flat)
    for axis in flat[panels:]:
        axis.set_axis_off()
    return figure, flat


def _draw(axis: Any, lines: dict[str, list[tuple[int, float]]], unit: str) -> None:
    for label, points in sorted(lines.items()):
        points.sort()
        ours = label.startswith("jax_fa3")
        axis.plot(
            [x for x, _ in points],
            [y for _, y in points],
            marker="o" if ours else "x",
            linestyle="-" if ours else "--",
            label=label,
        )
    axis.set_xscale("log", base=2)
    axis.set_ylabel(unit)
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
