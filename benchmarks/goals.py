"""What was aimed at and what the committed speeds reach, as tables for the design notes."""

from __future__ import annotations

import dataclasses
from typing import Any

import row_tables

from jax_fa3._cli import bench, grid

Row = dict[str, Any]
# Keys of `ratio` that goals are over, and their names in a sentence.
NAMES = {
    "fa3": "FlashAttention-3",
    "fa3jax": "flash-attn3-jax",
    "fa3jax_f16": "flash-attn3-jax",
    "cudnn": "cuDNN",
    "kernel": "the kernel alone",
}
# Time that the backward pass may take with a fixed order, over the default's, below head_dim 256.
MOST_FOR_ORDER = 1.25
SHORT, LONG, USUAL = (512, 1024, 2048), (4096, 8192, 16_384), (2048, 4096, 8192, 16_384)


@dataclasses.dataclass(frozen=True)
class Goal:
    """Rows of a kind that share a goal.

    Attributes:
      page: of the design notes.
      over: key of `ratio`; None takes the fastest rival.
      floor: what every row must have; None where only the goal counts.
      fields: what else a row must have.
    """

    page: str
    name: str
    floor: float | None
    goal: float
    over: str | None
    seqlens: tuple[int, ...]
    fields: dict[str, Any]

    def values(self, rows: list[Row]) -> dict[bool, list[float]]:
        """Ratios without and with a causal mask."""
        found: dict[bool, list[float]] = {False: [], True: []}
        for row in rows:
            ratios = [row["ratio"][rival] for rival in self.rivals(row)]
            if ratios:
                found[row["is_causal"]].append(min(ratios))
        return found

    def rivals(self, row: Row) -> list[str]:
        """Keys in `ratio` of a row that the goal is over; none for a row of another goal."""
        wanted = {"num_heads_kv": row.get("num_heads_q"), **self.fields}
        if row.get("seqlen_q") not in self.seqlens or row.get("regime") != "sustained":
            return []
        if any(row.get(name) != value for name, value in wanted.items()):
            return []
        if "batch" not in wanted and row["batch"] * row["seqlen_q"] != grid.TOKENS:
            return []
        if self.over is None:
            return [rival for rival in row["ratio"] if rival not in bench.OWN_KEYS]
        return [self.over] if self.over in row["ratio"] else []


def _forward() -> list[Goal]:
    made = []
    fp8 = {"kind": "fwd", "preset": "accurate", "with_quantize": False}
    limits = {64: (1.25, 1.6, 1.3), 128: (1.1, 1.3, 1.2), 256: (1.0, 1.12, 1.1)}
    for head_dim, (floor, long, short) in limits.items():
        own = {**fp8, "head_dim": head_dim}
        name = f"FP8 D={head_dim}"
        made.append(Goal("forward", f"{name}, 4k and longer", floor, long, None, LONG, own))
        made.append(Goal("forward", f"{name}, 512 to 2k", 1.0, short, None, SHORT, own))
    large = {**fp8, "head_dim": 128, "batch": 16}
    made.append(Goal("forward", "FP8 D=128, batch 16, 8k", 1.1, 1.3, None, (8192,), large))
    for head_dim, floor, goal in ((64, 1.0, 1.1), (128, 1.0, 1.05), (256, 0.95, 1.0)):
        own = {"kind": "fwd", "impl": "jax_fa3", "precision": "bf16", "head_dim": head_dim}
        name = f"bf16 D={head_dim}, 2k and longer"
        made.append(Goal("forward", name, floor, goal, "fa3", USUAL, own))
    f16 = {"kind": "fwd", "impl": "jax_fa3", "precision": "f16", "head_dim": 128}
    name = "f16 D=128, 2k and longer"
    made.append(Goal("forward", name, 1.0, 1.05, "fa3jax_f16", USUAL, f16))
    return made


def _backward() -> list[Goal]:
    made = []
    for head_dim, over, floor, goal in (
        (64, "cudnn", 1.2, 1.25),
        (128, "fa3jax", 1.0, 1.08),
        (256, "cudnn", 1.2, 1.33),
    ):
        own = {"kind": "bwd", "impl": "jax_fa3", "preset": None, "head_dim": head_dim}
        name = f"head_dim {head_dim}"
        made.append(Goal("backward", name, floor, goal, over, USUAL, own))
    step = {"kind": "step", "preset": "accurate", "head_dim": 128}
    name = "step with an FP8 forward, head_dim 128, 8k"
    made += [
        Goal("backward", name, goal, goal, over, (8192,), step)
        for over, goal in (("fa3jax", 1.15), ("cudnn", 1.3))
    ]
    return made


def _quantiser() -> list[Goal]:
    whole = {"kind": "fwd", "preset": "accurate", "with_quantize": True, "head_dim": 128}
    made = []
    for heads_kv, words in ((16, ""), (2, ", 8 query heads to a key head")):
        own = {**whole, "num_heads_q": 16, "num_heads_kv": heads_kv}
        for seqlen, goal in ((8192, 0.92), (4096, 0.85)):
            name = f"call from bfloat16, {seqlen // 1024}k{words}"
            made.append(Goal("quantiser", name, None, goal, "kernel", (seqlen,), own))
    return made


GOALS = (*_forward(), *_backward(), *_quantiser())


def goals_table(page: str, rows: list[Row]) -> str:
    """A line per goal of a page: what it is over, the floor, the goal, the least and the most that
    was measured, and how many shapes have the goal. Empty without a row of any."""
    lines = []
    for goal in GOALS:
        found = goal.values(rows) if goal.page == page else {}
        every = [x for own in found.values() for x in own]
        if every:
            over = NAMES[goal.over] if goal.over else "the faster rival"
            limits = ["-" if x is None else f"{x:g}" for x in (goal.floor, goal.goal)]
            reached = sum(x >= goal.goal for x in every)
            ranges = [_range(found[causal]) for causal in (False, True)]
            lines.append([goal.name, over, *limits, *ranges, f"{reached} of {len(every)}"])
    header = ["what", "over", "at least", "goal", "without a mask", "causal", "have the goal"]
    return row_tables.markdown(header, lines) if lines else ""


def floors(row: Row) -> dict[str, float]:
    """What the ratios of a row must reach, by their keys in `ratio`: floors, else goals."""
    found = {
        rival: goal.goal if goal.floor is None else goal.floor
        for goal in GOALS
        for rival in goal.rivals(row)
    }
    if "default" in row["ratio"] and row["head_dim"] < 256:
        found["default"] = 1 / MOST_FOR_ORDER
    return found


def costs_of_order(rows: list[Row]) -> dict[int, dict[bool, list[float]]]:
    """Time of the backward pass with a fixed order over the default's, by head_dim and mask."""
    costs: dict[grid.Shape, float] = {}
    for row in rows:  # a shape may stand in several comparisons: the first one counts
        if row["kind"] == "bwd" and "default" in row["ratio"]:
            costs.setdefault(grid.Shape.of(row), 1 / row["ratio"]["default"])
    found: dict[int, dict[bool, list[float]]] = {}
    for shape, cost in costs.items():
        own = found.setdefault(shape.head_dim, {False: [], True: []})
        own[shape.is_causal].append(cost)
    return found


def order_table(rows: list[Row]) -> str:
    """How much longer the backward pass takes with a fixed order."""
    lines = [
        [str(head_dim), *(_range(found[causal]) for causal in (False, True))]
        for head_dim, found in sorted(costs_of_order(rows).items())
    ]
    return row_tables.markdown(["head_dim", "without a mask", "causal"], lines) if lines else ""


def _range(values: list[float]) -> str:
    """E.g. 1.030 to 1.084."""
    if not values:
        return "-"
    return " to ".join(dict.fromkeys(f"{x:.3f}" for x in (min(values), max(values))))
