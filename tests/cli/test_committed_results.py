"""The result files in benchmarks/results/: whole, as good as is claimed, and shown as they are."""

from __future__ import annotations

import importlib
import itertools
import json

import pytest
from cli.helpers import BENCHMARKS, ROOT, run

import jax_fa3
from jax_fa3._cli import grid


@pytest.fixture
def program(monkeypatch):
    """Imports a program of benchmarks/."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def committed_rows(program):
    """Speeds, newest first."""
    contents = [json.loads(path.read_text()) for path in program("table").committed_speeds()]
    return [row for content in contents for row in content["rows"]]


def test_our_tables_are_those_of_the_committed_results():
    done = run(BENCHMARKS / "table.py", "--check", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_committed_speeds_are_a_whole_grid(program, head_dim):
    """Every length and mask next to the rivals that the goals name, in five rounds or more. The
    files hold it together; each ratio is one run's."""
    rows = committed_rows(program)
    rows = [row for row in rows if row.get("regime") == "sustained" and row["ratio"]]
    assert min(row["rounds"] for row in rows) >= 5
    found = {
        (row["kind"], row["preset"] or row["precision"], row["seqlen_q"], row["is_causal"], rival)
        for row in rows
        if row["head_dim"] == head_dim and row["batch"] * row["seqlen_q"] == 16_384
        for rival in row["ratio"]
    }
    for seqlen, is_causal in itertools.product(grid.SEQLENS, (False, True)):
        for who, rival in (("accurate", "cudnn_fp8"), ("accurate", "fa3_fp8"), ("bf16", "fa3")):
            assert ("fwd", who, seqlen, is_causal, rival) in found
        if seqlen in (2048, 8192):
            assert ("fwd", "fast", seqlen, is_causal, "fa3_fp8") in found
            assert ("fwd", "f16", seqlen, is_causal, "cudnn_f16") in found
            rival = "fa3jax" if head_dim == 128 else "cudnn"
            assert ("bwd", "bf16", seqlen, is_causal, rival) in found


def test_what_was_measured_again_stands_in_the_newest_file_alone(program):
    files = program("table").committed_speeds()
    identity = program("collect").identity
    assert files[0].name == "h200.json"
    dates, measured = [], []
    for path in files:
        content = json.loads(path.read_text())
        dates.append(content["meta"]["date"])
        measured.append({identity(row) for row in content["rows"] if row.get("ratio")})
    assert dates == sorted(dates, reverse=True)
    for one, other in itertools.combinations(measured, 2):
        assert not one & other


@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_a_fixed_order_costs_is_that_of_the_committed_results(program, head_dim):
    """What explain says. Such ratios differ by some points from run to run."""
    goals = program("goals")
    costs = goals.costs_of_order(committed_rows(program))[head_dim]
    longer = [100 * (cost - 1) for own in costs.values() for cost in own]
    assert len(longer) >= 4
    assert -3 <= jax_fa3._explain._COST_OF_ORDER[head_dim] - max(longer) <= 10


def test_committed_sums_are_within_the_models_error():
    """Values with a mean of 1 under random weights: 1.3 times float32 sums."""
    rows = json.loads((BENCHMARKS / "results" / "h200_errors.json").read_text())["rows"]
    found = {
        (row["data"], row["seqlen_k"], row["preset"]): row["over_model"]
        for row in rows
        if "over_model" in row and row["preset"] in ("accurate", "fast")
    }
    shifted = itertools.product(["shifted"], [4096, 32_768, 131_072], ["accurate", "fast"])
    for place in shifted:
        assert found[place] <= 1.3, place
