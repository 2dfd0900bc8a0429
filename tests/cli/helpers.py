"""Runs the command line and the benchmark programs as a user does, on the jax_fa3 under test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax_fa3

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


def run(
    *command: Any, cwd: Path, stdout: int = subprocess.PIPE, **extra_env: str
) -> subprocess.CompletedProcess[str]:
    """python with these arguments, on one CPU device."""
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(jax_fa3.__file__).parents[1]),
        "JAX_PLATFORMS": "cpu",
        **extra_env,
    }
    env.pop("XLA_FLAGS", None)
    env.pop("PYTHONSAFEPATH", None)  # a program of benchmarks/ imports its neighbours
    return subprocess.run(
        [sys.executable, *map(str, command)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
        env=env,
        cwd=cwd,
    )
