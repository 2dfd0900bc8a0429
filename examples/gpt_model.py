"""The model that train_gpt.py trains, its attention by mode, its loss and its optimizer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jax_fa3.flax import nnx_attention_fn

VOCABULARY = 256  # bytes


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that the losses of a run depend on, beside the text."""

    attention: str  # of MODES
    steps: int
    batch: int  # windows of a step
    seqlen: int  # bytes of a window
    layers: int
    width: int
    head_dim: int
    learning_rate: float  # at its peak
    seed: int  # of weights and batches

    @property
    def num_heads(self) -> int:
        return self.width // self.head_dim


class Mode(NamedTuple):
    """How a model computes: dtype of its products, and attention as Flax takes it."""

    impl: str
    precision: str
    dtype: Any
    attention_fn: Callable[..., jax.Array]
    explained: dict[str, Any] | None  # keywords of jax_fa3.explain that describe it


def cudnn_attention_fn(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: None = None, **of_flax: Any
) -> jax.Array:
    """JAX's own fused attention; causal. of_flax is about dropout and dtypes, both settled here."""
    if mask is not None:
        raise ValueError(
            "cudnn_attention_fn: mask must be None (it is causal itself); got "
            f"{type(mask).__name__}."
        )
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


def own(precision: str, dtype: Any, **options: Any) -> Mode:
    """A mode of this package."""
    options = {"precision": "fp8" if precision == "fp8" else "native", **options}
    attention_fn = nnx_attention_fn(is_causal=True, **options)
    return Mode("jax_fa3", precision, dtype, attention_fn, options)


MODES = {
    "fp8": own("fp8", jnp.bfloat16),
    "native": own("bf16", jnp.bfloat16),
    "cudnn": Mode("cudnn", "bf16", jnp.bfloat16, cudnn_attention_fn, None),
    "xla": own("f32", jnp.float32, implementation="xla"),
}


class Block(nnx.Module):
    """Attention and MLP, each with its residual; the residual stream is float32."""

    def __init__(self, mode: Mode, settings: Settings, rngs: nnx.Rngs):
        width, init = settings.width, nnx.initializers.normal(0.02)
        out_init = nnx.initializers.normal(0.02 / (2 * settings.layers) ** 0.5)
        self.norm1 = nnx.LayerNorm(width, dtype=mode.dtype, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, dtype=mode.dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            settings.num_heads,
            width,
            dtype=mode.dtype,
            kernel_init=init,
            out_kernel_init=out_init,
            attention_fn=mode.attention_fn,
            decode=False,
            rngs=rngs,
        )
        linear = functools.partial(nnx.Linear, dtype=mode.dtype, rngs=rngs)
        self.mlp_in = linear(width, 4 * width, kernel_init=init)
        self.mlp_out = linear(4 * width, width, kernel_init=out_init)

    def __call__(self, x: jax.Array) -> jax.Array:  # [batch, seqlen, width]
        x = x + self.attention(self.norm1(x))
        return x + self.mlp_out(nnx.gelu(self.mlp_in(self.norm2(x))))


class GPT(nnx.Module):
    """Next-byte logits. The blocks are stacked and scanned, so that one is compiled for all."""

    def __init__(self, mode: Mode, settings: Settings, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(VOCABULARY, settings.width, embedding_init=init, rngs=rngs)
        self.position = nnx.Embed(settings.seqlen, settings.width, embedding_init=init, rngs=rngs)

        @nnx.split_rngs(splits=settings.layers)
        @nnx.vmap
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(mode, settings, rngs)

        self.blocks = stacked(rngs)
        self.norm = nnx.LayerNorm(settings.width, dtype=mode.dtype, rngs=rngs)
        self.head = nnx.Linear(
            settings.width, VOCABULARY, dtype=mode.dtype, kernel_init=init, rngs=rngs
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:  # [batch, seqlen] -> [..., VOCABULARY]
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(block: Block, x: jax.Array) -> jax.Array:
            return block(x)

        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        return self.head(self.norm(run(self.blocks, x)))


def loss_of(model: GPT, text: jax.Array, starts: jax.Array, seqlen: int) -> jax.Array:
    """Mean cross-entropy in nats per byte of the windows of text that begin at starts."""
    windows = text[starts[:, None] + jnp.arange(seqlen + 1)].astype(jnp.int32)
    logits = model(windows[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    """AdamW after clipping, with warm-up and cosine; norms and biases do not decay."""
    rate, warmup = settings.learning_rate, max(1, min(100, settings.steps // 10))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, rate, warmup, max(settings.steps, warmup + 1), 0.1 * rate
    )

    def decayed(params: Any) -> Any:
        # By name: the stacked blocks give a bias two axes as well.
        return jax.tree_util.tree_map_with_path(
            lambda path, _: any(x in jax.tree_util.keystr(path) for x in ("kernel", "embedding")),
            params,
        )

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.99, weight_decay=0.1, mask=decayed),
    )
