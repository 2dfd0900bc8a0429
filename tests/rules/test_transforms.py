"""jit, grad, vmap and their mixtures give what the plain XLA path gives, one call at a time."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rules.support import assert_close, attend, inputs, loss_of

import jax_fa3

pytestmark = pytest.mark.usefixtures("extension")

DTYPES = (jnp.bfloat16, jnp.float16)
PRECISIONS = ("fp8", "native")
MIXES = [mix for mix in itertools.product((True, False), repeat=3) if any(mix)]


def stacked(fn: Callable[..., Any], mapped: tuple[bool, ...], axis: int, *args: jax.Array) -> Any:
    """fn over a Python loop along axis of the mapped arguments, results stacked in front."""
    size = next(x.shape[axis] for x, m in zip(args, mapped, strict=True) if m)
    results = []
    for i in range(size):
        own = [jnp.take(x, i, axis) if m else x for x, m in zip(args, mapped, strict=True)]
        results.append(fn(*own))
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)


def mixed_inputs(mapped: tuple[bool, ...], axis: int, size: int = 3) -> list[jax.Array]:
    many = inputs(lead=(size, 2), seed=1)
    one = inputs(seed=2)
    return [
        jnp.moveaxis(m, 0, axis) if is_mapped else o
        for m, o, is_mapped in zip(many, one, mapped, strict=True)
    ]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_jit_and_grad_equal_the_xla_path(dtype: Any, precision: str) -> None:
    args = inputs(dtype=dtype)
    ours, plain = (
        attend(precision=precision, is_causal=True),
        attend("xla", precision=precision, is_causal=True),
    )
    assert_close(jax.jit(ours)(*args), plain(*args), 1e-6)
    got = jax.jit(jax.grad(loss_of(ours), (0, 1, 2)))(*args)
    want = jax.grad(loss_of(plain), (0, 1, 2))(*args)
    assert_close(got, want)
    assert all(g.dtype == dtype for g in got)


def test_vjp_through_both_results() -> None:
    args = inputs()
    _, pull = jax.vjp(attend(precision="native"), *args)
    results, pull_plain = jax.vjp(attend("xla", precision="native"), *args)
    for cotangents in (results, (results[0], results[1] * 0), (results[0] * 0, results[1])):
        assert_close(pull(cotangents), pull_plain(cotangents))


@pytest.mark.parametrize("precision", ["fp8", "native"])
def test_cotangents_alone_are_mapped(precision: str) -> None:
    """As in `jax.jacrev`: one forward pass, many rows of the Jacobian."""
    args = inputs()
    results, pull = jax.vjp(attend(precision=precision), *args)
    _, plain = jax.vjp(attend("xla", precision=precision), *args)
    many = [(jnp.cos(i * results[0]), jnp.sin(i * results[1])) for i in (1, 2, 3)]
    rows = jax.jit(jax.vmap(pull))(jax.tree.map(lambda *x: jnp.stack(x), *many))
    assert_close(jax.tree.map(lambda x: x[2], rows), plain(many[2]))
    assert_close(jax.tree.map(lambda x: x[0], rows), plain(many[0]))


@pytest.mark.parametrize(
    ("mapped", "precision"),
    [
        *((mix, "native") for mix in MIXES),
        ((True, False, False), "fp8"),
        ((True, False, True), "fp8"),
    ],
)
def test_vmap_of_every_mix(mapped: tuple[bool, ...], precision: str) -> None:
    for axis in (0, 1) if precision == "native" else (1,):
        args = mixed_inputs(mapped, axis)
        fn = attend(precision=precision)
        axes = tuple(axis if m else None for m in mapped)
        assert_close(jax.jit(jax.vmap(fn, axes))(*args), stacked(fn, mapped, axis, *args), 1e-2)


@pytest.mark.parametrize("mapped", MIXES)
def test_vmap_of_grad_is_per_example(mapped: tuple[bool, ...]) -> None:
    args = mixed_inputs(mapped, 0)
    grad = jax.grad(loss_of(attend(precision="native")), (0, 1, 2))
    axes = tuple(0 if m else None for m in mapped)
    got = jax.jit(jax.vmap(grad, axes))(*args)
    assert_close(got, stacked(grad, mapped, 0, *args))


@pytest.mark.parametrize("mapped", MIXES)
def test_grad_of_vmap_sums_over_shared_operands(mapped: tuple[bool, ...]) -> None:
    args = mixed_inputs(mapped, 0)
    axes = tuple(0 if m else None for m in mapped)

    def grads(implementation: str | None) -> Any:
        fn = jax.vmap(attend(implementation, precision="native"), axes)
        return jax.jit(jax.grad(loss_of(fn), (0, 1, 2)))(*args)

    assert_close(grads(None), grads("xla"), 3e-2)


def test_vmap_of_grad_does_not_permute_examples() -> None:
    # An inner batch of two beside a mapped axis of three: unfolding them in the wrong order shows.
    args = inputs(lead=(3, 2), seqlen_q=8, seqlen_k=8, heads_q=2, heads_kv=2)
    grad = jax.grad(loss_of(attend(precision="native")), (0, 1, 2))
    assert_close(jax.vmap(grad)(*args), stacked(grad, (True,) * 3, 0, *args))


def test_vmap_of_no_example() -> None:
    query, key, value = inputs()
    none = jnp.zeros((0, *query.shape), query.dtype)
    out, logsumexp = jax.vmap(lambda q: attend(precision="native")(q, key, value))(none)
    assert out.shape == none.shape
    assert logsumexp.shape[0] == 0


def test_nested_vmap() -> None:
    query = inputs(lead=(3, 2, 2))[0]
    _, key, value = inputs(lead=(2, 2), seed=3)
    fn = attend(precision="native")
    inner = jax.vmap(fn, (0, 0, None))
    got = jax.jit(jax.vmap(inner, (0, None, None), out_axes=1))(query, key, value[0])
    for i, j in itertools.product(range(3), range(2)):
        one = jax.tree.map(lambda x, i=i, j=j: x[j, i], got)
        assert_close(one, fn(query[i, j], key[j], value[0]), 1e-2)


def test_nested_vmap_of_query_alone_keeps_key_and_value_shared() -> None:
    query = inputs(lead=(3, 4, 2))[0]
    _, key, value = inputs(seed=3)
    fn = attend()
    mapped = jax.vmap(jax.vmap(fn, (0, None, None)), (0, None, None))
    got = jax.jit(mapped)(query, key, value)
    for i, j in itertools.product(range(3), range(4)):
        assert_close(jax.tree.map(lambda x, i=i, j=j: x[i, j], got), fn(query[i, j], key, value))


@pytest.mark.parametrize("query_too", [True, False])
def test_vmap_of_a_traced_scale(query_too: bool) -> None:
    args = mixed_inputs((query_too, False, False), 0)
    scales = jnp.array([0.1, 0.2, 0.4], jnp.float32)

    def fn(scale: Any, *arrays: Any) -> Any:
        return attend(softmax_scale=scale, precision="native")(*arrays)

    axes = (0, 0 if query_too else None, None, None)
    want = stacked(fn, (True, query_too, False, False), 0, scales, *args)
    assert_close(jax.vmap(fn, axes)(scales, *args), want, 1e-2)
    grad = jax.grad(lambda s, *a: loss_of(functools.partial(fn, s))(*a))
    want_grad = stacked(grad, (True, query_too, False, False), 0, scales, *args)
    assert_close(jax.vmap(grad, axes)(scales, *args), want_grad)


def test_vmap_of_float8_with_mapped_descales() -> None:
    query, key, value = (x.astype(jnp.float8_e4m3fn) for x in inputs(lead=(3, 2)))
    descale = 1 + jnp.arange(3 * 2 * 3, dtype=jnp.float32).reshape(3, 2, 3) / 7

    def fn(query: Any, key: Any, value: Any, descale: Any) -> Any:
        descales = {"query_descale": descale, "key_descale": 0.5, "value_descale": descale}
        return attend(**descales)(query, key, value)

    for mapped in ((True,) * 4, (True, False, False, True), (False, False, False, True)):
        args = [x if m else x[0] for x, m in zip((query, key, value, descale), mapped, strict=True)]
        axes = tuple(0 if m else None for m in mapped)
        assert_close(jax.vmap(fn, axes)(*args), stacked(fn, mapped, 0, *args), 1e-2)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 1, 3)])
def test_any_number_of_batch_axes(lead: tuple[int, ...]) -> None:
    args = inputs(lead=lead)
    out, logsumexp = attend()(*args)
    assert out.shape == args[0].shape
    assert logsumexp.shape == (*lead, 6, 5)
    flat = [x.reshape(-1, *x.shape[-3:]) for x in args]
    want, want_lse = attend()(*flat)
    assert_close((out, logsumexp), (want.reshape(out.shape), want_lse.reshape(logsumexp.shape)))
    grads = jax.eval_shape(jax.grad(loss_of(attend()), (0, 1, 2)), *args)
    assert [g.shape for g in grads] == [x.shape for x in args]


@pytest.mark.parametrize(
    "sizes", [{"lead": (0,)}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"seqlen_q": 0, "seqlen_k": 0}]
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_empty_sizes(sizes: dict[str, Any], precision: str) -> None:
    args = inputs(**sizes)
    out, logsumexp = jax.jit(attend(precision=precision))(*args)
    assert out.shape == args[0].shape
    assert not out.any()
    assert bool(jnp.all(logsumexp == -jnp.inf))
    grads = jax.grad(loss_of(attend(precision=precision)), (0, 1, 2))(*args)
    assert [g.shape for g in grads] == [x.shape for x in args]
    assert not any(g.any() for g in grads)
    mapped = jax.vmap(attend(precision=precision))(*(x[None] for x in args))
    assert mapped[0].shape == (1, *out.shape)


def test_rows_without_keys_have_zero_gradients() -> None:
    args = inputs(seqlen_q=5, seqlen_k=2)
    out, logsumexp = attend(is_causal=True)(*args)
    assert not out[:, :3].any()
    assert bool(jnp.all(logsumexp[..., :3] == -jnp.inf))
    assert out[:, 3:].all()
    loss = loss_of(attend(is_causal=True, precision="native"))
    dq, dk, dv = jax.grad(loss, (0, 1, 2))(*args)
    assert not dq[:, :3].any()
    assert all(bool(jnp.all(jnp.isfinite(g))) for g in (dq, dk, dv))


class TestControlFlow:
    def test_scan_over_layers_with_remat(self) -> None:
        query, key, value = inputs(seqlen_q=7)
        weights = jnp.array([1.0, 0.5, 2.0], jnp.bfloat16)

        def loss(implementation: str | None, policy: Any) -> Any:
            def layer(x: Any, weight: Any) -> Any:
                out, _ = attend(implementation, precision="native")(x * weight, key, value)
                return out, None

            body = jax.checkpoint(layer, policy=policy)
            return lambda x: jnp.sum(jax.lax.scan(body, x, weights)[0].astype(jnp.float32) ** 2)

        policies = (None, jax_fa3.checkpoint_policy(), jax.checkpoint_policies.everything_saveable)
        want = jax.grad(loss("xla", None))(query)
        for policy in policies:
            assert_close(jax.jit(jax.grad(loss(None, policy)))(query), want, 3e-2)

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_while_loop(self, precision: str) -> None:
        query, key, value = inputs(seqlen_q=7)
        fn = attend(precision=precision)

        def step(state: Any) -> Any:
            i, x, _ = state
            return i + 1, *fn(x, key, value)

        first = 0, query, jnp.zeros((2, 6, 7), jnp.float32)
        _, *got = jax.jit(lambda s: jax.lax.while_loop(lambda s: s[0] < 3, step, s))(first)
        want: Any = (query,)
        for _ in range(3):
            want = fn(want[0], key, value)
        assert_close(tuple(got), want)

    def test_cond(self) -> None:
        args = inputs()
        fn = jax.jit(lambda p, *a: jax.lax.cond(p, attend(), attend(is_causal=True), *a))
        assert_close(fn(False, *args), attend(is_causal=True)(*args))


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_donation(precision: str) -> None:
    args = inputs()
    fn = attend(precision=precision)
    want = fn(*args)
    grad = jax.grad(loss_of(fn), (0, 1, 2))
    want_grad = grad(*args)
    copies = [jnp.array(x) for x in args]
    assert_close(jax.jit(fn, donate_argnums=(0,))(jnp.array(args[0]), *args[1:]), want)
    assert_close(jax.jit(grad, donate_argnums=(0, 1, 2))(*copies), want_grad)
    assert copies[0].is_deleted()


def test_float8_inputs_under_every_transformation() -> None:
    """A cache of float8 keys and values for two layers: scanned over, mapped, in a loop, again."""
    query = inputs(seqlen_q=7)[0]
    _, keys, values = (x.astype(jnp.float8_e4m3fn) for x in inputs(lead=(2, 2), seed=3))
    scales = jnp.array([0.5, 2.0], jnp.float32)

    def layer(x: Any, own: Any) -> Any:
        key, value, scale = own
        fn = attend(key_descale=scale, value_descale=0.5)
        out, logsumexp = fn(x, key, value)
        return out, logsumexp

    def scanned(x: Any, *cache: Any) -> Any:
        return jax.lax.scan(jax.checkpoint(layer), x, cache)

    def looped(x: Any, *cache: Any) -> Any:
        def body(i: Any, x: Any) -> Any:
            return layer(x, [jax.lax.dynamic_index_in_dim(c, i, keepdims=False) for c in cache])[0]

        return jax.lax.fori_loop(0, 2, body, x)

    cache = keys, values, scales
    first, lse = layer(query, [x[0] for x in cache])
    second, lse_2 = layer(first, [x[1] for x in cache])
    assert_close(jax.jit(scanned)(query, *cache), (second, jnp.stack([lse, lse_2])))
    assert_close(jax.jit(looped)(query, *cache), second)
    mapped = jax.jit(jax.vmap(layer, (None, 0)))(query, cache)
    assert_close(jax.tree.map(lambda x: x[0], mapped), (first, lse))

    def unrolled(x: Any) -> Any:
        results = []
        for i in range(2):
            x, logsumexp = layer(x, [c[i] for c in cache])
            results.append(logsumexp)
        return x, jnp.stack(results)

    grad, want = (
        jax.jit(jax.grad(loss_of(fn)))(query) for fn in (lambda x: scanned(x, *cache), unrolled)
    )
    assert_close(grad, want)
    assert jax.eval_shape(scanned, query, *cache)[0].dtype == query.dtype


def test_x64_mode_keeps_the_dtypes() -> None:
    args = inputs()
    with jax.enable_x64(True):
        out, logsumexp = jax.eval_shape(attend(softmax_scale=0.125), *args)
        grads = jax.jit(jax.grad(loss_of(attend(precision="native")), (0, 1, 2)))(*args)
    assert (out.dtype, logsumexp.dtype) == (jnp.bfloat16, jnp.float32)
    assert all(g.dtype == jnp.bfloat16 for g in grads)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", [*DTYPES, jnp.float32])
def test_eval_shape(dtype: Any, precision: str) -> None:
    structs = [jax.ShapeDtypeStruct(x.shape, dtype) for x in inputs()]
    out, logsumexp = jax.eval_shape(attend(precision=precision), *structs)
    assert (out.shape, out.dtype) == (structs[0].shape, jnp.dtype(dtype))
    assert (logsumexp.shape, logsumexp.dtype) == ((2, 6, 5), jnp.float32)
    grads = jax.eval_shape(
        jax.vmap(jax.grad(loss_of(attend(precision=precision)), (0, 1, 2))),
        *(jax.ShapeDtypeStruct((3, *x.shape), dtype) for x in structs),
    )
    assert [g.shape for g in grads] == [(3, *x.shape) for x in structs]


def test_traced_scale_does_not_recompile() -> None:
    args = inputs()
    traces = []

    @jax.jit
    def fn(scale: Any, *arrays: Any) -> Any:
        traces.append(1)
        return attend(softmax_scale=scale)(*arrays)

    first, second = fn(0.1, *args), fn(0.2, *args)
    assert len(traces) == 1
    assert_close(second, attend(softmax_scale=0.2)(*args))
    assert float(jnp.max(jnp.abs(first[1] - second[1]))) > 0.1


def test_no_leaked_tracers() -> None:
    args = inputs()
    with jax.checking_leaks():
        fn = loss_of(attend(precision="native"))
        jax.jit(jax.vmap(jax.grad(fn, (0, 1, 2))))(*(x[None] for x in args))


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_kinds_of_scale_and_window_under_every_transformation(implementation: str | None) -> None:
    """Python, numpy and JAX scalars; lists, arrays and numpy integers as a window."""
    args = inputs(dtype=jnp.float32, seqlen_q=7)
    options: dict[str, Any] = {"precision": "native", "implementation": implementation}
    want: dict[float, Any] = {}
    for scale, window in (
        (1, [3, 0]),
        (np.float64(0.1), (np.int64(3), np.int32(0))),
        (jnp.float32(0.1), np.array([3, 0])),
    ):
        fn = attend(softmax_scale=scale, window_size=window, is_causal=np.bool_(True), **options)

        def scanned(*args: Any, fn: Any = fn) -> Any:
            return jax.lax.scan(lambda carry, _: (carry, fn(*args)), 0.0, None, length=1)[1]

        loss = loss_of(fn)
        grads = jax.jit(jax.grad(jax.checkpoint(loss)))(*args), jax.grad(loss)(*args)
        assert_close(*grads, 1e-5)
        results = jax.tree.map(lambda x: x[0], jax.jit(scanned)(*args)), jax.jit(fn)(*args)
        assert_close(*results, 1e-5)
        want[float(scale)] = results[1]
    assert float(jnp.abs(want[1.0][0] - want[0.1][0]).max()) > 0.1

    def traced(scale: Any) -> Any:
        return attend(softmax_scale=scale, window_size=(3, 0), is_causal=True, **options)(*args)

    assert_close(jax.jit(traced)(0.1), want[0.1], 1e-5)
    with pytest.raises(TypeError, match=r"^attention: window_size must be None or a pair"):
        jax.jit(lambda w: attend(window_size=w, **options)(*args))(jnp.array([3, 0]))
