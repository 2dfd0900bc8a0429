"""Timing on the device: contenders take turns, each turn is one queue of launches.

Nothing is read back inside a turn: launches are queued and the last one is waited for, so the host
costs nothing as long as it queues faster than the device works. Very short calls are therefore put
into one program several times. Two regimes that must never be mixed: "sustained" keeps the card at
its power limit, "burst" lets it idle before each short turn.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

# A call shorter than this is launched several times per program. It is far more than a launch takes
# the host, so that a first estimate which the host has disturbed never leaves a turn to its speed.
SHORT_S = 1e-3
LAUNCHES_OF_SHORT = 8
# Untimed part of a sustained turn, in which clocks adapt to the new contender.
_LEAD = 0.2
# Untimed before the first turn, and at most ten turns' time. An H200 that idled while programs were
# compiled is 6 to 12 % slower 0.35 to 0.55 s later than it stays.
_WARM_S = 1.0
_DRAWS = 200  # of the orders of all rounds, to choose from
_AT_ONCE = 4  # further rounds between two looks at what is known


@dataclasses.dataclass(frozen=True)
class Regime:
    """How long a turn lasts and how long the card idles before it, in seconds."""

    name: str
    turn_s: float
    idle_s: float


SUSTAINED = Regime("sustained", 0.3, 0.0)
BURST = Regime("burst", 0.018, 0.08)
REGIMES = {regime.name: regime for regime in (SUSTAINED, BURST)}


@dataclasses.dataclass(frozen=True)
class Side:
    """One contender, compiled.

    Attributes:
      launch: queues `launches` attention calls and returns a handle at once.
      wait: blocks until the work behind a handle is done.
    """

    launch: Callable[[], Any]
    wait: Callable[[Any], Any]
    launches: int = 1


@dataclasses.dataclass
class Turns:
    """What one contender took: milliseconds per attention call, and when, for each round."""

    ms: list[float] = dataclasses.field(default_factory=list)
    spans: list[tuple[float, float]] = dataclasses.field(default_factory=list)

    @property
    def median(self) -> float:
        """Median of the rounds in milliseconds."""
        return statistics.median(self.ms)


def jax_side(fn: Callable[..., Any], *operands: Any) -> Side:
    """fn(*operands) as a contender: compiled, run once, and repeated inside a program if short."""
    single = jax.jit(fn).lower(*operands).compile()
    jax.block_until_ready(single(*operands))
    if jax.default_backend() != "gpu":
        # Queued programs with collectives would need a thread each there, or wait for ever.
        return Side(lambda: jax.block_until_ready(single(*operands)), jax.block_until_ready)
    side = Side(lambda: single(*operands), jax.block_until_ready)
    if seconds_per_launch(side) > SHORT_S:
        return side

    def several(*args: Any) -> list[Any]:
        outs = []
        for _ in range(LAUNCHES_OF_SHORT):
            outs.append(fn(*args))
            # Keeps the compiler from seeing that all launches are the same.
            args, _ = jax.lax.optimization_barrier((args, outs[-1]))
        return outs

    program = jax.jit(several).lower(*operands).compile()
    if _custom_calls(program) != LAUNCHES_OF_SHORT * _custom_calls(single):
        return side  # merged all the same
    jax.block_until_ready(program(*operands))
    return Side(lambda: program(*operands), jax.block_until_ready, LAUNCHES_OF_SHORT)


def take_turns(
    sides: dict[str, Side],
    regime: Regime,
    rounds: int,
    *,
    turn_s: float | None = None,
    more: Callable[[dict[str, Turns]], list[str]] | None = None,
) -> dict[str, Turns]:
    """Every side once per round, `rounds` times; results by name.

    See `draw_orders` for the order, which is the same in every run.

    Args:
      more: names who takes part in further rounds, from the turns so far, until it names nobody.
        Who was left out once must not come back: two sides share the rounds that the one with
        fewer of them has.
    """
    if not sides or rounds < 1:
        raise ValueError(f"take_turns: sides and rounds must be given; got {len(sides)}, {rounds}.")
    turn_s = regime.turn_s if turn_s is None else turn_s
    counts = {
        name: max(1, math.ceil(turn_s / (seconds_per_launch(side) * side.launches)))
        for name, side in sides.items()
    }
    turns = {name: Turns() for name in sides}
    if not regime.idle_s:
        _warm(sides, counts, min(_WARM_S, 10 * turn_s))
    orders = draw_orders(list(sides), rounds)
    while orders:
        for name in itertools.chain.from_iterable(orders):
            side, count = sides[name], counts[name]
            if regime.idle_s:
                time.sleep(regime.idle_s)
            else:
                _queue(side, math.ceil(count * _LEAD))
            start = time.perf_counter()
            _queue(side, count)
            end = time.perf_counter()
            turns[name].ms.append((end - start) * 1e3 / (count * side.launches))
            turns[name].spans.append((start, end))
        names = [] if more is None else more(turns)
        orders = draw_orders(names, _AT_ONCE) if names else []
    return turns


def draw_orders(names: Sequence[str], rounds: int) -> list[list[str]]:
    """The order of each round.

    A card at its power limit starts a turn at the clock of the turn before, so every side should
    follow every other (and itself) about as often: the most even of several draws is taken.
    """
    drawn = random.Random(0)
    return min(
        ([drawn.sample(names, len(names)) for _ in range(rounds)] for _ in range(_DRAWS)),
        key=_unevenness,
    )


def _unevenness(orders: Iterable[Sequence[str]]) -> int:
    followed = collections.Counter(itertools.pairwise(itertools.chain.from_iterable(orders)))
    return sum(count * count for count in followed.values())


def speed_ratio(ours: Turns, rival: Turns) -> float:
    """Median over the rounds of our speed over the rival's: 2 means twice as fast."""
    return statistics.median(_ratios(ours, rival))


def ratio_error(ours: Turns, rival: Turns) -> float:
    """Standard error of `speed_ratio`, from the median distance to it; infinite for one round."""
    ratios = _ratios(ours, rival)
    if len(ratios) < 2:
        return math.inf
    median = statistics.median(ratios)
    deviation = 1.4826 * statistics.median(abs(x - median) for x in ratios)
    return deviation * math.sqrt(math.pi / 2 / len(ratios))


def _ratios(ours: Turns, rival: Turns) -> list[float]:
    """Of each round that both took part in: the first ones, see `take_turns`."""
    return [b / a for a, b in zip(ours.ms, rival.ms, strict=False)]


def _warm(sides: dict[str, Side], counts: dict[str, int], seconds: float) -> None:
    """All sides by turns, untimed, until the card is at the clock that it holds."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, side in sides.items():
            _queue(side, math.ceil(counts[name] * _LEAD))


def _queue(side: Side, count: int) -> None:
    handle = None
    for _ in range(count):
        handle = side.launch()
    side.wait(handle)


def seconds_per_launch(side: Side) -> float:
    """A first estimate, from a few launches after a warm one."""
    side.wait(side.launch())
    seconds = []
    for count in (1, 4):
        start = time.perf_counter()
        _queue(side, count)
        seconds.append((time.perf_counter() - start) / (count * side.launches))
    return max(min(seconds), 1e-6)


def _custom_calls(compiled: Any) -> int:
    """How many custom calls an optimised program holds."""
    return int(compiled.as_text().count(" custom-call("))
