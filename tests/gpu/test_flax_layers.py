"""Flax's layers on the kernels, against the same layers on the XLA path: output and gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax.linen", reason="needs flax, which the extra `examples` installs")

from flax import linen, nnx

from jax_fa3.flax import linen_attention_fn, nnx_attention_fn

pytestmark = pytest.mark.gpu

HEADS, WIDTH = 4, 256
# Measured in fp8 elsewhere, kernel against model: 8e-3 and 2.4e-2.
LIMITS = {"native": 2e-2, "fp8": 6e-2}


def both(api: str, variables: Any, **options: Any) -> Any:
    """x -> the layer's output, and the gradient of a function of all of it."""

    def layer(x: Any) -> Any:
        if api == "linen":
            fn = linen_attention_fn(is_causal=True, **options)
            module = linen.MultiHeadDotProductAttention(HEADS, dtype=jnp.bfloat16, attention_fn=fn)
            return module.apply(variables, x)
        module = nnx.MultiHeadAttention(
            HEADS, WIDTH, dtype=jnp.bfloat16, decode=False, rngs=nnx.Rngs(0),
            attention_fn=nnx_attention_fn(is_causal=True, **options),
        )  # fmt: skip
        return module(x)

    def run(x: Any) -> Any:
        out, pull = jax.vjp(layer, x)
        return out, pull(jnp.cos(out.astype(jnp.float32)).astype(out.dtype))[0]

    return jax.jit(run)


@pytest.mark.parametrize(("api", "precision"), [("linen", "fp8"), ("nnx", "native")])
def test_layers_agree(api: str, precision: str) -> None:
    x = jnp.asarray(np.random.default_rng(2).normal(size=(2, 300, WIDTH)), jnp.float32)
    plain = linen.MultiHeadDotProductAttention(HEADS)
    variables = jax.jit(plain.init)(jax.random.key(0), x) if api == "linen" else None
    got, want = (
        both(api, variables, precision=precision, implementation=path)(x)
        for path in ("cuda", "xla")
    )
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) < LIMITS[precision] * np.linalg.norm(b)
