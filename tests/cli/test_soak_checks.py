"""What tests/gpu/soak.py accepts and rejects, on results made by the models and spoiled by hand."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from gpu import reference, reference_gradients, soak_cases, soak_checks
from gpu.reference import MAIN

from jax_fa3 import _explain, _fold, _fp8_model


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
