"""Batch and heads are sharded without a collective; seqlen and head_dim are refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rules.sharded import NATIVE, NEEDS_EIGHT, PLAIN, SIZES, put, spec_of
from rules.support import assert_close, attend, collectives, inputs, loss_of

pytestmark = [pytest.mark.usefixtures("extension"), NEEDS_EIGHT]


FREE = [
    P("dp", None, "tp"),
    P("dp"),
    P(None, None, "tp"),
    P("tp", None, "dp"),
]


@pytest.mark.parametrize("spec", FREE, ids=str)
@pytest.mark.usefixtures("partitioner")
def test_batch_and_heads_need_no_collective(mesh: Mesh, spec: Any) -> None:
    args = inputs(**SIZES)
    sharded = put(mesh, args, spec, spec, spec)
    assert collectives(NATIVE, *sharded) == []
    out, logsumexp = jax.jit(NATIVE)(*sharded)
    assert_close((out, logsumexp), PLAIN(*args), 1e-2)
    wanted = tuple(spec) + (None,) * (4 - len(spec))
    assert spec_of(out) == wanted
    assert spec_of(logsumexp) == (wanted[0], wanted[2], None)


@pytest.mark.parametrize("spec", FREE[:2], ids=str)
@pytest.mark.usefixtures("partitioner")
def test_gradient_needs_no_collective(mesh: Mesh, spec: Any) -> None:
    args = inputs(**SIZES)
    sharded = put(mesh, args, spec, spec, spec)

    def pull(query: Any, key: Any, value: Any, dout: Any) -> Any:
        (_, logsumexp), back = jax.vjp(NATIVE, query, key, value)
        return back((dout, jnp.zeros_like(logsumexp)))

    dout = jax.device_put(jnp.cos(args[0]), NamedSharding(mesh, spec))
    assert collectives(pull, *sharded, dout) == []
    _, back = jax.vjp(PLAIN, *args)
    lse_zeros = jnp.zeros((4, 8, 5), jnp.float32)
    grads = jax.jit(pull)(*sharded, dout)
    assert_close(grads, back((jnp.cos(args[0]), lse_zeros)))
    wanted = tuple(spec) + (None,) * (4 - len(spec))
    assert [spec_of(g) for g in grads] == [wanted] * 3


def test_fp8_needs_no_collective(mesh: Mesh) -> None:
    args = inputs(**SIZES)
    sharded = put(mesh, args, *[P("dp", None, "tp")] * 3)
    assert collectives(attend(), *sharded) == []
    assert_close(jax.jit(attend())(*sharded), attend("xla")(*args), 1e-2)


@pytest.mark.parametrize(
    ("heads_q", "heads_kv"),
    [(8, 2), (8, 1), (24, 6), (8, 4)],
    ids=["two", "mqa", "straddling", "four"],
)
def test_fewer_kv_heads_than_shards(mesh: Mesh, heads_q: int, heads_kv: int) -> None:
    args = inputs(lead=(2,), heads_q=heads_q, heads_kv=heads_kv)
    split = P(None, None, ("dp", "tp"))
    sharded = put(mesh, args, split, P(), P())
    assert collectives(NATIVE, *sharded) == []
    got = jax.jit(NATIVE)(*sharded)
    assert_close(got, PLAIN(*args), 1e-2)
    assert spec_of(got[0]) == (None, None, ("dp", "tp"), None)
    # Each device holds part of the gradient of a shared KV head: what remains is to add those up.
    grad = jax.grad(loss_of(NATIVE), (0, 1, 2))
    assert_close(jax.jit(grad)(*sharded), jax.grad(loss_of(PLAIN), (0, 1, 2))(*args))
    assert set(collectives(grad, *sharded)) <= {"all-reduce", "all-gather"}


@pytest.mark.parametrize("fn", [NATIVE, PLAIN], ids=["kernel", "xla"])
@pytest.mark.parametrize(("heads_kv", "spec"), [(4, P(None, None, ("dp", "tp"))), (2, FREE[0])])
def test_kv_heads_that_a_part_of_a_mesh_axis_would_split(
    mesh: Mesh, heads_kv: int, spec: Any, fn: Any
) -> None:
    """Query heads over more devices: the XLA path lets Shardy split KV heads by a part of "tp"."""
    args = inputs(lead=(2,), heads_q=8, heads_kv=heads_kv)
    sharded = put(mesh, args, spec, P(), P())

    def both(fn: Any) -> Any:
        return jax.jit(lambda *x: (*fn(*x), *jax.grad(loss_of(fn), (0, 1, 2))(*x)))

    got = both(fn)(*sharded)
    assert_close(got, both(PLAIN)(*args))
    assert spec_of(got[0]) == (*spec, None)


@pytest.mark.parametrize("fn", [NATIVE, PLAIN], ids=["kernel", "xla"])
def test_projections_split_more_ways_than_heads(mesh: Mesh, fn: Any) -> None:
    """Features over four devices: six heads are then split by a part of "tp", one head is split
    itself."""
    rng = np.random.default_rng(0)

    def run(x: Any, *weights: Any) -> Any:
        return fn(*((x @ w).reshape(*x.shape[:2], -1, 64) for w in weights))

    def arrays(*heads: int) -> list[Any]:
        x = rng.standard_normal((2, 5, 32))
        weights = [rng.standard_normal((32, n * 64)) / 6 for n in heads]
        args = [jnp.asarray(a, jnp.bfloat16) for a in (x, *weights)]
        return put(mesh, args, P("dp"), *[P(None, "tp")] * 3)

    args = arrays(6, 3, 3)
    whole = [jnp.asarray(np.asarray(x)) for x in args]
    checked = jax.jit(jax.grad(loss_of(run), (0, 1, 2, 3)) if fn is NATIVE else run)
    assert_close(checked(*args), checked(*whole), 4e-2)
    message = r"head_dim axis of \w+ must not be sharded; got it sharded over mesh axes \('tp',\)"
    for heads_kv in (2, 1):  # two heads over four devices: both axes by a part of "tp"
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.jit(run)(*arrays(8, heads_kv, heads_kv))


def test_replicated_key_and_value_get_the_whole_gradient(mesh: Mesh) -> None:
    args = inputs(**SIZES)
    sharded = put(mesh, args, P("dp", None, "tp"), P(), P())
    grad = jax.grad(loss_of(NATIVE), (0, 1, 2))
    want = jax.grad(loss_of(PLAIN), (0, 1, 2))(*args)
    assert_close(jax.jit(grad)(*sharded), want)


@pytest.mark.parametrize(
    "specs",
    [
        (P("dp"), P(None, None, "tp"), P()),
        (P(), P("dp"), P("dp")),
        (P("dp", None, "tp"), P("tp"), P("dp")),
        (P(None, None, "tp"), P("dp", None, "tp"), P(None, None, "dp")),
    ],
    ids=str,
)
@pytest.mark.usefixtures("partitioner")
def test_differing_shardings_give_right_values(mesh: Mesh, specs: Any) -> None:
    args = inputs(**SIZES)
    sharded = put(mesh, args, *specs)
    assert_close(jax.jit(NATIVE)(*sharded), PLAIN(*args), 1e-2)
    grad = jax.jit(jax.grad(loss_of(NATIVE), (0, 1, 2)))
    assert_close(grad(*sharded), jax.grad(loss_of(PLAIN), (0, 1, 2))(*args))


def test_traced_scale_gradient_is_summed_over_shards(mesh: Mesh) -> None:
    args = inputs(**SIZES)
    sharded = put(mesh, args, *[P("dp", None, "tp")] * 3)

    def loss(implementation: str | None) -> Any:
        def fn(scale: Any, *arrays: Any) -> Any:
            return loss_of(attend(implementation, precision="native", softmax_scale=scale))(*arrays)

        return jax.jit(jax.grad(fn))

    scale = jnp.float32(0.2)
    assert_close(loss(None)(scale, *sharded), loss("xla")(scale, *args))


class TestSequence:
    @pytest.mark.parametrize("argument", [0, 1, 2])
    def test_concrete_arrays_are_refused(self, mesh: Mesh, argument: int) -> None:
        args = inputs(**SIZES, seqlen_q=8, seqlen_k=8)
        specs = [P("dp", "tp") if i == argument else P("dp") for i in range(3)]
        sharded = put(mesh, args, *specs)
        name = ("query", "key", "value")[argument]
        with pytest.raises(ValueError, match=rf"seqlen axis of {name} must not be sharded.*'tp'"):
            NATIVE(*sharded)

    @pytest.mark.parametrize("fn", [NATIVE, PLAIN], ids=["kernel", "xla"])
    @pytest.mark.parametrize("argument", [0, 1, 2])
    @pytest.mark.usefixtures("partitioner")
    def test_under_jit_is_refused_while_compiling(self, mesh: Mesh, argument: int, fn: Any) -> None:
        args = inputs(**SIZES, seqlen_q=8, seqlen_k=8)
        specs = [P("dp", "tp") if i == argument else P("dp") for i in range(3)]
        sharded = put(mesh, args, *specs)
        name = ("query", "key", "value")[argument]
        message = f"seqlen axis of {name} must not be .*call context_parallel_attention"
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.jit(fn)(*sharded)

    @pytest.mark.parametrize("name", ["mask", "key_segment_ids"])
    def test_other_operands_of_the_xla_path(self, mesh: Mesh, name: str) -> None:
        args = put(mesh, inputs(**SIZES, seqlen_q=8, seqlen_k=8), *[P("dp")] * 3)
        ids = jax.device_put(jnp.ones((4, 8), jnp.int32), NamedSharding(mesh, P("dp", "tp")))
        mask = jax.device_put(
            jnp.ones((4, 1, 8, 8), bool), NamedSharding(mesh, P("dp", None, "tp"))
        )
        whole = jnp.ones((4, 8), jnp.int32)

        def fn(ids: Any, mask: Any, *args: Any) -> Any:
            if name == "mask":
                return attend("xla", mask=mask)(*args)
            return attend("xla", query_segment_ids=whole, key_segment_ids=ids)(*args)

        with pytest.raises(jax.errors.JaxRuntimeError, match=f"seqlen axis of {name} must not be"):
            jax.jit(fn)(ids, mask, *args)

    def test_head_dim_of_the_xla_path_under_jit(self, mesh: Mesh) -> None:
        sharded = put(mesh, inputs(**SIZES), P("dp"), P("dp", None, None, "tp"), P("dp"))
        with pytest.raises(jax.errors.JaxRuntimeError, match="head_dim axis of key must not be"):
            jax.jit(PLAIN)(*sharded)

    @pytest.mark.parametrize("fn", [NATIVE, PLAIN], ids=["kernel", "xla"])
    def test_a_mesh_axis_of_one_device_splits_nothing(self, fn: Any) -> None:
        devices = np.array(jax.devices("cpu")[:2]).reshape(2, 1)
        args = inputs(**SIZES, seqlen_q=8, seqlen_k=8)
        want = PLAIN(*args)
        for kind in (AxisType.Auto, AxisType.Explicit):
            mesh = Mesh(devices, ("dp", "sp"), axis_types=(kind,) * 2)
            sharded = put(mesh, args, *[P("dp", "sp")] * 3)
            assert_close(jax.jit(fn)(*sharded), want, 1e-2)
            assert_close(fn(*sharded), want, 1e-2)

    def test_head_dim_is_refused(self, mesh: Mesh) -> None:
        args = inputs(**SIZES)
        sharded = put(mesh, args, P(None, None, None, "tp"), P(), P())
        with pytest.raises(ValueError, match="head_dim axis of query must not be sharded"):
            NATIVE(*sharded)

    @pytest.mark.parametrize("attention", [NATIVE, PLAIN], ids=["kernel", "xla"])
    def test_a_result_sharded_on_seqlen_later_is_served(self, mesh: Mesh, attention: Any) -> None:
        args = inputs(**SIZES, seqlen_q=8)
        sharded = put(mesh, args, *[P("dp")] * 3)
        later = NamedSharding(mesh, P("dp", "tp"))

        def fn(*arrays: Any) -> Any:
            return jax.lax.with_sharding_constraint(attention(*(x * 1 for x in arrays))[0], later)

        assert_close(jax.jit(fn)(*sharded), PLAIN(*args)[0], 1e-2)
        grad = jax.jit(jax.grad(lambda *a: jnp.sum(fn(*a).astype(jnp.float32))))
        want = jax.grad(lambda *a: jnp.sum(PLAIN(*a)[0].astype(jnp.float32)))(*args)
        assert_close(grad(*sharded), want)

    def test_the_xla_path_in_every_mode(self, mesh: Mesh) -> None:
        """Differentiated in reverse and then forward, and mapped."""
        args = inputs(**SIZES, dtype=jnp.float32)
        sharded = put(mesh, args, *[P("dp", None, "tp")] * 3)

        def product(query: Any, key: Any, value: Any) -> Any:
            grad = jax.grad(loss_of(PLAIN))
            return jax.jvp(lambda x: grad(x, key, value), (query,), (jnp.cos(query),))[1]

        assert_close(jax.jit(product)(*sharded), jax.jit(product)(*args), 1e-4)
        mapped = jax.vmap(PLAIN, (0, None, None))
        twice = jnp.stack([sharded[0]] * 2)
        assert collectives(PLAIN, *sharded) == collectives(mapped, twice, *sharded[1:]) == []


class TestVmap:
    @pytest.mark.parametrize(
        "spec", [P("dp", None, None, "tp"), P(None, "dp", None, "tp"), P("tp", "dp")], ids=str
    )
    def test_over_and_inside_a_sharded_axis(self, mesh: Mesh, spec: Any) -> None:
        args = inputs(lead=(4, 2), heads_q=8, heads_kv=4)
        sharded = put(mesh, args, spec, spec, spec)
        # The mapped axis may be named for constraints inside, here for that of "dp" over it.
        fn = jax.vmap(NATIVE, spmd_axis_name="dp" if spec[0] == "dp" else None)
        assert collectives(fn, *sharded) == []
        out, logsumexp = jax.jit(fn)(*sharded)
        assert_close((out, logsumexp), jax.vmap(PLAIN)(*args), 1e-2)
        assert spec_of(out) == tuple(spec) + (None,) * (5 - len(spec))

    def test_query_alone_over_a_sharded_axis(self, mesh: Mesh) -> None:
        query = inputs(lead=(2, 2), heads_q=8, heads_kv=4)[0]
        _, key, value = inputs(heads_q=8, heads_kv=4)
        heads = P(None, None, "tp")
        sharded = put(mesh, (query, key, value), P("dp", None, None, "tp"), heads, heads)
        fn = jax.vmap(NATIVE, (0, None, None))
        assert collectives(fn, *sharded) == []
        want = jax.vmap(PLAIN, (0, None, None))(query, key, value)
        assert_close(jax.jit(fn)(*sharded), want, 1e-2)
        grad = jax.jit(jax.grad(loss_of(fn), (0, 1, 2)))
        plain = jax.grad(loss_of(jax.vmap(PLAIN, (0, None, None))), (0, 1, 2))
        assert_close(grad(*sharded), plain(query, key, value), 3e-2)
