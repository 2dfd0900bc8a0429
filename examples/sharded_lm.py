"""Trains a Flax language model over a (data, sequence, model) mesh, on the text of Python's manual.

pip install ".[examples]" && python examples/sharded_lm.py --cpu-devices 8 --mesh 2,1,4

data splits the batch, model splits heads and hidden units, sequence splits every text over devices
(ring attention, causal work balanced). Without --cpu-devices all GPUs are used, or the one CPU.
"""

from __future__ import annotations

import argparse
import collections
import functools
import math
import pydoc_data.topics
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa3
from jax_fa3.flax import linen_attention_fn

SEQLEN, BATCH, LAYERS, HEADS, HEAD_DIM = 128, 16, 2, 4, 64  # the Hopper kernels serve head_dim 64
WIDTH, VOCABULARY = HEADS * HEAD_DIM, 128
AXES = ("data", "sequence", "model")
TOKENS = P("data", "sequence")  # tokens, positions and targets, each [batch, seqlen]

# How parameters are split, by the end of their path; optimizer state follows, the rest is whole.
SPLIT = {
    "query/kernel": P(None, "model"),  # [width, heads, head_dim]
    "key/kernel": P(None, "model"),
    "value/kernel": P(None, "model"),
    "query/bias": P("model"),
    "key/bias": P("model"),
    "value/bias": P("model"),
    "out/kernel": P("model"),  # [heads, head_dim, width]
    "mlp_in/kernel": P(None, "model"),
    "mlp_in/bias": P("model"),
    "mlp_out/kernel": P("model"),
}


class LanguageModel(nn.Module):
    """Next-byte logits; attention_fn as `flax.linen.MultiHeadDotProductAttention` takes it."""

    attention_fn: Any

    @nn.compact
    def __call__(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, WIDTH)(tokens) + nn.Embed(SEQLEN, WIDTH)(positions)
        for layer in range(LAYERS):
            x += nn.MultiHeadDotProductAttention(
                HEADS, dtype=jnp.bfloat16, attention_fn=self.attention_fn
            )(nn.LayerNorm()(x))
            hidden = nn.Dense(4 * WIDTH, dtype=jnp.bfloat16, name=f"{layer}_mlp_in")
            narrow = nn.Dense(WIDTH, dtype=jnp.bfloat16, name=f"{layer}_mlp_out")
            x += narrow(nn.gelu(hidden(nn.LayerNorm()(x))))
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


def attention_over(mesh: Mesh, precision: Any) -> Any:
    """Flax's attention_fn for this mesh: local attention, or a ring where the sequence is split."""
    if mesh.shape["sequence"] == 1:
        return linen_attention_fn(is_causal=True, precision=precision)
    local = functools.partial(
        jax_fa3.context_parallel_attention,
        axis_name="sequence",
        strategy="ring",
        layout="zigzag",
        is_causal=True,
        precision=precision,
    )
    spec = P("data", "sequence", "model")
    ring = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)

    # Flax passes only the keywords that the signature names.
    def attention_fn(query: Any, key: Any, value: Any, mask: Any = None) -> jax.Array:
        if mask is not None:
            raise ValueError(
                "attention_fn: mask must be None (the ring is causal itself); got "
                f"{type(mask).__name__}."
            )
        return ring(query, key, value)

    return attention_fn


def shardings_of(mesh: Mesh, state: Any) -> Any:
    """A NamedSharding for every array of the train state, by its path."""

    def one(path: Any, _: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        spec = next((spec for end, spec in SPLIT.items() if name.endswith(end)), P())
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(one, state)


def batches(seed: int, shards: int) -> Any:
    """Endless (tokens, positions, targets), in the order in which `shards` devices hold them."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode("ascii", "ignore")
    data = np.frombuffer(text, np.uint8).astype(np.int32)
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(data) - SEQLEN, BATCH)[:, None]
        tokens = data[starts + np.arange(SEQLEN)]
        targets = data[starts + np.arange(1, SEQLEN + 1)]
        positions = np.broadcast_to(np.arange(SEQLEN, dtype=np.int32), tokens.shape)
        yield tuple(jax_fa3.zigzag_shard(x, shards) for x in (tokens, positions, targets))


def mesh_sizes(text: str) -> tuple[int, ...]:
    """An argparse type: three positive sizes."""
    sizes = tuple(int(part) for part in text.split(","))
    if len(sizes) != 3 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"must be DATA,SEQUENCE,MODEL; got {text}")
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", type=mesh_sizes, metavar="DATA,SEQUENCE,MODEL")
    parser.add_argument("--cpu-devices", type=int, metavar="N", help="use N forced CPU devices")
    parser.add_argument("--steps", type=int, default=100, help="default 100")
    parser.add_argument("--precision", choices=("fp8", "native"), default="fp8")
    args = parser.parse_args()
    if args.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu_devices)

    count = jax.device_count()
    split_heads = math.gcd(count, HEADS)
    mesh = jax.make_mesh(
        args.mesh or (count // split_heads, 1, split_heads), AXES, (AxisType.Auto,) * 3
    )
    print(f"mesh: {dict(mesh.shape)} of {jax.devices()[0].device_kind}")

    model = LanguageModel(attention_over(mesh, args.precision))
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0, 3e-3, 10, max(args.steps, 11)))
    stream = batches(0, mesh.shape["sequence"])
    batch = next(stream)

    def init(key: jax.Array) -> Any:
        # Parameters depend on no sharding: one device's attention tells their shapes.
        plain = LanguageModel(linen_attention_fn(is_causal=True))
        params = plain.init(key, *batch[:2])
        return params, optimizer.init(params)

    def step(state: Any, tokens: jax.Array, positions: jax.Array, targets: jax.Array) -> Any:
        params, moments = state

        def loss_fn(params: Any) -> jax.Array:
            logits = model.apply(params, tokens, positions).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    key = jax.random.key(0)
    of_state = shardings_of(mesh, jax.eval_shape(init, key))
    of_batch = NamedSharding(mesh, TOKENS)
    state = jax.jit(init, out_shardings=of_state)(key)
    compiled = (
        jax.jit(
            step,
            in_shardings=(of_state, of_batch, of_batch, of_batch),
            out_shardings=(of_state, NamedSharding(mesh, P())),
            donate_argnums=0,
        )
        .lower(state, *batch)
        .compile()
    )
    kinds = r"all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    found = collections.Counter(re.findall(rf"\b({kinds})(?:-start)?\(", compiled.as_text()))
    print(f"collectives of a step: {dict(sorted(found.items()))}")

    for number in range(args.steps):
        state, loss = compiled(state, *jax.device_put(batch, of_batch))
        if number % 10 == 0 or number == args.steps - 1:
            print(f"step {number}: loss {float(loss):.4f}", flush=True)
        batch = next(stream)


if __name__ == "__main__":
    main()
