"""attention_varlen equals a loop over its sequences."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rules.sharded import NEEDS_EIGHT, put, spec_of
from rules.support import assert_close, collectives, inputs

import jax_fa3

LENGTHS_Q, LENGTHS_K = [3, 0, 6, 2], [5, 2, 0, 7]
TOTAL_Q, TOTAL_K = sum(LENGTHS_Q) + 2, sum(LENGTHS_K) + 3  # some tokens belong to no sequence
MAXIMA = {"max_seqlen_q": 6, "max_seqlen_k": 9}


def bounds(lengths: list[int]) -> jax.Array:
    return jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)


CU_Q, CU_K = bounds(LENGTHS_Q), bounds(LENGTHS_K)


def packed(dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array, jax.Array]:
    return inputs(lead=(), seqlen_q=TOTAL_Q, seqlen_k=TOTAL_K, dtype=dtype)


def loop(query: Any, key: Any, value: Any, **options: Any) -> tuple[Any, Any]:
    out = jnp.zeros(query.shape, query.dtype)
    logsumexp = jnp.full((query.shape[1], query.shape[0]), -jnp.inf)
    for i in range(len(LENGTHS_Q)):
        rows, keys = slice(int(CU_Q[i]), int(CU_Q[i + 1])), slice(int(CU_K[i]), int(CU_K[i + 1]))
        one, lse = jax_fa3.attention(
            query[rows], key[keys], value[keys], return_logsumexp=True, **options
        )
        out, logsumexp = out.at[rows].set(one), logsumexp.at[:, rows].set(lse)
    return out, logsumexp


def varlen(*args: Any, cu: Any = (CU_Q, CU_K), **options: Any) -> Any:
    return jax_fa3.attention_varlen(*args, *cu, **MAXIMA, return_logsumexp=True, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "causal_alignment": "top_left"},
        {"window_size": (2, 1)},
        {"sinks": jnp.linspace(-1.0, 1.0, 6)},
    ],
    ids=["full", "bottom_right", "top_left", "window", "sinks"],
)
def test_equals_the_loop(options: dict[str, Any]) -> None:
    args = packed()
    got = jax.jit(lambda *a: varlen(*a, precision="native", **options))(*args)
    assert_close(got, loop(*args, precision="native", **options), 1e-5)


def test_fp8_equals_the_loop() -> None:
    args = packed(jnp.bfloat16)
    assert_close(varlen(*args), loop(*args), 3e-2)


def test_gradients_equal_the_loop_and_traced_lengths_work() -> None:
    args = packed()

    def loss(fn: Any) -> Any:
        return lambda *a: jnp.sum(jnp.cos(fn(*a, precision="native")[0]))

    want = jax.grad(loss(loop), (0, 1, 2))(*args)
    grad = jax.jit(
        jax.grad(lambda cu, *a: loss(lambda *b, **o: varlen(*b, cu=cu, **o))(*a), (1, 2, 3))
    )
    got = grad((CU_Q, CU_K), *args)
    assert_close(got, want, 1e-4)
    assert not got[0][-2:].any()


def test_tokens_of_no_sequence_do_not_leak() -> None:
    query, key, value = packed()
    spoiled = key.at[-3:].set(jnp.nan), value.at[-3:].set(jnp.inf)
    assert_close(varlen(query, *spoiled), varlen(query, key, value))


def test_vmap_over_arrays_and_lengths() -> None:
    many = [jnp.stack([x, 2 * x]) for x in packed()]
    shared = jax.vmap(lambda *a: varlen(*a, precision="native"))(*many)
    cu_q = jnp.stack([CU_Q, bounds([1, 4, 0, 6])])
    own = jax.vmap(lambda cu, *a: varlen(*a, cu=(cu, CU_K), precision="native"))(cu_q, *many)
    for i in range(2):
        one = [x[i] for x in many]
        assert_close(
            jax.tree.map(lambda x, i=i: x[i], shared), varlen(*one, precision="native"), 1e-5
        )
        want = varlen(*one, cu=(cu_q[i], CU_K), precision="native")
        assert_close(jax.tree.map(lambda x, i=i: x[i], own), want, 1e-5)


@pytest.mark.parametrize("axis", [1, 2])
def test_vmap_of_other_axes_and_twice(axis: int) -> None:
    many = [jnp.stack([jnp.stack([x, 2 * x]), jnp.stack([-x, 3 * x])]) for x in packed()]

    def one(*args: Any) -> Any:
        return varlen(*args, precision="native")[0]

    moved = [jnp.moveaxis(x[0], 0, axis) for x in many]
    got = jax.vmap(one, in_axes=axis, out_axes=1)(*moved)
    want = jnp.stack([one(*(x[0, i] for x in many)) for i in range(2)], axis=1)
    assert_close(got, want, 1e-5)
    twice = jax.vmap(jax.vmap(one, in_axes=axis), in_axes=0)(
        *(jnp.moveaxis(x, 1, axis + 1) for x in many)
    )
    assert_close(twice[1, 0], one(*(x[1, 0] for x in many)), 1e-5)


@NEEDS_EIGHT
class TestSharding:
    def rows(self, mesh: Mesh, *specs: Any) -> list[jax.Array]:
        args = inputs(lead=(), seqlen_q=24, seqlen_k=24, heads_q=8, heads_kv=4, dtype=jnp.float32)
        return put(mesh, args, *specs)

    def test_rows_are_refused(self, mesh: Mesh, explicit: Mesh) -> None:
        message = r"attention_varlen: the seqlen axis of key must not be sharded; got .*'tp'"
        args = self.rows(mesh, P(), P("tp"), P())
        with pytest.raises(ValueError, match=f"^{message}"):
            varlen(*args)
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.jit(varlen)(*args)
        with jax.set_mesh(explicit), pytest.raises(ValueError, match=f"^{message}"):
            jax.jit(varlen)(*self.rows(explicit, P(), P("tp"), P()))

    @pytest.mark.parametrize("kind", ["mesh", "explicit"])
    def test_heads_need_no_collective(self, kind: str, request: pytest.FixtureRequest) -> None:
        mesh = request.getfixturevalue(kind)

        def run(*args: Any) -> Any:
            return varlen(*args, precision="native", is_causal=True)

        def loss(*args: Any) -> Any:
            return jnp.sum(jnp.cos(run(*args)[0]))

        grad = jax.grad(loss, (0, 1, 2))
        whole = [jnp.asarray(np.asarray(x)) for x in self.rows(mesh, P(), P(), P())]
        with jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext():
            args = self.rows(mesh, *[P(None, "tp")] * 3)
            assert collectives(run, *args) == []
            out, _ = jax.jit(run)(*args)
            assert spec_of(out) == (None, "tp", None)
            grads = jax.jit(grad)(*args)
        assert_close((out, *grads), (run(*whole)[0], *jax.jit(grad)(*whole)), 1e-4)


def test_symbolic_rows_are_refused_in_one_sentence() -> None:
    structs = jax.export.symbolic_args_specs(packed(), ("t, 6, 64", "t, 3, 64", "t, 3, 64"))
    message = (
        r"^attention_varlen: query must have a seqlen known at trace time .*; got \[t, 6, 64\]"
    )
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(varlen, *structs)


def test_nothing_at_all() -> None:
    empty = inputs(lead=(), seqlen_q=0, seqlen_k=0)
    zeros = jnp.zeros(1, jnp.int32)
    out, logsumexp = varlen(*empty, cu=(zeros, zeros))
    assert out.shape == (0, 6, 64)
    assert logsumexp.shape == (6, 0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"implementation": "cuda"}, NotImplementedError, "packed sequences are not served"),
        (
            {"max_seqlen_q": 5},
            ValueError,
            "max_seqlen_q must be at least the longest sequence .6.; got 5",
        ),
        ({"max_seqlen_k": 2.0}, TypeError, "max_seqlen_k must be an int"),
        ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k must be at least 0 and below"),
        ({"cu_seqlens_q": jnp.zeros(5)}, TypeError, "cu_seqlens_q must be int32; got float32"),
        (
            {"cu_seqlens_q": jnp.zeros((1, 5), jnp.int32)},
            ValueError,
            "cu_seqlens_q must have shape",
        ),
        ({"cu_seqlens_k": CU_K[:-1]}, ValueError, r"cu_seqlens_k must have shape \[5\].*got \[4\]"),
        ({"cu_seqlens_q": CU_Q[::-1]}, ValueError, "cu_seqlens_q must start at 0 and not decrease"),
        (
            {"query": jnp.zeros((1, 2, 6, 64))},
            ValueError,
            r"query must have shape \[total, num_heads",
        ),
        (
            {"value": jnp.zeros((3, 3, 64))},
            ValueError,
            r"value must have shape \[17, 3, head_dim_v\]",
        ),
        (
            {
                "cu_seqlens_k": np.asarray(CU_K)
                + 4 * np.eye(1, len(CU_K), len(CU_K) - 1, dtype=int)[0]
            },
            ValueError,
            "cu_seqlens_k must end at or before the 17 packed rows; got 18",
        ),
        ({"implementation": "triton"}, ValueError, "implementation must be .*; got .*triton"),
        (
            {"return_logsumexp": "x"},
            TypeError,
            "return_logsumexp must be a bool known at trace time",
        ),
    ],
)
def test_messages(change: dict[str, Any], error: type[Exception], message: str) -> None:
    query, key, value = packed()
    arguments: dict[str, Any] = {
        "query": query,
        "key": key,
        "value": value,
        "cu_seqlens_q": CU_Q,
        "cu_seqlens_k": CU_K,
        **MAXIMA,
        **change,
    }
    with pytest.raises(error, match=f"^attention_varlen: {message}"):
        jax_fa3.attention_varlen(**arguments)
