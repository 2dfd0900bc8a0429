"""A sequence sharded over devices gives the results of one device, by the promised collectives."""

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
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
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

pytestmark = pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="needs eight CPU devices")

STRATEGIES = ("ring", "all_gather", "ulysses")
COLLECTIVE = {"ring": "collective-permute", "all_gather": "all-gather", "ulysses": "all-to-all"}
# Six query heads on three KV heads: with "ulysses" on two devices the groups straddle devices.
SIZES: dict[str, Any] = {"dtype": jnp.float32, "heads_q": 6, "heads_kv": 3}
# Two KV heads on four or eight devices: "ulysses" repeats them.
WIDE: dict[str, Any] = {"dtype": jnp.float32, "heads_q": 8, "heads_kv": 2}
EXACT = 1e-5


def mesh_of(*shape: int) -> Mesh:
    """Devices along "cp"; with two sizes along "dp" and "cp"."""
    names = ("dp", "cp")[2 - len(shape) :]
    devices = np.array(jax.devices("cpu")[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(shape))


def parallel(
    mesh: Mesh, *, batch: str | None = None, axis: Any = "cp", check: bool = True, **options: Any
) -> Callable[..., Any]:
    """(query, key, value) in the layout's order -> (out, logsumexp) in that order."""
    options = {"precision": "native", **options}

    def local(query: Any, key: Any, value: Any) -> Any:
        return jax_fa3.context_parallel_attention(
            query, key, value, axis_name=axis, return_logsumexp=True, **options
        )

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(batch, axis),) * 3,
        out_specs=(P(batch, axis), P(batch, None, axis)),
        check_vma=check,
    )


def natural(fn: Callable[..., Any], layout: str, size: int) -> Callable[..., Any]:
    """fn on sequences in natural order."""
    if layout == "contiguous":
        return fn

    def reordered(*args: Any) -> Any:
        out, logsumexp = fn(*(jax_fa3.zigzag_shard(x, size) for x in args))
        return (
            jax_fa3.zigzag_unshard(out, size),
            jax_fa3.zigzag_unshard(logsumexp, size, axis=2),
        )

    return reordered


@functools.cache
def single(is_causal: bool) -> Callable[..., Any]:
    return jax.jit(attend("xla", precision="native", is_causal=is_causal))


def pull(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Results and gradients by one compilation."""

    def both(*args: Any) -> Any:
        results, back = jax.vjp(fn, *args)
        cotangents = jax.grad(loss_of(lambda *both: both), (0, 1))(*results)
        return results, back(cotangents)

    return jax.jit(both)


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


class TestValues:
    @pytest.mark.parametrize(
        ("layout", "is_causal"),
        [("contiguous", False), ("contiguous", True), ("zigzag", True)],
        ids=["full", "causal", "zigzag"],
    )
    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_two_devices(self, strategy: str, layout: str, is_causal: bool) -> None:
        args = inputs(**SIZES, seqlen_q=12, seqlen_k=12)
        fn = parallel(mesh_of(2), strategy=strategy, layout=layout, is_causal=is_causal)
        compiled = jax.jit(natural(fn, layout, 2))
        assert_close(compiled(*args), single(is_causal)(*args), EXACT)

    @pytest.mark.parametrize(
        ("strategy", "layout"),
        [("ring", "zigzag"), ("ulysses", "zigzag")],
    )
    def test_eight_devices(self, strategy: str, layout: str) -> None:
        args = inputs(**WIDE, seqlen_q=16, seqlen_k=16)
        fn = parallel(mesh_of(8), strategy=strategy, layout=layout, is_causal=True)
        assert_close(jax.jit(natural(fn, layout, 8))(*args), single(True)(*args), EXACT)

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_one_device(self, strategy: str) -> None:
        args = inputs(**SIZES, seqlen_q=12, seqlen_k=12)
        fn = parallel(mesh_of(1), strategy=strategy, layout="zigzag", is_causal=True)
        assert_close(jax.jit(fn)(*args), single(True)(*args), EXACT)
        assert collectives(fn, *args) == []

    def test_other_seqlen_of_key_and_rank_three(self) -> None:
        args = tuple(x[0] for x in inputs(**SIZES, seqlen_q=6, seqlen_k=10))

        def local(*args: Any) -> Any:
            return jax_fa3.context_parallel_attention(*args, axis_name="cp", precision="native")

        # One axis of two, not under jit on purpose: no shape may come from the number of devices.
        fn = jax.shard_map(local, mesh=mesh_of(2, 2), in_specs=(P("cp"),) * 3, out_specs=P("cp"))
        assert_close(fn(*args), single(False)(*args)[0], EXACT)

    @pytest.mark.parametrize("shape", [(2, 2), (2, 3)])
    def test_one_axis_of_two(self, shape: tuple[int, int]) -> None:
        """Also of an odd size, on a part of the devices."""
        args = inputs(**SIZES, seqlen_q=12, seqlen_k=12)
        fn = parallel(mesh_of(*shape), batch="dp", layout="zigzag", is_causal=True)
        assert_close(jax.jit(natural(fn, "zigzag", shape[1]))(*args), single(True)(*args), EXACT)

    def test_two_axes_as_one_and_checks_off(self) -> None:
        args = inputs(**SIZES, seqlen_q=8, seqlen_k=8)
        fn = parallel(mesh_of(2, 2), axis=("dp", "cp"), check=False, is_causal=True)
        assert_close(jax.jit(fn)(*args), single(True)(*args), EXACT)

    def test_keys_of_later_shards_may_hold_nan(self) -> None:
        query, key, value = inputs(**SIZES, seqlen_q=8, seqlen_k=8)
        key, value = key.at[:, -1].set(jnp.nan), value.at[:, -1].set(jnp.inf)
        fn = parallel(mesh_of(2), is_causal=True)
        (out, logsumexp), (dquery, _, _) = pull(fn)(query, key, value)
        assert np.isfinite(out[:, :-1]).all()
        assert np.isfinite(logsumexp[..., :-1]).all()
        assert np.isfinite(dquery[:, :-1]).all()
        assert np.isnan(out[:, -1]).all()


class TestGradients:
    """On the axis of four of a (2, 4) mesh, batch on the other."""

    @pytest.mark.parametrize(
        ("strategy", "layout"),
        [("ring", "contiguous"), ("ring", "zigzag"), ("ulysses", "zigzag")],
    )
    def test_causal(self, strategy: str, layout: str) -> None:
        args = inputs(**WIDE, seqlen_q=8, seqlen_k=8)
        fn = parallel(mesh_of(2, 4), batch="dp", strategy=strategy, layout=layout, is_causal=True)
        got = pull(natural(fn, layout, 4))(*args)
        assert_close(got, pull(single(True))(*args), EXACT)

    @pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
    def test_the_ring_keeps_one_shard(self, layout: str) -> None:
        """What the forward pass saves does not grow with the number of devices."""
        args = inputs(**WIDE, seqlen_q=32, seqlen_k=32)

        def saved(strategy: str) -> int:
            fn = parallel(mesh_of(8), layout=layout, is_causal=True, strategy=strategy)
            pull = jax.eval_shape(lambda *x: jax.vjp(fn, *x)[1], *args)
            return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull))

        results = jax.eval_shape(single(True), *args)
        local = sum(x.size * x.dtype.itemsize for x in (*args, *results))
        assert saved("ring") <= local + 8 * 64  # scalars
        assert saved("all_gather") > 3 * local

    def test_the_ring_sends_gradients_with_their_shards(self) -> None:
        args = inputs(**WIDE, seqlen_q=16, seqlen_k=16)
        grad = jax.grad(loss_of(parallel(mesh_of(4), layout="zigzag", is_causal=True)), (0, 1, 2))
        count = str(jax.make_jaxpr(grad)(*args)).count("= ppermute[")
        # Key and value forward (3 hops) and again (3), their gradients together and home (4).
        assert count == 2 * (3 + 3) + 4

    def test_remat_by_name_does_not_run_the_ring_again(self) -> None:
        args = inputs(**WIDE, seqlen_q=16, seqlen_k=16)
        fn = parallel(mesh_of(4), layout="zigzag", is_causal=True)
        for policy, trips in ((jax_fa3.checkpoint_policy(), 2), (None, 3)):
            loss = jax.checkpoint(loss_of(fn), policy=policy)
            # Before XLA: some versions of it find that both trips of a shard are the same.
            text = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*args).as_text()
            assert text.count("stablehlo.collective_permute") == 2 * 3 * trips + 4

    def test_second_order_and_forward_mode_of_the_ring(self) -> None:
        args = inputs(**SIZES, seqlen_q=4, seqlen_k=4)

        def norm(fn: Any) -> Any:
            grad = jax.grad(loss_of(fn))
            return jax.jit(jax.grad(lambda x: jnp.sum(grad(x, *args[1:]) ** 2)))

        fn = parallel(mesh_of(2), is_causal=True, implementation="xla")
        assert_close(norm(fn)(args[0]), norm(single(True))(args[0]), 1e-4)
        with pytest.raises(NotImplementedError, match=r'^context_parallel.*strategy="all_gather"'):
            jax.jvp(jax.jit(fn), args, args)
        gathered = parallel(mesh_of(2), is_causal=True, implementation="xla", strategy="all_gather")
        tangents = jax.jit(lambda *x: jax.jvp(gathered, x, x)[1])(*args)
        assert_close(tangents, jax.jvp(single(True), args, args)[1], 1e-4)

    def test_traced_scale_is_summed_outside_the_branches(self) -> None:
        args = inputs(**SIZES, seqlen_q=4, seqlen_k=4)

        def loss(sharded: bool) -> Any:
            def fn(scale: Any, *args: Any) -> Any:
                options: dict[str, Any] = {"is_causal": True, "softmax_scale": scale}
                if not sharded:
                    return loss_of(attend("xla", precision="native", **options))(*args)
                return loss_of(parallel(mesh_of(2), **options))(*args)

            return jax.jit(jax.grad(fn))

        scale = jnp.float32(0.2)
        assert_close(loss(True)(scale, *args), loss(False)(scale, *args), EXACT)


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

    def test_each_permute_carries_one_array(self) -> None:
        """Some versions of XLA refuse a permute of two dtypes; the backward pass has both."""
        args = inputs(seqlen_q=16, seqlen_k=16)
        fn = parallel(mesh_of(4), is_causal=True)
        fp8 = parallel(mesh_of(4), is_causal=True, precision="fp8")
        for program, dtypes in (
            (fn, {"bf16": 2 * 3}),
            (jax.grad(loss_of(fn), (0, 1, 2)), {"bf16": 4 * 3, "f32": 4}),
            # Codes of key and of value, and the factors of both.
            (fp8, {"u8": 2 * 3, "f32": 3}),
            (jax.grad(loss_of(fp8), (0, 1, 2)), {"u8": 4 * 3, "f32": 2 * 3 + 4}),
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


class TestZigzag:
    def test_order_and_inverse(self) -> None:
        x = jnp.arange(2 * 12 * 3).reshape(2, 12, 3)
        moved = jax_fa3.zigzag_shard(x, 3)
        np.testing.assert_array_equal(moved[0, :, 0] // 3, [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7])
        np.testing.assert_array_equal(jax_fa3.zigzag_unshard(moved, 3), x)
        other = jax_fa3.zigzag_shard(jnp.swapaxes(x, 1, 2), 3, axis=-1)
        np.testing.assert_array_equal(jnp.swapaxes(other, 1, 2), moved)

    @pytest.mark.parametrize("function", ["zigzag_shard", "zigzag_unshard"])
    def test_refusals(self, function: str) -> None:
        fn, x = getattr(jax_fa3, function), np.zeros((2, 10, 3))
        with pytest.raises(
            ValueError, match=rf"^{function}: x must have a multiple of 4 .*; got \[2, 10, 3\]\.$"
        ):
            fn(x, 2)
        with pytest.raises(ValueError, match=f"^{function}: num_shards must be at least 1; got 0."):
            fn(x, 0)
        with pytest.raises(ValueError, match=rf"^{function}: axis must be an axis of x .*; got 3."):
            fn(x, 5, axis=3)
        with pytest.raises(TypeError, match=rf"^{function}: num_shards must be an int; got 2\.0\."):
            fn(x, 2.0)
        with pytest.raises(TypeError, match=f"^{function}: x must be an array; got str."):
            fn("x", 2)


class TestRefusals:
    def refuse(
        self, error: type[Exception], message: str, *, seqlen_k: int = 8, **options: Any
    ) -> None:
        args = inputs(seqlen_q=8, seqlen_k=seqlen_k)
        with pytest.raises(error, match=f"(?m)^context_parallel_attention: {message}$"):
            jax.eval_shape(parallel(mesh_of(4), **options), *args)

    def test_choices(self) -> None:
        self.refuse(
            ValueError,
            'strategy must be "ring" or "all_gather" or "ulysses"; got \'rings\'.',
            strategy="rings",
        )
        self.refuse(ValueError, 'layout must be "contiguous" or "zigzag"; got None.', layout=None)
        self.refuse(ValueError, "precision must be .*; got \"?'?fp4.*", precision="fp4")

    def test_axis_name(self) -> None:
        args = inputs(seqlen_q=8, seqlen_k=8)
        message = r"axis_name must name a manual axis .* around the call; got 'cq'\."

        def call(axis_name: Any) -> Any:
            return jax_fa3.context_parallel_attention(*args, axis_name=axis_name)

        with pytest.raises(ValueError, match=message):
            call("cq")
        fn = jax.shard_map(lambda x: call("cq"), mesh=mesh_of(2), in_specs=P(), out_specs=P())
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(fn, args[0])
        with pytest.raises(TypeError, match=r"axis_name must be the name .*; got 3\."):
            call(3)
        with pytest.raises(
            ValueError, match=r"axis_name must name each mesh axis once; got \('cp',"
        ):
            call(("cp", "cp"))

    def test_sizes(self) -> None:
        self.refuse(
            ValueError,
            r"query must have a num_heads_q that is a multiple of the 4 devices with"
            r' strategy="ulysses"; got 6\. Pass strategy="ring"\.',
            strategy="ulysses",
        )
        self.refuse(
            ValueError,
            'key must have an even seqlen per device with layout="zigzag"; got 3.',
            layout="zigzag",
            seqlen_k=12,
        )
        self.refuse(
            ValueError,
            r"key must have the seqlen of query \(2 per device\) with is_causal=True; got 4\.",
            is_causal=True,
            seqlen_k=16,
        )

    def test_float8_inputs(self) -> None:
        args = [x.astype(jnp.float8_e4m3fn) for x in inputs(seqlen_q=8, seqlen_k=8)]
        with pytest.raises(TypeError, match="query must be bfloat16, float16 or float32; got"):
            jax.eval_shape(parallel(mesh_of(4)), *args)

    def test_what_attention_refuses(self) -> None:
        args = inputs(dtype=jnp.float32, seqlen_q=8, seqlen_k=8)
        message = "^context_parallel_attention: float32 inputs are not served by the kernels"
        with pytest.raises(NotImplementedError, match=message):
            jax.eval_shape(parallel(mesh_of(4), implementation="cuda"), *args)
