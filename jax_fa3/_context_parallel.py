"""`context_parallel_attention`: attention over a sequence that is sharded over devices.

Every strategy is made of plain local calls, full or causal, so that the kernels serve them:
  ring, all_gather   the device's own keys first, then the keys of every other device; the partial
                     results are merged in float32. They differ in how the other keys arrive.
  ulysses            heads and sequence change places, one call on whole sequences, and back.

Zigzag: the sequence is cut into 2 n chunks and device i holds chunks i and 2 n - 1 - i. Its own
part is then plainly causal. Of the four pairs of chunks (rows of device i, keys of device j != i)
exactly two are visible, both in full: (late, early), and (early, early) for j < i or (late, late)
for j > i. So every device computes the same two blocks per step and no work is thrown away.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa3 import _attention, _compat, _explain, _option_checks, _partition, _ring, _shapes
from jax_fa3._images import Form
from jax_fa3._local import Call
from jax_fa3._option_checks import show
from jax_fa3._parts import Float8, Local, Native, Part, Partial
from jax_fa3._quantize import Quantization
from jax_fa3._shapes import Operands

_NAME = "context_parallel_attention"


class ContextParallelOptions(TypedDict, total=False):
    """Keywords of `context_parallel_attention` that have defaults, beside return_logsumexp."""

    strategy: Literal["ring", "all_gather", "ulysses"]
    layout: Literal["contiguous", "zigzag"]
    softmax_scale: Any
    is_causal: bool
    precision: Literal["fp8", "native"]
    quantization: Quantization | None
    implementation: Literal["cuda", "xla"] | None


@overload
def context_parallel_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    axis_name: str | tuple[str, ...],
    return_logsumexp: Literal[False] = ...,
    **options: Unpack[ContextParallelOptions],
) -> jax.Array: ...


@overload
def context_parallel_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    axis_name: str | tuple[str, ...],
    return_logsumexp: Literal[True],
    **options: Unpack[ContextParallelOptions],
) -> tuple[jax.Array, jax.Array]: ...


def context_parallel_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    axis_name: str | tuple[str, ...],
    strategy: Literal["ring", "all_gather", "ulysses"] = "ring",
    layout: Literal["contiguous", "zigzag"] = "contiguous",
    softmax_scale: Any = None,
    is_causal: bool = False,
    precision: Literal["fp8", "native"] = "fp8",
    quantization: Quantization | None = None,
    return_logsumexp: bool = False,
    implementation: Literal["cuda", "xla"] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`attention` of a sequence sharded over a mesh axis; to be called inside `jax.shard_map`.

    Every device passes its shard and gets the same rows of the result; together they equal
    `attention` of the whole arrays. Rank 3 and more leading batch axes as in `attention`.

    Args:
      query: [batch, seqlen_q / n, num_heads_q, head_dim], n devices along axis_name; bfloat16,
        float16 or float32.
      key: [batch, seqlen_k / n, num_heads_kv, head_dim]; num_heads_kv divides num_heads_q.
      value: [batch, seqlen_k / n, num_heads_kv, head_dim_v].
      axis_name: the mesh axis (or axes, major first) that shards the sequence; any size, 1
        included.
      strategy: how key and value meet query. "ring": they travel around the axis, n - 1
        collective-permutes each; memory of one shard in the forward pass. "all_gather": they are
        gathered, one all-gather each; memory of the whole key and value. "ulysses": all-to-alls
        give each device num_heads_q / n heads of the whole sequence; n must divide num_heads_q. KV
        heads are repeated where n does not divide num_heads_kv.
      layout: which rows device i holds. "contiguous": shard i of the sequence; with is_causal the
        last device then has most work. "zigzag": chunks i and 2 n - 1 - i of 2 n, equal work; see
        `zigzag_shard`. The shard must be even. Without is_causal the order does not matter.
      softmax_scale, precision, quantization, return_logsumexp, implementation: as in `attention`.
      is_causal: row i of the whole sequence sees keys <= i; query and key need the same seqlen.
    Returns: out [batch, seqlen_q / n, num_heads_q, head_dim_v] of query's dtype; with
      return_logsumexp also float32 [batch, num_heads_q, seqlen_q / n].
    Raises:
      ValueError: inputs contradict each other, or axis_name is not a manual axis here.
      TypeError: wrong dtype or kind.
      NotImplementedError, RuntimeError: as `attention`, for the local call.
    Transformations: those of `attention`, inside or around shard_map, with its checks on or off.
      Every mesh axis that splits the arrays should be manual. Explicit ones that are not cost a
      gradient one more forward pass; XLA gathers what automatic ones split.
      The backward pass of "ring" sends the shards around again, so its memory stays that of one
      shard, and adds up gradients in float32. Forward-mode differentiation needs "ulysses", or
      "all_gather" with precision="native", and implementation="xla". What travels as float8, and
      the CUDA path, is differentiable once.
    Numerics: partial results are merged in float32; each was rounded to query's dtype once. With
      precision="fp8" each device quantises its shard once and sends it as float8, half the bytes of
      16-bit inputs: scales and means are those of a shard (of half a shard for zigzag), not of the
      whole sequence, so "ring" and "all_gather" differ from `attention` within the error of FP8.
      "ulysses", and "all_gather" without is_causal, send the inputs and quantise whole sequences.
    Source: Ring Attention, arXiv:2310.01889; DeepSpeed-Ulysses, arXiv:2309.14509.
    """
    for argument, x in {"query": query, "key": key, "value": value}.items():
        if not (hasattr(x, "dtype") and hasattr(x, "shape")):
            continue  # refused below
        if _option_checks.dtype_of(_NAME, argument, x) in _shapes.FLOAT8_DTYPES:
            raise TypeError(
                f"{_NAME}: {argument} must be bfloat16, float16 or float32; got {x.dtype}. Pass"
                " 16-bit inputs, attention quantises them itself."
            )
    _option_checks.check_choice(_NAME, "strategy", strategy, ("ring", "all_gather", "ulysses"))
    _option_checks.check_choice(_NAME, "layout", layout, ("contiguous", "zigzag"))
    config, plan = _explain.plan_of(
        _NAME,
        query,
        key,
        value,
        softmax_scale=softmax_scale,
        is_causal=is_causal,
        precision=precision,
        quantization=quantization,
        return_logsumexp=return_logsumexp,
        implementation=implementation,
    )
    given = {"query": query, "key": key, "value": value, "softmax_scale": softmax_scale}
    _option_checks.check_arrays(_NAME, given)
    size = _size_of_axis(axis_name)
    _check_shards(query, key, size, strategy, layout, is_causal)
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    leading = query.shape[:-3]
    query, key, value = (x.reshape(math.prod(leading), *x.shape[-3:]) for x in (query, key, value))
    if softmax_scale is None:
        softmax_scale = np.float32(query.shape[-1] ** -0.5)
    # A number has no gradient, so the local backward pass need not compute one.
    number = None if isinstance(softmax_scale, jax.Array) else softmax_scale

    def local(
        query: jax.Array, key: jax.Array, value: jax.Array, scale: jax.Array, *, is_causal: bool
    ) -> Partial:
        out, logsumexp = _attention.run(
            _NAME,
            query,
            key,
            value,
            arrays={"softmax_scale": scale if number is None else number},
            static={"is_causal": is_causal, "precision": precision, "quantization": quantization},
            return_logsumexp=True,
            implementation=implementation,
        )
        return out, logsumexp

    zigzag = bool(is_causal) and layout == "zigzag"

    def attend(given: Operands) -> Partial:
        # NOTE: all of it varies over the axis from here on, the scale too. Otherwise its gradient
        # would be summed over devices inside a branch that only some of them take, and they would
        # wait for the others forever.
        index = jax.lax.axis_index(axis_name)
        query, key, value, scale, index = _compat.mark_varying([*given[:4], index])
        operands = (query, key, value, scale)
        if size == 1 or 0 in (query.size, key.size):
            return local(*operands, is_causal=is_causal)
        if strategy == "ulysses":
            return _ulysses(*operands, local, axis_name, size, is_causal, zigzag)
        if strategy == "all_gather" and not is_causal:
            key, value = (
                jax.lax.all_gather(x, axis_name, axis=1, tiled=True) for x in (key, value)
            )
            return local(query, key, value, scale, is_causal=False)
        names = ("query", "key", "value", "softmax_scale")
        only_cuda, constant = implementation == "cuda", number is not None
        call = Call(config, names, only_cuda, _NAME, constant, of_part=True)
        part: Part = Native(local, call, plan.path)
        if config.precision == "fp8":
            rotated = _shapes.uses_hadamard(config, query, key)
            form = Form(config, plan.path, only_cuda, _NAME, rotated)
            seqlen_q, seqlen_k = (x.shape[1] // (1 + zigzag) for x in (query, key))
            part = Float8(form, seqlen_q, seqlen_k, constant)
        steps = _ring.Steps(
            part, axis_name, size, bool(is_causal), zigzag, strategy == "all_gather"
        )
        if steps.gathered and config.precision == "native":
            out, logsumexp = _ring.over(steps, *steps.prepare(*operands), scale, index)
            return out.astype(query.dtype), logsumexp
        return _ring.attend(steps, *operands, index)

    operands = Operands(query, key, value, jnp.asarray(softmax_scale, jnp.float32))
    if _compat.is_explicit(query):  # with axes that no shard_map made manual
        out, logsumexp = _partition.over_explicit_mesh(_NAME, operands, attend)
    else:
        out, logsumexp = attend(operands)
    out = out.reshape(*leading, *out.shape[1:])
    logsumexp = logsumexp.reshape(*leading, *logsumexp.shape[1:])
    return (out, logsumexp) if return_logsumexp else out


def zigzag_shard(x: Any, num_shards: int, *, axis: int = 1) -> jax.Array:
    """Reorders a whole sequence so that equal shards of it hold what layout="zigzag" asks for.

    Args:
      x: the whole array, [batch, seqlen, ...] for the default axis; before it is sharded.
      num_shards: devices along the sequence; 2 num_shards divides seqlen.
      axis: the sequence axis (2 for logsumexp).
    Returns: x with chunks 0, 2 n - 1, 1, 2 n - 2, ... along axis, n = num_shards.
    Raises:
      ValueError: 2 num_shards does not divide the axis, or there is no such axis.
      TypeError: num_shards or axis is no int, or x is no array.
    """
    num_shards, axis = _check_zigzag("zigzag_shard", x, num_shards, axis)
    return _reorder(jnp.asarray(x), _zigzag_order(num_shards), axis)


def zigzag_unshard(x: Any, num_shards: int, *, axis: int = 1) -> jax.Array:
    """Inverse of `zigzag_shard`: the whole sequence in its natural order.

    Args:
      x: the whole array in the order of `zigzag_shard`, [batch, seqlen, ...] for the default axis.
      num_shards, axis: as there.
    Returns: x in the order of the sequence.
    Raises:
      ValueError, TypeError: as there.
    """
    num_shards, axis = _check_zigzag("zigzag_unshard", x, num_shards, axis)
    return _reorder(jnp.asarray(x), np.argsort(_zigzag_order(num_shards)), axis)


def _ulysses(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scale: jax.Array,
    local: Local,
    axis_name: Any,
    size: int,
    is_causal: bool,
    zigzag: bool,
) -> Partial:
    """Whole sequences of num_heads_q / size heads on each device."""
    # Each device's query heads must find their KV heads with them, in groups of one size.
    repeats = math.lcm(key.shape[2], size) // key.shape[2]
    key, value = (jnp.repeat(x, repeats, axis=2) if repeats > 1 else x for x in (key, value))

    def swap(x: jax.Array, split: int, concat: int) -> jax.Array:
        swapped: jax.Array = jax.lax.all_to_all(
            x, axis_name, split_axis=split, concat_axis=concat, tiled=True
        )
        return swapped

    query, key, value = (swap(x, 2, 1) for x in (query, key, value))
    order = _zigzag_order(size)
    if zigzag:
        query, key, value = (_reorder(x, np.argsort(order), 1) for x in (query, key, value))
    out, logsumexp = local(query, key, value, scale, is_causal=is_causal)
    if zigzag:
        out, logsumexp = _reorder(out, order, 1), _reorder(logsumexp, order, 2)
    return swap(out, 1, 2), swap(logsumexp, 2, 1)


def _zigzag_order(num_shards: int) -> np.ndarray[Any, Any]:
    """Chunks in the order of the shards: 0, 2 n - 1, 1, 2 n - 2, ..."""
    early = np.arange(num_shards, dtype=np.int32)
    return np.stack([early, 2 * num_shards - 1 - early], axis=1).reshape(-1)


def _reorder(x: jax.Array, order: np.ndarray[Any, Any], axis: int) -> jax.Array:
    """x with its equal chunks along axis in this order."""
    chunks = x.reshape(*x.shape[:axis], len(order), -1, *x.shape[axis + 1 :])
    return jnp.take(chunks, order, axis=axis).reshape(x.shape)


def _size_of_axis(axis_name: Any) -> int:
    """Number of devices along the axis."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    is_tuple = isinstance(names, tuple) and len(names) > 0
    if not is_tuple or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{_NAME}: axis_name must be the name of a mesh axis or a tuple of names; got"
            f" {_option_checks.describe(axis_name)}."
        )
    if len(set(names)) != len(names):
        raise ValueError(
            f"{_NAME}: axis_name must name each mesh axis once; got"
            f" {_option_checks.describe(axis_name)}."
        )
    try:
        return int(jax.lax.axis_size(axis_name))
    except NameError as error:
        raise ValueError(
            f"{_NAME}: axis_name must name a manual axis of the jax.shard_map around the call; got"
            f" {_option_checks.describe(axis_name)}."
        ) from error


def _check_shards(
    query: Any, key: Any, size: int, strategy: str, layout: str, is_causal: bool
) -> None:
    seqlen_q, num_heads_q = query.shape[-3:-1]
    seqlen_k = key.shape[-3]
    if is_causal and seqlen_q != seqlen_k:
        raise ValueError(
            f"{_NAME}: key must have the seqlen of query ({seqlen_q} per device) with"
            f" is_causal=True; got {seqlen_k}."
        )
    if layout == "zigzag":
        for argument, seqlen in {"query": seqlen_q, "key": seqlen_k}.items():
            if seqlen % 2:
                raise ValueError(
                    f"{_NAME}: {argument} must have an even seqlen per device with"
                    f' layout="zigzag"; got {seqlen}.'
                )
    if strategy == "ulysses" and num_heads_q % size:
        raise ValueError(
            f"{_NAME}: query must have a num_heads_q that is a multiple of the {size} devices"
            f' with strategy="ulysses"; got {num_heads_q}. Pass strategy="ring".'
        )


def _check_zigzag(function: str, x: Any, num_shards: Any, axis: Any) -> tuple[int, int]:
    """The number of shards and the axis, counted from the front."""
    shape, _ = _option_checks.shape_and_dtype(function, "x", x)
    for argument, number in {"num_shards": num_shards, "axis": axis}.items():
        if isinstance(number, (bool, np.bool_)) or not isinstance(number, (int, np.integer)):
            raise TypeError(
                f"{function}: {argument} must be an int; got {_option_checks.describe(number)}."
            )
    num_shards, axis = int(num_shards), int(axis)  # NumPy's would wrap
    if num_shards < 1:
        raise ValueError(f"{function}: num_shards must be at least 1; got {num_shards}.")
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"{function}: axis must be an axis of x {show(shape)}; got {axis}.")
    if shape[axis] % (2 * num_shards):
        raise ValueError(
            f"{function}: x must have a multiple of {2 * num_shards} (2 num_shards) along axis"
            f" {axis}; got {show(shape)}."
        )
    _option_checks.check_array(function, "x", x)  # x has an axis, so it is no number
    axis %= len(shape)
    split = _compat.split_of(jax.typeof(x))[axis] if _compat.is_explicit(x) else None
    if split is not None:
        raise ValueError(
            f"{function}: axis {axis} of x must not be sharded on an explicit mesh (its chunks"
            f" change places); got it sharded over mesh axes {split!r}. Reorder the whole array"
            " first, or make it whole with jax.reshard."
        )
    return num_shards, axis
