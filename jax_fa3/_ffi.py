"""Calls of the CUDA handlers: the only file that spells an attribute or the shape of a workspace.

Targets of one forward pass:
  precision="fp8"     jax_fa3_quantize_fwd_fp8; where a backward pass follows, its two parts:
                      jax_fa3_quantize (images and their factors), then jax_fa3_fwd_fp8
  precision="native"  jax_fa3_fwd
and of one backward pass:
  precision="fp8"     jax_fa3_quantize again, jax_fa3_dequantize, jax_fa3_bwd, and jax_fa3_unrotate
                      where the kernel does not take the rotation back itself. Where it reads the
                      images of key and value: jax_fa3_dequantize_query and jax_fa3_bwd_fp8
  precision="native"  jax_fa3_bwd
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa3 import _compat
from jax_fa3._extension import (
    TARGET_BWD,
    TARGET_BWD_FP8,
    TARGET_DEQUANTIZE,
    TARGET_DEQUANTIZE_QUERY,
    TARGET_FWD,
    TARGET_FWD_FP8,
    TARGET_QUANTIZE,
    TARGET_QUANTIZE_FWD_FP8,
    TARGET_UNROTATE,
)

# What the kernels serve, forward and backward.
SERVED_HEAD_DIMS: Final = (64, 128, 256)

# Row granularity of the images: queries are padded to 64 rows, keys to whole granules of 128.
PAD_Q: Final = 64
PAD_K: Final = 128
# Query rows of the backward's workspaces are padded to 128; a part of the gradient of softmax_scale
# covers 64.
_PAD_BWD: Final = 128
_ROWS_PER_PART: Final = 64
# From so many queries on, with a causal mask and without, the backward pass multiplies e4m3 codes
# for its scores; with fewer, what this takes around the loop is more than it brings.
_FEWEST_FLOAT8_ROWS: Final = {True: 4096, False: 2048}
# Keys per partial of the channel statistics; one slot more holds their total.
_KEYS_PER_CHUNK: Final = 512
# Scratch of the forward kernels: the counter from which CTAs take their tiles.
_TILE_COUNTER: Final = ((1,), jnp.int32)


class Images(NamedTuple):
    """Quantised query, key and value with their factors, in the order of the fp8 kernel's
    operands."""

    q_image: jax.Array  # float8 [batch, num_heads_q, seqlen_q up to 64, head_dim]
    q_descale: jax.Array  # f32 [batch, num_heads_q, seqlen_q up to 64]
    q_shift: jax.Array  # f32 [batch, num_heads_q, seqlen_q up to 64]; 0 unless it was wanted
    k_image: jax.Array  # float8 [batch, num_heads_kv, seqlen_k up to 128, head_dim]
    k_descale: jax.Array  # f32 [batch, num_heads_kv, granules]
    v_image: jax.Array  # float8 [batch, num_heads_kv, granules, head_dim, 128]
    v_descale: jax.Array  # f32 [batch, num_heads_kv, head_dim]
    v_mean: jax.Array  # f32 [batch, num_heads_kv, head_dim]


class BwdImages(NamedTuple):
    """What a backward call reads from images: key and value, and besides the array of a long query
    its codes, which share a factor in every slab of 64 rows."""

    q_codes: jax.Array  # float8 [batch, num_heads_q, seqlen_q up to 64 or 0, head_dim]
    q_factor: jax.Array  # f32 [batch, num_heads_q, slabs or 0]
    k_image: jax.Array
    k_descale: jax.Array
    v_image: jax.Array
    v_descale: jax.Array
    v_mean: jax.Array
    seqlen_k: int


Keys: TypeAlias = tuple[jax.Array, jax.Array] | BwdImages


class Rotation(NamedTuple):
    """Query and key of a backward call are the rotated ones of `dequantize_operands`."""

    softmax_scale: jax.Array  # f32 [], of the call that was quantised
    # f32 [batch, num_heads_kv, head_dim], taken from the keys; None: dlogsumexp meets nothing
    key_mean: jax.Array | None


class QuantizerInputs(NamedTuple):
    """Operands and options of the quantiser.

    Attributes:
      query: [batch, seqlen_q, num_heads_q, head_dim], 16-bit float or float8.
      key, value: [batch, seqlen_k, num_heads_kv, head_dim], each of its own dtype of those.
      factor: f32 [batch, num_heads_kv] or [], softmax_scale * log2(e) * query_descale *
        key_descale.
      v_factor: f32 [batch, num_heads_kv] or [], value_descale.
      image_dtype: float8_e4m3fn or float8_e5m2.
      hadamard, smooth_key, center_value: which exact-softmax steps are applied before rounding.
      wants_shift: whether q_shift is computed, which only the logsumexp shows; else it is 0 and
        the query's images wait for nothing.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    factor: jax.Array
    v_factor: jax.Array
    image_dtype: Any
    hadamard: bool
    smooth_key: bool
    center_value: bool
    wants_shift: bool

    @property
    def operands(self) -> tuple[jax.Array, ...]:
        return self[:5]

    @property
    def attributes(self) -> dict[str, bool]:
        names = ("hadamard", "smooth_key", "center_value", "wants_shift")
        return {name: bool(getattr(self, name)) for name in names}

    @property
    def results(self) -> list[tuple[tuple[int, ...], Any]]:
        """Shapes and dtypes of `Images`, and of the workspace."""
        batch, seqlen_q, num_heads_q, head_dim = self.query.shape
        seqlen_k, num_heads_kv = self.key.shape[1:3]
        rows = _round_up(seqlen_q, PAD_Q)
        keys = _round_up(seqlen_k, PAD_K)
        granules = keys // PAD_K
        chunks = -(-seqlen_k // _KEYS_PER_CHUNK) + 1
        q_lead, kv_lead = (batch, num_heads_q), (batch, num_heads_kv)
        return [
            ((*q_lead, rows, head_dim), self.image_dtype),
            ((*q_lead, rows), jnp.float32),
            ((*q_lead, rows), jnp.float32),
            ((*kv_lead, keys, head_dim), self.image_dtype),
            ((*kv_lead, granules), jnp.float32),
            ((*kv_lead, granules, head_dim, PAD_K), self.image_dtype),
            ((*kv_lead, head_dim), jnp.float32),
            ((*kv_lead, head_dim), jnp.float32),
            ((*kv_lead, chunks, 4, head_dim), jnp.float32),  # workspace, dropped
        ]


def quantize_operands(inputs: QuantizerInputs) -> Images:
    """Quantises on the GPU what the fp8 kernel reads."""
    outs = _call(TARGET_QUANTIZE, inputs.results, inputs.operands, **inputs.attributes)
    return Images(*outs[:8])


def fwd_fp8(
    images: Images,
    *,
    seqlen_q: int,
    seqlen_k: int,
    is_causal: bool,
    bottom_right: bool,
    linear_exp: bool,
    out_dtype: Any,
    target: str = TARGET_FWD_FP8,
) -> tuple[jax.Array, jax.Array]:
    """Attention over quantised images, by a handler of that target's signature.

    Returns: out [batch, seqlen_q, num_heads_q, head_dim] of out_dtype, and the natural logsumexp,
    f32 [batch, num_heads_q, seqlen_q].
    """
    batch, num_heads_q, _, head_dim = images.q_image.shape
    out, logsumexp, _ = _call(
        target,
        [
            ((batch, seqlen_q, num_heads_q, head_dim), out_dtype),
            ((batch, num_heads_q, seqlen_q), jnp.float32),
            _TILE_COUNTER,
        ],
        tuple(images),
        seqlen_k=np.int64(seqlen_k),
        is_causal=bool(is_causal),
        bottom_right=bool(bottom_right),
        linear_exp=bool(linear_exp),
    )
    return out, logsumexp


def quantize_fwd_fp8(
    inputs: QuantizerInputs,
    *,
    is_causal: bool,
    bottom_right: bool,
    linear_exp: bool,
    out_dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """`fwd_fp8` of `quantize_operands` as one call: the same kernels; nobody sees the images."""
    batch, seqlen_q, num_heads_q, _ = inputs.query.shape
    out, logsumexp, *_ = _call(
        TARGET_QUANTIZE_FWD_FP8,
        [
            (inputs.query.shape, out_dtype),
            ((batch, num_heads_q, seqlen_q), jnp.float32),
            _TILE_COUNTER,
            *inputs.results,
        ],
        inputs.operands,
        **inputs.attributes,
        is_causal=bool(is_causal),
        bottom_right=bool(bottom_right),
        linear_exp=bool(linear_exp),
    )
    return out, logsumexp


def fwd_native(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    softmax_scale: jax.Array,
    *,
    is_causal: bool,
    bottom_right: bool,
    target: str = TARGET_FWD,
) -> tuple[jax.Array, jax.Array]:
    """16-bit attention; operands [batch, seqlen, heads, head_dim] of one dtype, softmax_scale f32
    [].

    Returns: out like query, and the natural logsumexp, f32 [batch, num_heads_q, seqlen_q].
    """
    batch, seqlen_q, num_heads_q, _ = query.shape
    out, logsumexp, _ = _call(
        target,
        [(query.shape, query.dtype), ((batch, num_heads_q, seqlen_q), jnp.float32), _TILE_COUNTER],
        (query, key, value, softmax_scale),
        is_causal=bool(is_causal),
        bottom_right=bool(bottom_right),
    )
    return out, logsumexp


def dequantize_operands(
    images: Images, *, seqlen_q: int, seqlen_k: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What `fwd_fp8` multiplies, as bfloat16 arrays.

    Returns: query [batch, seqlen_q, num_heads_q, head_dim] in log2 units, so that query @ key^T are
    the logits less q_shift; key and value [batch, seqlen_k, num_heads_kv, head_dim]. Query and key
    are exact, and stay rotated; value is rounded.
    """
    batch, num_heads_q, _, head_dim = images.q_image.shape
    num_heads_kv = images.k_image.shape[1]
    keys = (batch, seqlen_k, num_heads_kv, head_dim)
    query, key, value = _call(
        TARGET_DEQUANTIZE,
        [
            ((batch, seqlen_q, num_heads_q, head_dim), jnp.bfloat16),
            (keys, jnp.bfloat16),
            (keys, jnp.bfloat16),
        ],
        (
            images.q_image,
            images.q_descale,
            images.k_image,
            images.k_descale,
            images.v_image,
            images.v_descale,
            images.v_mean,
        ),
    )
    return query, key, value


def bwd_operands(
    images: Images, *, seqlen_q: int, seqlen_k: int, is_causal: bool, deterministic: bool
) -> tuple[jax.Array, Keys]:
    """`dequantize_operands` as `bwd` takes them: of key and value the images, where it can."""
    batch, num_heads_q, _, head_dim = images.q_image.shape
    if not bwd_reads_images(head_dim, deterministic=deterministic):
        query, key, value = dequantize_operands(images, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        return query, (key, value)
    image_dtype = images.q_image.dtype
    is_e4m3 = image_dtype == jnp.float8_e4m3fn
    is_long = seqlen_q >= _FEWEST_FLOAT8_ROWS[bool(is_causal)]
    rows = images.q_image.shape[2] if is_e4m3 and is_long else 0
    query, codes, factor = _call(
        TARGET_DEQUANTIZE_QUERY,
        [
            ((batch, seqlen_q, num_heads_q, head_dim), jnp.bfloat16),
            ((batch, num_heads_q, rows, head_dim), image_dtype),
            ((batch, num_heads_q, rows // PAD_Q), jnp.float32),
        ],
        (images.q_image, images.q_descale),
    )
    return query, BwdImages(codes, factor, *images[3:], seqlen_k)


def bwd_reads_images(head_dim: int, *, deterministic: bool) -> bool:
    """Whether `bwd` takes key and value of a bfloat16 query as images."""
    return head_dim == 128 and not deterministic


def bwd(
    query: jax.Array,
    keys: Keys,
    out: jax.Array,
    logsumexp: jax.Array,
    dout: jax.Array,
    dlogsumexp: jax.Array,
    softmax_scale: jax.Array,
    *,
    is_causal: bool,
    bottom_right: bool,
    wants_scale: bool,
    deterministic: bool,
    rotation: Rotation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Gradients of 16-bit attention.

    Args:
      query, out, dout: [batch, seqlen_q, num_heads_q, head_dim] of one dtype.
      keys: key and value, [batch, seqlen_k, num_heads_kv, head_dim] of that dtype; or images, where
        `bwd_reads_images`, with the same result up to the order in which dquery is added up and,
        where they have codes of query, to the rounding of float8 products.
      logsumexp: f32 [batch, num_heads_q, seqlen_q], natural log.
      dlogsumexp: like it; or [batch, num_heads_q, 0] for zeros, which nobody has to write and read.
      softmax_scale: f32 [].
      wants_scale: whether the gradient of softmax_scale is wanted.
      deterministic: add up dquery in a fixed order.
      rotation: what the quantiser did to query and key, to be taken back from dquery and dkey;
        where `bwd_takes_back_rotation`.
    Returns: dquery, dkey, dvalue, and f32 [batch] parts of the gradient of softmax_scale (zeros
      where it is not wanted).
    """
    batch, seqlen_q, num_heads_q, head_dim = query.shape
    rows = _round_up(seqlen_q, _PAD_BWD)
    # In a fixed order, as always at head_dim 256, dquery is added up in registers, else in memory.
    sum_rows = 0 if deterministic or head_dim == 256 else rows
    row_words = 1 if head_dim == 256 else 4  # for a row's number
    target, key_arrays, key_shape = TARGET_BWD, tuple(keys[:2]), keys[0].shape
    if isinstance(keys, BwdImages):
        target, key_arrays = TARGET_BWD_FP8, keys[:7]
        key_shape = (batch, keys.seqlen_k, keys.k_image.shape[1], head_dim)
    input_scale, key_mean = rotation or Rotation(softmax_scale, None)
    if key_mean is None:
        # NOTE: with a rotation zeros that XLA writes. It records programs of five operations: of a
        # step of nothing but FP8 attention this is the fifth, and spares the pauses of launches.
        means = 0 if rotation is None else batch
        key_mean = jnp.zeros((means, *key_shape[2:]), jnp.float32)
    dquery, dkey, dvalue, scale_grads, *_ = _call(
        target,
        [
            (query.shape, query.dtype),
            (key_shape, query.dtype),
            (key_shape, query.dtype),
            ((batch, num_heads_q, rows // _ROWS_PER_PART), jnp.float32),
            ((batch, num_heads_q, rows, row_words), jnp.float32),  # workspaces, dropped
            ((batch, num_heads_q, rows, row_words), jnp.float32),
            ((batch, num_heads_q, sum_rows, head_dim), jnp.float32),
        ],
        (
            *(query, *key_arrays, out, logsumexp, dout),
            *(dlogsumexp, softmax_scale, input_scale, key_mean),
        ),
        is_causal=bool(is_causal),
        bottom_right=bool(bottom_right),
        wants_scale_grads=bool(wants_scale),
        deterministic=bool(deterministic),
        rotated=rotation is not None,
    )
    return dquery, dkey, dvalue, jnp.sum(scale_grads, axis=(1, 2))


def bwd_takes_back_rotation(head_dim: int, dtype: Any, *, deterministic: bool) -> bool:
    """Whether `bwd` does what `unrotate` does, for inputs of this dtype.

    It writes bfloat16, as dequantised operands are, and rotates where a kernel rounds dquery last.
    """
    return head_dim < 256 and not deterministic and dtype == jnp.bfloat16


def unrotate(
    dquery: jax.Array,
    dkey: jax.Array,
    softmax_scale: jax.Array,
    key_mean: jax.Array | None,
    row_sums: jax.Array | None,
    *,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of query and key from those of the rotated arrays of `dequantize_operands`.

    Args:
      dquery: bfloat16 [batch, seqlen_q, num_heads_q, head_dim].
      dkey: bfloat16 [batch, seqlen_k, num_heads_kv, head_dim].
      softmax_scale: f32 [].
      key_mean: f32 [batch, num_heads_kv, head_dim], what smoothing took from the keys; else None.
      row_sums: f32 [batch, num_heads_q, seqlen_q], sums of the gradients of each row's logits,
        which only key_mean meets.
      dtype: bfloat16 or float16, of the results.
    Returns: both gradients, shaped as they came.
    """
    if key_mean is None or row_sums is None:
        key_mean = jnp.zeros((0, *dkey.shape[2:]), jnp.float32)
        row_sums = jnp.zeros((*dquery.shape[:3:2], 0), jnp.float32)
    grads = _call(
        TARGET_UNROTATE,
        [(dquery.shape, dtype), (dkey.shape, dtype)],
        (dquery, dkey, softmax_scale, key_mean, row_sums),
    )
    return grads[0], grads[1]


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _call(
    target: str,
    results: Sequence[tuple[tuple[int, ...], Any]],
    operands: Sequence[jax.Array],
    **attributes: Any,
) -> Sequence[jax.Array]:
    """One FFI call whose results carry the varying axes of the operands."""

    def stand_in(*args: jax.Array) -> list[jax.Array]:
        # Never computed: gives the results' types wherever this is traced, shard_map included.
        seed = sum((jnp.sum(x.astype(jnp.float32)) for x in args), start=jnp.float32(0))
        return [jnp.broadcast_to(seed, shape).astype(dtype) for shape, dtype in results]

    types = _compat.result_types(stand_in, *operands)
    call: Callable[..., Any] = jax.ffi.ffi_call(target, types)
    outs: Sequence[jax.Array] = call(*operands, **attributes)
    return outs
