"""Attention as one device computes it: fold every batch axis, then the kernel or the XLA path.

Arrays arrive as the vmap and sharding layers hand them on: each operand of `Operands` carries the
same number of leading batch axes, and each of those axes has the full size or 1 (not mapped,
shared). The last of them is the batch of the call itself; the ones before it come from vmap.
softmax_scale and sinks, which have no batch of their own, carry 1 there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_fa3 import _ffi, _fp8_model, _reference, _refusals, _shapes
from jax_fa3._shapes import Config, Operands

# Trailing axes of each operand, after its batch axes. Sharding and folding both read this table.
LABELS: dict[str, tuple[str, ...]] = {
    "query": ("seqlen_q", "head_q", "dim"),
    "key": ("seqlen_k", "head_kv", "dim"),
    "value": ("seqlen_k", "head_kv", "dim_v"),
    "softmax_scale": (),
    "query_descale": ("head_kv",),
    "key_descale": ("head_kv",),
    "value_descale": ("head_kv",),
    "sinks": ("head_q",),
    "query_segment_ids": ("seqlen_q",),
    "key_segment_ids": ("seqlen_k",),
    "query_seqlens": (),
    "key_seqlens": (),
    "mask": ("head_q", "seqlen_q", "seqlen_k"),
    "bias": ("head_q", "seqlen_q", "seqlen_k"),
}
ONLY_CUDA = (
    '{function}: implementation="cuda" must be lowered for platform cuda; got {{platforms}}. Pass '
    'implementation="xla" or None.'
)
OUT_LABELS = ("seqlen_q", "head_q", "dim_v")
LOGSUMEXP_LABELS = ("head_q", "seqlen_q")
UNBATCHED = ("softmax_scale", "sinks")


class Call(NamedTuple):
    """What is static about one op; hashable, so that each op is built once.

    Attributes:
      config: the options.
      names: which operands are given, in the order in which the layers pass their arrays.
      only_cuda: implementation="cuda": no XLA branch for other platforms.
      function: the public function, first word of every message.
      constant_scale: softmax_scale is a plain number, so that nobody asks for its gradient.
      of_part: the keys are a part of those that gave the results which the backward pass is given.
      keeps_images: a backward pass follows, which quantises the same arrays: where that is a call
        of its own, XLA runs it once for both.
      returns_logsumexp: the caller sees logsumexp; else it is a residual, whose cotangent is 0, and
        FP8 kernels leave out of it what smoothing took from a row's logits.
    """

    config: Config
    names: tuple[str, ...]
    only_cuda: bool
    function: str
    constant_scale: bool
    of_part: bool = False
    keeps_images: bool = False
    returns_logsumexp: bool = True

    def operands(self, arrays: Sequence[jax.Array]) -> Operands:
        """The operands from their arrays in the order of names."""
        return Operands(**dict(zip(self.names, arrays, strict=True)))

    def wants_gradient(self, name: str, x: Any) -> bool:
        """Whether operand `name`, of x's type, gets a cotangent."""
        return is_differentiable(x) and not (name == "softmax_scale" and self.constant_scale)


def present(operands: Operands) -> dict[str, jax.Array]:
    """The operands that were given, by name."""
    return {name: x for name, x in operands._asdict().items() if x is not None}


def batch_shape(arrays: dict[str, Any]) -> tuple[int, ...]:
    """Full sizes of the batch axes: per axis the size that is not 1."""
    prefixes = [x.shape[: len(x.shape) - len(LABELS[name])] for name, x in arrays.items()]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*prefixes, strict=True))


def is_differentiable(x: Any) -> bool:
    """Whether a cotangent exists for this operand: floating, and not stored in float8."""
    return bool(jnp.issubdtype(x.dtype, jnp.floating)) and not _shapes.is_float8(x)


def forward(operands: Operands, call: Call) -> tuple[jax.Array, jax.Array]:
    """out [*batch, seqlen_q, num_heads_q, head_dim_v] and logsumexp f32 [*batch, num_heads_q,
    seqlen_q]."""
    arrays = present(operands)
    full = batch_shape(arrays)
    for axis, size in enumerate(full):
        if size != 1 and any(
            name in arrays and arrays[name].shape[axis] != 1 for name in UNBATCHED
        ):
            return _map_axis(arrays, axis, call)
    folded, grouped = _fold_group(arrays, full)
    rest = tuple(n for axis, n in enumerate(full) if axis not in grouped)
    flat = {name: _fold_batch(name, x, rest) for name, x in folded.items()}
    out, logsumexp = _dispatch(Operands(**flat), call)
    out = out.reshape(*rest, *out.shape[1:])
    logsumexp = logsumexp.reshape(*rest, *logsumexp.shape[1:])
    if not grouped:
        return out, logsumexp
    sizes = tuple(full[axis] for axis in grouped)
    heads_kv = arrays["key"].shape[-2]
    heads = heads_kv, arrays["query"].shape[-2] // heads_kv
    return (
        _ungroup(out, len(rest) + 1, heads, sizes, grouped),
        _ungroup(logsumexp, len(rest), heads, sizes, grouped),
    )


def _map_axis(arrays: dict[str, jax.Array], axis: int, call: Call) -> tuple[jax.Array, jax.Array]:
    """One call per index of a batch axis along which softmax_scale or sinks differ."""
    mapped = {name: jnp.moveaxis(x, axis, 0) for name, x in arrays.items() if x.shape[axis] != 1}
    shared = {name: x for name, x in arrays.items() if name not in mapped}

    def one(values: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        own = {name: jnp.expand_dims(x, axis) for name, x in values.items()}
        out, logsumexp = forward(Operands(**{**shared, **own}), call)
        return jnp.squeeze(out, axis), jnp.squeeze(logsumexp, axis)

    out, logsumexp = jax.lax.map(one, mapped)
    return jnp.moveaxis(out, 0, axis), jnp.moveaxis(logsumexp, 0, axis)


def _fold_group(
    arrays: dict[str, jax.Array], full: tuple[int, ...]
) -> tuple[dict[str, jax.Array], tuple[int, ...]]:
    """Moves batch axes that only query has into its head group, so that key and value stay shared.

    num_heads_q becomes num_heads_kv * (sizes of those axes) * group. Returns the operands without
    those axes, and which axes they were.
    """
    per_head = any(name in arrays for name in ("sinks", "mask", "bias"))
    others = [x for name, x in arrays.items() if name != "query"]
    grouped = tuple(
        axis
        for axis, size in enumerate(full)
        if size != 1 and not per_head and all(x.shape[axis] == 1 for x in others)
    )
    if not grouped:
        return arrays, ()
    query, heads_kv = arrays["query"], arrays["key"].shape[-2]
    *_, seqlen_q, heads_q, dim = query.shape
    rest = [axis for axis in range(len(full)) if axis not in grouped]
    n = len(full)
    split = query.reshape(*query.shape[:n], seqlen_q, heads_kv, heads_q // heads_kv, dim)
    split = split.transpose(*rest, n, n + 1, *grouped, n + 2, n + 3)
    lead = split.shape[: len(rest)]
    folded = {name: jnp.squeeze(x, grouped) for name, x in arrays.items() if name != "query"}
    heads = heads_q * math.prod(full[axis] for axis in grouped)
    return {"query": split.reshape(*lead, seqlen_q, heads, dim), **folded}, grouped


def _ungroup(
    x: jax.Array,
    head_axis: int,
    heads: tuple[int, int],
    sizes: tuple[int, ...],
    grouped: tuple[int, ...],
) -> jax.Array:
    """Inverse of `_fold_group` for a result with the folded heads at head_axis.

    heads: num_heads_kv and query heads per kv head of one example.
    """
    heads_kv, group = heads
    before, after = x.shape[:head_axis], x.shape[head_axis + 1 :]
    x = x.reshape(*before, heads_kv, *sizes, group, *after)
    x = jnp.moveaxis(x, [head_axis + 1 + i for i in range(len(sizes))], grouped)
    axis = head_axis + len(sizes)
    return x.reshape(*x.shape[:axis], heads_kv * group, *x.shape[axis + 2 :])


def _fold_batch(name: str, x: jax.Array, rest: tuple[int, ...]) -> jax.Array:
    """All batch axes as one; softmax_scale and sinks lose theirs (all are 1 here)."""
    own = x.shape[x.ndim - len(LABELS[name]) :]
    if name in UNBATCHED:
        return x.reshape(own)
    if name in ("mask", "bias") and math.prod(x.shape[: len(rest)]) == 1:
        return x.reshape(1, *own)
    return jnp.broadcast_to(x, (*rest, *own)).reshape(math.prod(rest), *own)


def _dispatch(operands: Operands, call: Call) -> tuple[jax.Array, jax.Array]:
    """The kernel where the program is lowered for CUDA; elsewhere the XLA path, or one sentence
    when only the kernel will do."""
    config = call.config
    if _shapes.dims_of(operands).is_empty:
        return _xla(operands, config)

    def kernel(*flat: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _kernel(Operands(**dict(zip(names, flat, strict=True))), call)

    def default(*flat: jax.Array) -> tuple[jax.Array, jax.Array]:
        if call.only_cuda:
            refused = _refusals.on_lowering(
                flat[0], RuntimeError, ONLY_CUDA.format(function=call.function)
            )
            flat = (refused, *flat[1:])
        return _xla(Operands(**dict(zip(names, flat, strict=True))), config)

    arrays = present(operands)
    names = tuple(arrays)
    with jax.named_scope("jax_fa3"):
        out, logsumexp = jax.lax.platform_dependent(*arrays.values(), cuda=kernel, default=default)
    return out, logsumexp


def _xla(operands: Operands, config: Config) -> tuple[jax.Array, jax.Array]:
    out, logsumexp = _reference.attention(operands, config)
    return out, logsumexp


def _kernel(operands: Operands, call: Call) -> tuple[jax.Array, jax.Array]:
    """The FFI calls for rank-4 operands that `_explain.plan` found to be served."""
    query, key, value = operands.query, operands.key, operands.value
    config = call.config
    bottom_right = config.causal_alignment == "bottom_right"
    if config.precision == "native":
        return _ffi.fwd_native(
            query,
            key,
            value,
            operands.softmax_scale.astype(jnp.float32),
            is_causal=config.is_causal,
            bottom_right=bottom_right,
        )
    options: dict[str, Any] = {
        "is_causal": config.is_causal,
        "bottom_right": bottom_right,
        "linear_exp": config.quantization.softmax == "linear",
        "out_dtype": config.out_dtype,
    }
    if call.keeps_images:
        images = quantize(operands, config, wants_shift=call.returns_logsumexp)
        return _ffi.fwd_fp8(images, seqlen_q=query.shape[1], seqlen_k=key.shape[1], **options)
    inputs = _quantizer_inputs(operands, config, call.returns_logsumexp)
    return _ffi.quantize_fwd_fp8(inputs, **options)


def quantize(operands: Operands, config: Config, *, wants_shift: bool) -> _ffi.Images:
    """The images of rank-4 operands as config wants them."""
    return _ffi.quantize_operands(_quantizer_inputs(operands, config, wants_shift))


def _quantizer_inputs(
    operands: Operands, config: Config, wants_shift: bool
) -> _ffi.QuantizerInputs:
    quantization = config.quantization
    query, key, value = operands.query, operands.key, operands.value
    v_factor = operands.value_descale
    if v_factor is None:
        v_factor = jnp.float32(1)
    return _ffi.QuantizerInputs(
        query,
        key,
        value,
        factor=_fp8_model.logits_factor(operands).astype(jnp.float32),
        v_factor=v_factor.astype(jnp.float32),
        image_dtype=jnp.float8_e5m2 if quantization.dtype == "e5m2" else jnp.float8_e4m3fn,
        hadamard=_shapes.uses_hadamard(config, query, key),
        smooth_key=quantization.smooth_key and not _shapes.is_float8(key),
        center_value=quantization.center_value and not _shapes.is_float8(value),
        wants_shift=wants_shift,
    )
