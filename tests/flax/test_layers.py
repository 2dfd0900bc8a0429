"""The adapters inside Flax's own modules, against the modules with Flax's own attention."""

from __future__ import annotations

import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rules.support import assert_close, calls, cuda_text

pytest.importorskip("flax.linen", reason="needs flax, which the extra `examples` installs")

from flax import linen, nnx
from rules.flax_layers import (
    ADAPTERS,
    BATCH,
    BOTH,
    HEADS,
    NAMES,
    QKV,
    SEQLEN_K,
    SEQLEN_Q,
    TOLERANCE,
    X,
    Y,
    array,
    direct,
    helpers,
    layer,
    masks,
)

from jax_fa3.flax import nnx_attention_fn


@BOTH
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_masks_of_flax(api: str, jit: bool) -> None:
    """Eager, a causal or full mask is recognised; under jit every mask is dense."""
    ours, theirs = (layer(api, fn) for fn in (ADAPTERS[api](), None))
    run = jax.jit(lambda fn, mask: fn(X, mask=mask), static_argnums=0) if jit else None
    outs = {}
    for name, mask in masks(api).items():
        outs[name] = run(ours, mask) if run else ours(X, mask=mask)
        assert_close(outs[name], theirs(X, mask=mask), TOLERANCE)
    different = [outs[name] for name in ("causal", "padding", "combined", "per_head", "all")]
    for i, out in enumerate(different):
        assert all(jnp.abs(out - other).max() > 1e-3 for other in different[:i])


@BOTH
def test_is_causal_equals_the_mask(api: str) -> None:
    theirs = layer(api, None)(X, mask=masks(api)["causal"])
    assert_close(layer(api, ADAPTERS[api](is_causal=True))(X), theirs, TOLERANCE)
    padded = layer(api, ADAPTERS[api](is_causal=True))(X, mask=masks(api)["padding"])
    assert_close(padded, layer(api, None)(X, mask=masks(api)["combined"]), TOLERANCE)


def test_is_causal_of_an_nnx_call() -> None:
    mask = masks("nnx")["padding"]
    ours, theirs = (layer("nnx", fn) for fn in (nnx_attention_fn(), None))
    assert_close(ours(X, is_causal=True), theirs(X, is_causal=True), TOLERANCE)
    combined = theirs(X, mask=masks("nnx")["combined"])
    assert_close(ours(X, mask=mask, is_causal=True), combined, TOLERANCE)
    with pytest.raises(TypeError, match=r"^nnx_attention_fn: is_causal must be a bool"):
        direct("nnx", is_causal=1)


@BOTH
def test_cross_attention(api: str) -> None:
    ours, theirs = (layer(api, fn, cross=True) for fn in (ADAPTERS[api](), None))
    assert_close(ours(X, Y), theirs(X, Y), TOLERANCE)
    rows, keys = jnp.ones((BATCH, SEQLEN_Q)), jnp.arange(SEQLEN_K) < jnp.array([[4], [6]])
    mask = helpers(api).make_attention_mask(rows, keys)
    assert_close(ours(X, Y, mask=mask), theirs(X, Y, mask=mask), TOLERANCE)
    triangle = jnp.tri(SEQLEN_Q, SEQLEN_K)[None, None]  # top-left, as in Flax
    expected = theirs(X, Y, mask=triangle)
    assert_close(ours(X, Y, mask=triangle), expected, TOLERANCE)
    assert_close(layer(api, ADAPTERS[api](is_causal=True), cross=True)(X, Y), expected, TOLERANCE)


@BOTH
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_a_triangle_is_never_taken_for_another(api: str, alignment: str) -> None:
    """Five rows, seven keys: each alignment has a triangle of its own."""
    options = {"causal_alignment": alignment}
    for shift in (0, SEQLEN_K - SEQLEN_Q):
        mask = jnp.tri(SEQLEN_Q, SEQLEN_K, shift)[None, None]
        expected = linen.dot_product_attention(*QKV, mask=mask)
        assert_close(direct(api, mask=mask, options=options), expected, TOLERANCE)


@BOTH
def test_gradients(api: str) -> None:
    def gradient(fn: Any, mask: str) -> Any:
        attend = layer(api, fn)
        return jax.jit(jax.grad(lambda x, m: jnp.sum(jnp.cos(attend(x, mask=m)))))(X, own[mask])

    own = masks(api)
    expected = gradient(None, "combined")
    assert_close(gradient(ADAPTERS[api](), "combined"), expected, 1e-4)
    assert_close(gradient(ADAPTERS[api](is_causal=True), "padding"), expected, 1e-4)


@BOTH
def test_bias_and_batch_axes(api: str) -> None:
    """Two batch axes, a bias and a mask; modules pass no bias, callers of the function may."""
    query, key, value = (
        array(2, 3, seqlen, HEADS, 8, seed=seed)
        for seed, seqlen in enumerate((SEQLEN_Q, SEQLEN_K, SEQLEN_K))
    )
    bias = array(2, 3, HEADS, SEQLEN_Q, SEQLEN_K, seed=3)
    mask = (array(2, 3, 1, SEQLEN_Q, SEQLEN_K, seed=4) > 0).at[..., 0].set(True)
    # linen's: nnx's cannot fold a mask whose heads axis is 1 together with two batch axes.
    expected = linen.dot_product_attention(query, key, value, bias, mask)
    assert_close(direct(api, query, key, value, bias, mask), expected, TOLERANCE)
    assert jnp.abs(direct(api, query, key, value, None, mask) - expected).max() > 1e-2


def test_grouped_heads_of_nnx() -> None:
    if "num_kv_heads" not in inspect.signature(nnx.MultiHeadAttention.__init__).parameters:
        pytest.skip("needs a flax whose nnx.MultiHeadAttention has num_kv_heads")
    mask = masks("nnx")["combined"]
    ours, theirs = (layer("nnx", fn, num_kv_heads=2) for fn in (nnx_attention_fn(), None))
    assert_close(ours(X, mask=mask), theirs(X, mask=mask), TOLERANCE)


@BOTH
def test_rows_without_keys_are_zero(api: str) -> None:
    """make_attention_mask hides every key from padded rows; there Flax averages the values."""
    valid = jnp.arange(SEQLEN_Q) < jnp.array([[3], [5]])
    mask = helpers(api).make_attention_mask(valid, valid)
    query = QKV[0]
    out = direct(api, query, query, query, mask=mask)
    theirs = linen.dot_product_attention(query, query, query, mask=mask)
    assert not out[0, 3:].any()
    assert_close(out[valid], theirs[valid], TOLERANCE)
    assert bool(theirs[0, 3:].any())


@pytest.mark.usefixtures("extension")
@BOTH
def test_the_kernel_is_reached_where_the_mask_is_an_option(api: str) -> None:
    args = tuple(array(2, 70, 3, 64, dtype=jnp.bfloat16, seed=seed) for seed in range(3))
    causal = helpers(api).make_causal_mask(jnp.ones((2, 70)))
    kernel = ["jax_fa3_quantize_fwd_fp8"]

    def closed_over(mask: Any) -> str:
        fn = ADAPTERS[api]()
        return cuda_text(lambda *args: fn(*args, mask=mask), *args)

    by_option = cuda_text(ADAPTERS[api](is_causal=True), *args)
    assert calls(by_option) == kernel
    assert "is_causal = true" in by_option
    for mask in (causal, np.asarray(causal)):
        recognised = closed_over(mask)
        assert calls(recognised) == kernel
        assert "is_causal = true" in recognised
    everything = closed_over(jnp.ones((2, 1, 70, 70)))
    assert calls(everything) == kernel
    assert "is_causal = false" in everything
    assert calls(closed_over(causal.at[1, 0, 4, 5].set(1))) == []
    only_cuda = ADAPTERS[api](implementation="cuda")
    with pytest.raises(NotImplementedError, match=rf"^{NAMES[api]}: mask is not served"):
        jax.eval_shape(lambda mask: only_cuda(*args, mask=mask), causal)  # traced: a dense mask


@BOTH
def test_a_mask_of_keys_stays_small(api: str) -> None:
    size = 4099
    args = (jax.ShapeDtypeStruct((2, size, 3, 8), jnp.float32),) * 3
    mask = jax.ShapeDtypeStruct((2, 1, 1, size), jnp.float32)
    attend = jax.jit(lambda q, k, v, mask: ADAPTERS[api]()(q, k, v, mask=mask))
    lowered = attend.lower(*args, mask).as_text()
    sizes = [
        list(map(int, re.findall(r"\d+", s))) for s in re.findall(r"tensor<([\dx]+)x", lowered)
    ]
    assert max(np.prod(s) for s in sizes) < size * size
