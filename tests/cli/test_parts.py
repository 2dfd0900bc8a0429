"""The parts below the commands: reference, errors, limits, turns, samples, result files."""

from __future__ import annotations

import itertools
import math
import stat
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import numpy_reference

from jax_fa3._cli import accuracy, contenders, gpu_state, grid, plots, results, timing
from jax_fa3._cli.accuracy import Errors, Problem
from jax_fa3._cli.contenders import Contender, Unavailable
from jax_fa3._cli.progress import progress
from jax_fa3._cli.timing import REGIMES, Regime, Side, Turns

FAST_SIDE = Side(lambda: None, lambda _: None)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(11, 17), (17, 11)])
def test_reference_is_the_oracle(is_causal, seqlen_q, seqlen_k):
    arrays = accuracy.draw(Problem(seqlen_q, seqlen_k, 6, 3, 16, batch=2))
    got = accuracy.reference(*arrays, is_causal=is_causal, rows_at_once=4)
    wanted, _ = numpy_reference.attention(*arrays, is_causal=is_causal)
    np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-14)


def test_distributions_are_what_they_say():
    def values(data):
        _, key, value = accuracy.draw(Problem(2, 4096, 2, 2, 32, data=data))
        return key.astype(np.float64), value.astype(np.float64)

    key, _ = values("normal")
    assert abs(key.mean()) < 0.01
    assert abs(key.std() - 1) < 0.01
    key, _ = values("outlier")
    assert 1e-4 < (abs(key) > 6).mean() < 1e-3
    key, _ = values("biased")
    assert abs(key.mean(axis=1)).mean() > 0.3
    assert (values("ones")[1] == 1).all()
    for data in ("uniform", "shifted"):
        assert abs(values(data)[1].mean() - 1) < 0.02
    assert values("shifted")[0].std() > 0.9


def test_errors_of_a_known_difference():
    expected = np.full((1, 2, 1, 2), 2.0)
    found = accuracy.errors(expected + np.array([0.3, -0.3]), expected)
    assert found.rmse == pytest.approx(0.3)
    assert found.rel_l2 == pytest.approx(0.15)
    assert found.max_abs == pytest.approx(0.3)
    assert found.cosine == pytest.approx(16 / 4 / math.sqrt(2 * 2.3**2 + 2 * 1.7**2))
    with pytest.raises(ValueError, match=r"out must have shape \(1, 2, 1, 2\); got \(2,\)"):
        accuracy.errors(np.ones(2), expected)


@pytest.mark.parametrize(
    ("preset", "data", "errors", "words"),
    [
        ("accurate", "normal", Errors(0, 0.06, 1, 0), None),
        ("accurate", "normal", Errors(0, 0.2, 1, 0), "relative L2 error 0.2, limit 0.08"),
        ("per_tensor", "normal", Errors(0, 0.2, 1, 0), None),
        ("per_tensor", "normal", Errors(*[math.nan] * 4), "NaN or infinity"),
        ("fast", "ones", Errors(0, 0, 1, 0.5), "largest error 0.5, limit 0.01"),
        ("native", "uniform", Errors(0, 0.02, 1, 0), "relative L2 error 0.02, limit 0.01"),
        ("fast", "shifted", Errors(0, 0.02, 1, 0), "relative L2 error 0.02, limit 0.01"),
    ],
)
def test_verdict(preset, data, errors, words):
    complaint = accuracy.verdict(preset, data, errors, 2048)
    assert complaint is None if words is None else words in complaint


def test_verdict_allows_more_over_very_many_keys():
    errors = Errors(0, 0.12, 1, 0)
    assert accuracy.verdict("accurate", "normal", errors, 131_072) is None
    assert "limit 0.08" in accuracy.verdict("accurate", "normal", errors, 8192)
    assert "limit 0.16" in accuracy.verdict("accurate", "normal", Errors(0, 0.17, 1, 0), 131_072)


def test_grid_is_the_papers():
    shapes = grid.grid() + grid.headline()
    assert len({shape.name for shape in shapes}) == 38
    first = shapes[0]
    assert (first.name, first.batch, first.num_heads_q) == ("B32_S512_H32_D64_n", 32, 32)
    assert all(s.batch * s.seqlen_q == 16_384 for s in shapes[:-2])
    assert first.flops == 4 * 16_384 * 512 * 2048
    assert shapes[-1].name == "B16_S8192_H16_D128_c"
    assert shapes[-1].flops * 2 == shapes[-2].flops


def test_turns_come_in_every_order():
    order = []

    def side(name):
        return Side(lambda: order.append(name), lambda _: None)

    regime = Regime("test", 0.0, 1e-6)  # one launch per turn, idling instead of a lead
    runs = []
    for _ in range(2):
        order.clear()
        turns = timing.take_turns({name: side(name) for name in "abc"}, regime, 30)
        runs.append("".join(order[-90:]))
    assert runs[0] == runs[1]
    assert all(sorted(runs[0][i : i + 3]) == ["a", "b", "c"] for i in range(0, 90, 3))
    assert {before + after for before, after in itertools.pairwise(runs[0])} >= {
        before + after for before, after in itertools.permutations("abc", 2)
    }
    assert [len(turns[name].ms) for name in "abc"] == [30, 30, 30]
    assert all(start < end for start, end in turns["a"].spans)


@pytest.mark.parametrize("rounds", [5, 9])
@pytest.mark.parametrize("sides", [2, 3, 4, 5])
def test_no_side_always_follows_the_same_one(sides, rounds):
    names = [str(number) for number in range(sides)]
    orders = timing.draw_orders(names, rounds)
    assert orders == timing.draw_orders(names, rounds)
    assert [sorted(order) for order in orders] == [names] * rounds
    turns = list(itertools.chain.from_iterable(orders))
    for name in names:
        before = [a for a, b in itertools.pairwise(turns) if b == name]
        counts = [before.count(other) for other in names if other != name]
        assert max(counts) - min(counts) <= 2


def test_all_run_untimed_before_the_first_turn():
    begun = []

    def side(name):
        return Side(lambda: begun.append((time.perf_counter(), name)) or time.sleep(1e-3), id)

    turns = timing.take_turns({n: side(n) for n in "abc"}, REGIMES["sustained"], 1, turn_s=0.02)
    first = min(own.spans[0][0] for own in turns.values())
    before = [(at, name) for at, name in begun if first - 0.25 < at < first]
    assert {name for _, name in before} == {"a", "b", "c"}
    assert before[0][0] < first - 0.15


def test_a_slower_side_is_measured_slower():
    def sleeper(seconds):
        return Side(lambda: time.sleep(seconds), lambda _: None)

    sides = {"slow": sleeper(4e-3), "fast": sleeper(1e-3)}
    turns = timing.take_turns(sides, REGIMES["sustained"], 3, turn_s=0.02)
    assert 3.5 < turns["slow"].median < 12
    assert timing.speed_ratio(turns["fast"], turns["slow"]) > 1.5


def test_launches_in_one_program_are_divided_out():
    def launch():
        time.sleep(8e-3)

    turns = timing.take_turns(
        {"eight": Side(launch, lambda _: None, 8)}, REGIMES["burst"], 1, turn_s=0.01
    )
    assert 0.9 < turns["eight"].median < 3


def test_a_launch_on_the_cpu_is_waited_for(monkeypatch):
    """Queued, the collectives of two programs can take all threads and wait for each other."""
    side = timing.jax_side(lambda x: x @ x, jnp.ones((8, 8)))
    waited = []
    wait = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: waited.append(x) or wait(x))
    assert side.launch() is waited[0]


def test_some_go_on_until_nobody_is_named():
    order, asked = [], []

    def side(name):
        return Side(lambda: order.append(name), lambda _: None)

    def more(turns):
        asked.append({name: len(own.ms) for name, own in turns.items()})
        return ["a", "c"] if len(turns["a"].ms) < 10 else []

    regime = Regime("test", 0.0, 1e-6)
    turns = timing.take_turns({name: side(name) for name in "abc"}, regime, 3, more=more)
    assert asked == [{"a": n, "b": 3, "c": n} for n in (3, 7, 11)]
    assert [len(turns[name].ms) for name in "abc"] == [11, 3, 11]
    assert all(
        sorted(pair) == ["a", "c"] for pair in zip(order[-16::2], order[-15::2], strict=True)
    )
    assert {*itertools.pairwise(order[-16:])} >= {("a", "a"), ("a", "c"), ("c", "a"), ("c", "c")}


def test_the_error_of_a_ratio_falls_with_rounds():
    rng = np.random.default_rng(0)
    errors = []
    for rounds in (16, 400):
        ours = Turns(list(rng.normal(1, 0.01, rounds)))
        errors.append(timing.ratio_error(ours, Turns([1.02] * (rounds + 4))))
    wanted = [1.02 * 0.01 * math.sqrt(math.pi / 2 / rounds) for rounds in (16, 400)]
    assert errors == pytest.approx(wanted, rel=0.4)
    assert timing.ratio_error(Turns([1.0]), Turns([1.0])) == math.inf


def test_ratio_is_taken_within_rounds():
    assert timing.speed_ratio(Turns([1.0, 10.0, 2.0]), Turns([2.0, 20.0, 4.0])) == 2.0
    assert timing.speed_ratio(Turns([1.0, 10.0, 2.0, 9.0]), Turns([2.0, 20.0, 4.0])) == 2.0


def test_nothing_to_time_is_an_error():
    with pytest.raises(ValueError, match="take_turns: sides and rounds"):
        timing.take_turns({}, REGIMES["burst"], 1)


def test_short_calls_are_put_into_one_program(monkeypatch):
    """On a GPU; here the barrier must keep eight computations, none of them shared."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing, "SHORT_S", math.inf)
    side = timing.jax_side(lambda x: x @ x, jnp.ones((8, 8)))
    assert side.launches == 8
    outs = side.launch()
    side.wait(outs)
    assert [float(out[0, 0]) for out in outs] == [8.0] * 8


def test_merged_launches_are_noticed(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing, "SHORT_S", math.inf)
    counts = iter([3, 1])  # the program with eight holds three custom calls, a single one holds one
    monkeypatch.setattr(timing, "_custom_calls", lambda _: next(counts))
    assert timing.jax_side(lambda x: x @ x, jnp.ones((8, 8))).launches == 1


def test_compare_names_who_cannot_run():
    def refuse(shape):
        raise Unavailable(f"not today for {shape.name}")

    ours = Contender("jax_fa3", "fp8", "fast", True, lambda _: FAST_SIDE)
    rival = Contender("cudnn", "bf16", None, False, lambda _: FAST_SIDE)
    absent = Contender("fa3", "bf16", None, False, refuse)
    shape = grid.square(1, 8, 1, 64, True)
    done = contenders.compare(shape, [ours, rival, absent], regime="burst", rounds=2, turn_s=1e-5)
    assert done.skipped == {"fa3 bf16": "not today for B1_S8_H1_D64_c"}
    assert set(done.turns) == {"jax_fa3 fast with quantise", "cudnn bf16"}
    assert set(done.ratios(ours.label, [rival.label, absent.label])) == {"cudnn bf16"}


FAKE_SMI = """#!/bin/sh
case "$*" in
  *name*) echo "NVIDIA H200, 580.1, 143771, 1980, 700.00" ;;
  *) while :; do echo "1650, 698.5"; sleep 0.02; done ;;
esac
"""


def test_card_and_samples_through_nvidia_smi(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(FAKE_SMI)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_state.card_facts() == {
        "card": "NVIDIA H200",
        "driver": "580.1",
        "memory_mib": 143771.0,
        "max_sm_clock_mhz": 1980.0,
        "power_limit_w": 700.0,
    }
    with gpu_state.sampling() as samples:
        start = time.perf_counter()
        time.sleep(0.4)
        span = (start, time.perf_counter())
    assert samples.during([span]) == {"sm_clock_mhz": 1650.0, "power_w": 698.5}
    assert samples.during([(start - 2, start - 1)]) == {}


def test_samples_through_nvml(monkeypatch):
    nvml = types.ModuleType("pynvml")
    nvml.NVMLError, nvml.NVML_CLOCK_SM = RuntimeError, 1
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetClockInfo = lambda handle, clock: 1980
    nvml.nvmlDeviceGetPowerUsage = lambda handle: 512_000
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with gpu_state.sampling() as samples:
        start = time.perf_counter()
        time.sleep(0.2)
        span = (start, time.perf_counter())
    assert samples.during([span]) == {"sm_clock_mhz": 1980.0, "power_w": 512.0}


def test_no_gpu_tools_mean_no_facts(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_state.card_facts() == {}
    with gpu_state.sampling() as samples:
        assert samples.during([(0.0, math.inf)]) == {}


def test_result_files_come_back(tmp_path):
    path = tmp_path / "a" / "b.json"
    row = results.accuracy_row(
        Errors(*[math.nan] * 4), impl="x", precision="fp8", preset=None, data="normal",
        seqlen_k=5, head_dim=64,
    )  # fmt: skip
    assert row["rmse"] is None
    results.write(path, results.meta(note="hello"), [row])
    meta, rows = results.read(path)
    assert rows == [row]
    assert meta["note"] == "hello"
    assert meta["versions"]["jax"] == jax.__version__
    assert [p.name for p in path.parent.iterdir()] == ["b.json"]
    path.write_text("[]")
    with pytest.raises(ValueError, match="is no result file"):
        results.read(path)


class FakeTerminal:
    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_progress_shows_on_a_terminal_only(monkeypatch, capsys):
    assert list(progress([1, 2], "quiet")) == [1, 2]
    assert capsys.readouterr().err == ""
    pytest.importorskip("tqdm", reason="needs the examples extra")
    terminal = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(progress([1, 2], "loud")) == [1, 2]
    assert "loud" in terminal.text


def test_progress_needs_no_tqdm(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    terminal = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(progress([1, 2], "loud")) == [1, 2]
    assert terminal.text == ""


# ---- result rows as people read them ---------------------------------------------------

ROW = {"kind": "fwd", "impl": "jax_fa3", "precision": "fp8", "preset": "accurate"}
ROW |= {"with_quantize": True, "head_dim": 128, "is_causal": True}
ROW |= {"seqlen_q": 4096, "seqlen_k": 4096, "num_heads_q": 16, "num_heads_kv": 16}
ROW |= {"tflops": 900.0, "batch": 4}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, "jax_fa3 accurate + quantise"),
        ({"preset": None, "precision": "bf16", "with_quantize": False}, "jax_fa3 bf16"),
        ({"impl": "fa3_fp8", "with_quantize": False}, "fa3_fp8"),
        ({"devices": 1, "strategy": None}, "jax_fa3 accurate + quantise"),
        ({"devices": 2, "strategy": "ring"}, "jax_fa3 accurate, 2 GPUs ring + quantise"),
    ],
)
def test_variant_tells_apart_what_was_measured(changed, words):
    assert results.variant({**ROW, **changed}) == words


def test_a_place_of_a_plot_has_one_point(monkeypatch, tmp_path):
    """A rival is timed beside each of ours; lines through all of its points would zigzag."""
    drawn = []
    monkeypatch.setattr(plots, "_plot", lambda panels, *rest: drawn.append(panels))
    again, two = {"tflops": 950.0}, {"devices": 2, "strategy": "ring", "tflops": 800.0}
    grouped = {"num_heads_kv": 2, "seqlen_q": 512, "seqlen_k": 512}
    headline = {"batch": 16, "tflops": 850.0}
    rows = [{**ROW, **headline}, ROW, {**ROW, **again}, {**ROW, **two}, {**ROW, **grouped}]
    plots.speed(rows, tmp_path / "no.svg")
    assert drawn == [
        {
            "head_dim 128, causal": {
                "jax_fa3 accurate + quantise": {4096: 900.0},
                "jax_fa3 accurate, 2 GPUs ring + quantise": {4096: 800.0},
            }
        }
    ]


def test_exact_sums_do_not_stretch_the_axis_of_errors(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(plots, "_plot", lambda panels, *rest: drawn.append(panels))
    error = {**ROW, "kind": "accuracy", "with_quantize": False, "data": "ones"}
    rows = [{**error, "seqlen_k": n, "rel_l2": e} for n, e in ((512, 1e-16), (1024, 0.02))]
    plots.accuracy(rows, tmp_path / "no.svg")
    assert drawn == [{"head_dim 128, ones": {"jax_fa3 accurate": {512: 1e-4, 1024: 0.02}}}]


def test_recorded_command_has_no_folders_of_this_machine(monkeypatch):
    arguments = ["/a/checkout/benchmarks/two.py", "--json", "/b/c d.json", "results/e.json"]
    monkeypatch.setattr("sys.argv", arguments)
    assert results.command_line() == "two.py --json 'c d.json' results/e.json"
