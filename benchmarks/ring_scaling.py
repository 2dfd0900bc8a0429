"""Speed of context_parallel_attention on several GPUs next to one, and what its transfers cost."""

from __future__ import annotations

import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import device_checks
import jax
import jax.numpy as jnp
import overlap
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa3
from jax_fa3._cli import gpu_state, grid, results, timing

Row = dict[str, Any]
NAMES = {"native": "bf16", "fp8": "fp8"}
ONE_DEVICE = "one device"
_TRACED_CALLS = 3


def random_inputs(shape: grid.Shape, sharding: Any) -> list[jax.Array]:
    """query, key and value in bfloat16, made where they are needed."""
    sizes = (shape.batch, shape.seqlen_q, shape.num_heads_q, shape.head_dim)

    @functools.partial(jax.jit, out_shardings=sharding)
    def draw(seed: Any) -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(seed), 3)
        return [jax.random.normal(key, sizes, jnp.bfloat16) for key in keys]

    drawn: list[jax.Array] = draw(7)
    return drawn


def parallel(mesh: Mesh, strategy: str, **options: Any) -> Callable[..., Any]:
    """Causal attention of sequences that are already in zigzag order."""
    spec = P(None, "x")
    fn = functools.partial(
        jax_fa3.context_parallel_attention,
        axis_name="x",
        strategy=strategy,
        layout="zigzag",
        is_causal=True,
        **options,
    )
    mapped: Callable[..., Any] = jax.shard_map(fn, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    return mapped


def transfers(mesh: Mesh) -> Callable[..., Any]:
    """A step of the ring without attention: each shard of [key, value] moves on at once."""
    size = mesh.shape["x"]

    def step(both: Any) -> Any:
        return jax.lax.ppermute(both, "x", [(i, (i + 1) % size) for i in range(size)])

    spec = P(None, None, "x")
    mapped: Callable[..., Any] = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec)
    return mapped


def gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The gradients of a sum over fn's result."""
    return jax.grad(lambda *args: jnp.sum(fn(*args).astype(jnp.float32)), (0, 1, 2))


class Scaling:
    """Sizes and devices of one run.

    Attributes:
      tokens: seqlens of the whole sequence on all devices; one device takes each of them too, and
        its own share of the shortest.
    """

    def __init__(
        self,
        devices: list[Any],
        implementation: str,
        *,
        tokens: tuple[int, ...],
        heads: int,
        head_dim: int,
        turn_s: float,
        rounds: int,
    ) -> None:
        self.devices, self.implementation, self.tokens = devices, implementation, tokens
        self.heads, self.head_dim = heads, head_dim
        self.turn_s, self.rounds = turn_s, rounds
        self.mesh = device_checks.mesh_of(devices)
        self.on_all = NamedSharding(self.mesh, P(None, "x"))
        self.on_one = jax.sharding.SingleDeviceSharding(devices[0])

    def shape(self, seqlen: int) -> grid.Shape:
        return grid.square(1, seqlen, self.heads, self.head_dim, True)

    def one(self, precision: str) -> Callable[..., Any]:
        return functools.partial(
            jax_fa3.attention,
            is_causal=True,
            precision=precision,
            implementation=self.implementation,
        )

    def many(self, precision: str, strategy: str = "ring") -> Callable[..., Any]:
        return parallel(
            self.mesh, strategy, precision=precision, implementation=self.implementation
        )

    def forward(self, precision: str) -> Iterator[Row]:
        """Rows of kind "fwd", then one of kind "transfer" per size.

        tflops is per device. weak: over that of one device with as many tokens as each holds here;
        strong: time of one device with the same sequence over ours.
        """
        count = len(self.devices)
        sides: dict[tuple[str, int], timing.Side] = {}
        for seqlen in sorted({min(self.tokens) // count, *self.tokens}):
            args = random_inputs(self.shape(seqlen), self.on_one)
            sides[ONE_DEVICE, seqlen] = timing.jax_side(self.one(precision), *args)
        for seqlen in self.tokens:
            args = random_inputs(self.shape(seqlen), self.on_all)
            strategies = ("ring", "all_gather", "ulysses") if seqlen == max(self.tokens) else ()
            for strategy in strategies or ("ring",):
                side = timing.jax_side(self.many(precision, strategy), *args)
                sides[strategy, seqlen] = side
            both = jax.jit(lambda *x: jnp.stack(x))(*args[1:])
            sides["transfer", seqlen] = timing.jax_side(transfers(self.mesh), both)
        with gpu_state.sampling() as samples:
            turns = timing.take_turns(sides, timing.SUSTAINED, self.rounds, turn_s=self.turn_s)
        for (name, seqlen), taken in turns.items():
            if name == "transfer":
                size = 2 * (seqlen // count) * self.heads * self.head_dim * 2
                yield {
                    "kind": "transfer",
                    "seqlen_k": seqlen,
                    "ms": float(f"{taken.median:.4g}"),
                    "gb_per_s": float(f"{size / taken.median / 1e6:.4g}"),
                }
                continue
            devices = 1 if name == ONE_DEVICE else count
            row = results.timing_row(
                self.shape(seqlen),
                taken,
                impl="jax_fa3",
                precision=NAMES[precision],
                preset="accurate" if precision == "fp8" else None,
                regime="sustained",
                with_quantize=True,
                ratio={},
                state=samples.during(taken.spans),
            )
            row["tflops"] = float(f"{row['tflops'] / devices:.5g}")
            row |= {"devices": devices, "strategy": None if devices == 1 else name}
            if devices > 1:
                same = turns[ONE_DEVICE, seqlen]
                row["strong"] = float(f"{timing.speed_ratio(taken, same):.4g}")
                share = turns.get((ONE_DEVICE, seqlen // count))
                if share is not None:
                    # The work of a causal call grows with the square of its tokens.
                    weak = timing.speed_ratio(taken, share) * count
                    row["weak"] = float(f"{weak:.4g}")
            yield row

    def backward(self, precision: str) -> Iterator[Row]:
        """Forward and backward of every length, on all devices and, a device's share, on one."""
        count = len(self.devices)
        milliseconds: dict[int, float] = {}
        for seqlen, devices in itertools.product(self.tokens, (count, 1)):
            own = seqlen if devices > 1 else seqlen // count
            fn = self.many(precision) if devices > 1 else self.one(precision)
            args = random_inputs(self.shape(own), self.on_all if devices > 1 else self.on_one)
            compiled = jax.jit(gradient(fn)).lower(*args).compile()
            jax.block_until_ready(compiled(*args))
            start = time.perf_counter()
            jax.block_until_ready(compiled(*args))
            milliseconds[devices] = (time.perf_counter() - start) * 1e3
            row = {
                "kind": "step",
                "impl": "jax_fa3",
                "precision": NAMES[precision],
                "seqlen_k": own,
                "num_heads_q": self.heads,
                "head_dim": self.head_dim,
                "is_causal": True,
                "devices": devices,
                "strategy": "ring" if devices > 1 else None,
                "ms": float(f"{milliseconds[devices]:.4g}"),
            }
            if devices == 1:
                row["weak_of_all"] = float(f"{milliseconds[1] / milliseconds[count] * count:.4g}")
            yield row

    def hidden(self, precision: str) -> Iterator[Row]:
        """One row per size and GPU: the fraction of the ring's transfers that attention hides."""
        for seqlen in self.tokens:
            args = random_inputs(self.shape(seqlen), self.on_all)
            run = jax.jit(self.many(precision)).lower(*args).compile()
            jax.block_until_ready(run(*args))
            with tempfile.TemporaryDirectory() as folder:
                found = overlap.measure(functools.partial(_several, run, args), Path(folder))
            if not found and self.devices[0].platform == "gpu":
                raise RuntimeError("hidden: the profiler's trace must name the GPUs; it has none.")
            for device in found:
                yield {
                    "kind": "overlap",
                    "precision": NAMES[precision],
                    "seqlen_k": seqlen,
                    "device": device.device,
                    "calls": _TRACED_CALLS,
                    "communication_ms": round(device.communication_ms, 4),
                    "compute_ms": round(device.compute_ms, 4),
                    "hidden": None if device.hidden is None else round(device.hidden, 4),
                    "longest": device.longest,
                }


def _several(run: Callable[..., Any], args: list[jax.Array]) -> list[Any]:
    return [run(*args) for _ in range(_TRACED_CALLS)]
