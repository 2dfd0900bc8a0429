"""The forward kernels on long contexts and at the limits of sizes."""

from __future__ import annotations

import itertools
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from gpu import reference
from gpu.reference import attend, run, run_presets

import jax_fa3

gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize("seqlen_k", [4096, 32_768, 131_072, 262_144])
def test_constant_values(seqlen_k: int) -> None:
    """Values of 1 give 1 however many keys there are: sums keep up with their weights, be these
    equal (every other row) or random."""
    rng = np.random.default_rng(seqlen_k)
    query = rng.normal(size=(1, 130, 2, 256)).astype(cases.BFLOAT16)
    query[:, ::2] = 0
    key = rng.standard_normal((1, seqlen_k, 1, 256), np.float32).astype(cases.BFLOAT16)
    ones = np.ones_like(key)

    def every(query: Any, key: Any, ones: Any) -> Any:
        results = {}
        for size in (64, 128, 256):
            arrays = {"query": query, "key": key, "value": ones}
            x = {name: array[..., :size] for name, array in arrays.items()}
            for softmax, center in itertools.product(("exact", "linear"), (True, False)):
                quantization = jax_fa3.Quantization(softmax=softmax, center_value=center)
                results[f"{softmax} {center} {size}"] = attend(x, quantization=quantization).out
            results[f"native {size}"] = attend(x, precision="native").out
        return results

    for name, out in run(every, query, key, ones).items():
        error = np.abs(out.astype(np.float64) - 1).max()
        # 0.3 % and the rounding to bfloat16. Uncentred values are not part of a preset: sums of 512
        # truncated products shrink by up to half a percent, the row sum not quite as much.
        limit = 1e-2 if "False" in name else 3e-3 + 2.0**-9
        assert error <= limit, (name, error)


@gpu
def test_error_does_not_grow_with_keys() -> None:
    """Random values; the error at 128k keys is at most about twice that at 4k."""
    rng = np.random.default_rng(4)
    query = rng.normal(size=(1, 64, 2, 128)).astype(cases.BFLOAT16)
    key, value = (rng.normal(size=(1, 131_072, 1, 128)).astype(cases.BFLOAT16) for _ in range(2))
    errors = {}
    for keys in (4096, 131_072):
        inputs = {"query": query, "key": key[:, :keys], "value": value[:, :keys]}
        exact = reference.exact(inputs)
        for name, result in run_presets(tolerances.AGAINST_EXACT, inputs).items():
            errors[name, keys] = tolerances.rel_l2(result.out, exact.out).max()
            lse_error = np.abs(result.logsumexp - exact.logsumexp).max()
            assert lse_error < 0.03, (name, keys, lse_error)
    for name, limit in tolerances.AGAINST_EXACT.items():
        assert 0 < errors[name, 4096] < limit.rel_l2, errors
        assert errors[name, 131_072] <= 2 * errors[name, 4096], errors


@gpu
def test_needles() -> None:
    """One key among 128k answers each row, wherever it stands."""
    keys, head_dim = 131_072, 128
    rng = np.random.default_rng(5)
    places = np.array([0, 1, 127, 128, 511, 512, 77_777, 77_778, 100_000, keys - 129, keys - 1])
    key = rng.normal(size=(1, keys, 2, head_dim)).astype(cases.BFLOAT16)
    value = rng.choice([-1.0, 1.0], size=(1, keys, 2, head_dim)).astype(cases.BFLOAT16)
    needle = key[:, places].astype(np.float32)
    # Logit 24 at its own key; the others together weigh e^12.
    length = (needle**2).sum(axis=-1, keepdims=True)
    query = np.repeat(needle * 24 * head_dim**0.5 / length, 3, axis=2).astype(cases.BFLOAT16)
    inputs = {"query": query, "key": key, "value": value}
    expected = np.repeat(value[:, places].astype(np.float64), 3, axis=2)
    for name, result in run_presets(("accurate", "fast", "native"), inputs).items():
        assert np.abs(result.out.astype(np.float64) - expected).max() < 0.08, name
        assert np.abs(result.logsumexp - 24).max() < (0.05 if name == "native" else 0.6), name


@gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_large_logits(head_dim: int) -> None:
    """Logits to +-1e4: finite, each row takes the value of its key, logsumexp is its logit."""
    rng = np.random.default_rng(6)
    key = rng.normal(size=(2, 300, 2, head_dim)).astype(np.float16)
    value = rng.normal(size=(2, 300, 2, head_dim)).astype(np.float16)
    places = rng.permutation(300)[:200]
    own = key[:, places].astype(np.float32)
    query = own * 1e4 * head_dim**0.5 / (own**2).sum(axis=-1, keepdims=True)
    query = np.repeat(query, 2, axis=2).astype(np.float16)
    expected = np.repeat(value[:, places].astype(np.float64), 2, axis=2)
    presets = ("accurate", "fast", "native")
    for sign in (1, -1):
        inputs = {"query": sign * query, "key": key, "value": value}
        results = run_presets(presets, inputs, softmax_scale=np.float32(sign * head_dim**-0.5))
        for name, result in results.items():
            error = np.abs(result.out.astype(np.float64) - expected)
            assert error.max() < (4e-3 if name == "native" else 0.25), name
            assert np.abs(result.logsumexp - 1e4).max() < (10 if name == "native" else 250), name
    # All logits near -1e4: keys share a large mean that every query opposes.
    shared = (key + np.float16(4)).astype(np.float16)
    opposed = np.full_like(query, -1e4 * head_dim**0.5 / (4 * head_dim))
    inputs = {"query": opposed, "key": shared, "value": value}
    for name, result in run_presets(presets, inputs, causal="bottom_right").items():
        out = result.out.astype(np.float64)
        assert np.isfinite(out).all(), name
        assert np.isfinite(result.logsumexp).all(), name
        # A mean of values stays among them (v_image rounds by up to 2^-4 of the largest).
        limit = np.abs(value.astype(np.float64)).max() * 1.07
        assert np.abs(out).max() <= limit, name
        assert (result.logsumexp < -4000).all(), name
    # One key 100 times the rest.
    spiked = key.copy()
    spiked[:, 77] *= 100
    inputs = {"query": 3 * rng.normal(size=query.shape).astype(np.float16), "key": spiked,
              "value": value}  # fmt: skip
    for name, result in run_presets(presets, inputs, causal="bottom_right").items():
        assert np.isfinite(result.out.astype(np.float32)).all(), name
        assert np.isfinite(result.logsumexp).all(), name


# ---- size limits ---------------------------------------------------------------------------------


@gpu
def test_more_than_65535_batch_heads() -> None:
    """Every one of 70,000 batches comes out as it does in a small call."""
    shape = (70_000, 1, 64)
    many = {
        name: jax.random.normal(jax.random.key(i), (shape[0], n, *shape[1:]), jnp.bfloat16)
        for i, (name, n) in enumerate({"query": 2, "key": 3, "value": 3}.items())
    }
    some = np.array([0, 1, 2, 40_000, 65_534, 65_535, 65_536, 69_998, 69_999])
    few = {name: np.asarray(x[some]) for name, x in many.items()}

    def every(x: dict[str, Any]) -> Any:
        return {p: attend(x, **reference.PRESETS[p]) for p in ("accurate", "fast", "native")}

    results = run(every, many)
    picked = jax.tree.map(lambda x: x[some], results)
    reference.assert_same_bits(picked, run(every, few))
    for out, logsumexp in results.values():
        assert np.isfinite(out.astype(np.float32)).all()
        assert np.isfinite(logsumexp).all()
    # Heads instead of batches: 65,538 query heads over 3 key heads.
    wide = {
        "query": jax.random.normal(jax.random.key(4), (1, 2, 65_538, 64), jnp.bfloat16),
        "key": jax.random.normal(jax.random.key(5), (1, 5, 3, 64), jnp.bfloat16),
        "value": jax.random.normal(jax.random.key(6), (1, 5, 3, 64), jnp.bfloat16),
    }
    last = {"query": wide["query"][:, :, -2:], **{n: wide[n][:, :, -1:] for n in ("key", "value")}}
    results = run(every, wide).items()
    ends = {n: reference.Result(x.out[:, :, -2:], x.logsumexp[:, -2:]) for n, x in results}
    reference.assert_same_bits(ends, run(every, last))


@gpu
@pytest.mark.slow
def test_more_than_2_to_the_31_elements() -> None:
    """The last rows of a query, and the last keys, beyond the 2^31st element."""
    heads, head_dim = 128, 128
    seqlen = 2**31 // (heads * head_dim) + 256
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    tail = {
        name: draw(jax.random.key(i), (1, 256, heads, head_dim), jnp.bfloat16)
        for i, name in enumerate(("query", "key", "value"))
    }
    # Each row of the last 64 answers to one key of the last 256; what stands before weighs nothing.
    needle = tail["key"][:, -64:].astype(jnp.float32)
    aimed = needle * 40 * head_dim**0.5 / jnp.sum(needle**2, axis=-1, keepdims=True)
    expected = np.asarray(tail["value"][:, -64:], np.float64)
    plain = {"quantization": jax_fa3.Quantization(smooth_key=False, center_value=False)}
    every = jax.jit(
        lambda x: {
            "fp8": attend(x, **plain),
            "native": attend(x, precision="native"),
        }
    )
    fill = jax.jit(
        lambda x: jnp.concatenate([jnp.zeros((1, seqlen - 256, heads, head_dim), x.dtype), x], 1)
    )

    long_query = {**tail, "query": fill(tail["query"])}
    results = every(long_query)
    last = jax.tree.map(np.asarray, {n: (x.out[:, -256:], x.logsumexp[:, :, -256:])
                                     for n, x in results.items()})  # fmt: skip
    del long_query, results
    reference.assert_same_bits(last, {n: tuple(x) for n, x in every(tail).items()})

    long_keys = {"query": aimed.astype(jnp.bfloat16), "key": fill(tail["key"]),
                 "value": fill(tail["value"])}  # fmt: skip
    for name, result in every(long_keys).items():
        error = np.abs(np.asarray(result.out, np.float64) - expected)
        assert error.max() < (0.03 if name == "native" else 0.4), (name, error.max())
