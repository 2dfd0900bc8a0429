"""Inputs at the edge of what Python, numpy and JAX call a number, an array or a size."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rules.support import assert_close, inputs, loss_of

import jax_fa3

Q, K, V = inputs()
E4M3 = jnp.float8_e4m3fn
KEYS = jax.random.split(jax.random.key(0), 2 * 5 * 6 * 64).reshape(2, 5, 6, 64)
HUGE = "must be below 2e+38 in magnitude; got"


def attention(**options: Any) -> Any:
    main = {"query": Q, "key": K, "value": V, **options}
    arrays = [main.pop(n) for n in ("query", "key", "value")]
    return jax_fa3.attention(*arrays, **main)


def drop_in(**options: Any) -> Any:
    return jax_fa3.dot_product_attention(options.pop("query", Q), K, V, **options)


def varlen(**options: Any) -> Any:
    main = {"query": Q[0], "key": K[0], "value": V[0]}
    main |= {"cu_seqlens_q": np.array([0, 2, 5]), "cu_seqlens_k": np.array([0, 3, 7])}
    main |= {name: options.pop(name) for name in [*main] if name in options}
    lengths = {"max_seqlen_q": 3, "max_seqlen_k": 4}
    return jax_fa3.attention_varlen(*main.values(), **{**lengths, **options})


def merge(outs: Any, logsumexps: Any) -> Any:
    return jax_fa3.merge_attention(outs, logsumexps)


LSE = jnp.zeros((2, 6, 5))
TENSOR = jax_fa3.quantize(Q)

REFUSED: list[tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = [
    # numbers that float32 cannot hold
    (attention, {"softmax_scale": 1e39}, ValueError, f"softmax_scale {HUGE} 1e+39."),
    (attention, {"softmax_scale": -(10**400)}, ValueError,
     f"softmax_scale {HUGE} an int of 1329 bits."),
    (attention, {"softmax_scale": np.array(1e39)}, ValueError,
     f"softmax_scale {HUGE} np.float64(1e+39)."),
    (attention, {"logits_soft_cap": 10**400}, ValueError,
     f"logits_soft_cap {HUGE} an int of 1329 bits."),
    (attention, {"logits_soft_cap": 1e39}, ValueError, f"logits_soft_cap {HUGE} 1e+39."),
    (attention, {"logits_soft_cap": 1e-50}, ValueError,
     "logits_soft_cap must be positive in float32; got 1e-50."),
    (attention, {"key": K.astype(E4M3), "value": V.astype(E4M3), "key_descale": 1e39,
                 "value_descale": 1.0}, ValueError, f"key_descale {HUGE} 1e+39."),
    (attention, {"query_segment_ids": np.full((2, 5), 2**32 + 1),
                 "key_segment_ids": np.ones((2, 7), int)}, ValueError,
     "query_segment_ids must fit int32; got 4294967297."),
    (varlen, {"cu_seqlens_q": np.array([0, 2, 2**32 + 5])}, ValueError,
     "cu_seqlens_q must end at or before the 5 packed rows; got 4294967301."),
    (varlen, {"cu_seqlens_k": np.array([0, 5, 3], np.uint32)}, ValueError,
     "cu_seqlens_k must start at 0 and not decrease; got [0 5 3]."),
    # typed PRNG keys
    *((attention, {name: KEYS}, TypeError, f"{name} must be an array of numbers; got key<fry>.")
      for name in ("query", "key", "softmax_scale", "key_seqlens", "mask", "bias", "sinks")),
    (drop_in, {"query": KEYS}, TypeError, "query must be an array of numbers; got key<fry>."),
    (varlen, {"cu_seqlens_q": KEYS[0, 0, 0, :3]}, TypeError,
     "cu_seqlens_q must be an array of numbers; got key<fry>."),
    (merge, {"outs": [KEYS], "logsumexps": [LSE]}, TypeError,
     "outs[0] must be an array of numbers; got key<fry>."),
    (jax_fa3.quantize, {"x": KEYS}, TypeError, "x must be an array of numbers; got key<fry>."),
    # own names of arguments
    (drop_in, {"scale": "x"}, TypeError, "scale must be a real number; got 'x'."),
    (drop_in, {"query_seq_lengths": jnp.ones(2)}, TypeError,
     "query_seq_lengths must be int32; got float32."),
    (drop_in, {"key_value_seq_lengths": jnp.ones(3, int)}, ValueError,
     "key_value_seq_lengths must have shape [2] (batch axes of query); got [3]."),
    (drop_in, {"key_value_seq_lengths": "ab"}, TypeError,
     "key_value_seq_lengths must be an array; got str."),
    (drop_in, {"local_window_size": -1}, ValueError,
     "local_window_size must be None or a pair (left, right) of non-negative ints or None; got"
     " (-1, -1). None leaves a side open."),
    (drop_in, {"implementation": "cuda", "local_window_size": 3}, NotImplementedError,
     'local_window_size=(3, 3) is not served by the kernels; got implementation="cuda". Pass'
     ' implementation="xla" or None.'),
    (drop_in, {"implementation": "cuda", "query_seq_lengths": jnp.ones(2, int)},
     NotImplementedError, "query_seq_lengths is not served by the kernels; got"
     ' implementation="cuda". Pass implementation="xla" or None.'),
    (drop_in, {"query": None}, TypeError, "query must be an array; got NoneType."),
    (varlen, {"query": None}, TypeError, "query must be an array; got NoneType."),
    (varlen, {"cu_seqlens_k": None}, TypeError, "cu_seqlens_k must be an array; got NoneType."),
    (varlen, {"cu_seqlens_k": [[0, 1], [2]]}, TypeError,
     "cu_seqlens_k must be an array; got list."),
    (varlen, {"key": K[0, ..., :3]}, ValueError,
     "key must have shape [total_k, num_heads_kv, 64] (head_dim of query); got [7, 3, 3]."),
    # quantize, dequantize, merge_attention
    (jax_fa3.quantize, {"x": Q, "num_heads_kv": True}, ValueError,
     "num_heads_kv must divide num_heads = 6; got True."),
    *((varlen, {"max_seqlen_q": size}, ValueError,
       f"max_seqlen_q must be at least 0 and below 2^31; got {size}.")
      for size in (-1, 2**70, np.uint64(2**63))),
    (jax_fa3.quantize, {"x": Q[:, :, :0]}, ValueError,
     "x must have a num_heads of at least 1; got [2, 5, 0, 64]."),
    (jax_fa3.dequantize, {"quantized": TENSOR, "dtype": "int3"}, TypeError,
     "dtype must be a float; got 'int3'."),
    (jax_fa3.dequantize, {"quantized": TENSOR, "dtype": None}, TypeError,
     "dtype must be a float; got None."),
    (jax_fa3.dequantize, {"quantized": TENSOR, "dtype": np.longdouble}, TypeError,
     "dtype must be a float; got <class 'numpy.longdouble'>."),
    (jax_fa3.dequantize, {"quantized": TENSOR, "dtype": int}, TypeError,
     "dtype must be a float; got <class 'int'>."),
    *((jax_fa3.dequantize, {"quantized": jax_fa3.QuantizedTensor(TENSOR.values, descale, kind)},
       ValueError, f'descale must have the shape that granularity "{kind}" asks for with values'
       f" [2, 5, 6, 64]; got {[*descale.shape]}.")
      for kind, descale in (("head", jnp.ones(5)), ("head", jnp.ones((2, 4))),
                            ("row", jnp.ones((2, 6))), ("channel", jnp.ones((2, 5, 64))),
                            ("tensor", jnp.ones(5)))),
    (jax_fa3.dequantize, {"quantized": jax_fa3.QuantizedTensor(TENSOR.values, TENSOR.descale, "x")},
     ValueError, "granularity must be \"tensor\" or \"head\" or \"row\" or \"channel\"; got 'x'."),
    (jax_fa3.dequantize, {"quantized": jax_fa3.QuantizedTensor(None, None, "head")}, TypeError,
     "values must be an array; got NoneType."),
    (jax_fa3.dequantize, {"quantized": jax_fa3.QuantizedTensor(LSE[0], LSE[0, 0], "head")},
     ValueError, "values must have shape [..., seqlen, num_heads, head_dim] (rank 3 or more); got"
     " [6, 5]."),
    (merge, {"outs": None, "logsumexps": None}, TypeError,
     "outs must be a sequence of arrays; got NoneType."),
    (merge, {"outs": [Q], "logsumexps": {"a": LSE}}, TypeError,
     "logsumexps must be a sequence of arrays; got dict."),
    (merge, {"outs": jnp.float32(1), "logsumexps": [LSE]}, TypeError,
     "outs must be a sequence of arrays; got ArrayImpl."),
    *((jax_fa3.dequantize, {"quantized": jax_fa3.QuantizedTensor(values, TENSOR.descale, "head")},
       TypeError, f"values must be float8_e4m3fn or float8_e5m2; got {values.dtype}.")
      for values in (Q, Q.astype(jnp.int8))),
    (jax_fa3.dequantize, {"quantized": jax_fa3.QuantizedTensor(
        TENSOR.values, jnp.ones((2, 0)), "head")}, ValueError, 'descale must have the shape that'
     ' granularity "head" asks for with values [2, 5, 6, 64]; got [2, 0].'),
    # what has a shape and a dtype and is no array of numbers
    *((function, {name: jax.ShapeDtypeStruct(Q.shape, Q.dtype)}, TypeError,
       f"{name} must be an array; got ShapeDtypeStruct.")
      for function, name in ((attention, "query"), (drop_in, "query"), (jax_fa3.quantize, "x"))),
    (attention, {"bias": jax.ShapeDtypeStruct((), jnp.float32)}, TypeError,
     "bias must be an array; got ShapeDtypeStruct."),
    (drop_in, {"scale": jax.ShapeDtypeStruct((), jnp.float32)}, TypeError,
     "scale must be an array; got ShapeDtypeStruct."),
    (drop_in, {"bias": np.ma.ones((5, 7), np.float32)}, TypeError,
     "bias must be an array; got MaskedArray."),
    *((function, {name: np.zeros((2, 5, 6, 64), kind)}, TypeError,
       f"{name} must be an array of numbers; got {np.dtype(kind)}.")
      for function, name in ((drop_in, "query"), (drop_in, "mask"), (varlen, "key"))
      for kind in (object, "U1", "M8[D]", "V2", ">f4", np.longdouble)),
    (attention, {"softmax_scale": np.float32}, TypeError,
     "softmax_scale must be a real number; got <class 'numpy.float32'>."),
    # one line, whatever was received
    (attention, {"window_size": np.ones((2, 3))}, TypeError, "window_size must be None or a pair"
     " (left, right) of non-negative ints or None; got float64[2, 3]."),
    (drop_in, {"implementation": np.ones((2, 3))}, ValueError, 'implementation must be None, "xla"'
     ' or "cuda"; got float64[2, 3]. "cuda" is the kernel of this package;'
     " jax.nn.dot_product_attention reaches cuDNN."),
    (jax_fa3.quantize, {"x": Q, "granularity": np.ones((2, 3))}, ValueError,
     'granularity must be "tensor" or "head" or "row" or "channel"; got float64[2, 3].'),
    (jax_fa3.quantize, {"x": Q, "dtype": jax_fa3.Quantization}, ValueError,
     'dtype must be "e4m3" or "e5m2" (or that float8 dtype); got'
     " <class 'jax_fa3._quantize.Quantization'>."),
    *((jax_fa3.dequantize, {"quantized": TENSOR, "dtype": array}, TypeError,
       f"dtype must be a float; got {array.dtype}[2, 5, 6, 64].") for array in (Q, KEYS)),
    (attention, {"is_causal": [0.0] * 100}, TypeError, "is_causal must be a bool known at trace"
     f" time; got {str([0.0] * 100)[:197]}...."),
    (jax_fa3.zigzag_shard, {"x": jnp.ones((2, 8)), "num_shards": np.uint8(128)}, ValueError,
     "x must have a multiple of 256 (2 num_shards) along axis 1; got [2, 8]."),
]  # fmt: skip


@pytest.mark.usefixtures("extension")
def test_sizes_beyond_32_bits() -> None:
    """Nothing is allocated: shapes alone are refused, or served."""

    def traced(q: tuple[int, ...], k: tuple[int, ...], **options: Any) -> Any:
        arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (q, k, k)]
        return jax.eval_shape(lambda *x: jax_fa3.attention(*x, **options), *arrays)

    long = (1, 2**31, 2, 64)
    for q, k, name in ((long, (1, 3, 2, 64), "query"), ((1, 3, 2, 64), long, "key")):
        message = (
            rf"^attention: {name} must have a seqlen below 2\^31; got \[1, 2147483648, 2, 64\]\."
        )
        with pytest.raises(NotImplementedError, match=message):
            traced(q, k)
    for shape, size in (((2**30, 2, 2, 64), "batch"), ((1, 2**30, 2, 64), "seqlen_q")):
        message = (
            rf"^attention: a {size} of 1073741824 is not served by the kernels \(below 2\^30 is\); "
        )
        with pytest.raises(NotImplementedError, match=message):
            traced(shape, shape, implementation="cuda")
        assert traced(shape, shape).shape == shape
    packed, starts = (
        jax.ShapeDtypeStruct(*x) for x in (((2**31, 2, 64), jnp.bfloat16), ((3,), jnp.int32))
    )
    with pytest.raises(NotImplementedError, match=r"query must have a seqlen below 2\^31; "):
        jax.eval_shape(
            lambda x, c: jax_fa3.attention_varlen(x, x, x, c, c, max_seqlen_q=9, max_seqlen_k=9),
            packed, starts,
        )  # fmt: skip


def test_numbers_that_no_array_holds() -> None:
    """Python's ints have no limit, float16 has a small one; fractions are numbers too."""
    expected = attention(softmax_scale=np.float32(0.25), precision="native")
    for scale in (Fraction(1, 4), np.float16(0.25), np.longdouble(0.25)):
        assert_close(attention(softmax_scale=scale, precision="native"), expected)
    peaked = attention(softmax_scale=2**70, precision="native")
    assert_close(attention(softmax_scale=np.float32(2.0**70), precision="native"), peaked)
    biased = attention(bias=np.float32(0.25), precision="native")
    assert_close(attention(bias=Fraction(1, 4), precision="native"), biased)


def _identity(entry: Any) -> str:
    function, options, _, message = entry
    return f"{function.__name__}-{'-'.join(options)}-{re.sub(r'[^a-z0-9]+', '_', message)[-24:]}"


@pytest.mark.parametrize("entry", REFUSED, ids=_identity)
@pytest.mark.usefixtures("extension")
def test_refused(entry: Any) -> None:
    function, options, kind, message = entry
    name = {"drop_in": "dot_product_attention", "varlen": "attention_varlen"}
    name["merge"] = "merge_attention"
    with pytest.raises(kind) as caught:
        function(**options)
    assert str(caught.value) == f"{name.get(function.__name__, function.__name__)}: {message}"


@pytest.mark.parametrize("axis", ["seqlen_q", "seqlen_k", "head_dim"])
def test_symbolic_sizes_that_must_be_known(axis: str) -> None:
    names = {"seqlen_q": "2,s,6,64", "seqlen_k": "2,5,6,64", "head_dim": "2,5,6,s"}
    other = {"seqlen_q": "2,7,3,64", "seqlen_k": "2,s,3,64", "head_dim": "2,7,3,s"}[axis]
    structs = jax.export.symbolic_args_specs((Q, K, V), (names[axis], other, other))
    operand = "key" if axis == "seqlen_k" else "query"
    what = "head_dim" if axis == "head_dim" else "seqlen"
    message = rf"^attention: {operand} must have a {what} known at trace time .*; got \[2, .*s.*\]"
    for implementation in (None, "xla"):
        with pytest.raises(NotImplementedError, match=message):
            jax.eval_shape(
                lambda *x, i=implementation: jax_fa3.attention(*x, implementation=i), *structs
            )


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.uint64])
def test_lengths_beyond_int32_mean_every_token(dtype: Any) -> None:
    largest = np.iinfo(dtype).max
    lengths = np.array([largest, 3], dtype)
    want = attention(key_seqlens=np.array([7, 3], np.int32), precision="native")
    assert_close(attention(key_seqlens=lengths, precision="native"), want, 1e-6)
    as_drop_in = drop_in(key_value_seq_lengths=lengths, precision="native")
    assert_close(as_drop_in, want, 1e-6)
    mapped = jax_fa3.attention(Q[None], K[None], V[None], key_seqlens=lengths[None],
                               precision="native")  # fmt: skip
    assert_close(mapped[0], want, 1e-6)
    with jax.enable_x64(True):
        wide = jnp.asarray(lengths)
        traced = jax.jit(lambda x: attention(key_seqlens=x, precision="native"))(wide)
    assert_close(traced, want, 1e-6)


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.usefixtures("extension")
def test_rank_promotion_may_be_an_error_of_the_caller(implementation: str | None) -> None:
    def both(*args: Any) -> Any:
        options: dict[str, Any] = {"is_causal": True, "implementation": implementation}

        def fn(*x: Any) -> Any:
            return jax_fa3.attention(*x, return_logsumexp=True, **options)

        return fn(*args), jax.grad(loss_of(fn), (0, 1, 2))(*args)

    want = jax.jit(both)(Q, K, V)
    with jax.numpy_rank_promotion("raise"):
        assert_close(jax.jit(both)(Q, K, V), want, 1e-6)
        varlen()
        merge([Q, Q], [LSE, LSE])
        drop_in(local_window_size=2, mask=jnp.ones((1, 1, 5, 7), bool))
        jax_fa3.dequantize(jax_fa3.quantize(Q))
        with pytest.raises(ValueError, match="rank_promotion"):
            Q + jnp.ones(64, Q.dtype)  # the setting still holds for the caller's own code


def test_numpy_ints_count_heads() -> None:
    heads = jax_fa3.quantize(Q, num_heads_kv=np.int64(3))
    assert heads.descale.shape == (2, 3)
    assert_close(jax_fa3.dequantize(heads, Q.dtype), Q, 0.1)
