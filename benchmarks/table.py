"""Writes the tables between the markers of README.md and benchmarks/README.md from result files.

python benchmarks/table.py benchmarks/results/a.json [b.json ...]           # both files
python benchmarks/table.py benchmarks/results/a.json --check                # 1 if they would change

README.md gets short tables of all files, benchmarks/README.md every row, file by file. They
stand under the sentence that says where their numbers come from; collect.py makes one file of
several.
"""

from __future__ import annotations

import harness  # isort: skip  # sets how JAX allocates, before JAX is imported

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jax_fa3._cli import bench, grid, text
from jax_fa3._cli.results import variant

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"
Rows = list[dict[str, Any]]
# Kinds of timed rows. FLOPs: 4, 10 and 14 times batch * heads * seqlen_q * seqlen_k * head_dim.
# Rows of these kinds that name no regime are steps over several devices, which no table here shows.
TIMED = {  # in a sentence, in a table
    "fwd": ("the forward pass", "forward"),
    "bwd": ("the backward pass alone", "backward"),
    "step": ("a training step, forward and backward", "step"),
}
LEAD = "Our speed over the fastest rival's in the same turns, by seqlen, without a mask / causal"
ALONE = "; FP8 is the kernel alone, as the rivals' is"
# Variants of the short version.
USUAL = (("fwd", "accurate", "fp8"), ("fwd", None, "bf16"), ("bwd", None, "bf16"))


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and the others numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shape_name(row: dict[str, Any]) -> str:
    return grid.Shape.of(row).name


def by_variant(
    rows: Rows,
    corner: str,
    line: Callable[[dict[str, Any]], str],
    value: Callable[[dict[str, Any]], str],
) -> str:
    """A line per `line(row)`, a column per variant, ours first. The first row of a place counts (a
    rival may appear in several comparisons)."""
    columns = list(dict.fromkeys(map(variant, rows)))
    columns.sort(key=lambda name: not name.startswith("jax_fa3"))
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        lines.setdefault(line(row), {}).setdefault(variant(row), value(row))
    cells = [[name, *(own.get(column, "-") for column in columns)] for name, own in lines.items()]
    return markdown([corner, *columns], cells)


def speed_table(rows: Rows) -> str:
    """TFLOP/s of every shape."""
    return by_variant(rows, "shape", shape_name, lambda row: f"{row['tflops']:.0f}")


def error_table(rows: Rows) -> str:
    """Relative L2 error of every distribution and length, and of every head_dim if there are
    several."""
    several = len({row["head_dim"] for row in rows}) > 1

    def line(row: dict[str, Any]) -> str:
        inputs = f"{row['data']}, {row['seqlen_k']:,} keys"
        return f"{inputs}, head_dim {row['head_dim']}" if several else inputs

    return by_variant(
        rows,
        "inputs",
        line,
        lambda row: "not finite" if row["rel_l2"] is None else f"{row['rel_l2']:.1e}",
    )


def ratio_table(rows: Rows) -> str:
    """Our speed over each rival's, from interleaved pairs."""
    ours = [row for row in rows if row["ratio"]]
    rivals = list(dict.fromkeys(rival for row in ours for rival in row["ratio"]))
    lines = [
        [f"{shape_name(row)} {variant(row)}"]
        + [f"{row['ratio'][r]:.2f}" if r in row["ratio"] else "-" for r in rivals]
        for row in ours
    ]
    return markdown(["ours", *(f"/ {rival}" for rival in rivals)], lines)


def lead_table(rows: Rows) -> str:
    """Our speed over the fastest rival's: a line per kind, variant and head_dim, a column per
    seqlen, in a cell without and with a causal mask. Empty without a rival on a grid's shape."""
    leads: dict[str, dict[int, dict[bool, str]]] = {}
    variants = list(dict.fromkeys(map(variant, rows)))
    for row in sorted(rows, key=lambda r: ([*TIMED].index(r["kind"]), variants.index(variant(r)))):
        ratios = [ratio for rival, ratio in row["ratio"].items() if rival not in bench.OWN_KEYS]
        alike = row["num_heads_q"] == row["num_heads_kv"] and row["seqlen_q"] == row["seqlen_k"]
        if ratios and alike and row["batch"] * row["seqlen_q"] == grid.TOKENS:
            who = variant(row).removeprefix("jax_fa3 ")
            name = f"{TIMED[row['kind']][1]}, {who}, head_dim {row['head_dim']}"
            own = leads.setdefault(name, {}).setdefault(row["seqlen_q"], {})
            own.setdefault(row["is_causal"], f"{min(ratios):.2f}")
    if not leads:
        return ""
    seqlens = sorted({seqlen for own in leads.values() for seqlen in own})
    lines = [
        [name, *(" / ".join(own.get(s, {}).get(c, "-") for c in (False, True)) for s in seqlens)]
        for name, own in leads.items()
    ]
    return markdown(["seqlen", *map(str, seqlens)], lines)


def lead(rows: Rows) -> list[str]:
    """The table of the lead under its sentence; nothing without a rival."""
    found = lead_table(rows)
    alone = any(r["ratio"] and r["precision"] == "fp8" and not r["with_quantize"] for r in rows)
    return [f"{LEAD}{ALONE if alone else ''}:", found] if found else []


def model_table(rows: Rows) -> str:
    """Errors of the kernels over those of the quantised model; empty where none was taken."""
    taken = [row for row in rows if "over_model" in row]

    def line(row: dict[str, Any]) -> str:
        return f"{row['data']}, {row['seqlen_k']:,} keys, head_dim {row['head_dim']}"

    return by_variant(taken, "inputs", line, lambda r: f"{r['over_model']:.2f}") if taken else ""


def accuracy_table(rows: Rows) -> str:
    """Every measure of every row, and the error over the model's where it was taken."""
    model = any("over_model" in row for row in rows)
    lines = []
    for row in rows:
        numbers = [
            "not finite" if row[n] is None else format(row[n], ".6f" if n == "cosine" else ".2e")
            for n in ("rmse", "rel_l2", "cosine", "max_abs")
        ]
        what = f"{row['data']}, {row['seqlen_k']} keys, D {row['head_dim']}: {variant(row)}"
        numbers += [cell(row, "over_model", ".2f")] if model else []
        lines.append([what, *numbers])
    header = ["inputs: variant", "RMSE", "relative L2", "cosine", "largest"]
    return markdown([*header, "over the model"] if model else header, lines)


def commits_of(meta: dict[str, Any]) -> list[str]:
    """The commit of a file, or those of all that `together` joined."""
    commits: list[str] = meta.get("commits", [meta["commit"]] if "commit" in meta else [])
    return commits


def source_line(meta: dict[str, Any]) -> str:
    """Where the numbers come from, in one sentence."""
    versions = meta.get("versions", {})
    parts = [str(meta.get("card", "unknown card"))]
    if "driver" in meta:
        parts.append(f"driver {meta['driver']}")
    if "power_limit_w" in meta:
        parts.append(f"{meta['power_limit_w']:.0f} W")
    parts += [f"{name} {versions[name]}" for name in ("jax", "jax_fa3") if name in versions]
    commits = commits_of(meta)
    if commits:
        parts.append(f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}")
    date = meta.get("date", "")[:10] or "unknown date"
    return f"{', '.join(parts)}; {date}."


def together(found: list[tuple[dict[str, Any], Rows]]) -> list[tuple[dict[str, Any], Rows]]:
    """Files, newest first, that differ in their commit alone as one, with all `commits` in meta."""
    joined: dict[str, tuple[dict[str, Any], Rows]] = {}
    for meta, rows in found:
        source = source_line({**meta, "commits": [], "date": ""})
        first, all_rows = joined.setdefault(source, ({**meta, "commits": []}, []))
        first["commits"] = list(dict.fromkeys([*first["commits"], *commits_of(meta)]))
        first["date"] = max(first.get("date", ""), meta.get("date", ""))
        all_rows += rows
    return list(joined.values())


def in_order(rows: Rows) -> Rows:
    """Timed rows by head_dim, mask, grouping and length; who took turns stays together."""

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        group = row["num_heads_q"] // row["num_heads_kv"]
        return row["head_dim"], row["is_causal"], group, row["seqlen_q"], row["batch"]

    return sorted(rows, key=place)


def sustained(rows: Rows) -> Rows:
    """Timed rows of the sustained regime, kind by kind, in order."""
    found = [row for row in rows if row.get("regime") == "sustained"]
    return [row for kind in TIMED for row in in_order([r for r in found if r["kind"] == kind])]


def command_lines(meta: dict[str, Any]) -> str:
    """The command of every run; one that was stopped says so."""
    runs = meta.get("runs", [meta])
    lines = [
        f"`{run.get('command', 'unknown')}`"
        + (" (stopped before its end)" if run.get("partial") else "")
        for run in runs
    ]
    if len(lines) == 1:
        return f"Command: {lines[0]}."
    return "\n".join(["Commands:", "", *(f"- {line}" for line in lines)])


def cell(row: dict[str, Any], name: str, form: str) -> str:
    """A number of a row, or "-" where it is missing."""
    return "-" if row.get(name) is None else format(row[name], form)


def number_table(rows: Rows, corner: str, columns: dict[str, tuple[str, str]]) -> str:
    """A line per row: its shape and variant, then {title: (field, format)}."""
    lines = [
        [
            f"{shape_name(row)} {variant(row)}",
            *(cell(row, *what) for what in columns.values()),
        ]
        for row in rows
    ]
    return markdown([corner, *columns], lines)


# Kinds of rows that are neither timings of a grid nor errors: sentence, corner, columns.
MORE: dict[str, tuple[str, str, dict[str, tuple[str, str]]]] = {
    "pipe": (
        "How busy the tensor cores are: by Nsight Compute in one launch, and as the sustained "
        "speed over what they could do at the clock sampled with it:",
        "kernel",
        {
            "TFLOP/s": ("tflops", ".0f"),
            "SM MHz": ("sm_clock_mhz", ".0f"),
            "W": ("power_w", ".0f"),
            "of the peak at that clock": ("of_peak", ".0%"),
            "tensor pipe active, %": ("tensor_pct", ".1f"),
            "MHz in that launch": ("ncu_clock_mhz", ".0f"),
        },
    ),
    "host": (
        "Host time of a jitted call, in microseconds, next to a jitted addition of three arrays; "
        "one graph: with xla_gpu_graph_min_graph_size=1 among jit's compiler_options:",
        "call",
        {
            "until queued": ("us", ".1f"),
            "over the addition": ("over_add", ".2f"),
            "until done, 16 queued": ("us_wall", ".1f"),
        },
    ),
    "memory": (
        "Device memory of a forward and backward pass, in MiB; operands are query, key, value, "
        "dout, the output and the gradients:",
        "call",
        {
            "operands": ("operands_mib", ".0f"),
            "temporaries": ("temporaries_mib", ".0f"),
            "peak": ("peak_mib", ".0f"),
        },
    ),
    "gradient_error": (
        "Relative L2 errors of gradients against float64, normal inputs, the largest of 8 heads; "
        "over cuDNN's in the same head and gradient:",
        "call",
        {
            "dquery": ("dquery", ".2e"),
            "dkey": ("dkey", ".2e"),
            "dvalue": ("dvalue", ".2e"),
            "over cuDNN's": ("of_cudnn", ".2f"),
        },
    ),
}


def ablation_table(rows: Rows) -> str:
    """TFLOP/s of every variant of every kernel, a column per length and mask."""
    columns = list(dict.fromkeys((r["seqlen_q"], r["is_causal"]) for r in rows))
    speeds: dict[str, dict[Any, str]] = {}
    for row in rows:
        name = f"{row['kernel']}: {row['variant']}"
        name += f" ({row['note']})" if row["note"] else ""
        own = speeds.setdefault(name, {})
        own[row["seqlen_q"], row["is_causal"]] = cell(row, "tflops", ".0f")
    titles = [f"S={seqlen}{' causal' if causal else ''}" for seqlen, causal in columns]
    lines = [[name, *(own.get(c, "-") for c in columns)] for name, own in speeds.items()]
    return markdown(["kernel: variant", *titles], lines)


def train_table(rows: Rows) -> str:
    """A line per model of examples/train_gpt.py."""
    columns = {
        "steps": ("steps", ",d"),
        "mean loss, last 50 steps": ("final_loss", ".3f"),
        "held-out loss": ("held_out_loss", ".3f"),
        "ms a step": ("ms", ".1f"),
        "tokens/s": ("tokens_per_s", ",.0f"),
    }
    lines = [[r["attention"], *(cell(r, *what) for what in columns.values())] for r in rows]
    return markdown(["attention", *columns], lines)


def short(meta: dict[str, Any], rows: Rows) -> str:
    """For README.md: sustained speed at the longest seqlen of each kind and at batch 16; errors of
    head_dim 128 at 2k and 128k keys. Empty where a file has neither."""
    speed = {kind: [r for r in sustained(rows) if r["kind"] == kind] for kind in TIMED}
    for kind, timed in speed.items():
        longest = max((r["seqlen_q"] for r in timed), default=0)
        speed[kind] = [
            r for r in timed if r["seqlen_q"] == longest or r["batch"] * r["seqlen_q"] > grid.TOKENS
        ]
    accurate = [
        r
        for r in rows
        if r["kind"] == "accuracy"
        and r["seqlen_k"] in (2048, 131_072)
        and r["head_dim"] == 128
        and r["data"] not in ("uniform", "shifted")
        and r["preset"] not in ("uncentred", "block")
    ]
    # Beside its own kernel a model is a detail.
    kernels = {(r["data"], r["seqlen_k"], r["preset"]) for r in accurate if "over_model" in r}
    accurate = [
        r
        for r in accurate
        if r["impl"] != "jax_fa3_xla" or (r["data"], r["seqlen_k"], r["preset"]) not in kernels
    ]
    if not any(speed.values()) and not accurate:
        return ""
    parts = [source_line(meta)]
    if len(commits_of(meta)) > 1:
        parts[0] += " A table for each commit stands in benchmarks/README.md."
    usual = [r for r in sustained(rows) if (r["kind"], r["preset"], r["precision"]) in USUAL]
    parts += lead(usual)
    for kind, timed in speed.items():
        if timed:
            parts += [
                f"TFLOP/s of {TIMED[kind][0]}, sustained (causal counts half):",
                speed_table(timed),
            ]
    if accurate:
        words = "Relative L2 error against float64, head_dim 128"
        if any(r["impl"] == "jax_fa3_xla" for r in accurate):
            words += "; jax_fa3_xla is the kernels' quantised model, computed through XLA"
        parts += [f"{words}:", error_table(accurate)]
    return "\n\n".join(parts)


def full(meta: dict[str, Any], rows: Rows) -> str:
    """For benchmarks/README.md: everything."""
    parts = [source_line(meta), command_lines(meta)]
    parts += lead(sustained(rows))
    for kind, regime in itertools.product(TIMED, ("sustained", "burst")):
        timed = in_order([r for r in rows if r["kind"] == kind and r.get("regime") == regime])
        if timed:
            parts += [
                f"TFLOP/s of {TIMED[kind][0]}, {regime} (causal counts half):",
                speed_table(timed),
            ]
            if any(r["ratio"] for r in timed):
                parts += ["Our speed over a rival's, interleaved pairs:", ratio_table(timed)]
    for kind, (words, corner, columns) in MORE.items():
        found = [r for r in rows if r["kind"] == kind]
        if found:
            parts += [words, number_table(found, corner, columns)]
    ablation = [r for r in rows if r["kind"] == "ablation"]
    if ablation:
        parts += ["TFLOP/s of kernels with one choice changed:", ablation_table(ablation)]
    trained = [r for r in rows if r["kind"] == "train"]
    if trained:
        words = "A GPT, trained with each kind of attention from the same weights and batches:"
        parts += [words, train_table(trained)]
    errors = [r for r in rows if r["kind"] == "accuracy"]
    if errors:
        parts += ["Errors against float64:", accuracy_table(errors)]
    return "\n\n".join(parts)


def replaced(content: str, body: str, name: str) -> str:
    """content with what stands between the markers exchanged."""
    if content.count(BEGIN) != 1 or content.count(END) != 1:
        raise text.UsageError(f"{name} must hold {BEGIN} and {END} once each")
    before, rest = content.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{body}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("files", type=harness.existing_results, nargs="+", help="result files")
    made.add_argument("--readme", type=Path, default=ROOT / "README.md")
    made.add_argument("--details", type=Path, default=ROOT / "benchmarks" / "README.md")
    made.add_argument("--check", action="store_true", help="write nothing; 1 if a table is old")
    flags = made.parse_args(arguments)
    found = [harness.merge([path]) for path in flags.files]
    if any(meta.get("dry_run") for meta, _ in found):
        raise text.UsageError("these files come from a dry run")
    old = []
    for path, make, files in ((flags.readme, short, together(found)), (flags.details, full, found)):
        content = path.read_text(encoding="utf-8")
        parts = [part for meta, rows in files if (part := make(meta, rows))]
        if not parts:
            raise text.UsageError(f"no row for {path.name}: speed, or errors of head_dim 128")
        updated = replaced(content, "\n\n".join(parts), path.name)
        if updated == content:
            continue
        old.append(path.name)
        if not flags.check:
            path.write_text(updated, encoding="utf-8")
    print(f"{'would change' if flags.check else 'changed'}: {', '.join(old) or 'nothing'}")
    return 1 if flags.check and old else 0


if __name__ == "__main__":
    sys.exit(harness.exit_with_usage(main))
