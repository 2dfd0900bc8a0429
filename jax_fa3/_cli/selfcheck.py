"""`python -m jax_fa3`: is this installation sound, on this machine?

Devices and versions, which request runs on which kernel, errors against float64, and on a GPU with
our kernels a short timing next to cuDNN. Ends with one line that says ok or what is wrong.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp

import jax_fa3
from jax_fa3 import _compat, _explain
from jax_fa3._cli import accuracy, contenders, grid
from jax_fa3._cli.accuracy import Problem
from jax_fa3._cli.progress import progress
from jax_fa3._cli.text import table

PROBLEMS = (
    Problem(seqlen_q=67, seqlen_k=201, num_heads_q=4, num_heads_kv=2, head_dim=64, batch=2),
    Problem(
        seqlen_q=131, seqlen_k=259, num_heads_q=6, num_heads_kv=2, head_dim=128, is_causal=True
    ),
)
LONG = Problem(seqlen_q=33, seqlen_k=4096, num_heads_q=2, num_heads_kv=1, head_dim=128, data="ones")
TIMED = (grid.square(4, 4096, 16, 128, False), grid.square(4, 4096, 16, 128, True))

# (words, head_dim, dtype, options): requests whose path a user is likely to ask about.
_REQUESTS: tuple[tuple[str, int, Any, dict[str, Any]], ...] = (
    ("fp8 accurate", 64, jnp.bfloat16, accuracy.options("accurate")),
    ("fp8 accurate", 128, jnp.bfloat16, accuracy.options("accurate")),
    ("fp8 fast, causal", 128, jnp.bfloat16, {**accuracy.options("fast"), "is_causal": True}),
    ("native", 128, jnp.bfloat16, accuracy.options("native")),
    ("native", 64, jnp.float16, accuracy.options("native")),
    ("fp8 per_tensor", 128, jnp.bfloat16, accuracy.options("per_tensor")),
    ("fp8 accurate", 96, jnp.bfloat16, accuracy.options("accurate")),
    ("fp8, window", 128, jnp.bfloat16, {"window_size": (256, 0), "is_causal": True}),
)


def run(flags: argparse.Namespace) -> int:
    """Runs every part; 0 when nothing is wrong."""
    del flags
    start = time.perf_counter()
    problems: list[str] = []
    print(jax_fa3.show_config())
    if "9.0" in _compat.cuda_capabilities():
        missing = _explain.missing_reason()
        if missing is not None:
            problems.append(f"this Hopper GPU cannot run the kernels: {missing}")
    print(f"\nWhat serves which request\n{_paths()}")
    print("\nError against float64 NumPy (limits in brackets)")
    print(_errors(problems))
    if contenders.kernels_run() and jax.default_backend() == "gpu":
        print("\nSpeed next to cuDNN, whole calls from bf16 inputs, taken in turns (burst)")
        print(_speed(problems))
    took = f"{time.perf_counter() - start:.0f} s"
    if problems:
        print(f"\njax_fa3: NOT ok ({took}): {'; '.join(problems)}")
        return 1
    print(f"\njax_fa3: ok ({took}), attention runs on {_where()}")
    return 0


def _where() -> str:
    if contenders.kernels_run() and jax.default_backend() == "gpu":
        return "the Hopper kernels"
    return f"the XLA path ({jax.default_backend()})"


def _paths() -> str:
    """One line per request: the kernel, or the XLA path and why."""
    rows = []
    missing = _explain.missing_reason()
    no_gpu = not _compat.cuda_capabilities()
    for words, head_dim, dtype, options in _REQUESTS:
        struct = jax.ShapeDtypeStruct((2, 2048, 16, head_dim), dtype)
        plan = jax_fa3.explain(struct, struct, struct, **options)
        name = dict(plan.kernel).get("name", "CUDA kernel")
        if plan.path == "xla":
            reason = dict(plan.not_taken).get("cuda", "")
            runs, why = "XLA path", "no kernel can run, see above" if reason == missing else reason
        elif no_gpu:
            runs, why = "XLA path", f"no CUDA device in this process; on Hopper: {name}"
        else:
            runs, why = str(name), ""
        rows.append([words, head_dim, jnp.dtype(dtype).name, runs, why])
    return table(["request", "head_dim", "dtype", "runs on", "why"], rows)


def _errors(problems: list[str]) -> str:
    """Table of errors; complaints go to `problems`."""
    presets = ("accurate", "fast", "native")
    work = [(p, preset) for p in PROBLEMS for preset in presets]
    work += [(LONG, "accurate"), (LONG, "fast"), (LONG, "uncentred")]
    rows = []
    cached: dict[Problem, tuple[Any, Any]] = {}
    for problem, preset in progress(work, "self-check"):
        if problem not in cached:
            arrays = accuracy.draw(problem)
            cached[problem] = arrays, accuracy.reference(*arrays, is_causal=problem.is_causal)
        arrays, expected = cached[problem]
        words = _words(problem)
        try:
            out = accuracy.run_ours(arrays, problem, preset)
        except Exception as error:  # the point of a self-check is to report it
            problems.append(f"{preset} on {words} raised {type(error).__name__}: {error}")
            rows.append([preset, words, "-", "-", "-", type(error).__name__])
            continue
        found = accuracy.errors(out, expected)
        complaint = accuracy.verdict(preset, problem.data, found, problem.seqlen_k)
        if complaint is not None:
            problems.append(f"{preset} on {words}: {complaint}")
        if problem.data == "ones":
            shown = ["-", "-", f"{found.max_abs:.1e} [{accuracy.ONES_LIMIT}]"]
        else:
            limit = accuracy.REL_L2_LIMITS[preset]
            shown = [
                f"{found.rel_l2:.1e} [{limit}]", f"{found.cosine:.5f}", f"{found.max_abs:.1e}"
            ]  # fmt: skip
        rows.append([preset, words, *shown, "ok" if complaint is None else "WRONG"])
    return table(["preset", "inputs", "relative L2", "cosine", "largest", ""], rows)


def _words(problem: Problem) -> str:
    mask = ", causal" if problem.is_causal else ""
    data = ", value 1" if problem.data == "ones" else ""
    return (
        f"{problem.seqlen_q} x {problem.seqlen_k} keys, heads {problem.num_heads_q}:"
        f"{problem.num_heads_kv}, head_dim {problem.head_dim}{mask}{data}"
    )


def _speed(problems: list[str]) -> str:
    entrants = [contenders.ours(preset) for preset in ("accurate", "fast", "native")]
    entrants.append(contenders.cudnn())
    rival = entrants[-1].label
    rows = []
    notes: dict[str, str] = {}
    for shape in TIMED:
        done = contenders.compare(shape, entrants, regime="burst", rounds=3, turn_s=0.05)
        notes.update(done.skipped)
        for label, turns in done.turns.items():
            ratio = done.ratios(label, [rival]).get(rival)
            rows.append(
                [
                    shape.name,
                    label,
                    f"{turns.median:.3f}",
                    f"{shape.flops / turns.median / 1e9:.0f}",
                    "-" if ratio is None else f"{ratio:.2f}",
                ]
            )
    for entrant in entrants:
        if entrant.label in notes and entrant.is_ours:
            problems.append(f"{entrant.label} did not run: {notes[entrant.label]}")
    lines = [table(["shape", "who", "ms", "TFLOP/s", "speed / cuDNN"], rows)]
    lines += [f"not timed: {label}: {reason}" for label, reason in notes.items()]
    return "\n".join(lines)
