"""How busy the tensor cores are in the forward kernels, ours and FlashAttention-3's, as JSON rows.

python benchmarks/utilisation.py --json benchmarks/results/utilisation.json

Nsight Compute (`ncu`) counts, in one launch of each kernel, the cycles with a busy tensor pipe;
clocks stay as they are. Then everybody takes sustained turns, with the clock sampled. `of_peak` is
the speed over what the tensor cores could do at that clock.
"""

from __future__ import annotations

import harness  # isort: skip  # sets how JAX allocates, before JAX is imported

import argparse
import csv
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rivals import RIVALS

from jax_fa3._cli import bench, contenders, gpu_state, grid, results, text
from jax_fa3._cli.contenders import Contender, Unavailable

# Name in a row: Nsight Compute's name. `tensor_pct` leaves out the SMs' idle time at both ends.
COUNTERS = {
    "ncu_us": "gpu__time_duration.sum",
    "ncu_clock_mhz": "sm__cycles_elapsed.avg.per_second",
    "tensor_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "tensor_elapsed_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
}
UNITS = {"nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3}
UNITS |= {"cycle/nsecond": 1e3, "Ghz": 1e3, "GHz": 1e3, "Mhz": 1.0, "MHz": 1.0, "hz": 1e-6}
KERNELS = r"^(fwd_kernel|device_kernel)"  # ours, FlashAttention-3's
FLOPS_A_CLOCK = {"fp8": 8192, "bf16": 4096}  # of an SM, dense


def pairs() -> list[list[Contender]]:
    """Who takes turns with whom."""
    fp8 = [contenders.ours("accurate", with_quantize=False), RIVALS["fa3_fp8"].contender("fp8")]
    return [fp8, [contenders.ours("native"), RIVALS["fa3"].contender("bf16")]]


def launch(flags: argparse.Namespace) -> None:
    """Launches each kernel between start and stop of the profiler; prints who it was, once for each
    launch: a short call stands several times in its program."""
    driver = ctypes.CDLL("libcuda.so.1")
    for shape in shapes(flags):
        for pair in pairs():
            for contender in pair:
                try:
                    side = contender.build(shape)
                except Unavailable:
                    continue
                driver.cuProfilerStart()
                side.wait(side.launch())
                driver.cuProfilerStop()
                for _ in range(side.launches):
                    print(f"launched {shape.name} {contender.label}", flush=True)


def counted(flags: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Counters by "shape contender", of the last launch in another process under Nsight Compute."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise text.UsageError("ncu (Nsight Compute) must be on PATH")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv"]
        command += ["--kernel-name", f"regex:{KERNELS}", "--metrics", ",".join(COUNTERS.values())]
        command += ["--log-file", str(log), sys.executable, __file__, "--launch"]
        command += ["--head-dims", ",".join(map(str, flags.head_dims))]
        command += ["--seqlen", str(flags.seqlen), "--causal", flags.causal]
        # Command buffers hide kernels from the profiler.
        xla = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="
        done = subprocess.run(
            command,
            env={**os.environ, "XLA_FLAGS": xla},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        content = log.read_text() if log.exists() else ""
    lines = done.stdout.splitlines()
    names = [line.removeprefix("launched ") for line in lines if line.startswith("launched ")]
    found = parse(content)
    if done.returncode != 0 or len(found) != len(names):
        raise RuntimeError(
            f"ncu returned {done.returncode} with {len(found)} kernels of {len(names)}:\n{content}"
        )
    return dict(zip(names, found, strict=True))


def parse(content: str) -> list[dict[str, float]]:
    """The counters of each launch in what `ncu --csv` wrote, in order of launch."""
    table = [line for line in content.splitlines() if line.startswith('"')]
    launches: dict[int, dict[str, float]] = {}
    names = {counter: name for name, counter in COUNTERS.items()}
    for row in csv.DictReader(table):
        value = float(row["Metric Value"].replace(",", ""))
        value *= UNITS.get(row["Metric Unit"], 1.0)
        launches.setdefault(int(row["ID"]), {})[names[row["Metric Name"]]] = round(value, 2)
    return [launches[number] for number in sorted(launches)]


def shapes(flags: argparse.Namespace) -> list[grid.Shape]:
    return grid.grid(flags.head_dims, [flags.seqlen], bench.CAUSAL[flags.causal])


def with_counters(row: dict[str, Any], counters: dict[str, float]) -> dict[str, Any]:
    """A timing row of kind "pipe"."""
    row = {**row, "kind": "pipe", **counters}
    cores = getattr(jax.local_devices()[0], "core_count", None)
    if cores and "sm_clock_mhz" in row:
        peak = cores * FLOPS_A_CLOCK[row["precision"]] * row["sm_clock_mhz"] / 1e6
        row["of_peak"] = round(row["tflops"] / peak, 3)
    return row


def format_rows(rows: list[dict[str, Any]]) -> str:
    """The rows as a table for a terminal."""
    names = ("tflops", "sm_clock_mhz", "of_peak", "tensor_pct", "tensor_elapsed_pct", "power_w")
    lines = [
        [
            grid.Shape.of(row).name,
            results.variant(row),
            *(row.get(name, "-") for name in names),
        ]
        for row in rows
    ]
    return text.table(["shape", "kernel", *names], lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    bench.add_head_dims_flag(parser)
    add("--seqlen", type=text.positive_int, default=8192, metavar="N", help="default 8192")
    add("--causal", choices=bench.CAUSAL, default="no", help="default no")
    add("--seconds", type=text.positive_float, default=0.15, help="of a turn (default 0.15)")
    add("--rounds", type=text.positive_int, default=3, help="turns of each kernel (default 3)")
    add("--json", type=Path, metavar="FILE", help="write a result file")
    add("--launch", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    contenders.require_gpu("Start it where JAX finds one.")
    if flags.launch:
        launch(flags)
        return 0
    counters = counted(flags)
    record = results.Recorder(flags.json)
    with gpu_state.sampling() as samples:
        for shape in shapes(flags):
            for pair in pairs():
                done = contenders.compare(
                    shape, pair, regime="sustained", rounds=flags.rounds, turn_s=flags.seconds
                )
                rows = bench.rows_of(shape, pair, done, "sustained", samples, "fwd")
                labels = [f"{shape.name} {c.label}" for c in pair if c.label in done.turns]
                record.add(
                    with_counters(row, counters.get(label, {}))
                    for row, label in zip(rows, labels, strict=True)
                )
    record.close()
    print(format_rows(record.rows))
    return 0


if __name__ == "__main__":
    sys.exit(harness.exit_with_usage(main))
