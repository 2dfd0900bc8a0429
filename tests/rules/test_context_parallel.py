"""A sequence sharded over devices gives the results and the gradients of one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from rules.sequences import (
    EXACT,
    NEEDS_EIGHT,
    SIZES,
    STRATEGIES,
    WIDE,
    mesh_of,
    natural,
    parallel,
    pull,
    single,
)
from rules.support import (
    assert_close,
    attend,
    collectives,
    inputs,
    loss_of,
)

import jax_fa3

pytestmark = NEEDS_EIGHT


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
        # Key and value as one array, forward (3 hops) and again (3); the gradients of both begin on
        # the next device and end at home (3).
        assert count == 3 + 3 + 3

    def test_remat_by_name_does_not_run_the_ring_again(self) -> None:
        args = inputs(**WIDE, seqlen_q=16, seqlen_k=16)
        fn = parallel(mesh_of(4), layout="zigzag", is_causal=True)
        for policy, trips in ((jax_fa3.checkpoint_policy(), 2), (None, 3)):
            loss = jax.checkpoint(loss_of(fn), policy=policy)
            # Before XLA: some versions of it find that both trips of a shard are the same.
            text = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*args).as_text()
            assert text.count("stablehlo.collective_permute") == 3 * trips + 3

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
        # One number, summed in another order.
        assert_close(loss(True)(scale, *args), loss(False)(scale, *args), 5 * EXACT)
