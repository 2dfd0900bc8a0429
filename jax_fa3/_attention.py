"""`attention`: check, fold, choose a path, call it, unfold."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp

from jax_fa3 import (
    _batching,
    _compat,
    _explain,
    _fold,
    _local,
    _option_checks,
    _partition,
    _reference,
    _refusals,
    _shapes,
    _vjp,
)
from jax_fa3._quantize import Quantization
from jax_fa3._shapes import Config, Operands

FORWARD_MODE = (
    "the CUDA path is differentiable once, in reverse mode; got forward-mode differentiation. "
    'Pass implementation="xla".'
)
FLOAT8_GRADIENT = (
    "{function}: {argument} must be a 16-bit array to be differentiated (a float8 gradient "
    "would round to 3 bits); got {dtype}. Pass 16-bit inputs, attention quantises them itself."
)


class SharedOptions(TypedDict, total=False):
    """Keywords of `attention` that `attention_varlen` and the Flax adapters have too."""

    softmax_scale: Any
    is_causal: bool
    causal_alignment: Literal["bottom_right", "top_left"]
    window_size: tuple[int | None, int | None] | None
    logits_soft_cap: float | None
    sinks: Any
    quantization: Quantization | None
    deterministic: bool
    implementation: Literal["cuda", "xla"] | None


class PaddingOptions(TypedDict, total=False):
    """Keywords of `attention` and the Flax adapters."""

    query_segment_ids: Any
    key_segment_ids: Any
    query_seqlens: Any
    key_seqlens: Any


class InputOptions(TypedDict, total=False):
    """Keywords of `attention` and `attention_varlen`."""

    precision: Literal["fp8", "native"]
    query_descale: Any
    key_descale: Any
    value_descale: Any


class AttentionOptions(SharedOptions, PaddingOptions, InputOptions, total=False):
    """Keywords of `attention` beside return_logsumexp, for the overloads below."""

    mask: Any
    bias: Any


@overload
def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    return_logsumexp: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> jax.Array: ...


@overload
def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    return_logsumexp: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[jax.Array, jax.Array]: ...


def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    softmax_scale: Any = None,
    is_causal: bool = False,
    causal_alignment: Literal["bottom_right", "top_left"] = "bottom_right",
    window_size: tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    sinks: Any = None,
    query_segment_ids: Any = None,
    key_segment_ids: Any = None,
    query_seqlens: Any = None,
    key_seqlens: Any = None,
    mask: Any = None,
    bias: Any = None,
    precision: Literal["fp8", "native"] = "fp8",
    quantization: Quantization | None = None,
    query_descale: Any = None,
    key_descale: Any = None,
    value_descale: Any = None,
    return_logsumexp: bool = False,
    deterministic: bool = False,
    implementation: Literal["cuda", "xla"] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Softmax attention in FP8 on Hopper: softmax(softmax_scale * query @ key^T + mask) @ value.

    Rank 3 is one unbatched example; any number of leading batch axes may stand before seqlen.

    Args:
      query: [batch, seqlen_q, num_heads_q, head_dim]; bfloat16, float16, float32, float8_e4m3fn or
        float8_e5m2.
      key: [batch, seqlen_k, num_heads_kv, head_dim]; num_heads_kv divides num_heads_q. dtype of
        query, or float8 with a 16-bit query.
      value: [batch, seqlen_k, num_heads_kv, head_dim_v]; float8 exactly when key is.
      softmax_scale: factor on the logits, a number or 0-d array, traced or not; None means
        head_dim ** -0.5.
      is_causal: row i sees keys up to the diagonal.
      causal_alignment: "bottom_right": the last row sees every key, row i sees keys
        <= i + seqlen_k - seqlen_q; "top_left": keys <= i. They agree when seqlen_q == seqlen_k.
      window_size: (left, right), both inclusive, around the aligned diagonal; None leaves a side
        open.
      logits_soft_cap: cap * tanh(logits / cap), before masking.
      sinks: [num_heads_q] float32, one extra logit per head in the denominator.
      query_segment_ids, key_segment_ids: int32 [batch, seqlen]; equal ids attend, ids < 0 are
        padding.
      query_seqlens, key_seqlens: int32 [batch]; rows and keys at or beyond them are padding.
      mask: bool, broadcastable to [batch, num_heads_q, seqlen_q, seqlen_k]; True attends.
      bias: float, of the same shapes, added to the scaled logits.
      precision: "fp8" quantises query, key and value (see quantization); "native" computes at the
        inputs' own precision.
      quantization: how FP8 is made; None means `Quantization.accurate()`.
      query_descale, key_descale, value_descale: float32, required with float8 inputs (real value =
        stored value * descale); a scalar, [batch, num_heads_kv] or [num_heads_kv].
      return_logsumexp: also return the natural logsumexp of every row.
      deterministic: bitwise repeatable gradients.
      implementation: "cuda" runs the kernel or raises; "xla" runs the blocked plain-JAX path, on
        any backend; None takes the kernel where it serves the request and the program is lowered
        for CUDA, else the XLA path. The numbers mean the same on every path.
    Returns: out [batch, seqlen_q, num_heads_q, head_dim_v] of query's dtype (bfloat16 for a float8
      query); with return_logsumexp also float32 [batch, num_heads_q, seqlen_q]. Rows that see no
      key are 0, with logsumexp -inf and gradients 0.
    Raises:
      ValueError: inputs contradict each other, or seqlen or head_dim is sharded.
      TypeError: wrong dtype or kind, or a float8 input is differentiated.
      NotImplementedError: valid, but not served by implementation="cuda"; second-order or
        forward-mode differentiation there.
      RuntimeError: implementation="cuda" where no kernel can run.
    Transformations: jit, grad, vmap, scan, remat, export, sharding of batch and heads, in any
      order. Residuals are named "jax_fa3_out" and "jax_fa3_logsumexp" (see `checkpoint_policy`).
      Forward-mode and second order need implementation="xla".
    Numerics: docs/design/numerics.md. Source: FlashAttention-3, arXiv:2407.08608.
    """
    out, logsumexp = run(
        "attention",
        query,
        key,
        value,
        return_logsumexp=return_logsumexp,
        implementation=implementation,
        arrays={
            "softmax_scale": softmax_scale,
            "sinks": sinks,
            "query_segment_ids": query_segment_ids,
            "key_segment_ids": key_segment_ids,
            "query_seqlens": query_seqlens,
            "key_seqlens": key_seqlens,
            "mask": mask,
            "bias": bias,
            "query_descale": query_descale,
            "key_descale": key_descale,
            "value_descale": value_descale,
        },
        static={
            "is_causal": is_causal,
            "causal_alignment": causal_alignment,
            "window_size": window_size,
            "logits_soft_cap": logits_soft_cap,
            "precision": precision,
            "quantization": quantization,
            "deterministic": deterministic,
        },
    )
    return (out, logsumexp) if return_logsumexp else out


@_compat.any_rank
def run(
    function: str,
    query: Any,
    key: Any,
    value: Any,
    *,
    arrays: dict[str, Any],
    static: dict[str, Any],
    return_logsumexp: bool,
    implementation: Literal["cuda", "xla"] | None,
    spelled: Mapping[str, str] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`attention` under another public name: arrays are its array options, static the others.

    return_logsumexp: else the logsumexp that is returned must not be used: it has no gradient and,
      of FP8 kernels, lacks what smoothing took from the logits.
    spelled: that function's own names for some of the options.
    """
    options = {
        **arrays,
        **static,
        "return_logsumexp": return_logsumexp,
        "implementation": implementation,
    }
    config, plan = _explain.plan_of(function, query, key, value, spelled=spelled, **options)
    main = {"query": query, "key": key, "value": value}
    names = dict(spelled or {})
    _option_checks.check_arrays(  # here, since `explain` takes shapes as well
        function, {names.get(name, name): x for name, x in {**main, **arrays}.items()}
    )
    main = {name: jnp.asarray(x) for name, x in main.items()}
    only_cuda = implementation == "cuda"
    for name, x in main.items():
        _check_placement(function, name, x, only_cuda)
        main[name] = _refuse_float8_gradient(function, name, x)
    constant_scale = not isinstance(arrays.get("softmax_scale"), jax.Array)
    arrays = {name: _fold.as_operand(name, x) for name, x in arrays.items() if x is not None}
    given = {**main, **arrays}
    core = _core(function, config, plan.path, only_cuda, constant_scale, return_logsumexp)
    return _over_leading(given, main["query"].ndim - 3, core)


def _check_placement(function: str, name: str, x: jax.Array, only_cuda: bool) -> None:
    """What is known of an array's devices while it is not traced."""
    _partition.refuse_sharded(function, name, x.shape, _compat.known_split(x))
    if only_cuda and not isinstance(x, jax.core.Tracer):
        platforms = sorted({device.platform for device in x.devices()})
        if platforms != ["gpu"]:
            raise RuntimeError(
                f'{function}: {name} must be on a CUDA device with implementation="cuda"; got it '
                f'on {", ".join(platforms)}. Pass implementation="xla" or None.'
            )


def _refuse_float8_gradient(function: str, name: str, x: jax.Array) -> jax.Array:
    """x itself; differentiating with respect to it raises when it is float8."""
    if not _shapes.is_float8(x):
        return x

    @jax.custom_jvp
    def constant(array: jax.Array) -> jax.Array:
        return array

    @constant.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise TypeError(FLOAT8_GRADIENT.format(function=function, argument=name, dtype=x.dtype))

    guarded: jax.Array = constant(x)
    return guarded


def _over_leading(
    given: dict[str, Any], leading: int, core: Callable[[Operands], tuple[jax.Array, jax.Array]]
) -> tuple[jax.Array, jax.Array]:
    """core on rank-4 operands, unfolded; batch axes beyond one are mapped, so they stay
    shardable."""
    if leading <= 1:
        batch = tuple(given["query"].shape[:leading])
        main = [given[name] for name in ("query", "key", "value")]
        rest = {name: x for name, x in given.items() if name not in ("query", "key", "value")}
        out, logsumexp = core(_fold.fold_operands(*main, **rest))
        return _fold.unfold(out, batch), _fold.unfold(logsumexp, batch)
    axes: dict[str, int | None] = {}
    ranks = {name: leading + len(labels) for name, labels in _local.LABELS.items()}
    values = dict(given)
    for name, x in given.items():
        full_rank = name not in _local.UNBATCHED and getattr(x, "ndim", 0) == ranks[name]
        axes[name] = 0 if full_rank else None
        if full_rank and name in ("mask", "bias") and x.shape[0] == 1:
            axes[name], values[name] = None, x[0]

    def one(own: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        return _over_leading(own, leading - 1, core)

    return jax.vmap(one, in_axes=(axes,))(values)


def _core(
    function: str,
    config: Config,
    path: Literal["cuda", "xla"],
    only_cuda: bool,
    constant_scale: bool,
    returns_logsumexp: bool,
) -> Callable[[Operands], tuple[jax.Array, jax.Array]]:
    """The function of rank-4 operands that the plan chose, for the mesh it is traced under."""

    def kernel(operands: Operands) -> tuple[jax.Array, jax.Array]:
        arrays = _local.present(operands)
        call = _local.Call(
            config,
            tuple(arrays),
            only_cuda,
            function,
            constant_scale,
            returns_logsumexp=returns_logsumexp,
        )
        values = [x[None] if name in _local.UNBATCHED else x for name, x in arrays.items()]
        if _compat.in_manual_region():
            values = _compat.mark_varying(values)
        values = [
            _refusals.reverse_mode_only(x, NotImplementedError, f"{function}: {FORWARD_MODE}")
            if _local.is_differentiable(x)
            else x
            for x in values
        ]
        out, logsumexp = _vjp.build(call)(*values)
        return out, logsumexp

    def xla(operands: Operands) -> tuple[jax.Array, jax.Array]:
        arrays = _local.present(operands)
        if _compat.in_manual_region():
            arrays = dict(zip(arrays, _compat.mark_varying(list(arrays.values())), strict=True))
            out, logsumexp = _xla_jit(None, config)(Operands(**arrays))
        else:
            out, logsumexp = _xla_jit(function, config)(Operands(**arrays))
        return out, logsumexp

    chosen = kernel if path == "cuda" else xla

    def core(operands: Operands) -> tuple[jax.Array, jax.Array]:
        if _compat.is_explicit(operands.query):
            return _partition.over_explicit_mesh(function, operands, chosen)
        return chosen(operands)

    return core


@functools.cache
def _xla_jit(
    function: str | None, config: Config
) -> Callable[[Operands], tuple[jax.Array, jax.Array]]:
    """The XLA path under jit, built once per set of options.

    function: the public function that refuses split axes; None in shard_map, where none is seen.
    """

    def jax_fa3_attention_xla(operands: Operands) -> tuple[jax.Array, jax.Array]:
        if function is not None:
            arrays = _local.present(operands)
            operands = Operands(**{name: whole(function, name, x) for name, x in arrays.items()})
        out, logsumexp = _reference.attention(operands, config)
        return out, logsumexp

    return jax.jit(jax_fa3_attention_xla)


def whole(function: str, name: str, x: jax.Array) -> jax.Array:
    """x; compiling for several devices raises when they split an axis that XLA would gather."""
    if not _partition.must_be_whole(name):
        return x
    (checked,) = _batching.whole(function, name)(jax.lax.stop_gradient(x))
    same: jax.Array = _TANGENT_OF_FIRST.bind(x, checked)
    return same


_TANGENT_OF_FIRST: Any = _compat.identity("jax_fa3_same", lambda tangent: tangent)
