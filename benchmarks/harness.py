"""What the benchmark programs share. Import this before jax: torch rivals need room on the GPU.

Timing, card state and result files live in `jax_fa3._cli`, because `python -m jax_fa3 bench` uses
them too. Here are the parts that only the programs of this folder need.
"""

from __future__ import annotations

import os

# JAX and torch share one GPU here: JAX must not take most of its memory at the start.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_fa3._cli import results, text


def exit_with_usage(program: Any, arguments: Sequence[str] | None = None) -> int:
    """Runs program(arguments); bad usage becomes a sentence and exit code 2."""
    try:
        return int(program(arguments))
    except text.UsageError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2


def existing_results(text_path: str) -> Path:
    """An argparse type: the path of a readable result file."""
    path = Path(text_path)
    try:
        results.read(path)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path
