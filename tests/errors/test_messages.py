"""Every message of the input checks, in full. All are raised at trace time, before any compile."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa3
from jax_fa3 import _shapes

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def sds(*shape: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


Q, K = sds(2, 5, 6, 64), sds(2, 7, 3, 64)
Q8, K8 = sds(2, 5, 6, 64, dtype=E4M3), sds(2, 7, 3, 64, dtype=E4M3)
D8 = {n: sds(2, 3, dtype=F32) for n in ("query_descale", "key_descale", "value_descale")}
ALL8 = {"query": Q8, "key": K8, "value": K8, **D8}
TRACED = sds(dtype=F32)
ANY = jax_fa3.Quantization()

DTYPES = "bfloat16, float16, float32, float8_e4m3fn or float8_e5m2"
WINDOW = "window_size must be None or a pair (left, right) of non-negative ints or None"
FULL = "[2, 6, 5, 7] (batch, num_heads_q, seqlen_q, seqlen_k)"

# (changed arguments, exception, message after "attention: ").
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    # kinds and ranks
    ({"query": [1.0]}, TypeError, "query must be an array; got list."),
    ({"value": None}, TypeError, "value must be an array; got NoneType."),
    ({"query": sds(5, 64)}, ValueError, "query must have shape [..., seqlen_q, num_heads_q,"
     " head_dim] (rank 3 or more); got [5, 64]."),
    ({"query": sds(2, 5, 0, 64)}, ValueError,
     "query must have a num_heads_q of at least 1; got [2, 5, 0, 64]."),
    ({"query": sds(2, 5, 6, 0)}, ValueError,
     "query must have a head_dim of at least 1; got [2, 5, 6, 0]."),
    ({"value": sds(2, 7, 3, 0)}, ValueError,
     "value must have a head_dim_v of at least 1; got [2, 7, 3, 0]."),
    # shapes
    ({"key": sds(1, 7, 3, 64)}, ValueError, "key must have shape [2, seqlen_k, num_heads_kv, 64]"
     " (batch and head_dim of query); got [1, 7, 3, 64]."),
    ({"key": sds(2, 7, 3, 32)}, ValueError, "key must have shape [2, seqlen_k, num_heads_kv, 64]"
     " (batch and head_dim of query); got [2, 7, 3, 32]."),
    ({"key": sds(7, 3, 64)}, ValueError, "key must have shape [2, seqlen_k, num_heads_kv, 64]"
     " (batch and head_dim of query); got [7, 3, 64]."),
    ({"query": sds(5, 6, 64)}, ValueError, "key must have shape [seqlen_k, num_heads_kv, 64]"
     " (batch and head_dim of query); got [2, 7, 3, 64]."),
    ({"value": sds(2, 8, 3, 64)}, ValueError, "value must have shape [2, 7, 3, head_dim_v]"
     " (all but head_dim_v of key); got [2, 8, 3, 64]."),
    ({"value": sds(2, 7, 6, 64)}, ValueError, "value must have shape [2, 7, 3, head_dim_v]"
     " (all but head_dim_v of key); got [2, 7, 6, 64]."),
    ({"key": sds(2, 7, 4, 64), "value": sds(2, 7, 4, 64)}, ValueError,
     "key must have a num_heads_kv that divides num_heads_q = 6; got 4."),
    ({"key": sds(2, 7, 0, 64), "value": sds(2, 7, 0, 64)}, ValueError,
     "key must have a num_heads_kv that divides num_heads_q = 6; got 0."),
    # dtypes
    ({"query": sds(2, 5, 6, 64, dtype=jnp.int32)}, TypeError,
     f"query must be {DTYPES}; got int32."),
    ({"value": sds(2, 7, 3, 64, dtype=np.complex64)}, TypeError,
     f"value must be {DTYPES}; got complex64."),
    ({"key": sds(2, 7, 3, 64, dtype=jnp.float8_e4m3fnuz)}, TypeError,
     f"key must be {DTYPES}; got float8_e4m3fnuz."),
    ({"key": sds(2, 7, 3, 64, dtype=F16)}, TypeError,
     "key must have the dtype of query (bfloat16) or be float8; got float16."),
    ({"value": sds(2, 7, 3, 64, dtype=F32)}, TypeError,
     "value must have the dtype of query (bfloat16) or be float8; got float32."),
    ({"key": K8, "key_descale": 1.0}, TypeError,
     "value must be float8 exactly when key is (float8_e4m3fn); got bfloat16."),
    ({"value": K8, "value_descale": 1.0}, TypeError,
     "value must be float8 exactly when key is (bfloat16); got float8_e4m3fn."),
    ({"query": Q8, "query_descale": 1.0}, TypeError,
     "key must be float8 when query is (float8_e4m3fn); got bfloat16."),
    ({**ALL8, "query": sds(2, 5, 6, 64, dtype=F32), "query_descale": None}, TypeError,
     "query must be bfloat16, float16 or float8 when key and value are float8; got float32."),
    # descales
    ({**ALL8, "query_descale": None}, ValueError, "query_descale must be given when query is"
     " float8_e4m3fn: a scalar, [2, 3] or [3]; got None."),
    ({**ALL8, "value_descale": None}, ValueError, "value_descale must be given when value is"
     " float8_e4m3fn: a scalar, [2, 3] or [3]; got None."),
    ({"key_descale": 0.5}, ValueError, "key_descale must be None when key is bfloat16 (descales"
     " belong to float8 inputs); got 0.5."),
    ({"query_descale": D8["query_descale"]}, ValueError, "query_descale must be None when query is"
     " bfloat16 (descales belong to float8 inputs); got float32[2, 3]."),
    ({**ALL8, "key_descale": sds(2, 6, dtype=F32)}, ValueError, "key_descale must be a scalar or"
     " have shape [2, 3] (batch, num_heads_kv) or [3]; got [2, 6]."),
    ({**ALL8, "key_descale": sds(3, 2, dtype=F32)}, ValueError, "key_descale must be a scalar or"
     " have shape [2, 3] (batch, num_heads_kv) or [3]; got [3, 2]."),
    ({**ALL8, "key_descale": sds(2, 3, dtype=jnp.int32)}, TypeError,
     "key_descale must be float32; got int32."),
    ({**ALL8, "key_descale": sds(2, 3, dtype=E4M3)}, TypeError,
     "key_descale must be float32; got float8_e4m3fn."),
    ({**ALL8, "key_descale": "1"}, TypeError, "key_descale must be an array; got str."),
    # scalars and flags
    ({"softmax_scale": "1"}, TypeError, "softmax_scale must be a real number; got '1'."),
    ({"softmax_scale": True}, TypeError, "softmax_scale must be a real number; got True."),
    ({"softmax_scale": 1j}, TypeError, "softmax_scale must be a real number; got 1j."),
    ({"softmax_scale": sds(dtype=np.bool_)}, TypeError,
     "softmax_scale must be a real number; got bool[]."),
    ({"softmax_scale": sds(dtype=jnp.complex64)}, TypeError,
     "softmax_scale must be a real number; got complex64[]."),
    ({"softmax_scale": sds(1, dtype=F32)}, ValueError,
     "softmax_scale must be a scalar; got an array of shape [1]."),
    ({"softmax_scale": float("nan")}, ValueError, "softmax_scale must be finite; got nan."),
    ({"is_causal": 1}, TypeError, "is_causal must be a bool known at trace time; got 1."),
    ({"is_causal": sds(dtype=np.bool_)}, TypeError,
     "is_causal must be a bool known at trace time; got bool[]."),
    ({"deterministic": "no"}, TypeError,
     "deterministic must be a bool known at trace time; got 'no'."),
    ({"return_logsumexp": None}, TypeError,
     "return_logsumexp must be a bool known at trace time; got None."),
    ({"causal_alignment": "left"}, ValueError,
     'causal_alignment must be "bottom_right" or "top_left"; got \'left\'.'),
    ({"precision": "bf16"}, ValueError, 'precision must be "fp8" or "native"; got \'bf16\'.'),
    ({"implementation": "triton"}, ValueError,
     'implementation must be None or "cuda" or "xla"; got \'triton\'.'),
    # window and cap
    ({"window_size": (-2, 0)}, ValueError, f"{WINDOW}; got (-2, 0). None leaves a side open."),
    ({"window_size": [3, -1]}, ValueError, f"{WINDOW}; got (3, -1). None leaves a side open."),
    ({"window_size": 4}, TypeError, f"{WINDOW}; got 4."),
    ({"window_size": (1, 2, 3)}, ValueError, f"{WINDOW}; got (1, 2, 3)."),
    ({"window_size": (1.5, 2)}, TypeError, f"{WINDOW}; got (1.5, 2)."),
    ({"window_size": (True, 2)}, TypeError, f"{WINDOW}; got (True, 2)."),
    ({"window_size": sds(2, dtype=jnp.int32)}, TypeError, f"{WINDOW}; got int32[2]."),
    ({"logits_soft_cap": 0.0}, ValueError,
     "logits_soft_cap must be positive in float32; got 0.0."),
    ({"logits_soft_cap": -3}, ValueError, "logits_soft_cap must be positive in float32; got -3."),
    ({"logits_soft_cap": float("nan")}, ValueError,
     "logits_soft_cap must be finite; got nan."),
    ({"logits_soft_cap": float("inf")}, ValueError,
     "logits_soft_cap must be finite; got inf."),
    ({"logits_soft_cap": TRACED}, TypeError,
     "logits_soft_cap must be a number known at trace time or None; got float32[]."),
    # segments, lengths, sinks, mask, bias
    ({"query_segment_ids": sds(2, 5, dtype=F32), "key_segment_ids": sds(2, 7, dtype=jnp.int32)},
     TypeError, "query_segment_ids must be int32; got float32."),
    ({"query_segment_ids": sds(2, 5, dtype=jnp.int32),
      "key_segment_ids": sds(2, 5, dtype=jnp.int32)}, ValueError,
     "key_segment_ids must have shape [2, 7] (batch and seqlen); got [2, 5]."),
    ({"query_segment_ids": sds(2, 5, dtype=jnp.int32)}, ValueError,
     "key_segment_ids must be given together with query_segment_ids; got None."),
    ({"key_segment_ids": sds(2, 7, dtype=jnp.int32)}, ValueError,
     "query_segment_ids must be given together with key_segment_ids; got None."),
    ({"key_seqlens": sds(2, dtype=F32)}, TypeError, "key_seqlens must be int32; got float32."),
    ({"query_seqlens": sds(2, dtype=np.bool_)}, TypeError,
     "query_seqlens must be int32; got bool."),
    ({"key_seqlens": sds(3, dtype=jnp.int32)}, ValueError,
     "key_seqlens must have shape [2] (batch axes of query); got [3]."),
    ({"key_seqlens": 7}, ValueError,
     "key_seqlens must have shape [2] (batch axes of query); got []."),
    ({"key_seqlens": [7, 6]}, TypeError, "key_seqlens must be an array; got list."),
    ({"sinks": sds(3, dtype=F32)}, ValueError,
     "sinks must have shape [6] (num_heads_q); got [3]."),
    ({"sinks": sds(6, dtype=jnp.int32)}, TypeError, "sinks must be float32; got int32."),
    ({"mask": sds(2, 1, 5, 7, dtype=F32)}, TypeError,
     "mask must be bool (True = attend); got float32."),
    ({"mask": sds(2, 3, 5, 7, dtype=np.bool_)}, ValueError,
     f"mask must be broadcastable to {FULL}; got [2, 3, 5, 7]."),
    ({"mask": sds(1, 2, 6, 5, 7, dtype=np.bool_)}, ValueError,
     f"mask must be broadcastable to {FULL}; got [1, 2, 6, 5, 7]."),
    ({"bias": sds(2, 6, 7, 5, dtype=F32)}, ValueError,
     f"bias must be broadcastable to {FULL}; got [2, 6, 7, 5]."),
    ({"bias": sds(5, 7, dtype=jnp.int32)}, TypeError,
     "bias must be bfloat16, float16 or float32; got int32."),
    # quantization
    ({"quantization": "fast"}, TypeError,
     "quantization must be a jax_fa3.Quantization or None; got 'fast'."),
    ({"quantization": ANY, "precision": "native"}, ValueError,
     f'quantization must be None with precision="native"; got {ANY!r}.'),
    ({**ALL8, "quantization": jax_fa3.Quantization(hadamard=True)}, ValueError, "quantization must"
     ' have hadamard="auto" or False with float8 query or key; got hadamard=True.'),
    ({"query": sds(2, 5, 6, 72), "key": sds(2, 7, 3, 72),
      "quantization": jax_fa3.Quantization(hadamard=True)}, ValueError,
     "quantization must have hadamard=True only when head_dim is a power of two; got head_dim 72."
     ' Pass hadamard="auto" or False.'),
    ({"query": sds(2, 5, 6, 512), "key": sds(2, 7, 3, 512),
      "quantization": jax_fa3.Quantization(hadamard=True)}, NotImplementedError,
     "quantization with hadamard=True serves head_dim up to 256; got 512."),
]  # fmt: skip


def _identity(entry: Any) -> str:
    changed, _, message = entry
    return "-".join(changed)[:40] + ":" + re.sub(r"[^a-z0-9]+", "_", message.lower())[-30:]


@pytest.mark.parametrize("entry", REFUSED, ids=_identity)
def test_refused(entry: Any) -> None:
    changed, kind, message = entry
    arguments = {"query": Q, "key": K, "value": K, **changed}
    main = [arguments.pop(n) for n in ("query", "key", "value")]
    with pytest.raises(kind) as caught:
        _shapes.check_attention("attention", *main, **arguments)
    assert str(caught.value) == f"attention: {message}"
    # Name of the function first, "got" somewhere, a full stop at the end.
    assert str(caught.value).endswith(".")


def test_the_caller_is_named() -> None:
    with pytest.raises(ValueError, match=r"^decode_attention: key must have shape"):
        _shapes.check_attention("decode_attention", Q, sds(2, 7, 3, 32), K)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"window_size": (-2, 0)}, "attention: window_size must"),
        ({"precision": "int4"}, "attention: precision must"),
        ({"key": jnp.zeros((2, 7, 4, 64), BF16)}, "attention: value must have shape"),
    ],
)
def test_public_function_refuses_at_trace_time(changed: dict[str, Any], text: str) -> None:
    arrays = {n: jnp.zeros(x.shape, x.dtype) for n, x in zip("qkv", (Q, K, K), strict=True)}
    main = {"query": arrays["q"], "key": arrays["k"], "value": arrays["v"]}
    static = {n: x for n, x in changed.items() if n not in main}
    main |= {n: x for n, x in changed.items() if n in main}

    def run(query: Any, key: Any, value: Any) -> Any:
        return jax_fa3.attention(query, key, value, **static)

    with pytest.raises(ValueError, match=text):
        jax.eval_shape(run, *main.values())


ACCEPTED: list[dict[str, Any]] = [
    {},
    {"query": sds(5, 6, 64), "key": sds(7, 3, 64), "value": sds(7, 3, 32)},
    {"query": sds(3, 2, 5, 6, 64), "key": sds(3, 2, 7, 3, 64), "value": sds(3, 2, 7, 3, 64)},
    {"softmax_scale": np.float32(0.1), "window_size": [3, 0], "is_causal": np.bool_(True)},
    {"softmax_scale": TRACED, "window_size": (np.int64(3), None)},
    {"softmax_scale": 1, "window_size": np.array([3, 2]), "logits_soft_cap": np.float64(30)},
    {**ALL8},
    {**ALL8, "key": sds(2, 7, 3, 64, dtype=E5M2), "key_descale": 2, "query_descale": np.float32(1)},
    {**ALL8, "query": Q, "query_descale": None, "value_descale": sds(3, dtype=BF16)},
    {"mask": sds(2, 1, 1, 7, dtype=np.bool_), "bias": sds(5, 1, dtype=F32)},
    {"query_seqlens": sds(2, dtype=np.int64), "sinks": sds(6, dtype=BF16)},
]


@pytest.mark.parametrize("changed", ACCEPTED)
def test_accepted(changed: dict[str, Any]) -> None:
    arguments = {"query": Q, "key": K, "value": K, **changed}
    main = [arguments.pop(n) for n in ("query", "key", "value")]
    dims, config = _shapes.check_attention("attention", *main, **arguments)
    assert hash(config) == hash(_shapes.check_attention("attention", *main, **arguments)[1])
    assert dims.num_heads_q == 6
    assert dims.num_heads_kv == 3
    assert config.window_size is None or isinstance(config.window_size, tuple)
    assert type(config.is_causal) is bool


def test_out_dtypes() -> None:
    for query, key, expected in ((Q, K, BF16), (Q8, K8, BF16), (Q, K8, BF16)):
        descales = {}
        if key is K8:
            descales = {"key_descale": 1.0, "value_descale": 1.0}
        if query is Q8:
            descales["query_descale"] = 1.0
        _, config = _shapes.check_attention("attention", query, key, key, **descales)
        assert config.out_dtype == expected
    _, config = _shapes.check_attention("attention", *[sds(2, 5, 6, 64, dtype=F32)] * 3)
    assert config.out_dtype == F32


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("dtype", "int8", '"e4m3" or "e5m2"'),
        ("query", "channel", '"row" or "block" or "head" or "tensor"'),
        ("key", "channel", '"row" or "block" or "head" or "tensor"'),
        ("value", "block", '"channel" or "head" or "tensor"'),
        ("smooth_key", 1, "True or False"),
        ("center_value", "yes", "True or False"),
        ("hadamard", "off", '"auto" or True or False'),
        ("accumulate", "fast", '"two_level" or "one_level"'),
        ("softmax", "cubic", '"exact" or "linear"'),
    ],
)
def test_quantization(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared below)
        jax_fa3.Quantization(**{field: value})
    assert str(caught.value) == f"Quantization: {field} must be {allowed}; got {value!r}."


X = sds(2, 5, 6, 64)


@pytest.mark.parametrize(
    ("x", "options", "kind", "message"),
    [
        ([1.0], {}, TypeError, "x must be an array; got list."),
        (Q8, {}, TypeError, "x must be bfloat16, float16 or float32; got float8_e4m3fn."),
        (sds(6, 64), {}, ValueError, "x must have shape [..., seqlen, num_heads, head_dim] (rank 3"
         " or more); got [6, 64]."),
        (X, {"granularity": "block"}, ValueError,
         'granularity must be "tensor" or "head" or "row" or "channel"; got \'block\'.'),
        (X, {"num_heads_kv": 3, "granularity": "row"}, ValueError,
         'num_heads_kv must be None unless granularity is "head"; got 3.'),
        (X, {"num_heads_kv": 4}, ValueError, "num_heads_kv must divide num_heads = 6; got 4."),
        (X, {"dtype": "fp8"}, ValueError,
         "dtype must be \"e4m3\" or \"e5m2\" (or that float8 dtype); got 'fp8'."),
    ],
)  # fmt: skip
def test_quantize(x: Any, options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        jax_fa3.quantize(x, **options)
    assert str(caught.value) == f"quantize: {message}"


def test_dequantize() -> None:
    with pytest.raises(TypeError) as caught:
        jax_fa3.dequantize(jnp.zeros(3))
    expected = "dequantize: quantized must be a QuantizedTensor; got ArrayImpl."
    assert str(caught.value) == expected


OUT, LSE = sds(2, 5, 6, 64), sds(2, 6, 5, dtype=F32)


@pytest.mark.parametrize(
    ("outs", "logsumexps", "kind", "message"),
    [
        ([], [], ValueError, "outs must hold at least one part; got 0."),
        ([OUT], [LSE, LSE], ValueError, "logsumexps must hold as many parts as outs (1); got 2."),
        ([OUT, 3.0], [LSE, LSE], TypeError, "outs[1] must be an array; got float."),
        ([sds(6, 64)], [LSE], ValueError,
         "outs[0] must have shape [..., seqlen_q, num_heads_q, head_dim_v]; got [6, 64]."),
        ([OUT, sds(2, 4, 6, 64)], [LSE, LSE], ValueError,
         "outs[1] must have shape [2, 5, 6, 64] (the shape of outs[0]); got [2, 4, 6, 64]."),
        ([OUT], [sds(2, 5, 6, dtype=F32)], ValueError,
         "logsumexps[0] must have shape [2, 6, 5] (num_heads_q, seqlen_q of outs); got [2, 5, 6]."),
        ([OUT, sds(2, 5, 6, 64, dtype=F32)], [LSE, LSE], TypeError,
         "outs[1] must be floating and have one dtype with all outs (bfloat16); got float32."),
        ([OUT], [sds(2, 6, 5)], TypeError, "logsumexps[0] must be float32; got bfloat16."),
    ],
)  # fmt: skip
def test_merge(outs: Any, logsumexps: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        jax_fa3.merge_attention(outs, logsumexps)
    assert str(caught.value) == f"merge_attention: {message}"
