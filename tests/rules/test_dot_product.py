"""dot_product_attention against jax.nn's, and where the two differ on purpose."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rules.support import assert_close, inputs

import jax_fa3

RNG = np.random.default_rng(7)


def both(*args: Any, **options: Any) -> tuple[Any, Any]:
    ours = jax_fa3.dot_product_attention(*args, **options)
    return ours, jax.nn.dot_product_attention(*args, **options)


def test_signature_starts_with_that_of_jax() -> None:
    ours = inspect.signature(jax_fa3.dot_product_attention).parameters
    for name, parameter in inspect.signature(jax.nn.dot_product_attention).parameters.items():
        assert name in ours
        assert ours[name].kind == parameter.kind
        assert ours[name].default == parameter.default
    extra = set(ours) - set(inspect.signature(jax.nn.dot_product_attention).parameters)
    assert extra == {"precision", "quantization"}


# No row of these is without a key: there the two differ, see below.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal_top_left": {"is_causal": True},
    "window": {"local_window_size": (3, 2)},
    "window_int": {"local_window_size": 2},
    "causal_window": {"is_causal": True, "local_window_size": (2, 0)},
    "bias": {"bias": jnp.asarray(RNG.standard_normal((2, 6, 5, 7)), jnp.float32)},
    "bias_rank_3": {"bias": jnp.asarray(RNG.standard_normal((6, 5, 7)), jnp.float32)},
    "mask": {"mask": jnp.asarray(RNG.random((2, 1, 5, 7)) < 0.6).at[..., 0].set(True)},
    "mask_of_keys": {"mask": jnp.asarray(RNG.random((2, 1, 1, 7)) < 0.6).at[..., 1].set(True)},
    "key_lengths": {"key_value_seq_lengths": jnp.array([3, 7], jnp.int32)},
    "all_lengths": {
        "query_seq_lengths": jnp.array([4, 5], jnp.int32),
        "key_value_seq_lengths": jnp.array([5, 6], jnp.int32),
        "is_causal": True,
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_jax_nn(name: str) -> None:
    args = inputs(dtype=jnp.float32)
    ours, theirs = both(*args, **OPTIONS[name])
    assert_close(ours, theirs, 1e-5)


def test_gradients_equal_jax_nn() -> None:
    args = inputs(dtype=jnp.float32)
    bias = OPTIONS["bias"]["bias"]

    def grads(fn: Any) -> Any:
        def loss(bias: Any, *args: Any) -> Any:
            return jnp.sum(jnp.cos(fn(*args, bias, is_causal=True)))

        return jax.grad(loss, (0, 1, 2, 3))(bias, *args)

    assert_close(grads(jax_fa3.dot_product_attention), grads(jax.nn.dot_product_attention), 1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_residual(dtype: Any) -> None:
    args = inputs(dtype=dtype)
    ours, theirs = both(*args, return_residual=True)
    assert_close(ours, theirs, 1e-5 if dtype == jnp.float32 else 0.1)


def test_rank_3_and_lengths() -> None:
    args = inputs(lead=(), dtype=jnp.float32)
    lengths = jnp.array([4], jnp.int32)
    ours, theirs = both(*args, key_value_seq_lengths=lengths, return_residual=True)
    assert_close(ours, theirs, 1e-5)
    bias = OPTIONS["bias"]["bias"][:1]
    ours, theirs = both(*args, bias)
    assert_close(ours, theirs, 1e-5)


def test_sixteen_bit_inputs_are_quantised_unless_native() -> None:
    args = inputs()
    fp8 = jax_fa3.dot_product_attention(*args)
    assert_close(fp8, jax_fa3.attention(*args, precision="fp8"))
    native = jax_fa3.dot_product_attention(*args, precision="native")
    assert_close(native, jax.nn.dot_product_attention(*args))
    assert bool(jnp.any(fp8 != native))


def test_a_row_without_keys_is_zero_where_jax_averages() -> None:
    args = inputs(dtype=jnp.float32)
    mask = jnp.ones((1, 1, 5, 7), bool).at[:, :, 2].set(False)
    ours, theirs = both(*args, mask=mask)
    assert not ours[:, 2].any()
    assert_close(theirs[:, 2, 0], args[2][:, :, 0].mean(1), 1e-5)

    def loss(*args: Any) -> Any:
        return jnp.sum(jax_fa3.dot_product_attention(*args, mask=mask)[:, 2])

    assert not any(g.any() for g in jax.grad(loss, (0, 1, 2))(*args))


def test_cudnn_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"implementation must be None.*got 'cudnn'.*\"cuda\""):
        jax_fa3.dot_product_attention(*inputs(), implementation="cudnn")  # type: ignore[call-overload]


def test_messages_name_this_function() -> None:
    query, key, value = inputs()
    with pytest.raises(ValueError, match=r"^dot_product_attention: key must"):
        jax_fa3.dot_product_attention(query, key[:, :, :, :32], value)
    with pytest.raises(TypeError, match=r"^dot_product_attention: return_residual must be a bool"):
        jax_fa3.dot_product_attention(query, key, value, return_residual="x")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"^dot_product_attention: query must have shape"):
        jax_fa3.dot_product_attention(query[0, 0], key, value)
