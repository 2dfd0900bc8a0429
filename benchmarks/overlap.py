"""How much of the communication runs while a device computes, out of a trace of JAX's profiler."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

# Kernels of NCCL, and copies between devices where XLA moves the data itself.
_COMMUNICATION = re.compile(r"nccl|memcpyp2p|collective", re.IGNORECASE)
_DEVICE_PLANE = re.compile(r"/device:GPU:(\d+)")

Span = tuple[float, float]  # start and end in nanoseconds


@dataclasses.dataclass(frozen=True)
class Overlap:
    """What one device did during a trace, in milliseconds.

    Attributes:
      communication_ms: time in which some communication ran; a kernel that waits for its peer
        counts.
      compute_ms: time in which some other kernel ran.
      hidden_ms: time in which both did.
      longest: the names that took longest, with their milliseconds.
    """

    device: int
    communication_ms: float
    compute_ms: float
    hidden_ms: float
    longest: dict[str, float]

    @property
    def hidden(self) -> float | None:
        """hidden_ms as a fraction of communication_ms; None without communication."""
        return self.hidden_ms / self.communication_ms if self.communication_ms else None


def measure(run: Callable[[], Any], folder: Path) -> list[Overlap]:
    """Traces run() into folder; one entry per GPU, [] when the trace holds none."""
    with jax.profiler.trace(str(folder)):
        jax.block_until_ready(run())
    files = sorted(folder.glob("plugins/profile/*/*.xplane.pb"))
    if not files:
        raise RuntimeError(f"measure: the profiler must write a trace; found none in {folder}.")
    read = jax.profiler.ProfileData.from_file
    return [found for file in files for found in of_trace(read(str(file)))]


def of_trace(data: Any) -> list[Overlap]:
    """One entry per GPU of a `jax.profiler.ProfileData`."""
    found = []
    for plane in data.planes:
        device = _DEVICE_PLANE.search(plane.name)
        if device is None:
            continue
        # Lines that are no streams repeat the same time under other names.
        events = [e for line in plane.lines if line.name.startswith("Stream") for e in line.events]
        named = [(e.name, (e.start_ns, e.start_ns + e.duration_ns)) for e in events]
        if named:
            found.append(of_events(int(device.group(1)), named))
    return found


def of_events(device: int, named: Iterable[tuple[str, Span]]) -> Overlap:
    """From what ran on one device, as (name, span)."""
    communication: list[Span] = []
    compute: list[Span] = []
    totals: dict[str, float] = {}
    for name, span in named:
        (communication if _COMMUNICATION.search(name) else compute).append(span)
        totals[name] = totals.get(name, 0.0) + _length([span])
    communication, compute = _union(communication), _union(compute)
    longest = sorted(totals.items(), key=lambda item: -item[1])[:8]
    return Overlap(
        device,
        _length(communication),
        _length(compute),
        _length(_intersection(communication, compute)),
        {name[:80]: round(ms, 4) for name, ms in longest},
    )


def _union(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that are sorted and apart."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _intersection(a: list[Span], b: list[Span]) -> list[Span]:
    """Time in both; each sorted and apart."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans) / 1e6
