"""Facts about the card, and its SM clock and power while something runs.

Reads through pynvml when it is installed, else through nvidia-smi; without both there is nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_FACTS = {
    "card": "name",
    "driver": "driver_version",
    "memory_mib": "memory.total",
    "max_sm_clock_mhz": "clocks.max.sm",
    "power_limit_w": "power.limit",
}
_PERIOD_S = 0.02


def card_facts() -> dict[str, Any]:
    """Card, driver, highest clock and power limit of the first visible GPU; {} when unknown."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = [
        "nvidia-smi",
        *_select(),
        f"--query-gpu={','.join(_FACTS.values())}",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = done.stdout.strip().splitlines()
    if not lines:
        return {}
    values = [value.strip() for value in lines[0].split(",")]
    facts: dict[str, Any] = dict(zip(_FACTS, values, strict=False))
    return {k: v if k in ("card", "driver") else _number(v) for k, v in facts.items()}


class Samples:
    """Samples of (time, SM clock in MHz, power in W); times are those of time.perf_counter."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float, float]] = []

    def add(self, clock_mhz: float, power_w: float) -> None:
        """Notes one sample, taken now."""
        self._samples.append((time.perf_counter(), clock_mhz, power_w))

    def during(self, spans: list[tuple[float, float]]) -> dict[str, float]:
        """Medians over the spans as {"sm_clock_mhz", "power_w"}; {} without a sample there."""
        taken = [s for s in self._samples if any(start <= s[0] <= end for start, end in spans)]
        if not taken:
            return {}
        return {
            "sm_clock_mhz": statistics.median(s[1] for s in taken),
            "power_w": statistics.median(s[2] for s in taken),
        }


@contextlib.contextmanager
def sampling() -> Iterator[Samples]:
    """Samples in a thread of its own until the block ends."""
    samples = Samples()
    stop = threading.Event()
    thread: threading.Thread | None = None
    process: subprocess.Popen[str] | None = None
    read = _nvml_reader()
    if read is not None:
        thread = threading.Thread(target=_poll, args=(read, samples, stop), daemon=True)
    elif shutil.which("nvidia-smi") is not None:
        process = subprocess.Popen(
            [
                "nvidia-smi",
                *_select(),
                "--query-gpu=clocks.sm,power.draw",
                "--format=csv,noheader,nounits",
                "--loop-ms=50",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        thread = threading.Thread(target=_follow, args=(process, samples), daemon=True)
    if thread is not None:
        thread.start()
    try:
        yield samples
    finally:
        stop.set()
        if process is not None:
            process.terminate()
            process.wait()
        if thread is not None:
            thread.join(timeout=2)
        if process is not None and process.stdout is not None:
            process.stdout.close()


def _visible() -> str:
    """Index or UUID of the first GPU that this process may use."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"


def _select() -> list[str]:
    return [f"--id={_visible()}"]


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _nvml_reader() -> Callable[[], tuple[float, float]] | None:
    """A function that reads (SM clock, power) once, or None when NVML cannot."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    visible = _visible()
    try:
        nvml.nvmlInit()
        if visible.isdigit():
            handle = nvml.nvmlDeviceGetHandleByIndex(int(visible))
        else:
            handle = nvml.nvmlDeviceGetHandleByUUID(visible)

        def read() -> tuple[float, float]:
            clock = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
            return float(clock), nvml.nvmlDeviceGetPowerUsage(handle) / 1000.0

        read()
    except nvml.NVMLError:
        return None
    return read


def _poll(read: Callable[[], tuple[float, float]], samples: Samples, stop: threading.Event) -> None:
    while not stop.wait(_PERIOD_S):
        samples.add(*read())


def _follow(process: subprocess.Popen[str], samples: Samples) -> None:
    if process.stdout is None:
        return
    for line in process.stdout:
        values = [_number(part.strip()) for part in line.split(",")]
        if len(values) == 2 and all(isinstance(value, float) for value in values):
            samples.add(*values)
