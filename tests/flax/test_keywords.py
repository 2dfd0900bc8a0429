"""Every keyword that Flax passes: served, or refused by name."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import processes
import pytest
from rules.support import assert_close
from tolerances import FP8_AGAINST_EXACT, check_close

import jax_fa3

pytest.importorskip("flax.linen", reason="needs flax, which the extra `examples` installs")

from flax import linen, nnx
from rules.flax_layers import (
    ADAPTERS,
    BATCH,
    BOTH,
    HEADS,
    NAMES,
    QKV,
    SEQLEN_K,
    SEQLEN_Q,
    TOLERANCE,
    X,
    array,
    direct,
    helpers,
    layer,
)

from jax_fa3.flax import linen_attention_fn


@BOTH
def test_every_keyword_of_flax_is_named(api: str) -> None:
    """linen passes only what a signature names: a keyword left out would be lost in silence."""
    theirs = inspect.signature(helpers(api).dot_product_attention).parameters
    ours = inspect.signature(ADAPTERS[api]()).parameters
    assert [*ours][: len(theirs)] == [*theirs]
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind
        assert name == "promote_dtype" or ours[name].default == parameter.default
    module = {"linen": linen.MultiHeadDotProductAttention, "nnx": nnx.MultiHeadAttention}[api]
    passed = re.findall(r"^ {6}(\w+)=", inspect.getsource(module.__call__), re.MULTILINE)
    assert "mask" in passed
    layers_own = {"features", "axis", "kernel_init", "bias_init", "use_bias", "param_dtype", "name"}
    layers_own |= {"dot_general", "dot_general_cls", "error_msg"}
    assert set(passed) - layers_own <= set(ours)


@BOTH
def test_dtype_casts_and_numeric_hints_are_accepted(api: str) -> None:
    own = {"options": {"precision": "native"}, "precision": jax.lax.Precision.HIGHEST}
    hints = {"linen": {"force_fp32_for_softmax": True}, "nnx": {}}[api]
    out = direct(api, dtype=jnp.bfloat16, **own, **hints)
    assert out.dtype == jnp.bfloat16
    cast = (x.astype(jnp.bfloat16) for x in QKV)
    assert_close(out, jax_fa3.attention(*cast, precision="native"), 0)
    query, key, value = QKV
    mixed = direct(api, query.astype(jnp.bfloat16), key, value, **own)
    assert mixed.dtype == jnp.float32
    if api == "nnx":
        halved = direct(api, promote_dtype=lambda qkv, dtype: (qkv[0], qkv[1], qkv[2] / 2))
        assert_close(halved * 2, direct(api), 1e-6)


@BOTH
def test_sixteen_bit_inputs_are_quantised_unless_native(api: str) -> None:
    mask = jnp.tri(SEQLEN_Q, SEQLEN_K)[None, None]
    args = tuple(x.astype(jnp.bfloat16) for x in QKV)
    exact = linen.dot_product_attention(*QKV, mask=mask)
    fp8 = direct(api, *args, mask=mask)
    assert bool((fp8 == direct(api, *args, mask=mask, options={"precision": "fp8"})).all())
    check_close(fp8, exact, FP8_AGAINST_EXACT)
    native = direct(api, *args, mask=mask, options={"precision": "native"})
    assert_close(native, exact.astype(jnp.bfloat16))
    assert bool((fp8 != native).any())
    fast = {"quantization": jax_fa3.Quantization.fast()}
    assert bool((direct(api, *args, options=fast) != direct(api, *args)).any())


@BOTH
def test_options_reach_attention(api: str) -> None:
    options: dict[str, Any] = {
        "softmax_scale": 0.3,
        "logits_soft_cap": 4.0,
        "window_size": (3, 1),
        "sinks": array(HEADS, seed=5),
        "key_seqlens": jnp.array([4, 7], jnp.int32),
        "causal_alignment": "bottom_right",
        "implementation": "xla",
        "deterministic": True,
    }
    expected = jax_fa3.attention(*QKV, precision="native", **options)
    assert_close(direct(api, options=options), expected, 1e-6)


@BOTH
def test_dropout(api: str) -> None:
    rng = jax.random.key(1)
    expected = direct(api)
    for allowed in (
        {"dropout_rate": 0.1, "deterministic": True},
        {"dropout_rate": 0.0, "deterministic": False, "dropout_rng": rng},
        {"dropout_rate": 0, "broadcast_dropout": False},
    ):
        assert bool((direct(api, **allowed) == expected).all())
    message = "dropout_rate must be 0 unless deterministic=True .*; got 0.1. Apply dropout to"
    with pytest.raises(NotImplementedError, match=rf"^{NAMES[api]}: {message}"):
        direct(api, dropout_rate=0.1, dropout_rng=rng)
    with pytest.raises(TypeError, match=rf"^{NAMES[api]}: deterministic must be a bool"):
        direct(api, dropout_rate=0.1, deterministic=None)


@BOTH
def test_dropout_of_a_layer(api: str) -> None:
    dropping = layer(api, ADAPTERS[api](), dropout_rate=0.1)
    rngs = {"linen": {"rngs": {"dropout": jax.random.key(1)}}, "nnx": {"rngs": nnx.Rngs(1)}}[api]
    with pytest.raises(NotImplementedError, match=rf"^{NAMES[api]}: dropout_rate must be 0"):
        dropping(X, deterministic=False, **rngs)
    assert_close(dropping(X, deterministic=True), layer(api, None)(X), TOLERANCE)


@BOTH
def test_sown_weights(api: str) -> None:
    mutable = {"linen": {"mutable": ["intermediates"]}, "nnx": {}}[api]
    message = r"module must be None .*sow_weights=True.*; got MultiHead\w*Attention\."
    with pytest.raises(NotImplementedError, match=rf"^{NAMES[api]}: {message}"):
        layer(api, ADAPTERS[api]())(X, sow_weights=True, **mutable)


@pytest.mark.parametrize(
    "argument", ["einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum"]
)
def test_own_products_of_linen(argument: str) -> None:
    message = rf"^linen_attention_fn: {argument} must be None .*; got <function"
    with pytest.raises(NotImplementedError, match=message):
        direct("linen", **{argument: jnp.einsum})


def test_own_einsum_of_a_linen_layer() -> None:
    einsums = {
        "qk_attn_weights_einsum_cls": lambda: jnp.einsum,
        "attn_weights_value_einsum_cls": lambda: jnp.einsum,
    }
    with pytest.raises(NotImplementedError, match=r"qk_attn_weights_einsum must be None"):
        layer("linen", linen_attention_fn(), **einsums)(X)


@BOTH
def test_unknown_keywords(api: str) -> None:
    with pytest.raises(TypeError, match=rf"^{NAMES[api]}: input_positions must not .*int32\[5\]"):
        direct(api, input_positions=jnp.arange(5, dtype=jnp.int32))
    for option in ("causal", "mask", "bias", "return_logsumexp", "query_descale"):
        message = rf"^{NAMES[api]}: options must be among softmax_scale, .*; got {option}\."
        with pytest.raises(TypeError, match=message):
            ADAPTERS[api](**{option: True})
    with pytest.raises(ValueError, match=rf"^{NAMES[api]}: precision must be None or \"fp8\""):
        ADAPTERS[api](precision="bf16")
    with pytest.raises(TypeError, match=rf"^{NAMES[api]}: is_causal must be a bool"):
        ADAPTERS[api](is_causal=None)


@BOTH
def test_messages_name_the_adapter(api: str) -> None:
    query, key, value = QKV
    with pytest.raises(ValueError, match=rf"^{NAMES[api]}: key must have shape"):
        direct(api, query, key[..., :4], value)
    with pytest.raises(ValueError, match=rf"^{NAMES[api]}: query must have shape"):
        direct(api, query[0, 0], key, value, mask=jnp.ones((1, 1)))
    for mask in (jnp.ones((BATCH, 1, SEQLEN_K, SEQLEN_Q)), jnp.ones((1, 1, 1, 1, 1, 1))):
        with pytest.raises(ValueError, match=rf"^{NAMES[api]}: mask must be broadcastable"):
            direct(api, mask=mask)


@BOTH
def test_what_cannot_be_promoted(api: str) -> None:
    """Refused before Flax promotes, whose words name no argument."""
    query, key, value = QKV
    for argument, index in (("query", 0), ("key", 1), ("value", 2)):
        for odd, words in (
            (None, "must be an array; got NoneType."),
            (np.full(query.shape, None), "must be an array of numbers; got object."),
            (query.astype(jnp.float8_e4m3fn), "must not be float8 .*; got float8_e4m3fn."),
        ):
            arrays = [odd if i == index else x for i, x in enumerate((query, key, value))]
            with pytest.raises(TypeError, match=rf"^{NAMES[api]}: {argument} {words}$"):
                direct(api, *arrays)
    with pytest.raises(TypeError, match=rf"^{NAMES[api]}: mask must be an array; got object\.$"):
        direct(api, mask=object())
    for dtype in (1, "x", "int32", jnp.float8_e4m3fn, query):
        with pytest.raises(
            TypeError, match=rf"^{NAMES[api]}: dtype must be bfloat16, .*; got .*\.$"
        ):
            direct(api, dtype=dtype)
    if api == "nnx":
        with pytest.raises(TypeError, match="promote_dtype must be a function or None; got 3"):
            direct(api, promote_dtype=3)


def test_import_without_flax(tmp_path: Path) -> None:
    code = (
        "import sys, jax_fa3\n"
        "print(any(name.split('.')[0] == 'flax' for name in sys.modules))\n"
        "sys.modules['flax'] = None\n"
        "try:\n"
        "    import jax_fa3.flax\n"
        "except ImportError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    assert processes.output_of("-c", code, cwd=tmp_path).splitlines() == [
        "False",
        "ImportError jax_fa3.flax: flax must be installed; got no module of that name. "
        "Run `pip install flax`.",
    ]
