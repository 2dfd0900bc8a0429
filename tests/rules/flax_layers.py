"""Flax's modules with our attention or with their own, and what the tests give them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jax_fa3.flax import linen_attention_fn, nnx_attention_fn

BATCH, SEQLEN_Q, SEQLEN_K, HEADS, FEATURES, CONTEXT = 2, 5, 7, 6, 24, 10
ADAPTERS = {"linen": linen_attention_fn, "nnx": nnx_attention_fn}
NAMES = {api: f"{api}_attention_fn" for api in ADAPTERS}
BOTH = pytest.mark.parametrize("api", ["linen", "nnx"])
# Outputs of a layer in float32 against Flax's own; a mask off by one row gives about 1e-1.
TOLERANCE = 1e-5


def array(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


X, Y = array(BATCH, SEQLEN_Q, FEATURES), array(BATCH, SEQLEN_K, CONTEXT, seed=1)
QKV = tuple(
    array(BATCH, seqlen, HEADS, 8, seed=seed)
    for seed, seqlen in enumerate((SEQLEN_Q, SEQLEN_K, SEQLEN_K))
)


def layer(
    api: str, attention_fn: Any, *, cross: bool = False, **options: Any
) -> Callable[..., Any]:
    """layer(x[, y], mask=..., ...) -> output; the same parameters for every attention_fn.

    attention_fn None means Flax's own.
    """
    chosen = {} if attention_fn is None else {"attention_fn": attention_fn}
    if api == "linen":
        module = linen.MultiHeadDotProductAttention(num_heads=HEADS, **options, **chosen)
        plain = linen.MultiHeadDotProductAttention(num_heads=HEADS)
        variables = plain.init(jax.random.key(0), *((X, Y) if cross else (X,)))

        def linen_layer(*args: Any, **keywords: Any) -> Any:
            return module.apply(variables, *args, **keywords)

        return linen_layer
    features = {"in_kv_features": CONTEXT} if cross else {}
    layer: Callable[..., Any] = nnx.MultiHeadAttention(
        HEADS, FEATURES, decode=False, rngs=nnx.Rngs(0), **features, **options, **chosen
    )
    return layer


def helpers(api: str) -> Any:
    return linen if api == "linen" else nnx


def direct(api: str, *args: Any, options: Any = None, **keywords: Any) -> jax.Array:
    """The adapter called as Flax calls it, on QKV unless arrays are given."""
    return ADAPTERS[api](**(options or {}))(*(args or QKV), **keywords)


def masks(api: str) -> dict[str, jax.Array]:
    """Self-attention masks from Flax's helpers; every row sees a key."""
    make = helpers(api)
    tokens = jnp.ones((BATCH, SEQLEN_Q))
    valid = jnp.arange(SEQLEN_Q) < jnp.array([[3], [5]])
    causal = make.make_causal_mask(tokens)
    padding = make.make_attention_mask(tokens, valid)
    return {
        "causal": causal,
        "causal_bool": make.make_causal_mask(tokens, dtype=jnp.bool_),
        "padding": padding,
        "keys_only": valid[:, None, None, :],
        "combined": make.combine_masks(causal, padding),
        "per_head": (array(BATCH, HEADS, SEQLEN_Q, SEQLEN_Q) > 0).at[..., 1].set(True),
        "all": jnp.ones((1, 1, SEQLEN_Q, SEQLEN_Q)),
    }
