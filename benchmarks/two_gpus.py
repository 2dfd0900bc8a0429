"""Everything that needs two GPUs of one host: comparisons with one device, tests, scaling.

python benchmarks/two_gpus.py --json benchmarks/results/two_gpus.json

Phases, in order:
  parallel  context_parallel_attention: every strategy, layout and precision, grouped heads
  sharding  batch and heads split under jit (Shardy, GSPMD, explicit mesh) and in shard_map
  flax      linen and nnx layers, the batch split too
  tests     pytest tests/gpu/test_devices.py
  example   examples/sharded_lm.py, with the sequence and with the heads split
  hidden    the fraction of the ring's transfers that runs during attention, from a trace
  forward   causal ring attention of 65,536 and 131,072 tokens next to one device; every strategy
            at the longer one; the transfers alone
  backward  forward and backward of the ring

tests and example are programs of their own and start first: they run beside the comparisons, which
mostly compile. With JAX_COMPILATION_CACHE_DIR set a second run takes half the time.

The file is written after every phase. What --limit leaves no time for is listed in its meta, and
so is what failed; exit code 1 when anything failed, 2 for bad usage.
"""

from __future__ import annotations

import harness  # isort: skip  # sets how JAX allocates, before JAX is imported

import argparse
import functools
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import device_checks
import jax
import ring_scaling

from jax_fa3._cli import results, text

ROOT = Path(__file__).resolve().parents[1]
PHASES = ("parallel", "sharding", "flax", "tests", "example", "hidden", "forward", "backward")
MESHES = ("1,2,1", "1,1,2")  # of the example: data, sequence, model
Row = dict[str, Any]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = made.add_argument
    add("--json", type=Path, metavar="FILE", help="write a result file")
    add("--devices", choices=("gpu", "cpu"), default="gpu", help="cpu: two forced CPU devices")
    text.add_list_flag(made, "--phases", PHASES, of=PHASES)
    text.add_list_flag(made, "--tokens", [65_536, 131_072], about="lengths of the whole sequence")
    add("--heads", type=text.positive_int, default=16, metavar="N", help="default 16")
    add(
        "--check-seqlen",
        type=text.positive_int,
        default=600,
        metavar="N",
        help="seqlen of the comparisons, a multiple of 4 (default 600)",
    )
    text.add_list_flag(
        made,
        "--precisions",
        device_checks.PRECISIONS,
        of=device_checks.PRECISIONS,
        about="of the timed phases,",
    )
    add(
        "--seconds",
        type=text.positive_float,
        default=0.3,
        metavar="S",
        help="of a timed turn (default 0.3)",
    )
    add("--rounds", type=text.positive_int, default=3, metavar="N", help="default 3")
    add("--limit", type=float, default=330, metavar="S", help="start nothing later (default 330)")
    return made


class Beside:
    """A program that runs while this one goes on."""

    def __init__(self, *command: str) -> None:
        # Safe path: `-m pytest` would take the sources of this folder for the package under test.
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=os.environ | {"PYTHONSAFEPATH": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self) -> tuple[int, str]:
        """(exit code, output), waited for."""
        output, _ = self.process.communicate()
        if self.process.returncode:
            print(output[-8000:])
        return self.process.returncode, output


def test_row(program: Beside) -> Iterator[Row]:
    """The tests for several GPUs."""
    code, output = program.finish()
    lines = [line for line in output.splitlines() if line.strip()]
    summary = lines[-1].strip("= ") if lines else ""
    # Skipped tests leave exit code 0.
    ok = code == 0 and "passed" in summary and "skipped" not in summary
    yield {"kind": "check", "check": "tests/gpu/test_devices.py", "ok": ok, "summary": summary}


def example_rows(programs: dict[str, Beside]) -> Iterator[Row]:
    """The example on every mesh: it learns, and the same everywhere."""
    ends: list[float] = []
    for mesh, program in programs.items():
        code, output = program.finish()
        losses = [float(x) for x in re.findall(r"^step \d+: loss ([0-9.]+)$", output, re.M)]
        ok = code == 0 and len(losses) > 1 and losses[-1] < losses[0] - 0.5
        ends += losses[-1:]
        ok = ok and abs(ends[-1] - ends[0]) < 0.05
        found = re.search(r"^collectives of a step: (.*)$", output, re.M)
        summary = f"losses {losses}, {found[1] if found else 'no step'}"
        yield {
            "kind": "check",
            "check": f"examples/sharded_lm.py --mesh {mesh}",
            "ok": ok,
            "summary": summary,
        }


def start_programs(flags: argparse.Namespace) -> dict[str, dict[str, Beside]]:
    """The programs of the phases asked for, running; by phase and name."""
    started: dict[str, dict[str, Beside]] = {}
    if "tests" in flags.phases:
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:benchmark"]
        tests = Beside("-m", "pytest", *options, "tests/gpu/test_devices.py")
        started["tests"] = {"tests": tests}
    if "example" in flags.phases:
        options = ["--steps", "21", *(["--cpu-devices", "2"] if flags.devices == "cpu" else [])]
        started["example"] = {
            mesh: Beside("examples/sharded_lm.py", "--mesh", mesh, *options) for mesh in MESHES
        }
    return started


def steps(
    flags: argparse.Namespace, started: dict[str, dict[str, Beside]]
) -> list[tuple[str, Callable[[], Iterator[Row]]]]:
    """(name, rows) of every phase asked for, in order; the name starts with the phase."""
    implementation = "cuda" if flags.devices == "gpu" else "xla"

    @functools.cache
    def two() -> list[Any]:
        found = jax.devices(flags.devices)[:2]
        if len(found) < 2:
            raise RuntimeError(f"needs two devices of platform {flags.devices}; got {found}")
        return found

    @functools.cache
    def scaling() -> ring_scaling.Scaling:
        return ring_scaling.Scaling(
            two(),
            implementation,
            tokens=tuple(flags.tokens),
            heads=flags.heads,
            head_dim=128,
            turn_s=flags.seconds,
            rounds=flags.rounds,
        )

    checks = {
        "parallel": device_checks.context_parallel,
        "sharding": device_checks.sharding,
        "flax": device_checks.flax_adapters,
    }
    found: list[tuple[str, Callable[[], Iterator[Row]]]] = []
    for phase in (phase for phase in PHASES if phase in flags.phases):
        if phase == "tests":
            found.append((phase, lambda: test_row(started["tests"]["tests"])))
        elif phase == "example":
            found.append((phase, lambda: example_rows(started["example"])))
        elif phase in checks:
            found.append(
                (phase, lambda c=checks[phase]: c(two(), implementation, flags.check_seqlen))
            )
        else:
            found += [
                (f"{phase} {p}", lambda m=phase, p=p: getattr(scaling(), m)(p))
                for p in flags.precisions
            ]
    return found


def link() -> str | None:
    """How nvidia-smi says the first two GPUs are linked (NV18, PIX, ...)."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "topo", "-p2p", "n"], capture_output=True, text=True, timeout=20
        )
        matrix = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return None
    row = next((x.split() for x in matrix.stdout.splitlines() if x.startswith("GPU0")), [])
    p2p = next((x.split() for x in done.stdout.splitlines() if x.split()[:1] == ["GPU0"]), [])
    return f"{row[2] if len(row) > 2 else '?'}, peer access {p2p[2] if len(p2p) > 2 else '?'}"


def main(arguments: Sequence[str] | None = None) -> int:
    flags = parser().parse_args(arguments)
    if flags.check_seqlen % 4:
        raise text.UsageError(f"--check-seqlen must be a multiple of 4; got {flags.check_seqlen}.")
    if flags.devices == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 2)
        # Queued programs whose collectives wait for each other would need a thread each.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    start = time.monotonic()
    rows: list[Row] = []
    failed: list[str] = []
    left_out: list[str] = []
    seconds: dict[str, float] = {}

    def save() -> None:
        if flags.json is not None:
            found = {"seconds": seconds, "failed": failed, "left_out": left_out}
            results.write(flags.json, results.meta(devices=2, link=link(), **found), rows)

    started = start_programs(flags) if flags.limit > 0 else {}
    try:
        for name, produce in steps(flags, started):
            begin = time.monotonic()
            if begin - start > flags.limit:
                left_out.append(name)
                continue
            print(f"== {name}", flush=True)
            try:
                for row in produce():
                    rows.append(row)
                    print(summary_of(row), flush=True)
                    if row.get("ok") is False:
                        failed.append(row["check"])
            except Exception as error:  # the other phases are still worth their time
                traceback.print_exc()
                failed.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
            seconds[name] = round(time.monotonic() - begin, 1)
            save()
    finally:
        for program in (p for programs in started.values() for p in programs.values()):
            program.process.kill()
        save()
    checks = [row for row in rows if row["kind"] == "check"]
    passed = sum(bool(row["ok"]) for row in checks)
    print(f"{passed} of {len(checks)} checks ok; {time.monotonic() - start:.0f} s")
    if left_out:
        print(f"two_gpus: no time for {', '.join(left_out)}")
    if failed:
        print("two_gpus: NOT ok:", *failed, sep="\n  ")
        return 1
    return 0


def summary_of(row: Row) -> str:
    """One line for the terminal."""
    if row["kind"] == "check":
        worst = max((pair[0] for pair in row.get("errors", {}).values()), default=None)
        more = row.get("summary") or f"largest error {worst}, {row.get('collectives')}"
        return f"{'ok    ' if row['ok'] else 'NOT ok'} {row['check']}: {more}"
    shown = ("precision", "devices", "strategy", "seqlen_k", "device", "ms", "tflops", "weak")
    shown += ("strong", "gb_per_s", "weak_of_all", "communication_ms", "hidden")
    return "  ".join([row["kind"], *(f"{k}={row[k]}" for k in shown if row.get(k) is not None)])


if __name__ == "__main__":
    sys.exit(harness.exit_with_usage(main))
