"""Flax's autoregressive cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rules.support import assert_close

pytest.importorskip("flax.linen", reason="needs flax, which the extra `examples` installs")

from flax import linen, nnx
from rules.flax_layers import (
    BATCH,
    BOTH,
    HEADS,
    NAMES,
    QKV,
    SEQLEN_K,
    SEQLEN_Q,
    TOLERANCE,
    X,
    direct,
    layer,
    masks,
)

from jax_fa3.flax import linen_attention_fn, nnx_attention_fn


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["plain", "is_causal"])
def test_decode_loop_of_linen(jit: bool, options: dict[str, Any]) -> None:
    fn = linen_attention_fn(**options)
    module = linen.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=fn, decode=True)
    variables = module.init(jax.random.key(0), X)

    def step(cache: Any, x: Any) -> Any:
        return module.apply({"params": variables["params"], "cache": cache}, x, mutable=["cache"])

    step = jax.jit(step) if jit else step
    cache, outs = variables["cache"], []
    for i in range(SEQLEN_Q):
        out, changed = step(cache, X[:, i : i + 1])
        cache = changed["cache"]
        outs.append(out)
    expected = layer("linen", None)(X, mask=masks("linen")["causal"])
    assert_close(jnp.concatenate(outs, 1), expected, TOLERANCE)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("call", [{}, {"is_causal": True}], ids=["plain", "is_causal"])
def test_decode_loop_of_nnx(jit: bool, call: dict[str, Any]) -> None:
    module: Any = layer("nnx", nnx_attention_fn())
    expected = layer("nnx", None)(X, mask=masks("nnx")["causal"])
    module.init_cache(X.shape)

    def step(module: Any, x: Any) -> Any:
        return module(x, decode=True, **call)

    step = nnx.jit(step) if jit else step
    outs = [step(module, X[:, i : i + 1]) for i in range(SEQLEN_Q)]
    assert_close(jnp.concatenate(outs, 1), expected, TOLERANCE)


@BOTH
def test_window_in_a_decode_step_is_refused(api: str) -> None:
    query, key, value = QKV
    mask = jnp.ones((BATCH, 1, 1, SEQLEN_K), bool)
    message = "window_size must be None for one query row with a mask"
    with pytest.raises(NotImplementedError, match=rf"^{NAMES[api]}: {message}.*got \(2, 0\)\."):
        direct(api, query[:, :1], key, value, mask=mask, options={"window_size": (2, 0)})
