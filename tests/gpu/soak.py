"""Random calls of every kernel against float64 for a given time, under a watchdog.

python tests/gpu/soak.py --seconds 600 --workers 8 --seed 1 --json soak.json

  --seconds N    how long; what has not ended ten seconds later is cut short
  --cases N      at most so many cases of each process
  --workers N    processes, each with cases of its own and a share of the device's memory; XLA's
                 compiler takes most of the time
  --seed N       what is drawn; case K of a seed is the same for any number of workers
  --only K       case K of the seed alone, in this process, with what was measured
  --limit N      seconds that one call may take before the program ends (compiling: ten times that)
  --json FILE    result file: cases, calls, failures and worst errors of each kind
  --dry-run      the XLA path instead of the kernels, on any device

A case (soak_cases.py) is one random shape with random options, compiled once: batch, lengths from 0
to thousands and about the edges of tiles, head_dim, grouped heads, masks, bfloat16, float16 and
float8 inputs, descales, presets, softmax_scale, gradients, layouts, vmap. It runs on several draws
of data over poisoned memory, and each result is compared with the references of the GPU tests. Then
calls of this and earlier cases, launched by two threads, are in flight together and must repeat bit
by bit. Exit code: 0, 1 after a failure, 3 when a call hung or a worker died.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/

import jax
import numpy as np
from gpu import soak_cases, soak_checks, soak_program

from jax_fa3._cli import results

POOL, POOL_BYTES = 5, 2**28
IN_FLIGHT = 24  # calls of each of two threads
GRACE = 10  # seconds for the last cases
HANG = 3
OUT_OF_MEMORY, BROKEN = "out of memory of the device", "an error of the runtime"


def environment(workers: int) -> dict[str, str]:
    """Workers share the cores, and the GPU's memory: each takes what it needs, up to its share."""
    return {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / workers:.4f}",
        "OPENBLAS_NUM_THREADS": "2",
    }


# ---- one process ---------------------------------------------------------------------------------


def cases_of(flags: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Runs this worker's cases until the time is over; yields what begins and what ended.

    faulthandler's own thread ends the process when a call takes too long: it needs no GIL, so it
    also works when the call never comes back from C.
    """
    end = flags.until or time.time() + flags.seconds
    rng = np.random.default_rng([flags.seed, flags.worker])
    pool: list[soak_program.Program] = []
    last = sys.maxsize if flags.cases is None else flags.workers * flags.cases
    indices = range(flags.worker, last, flags.workers)
    for index in indices if flags.only is None else [flags.only]:
        if flags.only is None and time.time() >= end:
            return
        case = soak_cases.draw_case(flags.seed, index)
        yield {"begin": str(case)}
        notes: list[tuple[str, soak_checks.Notes]] = []
        calls, failed = 0, list[str]()
        ends = None  # why the process ends here: the device is not to be trusted, or full
        try:
            faulthandler.dump_traceback_later(10 * flags.limit, exit=True)
            program = soak_program.Program(case, "xla" if flags.dry_run else "cuda")
            faulthandler.dump_traceback_later(flags.limit * len(program.arguments), exit=True)
            program.run_first()
            faulthandler.cancel_dump_traceback_later()
            calls += len(program.arguments)
            notes, failed = soak_checks.check(program)
            pool = [*pool, program][-POOL:]
            while len(pool) > 1 and sum(p.size for p in pool) > POOL_BYTES:
                pool = pool[1:]
            faulthandler.dump_traceback_later(2 * flags.limit, exit=True)
            calls += soak_program.repeat(pool, 2 if flags.dry_run else IN_FLIGHT, rng)
        except Exception as error:
            failed.append(f"{type(error).__name__}: {error}")
            if isinstance(error, jax.errors.JaxRuntimeError):
                ends = OUT_OF_MEMORY if "RESOURCE_EXHAUSTED" in str(error) else BROKEN
        faulthandler.cancel_dump_traceback_later()
        yield {
            "end": str(case), "index": index, "calls": calls, "failed": failed, "notes": notes,
            "ends": ends,
        }  # fmt: skip
        if ends:
            return


def work(flags: argparse.Namespace) -> int:
    """A worker: one line of JSON for each event."""
    ends = None
    for event in cases_of(flags):
        print(json.dumps(event), flush=True)
        ends = event.get("ends")
    return 1 if ends else 0


def run_one(flags: argparse.Namespace) -> int:
    """One case again, with all that was measured."""
    failed = []
    for event in cases_of(flags):
        print(event.get("begin", ""))
        failed += event.get("failed", [])
        for kind, measured in event.get("notes", ()):
            print(f"  {kind}: " + ", ".join(f"{n} {v:.3g}" for n, v in measured.items()))
    print("\n".join(failed) or "ok")
    return 1 if failed else 0


# ---- all workers ---------------------------------------------------------------------------------


class Summary:
    """Counts and worst errors by kind; rows of a result file."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.cases = self.calls = self.failures = 0
        self.kinds: dict[str, dict[str, Any]] = {}

    def add(self, event: dict[str, Any]) -> None:
        self.cases += 1
        self.calls += event["calls"]
        self.failures += bool(event["failed"])
        for kind, measured in event["notes"]:
            row = self.kinds.setdefault(kind, {"checks": 0, "worst": {}})
            row["checks"] += 1
            for name, value in measured.items():
                row["worst"][name] = max(row["worst"].get(name, 0.0), float(f"{value:.3g}"))

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"kind": "soak", "check": kind, "seed": self.seed, **self.kinds[kind]}
            for kind in sorted(self.kinds)
        ]


def start(
    flags: argparse.Namespace, number: int, events: queue.Queue[Any]
) -> subprocess.Popen[str]:
    command = [
        sys.executable, str(Path(__file__).resolve()), "--worker", str(number),
        "--workers", str(flags.workers), "--seed", str(flags.seed),
        "--until", str(time.time() + flags.seconds), "--limit", str(flags.limit),
        *([] if flags.cases is None else ["--cases", str(flags.cases)]),
        *(["--dry-run"] if flags.dry_run else []),
    ]  # fmt: skip
    own = {**os.environ, **environment(flags.workers)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own)

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                events.put((number, json.loads(line)))
            except json.JSONDecodeError:
                print(f"worker {number}: {line}", end="")
        events.put((number, {"exit": process.wait()}))

    threading.Thread(target=read, daemon=True).start()
    return process


def run_all(flags: argparse.Namespace) -> int:
    began = time.monotonic()
    events: queue.Queue[Any] = queue.Queue()
    running, died, cut, written = set(range(flags.workers)), 0, 0, 0.0
    workers = [start(flags, number, events) for number in range(flags.workers)]
    summary = Summary(flags.seed)
    facts = {"dry_run": True} if flags.dry_run else {}
    meta = results.meta(seed=flags.seed, workers=flags.workers, **facts) if flags.json else {}
    # What runs in each worker, None between two cases, and since when.
    open_cases: dict[int, tuple[str | None, float]] = dict.fromkeys(running, (None, began))
    ended_by: dict[int, str] = {}
    again = f"python tests/gpu/soak.py --seed {flags.seed} --only"

    def write(partial: bool) -> None:
        if flags.json:
            block = {
                **meta, "seconds": round(time.monotonic() - began, 1), "cases": summary.cases,
                "calls": summary.calls, "failures": summary.failures, "died": died, "cut": cut,
                "skipped": [], "partial": partial,
            }  # fmt: skip
            results.write(flags.json, block, summary.rows())

    while running:
        try:
            number, event = events.get(timeout=1)
        except queue.Empty:
            event = {}
        if "begin" in event:
            open_cases[number] = event["begin"], time.monotonic()
        elif "end" in event:
            open_cases[number] = None, time.monotonic()
            summary.add(event)
            if event.get("ends"):
                ended_by[number] = f"{event['ends']}, after {event['end']}"
            if event["failed"]:
                print(f"FAILED {event['end']}\n  again: {again} {event['index']}")
                print("".join(f"  {line}\n" for line in event["failed"]), end="", flush=True)
        elif "exit" in event:
            running.discard(number)
            case, _ = open_cases[number]
            if event["exit"] != 0 or case:
                died += 1
                why = ended_by.get(number, f"{event['exit']}, in {case}")
                print(f"DIED with {why}", flush=True)
        if time.monotonic() > written + 10:
            written = time.monotonic()
            write(partial=True)
        if time.monotonic() > began + flags.seconds + GRACE:
            break
    for number in running:
        workers[number].kill()
        case, since = open_cases[number]
        cut += 1
        # Its own watchdog should have ended it: the process cannot even do that.
        if time.monotonic() > since + 12 * flags.limit + GRACE:
            died += 1
            print(f"HUNG in {case}", flush=True)
    write(partial=False)
    for row in summary.rows():
        worst = ", ".join(f"{name} {value:.2g}" for name, value in row["worst"].items())
        print(f"{row['check']}: {row['checks']} checks; worst {worst or '-'}")
    print(
        f"{summary.cases} cases, {summary.calls} calls in {time.monotonic() - began:.0f} s, "
        f"{summary.failures} failed, {cut} cut short, {died} workers died"
    )
    return HANG if died else int(summary.failures > 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--cases", type=int)
    parser.add_argument("--limit", type=float, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.only is not None:
        flags.worker, flags.workers = 0, 1
    os.environ.update(environment(flags.workers))  # before JAX looks for devices
    if flags.only is not None:
        return run_one(flags)
    return run_all(flags) if flags.worker is None else work(flags)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # without waiting for what a hung device holds
