"""The GPT example learns, goes on after an interrupt as if none had been, refuses bad flags."""

import importlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import processes
import pytest

for package in ("flax", "matplotlib", "optax", "orbax.checkpoint", "tqdm"):
    pytest.importorskip(package, reason="needs the examples extra")

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
SMALL = (
    *("--batch", "2", "--seqlen", "32", "--layers", "2", "--width", "64", "--head-dim", "64"),
    *("--learning-rate", "3e-3"),
)
STEPS = 120


def start(cache, *flags):
    """The example as a process, as a user would start it, on the jax_fa3 under test."""
    # Compiling is most of the time: once, and without optimizations.
    env = processes.environment(
        JAX_DISABLE_MOST_OPTIMIZATIONS="1",
        JAX_COMPILATION_CACHE_DIR=str(cache),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    )
    return subprocess.Popen(
        [sys.executable, str(EXAMPLE), *map(str, flags)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


def rows_of(path):
    return {row["attention"]: row for row in json.loads(path.read_text())["rows"]}


def run_to_the_end(tmp_path, *flags):
    """Rows by mode."""
    result = tmp_path / "result.json"
    process = start(tmp_path / "cache", *SMALL, "--steps", STEPS, "--json", result, *flags)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return rows_of(result)


def interrupt(tmp_path, folder):
    """Interrupts a run as soon as the progress bar shows ten steps; returns its row."""
    result = tmp_path / "interrupted.json"
    process = start(
        tmp_path / "cache",
        *(*SMALL, "--steps", STEPS, "--json", result),
        *("--checkpoint", folder, "--checkpoint-every", 10),
    )
    err = ""
    while f" 10/{STEPS} " not in err and process.poll() is None:
        err += process.stderr.read(1)
    process.send_signal(signal.SIGINT)
    out, rest = process.communicate(timeout=300)
    assert process.returncode == 130, err + rest
    (row,) = rows_of(result).values()
    assert f"stopped after step {row['steps']}; the same command goes on" in out
    return row


@pytest.mark.slow
def test_learns_and_resumes(tmp_path, monkeypatch):
    plot = tmp_path / "plot.png"
    rows = run_to_the_end(tmp_path, "--compare", "fp8,xla", "--plot", plot)
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert list(rows) == ["fp8", "xla"]
    assert [row["precision"] for row in rows.values()] == ["fp8", "f32"]
    assert "  quantisation: none" not in rows["fp8"]["runs"]
    assert "  quantisation: none" in rows["xla"]["runs"]
    for row in rows.values():
        assert row["steps"] == len(row["losses"]) == len(row["step_ms"]) == STEPS
        assert row["losses"][0] == pytest.approx(5.55, abs=0.2)  # log(256): it knows nothing yet
        assert row["final_loss"] < 3.5
        assert row["held_out_loss"] < 3.5
    # From the same weights on the same batches, but not the same arithmetic.
    assert rows["fp8"]["losses"][:5] == pytest.approx(rows["xla"]["losses"][:5], abs=0.03)
    assert rows["fp8"]["losses"] != rows["xla"]["losses"]

    folder = tmp_path / "checkpoints"
    interrupted = interrupt(tmp_path, folder)
    done = interrupted["steps"]
    assert 10 <= done < STEPS
    assert interrupted["losses"] == rows["fp8"]["losses"][:done]
    assert interrupted["held_out_loss"] is None
    assert (folder / "fp8" / str(done)).is_dir()

    resumed = run_to_the_end(tmp_path, "--checkpoint", folder)["fp8"]
    assert resumed["losses"] == rows["fp8"]["losses"]
    assert resumed["held_out_loss"] == rows["fp8"]["held_out_loss"]
    assert resumed["step_ms"][:done] == interrupted["step_ms"]  # those steps were not run again

    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    train_gpt = importlib.import_module("train_gpt")
    with pytest.raises(SystemExit, match=f"runs with steps 7, or a new one; got steps {STEPS} in"):
        train_gpt.main([*SMALL, "--steps", "7", "--checkpoint", str(folder)])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--width 100", "argument --width: must be a multiple of --head-dim 128; got 100"),
        ("--steps 0", "argument --steps: must be a positive integer; got 0"),
        ("--learning-rate nan", "argument --learning-rate: must be a positive number; got nan"),
        ("--seed -1", "argument --seed: must be an integer from 0 to 2**32 - 1; got -1"),
        ("--plot a.txt", "argument --plot: must end in .png, .svg or .pdf; got a.txt"),
        (
            "--compare fp8,bf16",
            "argument --compare: must be distinct modes of fp8,native,cudnn,xla, separated by "
            "commas; got fp8,bf16",
        ),
        ("--compare fp8,xla --attention xla", "not allowed with argument --compare"),
        ("--attention cudnn", "mode cudnn: must run on a CUDA GPU; got cpu"),
        ("--json /dev/null/a.json", "argument --json: must lie in a folder that can be made; "),
        ("--batch 99999", "--batch and --seqlen must fit into the "),
    ],
)
def test_bad_flags_are_refused(flags, sentence, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    train_gpt = importlib.import_module("train_gpt")
    with pytest.raises(SystemExit) as refused:
        train_gpt.main(flags.split())
    assert sentence in f"{capsys.readouterr().err}{refused.value}"


def test_results_name_the_commit(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    gpt_report = importlib.import_module("gpt_report")
    text = importlib.import_module("gpt_text").Text(b"", b"", "0")
    monkeypatch.setenv("JAX_FA3_COMMIT", "abc123")
    assert gpt_report.meta(text)["commit"] == "abc123"
    monkeypatch.setenv("JAX_FA3_COMMIT", "")
    assert "commit" not in gpt_report.meta(text)
    monkeypatch.delenv("JAX_FA3_COMMIT")
    assert "commit" not in gpt_report.meta(text)


def test_an_epoch_shows_every_window_once(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    gpt_text = importlib.import_module("gpt_text")
    batch, seqlen, length = 3, 7, 1000
    windows = length // seqlen - 1
    per_epoch = windows // batch
    first, second = (
        sorted(
            start
            for step in range(epoch * per_epoch, (epoch + 1) * per_epoch)
            for start in gpt_text.starts_of(step, batch, seqlen, 0, length).tolist()
        )
        for epoch in (0, 1)
    )
    for starts in (first, second):
        assert len(set(starts)) == per_epoch * batch
        assert {start % seqlen for start in starts} == {starts[0] % seqlen}  # no two overlap
        assert starts[0] >= 0
        assert starts[-1] + seqlen + 1 <= length
    assert first != second
