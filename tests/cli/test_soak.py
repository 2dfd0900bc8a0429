"""tests/gpu/soak.py as far as a machine without a GPU can: draws, watchdog, a dry run."""

from __future__ import annotations

import argparse
import itertools
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from cli.helpers import ROOT, run
from gpu import reference, soak, soak_cases, soak_program

from jax_fa3._cli import results

PROGRAM = ROOT / "tests" / "gpu" / "soak.py"
DRAWN = [soak_cases.draw_case(3, index) for index in range(3000)]


def test_a_case_follows_from_its_seed_and_index() -> None:
    assert soak_cases.draw_case(3, 17) == DRAWN[17]
    assert soak_cases.draw_case(4, 17) != DRAWN[17]
    one, other = (DRAWN[17].inputs(draw) for draw in (0, 1))
    reference.assert_same_bits(one, DRAWN[17].inputs(0))
    assert not np.array_equal(one["key"], other["key"])


def test_draws_cover_the_kernels() -> None:
    """Every kernel with every mask; every layout, scale and kind of input; sizes from 0 on."""
    masks = (None, "bottom_right", "top_left")
    kernels = {(c.head_dim, p, c.dtype, c.causal) for c in DRAWN for p in c.presets}
    presets = ("native", *soak_cases.FP8)
    expected = set(itertools.product((64, 128, 256), presets, ("bfloat16", "float16"), masks))
    assert not expected - kernels
    backward = {
        (c.head_dim, c.gradient == "native", c.dtype, c.deterministic) for c in DRAWN if c.gradient
    }
    assert len(backward) == 3 * 2 * 2 * 2
    for field, values in {
        "form": set(soak_cases.FORMS),
        "descale": set(soak_cases.DESCALE_SHAPES),
        "scale": {"default", "negative", "traced", "zero", "tiny", "large", "huge"},
        "group": {1, 2, 3, 4, 5, 8, 16},
    }.items():
        assert values <= {getattr(c, field) for c in DRAWN}, field
    for field in ("batch", "seqlen_q", "seqlen_k"):
        found = {getattr(c, field) for c in DRAWN}
        assert {0, 1, 2, 3} <= found, field
    assert max(c.seqlen_k for c in DRAWN) > 3000
    assert sum(c.seqlen_q != c.seqlen_k for c in DRAWN) > 2000
    assert len({c.stored for c in DRAWN}) > 10
    assert len({c.spoiled and c.spoiled[0] for c in DRAWN}) == 4


def test_no_case_takes_more_than_its_share_of_memory() -> None:
    """Without keys a case has no scores: once it was drawn with 3.5 million rows of queries."""
    for case in (soak_cases.draw_case(35400, 679), *DRAWN):
        rows = case.group * case.seqlen_q + case.seqlen_k
        assert case.batch * case.heads_kv * rows <= soak_cases.MOST_ROWS, case
    assert float(soak.environment(14)["XLA_PYTHON_CLIENT_MEM_FRACTION"]) * 14 < 0.91


@pytest.mark.parametrize(
    ("size", "calls"), [(1, 24), (soak_program.IN_FLIGHT_BYTES // 6, 3), (2**40, 1)]
)
def test_results_in_flight_are_bounded(size: int, calls: int) -> None:
    program = SimpleNamespace(
        result_size=size, arguments=[()], compiled=lambda: None, assert_repeats=lambda *_: None
    )
    pool: Any = [program, SimpleNamespace(**{**vars(program), "result_size": 0})]
    assert soak_program.repeat(pool, 24, np.random.default_rng(0)) == 2 * calls


def flags_of(**own: Any) -> argparse.Namespace:
    given = {"seconds": 30, "workers": 1, "worker": None, "seed": 1, "only": None, "limit": 1,
             "json": None, "dry_run": True, "until": None, "cases": None}  # fmt: skip
    return argparse.Namespace(**{**given, **own})


def test_a_call_that_hangs_ends_its_process(tmp_path: Path) -> None:
    """The timer of faulthandler, which needs no GIL; the last line names the case."""
    hang = (
        f"import sys; sys.path[:0] = [{str(PROGRAM.parent)!r}]; sys.argv = ['soak.py', "
        "'--worker', '0', '--workers', '1', '--limit', '0.05', '--dry-run']; "
        "import soak, threading; soak.soak_program.Program = lambda *_: threading.Event().wait(); "
        "sys.exit(soak.main())"
    )
    done = run("-c", hang, cwd=tmp_path)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert str(soak_cases.draw_case(0, 0)) in done.stdout.splitlines()[-1]


def test_failures_and_deaths_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(flags: Any, number: int, events: Any) -> None:
        for event in happens:
            events.put((number, event))

    monkeypatch.setattr(soak, "start", start)
    end = {"end": "case 7", "index": 7, "calls": 5, "failed": [], "notes": [("k", {"error": 0.1})]}
    begin = {"begin": "case 8"}
    happens = [end, {"exit": 0}]
    assert soak.run_all(flags_of()) == 0
    happens = [{**end, "failed": ["out is wrong"]}, {"exit": 0}]
    assert soak.run_all(flags_of()) == 1
    assert "soak.py --seed 1 --only 7\n  out is wrong" in capsys.readouterr().out
    happens = [end, begin, {"exit": 1}]
    assert soak.run_all(flags_of(workers=2)) == soak.HANG
    printed = capsys.readouterr().out
    assert printed.count("DIED with 1, in case 8") == 2
    assert "2 cases, 10 calls" in printed
    happens = [{**end, "failed": ["no room"], "ends": soak.OUT_OF_MEMORY}, {"exit": 1}]
    assert soak.run_all(flags_of()) == soak.HANG
    printed = capsys.readouterr().out
    assert "DIED with out of memory of the device, after case 7" in printed
    assert "1 failed, 0 cut short, 1 workers died" in printed
    happens = [begin]
    monkeypatch.setattr(soak, "start", lambda *a: start(*a) or SimpleNamespace(kill=lambda: None))
    monkeypatch.setattr(soak, "GRACE", 0)
    assert soak.run_all(flags_of(seconds=0.1, limit=0)) == soak.HANG
    assert "HUNG in case 8" in capsys.readouterr().out
    assert soak.run_all(flags_of(seconds=0.1)) == 0
    assert "1 cut short, 0 workers died" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("message", "ends"),
    [("RESOURCE_EXHAUSTED: Out of memory", soak.OUT_OF_MEMORY), ("INTERNAL: launch", soak.BROKEN)],
)
def test_a_worker_ends_after_an_error_of_the_runtime(
    message: str, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(soak_program, "Program", fail)
    begin, end = soak.cases_of(flags_of(worker=0, limit=60))
    assert begin["begin"] == end["end"]
    assert end["ends"] == ends
    assert message in end["failed"][0]


def test_a_worker_that_ended_its_case_at_the_end_did_not_hang(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its exit may come after the last look at the workers: the device frees what it held."""
    end = {"end": "case 7", "index": 7, "calls": 5, "failed": [], "notes": []}

    def start(flags: Any, number: int, events: Any) -> Any:
        events.put((number, {"begin": "case 7"}))
        threading.Timer(0.8, events.put, [(number, end)]).start()
        return SimpleNamespace(kill=lambda: None)

    monkeypatch.setattr(soak, "start", start)
    monkeypatch.setattr(soak, "GRACE", 0)
    assert soak.run_all(flags_of(seconds=1.0, limit=0.12)) == 0
    assert "0 failed, 1 cut short, 0 workers died" in capsys.readouterr().out


@pytest.mark.slow
def test_dry_run(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    flags = ["--dry-run", "--workers", 1, "--cases", 1, "--seed", 1, "--seconds", 200]
    done = run(PROGRAM, *flags, "--limit", 60, "--json", path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    meta, rows = results.read(path)
    assert (meta["failures"], meta["died"], meta["partial"]) == (0, 0, False)
    assert meta["dry_run"]
    assert meta["cases"] == 1
    assert all(row["kind"] == "soak" and row["checks"] >= 1 and row["worst"] for row in rows)
