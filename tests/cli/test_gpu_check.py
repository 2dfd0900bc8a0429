"""scripts/gpu_check.sh, as far as a machine without a GPU can."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import processes
import pytest
from cli.helpers import ROOT


def gpu_check(*flags):
    """Runs the script with the Python of this test."""
    env = processes.environment(JAX_PLATFORMS="cpu")
    command = ["bash", str(ROOT / "scripts/gpu_check.sh"), "--python", sys.executable, *flags]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=500, check=False, env=env
    )


@pytest.mark.slow
def test_gpu_check_dry_run_writes_one_file(tmp_path):
    out = tmp_path / "check.json"
    flags = ["--dry-run", "--no-build", "--skip", "selfcheck,racecheck,synccheck,tests"]
    flags += ["--grid", "--head-dims 64 --causal yes"]
    flags += ["--gradients", "--head-dims 64 --causal yes --kinds bwd --ours native"]
    flags += ["--errors", "--head-dims 64 --presets accurate --data normal"]
    done = gpu_check(*flags, "--out", str(out), "--logs", str(tmp_path / "logs"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith("gpu_check: ok")
    content = json.loads(out.read_text())
    status = {phase["name"]: phase["status"] for phase in content["meta"]["phases"]}
    assert [name for name, value in status.items() if value == "passed"] == [
        "memcheck",
        "speed",
        "gradients",
        "accuracy",
    ]
    assert re.match(r"[1-9]\d* calls, 0 wrong", content["meta"]["phases"][3]["detail"])
    assert content["meta"]["command"].startswith("scripts/gpu_check.sh ")
    timed = [row for row in content["rows"] if row["kind"] == "fwd"]
    assert {(row["head_dim"], row["is_causal"]) for row in timed} == {(64, True)}
    assert {row["head_dim"] for row in content["rows"] if row["kind"] == "bwd"} == {64}
    errors = [row for row in content["rows"] if row["kind"] == "accuracy"]
    assert {(row["head_dim"], row["preset"], row["data"]) for row in errors} == {
        (64, "accurate", "normal")
    }


def test_gpu_check_counts_a_timeout_as_failure(tmp_path):
    out = tmp_path / "check.json"
    flags = ["--dry-run", "--only", "memcheck", "--limit", "memcheck=1", "--out", str(out)]
    done = gpu_check(*flags, "--logs", str(tmp_path / "logs"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "gpu_check: NOT ok: memcheck" in done.stdout
    phases = json.loads(out.read_text())["meta"]["phases"]
    assert {p["name"]: p["status"] for p in phases}["memcheck"] == "timeout"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--skip", "lunch"], "there is no phase 'lunch'"),
        (["--limit", "tests"], "--limit must be PHASE=SECONDS"),
        (["--fast"], "there is no flag '--fast'"),
        (["--out"], "--out needs a value"),
    ],
)
def test_gpu_check_bad_usage(flags, words):
    done = gpu_check(*flags)
    assert done.returncode == 2
    assert words in done.stderr


def test_gpu_check_help():
    done = gpu_check("--help")
    assert done.returncode == 0
    assert "Phases, in order:" in done.stdout
    assert "set -euo" not in done.stdout
