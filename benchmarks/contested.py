"""Which comparisons go on after the usual rounds: those near a floor of goals.py.

One rule for every rival and shape. A ratio that lies within 2 % or three standard errors of its
floor after the rounds that everyone has is contested: those two take further turns, until the ratio
is three standard errors away from the floor or known to 0.3 %. Every round counts, the first ones
too.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable

import goals

from jax_fa3._cli import bench, grid, text, timing
from jax_fa3._cli.contenders import Comparison, Contender

NEAR = 0.02
SURE, KNOWN = 3.0, 0.003
# A standard error of fewer rounds is too uncertain to stop at.
LEAST, MOST = 9, 45


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two labels, and the least speed of ours over the rival's."""

    ours: str
    rival: str
    floor: float

    def is_near(self, done: Comparison) -> bool:
        """Whether both ran and the ratio lies near the floor, or cannot be told from it."""
        if not {self.ours, self.rival} <= done.turns.keys():
            return False
        ratio, error = self._known(done)
        return abs(ratio - self.floor) <= max(NEAR * self.floor, SURE * error)

    def is_settled(self, done: Comparison, most: int) -> bool:
        """Whether further rounds would tell nothing that matters, or were enough."""
        rounds = min(len(done.turns[name].ms) for name in (self.ours, self.rival))
        ratio, error = self._known(done)
        is_clear = abs(ratio - self.floor) > SURE * error or error <= KNOWN * ratio
        return rounds >= most or (rounds >= LEAST and is_clear)

    def _known(self, done: Comparison) -> tuple[float, float]:
        """The ratio and its standard error."""
        ours, rival = done.turns[self.ours], done.turns[self.rival]
        return timing.speed_ratio(ours, rival), timing.ratio_error(ours, rival)


def add_flag(parser: argparse.ArgumentParser) -> None:
    """--contested."""
    parser.add_argument(
        "--contested",
        type=text.positive_int,
        default=MOST,
        metavar="N",
        help=f"most turns of each where a ratio is near its floor (default {MOST})",
    )


def more_rounds(
    flags: argparse.Namespace, kind: str
) -> Callable[[grid.Shape, list[Contender]], bench.MoreRounds]:
    """For `bench.time_shapes`: who goes on, shape by shape."""

    def of(shape: grid.Shape, group: list[Contender]) -> bench.MoreRounds:
        contested: list[Pair] | None = None

        def more(done: Comparison) -> list[str]:
            nonlocal contested
            if contested is None:
                contested = [p for p in _pairs(shape, group, done, flags, kind) if p.is_near(done)]
            contested = [pair for pair in contested if not pair.is_settled(done, flags.contested)]
            names = {name for pair in contested for name in (pair.ours, pair.rival)}
            return [one.label for one in group if one.label in names]

        return more

    return of


def _pairs(
    shape: grid.Shape,
    group: list[Contender],
    done: Comparison,
    flags: argparse.Namespace,
    kind: str,
) -> list[Pair]:
    """Every pair that ran and has a floor."""
    found = []
    for one in group:
        if one.label not in done.turns:
            continue
        row = {
            "kind": kind,
            "impl": one.impl,
            "precision": one.precision,
            "preset": one.preset,
            "with_quantize": one.with_quantize,
            "regime": flags.regime,
            "ratio": bench.ratios(one, group, done),
            **dataclasses.asdict(shape),
        }
        floors = goals.floors(row)
        labels = bench.rivals_of(one, group)
        found += [Pair(one.label, x, floors[key]) for x, key in labels.items() if key in floors]
    return found
