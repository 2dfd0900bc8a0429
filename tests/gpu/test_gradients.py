"""Gradients through the kernels' custom_vjp on CUDA arrays, against float64."""

from __future__ import annotations

from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from gpu import reference
from oracle import numpy_reference as oracle

gpu = pytest.mark.gpu
MAIN = ("query", "key", "value")
PRESETS = ("accurate", "native")
LIMITS = {"accurate": tolerances.GRADIENT_FP8, "native": tolerances.GRADIENT_NATIVE_BF16}


def cotangents_of(inputs: dict[str, Any]) -> tuple[Any, Any]:
    """(dout, dlogsumexp), float32, normal."""
    rng = np.random.default_rng(11)
    batch, rows, heads, _ = inputs["query"].shape
    dout = rng.normal(size=inputs["query"].shape).astype(np.float32)
    return dout, rng.normal(size=(batch, heads, rows)).astype(np.float32)


def gradients(
    inputs: dict[str, Any], cotangents: Any, *, causal: str | None, preset: str
) -> dict[str, Any]:
    """Of <out, dout> + <logsumexp, dlogsumexp> (rows without keys left out of the second)."""

    def loss(x: dict[str, Any]) -> Any:
        out, logsumexp = reference.attend(x, causal=causal, **reference.PRESETS[preset])
        finite = jnp.where(jnp.isneginf(logsumexp), 0.0, logsumexp)
        return jnp.sum(out.astype(jnp.float32) * cotangents[0]) + jnp.sum(finite * cotangents[1])

    return jax.grad(loss)(inputs)


def expected_gradients(inputs: dict[str, Any], cotangents: Any, causal: str | None) -> Any:
    masks = {} if causal is None else {"is_causal": True, "causal_alignment": causal}
    main = (inputs[n] for n in MAIN)
    scale = inputs.get("softmax_scale")
    return oracle.attention_gradients(*main, *cotangents, softmax_scale=scale, **masks)


@gpu
@pytest.mark.parametrize(
    ("causal", "size", "head_dim"),
    [
        (None, (131, 77), 64),
        ("bottom_right", (77, 131), 128),
        ("bottom_right", (131, 77), 64),  # rows without keys
        ("top_left", (131, 77), 64),
    ],
)
def test_against_float64(causal: str | None, size: tuple[int, int], head_dim: int) -> None:
    """Group sums of dk and dv, dlogsumexp, both precisions in one program."""
    case = cases.Case("gradient", seqlen_q=size[0], seqlen_k=size[1], num_heads_q=8,
                      num_heads_kv=2, head_dim=head_dim)  # fmt: skip
    inputs = cases.make_inputs(case)
    inputs["softmax_scale"] = np.float32(0.11)
    cotangents = cotangents_of(inputs)

    def every(x: dict[str, Any], cotangents: Any) -> Any:
        return {p: gradients(x, cotangents, causal=causal, preset=p) for p in PRESETS}

    results = reference.run(every, inputs, cotangents)
    expected = expected_gradients(inputs, cotangents, causal)
    for preset, grads in results.items():
        for name in MAIN:
            assert grads[name].dtype == cases.BFLOAT16
            tolerances.check_close(grads[name], expected[name], LIMITS[preset])
        slope, exact = grads["softmax_scale"], expected["softmax_scale"]
        # A sum of terms of both signs: compared with its size on the scale of dq's norm.
        scale = np.linalg.norm(expected["query"]) * np.linalg.norm(
            inputs["query"].astype(np.float64)
        )
        assert abs(slope - exact) <= LIMITS[preset].rel_l2 * scale, (preset, slope, exact)
        if causal == "bottom_right" and size[0] > size[1]:
            assert (grads["query"][:, : size[0] - size[1]] == 0).all()


@gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_against_finite_differences(head_dim: int) -> None:
    """Along random directions, of float64 attention: no formula of gradients."""
    case = cases.Case("differences", batch=1, seqlen_q=9, seqlen_k=13, num_heads_q=4,
                      num_heads_kv=2, head_dim=head_dim)  # fmt: skip
    inputs = cases.make_inputs(case, np.float16)
    dout, dlogsumexp = cotangents_of(inputs)
    grads = reference.run(
        lambda x: gradients(x, (dout, dlogsumexp), causal="bottom_right", preset="native"), inputs
    )

    def loss(x: dict[str, Any]) -> float:
        out, logsumexp = reference.exact(x, causal="bottom_right")
        return float((out * dout).sum() + (logsumexp * dlogsumexp).sum())

    rng = np.random.default_rng(3)
    exact = {name: inputs[name].astype(np.float64) for name in MAIN}
    for name in MAIN:
        for _ in range(4):
            way = rng.normal(size=exact[name].shape)
            ends = (loss({**exact, name: exact[name] + h * way}) for h in (1e-4, -1e-4))
            slope = (next(ends) - next(ends)) / 2e-4
            found = (grads[name].astype(np.float64) * way).sum()
            # A sum of terms of both signs, next to the size of a random one.
            size = np.linalg.norm(grads[name].astype(np.float64))
            assert abs(found - slope) <= 1e-2 * size, (name, found, slope, size)


@gpu
def test_one_key() -> None:
    """Softmax over one key is constant: dq and dk are 0, dv is the sum of dout."""
    sizes = (1, 2, 17)
    many = [
        cases.make_inputs(
            cases.Case(f"one key {q}", seqlen_q=q, seqlen_k=1, num_heads_q=4, num_heads_kv=2),
            np.float16,
        )
        for q in sizes
    ]
    cotangents = [(dout, np.zeros_like(dlse)) for dout, dlse in map(cotangents_of, many)]

    def every(many: Any, cotangents: Any) -> Any:
        return {
            p: [
                gradients(x, c, causal=None, preset=p)
                for x, c in zip(many, cotangents, strict=True)
            ]
            for p in PRESETS
        }

    for grads_of in reference.run(every, many, cotangents).values():
        for grads, (dout, _) in zip(grads_of, cotangents, strict=True):
            assert np.abs(grads["query"].astype(np.float64)).max() <= 1e-5
            assert np.abs(grads["key"].astype(np.float64)).max() <= 1e-5
            sums = dout.sum(axis=1).reshape(2, 2, 2, 64).sum(axis=2)[:, None]
            np.testing.assert_allclose(
                grads["value"].astype(np.float64), sums, rtol=8e-3, atol=4e-2
            )  # bfloat16 after an FP8 forward: up to 34 values of dout, and the sum, lose 2^-9 each


@gpu
def test_large_inputs() -> None:
    """Three and ten times normal inputs keep the gradients finite."""
    case = cases.Case("large", seqlen_q=500, seqlen_k=500, num_heads_q=4, num_heads_kv=2,
                      head_dim=128)  # fmt: skip
    inputs = cases.make_inputs(case, np.float16, distribution="normal")
    cotangents = cotangents_of(inputs)

    def every(x: dict[str, Any], cotangents: Any) -> Any:
        return {
            (p, factor): gradients(
                {n: (a * factor).astype(a.dtype) for n, a in x.items()},
                cotangents,
                causal="bottom_right",
                preset=p,
            )
            for p in PRESETS
            for factor in (3, 10)
        }

    for case_name, grads in reference.run(every, inputs, cotangents).items():
        for name, g in grads.items():
            assert np.isfinite(g.astype(np.float32)).all(), (case_name, name)
            assert (g != 0).any(), (case_name, name)


def test_limit_of_bfloat16_rejects() -> None:
    """Zeros, a factor of 1.1, swapped heads or batches, no sum over the group, lost dlogsumexp."""
    case = cases.Case("rejects", seqlen_q=11, seqlen_k=17, num_heads_q=8, num_heads_kv=2)
    inputs = cases.make_inputs(case)
    dout, dlogsumexp = cotangents_of(inputs)
    expected = expected_gradients(inputs, (dout, dlogsumexp), None)
    lost = expected_gradients(inputs, (dout, np.zeros_like(dlogsumexp)), None)
    causal = expected_gradients(inputs, (dout, dlogsumexp), "bottom_right")
    part = dout * (np.arange(8) % 4 != 3)[:, None]
    ungrouped = expected_gradients(inputs, (part, dlogsumexp), None)
    for name in MAIN:
        g = expected[name]
        wrong = [np.zeros_like(g), 1.1 * g, g[:, :, ::-1], g[::-1], causal[name]]
        wrong += [] if name == "query" else [ungrouped[name]]
        wrong += [] if name == "value" else [lost[name]]
        tolerances.check_close(g.astype(cases.BFLOAT16), g, tolerances.GRADIENT_NATIVE_BF16)
        for x in wrong:
            with pytest.raises(AssertionError):
                tolerances.check_close(x, g, tolerances.GRADIENT_NATIVE_BF16)
