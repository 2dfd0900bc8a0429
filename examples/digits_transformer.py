"""Trains a small Flax transformer on handwritten digits with FP8 attention. Any device will do.

pip install ".[examples]" && python examples/digits_transformer.py
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import trange

import jax_fa3

TOKENS, HEADS, HEAD_DIM, LAYERS, BATCH = 8, 2, 64, 2, 64  # the Hopper kernels serve head_dim 64
WIDTH = HEADS * HEAD_DIM


class Block(nnx.Module):
    """Attention and MLP, each with its residual."""

    def __init__(self, precision: str, rngs: nnx.Rngs):
        self.precision = precision
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.mlp_in = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.mlp_out = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # [batch, tokens, width]
        batch, tokens, _ = x.shape
        qkv = self.qkv(self.norm1(x)).astype(jnp.bfloat16)
        q, k, v = jnp.split(qkv.reshape(batch, tokens, 3 * HEADS, HEAD_DIM), 3, axis=2)
        attended = jax_fa3.attention(q, k, v, precision=self.precision)
        x = x + self.out(attended.reshape(batch, tokens, WIDTH).astype(x.dtype))
        return x + self.mlp_out(nnx.gelu(self.mlp_in(self.norm2(x))))


class DigitsTransformer(nnx.Module):
    """Each row of pixels is a token."""

    def __init__(self, precision: str, rngs: nnx.Rngs):
        self.embed = nnx.Linear(TOKENS, WIDTH, rngs=rngs)
        self.position = nnx.Param(0.1 * jax.random.normal(rngs.params(), (TOKENS, WIDTH)))
        self.blocks = nnx.List([Block(precision, rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(TOKENS * WIDTH, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:  # [batch, 8, 8] -> logits [batch, 10]
        x = self.embed(images) + self.position[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).reshape(-1, TOKENS * WIDTH))


@nnx.jit
def train_step(model, optimizer, images, labels):
    def loss_fn(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def accuracy(model, images, labels):
    return (model(images).argmax(axis=-1) == labels).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="default 400")
    parser.add_argument("--precision", choices=("fp8", "native"), default="fp8")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default 0)")
    args = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8).astype("float32") / 16.0
    train_x, test_x, train_y, test_y = map(
        jnp.asarray, train_test_split(images, labels, test_size=0.25, random_state=0)
    )

    struct = jax.ShapeDtypeStruct((BATCH, TOKENS, HEADS, HEAD_DIM), jnp.bfloat16)
    print(jax_fa3.explain(struct, struct, struct, precision=args.precision))

    model = DigitsTransformer(args.precision, nnx.Rngs(args.seed))
    schedule = optax.cosine_decay_schedule(2e-3, max(args.steps, 1))
    optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)
    key = jax.random.key(args.seed)
    with trange(args.steps, desc="train") as bar:
        for step in bar:
            batch = jax.random.randint(jax.random.fold_in(key, step), (BATCH,), 0, len(train_x))
            loss = train_step(model, optimizer, train_x[batch], train_y[batch])
            if step % 20 == 0:
                bar.set_postfix(loss=f"{float(loss):.3f}")

    print(f"device: {jax.devices()[0].device_kind}")
    print(f"test accuracy: {100 * float(accuracy(model, test_x, test_y)):.2f} %")


if __name__ == "__main__":
    main()
