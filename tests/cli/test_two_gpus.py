"""benchmarks/two_gpus.py on two CPU devices, and the parts that judge what it finds."""

from __future__ import annotations

import importlib
import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from cli.helpers import BENCHMARKS, run


@pytest.fixture
def load(monkeypatch):
    """Imports a module of benchmarks/ by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def by_name(name: str) -> ModuleType:
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return by_name


def test_timed_phases_on_two_cpu_devices(tmp_path):
    out = tmp_path / "two.json"
    flags = ["--tokens", "128", "--heads", "2", "--seconds", "0.01", "--rounds", "1"]
    flags += ["--phases", "forward,hidden,backward", "--precisions", "native", "--json", out]
    done = run(BENCHMARKS / "two_gpus.py", "--devices", "cpu", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(out.read_text())
    assert content["meta"]["failed"] == content["meta"]["left_out"] == []
    forward = [row for row in content["rows"] if row["kind"] == "fwd"]
    assert [(row["devices"], row["seqlen_k"], row["strategy"]) for row in forward] == [
        (1, 64, None), (1, 128, None), (2, 128, "ring"), (2, 128, "all_gather"),
        (2, 128, "ulysses"),
    ]  # fmt: skip
    share, whole, ring = forward[:3]
    assert ring["strong"] == pytest.approx(whole["ms"] / ring["ms"], rel=1e-3)
    assert ring["weak"] == pytest.approx(2 * share["ms"] / ring["ms"], rel=1e-3)
    # A causal call of the whole sequence has four times the work of one of half of it.
    assert ring["weak"] == pytest.approx(ring["tflops"] / share["tflops"], rel=1e-3)
    assert [row["devices"] for row in content["rows"] if row["kind"] == "step"] == [2, 1]


def test_a_failed_phase_is_named_and_a_late_one_left_out(tmp_path):
    out = tmp_path / "two.json"
    flags = ["--phases", "tests", "--json", out]
    done = run(BENCHMARKS / "two_gpus.py", "--devices", "cpu", *flags, cwd=tmp_path)
    assert done.returncode == 1  # no GPU here: skipped tests count as failed
    assert "NOT ok" in done.stdout
    late = ["--phases", "flax", "--limit", "-1", "--json", out]
    done = run(BENCHMARKS / "two_gpus.py", "--devices", "cpu", *late, cwd=tmp_path)
    assert done.returncode == 0
    assert "no time for flax" in done.stdout
    bad = run(BENCHMARKS / "two_gpus.py", "--check-seqlen", "6", cwd=tmp_path)
    assert bad.returncode == 2
    assert "--check-seqlen must be a multiple of 4; got 6." in bad.stderr


def test_comparison_rejects_what_is_wrong(load):
    row_of = load("device_checks").row_of
    exact = np.random.default_rng(0).normal(size=(2, 12, 4, 8)).astype(np.float32)
    rounded = exact * (1 + 2.0**-9)
    fine = row_of("x", ["out"], [rounded], [rounded], [exact])
    assert fine["ok"]
    assert fine["errors"]["out"] == pytest.approx([2.0**-9] * 2, rel=1e-2)
    broken = exact.copy()
    broken[0, 3] = np.nan
    for wrong in (exact * 0, exact * 1.1, exact[:, ::-1], exact[:, :, ::-1], broken):
        assert not row_of("x", ["out"], [wrong], [rounded], [exact])["ok"]


def test_overlap_of_events(load):
    overlap = load("overlap")
    found = overlap.of_events(
        1,
        [
            ("fwd_kernel", (0, 4e6)),
            ("quantize", (3e6, 5e6)),
            ("ncclDevKernel_SendRecv", (4e6, 8e6)),
            ("MemcpyP2P", (7e6, 9e6)),
            ("fwd_kernel", (8e6, 8.5e6)),
        ],
    )
    assert (found.communication_ms, found.compute_ms, found.hidden_ms) == (5.0, 5.5, 1.5)
    assert found.hidden == pytest.approx(0.3)
    assert next(iter(found.longest.items())) == ("fwd_kernel", 4.5)
    assert overlap.of_events(0, [("fwd_kernel", (0, 1))]).hidden is None


def test_overlap_reads_streams_of_gpus_only(load):
    def line(name, *events):
        return SimpleNamespace(
            name=name,
            events=[SimpleNamespace(name=n, start_ns=s, duration_ns=d) for n, s, d in events],
        )

    kernel, transfer = ("fwd_kernel", 0, 3e6), ("ncclDevKernel_SendRecv", 1e6, 4e6)
    planes = [
        SimpleNamespace(name="/host:CPU", lines=[line("Stream #1", kernel)]),
        SimpleNamespace(
            name="/device:GPU:1",
            lines=[
                line("Stream #13(Compute)", kernel),
                line("Stream #14(Compute)", transfer),
                line("XLA Ops", ("ring", 0, 9e6)),
            ],
        ),
    ]
    (found,) = load("overlap").of_trace(SimpleNamespace(planes=planes))
    assert (found.device, found.communication_ms, found.compute_ms) == (1, 4.0, 3.0)
    assert found.hidden == 0.5
