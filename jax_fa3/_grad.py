"""The backward pass as one device computes it: by the CUDA kernels, or by recomputing on the XLA
path.

Arrays arrive as in `_local`: leading batch axes of full size or 1. On axes that come from vmap the
cotangents have the full size (one gradient per example, also for an operand that the examples
share); on the call's own batch axis they have the operand's size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa3 import _compat, _ffi, _fp8_grad, _fp8_model, _local, _reference, _shapes
from jax_fa3._local import Call
from jax_fa3._merge import cotangents_of_part
from jax_fa3._shapes import Operands

_LN_2 = np.float32(math.log(2))


class Results(NamedTuple):
    """What the forward pass returned, and the cotangents of it.

    With `Call.of_part` these belong to attention over more keys than the operands hold. The kernels
    need nothing else: probabilities come from the whole logsumexp, and so do their gradients.
    """

    out: jax.Array  # [*batch, seqlen_q, num_heads_q, head_dim_v]
    logsumexp: jax.Array  # f32 [*batch, num_heads_q, seqlen_q]
    dout: jax.Array  # like out
    dlogsumexp: jax.Array  # like logsumexp; for the kernels no rows where nobody saw it


Arrays = dict[str, jax.Array]


def unserved_reason(
    head_dim: int, head_dim_v: int, dtypes: Iterable[Any], given: Iterable[str]
) -> str | None:
    """Why the backward kernels do not serve a request whose forward a kernel serves, or None.

    dtypes: of query, key and value. given: the optional operands.
    """
    if head_dim not in _ffi.SERVED_HEAD_DIMS or head_dim_v != head_dim:
        return f"head_dim must be one of {', '.join(map(str, _ffi.SERVED_HEAD_DIMS))} there"
    if set(given) - {"softmax_scale"} or any(np.dtype(x) in _shapes.FLOAT8_DTYPES for x in dtypes):
        return "float8 inputs have no gradient there"
    return None


@_compat.any_rank
def backward(operands: Operands, results: Results, call: Call) -> Arrays:
    """Cotangent of every operand that wants one, by name."""
    arrays = _local.present(operands)
    main = (operands.query, operands.key, operands.value)
    reason = unserved_reason(
        operands.query.shape[-1],
        operands.value.shape[-1],
        [x.dtype for x in main],
        arrays.keys() - {"query", "key", "value"},
    )
    if reason is not None or any(x.size == 0 for x in main):
        return _by_xla(arrays, results, call)

    def kernel(flat: tuple[Arrays, Results]) -> Arrays:
        return _by_kernel(*flat, call)

    def default(flat: tuple[Arrays, Results]) -> Arrays:
        return _by_xla(*flat, call)

    with jax.named_scope("jax_fa3_backward"):
        grads: Arrays = jax.lax.platform_dependent((arrays, results), cuda=kernel, default=default)
    return grads


# ---- the XLA path -------------------------------------------------------------------------------
def _by_xla(arrays: Arrays, results: Results, call: Call) -> Arrays:
    return _vmapped_xla(arrays, results._asdict(), call)


def _vmapped_xla(arrays: Arrays, results: Arrays, call: Call) -> Arrays:
    if results["dout"].ndim == 4:
        return _one_by_xla(arrays, Results(**results), call)
    every = {**arrays, **results}
    axes = {name: 0 if x.shape[0] != 1 else None for name, x in every.items()}
    squeezed = {name: x if axes[name] == 0 else x[0] for name, x in every.items()}

    def inner(values: Arrays) -> Arrays:
        own = {name: values[name] for name in arrays}
        return _vmapped_xla(own, {name: values[name] for name in results}, call)

    if all(axis is None for axis in axes.values()):
        return {name: g[None] for name, g in inner(squeezed).items()}
    return jax.vmap(inner, in_axes=(axes,))(squeezed)


def _one_by_xla(arrays: Arrays, results: Results, call: Call) -> Arrays:
    def run(variables: Arrays) -> tuple[jax.Array, jax.Array]:
        merged = {**arrays, **variables}
        for name in _local.UNBATCHED:
            if name in merged:
                merged[name] = merged[name][0]
        out, logsumexp = _reference.attention(Operands(**merged), call.config)
        return out, logsumexp

    wanted = {name: x for name, x in arrays.items() if call.wants_gradient(name, x)}
    own, pull = jax.vjp(run, wanted)
    cotangents = results.dout, results.dlogsumexp
    (grads,) = pull(cotangents_of_part(own, *results) if call.of_part else cotangents)
    return dict(grads)


# ---- the kernels --------------------------------------------------------------------------------
def _by_kernel(arrays: Arrays, results: Results, call: Call) -> Arrays:
    """Every batch axis folded into one launch, then the FFI calls."""
    lead = arrays["query"].ndim - 3
    # Cotangents may be mapped where no operand is (`jax.jacrev`).
    prefixes = [x.shape[:lead] for x in (*arrays.values(), *results)]
    full = tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*prefixes, strict=True))
    scale = arrays["softmax_scale"]
    for axis, size in enumerate(scale.shape):
        if size != 1:
            return _map_scale(arrays, results, axis, call)

    def fold(x: jax.Array, own: int) -> jax.Array:
        shape = x.shape[x.ndim - own :]
        return jnp.broadcast_to(x, (*full, *shape)).reshape(math.prod(full), *shape)

    query, key, value = (fold(arrays[name], 3) for name in ("query", "key", "value"))
    folded = Results(
        fold(results.out, 3),
        fold(results.logsumexp, 2),
        fold(results.dout, 3),
        # Of zeros no rows, so that nobody writes and reads them.
        fold(results.dlogsumexp[..., : None if call.returns_logsumexp else 0], 2),
    )
    operands = Operands(
        query=query, key=key, value=value, softmax_scale=scale.reshape(()).astype(jnp.float32)
    )
    run = _native if call.config.precision == "native" else _fp8
    dquery, dkey, dvalue, dscale = run(operands, folded, call)
    grads = {
        "query": dquery.reshape(*full, *dquery.shape[1:]),
        "key": dkey.reshape(*full, *dkey.shape[1:]),
        "value": dvalue.reshape(*full, *dvalue.shape[1:]),
    }
    if call.wants_gradient("softmax_scale", scale):
        per_example = jnp.sum(dscale.reshape(full), axis=-1, keepdims=True)
        grads["softmax_scale"] = per_example.astype(scale.dtype)
    return grads


def _map_scale(arrays: Arrays, results: Results, axis: int, call: Call) -> Arrays:
    """One launch per index of a batch axis along which softmax_scale differs."""
    every = {**arrays, **results._asdict()}
    mapped = {name: jnp.moveaxis(x, axis, 0) for name, x in every.items() if x.shape[axis] != 1}

    def one(own: Arrays) -> Arrays:
        now = {**every, **{name: jnp.expand_dims(x, axis) for name, x in own.items()}}
        grads = _by_kernel(
            {name: now[name] for name in arrays}, Results(*(now[n] for n in Results._fields)), call
        )
        return {name: jnp.squeeze(g, axis) for name, g in grads.items()}

    grads: Arrays = jax.lax.map(one, mapped)
    return {name: jnp.moveaxis(g, 0, axis) for name, g in grads.items()}


def _native(
    operands: Operands, results: Results, call: Call
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Gradients of 16-bit attention, and of softmax_scale [batch]."""
    return _ffi.bwd(
        operands.query,
        (operands.key, operands.value),
        *_results_in(operands.query.dtype, results),
        operands.softmax_scale,
        is_causal=call.config.is_causal,
        bottom_right=call.config.causal_alignment == "bottom_right",
        wants_scale=not call.constant_scale,
        deterministic=call.config.deterministic,
    )


def _results_in(dtype: Any, results: Results) -> Results:
    """results with out and dout in the dtype of the kernel's operands."""
    return results._replace(out=results.out.astype(dtype), dout=results.dout.astype(dtype))


def _fp8(
    operands: Operands, results: Results, call: Call
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Gradients of the quantised model, straight through every rounding, and of softmax_scale
    [batch].

    The kernel recomputes the probabilities from the very numbers that the forward pass multiplied:
    quantised query (in log2 units) and key. What quantisation did before rounding is undone here.
    """
    config = call.config
    query, key, value = operands.query, operands.key, operands.value
    seqlen_q = query.shape[1]
    images = _local.quantize(operands, config, wants_shift=call.returns_logsumexp)
    quantised = _ffi.bwd_operands(
        images,
        seqlen_q=seqlen_q,
        seqlen_k=key.shape[1],
        is_causal=config.is_causal,
        deterministic=config.deterministic,
    )
    rotated = _shapes.uses_hadamard(config, query, key)
    # A row's gradients sum to dlogsumexp, and the mean meets nothing but that sum.
    meets_mean = config.quantization.smooth_key and call.returns_logsumexp
    mean = _fp8_model.key_mean(key) if meets_mean else None
    rotation = None
    if rotated and call.constant_scale:
        rotation = _ffi.Rotation(operands.softmax_scale, mean)
    at_once = _ffi.bwd_takes_back_rotation(
        query.shape[-1], query.dtype, deterministic=config.deterministic
    )
    dquery, dkey, dvalue = by_quantised(
        *quantised,
        images.q_shift[:, :, :seqlen_q] if call.returns_logsumexp else None,
        results,
        is_causal=config.is_causal,
        bottom_right=config.causal_alignment == "bottom_right",
        deterministic=config.deterministic,
        rotation=rotation if at_once else None,
    )
    row_sums = None
    if mean is not None:
        row_sums = jnp.where(jnp.isfinite(results.logsumexp), results.dlogsumexp, 0.0)
    dvalue = dvalue.astype(value.dtype)
    if rotation is not None:
        if not at_once:
            dquery, dkey = _ffi.unrotate(dquery, dkey, *rotation, row_sums, dtype=query.dtype)
        return dquery, dkey, dvalue, jnp.zeros(query.shape[0], jnp.float32)
    grads = _fp8_grad.of_inputs(
        dquery,
        dkey,
        softmax_scale=operands.softmax_scale,
        rotated=rotated,
        key_mean=mean,
        row_sums=row_sums,
        query=None if call.constant_scale else query,
    )
    return (
        grads.dquery.astype(query.dtype),
        grads.dkey.astype(key.dtype),
        dvalue,
        jnp.zeros(query.shape[0], jnp.float32) if grads.dscale is None else grads.dscale,
    )


def by_quantised(
    query: jax.Array,
    keys: _ffi.Keys,
    shift: jax.Array | None,
    results: Results,
    *,
    is_causal: bool,
    bottom_right: bool,
    deterministic: bool,
    rotation: _ffi.Rotation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of what `_ffi.dequantize_operands` returns; shift f32 [batch, num_heads_q,
    seqlen_q] is each row's q_shift, None where it is 0. With `rotation` those of the arrays before
    the rotation."""
    if shift is not None:
        # logits = ln 2 * quantised query @ quantised key^T + ln 2 * shift, in natural units.
        finite = jnp.isfinite(results.logsumexp)
        logsumexp = jnp.where(finite, results.logsumexp - shift * _LN_2, results.logsumexp)
        results = results._replace(logsumexp=logsumexp)
    dquery, dkey, dvalue, _ = _ffi.bwd(
        query,
        keys,
        *_results_in(jnp.bfloat16, results),
        _LN_2 * jnp.ones((), jnp.float32),
        is_causal=is_causal,
        bottom_right=bottom_right,
        wants_scale=False,
        deterministic=deterministic,
        rotation=rotation,
    )
    return dquery, dkey, dvalue
