"""The adapters inside Flax's own modules, against the modules with Flax's own attention."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rules.support import assert_close, calls, cuda_text
from tolerances import FP8_AGAINST_EXACT, check_close

import jax_fa3

pytest.importorskip("flax.linen", reason="needs flax, which the extra `examples` installs")

from flax import linen, nnx

from jax_fa3.flax import linen_attention_fn, nnx_attention_fn

BATCH, SEQLEN_Q, SEQLEN_K, HEADS, FEATURES, CONTEXT = 2, 5, 7, 6, 24, 10
ADAPTERS = {"linen": linen_attention_fn, "nnx": nnx_attention_fn}
NAMES = {api: f"{api}_attention_fn" for api in ADAPTERS}
BOTH = pytest.mark.parametrize("api", ["linen", "nnx"])
# Outputs of a layer in float32 against Flax's own; a mask off by one row gives about 1e-1.
TOLERANCE = 1e-5


def array(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


X, Y = array(BATCH, SEQLEN_Q, FEATURES), array(BATCH, SEQLEN_K, CONTEXT, seed=1)
QKV = tuple(
    array(BATCH, seqlen, HEADS, 8, seed=seed)
    for seed, seqlen in enumerate((SEQLEN_Q, SEQLEN_K, SEQLEN_K))
)


def layer(
    api: str, attention_fn: Any, *, cross: bool = False, **options: Any
) -> Callable[..., Any]:
    """layer(x[, y], mask=..., ...) -> output; the same parameters for every attention_fn.

    attention_fn None means Flax's own.
    """
    chosen = {} if attention_fn is None else {"attention_fn": attention_fn}
    if api == "linen":
        module = linen.MultiHeadDotProductAttention(num_heads=HEADS, **options, **chosen)
        plain = linen.MultiHeadDotProductAttention(num_heads=HEADS)
        variables = plain.init(jax.random.key(0), *((X, Y) if cross else (X,)))

        def linen_layer(*args: Any, **keywords: Any) -> Any:
            return module.apply(variables, *args, **keywords)

        return linen_layer
    features = {"in_kv_features": CONTEXT} if cross else {}
    layer: Callable[..., Any] = nnx.MultiHeadAttention(
        HEADS, FEATURES, decode=False, rngs=nnx.Rngs(0), **features, **options, **chosen
    )
    return layer


def helpers(api: str) -> Any:
    return linen if api == "linen" else nnx


def direct(api: str, *args: Any, options: Any = None, **keywords: Any) -> jax.Array:
    """The adapter called as Flax calls it, on QKV unless arrays are given."""
    return ADAPTERS[api](**(options or {}))(*(args or QKV), **keywords)


def masks(api: str) -> dict[str, jax.Array]:
    """Self-attention masks from Flax's helpers; every row sees a key."""
    make = helpers(api)
    tokens = jnp.ones((BATCH, SEQLEN_Q))
    valid = jnp.arange(SEQLEN_Q) < jnp.array([[3], [5]])
    causal = make.make_causal_mask(tokens)
    padding = make.make_attention_mask(tokens, valid)
    return {
        "causal": causal,
        "causal_bool": make.make_causal_mask(tokens, dtype=jnp.bool_),
        "padding": padding,
        "keys_only": valid[:, None, None, :],
        "combined": make.combine_masks(causal, padding),
        "per_head": (array(BATCH, HEADS, SEQLEN_Q, SEQLEN_Q) > 0).at[..., 1].set(True),
        "all": jnp.ones((1, 1, SEQLEN_Q, SEQLEN_Q)),
    }


# Equal to Flax


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
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_masks_of_flax(api: str, jit: bool) -> None:
    """Eager, a causal or full mask is recognised; under jit every mask is dense."""
    ours, theirs = (layer(api, fn) for fn in (ADAPTERS[api](), None))
    run = jax.jit(lambda fn, mask: fn(X, mask=mask), static_argnums=0) if jit else None
    outs = {}
    for name, mask in masks(api).items():
        outs[name] = run(ours, mask) if run else ours(X, mask=mask)
        assert_close(outs[name], theirs(X, mask=mask), TOLERANCE)
    different = [outs[name] for name in ("causal", "padding", "combined", "per_head", "all")]
    for i, out in enumerate(different):
        assert all(jnp.abs(out - other).max() > 1e-3 for other in different[:i])


@BOTH
def test_is_causal_equals_the_mask(api: str) -> None:
    theirs = layer(api, None)(X, mask=masks(api)["causal"])
    assert_close(layer(api, ADAPTERS[api](is_causal=True))(X), theirs, TOLERANCE)
    padded = layer(api, ADAPTERS[api](is_causal=True))(X, mask=masks(api)["padding"])
    assert_close(padded, layer(api, None)(X, mask=masks(api)["combined"]), TOLERANCE)


def test_is_causal_of_an_nnx_call() -> None:
    mask = masks("nnx")["padding"]
    ours, theirs = (layer("nnx", fn) for fn in (nnx_attention_fn(), None))
    assert_close(ours(X, is_causal=True), theirs(X, is_causal=True), TOLERANCE)
    combined = theirs(X, mask=masks("nnx")["combined"])
    assert_close(ours(X, mask=mask, is_causal=True), combined, TOLERANCE)
    with pytest.raises(TypeError, match=r"^nnx_attention_fn: is_causal must be a bool"):
        direct("nnx", is_causal=1)


@BOTH
def test_cross_attention(api: str) -> None:
    ours, theirs = (layer(api, fn, cross=True) for fn in (ADAPTERS[api](), None))
    assert_close(ours(X, Y), theirs(X, Y), TOLERANCE)
    rows, keys = jnp.ones((BATCH, SEQLEN_Q)), jnp.arange(SEQLEN_K) < jnp.array([[4], [6]])
    mask = helpers(api).make_attention_mask(rows, keys)
    assert_close(ours(X, Y, mask=mask), theirs(X, Y, mask=mask), TOLERANCE)
    triangle = jnp.tri(SEQLEN_Q, SEQLEN_K)[None, None]  # top-left, as in Flax
    expected = theirs(X, Y, mask=triangle)
    assert_close(ours(X, Y, mask=triangle), expected, TOLERANCE)
    assert_close(layer(api, ADAPTERS[api](is_causal=True), cross=True)(X, Y), expected, TOLERANCE)


@BOTH
def test_gradients(api: str) -> None:
    def gradient(fn: Any, mask: str) -> Any:
        attend = layer(api, fn)
        return jax.jit(jax.grad(lambda x, m: jnp.sum(jnp.cos(attend(x, mask=m)))))(X, own[mask])

    own = masks(api)
    expected = gradient(None, "combined")
    assert_close(gradient(ADAPTERS[api](), "combined"), expected, 1e-4)
    assert_close(gradient(ADAPTERS[api](is_causal=True), "padding"), expected, 1e-4)


@BOTH
def test_bias_and_batch_axes(api: str) -> None:
    """Two batch axes, a bias and a mask; modules pass no bias, callers of the function may."""
    query, key, value = (
        array(2, 3, seqlen, HEADS, 8, seed=seed)
        for seed, seqlen in enumerate((SEQLEN_Q, SEQLEN_K, SEQLEN_K))
    )
    bias = array(2, 3, HEADS, SEQLEN_Q, SEQLEN_K, seed=3)
    mask = (array(2, 3, 1, SEQLEN_Q, SEQLEN_K, seed=4) > 0).at[..., 0].set(True)
    # linen's: nnx's cannot fold a mask whose heads axis is 1 together with two batch axes.
    expected = linen.dot_product_attention(query, key, value, bias, mask)
    assert_close(direct(api, query, key, value, bias, mask), expected, TOLERANCE)
    assert jnp.abs(direct(api, query, key, value, None, mask) - expected).max() > 1e-2


def test_grouped_heads_of_nnx() -> None:
    if "num_kv_heads" not in inspect.signature(nnx.MultiHeadAttention.__init__).parameters:
        pytest.skip("needs a flax whose nnx.MultiHeadAttention has num_kv_heads")
    mask = masks("nnx")["combined"]
    ours, theirs = (layer("nnx", fn, num_kv_heads=2) for fn in (nnx_attention_fn(), None))
    assert_close(ours(X, mask=mask), theirs(X, mask=mask), TOLERANCE)


# Decoding with Flax's cache


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["plain", "is_causal"])
def test_decode_loop_of_linen(jit: bool, options: dict[str, Any]) -> None:
    fn = linen_attention_fn(**options)
    module = linen.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=fn, decode=True)
    variables = module.init(jax.random.key(0), X)

    def step(cache: Any, x: Any) -> Any:
        return module.apply({"params": variables["params"], "cache": cache}, x, mutable=["cache"])

    step = jax.jit(step) if jit else step
    cache, outs = variables["cache"], []
    for i in range(SEQLEN_Q):
        out, changed = step(cache, X[:, i : i + 1])
        cache = changed["cache"]
        outs.append(out)
    expected = layer("linen", None)(X, mask=masks("linen")["causal"])
    assert_close(jnp.concatenate(outs, 1), expected, TOLERANCE)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("call", [{}, {"is_causal": True}], ids=["plain", "is_causal"])
def test_decode_loop_of_nnx(jit: bool, call: dict[str, Any]) -> None:
    module: Any = layer("nnx", nnx_attention_fn())
    expected = layer("nnx", None)(X, mask=masks("nnx")["causal"])
    module.init_cache(X.shape)

    def step(module: Any, x: Any) -> Any:
        return module(x, decode=True, **call)

    step = nnx.jit(step) if jit else step
    outs = [step(module, X[:, i : i + 1]) for i in range(SEQLEN_Q)]
    assert_close(jnp.concatenate(outs, 1), expected, TOLERANCE)


@BOTH
def test_window_in_a_decode_step_is_refused(api: str) -> None:
    query, key, value = QKV
    mask = jnp.ones((BATCH, 1, 1, SEQLEN_K), bool)
    message = "window_size must be None for one query row with a mask"
    with pytest.raises(NotImplementedError, match=rf"^{NAMES[api]}: {message}.*got \(2, 0\)\."):
        direct(api, query[:, :1], key, value, mask=mask, options={"window_size": (2, 0)})


# Types and precision


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
def test_rows_without_keys_are_zero(api: str) -> None:
    """make_attention_mask hides every key from padded rows; there Flax averages the values."""
    valid = jnp.arange(SEQLEN_Q) < jnp.array([[3], [5]])
    mask = helpers(api).make_attention_mask(valid, valid)
    query = QKV[0]
    out = direct(api, query, query, query, mask=mask)
    theirs = linen.dot_product_attention(query, query, query, mask=mask)
    assert not out[0, 3:].any()
    assert_close(out[valid], theirs[valid], TOLERANCE)
    assert bool(theirs[0, 3:].any())


# What runs


@pytest.mark.usefixtures("extension")
@BOTH
def test_the_kernel_is_reached_where_the_mask_is_an_option(api: str) -> None:
    args = tuple(array(2, 70, 3, 64, dtype=jnp.bfloat16, seed=seed) for seed in range(3))
    causal = helpers(api).make_causal_mask(jnp.ones((2, 70)))
    kernel = ["jax_fa3_quantize", "jax_fa3_fwd_fp8"]

    def closed_over(mask: Any) -> str:
        fn = ADAPTERS[api]()
        return cuda_text(lambda *args: fn(*args, mask=mask), *args)

    by_option = cuda_text(ADAPTERS[api](is_causal=True), *args)
    assert calls(by_option) == kernel
    assert "is_causal = true" in by_option
    for mask in (causal, np.asarray(causal)):
        recognised = closed_over(mask)
        assert calls(recognised) == kernel
        assert "is_causal = true" in recognised
    everything = closed_over(jnp.ones((2, 1, 70, 70)))
    assert calls(everything) == kernel
    assert "is_causal = false" in everything
    assert calls(closed_over(causal.at[1, 0, 4, 5].set(1))) == []
    only_cuda = ADAPTERS[api](implementation="cuda")
    with pytest.raises(NotImplementedError, match=rf"^{NAMES[api]}: mask is not served"):
        jax.eval_shape(lambda mask: only_cuda(*args, mask=mask), causal)  # traced: a dense mask


@BOTH
def test_a_mask_of_keys_stays_small(api: str) -> None:
    size = 4099
    args = (jax.ShapeDtypeStruct((2, size, 3, 8), jnp.float32),) * 3
    mask = jax.ShapeDtypeStruct((2, 1, 1, size), jnp.float32)
    attend = jax.jit(lambda q, k, v, mask: ADAPTERS[api]()(q, k, v, mask=mask))
    lowered = attend.lower(*args, mask).as_text()
    sizes = [
        list(map(int, re.findall(r"\d+", s))) for s in re.findall(r"tensor<([\dx]+)x", lowered)
    ]
    assert max(np.prod(s) for s in sizes) < size * size


# Refusals


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


# Import


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
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(jax_fa3.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "False",
        "ImportError jax_fa3.flax: flax must be installed; got no module of that name. "
        "Run `pip install flax`.",
    ]
