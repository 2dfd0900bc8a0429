"""NumPy model of the quantiser: the images, scales and means that `jax_fa3_quantize` must write.

Written from the description of the layouts and the numerics, not from the kernels; `tests/host`
runs the kernels' source against it without a GPU, `tests/gpu` on one. All arithmetic is float32 in
the documented order.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

GRANULE = 128
SLAB = 64
ROTATION_BITS = (0, 3, 4, 1, 2, 5, 6, 7)
SIGN_WORDS = (0x9E3779B97F4A7C15, 0xF39CC0605CEDC834, 0x1082276BF3A27251, 0xF86C6A11D0C18E95)
FLOAT8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
NAN_CODE = 0x7F
# Statistics of more than SHORT_SEQLEN keys are those of one in KEY_SAMPLE; a value may then be
# SAMPLE_ROOM times as large as its channel's largest sampled one.
KEY_SAMPLE, SHORT_SEQLEN = 8, 1024
SAMPLE_ROOM = np.float32(32)


def is_float8(array: np.ndarray) -> bool:
    return array.dtype in FLOAT8


def signs(head_dim: int) -> np.ndarray:
    """+1 or -1 of each column, float32."""
    bits = [SIGN_WORDS[d // 64] >> (d % 64) & 1 for d in range(head_dim)]
    return np.where(np.array(bits), -1, 1).astype(np.float32)


def rotate(rows: np.ndarray) -> np.ndarray:
    """Signed, unnormalised Hadamard transform of the last axis, in ROTATION_BITS' order."""
    head_dim = rows.shape[-1]
    out = (rows * signs(head_dim)).astype(np.float32)
    for bit in (1 << place for place in ROTATION_BITS if 1 << place < head_dim):
        pairs = out.reshape(*rows.shape[:-1], head_dim // (2 * bit), 2, bit)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        out = np.stack([a + b, a - b], axis=-2).reshape(rows.shape)
    return out


def image_order(head_dim: int) -> np.ndarray:
    """image_order[p] = coordinate that stands at byte p of a row of a q or k image."""
    order = np.empty(head_dim, np.int64)
    for i in range(head_dim):
        order[i % 8 + 8 * (i // 32 % 2) + 16 * (i // 8 % 4) + 64 * (i // 64)] = i
    return order


def operand_exponent(amax: np.ndarray, head_dim: int) -> np.ndarray:
    """e with amax * 2^-e in [8, 16), or [4, 8) beyond head_dim 128; at least -126; 0 for amax 0."""
    _, exponent = np.frexp(amax)
    places = 4 if head_dim <= 128 else 3
    return np.where(amax == 0, 0, np.maximum(exponent - places, -126)).astype(np.int32)


def value_exponent(amax: np.ndarray, value_range: float) -> np.ndarray:
    """Smallest e with amax * 2^-e <= value_range, found by trying; 0 for amax 0."""
    exponent = np.full(amax.shape, -200, np.int32)
    while True:
        too_large = np.ldexp(amax.astype(np.float64), -exponent) > value_range
        if not too_large.any():
            return np.where(amax == 0, 0, exponent)
        exponent = exponent + too_large


def cast(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Saturating cast to float8, as codes (uint8); every NaN is code 0x7F."""
    limit = np.float32(ml_dtypes.finfo(dtype).max)
    numbers = np.where(np.isnan(values), 0, np.clip(values, -limit, limit)).astype(np.float32)
    codes = numbers.astype(dtype).view(np.uint8)
    return np.where(np.isnan(values), NAN_CODE, codes).astype(np.uint8)


def pad_axis(array: np.ndarray, axis: int, multiple: int, value: float = 0) -> np.ndarray:
    missing = -array.shape[axis] % multiple
    widths = [(0, missing if a == axis else 0) for a in range(array.ndim)]
    return np.pad(array, widths, constant_values=value)


def swizzle_rows(codes: np.ndarray, group: int) -> np.ndarray:
    """[..., rows, head_dim] codes with each row's 16-byte chunks where the swizzle puts them.

    head_dim 256: every `group` rows are stored as two tiles of 128 columns.
    """
    *lead, rows, head_dim = codes.shape
    if head_dim == 256:
        tiles = np.swapaxes(codes.reshape(*lead, rows // group, group, 2, 128), -2, -3)
        return swizzle_rows(tiles, group).reshape(codes.shape)
    chunks = codes.reshape(*lead, rows, head_dim // 16, 16)
    out = np.empty_like(chunks)
    for row in range(rows):
        key = row % 8 if head_dim == 128 else row // 2 % 4
        for chunk in range(head_dim // 16):
            out[..., row, chunk ^ key, :] = chunks[..., row, chunk, :]
    return out.reshape(codes.shape)


def value_granules(codes: np.ndarray) -> np.ndarray:
    """[..., keys, head_dim] codes as [..., granules, head_dim, 128], permuted and swizzled."""
    *lead, keys, head_dim = codes.shape
    granules = np.swapaxes(codes.reshape(*lead, keys // GRANULE, GRANULE, head_dim), -1, -2)
    groups = granules.reshape(*lead, keys // GRANULE, head_dim, 8, 16)
    out = np.empty_like(groups)
    for channel in range(head_dim):
        for group in range(8):
            for a in range(2):
                for t in range(4):
                    for i in range(2):
                        out[..., channel, group ^ (channel % 8), 4 * t + 2 * a + i] = groups[
                            ..., channel, group, 8 * a + 2 * t + i
                        ]
    return out.reshape(granules.shape)


def heads_first(array: np.ndarray) -> np.ndarray:
    """[batch, seqlen, heads, head_dim] to float32 [batch, heads, seqlen, head_dim]."""
    return np.swapaxes(array.astype(np.float32), 1, 2)


def finite_or_zero(array: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(array), array, 0).astype(np.float32)


def mean_of(rows: np.ndarray) -> np.ndarray:
    """Mean of [batch, heads, rows, head_dim] over rows; NaN and Inf count as 0."""
    return finite_or_zero(rows).mean(2, dtype=np.float64).astype(np.float32)


def sampled_keys(seqlen_k: int) -> np.ndarray:
    """One key in KEY_SAMPLE: the first of the first group, the second of the second, and so on."""
    return np.array(
        [key for key in range(seqlen_k) if key // KEY_SAMPLE % KEY_SAMPLE == key % KEY_SAMPLE]
    )


def range_factors(amax: np.ndarray, value_range: float) -> tuple[np.ndarray, np.ndarray]:
    """(descale, multiplier) that bring magnitudes up to amax into the format's range."""
    limit = np.float32(value_range)
    bounded = np.clip(amax, np.float32(2.0**-100), np.finfo(np.float32).max)
    descale = np.where(amax == 0, 1, bounded / limit).astype(np.float32)
    return descale, np.where(amax == 0, 1, limit / bounded).astype(np.float32)


def value_codes(
    real: np.ndarray, centred: np.ndarray, multiplier: np.ndarray, dtype: np.dtype
) -> np.ndarray:
    """Codes of centred * multiplier; 0 where the value is not finite."""
    return cast(np.where(np.isfinite(real), centred * multiplier[:, :, None, :], 0), dtype)


@np.errstate(invalid="ignore", over="ignore", under="ignore")
def quantize(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    factor: np.ndarray,
    v_factor: np.ndarray,
    *,
    hadamard: bool,
    smooth_key: bool,
    center_value: bool,
    wants_shift: bool,
    dtype: np.dtype,
    k_mean: np.ndarray | None = None,
    v_mean: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """All results of the quantiser but its workspace, plus "k_mean".

    Args:
      q: [batch, seqlen_q, num_heads_q, head_dim], 16-bit or float8.
      k, v: [batch, seqlen_k, num_heads_kv, head_dim], 16-bit or float8.
      factor, v_factor: [batch, num_heads_kv] float32.
      dtype: ml_dtypes float8 of the images.
      k_mean, v_mean: [batch, num_heads_kv, head_dim] float32 to subtract instead of computing
        them (their last bits depend on the order of summation); that of k after the rotation.
    Returns: images as uint8 codes; shapes as in cuda/quantize/params.h.
    """
    dtype = np.dtype(dtype)
    head_dim = q.shape[-1]
    group_size = q.shape[2] // k.shape[2]
    seqlen_k = k.shape[1]
    order = image_order(head_dim)
    q_real, k_real, v_real = heads_first(q), heads_first(k), heads_first(v)

    smooth = smooth_key and not is_float8(k)
    center = center_value and not is_float8(v)
    is_long = seqlen_k > SHORT_SEQLEN
    k_sample = sampled_keys(seqlen_k) if is_long else np.arange(seqlen_k)
    v_sample = np.arange(seqlen_k) if is_float8(v) else k_sample
    if k_mean is None or not smooth:
        k_mean = mean_of(k_real[:, :, k_sample]) * np.float32(smooth)
        k_mean = rotate(k_mean) if hadamard else k_mean
    if v_mean is None or not center:
        v_mean = mean_of(v_real[:, :, v_sample]) * np.float32(center)

    # q: one exponent a row
    row_factor = np.repeat(factor.astype(np.float32), group_size, axis=1)[
        :, :, None
    ]  # [batch, num_heads_q, 1]
    y = rotate(q_real) if hadamard else q_real
    if is_float8(q):
        y = y * np.copysign(np.float32(1), row_factor)[..., None]
    else:
        y = y * (row_factor / np.float32(head_dim) if hadamard else row_factor)[..., None]
    exponent = operand_exponent(np.abs(finite_or_zero(y)).max(-1), head_dim)
    codes = cast(np.ldexp(y, -exponent[..., None]), dtype)[..., order]
    bad = ~np.isfinite(q_real).all(-1) | ~np.isfinite(y).all(-1)
    codes[bad] = NAN_CODE
    q_descale = np.ldexp(np.float32(1), exponent).astype(np.float32)
    if is_float8(q):
        q_descale = q_descale * np.abs(row_factor)
    # a product is the same before and after the rotation, but for its factor
    of_q_head = np.repeat(k_mean, group_size, axis=1)[:, :, None, :].astype(np.float64)
    products = ((rotate(q_real) / head_dim if hadamard else q_real) * of_q_head).sum(-1)
    q_shift = (products * row_factor * wants_shift).astype(np.float32)

    # k: one exponent a granule
    y = (rotate(k_real) if hadamard else k_real) - k_mean[:, :, None, :]
    magnitudes = pad_axis(np.abs(finite_or_zero(y)).max(-1), 2, GRANULE)
    granules = magnitudes.reshape(*magnitudes.shape[:2], -1, GRANULE)
    k_exponent = operand_exponent(granules.max(-1), head_dim)
    of_key = np.repeat(k_exponent, GRANULE, axis=-1)[..., :seqlen_k, None]
    k_codes = cast(np.ldexp(y, -of_key), dtype)[..., order]
    bad_key = ~(np.isfinite(k_real).all(-1) & np.isfinite(v_real).all(-1) & np.isfinite(y).all(-1))
    k_codes[bad_key] = NAN_CODE

    # v: one scale a channel
    value_range = float(ml_dtypes.finfo(dtype).max)
    centred = v_real - v_mean[:, :, None, :]
    magnitudes = np.where(np.isfinite(v_real), np.abs(centred), 0)
    amax = magnitudes.max(2)
    if is_float8(v):
        v_exponent = value_exponent(amax, value_range)
        v_descale = (np.ldexp(np.float32(1), v_exponent) * v_factor[..., None]).astype(np.float32)
        multiplier = np.ldexp(np.float32(1), -v_exponent)
        v_codes = value_codes(v_real, centred, multiplier, dtype)
    else:
        sampled = np.maximum(magnitudes[:, :, v_sample].max(2), np.float32(2.0**-100))
        sampled = sampled * SAMPLE_ROOM if is_long else amax
        v_descale, multiplier = range_factors(sampled, value_range)
        v_codes = value_codes(v_real, centred, multiplier, dtype)
        # A head with a value beyond the room is scaled for all its values.
        largest = np.abs(v_codes.view(dtype).astype(np.float32)).max((2, 3))
        clips = (largest == value_range)[..., None] & is_long
        v_descale, multiplier = range_factors(np.where(clips, amax, sampled), value_range)
        v_codes = value_codes(v_real, centred, multiplier, dtype)

    # What the rounding of values takes from their mean; a NaN does not count.
    rounded = v_codes.view(dtype).astype(np.float64) * v_descale[:, :, None, :]
    errors = np.where(np.isfinite(v_real), centred - rounded, 0).mean(2)

    return {
        "q_image": swizzle_rows(pad_axis(codes, 2, SLAB), SLAB),
        "q_descale": pad_axis(q_descale, 2, SLAB, 1),
        "q_shift": pad_axis(q_shift, 2, SLAB),
        "k_image": swizzle_rows(pad_axis(k_codes, 2, GRANULE), GRANULE),
        "k_descale": np.ldexp(np.float32(1), k_exponent).astype(np.float32),
        "v_image": value_granules(pad_axis(v_codes, 2, GRANULE)),
        "v_descale": v_descale,
        "v_mean": (v_mean + (errors if center else 0)).astype(np.float32),
        "k_mean": k_mean.astype(np.float32),
    }


def canonical(codes: np.ndarray) -> np.ndarray:
    """Codes with -0 as +0 and the negative NaN 0xFF as 0x7F."""
    codes = np.where(codes == 0x80, 0, codes)
    return np.where(codes == 0xFF, NAN_CODE, codes).astype(np.uint8)


def code_distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How many representable values lie between two codes (0 and -0 are one)."""
    a, b = canonical(a).astype(np.int32), canonical(b).astype(np.int32)
    line_a, line_b = (np.where(x < 0x80, x, 0x80 - x) for x in (a, b))
    return np.abs(line_a - line_b)
