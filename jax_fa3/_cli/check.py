"""`python -m jax_fa3 check`: errors against float64, presets by distributions by seqlen."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from jax_fa3._cli import accuracy, contenders, plots, results
from jax_fa3._cli.accuracy import DATA, DISTRIBUTIONS, PRESETS, Problem
from jax_fa3._cli.progress import progress
from jax_fa3._cli.text import UsageError, add_list_flag, positive_int, table


def add_parser(commands: Any) -> None:
    """Adds the sub-command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "check",
        help="accuracy table: presets x distributions x seqlen",
        description=(
            "Errors of jax_fa3.attention against a float64 NumPy reference on the same 16-bit "
            "inputs. Exit code 1 when a row is beyond its limit."
        ),
        epilog=(
            "distributions: normal N(0,1); outlier N(0,1) + N(0,100) at 0.1% of the places; "
            "biased N(0,1) plus a mean per channel; ones: value 1, which must come back; uniform: "
            "all keys weigh the same, value N(1,1); shifted: value N(1,1)."
        ),
    )
    add = parser.add_argument
    add_list_flag(parser, "--presets", ["accurate", "fast", "native"], of=PRESETS)
    add_list_flag(parser, "--data", DISTRIBUTIONS, of=DATA)
    add_list_flag(parser, "--seqlens", [512, 2048], about="numbers of keys")
    add("--queries", type=positive_int, default=256, metavar="N", help="at most (default 256)")
    add("--heads-q", type=positive_int, default=4, metavar="N", help="query heads (default 4)")
    add("--heads-kv", type=positive_int, default=2, metavar="N", help="key heads (default 2)")
    add("--head-dim", type=positive_int, default=128, metavar="N", help="head_dim (default 128)")
    add("--causal", action="store_true", help="causal mask, aligned bottom right")
    add("--dtype", choices=tuple(accuracy.DTYPES), default="bf16", help="of the inputs")
    add("--implementation", choices=("cuda", "xla"), help="as in attention (default: the best)")
    add("--seed", type=int, default=0, help="of the inputs (default 0)")
    add("--json", type=Path, metavar="FILE", help="write a result file")
    add("--plot", type=Path, metavar="FILE", help="write a plot (needs matplotlib)")
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Computes the table, prints it and judges it."""
    if flags.heads_q % flags.heads_kv:
        raise UsageError(f"--heads-kv must divide --heads-q; got {flags.heads_kv}, {flags.heads_q}")
    if flags.plot is not None:
        plots.require()
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    implementation = flags.implementation
    on_kernel = contenders.kernels_run() and implementation != "xla"
    groups = list(itertools.product(flags.seqlens, flags.data))
    for seqlen, data in progress(groups, "check"):
        problem = Problem(
            seqlen_q=min(flags.queries, seqlen),
            seqlen_k=seqlen,
            num_heads_q=flags.heads_q,
            num_heads_kv=flags.heads_kv,
            head_dim=flags.head_dim,
            is_causal=flags.causal,
            data=data,
        )
        arrays = accuracy.draw(problem, dtype=flags.dtype, seed=flags.seed)
        expected = accuracy.reference(*arrays, is_causal=problem.is_causal)
        for preset in flags.presets:
            try:
                out = accuracy.run_ours(arrays, problem, preset, implementation)
            except (NotImplementedError, RuntimeError) as error:
                if implementation != "cuda":
                    raise
                raise UsageError(str(error)) from error
            found = accuracy.errors(out, expected)
            complaint = accuracy.verdict(preset, data, found, seqlen)
            if complaint is not None:
                wrong.append(f"{preset}, {data}, {seqlen} keys: {complaint}")
            native = preset == "native"
            rows.append(
                results.accuracy_row(
                    found,
                    impl="jax_fa3" if on_kernel else "jax_fa3_xla",
                    precision=flags.dtype if native else "fp8",
                    preset=None if native else preset,
                    data=data,
                    seqlen_k=seqlen,
                    head_dim=flags.head_dim,
                    seqlen_q=problem.seqlen_q,
                    is_causal=flags.causal,
                )
            )
    print(format_rows(rows))
    if flags.json is not None:
        results.write(flags.json, results.meta(), rows)
    if flags.plot is not None:
        plots.accuracy(rows, flags.plot)
    for complaint in wrong:
        print(f"beyond its limit: {complaint}")
    print(f"jax_fa3 check: {'FAILED' if wrong else 'ok'}, {len(rows)} rows")
    return 1 if wrong else 0


def format_rows(rows: list[dict[str, Any]]) -> str:
    """Accuracy rows as a table."""
    names = ("rmse", "rel_l2", "cosine", "max_abs")

    def number(name: str, value: float | None) -> str:
        if value is None:
            return "not finite"
        return f"{value:.6f}" if name == "cosine" else f"{value:.2e}"

    return table(
        ["impl", "preset", "data", "keys", *names],
        [
            [row["impl"], row["preset"] or row["precision"], row["data"], row["seqlen_k"]]
            + [number(name, row[name]) for name in names]
            for row in rows
        ],
    )
