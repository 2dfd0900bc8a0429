"""Runs the command line and the benchmark programs as a user does, on the jax_fa3 under test."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import processes

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


def run(*command: Any, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """python with these arguments, on one CPU device."""
    return processes.run(*command, cwd=cwd, JAX_PLATFORMS="cpu", **options)
