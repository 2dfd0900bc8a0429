"""What soak.py finds wrong in a case's first runs, next to the references of the GPU tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import cases
import jax
import jax.numpy as jnp
import numpy as np
import tolerances
from gpu import reference, reference_gradients
from gpu.reference import MAIN, Result
from gpu.soak_cases import FP8, UNMODELLED, Case, place
from gpu.soak_program import Program

from jax_fa3 import _fp8_model, _quantize

Notes = dict[str, float]


def check(program: Program) -> tuple[list[tuple[str, Notes]], list[str]]:
    """(kind, measured quantities) of every check of the first runs, and what failed."""
    case = program.case
    notes: list[tuple[str, Notes]] = []
    failed: list[str] = []

    def attempt(what: str, kind: str, test: Callable[[], Notes]) -> None:
        try:
            notes.append((kind, test()))
        except AssertionError as error:
            failed.append(f"{what}: {error}")

    for draw in range(len(case.data)):
        found, grads = program.first[draw]
        inputs, scale = program.host[draw], case.softmax_scale()
        exact = reference.exact(inputs, causal=case.causal, softmax_scale=scale)
        for preset, result in found.items():
            attempt(
                f"draw {draw}, {preset}", case.kind(preset),
                lambda p=preset, r=result, x=inputs, e=exact: check_forward(case, p, r, x, e),
            )  # fmt: skip
        if grads is not None:
            attempt(
                f"draw {draw}, gradient of {case.gradient}",
                case.kind(str(case.gradient), gradient=True),
                lambda g=grads, x=inputs, d=draw, s=found[case.gradient]: check_gradients(
                    case, g, x, d, saved=s if program.is_kernel else None
                ),
            )  # fmt: skip
    if case.spoiled is not None and not case.is_empty:
        (clean, _), (bad, _) = program.first[0], program.first[-1]
        for preset in case.presets:
            attempt(
                f"{case.spoiled[1]} in {case.spoiled[0]}, {preset}", "one number not finite",
                lambda p=preset: check_spoiled(
                    case, p, bad[p], clean[p], is_kernel=program.is_kernel
                ),
            )  # fmt: skip
    return notes, failed


def check_forward(case: Case, preset: str, result: Result, inputs: Any, exact: Result) -> Notes:
    """Near float64 and the model, or, for logits beyond the model, sane."""
    out, logsumexp = result
    wide = inputs["query"].dtype.itemsize == 2
    expected = inputs["query"].dtype if wide else cases.BFLOAT16
    if out.dtype != expected or logsumexp.dtype != np.float32:
        raise AssertionError(f"dtypes {out.dtype}, {logsumexp.dtype}; expected {expected}, float32")
    if case.is_empty:
        for x, like, value in ((out, exact.out, 0), (logsumexp, exact.logsumexp, -np.inf)):
            if x.shape != like.shape or not (x.astype(np.float32) == value).all():
                raise AssertionError(f"an empty call gave {x.shape}, not {like.shape} of {value}")
        return {}
    limit = tolerances.SOAK_NATIVE if preset == "native" else tolerances.SOAK_FP8
    model = reference.model_of(
        case.options(preset), inputs, causal=case.causal, softmax_scale=case.softmax_scale()
    )
    if case.scale in UNMODELLED:
        return _check_large(case, preset, result, inputs, exact if preset == "native" else model)
    if preset == "native":
        return tolerances.check_kernel(result, exact, model, limit)
    rounding = expected_rounding(case, preset, inputs)
    return tolerances.check_kernel(result, exact, model, limit, rounding)


def expected_rounding(case: Case, preset: str, inputs: Any) -> Any:
    """What rounding is expected to cost each head of an FP8 forward, and in how many errors."""
    steps = FP8[preset]
    # e4m3 has a bit that e5m2 has not: such inputs are rounded as 16-bit ones are.
    rounded = {
        name: inputs[name].astype(cases.BFLOAT16)
        for name in MAIN
        if steps.dtype == "e5m2" and inputs[name].dtype == cases.E4M3
    }
    return reference.fp8_noise(
        {**inputs, **rounded}, causal=case.causal, softmax_scale=case.softmax_scale(),
        p_unit=tolerances.LINEAR_P_UNIT if steps.softmax == "linear" else tolerances.P_UNIT,
        operand_unit=tolerances.FP8_UNITS[steps.dtype],
    )  # fmt: skip


def _check_large(case: Case, preset: str, result: Result, inputs: Any, expected: Result) -> Notes:
    """logsumexp next to the largest possible logit; out: 16-bit ones near, FP8 among the values."""
    out, logsumexp = (np.asarray(x, np.float64) for x in result)
    seen = np.isfinite(expected.logsumexp)
    if not np.array_equal(np.isneginf(logsumexp), ~seen):
        raise AssertionError("logsumexp -inf stands at other places than expected")
    if not (np.isfinite(out).all() and np.isfinite(logsumexp[seen]).all()):
        raise AssertionError("large logits gave numbers that are not finite")
    query, key, value = (inputs[name].astype(np.float64) for name in MAIN)
    factor = abs(case.softmax_scale() or 0) * reference.descale(inputs, "query_descale")
    factor = np.abs(factor * reference.descale(inputs, "key_descale"))
    keys = np.linalg.norm(key, axis=-1).max(1) * factor  # [batch, heads_kv]
    queries = np.linalg.norm(query, axis=-1).max(1)  # [batch, heads_q]
    size = 1 + (queries * np.repeat(keys, case.group, axis=1))[:, :, None]
    away = np.abs(np.where(seen, logsumexp - np.where(seen, expected.logsumexp, 0), 0))
    if preset == "native":
        error = tolerances.rel_l2(out, expected.out).max()
        bounds = {"large_out": (error, 2.0**-6), "large_logsumexp": ((away / size).max(), 1e-5)}
    else:
        value *= reference.descale(inputs, "value_descale")[:, None, :, None]
        value = np.repeat(value, case.group, axis=2)
        low, high = (np.minimum(value.min(1), 0), np.maximum(value.max(1), 0))
        room = np.maximum(high, -low)
        beyond = np.maximum(out - high[:, None], low[:, None] - out)
        beyond = (beyond / np.where(room == 0, 1, room)[:, None]).max()
        # e5m2 rounds a value by 1/8; f16 a score by 2^-11 of its largest partial sum.
        away = (np.maximum(away - tolerances.SOAK_FP8.logsumexp, 0) / size).max()
        bounds = {"large_beyond_values": (beyond, 0.13), "large_logsumexp": (away, 4e-3)}
    for name, (measured, bound) in bounds.items():
        if not measured <= bound:
            raise AssertionError(f"{name} {measured:.3g} > {bound:.3g}")
    return {name: float(measured) for name, (measured, _) in bounds.items()}


def check_gradients(
    case: Case, grads: dict[str, Any], inputs: Any, draw: int, saved: Result | None
) -> Notes:
    """Against float64 of the inputs (native) or of the quantised operands.

    saved: the forward's results, from which the kernels' backward starts. Where a row is peaked or
    its values have a mean, their rounding alone moves a gradient by any share of it. What it rounds
    itself is large next to a gradient that nearly cancels: that noise is estimated for each head.
    """
    for name in MAIN:
        if grads[name].dtype != inputs[name].dtype:
            raise AssertionError(f"d{name} has dtype {grads[name].dtype}")
    dout, dlogsumexp = case.cotangents(draw)
    scale = case.softmax_scale()
    noise: dict[str, Any] = {}
    if case.gradient in (None, "native") or case.is_empty:
        is_bf16 = case.dtype == "bfloat16"
        given = {"causal": case.causal, "scale": case.head_dim**-0.5 if scale is None else scale}
        limit = tolerances.BACKWARD_BF16 if is_bf16 else tolerances.BACKWARD_F16
        if saved is None:
            expected = reference_gradients.exact(inputs, dout, dlogsumexp, **given)
        else:
            unit = tolerances.BF16_UNIT if is_bf16 else tolerances.F16_UNIT
            expected, noise = reference_gradients.exact_and_noise(
                inputs, dout, dlogsumexp, **given, saved=saved, unit=unit
            )
            limit = tolerances.SOAK_BACKWARD_BF16 if is_bf16 else tolerances.BACKWARD_F16
    else:
        if saved is not None:  # the backward multiplies in bfloat16
            saved = saved._replace(out=saved.out.astype(cases.BFLOAT16))
            dout = dout.astype(cases.BFLOAT16).astype(np.float32)
        quotients = {"range_factors": quotient_factors, "_mean": quotient_mean}
        with (
            jax.default_device(jax.devices("cpu")[0]),
            mock.patch.multiple(_fp8_model, **(quotients if saved is not None else {})),
        ):
            expected, noise = reference_gradients.model(
                inputs, dout, dlogsumexp, case.causal, case.options(case.gradient), saved,
                unit=tolerances.BF16_UNIT,
            )  # fmt: skip
        limit = tolerances.GRADIENT_FP8 if saved is None else tolerances.SOAK_BACKWARD_BF16
    # The last place of a result below the normal numbers is not a share of it.
    for name, size in noise.items():
        place = float(jnp.finfo(inputs[name].dtype).smallest_subnormal)
        noise[name] = np.hypot(size, place * (case.head_dim / 12) ** 0.5)
    measured = {}
    for name in MAIN:
        try:
            tolerances.check_close(grads[name], expected[name], limit, noise=noise.get(name))
        except AssertionError as error:
            raise AssertionError(f"d{name}: {error}") from error
        measured[f"d{name}"] = float(tolerances.rel_l2(grads[name], expected[name]).max(initial=0))
    return measured


def quotient_factors(amax: Any, limit: float) -> tuple[Any, Any]:
    """(descale, inverse) of values as the kernels' quantiser has them: amax / limit, rounded once.

    The XLA path multiplies by 1 / limit, and every other descale comes out a bit apart. A code has
    4 bits, so codes times descales are often ties of bfloat16, which then go to the other side.
    That is as much as a gradient may be off where dP - delta nearly cancels.
    """
    _, inverse = _quantize.range_factors(amax, limit)
    divisor = jnp.where(amax > 0, limit, 1.0)  # of a constant XLA takes the inverse here too
    return jnp.where(amax > 0, amax / divisor, 1.0), inverse


def quotient_mean(x: Any, valid: None) -> Any:
    """Mean over the keys as the kernels' quantiser has it: their sum, divided by their number.

    The XLA path multiplies by the inverse of the number, and where a mean is subtracted at once the
    product is not even rounded. Of three keys every third sum has an exact mean, and what is left
    of a key without it has few bits: often a tie of float8, which that error takes to either side.
    """
    total = jnp.sum(jax.lax.stop_gradient(x), axis=1)
    divisor = jnp.where(jnp.isnan(total), 1.0, float(max(x.shape[1], 1)))  # not a constant to XLA
    return total / divisor


def check_spoiled(case: Case, preset: str, bad: Result, clean: Result, *, is_kernel: bool) -> Notes:
    """Who sees the number is not finite, nobody else notices more than a change of scales.

    The XLA path spoils whole rows where the 16-bit kernels spoil a channel; it is asked for less.
    """
    assert case.spoiled is not None
    operand, number = case.spoiled
    batch, position, head, channel = place(case)
    out, before = (np.moveaxis(np.asarray(x.out, np.float64), 1, 2) for x in (bad, clean))
    rows = np.zeros(out.shape[:3], bool)
    seen = reference.visible(case.seqlen_q, case.seqlen_k, case.causal)
    if operand == "query":
        rows[batch, head, position] = seen[position].any()
    else:
        heads = slice(head * case.group, (head + 1) * case.group)
        rows[batch, heads] = seen[:, position]
    others = ~rows
    if not (np.isfinite(out[others]).all() and not np.isnan(bad.logsumexp[others]).any()):
        raise AssertionError("a row that does not see the number is not finite")
    if not is_kernel:
        pass
    elif preset != "native":
        if not (np.isnan(out[rows]).all() and np.isnan(bad.logsumexp[rows]).all()):
            raise AssertionError("a row that sees the number is not NaN")
    elif operand == "value":
        if np.isfinite(out[rows][:, channel]).any():
            raise AssertionError("a row that sees the number is finite there")
        if not np.array_equal(bad.logsumexp, clean.logsumexp, equal_nan=True):
            raise AssertionError("logsumexp notices a value")
    elif np.isnan(number) and not np.isnan(out[rows]).all():
        raise AssertionError("a row that sees the number is not NaN")
    size = np.linalg.norm(before[others])
    change = float(np.linalg.norm(out[others] - before[others]) / (size or 1))
    if preset == "native":
        # A row without a base makes its warp look for bases in every block: the other rows may get
        # theirs elsewhere, and with them another rounding of P, but no more than that.
        unit = tolerances.BF16_UNIT if case.dtype == "bfloat16" else tolerances.F16_UNIT
        limit = 4 * unit
    else:
        # Means and scales leave the number out: with few keys that is another rounding.
        limit = 0.3 if "e5m2" in preset else 0.15
    if not change <= limit:
        raise AssertionError(f"rows that do not see the number changed by {change:.3g}")
    return {"change": change}
