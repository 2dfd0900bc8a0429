"""Accuracy of one attention call: inputs, float64 reference, errors and what they may be.

The reference is plain NumPy and shares nothing with the package.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jax_fa3

Array = np.ndarray[Any, Any]

PRESETS: dict[str, jax_fa3.Quantization | None] = {
    "accurate": jax_fa3.Quantization.accurate(),
    "fast": jax_fa3.Quantization.fast(),
    "per_tensor": jax_fa3.Quantization.per_tensor(),
    "block": jax_fa3.Quantization.block(),
    "uncentred": jax_fa3.Quantization(center_value=False),  # long sums without a net
    "native": None,
}
DISTRIBUTIONS = ("normal", "outlier", "biased")
# Besides: sums of many terms, whose mean must not be lost.
DATA = (*DISTRIBUTIONS, "ones", "uniform", "shifted")
DTYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}

# Largest relative L2 error of the whole output, on any of DISTRIBUTIONS. fp8 stores 3 bits of
# mantissa (2.65 % rms each for query, key, P and value); native rounds P and the output to 16 bits.
REL_L2_LIMITS = {"accurate": 0.08, "fast": 0.1, "uncentred": 0.08, "native": 0.012}
# Zero-mean data averages to nothing over many keys, but the mean of value's rounding errors does
# not; relative errors grow. Measured at 131,072 keys: accurate 0.084, fast 0.142 (outliers).
LONG_SEQLEN, LONG_FACTOR = 16_384, 2.0
# A constant value must come back: what is left is the rounding of the output.
ONES_LIMIT = 0.01
# Many keys average the rounding of value; its mean, which is 1, must not move.
MEAN_LIMIT = 0.01


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes of one call; `data` names how its inputs are drawn (see `draw`)."""

    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    batch: int = 1
    is_causal: bool = False
    data: str = "normal"


@dataclasses.dataclass(frozen=True)
class Errors:
    """Differences over the whole output."""

    rmse: float
    rel_l2: float
    cosine: float
    max_abs: float


def draw(problem: Problem, *, dtype: str = "bf16", seed: int = 0) -> tuple[Array, Array, Array]:
    """query, key, value [batch, seqlen, heads, head_dim] of that dtype.

    data: "normal" N(0, 1); "outlier" N(0, 1) + N(0, 100) at 0.1 % of the places (the
    FlashAttention-3 paper's); "biased" N(0, 1) plus a mean per channel; "ones" normal query and key
    with value 1; "uniform" zero query (all keys weigh the same) with value N(1, 1); "shifted"
    normal query and key with value N(1, 1).
    """
    rng = np.random.default_rng([seed, *problem.data.encode()])
    p = problem

    def one(seqlen: int, heads: int) -> Array:
        shape = (p.batch, seqlen, heads, p.head_dim)
        x = rng.standard_normal(shape, np.float32)
        if p.data == "outlier":
            places = rng.random(shape, np.float32) < 1e-3
            x += 10.0 * rng.standard_normal(shape, np.float32) * places
        elif p.data == "biased":
            x += rng.standard_normal((p.batch, 1, heads, p.head_dim), np.float32)
        return x

    query = one(p.seqlen_q, p.num_heads_q)
    key, value = one(p.seqlen_k, p.num_heads_kv), one(p.seqlen_k, p.num_heads_kv)
    if p.data == "ones":
        value = np.ones_like(value)
    elif p.data == "uniform":
        query, value = np.zeros_like(query), value + 1
    elif p.data == "shifted":
        value = value + 1
    kind = DTYPES[dtype]
    return query.astype(kind), key.astype(kind), value.astype(kind)


def reference(
    query: Array, key: Array, value: Array, *, is_causal: bool, rows_at_once: int = 256
) -> Array:
    """Softmax attention in float64, head by head; causal masks are aligned bottom right."""
    batch, seqlen_q, heads_q, head_dim = query.shape
    seqlen_k, heads_kv = key.shape[1:3]
    group = heads_q // heads_kv
    out = np.zeros((batch, seqlen_q, heads_q, value.shape[-1]))
    columns = np.arange(seqlen_k)
    for b in range(batch):
        for h in range(heads_q):
            k = key[b, :, h // group].astype(np.float64).T / math.sqrt(head_dim)
            v = value[b, :, h // group].astype(np.float64)
            for start in range(0, seqlen_q, rows_at_once):
                rows = slice(start, min(start + rows_at_once, seqlen_q))
                logits = query[b, rows, h].astype(np.float64) @ k
                if is_causal:
                    last = np.arange(rows.start, rows.stop) + seqlen_k - seqlen_q
                    logits[columns[None, :] > last[:, None]] = -np.inf
                top = logits.max(axis=-1, keepdims=True)
                weights = np.exp(logits - np.where(np.isfinite(top), top, 0.0))
                total = weights.sum(axis=-1, keepdims=True)
                out[b, rows, h] = weights @ v / np.where(total == 0.0, 1.0, total)
    return out


def errors(out: Any, expected: Array) -> Errors:
    """Errors of out; all NaN as soon as one number of it is not finite."""
    a, e = np.asarray(out).astype(np.float64), np.asarray(expected, np.float64)
    if a.shape != e.shape:
        raise ValueError(f"errors: out must have shape {e.shape}; got {a.shape}.")
    if not np.isfinite(a).all():
        return Errors(math.nan, math.nan, math.nan, math.nan)
    difference = a - e
    size, norm = float(np.sqrt((e * e).sum())), float(np.sqrt((a * a).sum()))
    return Errors(
        rmse=float(np.sqrt((difference * difference).mean())),
        rel_l2=float(np.sqrt((difference * difference).sum())) / (size or 1.0),
        cosine=float((a * e).sum()) / ((size * norm) or 1.0),
        max_abs=float(np.abs(difference).max()),
    )


def options(preset: str) -> dict[str, Any]:
    """Keyword arguments of `jax_fa3.attention` for a preset's name.

    "native" is 16-bit; "deterministic" the same with gradients that repeat bit by bit.
    """
    if preset == "native":
        return {"precision": "native"}
    if preset == "deterministic":
        return {"precision": "native", "deterministic": True}
    return {"precision": "fp8", "quantization": PRESETS[preset]}


def run_ours(
    arrays: tuple[Any, Any, Any], problem: Problem, preset: str, implementation: str | None = None
) -> Array:
    """`jax_fa3.attention` under jit, as a NumPy array of float64."""
    call = _jitted(preset, problem.is_causal, implementation)
    return np.asarray(call(*arrays)).astype(np.float64)


@functools.cache
def _jitted(preset: str, is_causal: bool, implementation: Any) -> Callable[..., jax.Array]:
    """One jitted function per variant, so that equal shapes compile once."""

    def call(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = jax_fa3.attention(
            q, k, v, is_causal=is_causal, implementation=implementation, **options(preset)
        )
        return jnp.asarray(out)

    return jax.jit(call)


def verdict(preset: str, data: str, found: Errors, seqlen_k: int) -> str | None:
    """What is wrong with these errors, or None. A preset without a limit must only be finite."""
    if math.isnan(found.rel_l2):
        return "the output holds NaN or infinity"
    if preset not in REL_L2_LIMITS:
        return None
    if data == "ones":
        if found.max_abs <= ONES_LIMIT:
            return None
        return f"largest error {found.max_abs:.3g}, limit {ONES_LIMIT}"
    limit = MEAN_LIMIT if data in ("uniform", "shifted") else REL_L2_LIMITS[preset]
    if seqlen_k > LONG_SEQLEN and preset != "native" and data in ("normal", "outlier"):
        limit *= LONG_FACTOR
    if not found.rel_l2 <= limit:
        return f"relative L2 error {found.rel_l2:.3g}, limit {limit}"
    return None
