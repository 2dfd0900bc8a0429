"""`python -m jax_fa3`: output, result files and exit codes of every command."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from cli.helpers import run

import jax_fa3
from jax_fa3._cli import accuracy, contenders, selfcheck
from jax_fa3._cli.main import main


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """The commands see no GPU, so that these tests say the same everywhere."""
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    monkeypatch.setattr(contenders, "kernels_run", lambda: False)


@pytest.mark.slow
def test_self_check_ends_ok(tmp_path):
    done = run("-m", "jax_fa3", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.strip().splitlines()
    assert lines[-1].startswith("jax_fa3: ok (")
    assert "runs on the XLA path" in lines[-1]
    for words in ("default backend", "What serves which request", "heads 6:2", "causal", "value 1"):
        assert words in done.stdout
    assert done.stderr == ""  # no progress bar where nobody watches


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    """As in `python -m jax_fa3 explain | head -1`."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = run("-m", "jax_fa3", "explain", cwd=tmp_path, stdout=write_end)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("has", "said"),
    [("_ext.abi3.so", "installed"), ("_build_note.txt", "installed"), (None, "checkout")],
)
def test_in_a_checkout_the_installed_package_answers(tmp_path, has, said):
    """`python -m` finds a checkout's sources first; an installed extension, or the note why there
    is none, must not be lost."""
    own = Path(jax_fa3.__file__).parent
    for place in ("checkout", "installed"):
        package = tmp_path / place / "jax_fa3"
        (package / "_cli").mkdir(parents=True)
        (package / "__init__.py").touch()
        for name in ("__main__.py", "_install.py"):
            shutil.copy(own / name, package)
        (package / "_cli" / "__init__.py").touch()
        main = f"import sys\ndef main(): print({place!r}, *sys.argv[1:])\n"
        (package / "_cli" / "main.py").write_text(main)
    if has:
        (tmp_path / "installed" / "jax_fa3" / has).touch()
    folder = str(tmp_path / "installed")
    # -S: the package under test may be installed too.
    done = run("-S", "-m", "jax_fa3", "bench", cwd=tmp_path / "checkout", PYTHONPATH=folder)
    assert (done.stdout, done.returncode) == (f"{said} bench\n", 0), done.stderr


@pytest.mark.slow
def test_self_check_works_in_a_pure_install(tmp_path):
    package = Path(jax_fa3.__file__).parent
    pure = tmp_path / "pure" / "jax_fa3"
    shutil.copytree(package, pure, ignore=shutil.ignore_patterns("_ext*.so", "__pycache__"))
    (pure / "_build_note.txt").write_text("no nvcc was found; install one.\n")
    program = (
        "import sys; from jax_fa3._cli import main, selfcheck; "
        "selfcheck.PROBLEMS = selfcheck.PROBLEMS[:1]; sys.exit(main.main())"
    )
    done = run("-c", program, cwd=tmp_path, PYTHONPATH=str(pure.parent))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "_ext is not in this installation: no nvcc was found; install one" in done.stdout


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda out: out * 0, "relative L2 error 1, limit"),
        (lambda out: out * 1.2, "relative L2 error"),
        (lambda out: out[:, :, ::-1], "relative L2 error"),
        (lambda out: np.where(out == out.max(), np.nan, out), "NaN or infinity"),
    ],
    ids=["zeros", "scaled", "heads swapped", "nan"],
)
def test_self_check_fails_on_wrong_numbers(monkeypatch, capsys, spoil, words):
    monkeypatch.setattr(selfcheck, "PROBLEMS", selfcheck.PROBLEMS[:1])
    right = accuracy.run_ours
    monkeypatch.setattr(accuracy, "run_ours", lambda *args: spoil(right(*args)))
    assert main([]) == 1
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("jax_fa3: NOT ok (")
    assert words in last


def test_self_check_reports_what_was_raised(monkeypatch, capsys):
    def broken(*args):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(accuracy, "run_ours", broken)
    assert main([]) == 1
    assert "raised RuntimeError: no such luck" in capsys.readouterr().out.splitlines()[-1]


CHECK = ("check", "--seqlens", "40", "--queries", "24", "--head-dim", "64")


def test_check_writes_accuracy_rows(tmp_path, capsys):
    path = tmp_path / "deep" / "check.json"
    assert main([*CHECK, "--presets", "accurate,native", "--json", str(path)]) == 0
    assert "jax_fa3 check: ok, 6 rows" in capsys.readouterr().out
    content = json.loads(path.read_text())
    assert set(content) == {"meta", "rows"}
    assert {"card", "versions", "command", "date"} <= set(content["meta"])
    assert {row["data"] for row in content["rows"]} == {"normal", "outlier", "biased"}
    for row in content["rows"]:
        assert row["kind"] == "accuracy"
        assert 0 < row["rel_l2"] < 0.1
        assert {"impl", "precision", "preset", "seqlen_k", "head_dim", "rmse"} <= set(row)
        assert row["precision"] == ("bf16" if row["preset"] is None else "fp8")


def test_check_fails_beyond_a_limit(monkeypatch, capsys):
    monkeypatch.setitem(accuracy.REL_L2_LIMITS, "fast", 1e-6)
    assert main([*CHECK, "--presets", "fast", "--data", "normal"]) == 1
    output = capsys.readouterr().out
    assert "beyond its limit: fast, normal, 40 keys: relative L2 error" in output
    assert "jax_fa3 check: FAILED, 1 rows" in output


def test_explain_prints_the_plan(capsys):
    flags = ["--head-dim", "96", "--causal", "--heads-q", "8", "--heads-kv", "2"]
    assert main(["explain", *flags]) == 0
    output = capsys.readouterr().out
    assert "attention runs: the blocked XLA path" in output
    assert "head_dim 96 is not served by the kernels" in output


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_explain_takes_float8(capsys, dtype):
    assert main(["explain", "--dtype", dtype]) == 0
    assert "quantisation: e4m3" in capsys.readouterr().out


def test_explain_of_a_refused_kernel_is_1(capsys):
    assert main(["explain", "--window-left", "5", "--implementation", "cuda"]) == 1
    assert "window_size=(5, None) is not served by the kernels" in capsys.readouterr().err


def test_explain_of_a_contradiction_is_2(capsys):
    assert main(["explain", "--heads-q", "5", "--heads-kv", "2"]) == 2
    assert "num_heads" in capsys.readouterr().err


def test_bench_dry_run_writes_timing_rows(tmp_path, capsys):
    path = tmp_path / "bench.json"
    flags = ["--head-dims", "64", "--causal", "yes", "--presets", "fast,native"]
    assert main(["bench", "--dry-run", *flags, "--json", str(path)]) == 0
    output = capsys.readouterr().out
    assert "dry run: these numbers mean nothing" in output
    assert "not timed (1 shapes): cudnn bf16: cuDNN needs a GPU" in output
    content = json.loads(path.read_text())
    assert content["meta"]["dry_run"] is True
    assert content["meta"]["skipped"][0]["contender"] == "cudnn bf16"
    assert [row["preset"] for row in content["rows"]] == ["fast", None]
    for row in content["rows"]:
        assert (row["kind"], row["regime"], row["is_causal"]) == ("fwd", "sustained", True)
        assert 0 < row["ms_lo"] <= row["ms"] <= row["ms_hi"]
        assert row["ratio"] == {}
    assert [row["with_quantize"] for row in content["rows"]] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench"], "measuring needs a GPU"),
        (["check", "--heads-q", "5", "--heads-kv", "2"], "--heads-kv must divide --heads-q"),
        ([*CHECK, "--implementation", "cuda", "--presets", "block"], "is not served"),
    ],
)
def test_bad_usage_is_2(capsys, arguments, words):
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tune"], "invalid choice"),
        (["check", "--presets", "sloppy"], "'sloppy' is not one of accurate, fast"),
        (["check", "--seqlens", "0"], "must be a whole number of at least 1"),
        (["bench", "--seconds", "-1"], "must be a number above 0"),
    ],
)
def test_bad_flags_are_2(capsys, arguments, words):
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["check"], ["bench"], ["explain"]])
def test_help(capsys, command):
    with pytest.raises(SystemExit) as exit_info:
        main([*command, "--help"])
    assert exit_info.value.code == 0
    output = capsys.readouterr().out
    assert "usage: python -m jax_fa3" in output
    assert "%" not in output.replace("0.1% of", "")  # argparse formats only some of its texts
    if not command:
        assert all(name in output for name in ("check", "bench", "explain"))
        assert "Exit code: 0 all is well, 1 a check failed, 2 bad usage." in output
