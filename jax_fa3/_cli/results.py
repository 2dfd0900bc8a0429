"""Result files: {"meta": what ran where, "rows": one measurement each}. Units stand in the names.

A timing row's `ratio` maps a rival to our speed over its speed, medians of interleaved pairs.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jax_fa3 import _compat, _extension
from jax_fa3._cli import gpu_state
from jax_fa3._cli.accuracy import Errors
from jax_fa3._cli.grid import Shape
from jax_fa3._cli.timing import Turns

# FLOPs of each kind of timing row over those of the forward.
WORK = {"fwd": 1.0, "bwd": 2.5, "step": 3.5}
_PACKAGES = (
    "jax_fa3",
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "numpy",
    "torch",
    "fa3-fwd",
    "flash-attn3-jax",
    "tokamax",
)


def variant(row: dict[str, Any]) -> str:
    """What a row of timings or errors is of, in a legend or a heading."""
    name = f"{row['impl']} {row['preset'] or row['precision']}"
    if row["impl"] in ("cudnn_fp8", "fa3_fp8"):
        name = row["impl"]
    if row.get("devices", 1) > 1:
        name += f", {row['devices']} GPUs {row['strategy']}"
    if row.get("graph"):
        name += ", one graph"
    return name + (" + quantise" if row.get("with_quantize") else "")


def meta(**extra: Any) -> dict[str, Any]:
    """Card, driver, clocks, power, versions, command and date; extra entries come last."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    built = _extension.cuda_version()
    if built is not None:
        versions["extension_cuda"] = _extension.cuda_release(built)
    facts = gpu_state.card_facts()
    commit = _commit()
    if commit is not None:
        facts["commit"] = commit
    device = jax.local_devices()[0]
    return {
        "card": facts.pop("card", device.device_kind),
        "backend": jax.default_backend(),
        "compute_capability": list(_compat.cuda_capabilities())[:1],
        **facts,
        "versions": versions,
        "command": command_line(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **extra,
    }


def command_line() -> str:
    """How this program was called, without the folders of the checkout, installation and files."""
    program = Path(sys.argv[0])
    name = "python -m jax_fa3" if program.name == "__main__.py" else program.name
    arguments = (Path(a).name if os.path.isabs(a) else a for a in sys.argv[1:])
    return " ".join([name, *map(shlex.quote, arguments)])


def _commit() -> str | None:
    """Commit of the checkout that this package lies in; else the variable JAX_FA3_COMMIT; else the
    commit of the checkout whose program runs, next to an installed package; else None."""
    package, program = Path(__file__).parents[2], Path(sys.argv[0]).absolute().parent.parent
    return _commit_of(package) or os.environ.get("JAX_FA3_COMMIT") or _commit_of(program)


def _commit_of(root: Path) -> str | None:
    """The commit of our checkout at root, "-dirty" with changes; None where there is no such."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "jax_fa3/__init__.py")  # not a repository around us
        changes = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changes else "")
    except (OSError, subprocess.SubprocessError):
        return None


class Recorder:
    """The rows of one run, written to a file after each measurement.

    Until `close` the file's meta says "partial": a run that is stopped keeps what it has.
    """

    def __init__(self, path: Path | None, **extra: Any) -> None:
        self.rows: list[dict[str, Any]] = []
        self.skipped: list[Any] = []
        self._path = path
        self._meta = {} if path is None else meta(**extra)

    def add(self, rows: Iterable[dict[str, Any]], skipped: Iterable[Any] = ()) -> None:
        """Notes rows, and entries for who could not run."""
        self.rows += rows
        self.skipped += skipped
        self._write(partial=True)

    def close(self) -> None:
        """The run is complete."""
        self._write(partial=False)

    def _write(self, *, partial: bool) -> None:
        if self._path is not None:
            block = {**self._meta, "skipped": self.skipped, "partial": partial}
            write(self._path, block, self.rows)


def timing_row(
    shape: Shape,
    turns: Turns,
    *,
    impl: str,
    precision: str,
    preset: str | None,
    regime: str,
    with_quantize: bool,
    ratio: dict[str, float],
    state: dict[str, float],
    kind: str = "fwd",
) -> dict[str, Any]:
    """One row of speed; tflops and ms are medians over the rounds.

    kind: "fwd", "bwd" (2.5 times the FLOPs of the forward) or "step" (both).
    """
    return {
        "kind": kind,
        "impl": impl,
        "precision": precision,
        "preset": preset,
        **dataclasses.asdict(shape),
        "regime": regime,
        "with_quantize": with_quantize,
        "tflops": _short(WORK[kind] * shape.flops / turns.median / 1e9),
        "ms": _short(turns.median),
        "ms_lo": _short(min(turns.ms)),
        "ms_hi": _short(max(turns.ms)),
        "rounds": len(turns.ms),
        "ratio": {rival: _short(value) for rival, value in ratio.items()},
        **state,
    }


def accuracy_row(
    found: Errors,
    *,
    impl: str,
    precision: str,
    preset: str | None,
    data: str,
    seqlen_k: int,
    head_dim: int,
    **extra: Any,
) -> dict[str, Any]:
    """One row of errors."""
    return {
        "kind": "accuracy",
        "impl": impl,
        "precision": precision,
        "preset": preset,
        "data": data,
        "seqlen_k": seqlen_k,
        "head_dim": head_dim,
        **extra,
        # JSON has no NaN.
        **{k: None if math.isnan(v) else v for k, v in dataclasses.asdict(found).items()},
    }


def write(path: Path, meta_block: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Writes the file whole or not at all, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    head = json.dumps(meta_block, indent=1)
    unfinished = path.with_suffix(path.suffix + ".part")
    unfinished.write_text(f'{{"meta": {head},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")
    os.replace(unfinished, path)


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(meta, rows) of a result file.

    Raises: ValueError when the file is not one.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return dict(content["meta"]), list(content["rows"])
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"read: {path} is no result file: {error!r}.") from error


def _short(value: float) -> float:
    """Five digits are more than a clock gives."""
    return float(f"{value:.5g}")
