"""Markdown tables of a result file's rows: how a row becomes a line or a cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax_fa3._cli import bench, grid
from jax_fa3._cli.results import variant

Rows = list[dict[str, Any]]
# Kinds of timed rows. FLOPs: 4, 10 and 14 times batch * heads * seqlen_q * seqlen_k * head_dim.
# Rows of these kinds that name no regime are steps over several devices, which no table here shows.
TIMED = {  # in a sentence, in a table
    "fwd": ("the forward pass", "forward"),
    "bwd": ("the backward pass alone", "backward"),
    "step": ("a training step, forward and backward", "step"),
}


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and the others numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cell(row: dict[str, Any], name: str, form: str) -> str:
    """A number of a row, or "-" where it is missing."""
    return "-" if row.get(name) is None else format(row[name], form)


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


def speed_table(rows: Rows) -> str:
    """TFLOP/s of every shape."""
    return by_variant(rows, "shape", shape_name, lambda row: f"{row['tflops']:.0f}")


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
