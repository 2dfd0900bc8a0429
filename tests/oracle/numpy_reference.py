"""Attention and its FP8 model in NumPy, written by hand and sharing no code with jax_fa3.

`attention` works in float64 on the values of the inputs. `attention_fp8` follows the quantise
kernel in float32 (ml_dtypes casts) and the FP8 attention in float64 with one block of keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
FLOAT8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
FORMATS = {"e4m3": (FLOAT8[0], 448.0), "e5m2": (FLOAT8[1], 57344.0)}
SIGNS_HEX = "F86C6A11D0C18E951082276BF3A27251F39CC0605CEDC8349E3779B97F4A7C15"


def visible(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    num_heads_q: int,
    *,
    is_causal: bool = False,
    causal_alignment: str = "bottom_right",
    window_size: tuple[int | None, int | None] | None = None,
    query_segment_ids: Array | None = None,
    key_segment_ids: Array | None = None,
    query_seqlens: Array | None = None,
    key_seqlens: Array | None = None,
    mask: Array | None = None,
) -> Array:
    """bool [batch, num_heads_q, seqlen_q, seqlen_k], one decision at a time."""
    seen = np.zeros((batch, seqlen_q, seqlen_k), bool)
    left, right = window_size or (None, None)
    for b in range(batch):
        rows = seqlen_q if query_seqlens is None else min(int(query_seqlens[b]), seqlen_q)
        keys = seqlen_k if key_seqlens is None else min(int(key_seqlens[b]), seqlen_k)
        offset = keys - rows if causal_alignment == "bottom_right" else 0
        for i in range(rows):
            for j in range(keys):
                ok = not is_causal or j <= i + offset
                ok = ok and (left is None or j >= i + offset - left)
                ok = ok and (right is None or j <= i + offset + right)
                if query_segment_ids is not None and key_segment_ids is not None:
                    ok = ok and query_segment_ids[b, i] == key_segment_ids[b, j] >= 0
                seen[b, i, j] = ok
    full = np.broadcast_to(seen[:, None], (batch, num_heads_q, seqlen_q, seqlen_k))
    return full if mask is None else full & mask


def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    bias: Array | None = None,
    query_descale: Array | None = None,
    key_descale: Array | None = None,
    value_descale: Array | None = None,
    **masks: Any,
) -> tuple[Array, Array]:
    """Float64 (out [batch, seqlen_q, num_heads_q, head_dim_v], logsumexp [batch, heads, rows])."""
    b, sq, hq, d = query.shape
    sk, hk = key.shape[1:3]
    scale = d**-0.5 if softmax_scale is None else float(softmax_scale)
    q, k, v = (x.astype(np.float64) for x in (query, key, value))
    seen = visible(b, sq, sk, hq, **masks)
    out = np.zeros((b, sq, hq, v.shape[-1]))
    logsumexp = np.full((b, hq, sq), -np.inf)
    for ib in range(b):
        for ih in range(hq):
            kv = ih // (hq // hk)
            factor = scale
            factor *= 1.0 if query_descale is None else float(query_descale[ib, kv])
            factor *= 1.0 if key_descale is None else float(key_descale[ib, kv])
            v_factor = 1.0 if value_descale is None else float(value_descale[ib, kv])
            for i in range(sq):
                js = np.flatnonzero(seen[ib, ih, i])
                if js.size == 0:
                    continue
                logits = factor * (k[ib, js, kv] @ q[ib, i, ih])
                if logits_soft_cap is not None:
                    logits = logits_soft_cap * np.tanh(logits / logits_soft_cap)
                if bias is not None:
                    full = np.broadcast_to(bias, (b, hq, sq, sk))
                    logits = logits + full[ib, ih, i, js].astype(np.float64)
                top = logits.max() if sinks is None else max(logits.max(), float(sinks[ih]))
                weights = np.exp(logits - top)
                total = weights.sum() + (0.0 if sinks is None else np.exp(float(sinks[ih]) - top))
                out[ib, i, ih] = weights @ v[ib, js, kv] * v_factor / total
                logsumexp[ib, ih, i] = top + np.log(total)
    return out, logsumexp


def attention_gradients(
    query: Array,
    key: Array,
    value: Array,
    dout: Array,
    dlogsumexp: Array,
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    bias: Array | None = None,
    **masks: Any,
) -> dict[str, Array]:
    """Hand-derived float64 gradients of <out, dout> + <logsumexp, dlogsumexp>, inputs not float8.

    With P the probabilities (sinks in the denominator) and delta = <dout, out>:
    ds = P * (dout v^T - delta + dlogsumexp); d sink = p_sink * (dlogsumexp - delta).
    """
    b, sq, hq, d = query.shape
    sk, hk = key.shape[1:3]
    scale = d**-0.5 if softmax_scale is None else float(softmax_scale)
    out, logsumexp = attention(
        query, key, value, softmax_scale=scale, logits_soft_cap=logits_soft_cap, sinks=sinks,
        bias=bias, **masks,
    )  # fmt: skip
    seen = visible(b, sq, sk, hq, **masks)
    q, k, v = (x.astype(np.float64) for x in (query, key, value))
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    dscale, dsinks, dbias = 0.0, np.zeros(hq), np.zeros((b, hq, sq, sk))
    for ib, ih in np.ndindex(b, hq):
        kv = ih // (hq // hk)
        raw = q[ib, :, ih] @ k[ib, :, kv].T
        logits, slope = raw * scale, np.ones_like(raw)
        if logits_soft_cap is not None:
            bent = np.tanh(logits / logits_soft_cap)
            logits, slope = logits_soft_cap * bent, 1.0 - bent**2
        if bias is not None:
            logits = logits + np.broadcast_to(bias, (b, hq, sq, sk))[ib, ih]
        level = np.where(np.isneginf(logsumexp[ib, ih]), 0.0, logsumexp[ib, ih])
        p = np.where(seen[ib, ih], np.exp(np.where(seen[ib, ih], logits - level[:, None], 0)), 0)
        some = seen[ib, ih].any(axis=1)
        g, gl = dout[ib, :, ih], np.where(some, dlogsumexp[ib, ih], 0.0)
        delta = (g * out[ib, :, ih]).sum(axis=-1)
        ds = p * (g @ v[ib, :, kv].T - delta[:, None] + gl[:, None])
        dbias[ib, ih] = ds
        ds = ds * slope
        dq[ib, :, ih] = scale * ds @ k[ib, :, kv]
        dk[ib, :, kv] += scale * ds.T @ q[ib, :, ih]
        dv[ib, :, kv] += p.T @ g
        dscale += float((ds * raw).sum())
        if sinks is not None:
            p_sink = np.where(some, np.exp(float(sinks[ih]) - level), 0.0)
            dsinks[ih] += (p_sink * (gl - delta)).sum()
    return {
        "query": dq,
        "key": dk,
        "value": dv,
        "softmax_scale": np.array(dscale),
        "sinks": dsinks,
        "bias": dbias,
    }


class Quantized(NamedTuple):
    """Float32 codes in the natural layout, as `jax_fa3._fp8_model.QuantizedOperands`."""

    query: Array
    query_descale: Array
    query_shift: Array
    key: Array
    key_descale: Array
    value: Array
    value_descale: Array
    value_mean: Array


def signs(head_dim: int) -> Array:
    """+1 or -1 per coordinate from the hexadecimal constant."""
    bits = int(SIGNS_HEX, 16)
    return np.array([-1.0 if bits >> d & 1 else 1.0 for d in range(head_dim)], np.float32)


def hadamard_matrix(head_dim: int) -> Array:
    """Sylvester matrix with the signs folded in: rotated = x @ matrix.T."""
    matrix = np.ones((1, 1))
    while matrix.shape[0] < head_dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix * signs(head_dim)


def butterfly(x: Array) -> Array:
    """The same product by float32 additions, one pair at a time, in the kernel's order of bits."""
    y = (x * signs(x.shape[-1])).astype(np.float32)
    for bit in (1, 8, 16, 2, 4, 32, 64, 128):
        if bit >= x.shape[-1]:
            continue
        z = y.copy()
        for i in range(x.shape[-1]):
            if not i & bit:
                z[..., i] = y[..., i] + y[..., i | bit]
                z[..., i | bit] = y[..., i] - y[..., i | bit]
        y = z
    return y


def cast(x: Array, format_name: str) -> Array:
    """Float32 numbers on the format's grid, saturating."""
    dtype, limit = FORMATS[format_name]
    return np.clip(x, -limit, limit).astype(dtype).astype(np.float32)


def power_of_two(amax: float, head_dim: int) -> float:
    """2^e with amax / 2^e in [8, 16), or in [4, 8) beyond head_dim 128."""
    places = 3 if head_dim <= 128 else 2
    return 1.0 if amax == 0 else float(2.0 ** (np.floor(np.log2(np.float64(amax))) - places))


def quantize(
    query: Array,
    key: Array,
    value: Array,
    *,
    softmax_scale: float | None = None,
    query_descale: Array | None = None,
    key_descale: Array | None = None,
    value_descale: Array | None = None,
    format_name: str = "e4m3",
    rotate: bool = True,
    smooth_key: bool = True,
    center_value: bool = True,
) -> Quantized:
    """The default granularities, finite inputs, every key valid."""
    b, sq, hq, d = query.shape
    sk, hk = key.shape[1:3]
    group = hq // hk
    scale = np.float32(d**-0.5 if softmax_scale is None else softmax_scale)
    factor = np.full((b, hk), scale * np.float32(np.log2(np.e)), np.float32)
    for descale in (query_descale, key_descale):
        factor = factor if descale is None else factor * descale
    q, k, v = (x.astype(np.float32) for x in (query, key, value))
    rotate = rotate and query.dtype not in FLOAT8 and key.dtype not in FLOAT8
    q_out, k_out, v_out = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    q_descale, q_shift = np.ones((b, hq, sq), np.float32), np.zeros((b, hq, sq), np.float32)
    k_descale = np.ones((b, hk, sk), np.float32)
    v_scale = np.ones((b, hk, v.shape[-1]), np.float32)
    v_mean = np.zeros((b, hk, v.shape[-1]), np.float32)
    for ib, ik in np.ndindex(b, hk):
        k_mean = np.zeros(d, np.float32)
        sample = [j for j in range(sk) if sk <= 1024 or j // 8 % 8 == j % 8]
        if smooth_key and key.dtype not in FLOAT8:
            k_mean = k[ib, sample, ik].astype(np.float64).mean(axis=0).astype(np.float32)
        if center_value and value.dtype not in FLOAT8:
            v_mean[ib, ik] = v[ib, sample, ik].astype(np.float64).mean(axis=0)
        for ih in range(ik * group, (ik + 1) * group):
            y = q[ib, :, ih]
            if query.dtype not in FLOAT8:
                y = butterfly(y) * (factor[ib, ik] / d) if rotate else y * factor[ib, ik]
            for i in range(sq):
                step = power_of_two(np.abs(y[i]).max(), d)
                q_out[ib, i, ih] = cast(y[i] / np.float32(step), format_name)
                q_descale[ib, ih, i] = step * (factor[ib, ik] if query.dtype in FLOAT8 else 1.0)
            q_shift[ib, ih] = (q[ib, :, ih].astype(np.float64) * factor[ib, ik]) @ k_mean
        y = k[ib, :, ik]
        y = butterfly(y) - butterfly(k_mean) if rotate else y - k_mean
        for start in range(0, sk, 128):
            granule = slice(start, start + 128)
            step = power_of_two(np.abs(y[granule]).max(), d)
            k_out[ib, granule, ik] = cast(y[granule] / np.float32(step), format_name)
            k_descale[ib, ik, granule] = step
        y = v[ib, :, ik] - v_mean[ib, ik]
        limit = np.float32(FORMATS[format_name][1])
        largest = np.abs(y).max(axis=0)
        if sk > 1024 and value.dtype not in FLOAT8:
            roomy = 32 * np.maximum(np.abs(y[sample]).max(axis=0), np.float32(2.0**-100))
            if np.abs(cast(y * (limit / roomy), format_name)).max() < limit:
                largest = roomy
        for channel in range(v.shape[-1]):
            amax = largest[channel]
            if amax == 0:
                continue
            if value.dtype in FLOAT8:
                step = np.float32(2.0 ** np.ceil(np.log2(np.float64(amax) / np.float64(limit))))
                v_out[ib, :, ik, channel] = cast(y[:, channel] / step, format_name)
                v_scale[ib, ik, channel] = step
            else:
                v_out[ib, :, ik, channel] = cast(y[:, channel] * (limit / amax), format_name)
                v_scale[ib, ik, channel] = amax / limit
        if center_value and value.dtype not in FLOAT8:
            v_mean[ib, ik] += (y - v_out[ib, :, ik].astype(np.float64) * v_scale[ib, ik]).mean(
                axis=0
            )
        if value_descale is not None:
            v_scale[ib, ik] *= value_descale[ib, ik]
    return Quantized(q_out, q_descale, q_shift, k_out, k_descale, v_out, v_scale, v_mean)


def linear_exp2(x: Array) -> Array:
    """Bytes rint(max(0, 8 x + 56)) read as e4m3."""
    codes = np.rint(np.maximum(8.0 * x + 56.0, 0.0)).astype(np.uint8)
    return codes.view(FLOAT8[0]).astype(np.float64)


def attention_fp8(
    operands: Quantized,
    *,
    linear: bool = False,
    sinks: Array | None = None,
    bias: Array | None = None,
    logits_soft_cap: float | None = None,
    **masks: Any,
) -> tuple[Array, Array]:
    """Float64 attention on quantised operands, P rounded to e4m3 below an integer base."""
    b, sq, hq, _ = operands.query.shape
    sk, hk = operands.key.shape[1:3]
    seen = visible(b, sq, sk, hq, **masks)
    out = np.zeros((b, sq, hq, operands.value.shape[-1]))
    logsumexp = np.full((b, hq, sq), -np.inf)
    log2_e = np.log2(np.e)
    # Mean of (1 + f) / 2^f over a binade, log2: by how much linear probabilities are too large.
    excess = 0.05757 if linear else 0.0
    for ib, ih in np.ndindex(b, hq):
        kv = ih // (hq // hk)
        for i in range(sq):
            js = np.flatnonzero(seen[ib, ih, i])
            if js.size == 0:
                continue
            k = operands.key[ib, js, kv].astype(np.float64)
            y = k @ operands.query[ib, i, ih].astype(np.float64)
            y = y * operands.query_descale[ib, ih, i] * operands.key_descale[ib, kv, js]
            shift = float(operands.query_shift[ib, ih, i])
            if logits_soft_cap is not None:
                cap = logits_soft_cap * log2_e
                y, shift = cap * np.tanh((y + shift) / cap), 0.0
            if bias is not None:
                y = y + np.broadcast_to(bias, (b, hq, sq, sk))[ib, ih, i, js] * log2_e
            base = np.ceil(y.max() - 0.75)
            exponent = y - base + 8.0
            exact = np.exp2(exponent)
            p = linear_exp2(exponent) if linear else exact.astype(np.float32).astype(FLOAT8[0])
            p = p.astype(np.float64)
            keys_total = p.sum()
            total = keys_total
            if sinks is not None:
                total = total + np.exp2(float(sinks[ih]) * log2_e - shift - base + 8.0 + excess)
            v = operands.value[ib, js, kv].astype(np.float64)
            mean = operands.value_mean[ib, kv] * (keys_total / total)
            out[ib, i, ih] = p @ v / total * operands.value_descale[ib, kv] + mean
            logsumexp[ib, ih, i] = (base - 8.0 - excess + np.log2(total) + shift) / log2_e
    return out, logsumexp
