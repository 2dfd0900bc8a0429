"""Inside shard_map and on explicit meshes: checks on, no collective, right gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rules.sharded import NEEDS_EIGHT, PLAIN, SIZES, put, spec_of
from rules.support import assert_close, attend, collectives, inputs, loss_of

import jax_fa3

pytestmark = [pytest.mark.usefixtures("extension"), NEEDS_EIGHT]


@pytest.mark.parametrize("implementation", [None, "xla"])
class TestManual:
    def options(self, implementation: str | None) -> Any:
        return attend(implementation, precision="native", is_causal=True)

    def test_shard_map_with_checks(self, mesh: Mesh, implementation: str | None) -> None:
        args = inputs(**SIZES)
        spec = P("dp", None, "tp")
        fn = jax.shard_map(
            self.options(implementation),
            mesh=mesh,
            in_specs=(spec,) * 3,
            out_specs=(spec, P("dp", "tp")),
        )
        assert_close(jax.jit(fn)(*args), PLAIN(*args), 1e-2)
        grad = jax.jit(jax.grad(loss_of(fn), (0, 1, 2)))(*args)
        assert_close(grad, jax.grad(loss_of(PLAIN), (0, 1, 2))(*args))

    def test_fp8_gradient_with_checks(self, mesh: Mesh, implementation: str | None) -> None:
        """Every constant of the quantiser must carry the varying axes of what it meets."""
        args = inputs(**SIZES)
        spec = P("dp", None, "tp")
        fp8 = attend(implementation, is_causal=True)
        fn = jax.shard_map(fp8, mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec, P("dp", "tp")))
        grad = jax.jit(jax.grad(loss_of(fn), (0, 1, 2)))(*args)
        assert_close(grad, jax.grad(loss_of(attend("xla", is_causal=True)), (0, 1, 2))(*args))

    def test_replicated_key_and_value(self, mesh: Mesh, implementation: str | None) -> None:
        query = inputs(lead=(4,))[0]
        _, key, value = inputs(lead=(1,), seed=4)

        def loop(query: Any, key: Any, value: Any) -> Any:
            parts = [PLAIN(query[i : i + 1], key, value) for i in range(4)]
            return tuple(jnp.concatenate(p) for p in zip(*parts, strict=True))

        def sharded(query: Any, key: Any, value: Any) -> Any:
            return jax.shard_map(
                self.options(implementation),
                mesh=mesh,
                in_specs=(P("tp"), P(), P()),
                out_specs=(P("tp"), P("tp")),
            )(query, key, value)

        got = jax.jit(sharded)(query, key, value)
        assert_close(got, loop(query, key, value), 1e-2)
        grad = jax.jit(jax.grad(loss_of(sharded), (0, 1, 2)))(query, key, value)
        assert_close(grad, jax.grad(loss_of(loop), (0, 1, 2))(query, key, value))

    def test_grad_inside(self, mesh: Mesh, implementation: str | None) -> None:
        args = inputs(lead=(4,))
        grad = jax.grad(loss_of(self.options(implementation)), (0, 1, 2))
        fn = jax.shard_map(grad, mesh=mesh, in_specs=(P("tp"),) * 3, out_specs=(P("tp"),) * 3)
        want = [
            jax.grad(loss_of(PLAIN), (0, 1, 2))(*(x[i : i + 1] for x in args)) for i in range(4)
        ]
        stacked = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *want)
        assert_close(jax.jit(fn)(*args), stacked)

    def test_replicated_lengths_and_scale(self, mesh: Mesh, implementation: str | None) -> None:
        """Small operands that every device holds, with gradients outside and the checks on."""
        args = inputs(**SIZES)
        lengths, scale = jnp.array([7, 3, 5, 0], jnp.int32), jnp.float32(0.2)

        def attention(lengths: Any, scale: Any, *args: Any) -> Any:
            options: dict[str, Any] = {"key_seqlens": lengths, "softmax_scale": scale}
            return attend(implementation, precision="native", **options)(*args)

        heads = P(None, None, "tp")
        fn = jax.shard_map(
            attention,
            mesh=mesh,
            in_specs=(P(), P(), heads, heads, heads),
            out_specs=(heads, P(None, "tp")),
        )
        operands = (lengths, scale, *args)
        assert_close(jax.jit(fn)(*operands), attention(*operands), 1e-2)
        grads = [jax.jit(jax.grad(loss_of(f), (1, 2, 3, 4)))(*operands) for f in (fn, attention)]
        assert_close(*grads)

    def test_some_axes_manual(self, mesh: Mesh, implementation: str | None) -> None:
        args = inputs(**SIZES)
        fn = jax.shard_map(
            self.options(implementation),
            mesh=mesh,
            in_specs=(P("dp"),) * 3,
            out_specs=(P("dp"), P("dp")),
            axis_names={"dp"},
        )
        assert_close(jax.jit(fn)(*args), PLAIN(*args), 1e-2)

    def test_vmap_of_shard_map(self, mesh: Mesh, implementation: str | None) -> None:
        args = inputs(lead=(3, 4))
        fn = jax.shard_map(
            self.options(implementation),
            mesh=mesh,
            in_specs=(P("tp"),) * 3,
            out_specs=(P("tp"), P("tp")),
        )
        assert_close(jax.jit(jax.vmap(fn))(*args), jax.vmap(PLAIN)(*args), 1e-2)


@pytest.mark.parametrize("implementation", [None, "xla"])
class TestExplicitMesh:
    @pytest.mark.parametrize(
        ("heads_kv", "kv_spec"), [(4, P("dp", None, "tp")), (2, P("dp")), (4, P())], ids=str
    )
    def test_values_types_and_gradient(
        self, explicit: Mesh, implementation: str | None, heads_kv: int, kv_spec: Any
    ) -> None:
        args = inputs(lead=(4,), heads_q=8, heads_kv=heads_kv)
        fn = attend(implementation, precision="native", is_causal=True)

        def pull(fn: Any, dout: Any, *arrays: Any) -> Any:
            return jax.vjp(lambda *a: fn(*a)[0], *arrays)[1](dout)

        dout = jnp.cos(args[0])
        want, want_grads = PLAIN(*args), pull(PLAIN, dout, *args)
        with jax.set_mesh(explicit):
            sharded = put(explicit, args, P("dp", None, "tp"), kv_spec, kv_spec)
            (sharded_dout,) = put(explicit, [dout], P("dp", None, "tp"))
            got = jax.jit(fn)(*sharded)
            grads = jax.jit(lambda *a: pull(fn, *a))(sharded_dout, *sharded)
        assert_close(got, want, 1e-2)
        assert spec_of(got[0]) == ("dp", None, "tp", None)
        assert spec_of(got[1]) == ("dp", "tp", None)
        assert_close(grads, want_grads)
        assert [spec_of(g) for g in grads] == [spec_of(x) for x in sharded]

    def test_without_a_mesh_in_scope(self, explicit: Mesh, implementation: str | None) -> None:
        args = inputs(**SIZES)
        fn = attend(implementation, precision="native", is_causal=True)
        sharded = put(explicit, args, *[P("dp", None, "tp")] * 3)
        assert_close(jax.jit(fn)(*sharded), PLAIN(*args), 1e-2)
        assert_close(fn(*sharded), PLAIN(*args), 1e-2)

    def test_no_collective(self, explicit: Mesh, implementation: str | None) -> None:
        with jax.set_mesh(explicit):
            sharded = put(explicit, inputs(**SIZES), *[P("dp", None, "tp")] * 3)
            assert collectives(attend(implementation, precision="native"), *sharded) == []

    def test_replicated_inputs(self, explicit: Mesh, implementation: str | None) -> None:
        args = inputs()
        want = attend("xla", precision="native")(*args)
        with jax.set_mesh(explicit):
            got = jax.jit(attend(implementation, precision="native"))(
                *put(explicit, args, P(), P(), P())
            )
        assert_close(got, want, 1e-2)

    def test_seqlen_is_refused(self, explicit: Mesh, implementation: str | None) -> None:
        with jax.set_mesh(explicit):
            args = put(explicit, inputs(**SIZES, seqlen_q=8), P("dp", "tp"), P("dp"), P("dp"))
            with pytest.raises(ValueError, match="seqlen axis of query must not be sharded"):
                jax.jit(attend(implementation))(*args)

    def test_leading_axes_and_vmap(self, explicit: Mesh, implementation: str | None) -> None:
        args = inputs(lead=(2, 4))
        fn = attend(implementation, precision="native")
        want = fn(*args)
        with jax.set_mesh(explicit):
            sharded = put(explicit, args, *[P(None, "tp")] * 3)
            assert_close(jax.jit(jax.vmap(fn))(*sharded), want, 1e-2)
            assert_close(jax.jit(fn)(*sharded), want, 1e-2)

    def test_inside_a_shard_map_over_other_axes(
        self, explicit: Mesh, implementation: str | None
    ) -> None:
        """Gradients outside and inside; JAX alone cannot lower that of a nested shard_map."""
        args = inputs(**SIZES)
        fn = attend(implementation, precision="native", is_causal=True)
        outside = jax.shard_map(
            fn, in_specs=(P("dp"),) * 3, out_specs=(P("dp"), P("dp")), axis_names={"dp"}
        )

        def loss(fn: Any) -> Any:
            def of_both(*args: Any) -> Any:
                out, logsumexp = fn(*args)
                return jnp.sum(jnp.cos(out.astype(jnp.float32))) + jnp.sum(jnp.sin(logsumexp))

            return of_both

        grad = jax.grad(loss(fn), (0, 1, 2))
        inside = jax.shard_map(
            grad, in_specs=(P("dp"),) * 3, out_specs=(P("dp"),) * 3, axis_names={"dp"}
        )
        want, want_grads = PLAIN(*args), jax.jit(jax.grad(loss(PLAIN), (0, 1, 2)))(*args)
        with jax.set_mesh(explicit):
            sharded = put(explicit, args, *[P("dp", None, "tp")] * 3)
            assert_close(jax.jit(outside)(*sharded), want, 1e-2)
            # Some versions of JAX gather around any shard_map of this kind.
            nothing = jax.shard_map(jnp.sin, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"})
            unavoidable = set(collectives(nothing, sharded[0]))
            assert set(collectives(outside, *sharded)) == unavoidable
            for pull in (jax.grad(loss(outside), (0, 1, 2)), inside):
                assert_close(jax.jit(pull)(*sharded), want_grads)


@pytest.mark.parametrize("granularity", ["tensor", "head", "row", "channel"])
def test_quantised_tensors_on_an_explicit_mesh(explicit: Mesh, granularity: str) -> None:
    x = inputs(**SIZES)[0]

    def both_ways(x: Any) -> Any:
        options: dict[str, Any] = {"num_heads_kv": 4} if granularity == "head" else {}
        quantized = jax_fa3.quantize(x, granularity=granularity, **options)
        return quantized.descale, jax_fa3.dequantize(quantized, x.dtype)

    with jax.set_mesh(explicit):
        (sharded,) = put(explicit, [x], P("dp", None, "tp"))
        descale, again = jax.jit(both_ways)(sharded)
    assert spec_of(again) == ("dp", None, "tp", None)
    assert_close((descale, again), both_ways(x), 1e-2)
