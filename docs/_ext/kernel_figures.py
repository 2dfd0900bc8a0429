"""Pictures of the forward kernels, drawn with matplotlib from what `kernel_source` reads."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

from kernel_source import Barrier, Kernel, Step
from matplotlib import patches, pyplot

COLOURS = {
    "q": "#b7d7b0",
    "k": "#a9c8e8",
    "v": "#f4c9a0",
    "output staging": "#dccbe6",
    "barriers": "#333333",
    "softmax": "#e9e3a6",
    "wait": "#eeeeee",
}
SM_SHARED_KIB = 227
STYLE = {
    "font.size": 10,
    "svg.hashsalt": "jax_fa3",  # the same bytes in every build
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def save(draw: Callable[..., Any], path: Path, *args: Any) -> None:
    """Draws one picture into an SVG file."""
    with pyplot.rc_context(STYLE):
        figure = draw(*args)
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
        pyplot.close(figure)


def precision_name(kernel: Kernel) -> str:
    return "16 bits" if kernel.softmax == "f32" else "FP8"


def shared_memory(kernels: Sequence[Kernel]) -> Any:
    """A bar per layout, to scale, against what one SM has."""
    layouts: dict[tuple[Any, ...], tuple[str, Kernel]] = {}
    for kernel in kernels:
        label = f"{precision_name(kernel)}, head_dim {kernel.constants['kHeadDim']}"
        layouts.setdefault((label, *kernel.buffers()), (label, kernel))
    figure, axis = pyplot.subplots(figsize=(7.6, 1.0 + 0.75 * len(layouts)), layout="constrained")
    for line, (label, kernel) in enumerate(layouts.values()):
        left = 0.0
        for name, bytes_here in kernel.buffers():
            kib = bytes_here / 1024
            colour = COLOURS.get(name, COLOURS.get(name.split("[")[0], "#cccccc"))
            axis.barh(line, kib, left=left, height=0.62, color=colour, edgecolor="black", lw=0.6)
            short = "out" if name == "output staging" else name
            if kib >= 1.7 * len(short):
                size = 7 if kib < 9 else 8.5
                axis.text(left + kib / 2, line, short, ha="center", va="center", fontsize=size)
            left += kib
        title = f"{label}: {left:.1f} KiB"
        axis.text(0, line - 0.36, title, va="bottom", fontsize=9.5, weight="bold")
    axis.axvline(SM_SHARED_KIB, color="#b03030", ls="--")
    axis.text(SM_SHARED_KIB - 1, -0.78, "one SM: 227 KiB", color="#b03030", ha="right")
    axis.set_ylim(len(layouts) - 0.55, -0.95)
    axis.set_xlim(0, SM_SHARED_KIB + 4)
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)
    axis.set_xlabel("offset in shared memory, KiB")
    return figure


def barrier_picture(barriers: Sequence[Barrier]) -> Any:
    """Who arrives on which barrier, and whom that wakes."""
    figure, axis = pyplot.subplots(figsize=(7.6, 0.75 + 0.62 * len(barriers)), layout="constrained")
    top = len(barriers) - 0.3
    for x, name in ((0.0, "load"), (8.0, "math")):
        axis.add_patch(patches.FancyBboxPatch((x, -0.45), 1.3, top, boxstyle="round,pad=0.05",
                                              fc="#f4f4f4", ec="black"))  # fmt: skip
        axis.text(x + 0.65, top / 2 - 0.45, name, ha="center", va="center", weight="bold")
    for line, barrier in enumerate(barriers):
        y = len(barriers) - 1 - line
        forward = barrier.waiter == "math"
        start, end = (1.4, 7.9) if forward else (7.9, 1.4)
        axis.annotate("", (end, y - 0.12), (start, y - 0.12),
                      arrowprops={"arrowstyle": "-|>", "lw": 1.4, "color": "#1f5f99"})  # fmt: skip
        colour = COLOURS[barrier.name[0]]
        words = textwrap.fill(f"{barrier.name}: {barrier.meaning}", 70)
        axis.text(4.65, y + 0.06, words, ha="center", va="bottom", fontsize=9,
                  bbox={"boxstyle": "round,pad=0.15", "fc": colour, "ec": "none"})  # fmt: skip
        axis.text(4.65, y - 0.37, f"arrivals: {barrier.arrivals}", ha="center", fontsize=8.5)
    axis.set_xlim(-0.2, 9.5)
    axis.set_ylim(-0.6, top - 0.35)
    axis.set_axis_off()
    return figure


Bar = tuple[int, float, float, str, str]  # row, start, end, text, colour
# Lengths in units of one product; made up, as the caption says.
_LENGTHS = {"softmax": 2.0, "other": 0.2, "copy": 1.4}
_ROWS = ("tensor cores", "math warpgroup", "load thread")


def pipeline(steps: Sequence[Step], stages: int) -> Any:
    """Two steps of a warpgroup that overlaps products with softmax, with rings of `stages`."""
    bars, releases = schedule(steps, stages)
    figure, axis = pyplot.subplots(figsize=(7.6, 3.0), layout="constrained")
    _timeline(axis, bars, _ROWS)
    for x, name in releases:
        axis.plot([x, x], [-1.45, 0.45], color="#1f5f99", ls=":", lw=1.2, zorder=0)
        axis.text(x, 0.5, f"{name}\nis released", ha="center", fontsize=8.5, color="#1f5f99")
    axis.set_ylim(-2.5, 1.1)
    return figure


def schedule(steps: Sequence[Step], stages: int) -> tuple[list[Bar], list[tuple[float, str]]]:
    """When what runs for blocks j and j+1, and when which buffer is handed back."""
    bars: list[Bar] = []
    releases: list[tuple[float, str]] = []
    now = tensor = copied = 0.0
    for block in (0, 1):
        ends: dict[str, float] = {}
        formulas: dict[str, str] = {}
        for step in steps:
            if step.kind == "issue":
                start = max(now, tensor)
                ends[step.what] = tensor = start + 1.0
                formulas[step.what] = _blocks(step.formula, block)
                name = formulas[step.what] if step.what == "acc" else f"S = {formulas[step.what]}"
                colour = "k" if "K" in name else "v"
                bars.append((0, start, tensor, name, colour))
            elif step.kind == "wait":
                if ends[step.what] > now:
                    bars.append((1, now, ends[step.what], f"wait for {step.what}", "wait"))
                    now = ends[step.what]
                held = re.search(rf"{step.releases.upper()}\((.+?)\)", formulas[step.what])
                assert held is not None, f"no {step.releases} in {formulas[step.what]}"
                releases.append((now, held[0]))
                into = _label(_index(held[1]) + stages)
                copied = max(copied, now)
                copy = f"copy {step.releases.upper()}({into})"
                bars.append((2, copied, copied + _LENGTHS["copy"], copy, step.releases))
                copied += _LENGTHS["copy"]
            else:
                length = _LENGTHS[step.kind]
                softmax = f"softmax → P({_label(block)})" if step.kind == "softmax" else ""
                colour = "softmax" if softmax else "output staging"
                bars.append((1, now, now + length, softmax, colour))
                now += length
    return bars, releases


def _label(offset: int) -> str:
    return "j" if offset == 0 else f"j{offset:+d}"


def _index(label: str) -> int:
    return int(label.removeprefix("j") or 0)


def _blocks(formula: str, block: int) -> str:
    """The formula for another block than j."""
    return re.sub(r"\((j[^)]*)\)", lambda m: f"({_label(_index(m[1]) + block)})", formula)


_TURNS: list[Bar] = [
    (0, 0.0, 2.0, "products of warpgroup 1", "k"),
    (0, 2.0, 4.0, "products of warpgroup 2", "v"),
    (0, 4.0, 6.0, "products of warpgroup 1", "k"),
    (1, 0.0, 1.0, "wait for S", "wait"),
    (1, 1.0, 4.0, "softmax", "softmax"),
    (1, 4.0, 5.0, "wait for S", "wait"),
    (1, 5.0, 6.8, "softmax", "softmax"),
    (2, 0.0, 2.0, "softmax", "softmax"),
    (2, 2.0, 3.0, "wait for S", "wait"),
    (2, 3.0, 6.0, "softmax", "softmax"),
]
_TURNS_ROWS = ("tensor cores", "warpgroup 1", "warpgroup 2")


def turns() -> Any:
    """Two warpgroups that take turns at the tensor cores."""
    figure, axis = pyplot.subplots(figsize=(7.6, 2.4), layout="constrained")
    _timeline(axis, _TURNS, _TURNS_ROWS)
    for x in (0.25, 2.25, 4.25):  # as soon as both products are issued
        axis.plot([x, x], [-2.45, 0.45], color="#1f5f99", ls=":", lw=1.2, zorder=0)
        axis.text(x, 0.5, "turn passed on", ha="left", fontsize=8.5, color="#1f5f99")
    axis.set_ylim(-2.5, 0.8)
    return figure


def _timeline(axis: Any, bars: Sequence[Bar], rows: Sequence[str]) -> None:
    end = max(bar[2] for bar in bars if bar[0] < 2)
    for row, start, stop, text, colour in bars:
        if start >= end:
            continue
        stop = min(stop, end)
        axis.add_patch(patches.Rectangle((start, -row - 0.36), stop - start, 0.72,
                                         fc=COLOURS[colour], ec="black", lw=0.8))  # fmt: skip
        if stop - start >= 0.9:
            axis.text((start + stop) / 2, -row, text, ha="center", va="center", fontsize=8.5)
    axis.set_xlim(-0.05, end + 0.1)
    axis.set_yticks([-line for line in range(len(rows))], rows)
    axis.tick_params(length=0)
    axis.set_xticks([])
    axis.set_xlabel("time →")


_BOXES = {
    # name: (x, y, width, text, colour)
    "q": (0.0, 2.0, 1.3, "query\n16 bits", "q"),
    "k": (0.0, 1.0, 1.3, "key\n16 bits", "k"),
    "v": (0.0, 0.0, 1.3, "value\n16 bits", "v"),
    "quantise": (2.1, 1.0, 1.75, "jax_fa3_quantize\nmeans, rotation,\nscales, rounding", "softmax"),
    "q8": (4.6, 2.0, 1.45, "q_image\nq_descale, q_shift", "q"),
    "k8": (4.6, 1.0, 1.45, "k_image\nk_descale", "k"),
    "v8": (4.6, 0.0, 1.45, "v_image\nv_descale, v_mean", "v"),
    "forward": (6.8, 1.0, 1.6, "jax_fa3_fwd_fp8", "softmax"),
    "out": (9.15, 1.5, 1.3, "out\n16 bits", "output staging"),
    "logsumexp": (9.15, 0.5, 1.3, "logsumexp\nfloat32", "output staging"),
}
_ARROWS = [
    *((name, "quantise") for name in "qkv"),
    *(("quantise", f"{name}8") for name in "qkv"),
    *((f"{name}8", "forward") for name in "qkv"),
    ("forward", "out"),
    ("forward", "logsumexp"),
]


def call() -> Any:
    """The two steps of a forward pass in FP8 and what passes between them."""
    figure, axis = pyplot.subplots(figsize=(7.6, 2.5), layout="constrained")
    half = 0.36
    for x, y, width, text, colour in _BOXES.values():
        box = {"boxstyle": "round,pad=0.02", "fc": COLOURS[colour], "ec": "black", "lw": 0.8}
        axis.add_patch(patches.FancyBboxPatch((x, y - half), width, 2 * half, **box))
        axis.text(x + width / 2, y, text, ha="center", va="center", fontsize=7.6)
    for start, end in _ARROWS:
        x0, y0, width, *_ = _BOXES[start]
        x1, y1, *_ = _BOXES[end]
        axis.annotate("", (x1 - 0.06, y1), (x0 + width + 0.06, y0),
                      arrowprops={"arrowstyle": "-|>", "lw": 1.0, "color": "#444444"})  # fmt: skip
    axis.set_xlim(-0.1, 10.55)
    axis.set_ylim(-0.5, 2.5)
    axis.set_axis_off()
    return figure
