"""Errors of every variant and rival against float64, as a table and JSON rows.

python benchmarks/accuracy.py --json benchmarks/results/accuracy.json

Inputs: normal, outlier (the FlashAttention-3 paper's), biased (a mean per channel), each with
2,048, 8,192 and 131,072 keys and 256 queries. Then sums that must not be lost, as long: value 1
everywhere, and value N(1, 1) under equal and under random weights. The reference is float64,
computed on the GPU or by NumPy without one. `over_model` is the error over that of the quantised
model, which sums in float32.
"""

from __future__ import annotations

import harness  # isort: skip  # sets how JAX allocates, before JAX is imported

import argparse
import collections
import itertools
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import float64
import jax
from rivals import RIVALS, add_rivals_flag

from jax_fa3._cli import accuracy, bench, check, contenders, plots, results, text
from jax_fa3._cli.accuracy import DATA, PRESETS, Problem
from jax_fa3._cli.progress import progress

SEQLENS = (2048, 8192, 131_072)
# Largest error over the model's, where errors of sums would show.
OVER_MODEL_LIMIT, OVER_MODEL_DATA = 1.3, ("normal", "shifted")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = made.add_argument
    text.add_list_flag(made, "--presets", PRESETS, of=PRESETS)
    text.add_list_flag(made, "--data", DATA, of=DATA)
    text.add_list_flag(made, "--seqlens", SEQLENS, about="numbers of keys")
    bench.add_head_dims_flag(made)
    add_rivals_flag(made)
    add("--queries", type=text.positive_int, default=256, metavar="N", help="default 256")
    add("--heads", type=text.positive_int, default=4, metavar="N", help="default 4")
    add("--model", action="store_true", help="also the FP8 model through XLA, on the same device")
    add("--seed", type=int, default=0, help="of the inputs (default 0)")
    add("--json", type=Path, metavar="FILE", help="write a result file, after every problem")
    add("--plot", type=Path, metavar="FILE", help="write a plot (needs matplotlib)")
    add("--dry-run", action="store_true", help="tiny sizes on any device")
    return made


def drawn_ahead(problems: Sequence[Problem], seed: int) -> Iterator[tuple[Any, ...]]:
    """The inputs of every problem in turn; the next two are drawn beside the work."""
    with ThreadPoolExecutor(2) as pool:
        waiting: collections.deque[Any] = collections.deque()
        for problem in problems:
            waiting.append(pool.submit(accuracy.draw, problem, seed=seed))
            if len(waiting) > 2:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def outputs(
    flags: argparse.Namespace, arrays: tuple[Any, Any, Any], problem: Problem, skipped: set[str]
) -> Iterator[tuple[dict[str, Any], Any]]:
    """(impl, precision, preset) and the output of everybody, a model before its kernel; who cannot
    run goes to `skipped`."""
    runs = contenders.kernels_run()
    for preset in flags.presets:
        native = preset == "native"
        served = runs and preset not in ("per_tensor", "block")
        if flags.model and served and not native and problem.data != "ones":  # which has no error
            who = {"impl": "jax_fa3_xla", "precision": "fp8", "preset": preset}
            yield who, accuracy.run_ours(arrays, problem, preset, "xla")
        try:
            out = accuracy.run_ours(arrays, problem, preset, "cuda" if served else "xla")
        except (NotImplementedError, RuntimeError) as error:
            skipped.add(f"jax_fa3 {preset}: {str(error)[:200]}")
            continue
        yield (
            {
                "impl": "jax_fa3" if served else "jax_fa3_xla",
                "precision": "bf16" if native else "fp8",
                "preset": None if native else preset,
            },
            out,
        )
    for key in flags.rivals:
        if key == "none":
            continue
        rival = RIVALS[key]
        precision = rival.precisions[0]
        reason = rival.unavailable(precision, problem.head_dim)
        if reason is None:
            try:
                out = rival.compute(arrays, precision, is_causal=problem.is_causal)
            except Exception as error:  # a rival that fails is skipped and named in the results
                reason = f"{type(error).__name__}: {str(error)[:200]}"
        if reason is not None:
            skipped.add(f"{key}: {reason}")
            continue
        yield {"impl": key, "precision": precision, "preset": None}, out


def over_model(row: dict[str, Any], before: list[dict[str, Any]]) -> dict[str, float]:
    """{"over_model": error over that of the same preset's model}; empty without one."""
    if row["impl"] != "jax_fa3" or row["rel_l2"] is None:
        return {}
    for model in before:
        if (model["impl"], model["preset"]) == ("jax_fa3_xla", row["preset"]) and model["rel_l2"]:
            return {"over_model": round(row["rel_l2"] / model["rel_l2"], 3)}
    return {}


def model_verdict(row: dict[str, Any]) -> str | None:
    """What is wrong next to the model, or None."""
    found = row.get("over_model", 0.0)
    if row["data"] not in OVER_MODEL_DATA or found <= OVER_MODEL_LIMIT:
        return None
    return f"{found:.2f} times the error of the model, limit {OVER_MODEL_LIMIT}"


def main(arguments: Sequence[str] | None = None) -> int:
    flags = parser().parse_args(arguments)
    if flags.plot is not None:
        plots.require()
    if flags.dry_run:
        flags.seqlens, flags.queries, flags.heads = [96, 160], 16, 2
    on_gpu = jax.default_backend() == "gpu"
    record = results.Recorder(flags.json, dry_run=bool(flags.dry_run))
    wrong: list[str] = []
    skipped: set[str] = set()
    problems = [
        Problem(min(flags.queries, seqlen_k), seqlen_k, flags.heads, flags.heads, head_dim, data=d)
        for head_dim, seqlen_k, d in itertools.product(flags.head_dims, flags.seqlens, flags.data)
    ]
    inputs = drawn_ahead(problems, flags.seed)
    for problem in progress(problems, "accuracy"):
        arrays = next(inputs)
        if on_gpu:
            arrays = tuple(jax.device_put(x) for x in arrays)
            expected = float64.attention(*arrays)
        else:
            expected = accuracy.reference(*arrays, is_causal=False)
        head_dim, seqlen_k, data = problem.head_dim, problem.seqlen_k, problem.data
        rows: list[dict[str, Any]] = []
        known = set(skipped)
        for who, out in outputs(flags, arrays, problem, skipped):
            found = accuracy.errors(out, expected)
            row = results.accuracy_row(
                found,
                **who,
                data=data,
                seqlen_k=seqlen_k,
                head_dim=head_dim,
                seqlen_q=problem.seqlen_q,
            )
            rows.append({**row, **over_model(row, rows)})
            if who["impl"].startswith("jax_fa3"):
                preset = who["preset"] or "native"
                complaint = accuracy.verdict(preset, data, found, seqlen_k)
                complaint = complaint or model_verdict(rows[-1])
                if complaint is not None:
                    wrong.append(f"{preset}, {data}, {seqlen_k} keys, D {head_dim}: {complaint}")
        record.add(rows, sorted(skipped - known))
    rows = record.rows
    record.close()
    print(check.format_rows(rows))
    for reason in sorted(skipped):
        print(f"not measured: {reason}")
    if flags.json is not None:
        print(f"wrote {flags.json}")
    if flags.plot is not None:
        plots.accuracy(rows, flags.plot)
    for complaint in wrong:
        print(f"beyond its limit: {complaint}")
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(harness.exit_with_usage(main))
