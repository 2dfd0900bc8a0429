"""What a step of a ring computes, on one GPU: rows of one shard over keys of another."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa3 import _shapes
from jax_fa3._grad import Results
from jax_fa3._images import Form
from jax_fa3._merge import merge_attention
from jax_fa3._parts import Float8

pytestmark = pytest.mark.gpu

SEQLEN, HEADS_Q, HEADS_KV = 200, 4, 2
# The model rounds probabilities in the backward pass too; the kernels do not. Measured, from
# out on: 8e-3, 9e-4, 2.4e-2, 2e-2, 2.7e-2, 1e-3, 1.6e-2, 2.8e-2.
LIMITS = {
    "out": 2e-2,
    "logsumexp": 1.5e-3,
    "dquery": 6e-2,
    "dkey": 6e-2,
    "dvalue": 6e-2,
    "dscale": 2e-2,
    "dkey of the other shard": 6e-2,
    "dvalue of the other shard": 6e-2,
}


def both_passes(path: Any, head_dim: int, smooth: bool) -> Any:
    """Results and gradients of the second of two shards, which sees all of the first."""
    sizes = (1, SEQLEN, HEADS_KV, head_dim)
    like = [jax.ShapeDtypeStruct((1, SEQLEN, HEADS_Q, head_dim), jnp.bfloat16)]
    like += [jax.ShapeDtypeStruct(sizes, jnp.bfloat16)] * 2
    quantization = _shapes.Quantization(smooth_key=smooth, hadamard=smooth)
    _, config = _shapes.check_attention("test", *like, quantization=quantization)
    part = Float8(Form(config, path, False, "test", smooth), SEQLEN, SEQLEN, False)

    def run(arrays: Any, dout: Any, dlse: Any) -> Any:
        scale = jnp.float32(head_dim**-0.5)
        (_, other), (rows, own) = (part.prepare(*a, scale) for a in arrays)
        steps = [(own, True), (other, False)]
        results = [
            part.forward(rows, shard, scale, is_causal=mine, is_own=mine) for shard, mine in steps
        ]
        out, logsumexp = merge_attention(*zip(*results, strict=True))
        whole = Results(out.astype(jnp.bfloat16), logsumexp, dout, dlse)
        grads = [
            part.backward(rows, shard, scale, whole, is_causal=mine, is_own=mine)
            for shard, mine in steps
        ]
        total = grads[0]._replace(rows=grads[0].rows + grads[1].rows)
        return out, logsumexp, part.finish(rows, scale, total, whole), grads[1].shard

    return jax.jit(run)


@pytest.mark.parametrize(("head_dim", "smooth"), [(64, True), (128, True), (128, False)])
def test_kernels_and_model_agree(head_dim: int, smooth: bool) -> None:
    rng = np.random.default_rng(7)

    def draw(heads: int, middle: float = 0.0) -> Any:
        x = rng.normal(size=(1, SEQLEN, heads, head_dim)) * (1 + 0.2 * np.arange(heads))[:, None]
        return jnp.asarray(x + middle, jnp.bfloat16)

    # Keys of both shards lie around different means.
    arrays = [(draw(HEADS_Q), draw(HEADS_KV, mean), draw(HEADS_KV, 0.5)) for mean in (-0.4, 0.6)]
    # Logsumexps weigh in with one sign. Otherwise the terms of the scale's gradient, one number,
    # cancel until the model's rounded probabilities are a fifth of what is left (head_dim 64).
    dlse = jnp.asarray(1 + rng.normal(size=(1, HEADS_Q, SEQLEN)), jnp.float32)
    rest = (draw(HEADS_Q), dlse)
    got, want = (
        jax.tree.map(
            lambda x: np.asarray(x, np.float64), both_passes(path, head_dim, smooth)(arrays, *rest)
        )
        for path in ("cuda", "xla")
    )
    errors = {
        name: np.linalg.norm(a - b) / np.linalg.norm(b)
        for name, a, b in zip(LIMITS, jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    }
    # NaN compares false.
    assert all(error < LIMITS[name] for name, error in errors.items()), errors
