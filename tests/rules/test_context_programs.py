"""What devices with parts of a sequence compute and send, by the promised collectives."""

from __future__ import annotations

import collections
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from rules.sequences import (
    COLLECTIVE,
    EXACT,
    NEEDS_EIGHT,
    STRATEGIES,
    mesh_of,
    natural,
    parallel,
    pull,
)
from rules.support import (
    assert_close,
    attend,
    calls,
    collectives,
    cuda_text,
    executions,
    inputs,
    loss_of,
)

import jax_fa3

pytestmark = NEEDS_EIGHT


def biased(dtype: Any) -> tuple[jax.Array, ...]:
    """Inputs whose keys drift along the sequence."""
    query, key, value = inputs(seqlen_q=16, seqlen_k=16, dtype=jnp.float32)
    key += jnp.linspace(-1, 3, 16)[:, None, None]
    return tuple(x.astype(dtype) for x in (query, key, value))


@functools.cache
def of_pairs(count: int, dtype: str) -> Any:
    """Causal FP8 attention to `biased` inputs, by one call for each pair of a piece of the rows and
    one of the keys; results and gradients."""

    def fn(*args: Any) -> Any:
        pieces = [x.reshape(x.shape[0], count, -1, *x.shape[2:]) for x in args]
        pairs = [(i, j) for i in range(count) for j in range(i)]
        at = np.array(pairs).T
        # Mapped: every pair is quantised apart.
        own = jax.vmap(attend("xla", is_causal=True), 1)(*pieces)
        query, key, value = pieces
        others = jax.vmap(attend("xla"), 1)(query[:, at[0]], key[:, at[1]], value[:, at[1]])
        rows = []
        for i in range(count):
            which = [n for n, pair in enumerate(pairs) if pair[0] == i]
            outs, logsumexps = (
                [x[i], *(y[n] for n in which)] for x, y in zip(own, others, strict=True)
            )
            rows.append(jax_fa3.merge_attention(outs, logsumexps))
        outs, logsumexps = zip(*rows, strict=True)
        return jnp.concatenate(outs, axis=1), jnp.concatenate(logsumexps, axis=2)

    return pull(fn)(*biased(dtype))


def sent(fn: Callable[..., Any], *args: Any) -> list[tuple[list[str], int]]:
    """dtypes and bytes of what each permute and gather in the traced program returns."""
    jaxpr = str(jax.make_jaxpr(fn)(*args))
    lines = [x for x in jaxpr.splitlines() if "= ppermute[" in x or "= all_gather[" in x]
    found = [re.findall(r":([a-z]+)(\d+)\[([\d,]*)\]", line.split("=")[0]) for line in lines]
    return [
        (
            [kind + bits for kind, bits, _ in results],
            sum(int(bits) // 8 * math.prod(map(int, n.split(","))) for _, bits, n in results),
        )
        for results in found
    ]


class TestPrecision:
    def test_ulysses_quantises_as_one_device_does(self) -> None:
        args = inputs(seqlen_q=12, seqlen_k=12, heads_q=8, heads_kv=4)
        fn = parallel(mesh_of(2), strategy="ulysses", is_causal=True, precision="fp8")
        # One step of bfloat16: the rounding errors of value are summed in another order.
        assert_close(jax.jit(fn)(*args), attend("xla", is_causal=True)(*args), 2e-3)

    @pytest.mark.parametrize(
        ("strategy", "layout", "implementation"),
        [("ring", "contiguous", "xla"), ("ring", "zigzag", None), ("all_gather", "zigzag", None)],
    )
    @pytest.mark.usefixtures("extension")
    def test_every_shard_is_quantised_once(
        self, strategy: str, layout: str, implementation: str | None
    ) -> None:
        """Numbers and gradients of one call for each pair of shards, whose keys have means that
        differ; on the path of the kernels from arrays of their shapes."""
        args = biased(jnp.float32 if implementation == "xla" else jnp.bfloat16)
        options: dict[str, Any] = {"strategy": strategy, "layout": layout, "is_causal": True}
        fn = parallel(mesh_of(2), precision="fp8", implementation=implementation, **options)
        limit = EXACT if implementation == "xla" else 2e-2
        want = of_pairs(4 if layout == "zigzag" else 2, args[0].dtype.name)
        assert_close(pull(natural(fn, layout, 2))(*args), want, limit)
        with pytest.raises(AssertionError):
            assert_close(jax.jit(attend("xla", is_causal=True))(*args), want[0], limit)


class TestPrograms:
    @pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_only_the_promised_collective(self, strategy: str, layout: str) -> None:
        mesh = mesh_of(2)
        sharding = jax.sharding.NamedSharding(mesh, P(None, "cp"))
        args = jax.device_put(inputs(seqlen_q=8, seqlen_k=8), sharding)
        fn = parallel(mesh, strategy=strategy, layout=layout, is_causal=True)
        assert set(collectives(fn, *args)) == {COLLECTIVE[strategy]}

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_an_explicit_axis_that_is_not_manual_is_not_gathered(self, strategy: str) -> None:
        args = inputs(seqlen_q=8, seqlen_k=8, heads_q=4, heads_kv=2, dtype=jnp.float32)

        options: dict[str, Any] = {"strategy": strategy, "is_causal": True, "precision": "native"}

        def local(*args: Any) -> Any:
            return jax_fa3.context_parallel_attention(*args, axis_name="cp", **options)

        def loss(fn: Any) -> Any:
            return jax.value_and_grad(lambda *args: jnp.sum(jnp.cos(fn(*args))), (0, 1, 2))

        plain = attend("xla", precision="native", is_causal=True)
        want = jax.jit(loss(lambda *args: plain(*args)[0]))(*args)
        mesh = jax.make_mesh((2, 2), ("dp", "cp"), devices=jax.devices("cpu")[:4])
        spec = P(None, "cp")
        with jax.set_mesh(mesh):
            fn = jax.shard_map(local, in_specs=(spec,) * 3, out_specs=spec, axis_names={"cp"})
            sharded = jax.device_put(args, jax.sharding.NamedSharding(mesh, P("dp", "cp")))
            # Some versions of JAX gather around any shard_map of this kind.
            nothing = jax.shard_map(jnp.sin, in_specs=spec, out_specs=spec, axis_names={"cp"})
            unavoidable = set(collectives(nothing, sharded[0]))
            assert set(collectives(fn, *sharded)) == {COLLECTIVE[strategy]} | unavoidable
            assert_close(jax.jit(loss(fn))(*sharded), want, EXACT)

    @pytest.mark.parametrize(
        ("strategy", "precision"),
        [("all_gather", "native"), ("all_gather", "fp8"), ("ring", "fp8")],
    )
    @pytest.mark.usefixtures("extension")
    def test_exported_with_a_symbolic_batch(self, strategy: str, precision: str) -> None:
        (batch,) = jax.export.symbolic_shape("batch")
        structs = [
            jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype)
            for x in inputs(seqlen_q=8, seqlen_k=8)
        ]
        fn = parallel(mesh_of(2), strategy=strategy, precision=precision, is_causal=True)
        exported = jax.export.export(
            jax.jit(pull(fn)),
            platforms=("cpu", "cuda"),
            disabled_checks=jax_fa3.export_disabled_checks(),
        )(*structs)
        assert "jax_fa3_bwd" in calls(exported.mlir_module())

    @pytest.mark.usefixtures("extension")
    @pytest.mark.parametrize(
        ("strategy", "layout", "kernels"),
        [
            ("ring", "contiguous", 4),
            ("ring", "zigzag", 8),  # two calls a step
            ("all_gather", "zigzag", 8),
            ("ulysses", "zigzag", 1),
        ],
    )
    def test_the_kernels_serve_every_local_call(
        self, strategy: str, layout: str, kernels: int
    ) -> None:
        args = inputs(heads_q=8, heads_kv=4, seqlen_q=16, seqlen_k=16)
        fn = parallel(mesh_of(4), strategy=strategy, layout=layout, is_causal=True, precision="fp8")
        text = cuda_text(fn, *args)
        forward = {name for name in calls(text) if "fwd" in name}
        assert len(forward) == 1
        # Inside a manual region calls are printed with their dialect.
        assert executions(text.replace("func.call @", "call @"), forward.pop()) == kernels
        # Parts are merged by their logsumexp.
        assert set(re.findall(r"wants_shift = (\w+)", text)) == {"true"}

    def test_each_permute_carries_one_array(self) -> None:
        """Some versions of XLA refuse a permute of two dtypes; the backward pass has both."""
        args = inputs(seqlen_q=16, seqlen_k=16)
        fn = parallel(mesh_of(4), is_causal=True)
        fp8 = parallel(mesh_of(4), is_causal=True, precision="fp8")
        for program, dtypes in (
            (fn, {"bf16": 3}),
            (jax.grad(loss_of(fn), (0, 1, 2)), {"bf16": 2 * 3, "f32": 3}),
            # Codes and factors of key and value, all as bytes.
            (fp8, {"u8": 3}),
            (jax.grad(loss_of(fp8), (0, 1, 2)), {"u8": 2 * 3, "f32": 3}),
        ):
            found = [kinds for kinds, _ in sent(program, *args)]
            assert all(len(kinds) == 1 for kinds in found)
            assert collections.Counter(kind for (kind,) in found) == dtypes

    @pytest.mark.usefixtures("extension")
    @pytest.mark.parametrize("strategy", ["ring", "all_gather"])
    def test_fp8_sends_half_the_bytes(self, strategy: str) -> None:
        args = inputs(seqlen_q=512, seqlen_k=512)
        options: dict[str, Any] = {"strategy": strategy, "is_causal": True}
        wide, narrow = (
            sum(size for _, size in sent(parallel(mesh_of(2), precision=p, **options), *args))
            for p in ("native", "fp8")
        )
        # What factors and means add is the same for longer shards.
        assert wide / 2 <= narrow <= wide / 2 + 2 * 2 * 3 * (3 * 64 + 2) * 4
