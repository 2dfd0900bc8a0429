"""tests/gpu/soak.py as far as a machine without a GPU can: draws, checks, watchdog, a dry run."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from cli.helpers import ROOT, run
from gpu import reference, reference_gradients, soak, soak_cases, soak_checks, soak_program
from gpu.reference import MAIN

from jax_fa3 import _explain, _fold, _fp8_model
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


def perfect_program(case: soak_cases.Case) -> Any:
    """A case whose kernels did exactly what the models say."""
    host = [case.inputs(draw) for draw in range(2)]
    first = []
    for draw, inputs in enumerate(host):
        options = {"causal": case.causal, "softmax_scale": case.softmax_scale()}
        found = {p: reference.model_of(case.options(p), inputs, **options) for p in case.presets}
        found = {p: r._replace(logsumexp=np.float32(r.logsumexp)) for p, r in found.items()}
        scale = case.head_dim**-0.5
        grads = reference_gradients.exact(
            inputs, *case.cotangents(draw), causal=case.causal, scale=scale
        )
        first.append((found, {n: g.astype(inputs[n].dtype) for n, g in grads.items()}))
    return SimpleNamespace(case=case, host=host, first=first, is_kernel=True)


def small_case(**fields: Any) -> soak_cases.Case:
    own = {"seed": 1, "index": 2, "batch": 2, "seqlen_q": 37, "seqlen_k": 53, "heads_kv": 2,
           "group": 3, "head_dim": 64, "causal": "bottom_right", "dtype": "bfloat16",
           "stored": (None, None, None), "descale": "heads", "presets": ("native", "fast"),
           "scale": "default", "data": ("mixed", "outlier"), "form": "plain",
           "gradient": "native", "deterministic": True, "spoiled": None}  # fmt: skip
    return soak_cases.Case(**{**own, **fields})


def test_checks_accept_the_models_and_reject_what_is_wrong() -> None:
    case = small_case()
    notes, failed = soak_checks.check(perfect_program(case))
    assert failed == []
    assert [kind for kind, _ in notes[:3]] == [
        "forward native, bf16 inputs",
        "forward fast, bf16 inputs",
        "backward native, bf16 inputs, deterministic",
    ]

    def spoil(edit: Any) -> list[str]:
        program = perfect_program(case)
        edit(*program.first[1])
        return soak_checks.check(program)[1]

    def scaled(preset: str) -> Any:
        def edit(found: Any, grads: Any) -> None:
            out = found[preset].out
            found[preset] = found[preset]._replace(out=(1.1 * out).astype(out.dtype))

        return edit

    def one_head_lost(found: Any, grads: Any) -> None:
        grads["key"][1, :, 1] = 0

    def one_nan(found: Any, grads: Any) -> None:
        found["fast"].logsumexp[1, 2, 3] = np.nan

    for edit, words in (
        (scaled("native"), "draw 1, native: error"),
        (one_head_lost, "draw 1, gradient of native: dkey"),
        (one_nan, "draw 1, fast: isnan"),
    ):
        message = spoil(edit)[0]
        assert message.startswith(words), message


# Two keys, whose values nearly agree in some head; and ordinary heads.
@pytest.mark.parametrize("lengths", [(2, 2), (37, 53)])
def test_gradients_may_be_off_by_their_noise_and_no_more(
    lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"presets": ("native", "fast"), "gradient": "fast", "dtype": "float16"}
    case = small_case(seqlen_q=lengths[0], seqlen_k=lengths[1], **own)
    inputs, options = case.inputs(0), case.options("fast")
    saved = reference.model_of(options, inputs, causal=case.causal, softmax_scale=None)
    saved = saved._replace(logsumexp=np.float32(saved.logsumexp))
    given = (*case.cotangents(0), case.causal, options, saved)
    expected, noise = reference_gradients.model(inputs, *given, unit=tolerances.BF16_UNIT)
    # It takes seconds, and its arguments are nearly the same each time.
    monkeypatch.setattr(reference_gradients, "model", lambda *_, **__: (expected, noise))
    rng = np.random.default_rng(0)
    grads = {}
    for name, x in expected.items():
        error = rng.standard_normal(x.shape) * noise.get(name, 0) / x.shape[-1] ** 0.5
        grads[name] = np.asarray(x + error).astype(case.dtype)

    def check(edited: Any) -> Any:
        return soak_checks.check_gradients(case, edited, inputs, 0, saved=saved)

    check(grads)
    wrong = {}
    for name in MAIN:
        off = grads[name].astype(np.float64)
        off[1, :, 1] *= 1.01
        wrong[f"1 % of a head of d{name}"] = {**grads, name: off.astype(case.dtype)}
        turned = grads[name].copy()
        turned[0, [0, 1], 0] = turned[0, [1, 0], 0]
        if (turned != grads[name]).any():
            wrong[f"two rows of d{name} mixed up"] = {**grads, name: turned}
    accepted = []
    for what, edited in wrong.items():
        with contextlib.suppress(AssertionError):
            check(edited)
            accepted.append(what)
    assert accepted == []


def test_noise_is_beyond_the_limit_for_huge_logits_only() -> None:
    """Where float32 sums of them cost probabilities, and so every gradient."""

    def relative(scale: float) -> Any:
        case = small_case(head_dim=256, dtype="float16", data=("normal", "normal"))
        inputs = case.inputs(0)
        saved = reference.native_model(inputs, causal=case.causal, softmax_scale=scale)
        given = (inputs, *case.cotangents(0))
        options = {"causal": case.causal, "scale": scale, "saved": saved}
        options["unit"] = tolerances.F16_UNIT
        grads, noise = reference_gradients.exact_and_noise(*given, **options)
        norms = {n: np.linalg.norm(x, axis=(1, 3)) for n, x in noise.items()}
        return [(norms[n] / np.linalg.norm(grads[n], axis=(1, 3))).max() for n in MAIN]

    assert tolerances.NOISE * max(relative(1 / 16)) < tolerances.BACKWARD_F16.rel_l2 / 2
    assert tolerances.NOISE * min(relative(2e3 / 16)) > tolerances.BACKWARD_F16.rel_l2


def test_a_gradient_below_the_normal_numbers_may_be_off_by_their_steps() -> None:
    """dquery of a tiny softmax_scale, in float16: rounding alone is more than the limit."""
    own = {"batch": 1, "seqlen_q": 1, "seqlen_k": 3, "heads_kv": 1, "group": 1, "scale": "tiny"}
    case = small_case(dtype="float16", data=("normal", "normal"), causal=None, **own)
    inputs, scale = case.inputs(0), case.softmax_scale()
    saved = reference.native_model(inputs, causal=None, softmax_scale=scale)
    dout, dlogsumexp = (0.005 * x for x in case.cotangents(0))
    grads = reference_gradients.exact(
        inputs, dout, dlogsumexp, causal=None, scale=scale, saved=saved
    )
    rounded = {name: x.astype(np.float16) for name, x in grads.items()}
    error = tolerances.rel_l2(rounded["query"], grads["query"])
    assert error > tolerances.BACKWARD_F16.rel_l2

    def check(edited: Any) -> Any:
        small = SimpleNamespace(
            **{f: getattr(case, f) for f in ("gradient", "is_empty", "dtype", "head_dim")},
            causal=None, softmax_scale=case.softmax_scale, cotangents=lambda _: (dout, dlogsumexp),
        )  # fmt: skip
        return soak_checks.check_gradients(small, edited, inputs, 0, saved=saved)

    check(rounded)
    for name, place in (("query", 2.0**-24), ("value", 0.0)):
        wrong = (rounded[name] * 1.02 + 2 * place).astype(np.float16)
        with pytest.raises(AssertionError, match=f"d{name}"):
            check({**rounded, name: wrong})


@pytest.mark.parametrize(
    "own",
    [
        {"presets": ("fast",)},
        # The keys lose a bit.
        {"presets": ("e5m2 fast",), "stored": ("e5m2", "e4m3", "e5m2"), "descale": "scalar"},
    ],
)
def test_the_forward_limit_knows_what_rounding_may_cost_a_head(own: dict[str, Any]) -> None:
    """Of two keys the model may be exact by chance; of ordinary heads it is the expected error."""
    (preset,) = own["presets"]
    for lengths, low, high in (((2, 2), 0.0, 3.0), ((37, 53), 0.5, 1.5)):
        lengths_of_case = {"seqlen_q": lengths[0], "seqlen_k": lengths[1]}
        case = small_case(**lengths_of_case, data=("normal", "normal"), **own)
        inputs, options = case.inputs(0), {"causal": case.causal, "softmax_scale": None}
        exact = reference.exact(inputs, **options)
        model = reference.model_of(case.options(preset), inputs, **options)
        noise, _ = soak_checks.expected_rounding(case, preset, inputs)
        share = tolerances.rel_l2(model.out, exact.out) / noise
        assert (share >= low).all()
        assert (share <= high).all()


def test_one_rounding_may_decide_a_head_of_two_keys() -> None:
    """Both P may be off by half a step of e4m3, one up and one down, and by no more."""
    two: dict[str, Any] = {"batch": 4, "seqlen_q": 2, "seqlen_k": 2, "causal": "top_left"}
    case = small_case(**two, presets=("bare",), stored=("e4m3", "e5m2", "e5m2"))
    inputs = case.inputs(0)
    exact = reference.exact(inputs, causal=case.causal)
    model = reference.model_of(case.options("bare"), inputs, causal=case.causal, softmax_scale=None)
    _, errors = soak_checks.expected_rounding(case, "bare", inputs)
    np.testing.assert_allclose(errors, 1)
    # With P and 1 - P of out = P a + (1 - P) b, relative errors of +e and -e.
    value = np.repeat(inputs["value"].astype(np.float64), case.group, axis=2)
    descale = reference.descale(inputs, "value_descale")
    value *= np.repeat(descale, case.group, axis=1)[:, None, :, None]
    away = value[:, 0] - value[:, 1]
    last = exact.out[:, 1]
    p = ((last - value[:, 1]) * away).sum(-1) / (away**2).sum(-1)

    def check(e: float) -> None:
        out = exact.out.copy()
        moved = p * (1 + e) / (1 + e * (2 * p - 1))
        out[:, 1] = value[:, 1] + moved[..., None] * away
        result = reference.Result(out.astype(model.out.dtype), np.float32(model.logsumexp))
        soak_checks.check_forward(case, "bare", result, inputs, exact)

    for sign in (1, -1):
        check(sign / 16)
        with pytest.raises(AssertionError, match="error"):
            check(sign / 8)
    ordinary = small_case(presets=("bare",))
    _, errors = soak_checks.expected_rounding(ordinary, "bare", ordinary.inputs(0))
    assert (errors > 4).all()  # twice the expected error, as ever


def test_descales_are_the_quotients_of_the_kernels() -> None:
    amax = np.random.default_rng(0).uniform(1, 8, 1000).astype(np.float32)
    amax[0] = 0
    found, inverse = (
        np.asarray(x) for x in jax.jit(soak_checks.quotient_factors, static_argnums=1)(amax, 448.0)
    )
    np.testing.assert_array_equal(found[1:], amax[1:] / np.float32(448))
    assert (found[0], inverse[0]) == (1, 1)
    product = amax[1:] * np.float32(1 / 448)
    assert (found[1:] != product).mean() > 0.1  # what the XLA path has


def test_means_are_the_quotients_of_the_kernels() -> None:
    """A key without the mean of three is often a tie of e4m3, and must stay one."""
    keys = np.random.default_rng(0).standard_normal((4, 3, 4, 256)).astype(cases.BFLOAT16)
    keys = keys.astype(np.float32)

    centred = jax.jit(lambda x: x - soak_checks.quotient_mean(x, None)[:, None])(keys)
    expected = keys - (keys.sum(axis=1) / np.float32(3))[:, None]
    np.testing.assert_array_equal(centred, expected)
    # What XLA may compute instead: the difference from the sum times 1 / 3, rounded once.
    third = np.float64(np.float32(1 / 3))
    fused = (keys - keys.sum(axis=1, dtype=np.float64)[:, None] * third).astype(np.float32)
    moved = fused.astype(cases.E4M3) != expected.astype(cases.E4M3)
    assert moved.mean() > 1e-3


def test_few_values_are_read_back_by_the_kernels_steps() -> None:
    """Within float32 of XLA's, whose ties of bfloat16 may lie on the other side."""
    own = {"presets": ("native", "unrotated"), "gradient": "unrotated", "dtype": "float16"}
    case = small_case(seqlen_q=3, seqlen_k=3, **own)
    main = {n: jnp.asarray(case.inputs(0)[n].astype(np.float32)) for n in MAIN}
    config, _ = _explain.plan_of("attention", *main.values(), **case.options("unrotated"))
    found = _fp8_model.effective_operands(_fold.fold_operands(*main.values()), config)
    assert found.value_mean is not None
    of_xla = np.asarray(found.value + found.value_mean[:, None])
    read_back = reference_gradients._read_back(main, config)
    room = 2.0**-21 * np.abs(of_xla).max()
    np.testing.assert_allclose(read_back, of_xla, rtol=0, atol=room)
    exact = np.abs(read_back - np.asarray(main["value"])) <= room
    assert exact.mean() > 0.05  # the roundings of three keys cancel
    ties = read_back.view(np.uint32) % 2**16 == 2**15
    assert ties.any()


def test_a_row_without_a_number_may_move_other_rows_by_rounding_only() -> None:
    case = small_case(dtype="float16", spoiled=("query", np.nan))
    inputs = case.inputs(0)
    clean = reference.native_model(inputs, causal=case.causal)
    bad_inputs = soak_cases.spoil(case, inputs)
    batch, position, head, _ = soak_cases.place(case)
    out, logsumexp = clean.out.copy(), clean.logsumexp.copy()
    out[batch, position, head] = np.nan
    logsumexp[batch, head, position] = np.nan
    assert np.isnan(bad_inputs["query"][batch, position, head]).any()
    change = np.random.default_rng(0).standard_normal(out.shape)

    def check(by: float) -> None:
        moved = (out * (1 + by * change)).astype(out.dtype)
        bad = reference.Result(moved, logsumexp)
        soak_checks.check_spoiled(case, "native", bad, clean, is_kernel=True)

    check(2.0**-12)
    with pytest.raises(AssertionError, match="changed by"):
        check(2e-3)


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
