"""precision="fp8" on the XLA path against the NumPy model, and what the model promises."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import pytest
import tolerances
from oracle import helpers
from oracle import numpy_reference as oracle

import jax_fa3

F32 = np.dtype(np.float32)
# What the NumPy model takes beside the quantised operands.
RULES = frozenset(cases.Case("defaults").__dataclass_fields__) | {
    *("query_segment_ids", "key_segment_ids", "query_seqlens", "key_seqlens"),
    *("mask", "sinks", "bias"),
}


def check(
    inputs: dict[str, Any],
    options: dict[str, Any],
    to_model: tolerances.Limit,
    to_exact: tolerances.Limit | None,
    **quantize: Any,
) -> None:
    """Compares with the NumPy model on the package's operands (those have tests of their own)."""
    arguments = {**inputs, **options}
    quantization = jax_fa3.Quantization(**quantize)
    out, logsumexp, operands = helpers.attend_and_operands(**arguments, quantization=quantization)
    rules = {n: x for n, x in arguments.items() if n in RULES}
    linear = quantization.softmax == "linear"
    expected = oracle.attention_fp8(operands, linear=linear, **rules)
    tolerances.check_close(out, expected[0], to_model)
    tolerances.check_logsumexp(logsumexp, expected[1], to_model)
    if to_exact is not None:
        expected = oracle.attention(**arguments)
        tolerances.check_close(out, expected[0], to_exact)
        tolerances.check_logsumexp(logsumexp, expected[1], to_exact)


@pytest.mark.parametrize("name", [case.name for case in cases.CASES])
def test_every_case(name: str) -> None:
    case = cases.by_name(name)
    check(
        cases.make_inputs(case, F32),
        case.options(),
        tolerances.FP8_AGAINST_MODEL_F32,
        tolerances.FP8_AGAINST_EXACT,
    )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("causal", cases.BFLOAT16), ("d128", cases.FLOAT16)),
        *(("causal", cases.E4M3), ("everything", cases.E4M3), ("d128", cases.E5M2)),
    ],
)
def test_other_input_kinds(name: str, dtype: np.dtype) -> None:
    """Descales differ per (batch, kv head) and are far from 1."""
    case = cases.by_name(name)
    check(
        cases.make_inputs(case, dtype),
        case.options(),
        tolerances.FP8_AGAINST_MODEL_BF16,
        tolerances.FP8_AGAINST_EXACT,
    )


def test_mixed_kinds() -> None:
    """Float8 kinds may differ, and a 16-bit query may meet float8 keys and values."""
    case = cases.by_name("causal")
    narrow, other = (cases.make_inputs(case, t) for t in (cases.E4M3, cases.E5M2))
    wide = cases.make_inputs(case)
    mixes = [
        {**narrow, "key": other["key"], "key_descale": other["key_descale"]},
        {n: x for n, x in {**narrow, "query": wide["query"]}.items() if n != "query_descale"},
    ]
    limits = (tolerances.FP8_AGAINST_MODEL_BF16, tolerances.FP8_AGAINST_EXACT)
    for inputs in mixes:
        check(inputs, case.options(), *limits)


def test_descale_shapes() -> None:
    """Scalar, [num_heads_kv] and [batch, num_heads_kv] mean the same numbers."""
    inputs = cases.make_inputs(cases.by_name("plain"), cases.E4M3)
    descales = {n: x for n, x in inputs.items() if n.endswith("descale")}
    rest = {n: x for n, x in inputs.items() if n not in descales}
    per_head = {n: x[0] for n, x in descales.items()}
    full = {n: np.broadcast_to(x, (2, 3)) for n, x in per_head.items()}
    a, b = helpers.attend(**rest, **per_head), helpers.attend(**rest, **full)
    np.testing.assert_array_equal(a[0], b[0])
    scalar = dict.fromkeys(descales, 0.5)
    full = {n: np.full((2, 3), 0.5, np.float32) for n in descales}
    a, b = helpers.attend(**rest, **scalar), helpers.attend(**rest, **full)
    np.testing.assert_array_equal(a[0], b[0])


@pytest.mark.parametrize("name", ["d128_causal", "sinks_causal"])
def test_linear_softmax(name: str) -> None:
    case = cases.by_name(name)
    limits = (tolerances.FP8_AGAINST_MODEL_F32, tolerances.FP8_LINEAR_AGAINST_EXACT)
    check(cases.make_inputs(case, F32), case.options(), *limits, softmax="linear")


def test_e5m2_images() -> None:
    case = cases.by_name("causal")
    inputs = cases.make_inputs(case, F32)
    check(inputs, case.options(), tolerances.FP8_AGAINST_MODEL_F32, None, dtype="e5m2")


@pytest.mark.parametrize("center_value", [True, False])
@pytest.mark.parametrize("seqlen_k", [4096, 131072])
def test_constant_values_come_back(seqlen_k: int, center_value: bool) -> None:
    """value = 1 gives 1 however many keys there are: the row sum is that of rounded P."""
    rng = np.random.default_rng(seqlen_k)
    query = rng.normal(size=(1, 5, 2, 64)).astype(cases.BFLOAT16)
    key = rng.normal(size=(1, seqlen_k, 1, 64)).astype(cases.BFLOAT16)
    value = np.ones((1, seqlen_k, 1, 16), cases.BFLOAT16)
    for softmax in ("exact", "linear"):
        quantization = jax_fa3.Quantization(center_value=center_value, softmax=softmax)
        out, _ = helpers.attend(query=query, key=key, value=value, quantization=quantization)
        np.testing.assert_allclose(out.astype(F32), 1.0, atol=4e-3)


def test_error_does_not_grow_with_keys() -> None:
    """Alternating values plus a needle, 4k against 64k keys."""
    errors = []
    for seqlen_k in (4096, 65536):
        rng = np.random.default_rng(1)
        query = rng.normal(size=(1, 4, 1, 64)).astype(F32)
        key = rng.normal(size=(1, seqlen_k, 1, 64)).astype(F32)
        key[0, seqlen_k // 3, 0] = query[0, 0, 0] * 3
        value = np.where(np.arange(seqlen_k) % 2, 1.0, -1.0)[None, :, None, None]
        value = np.broadcast_to(value, (1, seqlen_k, 1, 16)).astype(F32).copy()
        value[0, seqlen_k // 3] = 8.0
        out, _ = helpers.attend(query=query, key=key, value=value)
        logits = np.einsum("bqhd,bkhd->bqk", query.astype(np.float64), key) * 64**-0.5
        p = np.exp(logits - logits.max(-1, keepdims=True))
        expected = (p / p.sum(-1, keepdims=True)) @ value[0, :, 0].astype(np.float64)
        errors.append(np.abs(out[:, :, 0] - expected).max())
        # The needle is found.
        assert abs(out[0, 0, 0, 0] - expected[0, 0, 0]) < 0.05 * abs(expected[0, 0, 0])
    assert errors[1] < 2 * errors[0] + 0.02


@pytest.mark.parametrize(("keys", "logit"), [(8192, 9), (16_384, 9.7)])
def test_many_keys_count_beside_one_that_leads(keys: int, logit: float) -> None:
    """Each has 2^-13 or 2^-14 of the leader's probability, together they weigh as much."""
    inputs = cases.led_by_one_key(rows=20, keys=keys, head_dim=64, logit=logit)
    inputs = {name: x.astype(F32) for name, x in inputs.items()}
    exact, _ = oracle.attention(**inputs)
    for preset, limit in tolerances.AGAINST_EXACT.items():
        quantization = getattr(jax_fa3.Quantization, preset)()
        out, _ = helpers.attend(**inputs, quantization=quantization)
        tolerances.check_close(out, exact, limit)


@pytest.mark.parametrize("distribution", ["outlier", "biased"])
def test_accurate_beats_the_plain_presets(distribution: str) -> None:
    """Rotation, smoothing and fine scales pay where data is not Gaussian."""
    case = cases.Case("presets", seqlen_q=32, seqlen_k=512, head_dim=64)
    inputs = cases.make_inputs(case, F32, distribution=distribution)
    expected, _ = oracle.attention(**inputs)
    presets = ("accurate", "fast", "block", "per_tensor")
    error = {}
    for preset in presets:
        quantization = getattr(jax_fa3.Quantization, preset)()
        out, _ = helpers.attend(**inputs, quantization=quantization)
        error[preset] = float(np.linalg.norm(out - expected) / np.linalg.norm(expected))
    assert error["accurate"] < 0.9 * error["per_tensor"]
    assert error["accurate"] < error["fast"] < 2 * error["accurate"] + 0.05
    assert error["block"] < 1.1 * error["per_tensor"]
    assert error["per_tensor"] < 0.25


@pytest.mark.parametrize("preset", ["accurate", "fast", "block", "per_tensor"])
def test_large_logits(preset: str) -> None:
    """Logits to +-1e4: each row takes the value of its key; near -1e4 all stays finite."""
    rng = np.random.default_rng(6)
    key = rng.normal(size=(2, 96, 2, 64)).astype(F32)
    value = rng.normal(size=(2, 96, 2, 16)).astype(F32)
    places = rng.permutation(96)[:40]
    own = key[:, places]
    query = 1e4 * 64**0.5 * own / (own**2).sum(axis=-1, keepdims=True)
    # In the second batch every query opposes a mean that the keys share.
    key[1] += 4
    query[1] = -1e4 * 64**0.5 / (4 * 64)
    quantization = getattr(jax_fa3.Quantization, preset)()
    out, logsumexp = helpers.attend(query=query, key=key, value=value, quantization=quantization)
    assert np.abs(out[0] - value[0, places]).max() < 0.25
    assert np.abs(logsumexp[0] - 1e4).max() < 400  # operands lose up to 2^-4 each
    assert np.abs(out[1]).max() <= 1.07 * np.abs(value[1]).max()
    assert np.isfinite(logsumexp[1]).all()
    assert (logsumexp[1] < -4000).all()


def test_every_step_can_be_switched_off() -> None:
    case = cases.by_name("sinks_causal")
    inputs = cases.make_inputs(case, F32)
    exact, exact_logsumexp = oracle.attention(**inputs, **case.options())
    for options in (
        {"smooth_key": False},
        {"center_value": False},
        {"hadamard": False},
        {"smooth_key": False, "center_value": False, "hadamard": True},
    ):
        quantization = jax_fa3.Quantization(**options)
        out, logsumexp = helpers.attend(**inputs, **case.options(), quantization=quantization)
        tolerances.check_close(out, exact, tolerances.FP8_AGAINST_EXACT)
        tolerances.check_logsumexp(logsumexp, exact_logsumexp, tolerances.FP8_AGAINST_EXACT)
