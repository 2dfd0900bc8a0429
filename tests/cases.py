"""Named attention calls and their inputs, shared by oracle tests, GPU tests and benchmarks.

Inputs are NumPy arrays (ml_dtypes for bfloat16 and float8), so that an oracle needs no JAX. Sizes
differ from axis to axis and none is 1 where that could hide a mistake; every head has a magnitude
of its own.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes and options of one call; `features` names the extra operands `make_inputs` adds."""

    name: str
    batch: int = 2
    seqlen_q: int = 37
    seqlen_k: int = 53
    num_heads_q: int = 6
    num_heads_kv: int = 3
    head_dim: int = 64
    head_dim_v: int | None = None
    is_causal: bool = False
    causal_alignment: str = "bottom_right"
    window_size: tuple[int | None, int | None] | None = None
    logits_soft_cap: float | None = None
    features: tuple[str, ...] = ()  # sinks, segments, query_seqlens, key_seqlens, mask, bias

    def options(self) -> dict[str, Any]:
        """The static keyword arguments of `jax_fa3.attention`, defaults left out."""
        names = ("is_causal", "causal_alignment", "window_size", "logits_soft_cap")
        defaults = Case("defaults")
        return {n: getattr(self, n) for n in names if getattr(self, n) != getattr(defaults, n)}


# Calls that the Hopper kernels serve: head_dim 64, 128 or 256, at most a causal mask.
KERNEL_CASES = (
    Case("plain"),
    Case("causal", is_causal=True),
    Case("causal_top_left", is_causal=True, causal_alignment="top_left"),
    Case("causal_more_rows", seqlen_q=205, seqlen_k=131, is_causal=True),
    Case("d128", seqlen_q=129, seqlen_k=127, num_heads_q=4, num_heads_kv=2, head_dim=128),
    Case("d128_causal", seqlen_q=383, seqlen_k=517, head_dim=128, is_causal=True),
    Case("d256", seqlen_q=129, seqlen_k=255, num_heads_q=4, num_heads_kv=2, head_dim=256),
    Case("d256_causal", seqlen_q=183, seqlen_k=317, head_dim=256, is_causal=True),
    Case("many_rows", batch=3, seqlen_q=517, seqlen_k=259, num_heads_q=10, num_heads_kv=2),
    Case("multi_query", seqlen_q=65, seqlen_k=193, num_heads_q=5, num_heads_kv=1),
    Case("equal_heads", seqlen_q=127, seqlen_k=128, num_heads_q=7, num_heads_kv=7),
    Case("tile_edges", seqlen_q=128, seqlen_k=256, num_heads_q=4, num_heads_kv=2, head_dim=128),
    Case("one_row", seqlen_q=1, seqlen_k=300, is_causal=True),
    Case("one_key", seqlen_q=5, seqlen_k=1),
)

# Everything else of the interface.
FEATURE_CASES = (
    Case("soft_cap", logits_soft_cap=1.5),
    Case("window", window_size=(7, 3)),
    Case("window_left", window_size=(9, None), is_causal=True),
    Case("window_more_rows", seqlen_q=41, seqlen_k=29, window_size=(3, 2)),
    Case("window_top_left", causal_alignment="top_left", window_size=(4, 5)),
    Case("sinks", features=("sinks",)),
    Case("sinks_causal", seqlen_q=47, seqlen_k=31, is_causal=True, features=("sinks",)),
    Case("segments", seqlen_q=43, seqlen_k=43, is_causal=True, features=("segments",)),
    Case("seqlens", is_causal=True, features=("query_seqlens", "key_seqlens")),
    Case("key_seqlens", features=("key_seqlens",)),
    Case("mask", features=("mask",)),
    Case("bias", features=("bias",)),
    Case("value_dim", head_dim=48, head_dim_v=40),
    Case("odd_dim", head_dim=72, is_causal=True),
    Case(
        "everything",
        seqlen_q=43,
        seqlen_k=59,
        head_dim_v=24,
        is_causal=True,
        window_size=(31, None),
        logits_soft_cap=2.5,
        features=("sinks", "segments", "query_seqlens", "key_seqlens", "mask", "bias"),
    ),
)

CASES = KERNEL_CASES + FEATURE_CASES


def by_name(name: str) -> Case:
    """The case of that name."""
    return next(case for case in CASES if case.name == name)


def make_inputs(
    case: Case, dtype: Any = BFLOAT16, *, seed: int = 0, distribution: str = "mixed"
) -> dict[str, Any]:
    """Arrays of a case by argument name: query, key, value, then the operands of its features.

    Args:
      case: see Case.   dtype: of query, key, value; float8 adds the three descales.
      seed: mixed with the case's name, so that every case has its own numbers.
      distribution: "normal"; "mixed" (each head its own magnitude and mean); "outlier" (the FA3
        paper's: N(0, 1) plus N(0, 100) at 0.1 % of the places); "biased" (channel means).
    """
    rng = np.random.default_rng([seed, zlib.crc32(case.name.encode())])
    b, sq, sk, hq, hk = (
        case.batch, case.seqlen_q, case.seqlen_k, case.num_heads_q, case.num_heads_kv
    )  # fmt: skip
    dim_v = case.head_dim_v or case.head_dim
    arrays = {
        "query": _draw(rng, (b, sq, hq, case.head_dim), distribution, 0.75),
        "key": _draw(rng, (b, sk, hk, case.head_dim), distribution, 1.0),
        "value": _draw(rng, (b, sk, hk, dim_v), distribution, 1.5),
    }
    dtype = np.dtype(dtype)
    inputs: dict[str, Any] = {}
    for name, array in arrays.items():
        if dtype not in (E4M3, E5M2):
            inputs[name] = array.astype(dtype)
            continue
        # Descales far from 1 and different for every (batch, head).
        powers = np.linspace(-2.0, 2.0, b * hk).reshape(b, hk) * (-1 if name == "key" else 1)
        descale = np.exp2(powers).astype(np.float32)
        group = array.shape[2] // hk
        stored = array / np.repeat(descale, group, axis=1)[:, None, :, None]
        inputs[name] = np.clip(stored, -440, 440).astype(dtype)
        inputs[f"{name}_descale"] = descale
    if "sinks" in case.features:
        inputs["sinks"] = np.linspace(-3.0, 4.0, hq).astype(np.float32)
    if "segments" in case.features:
        inputs["query_segment_ids"] = _segments(rng, b, sq)
        inputs["key_segment_ids"] = (
            inputs["query_segment_ids"].copy() if sk == sq else _segments(rng, b, sk)
        )
    if "query_seqlens" in case.features:
        inputs["query_seqlens"] = np.linspace(sq - 2, sq // 2, b).astype(np.int32)
    if "key_seqlens" in case.features:
        inputs["key_seqlens"] = np.linspace(sk // 2, sk - 3, b).astype(np.int32)
    if "mask" in case.features:
        inputs["mask"] = rng.random((b, hq, sq, sk)) < 0.7
        inputs["mask"][1, 2, 3, :] = False  # one row with no key
    if "bias" in case.features:
        inputs["bias"] = rng.normal(size=(b, hq, sq, sk)).astype(np.float32)
    return inputs


def led_by_one_key(*, rows: int, keys: int, head_dim: int, logit: float) -> dict[str, np.ndarray]:
    """Rows whose logits are near 0 but that of one key: the third, or one amid the others' blocks.

    With logit = ln(keys) that key weighs as much as all others.
    """
    rng = np.random.default_rng([keys, head_dim])
    key, value = (rng.normal(size=(1, keys, 2, head_dim)) for _ in range(2))
    query = 0.05 * rng.normal(size=(1, rows, 2, head_dim))
    for head, place in enumerate((2, keys * 5 // 8 + 1)):
        leader = key[0, place, head].copy()
        key[:, :, head] *= 0.2
        key[0, place, head] = leader
        query[0, :, head] += logit * head_dim**0.5 * leader / (leader**2).sum()
    return {"query": query, "key": key, "value": value}


def _draw(
    rng: np.random.Generator, shape: tuple[int, ...], distribution: str, width: float
) -> np.ndarray:
    x = rng.normal(size=shape)
    if distribution == "outlier":
        return x + rng.normal(size=shape) * 10.0 * (rng.random(shape) < 1e-3)
    if distribution == "biased":
        return x + rng.normal(size=(shape[0], 1, *shape[2:]))
    if distribution == "mixed":
        heads = np.linspace(0.5, 1.5, shape[2]) * width
        return (x + 0.25 * rng.normal(size=(shape[0], 1, *shape[2:]))) * heads[:, None]
    return x


def _segments(rng: np.random.Generator, batch: int, seqlen: int) -> np.ndarray:
    """Ascending ids from 1, padding (-1) at the end."""
    starts = rng.random((batch, seqlen)) < 4.0 / seqlen
    ids = 1 + np.cumsum(starts, axis=1)
    ids[:, seqlen - 3 :] = -1
    return ids.astype(np.int32)
