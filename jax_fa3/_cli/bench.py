"""`python -m jax_fa3 bench`: speed over a grid next to cuDNN; table, JSON and plot."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax_fa3._cli import contenders, gpu_state, grid, plots, results, text
from jax_fa3._cli.contenders import Contender
from jax_fa3._cli.progress import progress
from jax_fa3._cli.timing import REGIMES

_PRESETS = ("accurate", "fast", "native")
# Keys in `ratio` that name variants of ours and no rival.
OWN_KEYS = ("kernel", "default")
# Labels of those who take part in further rounds, from what is known.
MoreRounds = Callable[[contenders.Comparison], list[str]]
# What --causal chooses.
CAUSAL = {"no": (False,), "yes": (True,), "both": (False, True)}


def add_parser(commands: Any) -> None:
    """Adds the sub-command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="time a grid of sizes next to cuDNN: table, JSON, plot",
        description=(
            "Times jax_fa3.attention and cuDNN in turns on one GPU. Whole calls from bf16 inputs; "
            "benchmarks/bench_attention.py of the source tree also times the kernel alone and "
            "more rivals."
        ),
    )
    add_grid_flags(parser)
    text.add_list_flag(parser, "--presets", _PRESETS, of=_PRESETS)
    parser.add_argument("--no-cudnn", action="store_true", help="leave cuDNN out")
    parser.set_defaults(run=run)


def add_head_dims_flag(parser: argparse.ArgumentParser) -> None:
    """--head-dims, by default all that the kernels serve."""
    text.add_list_flag(parser, "--head-dims", grid.HEAD_DIMS)


def add_grid_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of every program that times a grid; `shapes_of` reads them."""
    add = parser.add_argument
    add_head_dims_flag(parser)
    text.add_list_flag(parser, "--seqlens", grid.SEQLENS)
    add("--causal", choices=CAUSAL, default="both", help="default both")
    add("--tokens", type=text.positive_int, default=grid.TOKENS, help="batch * seqlen (16384)")
    add("--hidden", type=text.positive_int, default=grid.HIDDEN, help="heads * head_dim (2048)")
    add("--regime", choices=REGIMES, default="sustained", help="default sustained")
    add(
        "--seconds",
        type=text.positive_float,
        metavar="S",
        help="length of one turn (default: 0.3 sustained, 0.018 burst)",
    )
    text.add_list_flag(parser, "--groups", [1], about="query heads of a key head")
    add("--rounds", type=text.positive_int, default=5, help="turns of each contender (default 5)")
    add("--json", type=Path, metavar="FILE", help="write a result file, after every shape")
    add("--plot", type=Path, metavar="FILE", help="write a plot (needs matplotlib)")
    add(
        "--dry-run",
        action="store_true",
        help="tiny sizes on any device, to try the program; its numbers mean nothing",
    )


def shapes_of(flags: argparse.Namespace) -> list[grid.Shape]:
    """The grid that the flags ask for.

    Raises: UsageError without a GPU, unless it is a dry run.
    """
    if flags.plot is not None:
        plots.require()
    causal = CAUSAL[flags.causal]
    if flags.dry_run:
        return [grid.square(1, 48, 2, head_dim, c) for head_dim in flags.head_dims for c in causal]
    contenders.require_gpu()
    return [
        shape
        for group in flags.groups
        for shape in grid.grid(
            flags.head_dims,
            flags.seqlens,
            causal,
            tokens=flags.tokens,
            hidden=flags.hidden,
            group=group,
        )
    ]


def run(flags: argparse.Namespace) -> int:
    """Times the grid and prints it."""
    shapes = shapes_of(flags)
    entrants = [contenders.ours(preset) for preset in flags.presets]
    if not flags.no_cudnn:
        entrants.append(contenders.cudnn())
    record = recorder(flags)
    time_shapes(flags, shapes, [entrants], record)
    return finish(flags, record)


def recorder(flags: argparse.Namespace) -> results.Recorder:
    """Where the rows of this run go."""
    return results.Recorder(flags.json, dry_run=bool(flags.dry_run))


def time_shapes(
    flags: argparse.Namespace,
    shapes: list[grid.Shape],
    groups: list[list[Contender]],
    record: results.Recorder,
    kind: str = "fwd",
    more_for: Callable[[grid.Shape, list[Contender]], MoreRounds] | None = None,
) -> None:
    """Times every group of contenders on every shape.

    Args:
      groups: contenders that take turns with each other.
      record: gets timing rows, and {"shape", "contender", "reason"} for each that could not run.
      kind: of the rows, a key of `results.WORK`.
      more_for: who goes on after the rounds; not in a dry run.
    """
    turn_s, rounds = flags.seconds, flags.rounds
    if flags.dry_run:
        turn_s, rounds = 0.001, min(rounds, 2)
    with gpu_state.sampling() as samples:
        for shape in progress(shapes, "bench"):
            for group in groups:
                more = None if more_for is None or flags.dry_run else more_for(shape, group)
                done = contenders.compare(
                    shape, group, regime=flags.regime, rounds=rounds, turn_s=turn_s, more=more
                )
                record.add(
                    rows_of(shape, group, done, flags.regime, samples, kind),
                    (
                        {"shape": shape.name, "contender": label, "reason": reason}
                        for label, reason in done.skipped.items()
                    ),
                )


def rows_of(
    shape: grid.Shape,
    group: list[Contender],
    done: contenders.Comparison,
    regime: str,
    samples: gpu_state.Samples,
    kind: str,
) -> list[dict[str, Any]]:
    """A timing row of each contender that took turns, in the order of the group."""
    return [
        results.timing_row(
            shape,
            done.turns[contender.label],
            impl=contender.impl,
            precision=contender.precision,
            preset=contender.preset,
            regime=regime,
            with_quantize=contender.with_quantize,
            ratio=ratios(contender, group, done),
            state=samples.during(done.turns[contender.label].spans),
            kind=kind,
        )
        for contender in group
        if contender.label in done.turns
    ]


def ratios(
    contender: Contender, group: list[Contender], done: contenders.Comparison
) -> dict[str, float]:
    """Our speed over that of each rival; of whole calls also over the kernel alone ("kernel"), with
    a fixed order also over the default ("default")."""
    keys = rivals_of(contender, group)
    return {keys[label]: x for label, x in done.ratios(contender.label, list(keys)).items()}


def rivals_of(contender: Contender, group: list[Contender]) -> dict[str, str]:
    """Keys in `ratio` by label; none of a rival's own."""
    if not contender.is_ours:
        return {}
    keys = {other.label: rival_key(other) for other in group if not other.is_ours}
    if contender.with_quantize:
        alone = dataclasses.replace(contender, with_quantize=False)
        keys[alone.label] = "kernel"
    if contender.preset == "deterministic":
        keys[dataclasses.replace(contender, preset=None).label] = "default"
    return keys


def rival_key(contender: Contender) -> str:
    """Key of a rival in `ratio`; its dtype is named when it is not the usual one."""
    usual = "fp8" if contender.impl.endswith("fp8") else "bf16"
    if contender.precision == usual:
        return contender.impl
    return f"{contender.impl}_{contender.precision}"


def finish(flags: argparse.Namespace, record: results.Recorder) -> int:
    """Prints what was timed and completes the file; 1 when nothing of ours ran."""
    rows, skipped = record.rows, record.skipped
    print(format_rows(rows))
    reasons = {(entry["contender"], entry["reason"]) for entry in skipped}
    for contender, reason in sorted(reasons):
        count = sum((e["contender"], e["reason"]) == (contender, reason) for e in skipped)
        print(f"not timed ({count} shapes): {contender}: {reason}")
    if flags.dry_run:
        print("dry run: these numbers mean nothing")
    record.close()
    if flags.json is not None:
        print(f"wrote {flags.json}")
    if flags.plot is not None:
        plots.speed(rows, flags.plot)
        print(f"wrote {flags.plot}")
    return 0 if any(row["impl"].startswith("jax_fa3") for row in rows) else 1


def format_rows(rows: list[dict[str, Any]]) -> str:
    """Timing rows as a table."""

    def one(row: dict[str, Any]) -> list[str]:
        what = row["preset"] or row["precision"]
        if row["with_quantize"]:
            what += " +quantise"
        ratios = ", ".join(f"{value:.2f} x {rival}" for rival, value in row["ratio"].items())
        clock = f"{row['sm_clock_mhz']:.0f}" if "sm_clock_mhz" in row else "-"
        return [
            grid.Shape.of(row).name,
            row["impl"],
            what,
            f"{row['ms']:.3f}",
            f"{row['ms_lo']:.3f}-{row['ms_hi']:.3f}",
            f"{row['tflops']:.0f}",
            clock,
            ratios,
        ]

    header = ["shape", "impl", "variant", "ms", "range", "TFLOP/s", "MHz", "speed"]
    return text.table(header, map(one, rows))
