"""merge_attention: exact over any split of the keys, empty parts, gradients."""

from __future__ import annotations

import itertools
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from oracle import helpers
from oracle import numpy_reference as oracle

import jax_fa3

F32 = np.dtype(np.float32)
CASE = cases.Case("merge", seqlen_q=7, seqlen_k=20, head_dim=16, head_dim_v=24)


def parts_of(inputs: dict[str, Any], edges: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
    outs, logsumexps = [], []
    for start, stop in itertools.pairwise(edges):
        part = {n: x if n == "query" else x[:, start:stop] for n, x in inputs.items()}
        out, logsumexp = oracle.attention(**part)
        outs.append(out.astype(np.float32))
        logsumexps.append(logsumexp.astype(np.float32))
    return outs, logsumexps


@pytest.mark.parametrize("edges", [(0, 20), (0, 11, 20), (0, 0, 3, 3, 17, 20, 20)])
def test_any_split(edges: tuple[int, ...]) -> None:
    inputs = cases.make_inputs(CASE, F32)
    out, logsumexp = jax_fa3.merge_attention(*parts_of(inputs, edges))
    expected, expected_logsumexp = oracle.attention(**inputs)
    tolerances.check_close(out, expected, tolerances.NATIVE_F32)
    tolerances.check_logsumexp(logsumexp, expected_logsumexp, tolerances.NATIVE_F32)


def test_two_empty_parts_are_empty() -> None:
    garbage = np.full((2, 7, 6, 24), np.nan, cases.BFLOAT16)
    nothing = np.full((2, 6, 7), -np.inf, np.float32)
    out, logsumexp = jax_fa3.merge_attention([garbage, garbage], [nothing, nothing])
    assert out.dtype == cases.BFLOAT16
    assert (np.asarray(out) == 0).all()
    assert np.isneginf(logsumexp).all()


def test_far_apart_parts() -> None:
    """A part that outweighs the other by e^200 is the result; nothing overflows."""
    a, b = np.full((1, 3, 2, 4), 2.0, np.float32), np.full((1, 3, 2, 4), 7.0, np.float32)
    low, high = np.full((1, 2, 3), -100.0, np.float32), np.full((1, 2, 3), 100.0, np.float32)
    out, logsumexp = jax_fa3.merge_attention([a, b], [low, high])
    np.testing.assert_array_equal(out, b)
    np.testing.assert_array_equal(logsumexp, high)


def test_gradients() -> None:
    """Through out and logsumexp of both parts; empty rows and parts give 0, never NaN."""
    inputs = cases.make_inputs(CASE, F32)
    outs, logsumexps = parts_of(inputs, (0, 9, 20, 20))
    logsumexps[0][:, :, 2] = logsumexps[1][:, :, 2] = -np.inf
    rng = np.random.default_rng(4)
    c_out = rng.normal(size=outs[0].shape).astype(np.float32)
    c_lse = rng.normal(size=logsumexps[0].shape).astype(np.float32)

    def loss(outs: Any, logsumexps: Any) -> Any:
        out, logsumexp = jax_fa3.merge_attention(outs, logsumexps)
        finite = jnp.where(jnp.isneginf(logsumexp), 0.0, logsumexp)
        return jnp.sum(out * c_out) + jnp.sum(finite * c_lse)

    outs, logsumexps = jax.tree.map(jnp.asarray, (outs, logsumexps))
    d_outs, d_lses = jax.jit(jax.grad(loss, (0, 1)))(outs, logsumexps)
    out, logsumexp = (np.asarray(x, np.float64) for x in jax_fa3.merge_attention(outs, logsumexps))
    seen = ~np.isneginf(logsumexp)
    assert (seen.sum(axis=2) == 6).all()
    for i in range(3):
        level = np.where(seen, np.asarray(logsumexps[i]) - np.where(seen, logsumexp, 0), -np.inf)
        share = np.exp(level)
        wide = share.swapaxes(1, 2)[..., None]
        np.testing.assert_allclose(d_outs[i], wide * c_out, rtol=1e-5, atol=1e-6)
        inner = (c_out * (np.asarray(outs[i]) - out)).sum(-1).swapaxes(1, 2)
        np.testing.assert_allclose(d_lses[i], share * (inner + c_lse), rtol=1e-4, atol=1e-5)


def test_parts_of_the_package() -> None:
    inputs = cases.make_inputs(CASE, F32)
    halves = [
        helpers.attend(
            **{n: x if n == "query" else x[:, s] for n, x in inputs.items()}, precision="native"
        )
        for s in (slice(0, 8), slice(8, 20))
    ]
    out, _ = jax_fa3.merge_attention([h[0] for h in halves], [h[1] for h in halves])
    expected, _ = oracle.attention(**inputs)
    tolerances.check_close(out, expected, tolerances.NATIVE_F32)
