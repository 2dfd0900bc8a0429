"""Programs in processes of their own, as a user starts them, on the jax_fa3 under test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax_fa3


def environment(**extra: str) -> dict[str, str]:
    """Variables of such a process: one device, neighbours of a program can be imported."""
    env = {**os.environ, "PYTHONPATH": str(Path(jax_fa3.__file__).parents[1])}
    env.pop("XLA_FLAGS", None)
    env.pop("PYTHONSAFEPATH", None)
    return {**env, **extra}


def run(
    *arguments: Any, cwd: Path | None = None, stdout: int = subprocess.PIPE, **extra_env: str
) -> subprocess.CompletedProcess[str]:
    """python with these arguments."""
    # The folder that code of a "-c" starts in may hold sources, which would hide the package.
    safe = ["-P"] if "-c" in arguments else []
    return subprocess.run(
        [sys.executable, *safe, *map(str, arguments)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=600,
        check=False,
        env=environment(**extra_env),
        cwd=cwd,
    )


def output_of(*arguments: Any, cwd: Path | None = None, **extra_env: str) -> str:
    """What python prints with these arguments; it must end well."""
    done = run(*arguments, cwd=cwd, **extra_env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
