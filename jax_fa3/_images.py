"""Quantised operands as arrays that can be kept and sent: made once, read by any later call.

`Form` says what they look like. For the kernels they are the images that `jax_fa3_quantize` writes;
elsewhere, in arrays of the same shapes where both must fit one program, the model's codes in plain
order. Codes are uint8 here, so that nothing but the calls below ever computes with them. Every
array has the batch as its first axis, which vmap folds its own into.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jax_fa3 import (
    _compat,
    _ffi,
    _fp8_model,
    _grad,
    _local,
    _reference,
    _refusals,
    _shapes,
)
from jax_fa3._ffi import Images
from jax_fa3._fp8_model import EffectiveOperands, QuantizedOperands
from jax_fa3._grad import Results
from jax_fa3._merge import cotangents_of_part
from jax_fa3._quantize import FORMAT_DTYPES
from jax_fa3._shapes import Config, Operands

Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Form:
    """How operands of one kind are quantised, and by what.

    Attributes:
      config: the options; precision "fp8". is_causal and the alignment are not read.
      path: "cuda": the kernels where the program is lowered for CUDA, else the model in arrays of
        the images' shapes. "xla": the model alone.
      only_cuda, function: as in `_local.Call`.
      rotated: whether query and key are rotated.
    """

    config: Config
    path: Literal["cuda", "xla"]
    only_cuda: bool
    function: str
    rotated: bool

    @property
    def paddings(self) -> tuple[int, int]:
        """Rows of query and keys are padded to multiples of these."""
        return (_ffi.PAD_Q, _ffi.PAD_K) if self.path == "cuda" else (1, 1)


def quantize(form: Form, query: Any, key: Any, value: Any, softmax_scale: Any) -> Images:
    """Images of [batch, seqlen, heads, head_dim] operands; softmax_scale f32 [batch]."""

    def kernel(query: Any, key: Any, value: Any, scale: Any) -> Arrays:
        operands = Operands(query, key, value, scale[:, None])
        return _as_bytes(_local.quantize(operands, form.config, wants_shift=True))

    def model(query: Any, key: Any, value: Any, scale: Any) -> Arrays:
        operands = Operands(query, key, value, scale[:, None])
        return _as_bytes(_pack(form, _fp8_model.quantize_operands(operands, form.config)))

    return Images(*_choose(form, kernel, model)(query, key, value, softmax_scale))


def forward(
    form: Form, images: Images, *, seqlen_q: int, seqlen_k: int, is_causal: bool
) -> tuple[jax.Array, jax.Array]:
    """out [batch, seqlen_q, num_heads_q, head_dim_v] of config.out_dtype, and the logsumexp."""

    def kernel(*arrays: jax.Array) -> Arrays:
        return _ffi.fwd_fp8(
            _as_float8(form, arrays),
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            is_causal=is_causal,
            bottom_right=False,
            linear_exp=form.config.quantization.softmax == "linear",
            out_dtype=form.config.out_dtype,
        )

    def model(*arrays: jax.Array) -> Arrays:
        images = _as_float8(form, arrays)
        return _attend(form, is_causal, _unpack(form, images, seqlen_q, seqlen_k))

    out, logsumexp = _choose(form, kernel, model)(*images)
    return out, logsumexp


def backward(
    form: Form,
    images: Images,
    offset: jax.Array | None,
    results: Results,
    *,
    seqlen_k: int,
    is_causal: bool,
) -> Arrays:
    """Gradients of query, key and value as they were quantised, given those of attention over these
    keys and perhaps others.

    offset: f32 [batch, num_heads_kv, head_dim]: the gradient of query is that for keys this much
      larger, while the logits are those of images; None for nothing.
    Returns: dquery, dkey, dvalue; float32, natural layout, the first two still rotated.
    """
    rest = (*results, *(() if offset is None else (offset,)))
    count, seqlen_q = len(images), results.out.shape[1]

    def split(arrays: Arrays) -> tuple[Images, Results, jax.Array | None]:
        own, last = arrays[: count + 4], arrays[count + 4 :]
        moved = last[0] if last else None
        if moved is not None and form.rotated:
            moved = _fp8_model.hadamard(moved)
        return _as_float8(form, own[:count]), Results(*own[count:]), moved

    def kernel(*arrays: jax.Array) -> Arrays:
        images, results, moved = split(arrays)
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
        deterministic = form.config.deterministic
        shift = images.q_shift[:, :, :seqlen_q]
        keys: _ffi.Keys
        if moved is None:
            query, keys = _ffi.bwd_operands(
                images, **sizes, is_causal=is_causal, deterministic=deterministic
            )
        else:
            query, key, value = _ffi.dequantize_operands(images, **sizes)
            keys = (key + moved[:, None]).astype(key.dtype), value
            shift -= row_products(query, moved)
        grads = _grad.by_quantised(
            query,
            keys,
            shift,
            results,
            is_causal=is_causal,
            bottom_right=False,
            deterministic=deterministic,
        )
        return tuple(x.astype(jnp.float32) for x in grads)

    def model(*arrays: jax.Array) -> Arrays:
        images, results, moved = split(arrays)
        whole = _unpack(form, images, seqlen_q, seqlen_k)

        def run(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
            shift = whole.query_shift
            if moved is not None:  # no other logits, but what the larger keys pull back
                nothing = row_products(query - whole.query, moved)
                shift = nothing if shift is None else shift + nothing
            own = whole._replace(query=query, key=key, value=value, query_shift=shift)
            return _attend(form, is_causal, own)

        part, pull = jax.vjp(run, whole.query, whole.key, whole.value)
        dquery, dkey, dvalue = pull(cotangents_of_part(part, *results))
        return dquery, dkey, dvalue

    dims = images.k_image.shape[-1], images.v_descale.shape[-1]
    unserved = _grad.unserved_reason(*dims, (), ())
    return _choose(form, kernel if unserved is None else model, model)(*images, *rest)


def row_products(query: jax.Array, x: jax.Array) -> jax.Array:
    """f32 [batch, num_heads_q, seqlen_q], each row of query times x [batch, num_heads_kv, dim].

    A sum, not a product of matrices: it is done in one reading of query, in float32.
    """
    per_head = jnp.repeat(x, query.shape[2] // x.shape[1], axis=1)
    return jnp.swapaxes(jnp.sum(query.astype(jnp.float32) * per_head[:, None], axis=-1), 1, 2)


def _choose(
    form: Form, kernel: Callable[..., Arrays], model: Callable[..., Arrays]
) -> Callable[..., Arrays]:
    """kernel where the program is lowered for CUDA and the form is the kernels', else model."""
    if form.path == "xla":
        return model

    def default(*arrays: jax.Array) -> Arrays:
        if form.only_cuda:
            message = _local.ONLY_CUDA.format(function=form.function)
            arrays = (_refusals.on_lowering(arrays[0], RuntimeError, message), *arrays[1:])
        return model(*arrays)

    @custom_vmap
    def op(*arrays: jax.Array) -> Arrays:
        with jax.named_scope("jax_fa3"):
            outs: Arrays = jax.lax.platform_dependent(*arrays, cuda=kernel, default=default)
        return tuple(outs)

    @op.def_vmap
    def fold(
        size: int, in_batched: Sequence[bool], *arrays: jax.Array
    ) -> tuple[Arrays, tuple[bool, ...]]:
        full = [
            x if mapped else jnp.broadcast_to(x, (size, *x.shape))
            for x, mapped in zip(arrays, jax.tree.leaves(in_batched), strict=True)
        ]
        outs = op(*(x.reshape(size * x.shape[1], *x.shape[2:]) for x in full))
        apart = tuple(x.reshape(size, -1, *x.shape[1:]) for x in outs)
        return apart, (True,) * len(apart)

    return op


def _attend(
    form: Form, is_causal: bool, effective: EffectiveOperands
) -> tuple[jax.Array, jax.Array]:
    """The model's attention; causal by the rule of equal seqlens."""
    config = dataclasses.replace(form.config, is_causal=is_causal)
    sizes = Operands(effective.query, effective.key, effective.value, None)
    return _reference.of_effective(effective, sizes, config)


def _pack(form: Form, quantized: QuantizedOperands) -> Images:
    """The model's numbers in the shapes of images."""
    rows, granule = form.paddings
    dtype = FORMAT_DTYPES[form.config.quantization.dtype]
    query, key, value = (
        jnp.swapaxes(x, 1, 2).astype(dtype)
        for x in (quantized.query, quantized.key, quantized.value)
    )
    v_image = _padded(value, granule)
    batch, heads, keys, dim = v_image.shape
    return Images(
        _padded(query, rows),
        _padded(quantized.query_descale, rows),
        _padded(quantized.query_shift, rows),
        _padded(key, granule),
        _padded(quantized.key_descale, granule)[:, :, ::granule],
        v_image.reshape(batch, heads, keys // granule, dim, granule),
        quantized.value_descale,
        quantized.value_mean,
    )


def _unpack(form: Form, images: Images, seqlen_q: int, seqlen_k: int) -> EffectiveOperands:
    """Inverse of `_pack`, dequantised."""
    granule = form.paddings[1]
    query = images.q_image[:, :, :seqlen_q].astype(jnp.float32)
    key = images.k_image[:, :, :seqlen_k].astype(jnp.float32)
    key_descale = jnp.repeat(images.k_descale, granule, axis=2)[:, :, :seqlen_k]
    batch, heads, granules, dim, _ = images.v_image.shape
    value = images.v_image.reshape(batch, heads, granules * granule, dim)[:, :, :seqlen_k]
    value = value.astype(jnp.float32) * images.v_descale[:, :, None]

    def real(codes: jax.Array, descale: jax.Array) -> tuple[jax.Array, jax.Array]:
        bad = jnp.any(jnp.isnan(codes), axis=-1)
        finite = jnp.where(bad[..., None], 0.0, codes * descale[..., None])
        return jnp.swapaxes(finite, 1, 2), bad

    query, query_bad = real(query, images.q_descale[:, :, :seqlen_q])
    key, key_bad = real(key, key_descale)
    return EffectiveOperands(
        query,
        key,
        jnp.swapaxes(value, 1, 2),
        images.q_shift[:, :, :seqlen_q],
        images.v_mean,
        query_bad,
        key_bad,
    )


def _padded(x: jax.Array, multiple: int) -> jax.Array:
    """x with zeros up to a multiple along axis 2."""
    missing = -x.shape[2] % multiple
    return jnp.pad(x, [(0, missing if axis == 2 else 0) for axis in range(x.ndim)])


def _as_bytes(images: Images) -> Arrays:
    """images with codes as uint8; all of them vary where any does."""
    return tuple(
        jax.lax.bitcast_convert_type(x, jnp.uint8) if _shapes.is_float8(x) else x
        for x in _compat.mark_varying(list(images))
    )


def _as_float8(form: Form, arrays: Sequence[jax.Array]) -> Images:
    """Inverse of `_as_bytes`."""
    dtype = FORMAT_DTYPES[form.config.quantization.dtype]
    return Images(
        *(jax.lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint8 else x for x in arrays)
    )
