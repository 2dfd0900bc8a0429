"""The random calls of soak.py.

A case is one shape with its options and several draws of data. Everything about it follows from its
seed and index, so one case can be run again alone.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import cases
import numpy as np
from gpu.reference import MAIN

from jax_fa3 import Quantization

FP8: dict[str, Quantization] = {
    "accurate": Quantization.accurate(),
    "fast": Quantization.fast(),
    "e5m2": Quantization(dtype="e5m2"),
    "e5m2 fast": Quantization(dtype="e5m2", softmax="linear"),
    "bare": Quantization(hadamard=False, smooth_key=False, center_value=False),
    "unrotated": Quantization(hadamard=False),
    "uncentred fast": Quantization(center_value=False, softmax="linear"),
}
FLOAT8 = {"e4m3": cases.E4M3, "e5m2": cases.E5M2}
DESCALE_SHAPES = ("batch_heads", "heads", "scalar")
# How the arrays reach the call. "offset" are slices of longer arrays whose rest is NaN; "packed"
# ones of one array; "mapped" and "looped" take the batch by vmap and lax.map; "leading" has two
# batch axes.
FORMS = ("plain", "plain", "transposed", "offset", "packed", "mapped", "looped", "leading")
TILES = (64, 128, 176, 192, 256, 384, 512, 1024)
DATA = ("mixed", "normal", "outlier", "biased")
# Scores of one case, over batch and heads: NumPy works on each in float64, several times.
MOST_SCORES, MOST_SCORES_OF_LARGE = 1_000_000, 6_000_000
# Rows of query and key of one case, over batch and heads: no keys have no scores, but take memory.
MOST_ROWS = 2**18
# Scales whose logits the models do not follow: f16 scores far from 0 are coarser than a step of P.
UNMODELLED = ("large", "huge")


@dataclasses.dataclass(frozen=True)
class Case:
    """One call; `scale` and `data` name what `softmax_scale` and `inputs` draw."""

    seed: int
    index: int
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_kv: int
    group: int
    head_dim: int
    causal: str | None
    dtype: str
    stored: tuple[str | None, str | None, str | None]  # float8 kinds of query, key and value
    descale: str
    presets: tuple[str, ...]  # "native" or names of FP8
    scale: str
    data: tuple[str, ...]
    form: str
    gradient: str | None  # the preset that is differentiated
    deterministic: bool
    spoiled: tuple[str, float] | None  # (operand, number) of one more run

    def __str__(self) -> str:
        stored = "/".join(kind or self.dtype for kind in self.stored)
        words = [
            f"B{self.batch} {self.seqlen_q}x{self.seqlen_k}",
            f"H{self.heads_kv * self.group}:{self.heads_kv} D{self.head_dim}",
            stored if any(self.stored) else self.dtype,
            f"causal={self.causal}" if self.causal else "",
            "+".join(self.presets),
            f"scale={self.scale}",
            f"data={'/'.join(self.data)}",
            self.form,
            f"grad of {self.gradient}" if self.gradient else "",
            "deterministic" if self.deterministic else "",
            f"{self.spoiled[1]} in {self.spoiled[0]}" if self.spoiled else "",
        ]
        return f"case {self.index} of seed {self.seed}: " + ", ".join(w for w in words if w)

    @property
    def is_empty(self) -> bool:
        return 0 in (self.batch, self.seqlen_q, self.seqlen_k)

    def kind(self, preset: str, *, gradient: bool = False) -> str:
        """What the case's errors with that preset are counted under."""
        inputs = (
            "float8" if any(self.stored) else {"bfloat16": "bf16", "float16": "f16"}[self.dtype]
        )
        name = f"{'backward' if gradient else 'forward'} {preset}, {inputs} inputs"
        return name + (", deterministic" if gradient and self.deterministic else "")

    def options(self, preset: str) -> dict[str, Any]:
        """Static keywords of jax_fa3.attention."""
        found: dict[str, Any] = {"precision": "native"}
        if preset != "native":
            found = {"precision": "fp8", "quantization": FP8[preset]}
        if self.causal is not None:
            found |= {"is_causal": True, "causal_alignment": self.causal}
        return found | {"deterministic": self.deterministic}

    def softmax_scale(self) -> float | None:
        size = self.head_dim**-0.5
        return {
            "default": None,
            "negative": -0.7 * size,
            "traced": float(np.float32(1.3 * size)),
            "zero": 0.0,
            "tiny": 1e-3 * size,
            "large": 10 * size,
            "huge": 2e3 * size,
        }[self.scale]

    def inputs(self, draw: int) -> dict[str, Any]:
        """Arrays by argument name."""
        sizes = cases.Case(
            f"soak {self.index}",
            batch=self.batch,
            seqlen_q=self.seqlen_q,
            seqlen_k=self.seqlen_k,
            num_heads_q=self.heads_kv * self.group,
            num_heads_kv=self.heads_kv,
            head_dim=self.head_dim,
        )
        seed = self.seed * 1000 + draw
        arrays = cases.make_inputs(sizes, np.float32, seed=seed, distribution=self.data[draw])
        rng = np.random.default_rng([seed, self.index, 1])
        inputs: dict[str, Any] = {}
        for name, kind in zip(MAIN, self.stored, strict=True):
            array = arrays[name]
            if kind is None:
                inputs[name] = array.astype(self.dtype)
                continue
            shape = {"batch_heads": (self.batch, self.heads_kv), "heads": (self.heads_kv,)}
            factor = rng.choice([0.125, 1 / 3, 1, 1.5, 4], shape.get(self.descale, ()))
            factor = np.asarray(factor, np.float32)
            full = np.broadcast_to(factor, (self.batch, self.heads_kv))
            full = np.repeat(full, array.shape[2] // self.heads_kv, axis=1)
            inputs[name] = np.clip(array / full[:, None, :, None], -440, 440).astype(FLOAT8[kind])
            inputs[f"{name}_descale"] = factor
        return inputs

    def cotangents(self, draw: int) -> tuple[Any, Any]:
        """dout, rounded as out is, and dlogsumexp."""
        rng = np.random.default_rng([self.seed, self.index, draw, 2])
        heads = self.heads_kv * self.group
        dout = rng.standard_normal((self.batch, self.seqlen_q, heads, self.head_dim), np.float32)
        dout = dout.astype(self.dtype).astype(np.float32)
        return dout, rng.standard_normal((self.batch, heads, self.seqlen_q), np.float32)


def draw_case(seed: int, index: int) -> Case:
    rng = np.random.default_rng([seed, index])

    def pick(*choices: Any, p: Any = None) -> Any:
        return choices[rng.choice(len(choices), p=p)]

    large = rng.random() < 0.07
    is_float8 = rng.random() < 0.2
    seqlen_q, seqlen_k = _length(rng, large), _length(rng, large)
    if rng.random() < 0.2:
        seqlen_k = seqlen_q
    most = MOST_SCORES_OF_LARGE if large else MOST_SCORES
    while seqlen_q * seqlen_k > most:
        seqlen_q, seqlen_k = (seqlen_q * 2 + 2) // 3, (seqlen_k * 2 + 2) // 3
    room = max(most // max(seqlen_q * seqlen_k, 300), 1)
    group = min(pick(1, 1, 2, 3, 4, 5, 8, 16), room)
    heads_kv = min(pick(1, 1, 2, 3, 4), max(room // group, 1))
    batch = min(pick(1, 1, 2, 3, 5, 17, 90), max(room // group // heads_kv, 1))
    rows = heads_kv * (group * seqlen_q + seqlen_k)  # of one batch
    batch = min(batch, max(MOST_ROWS // max(rows, 1), 1))
    if rng.random() < 0.02:
        batch = 0
    stored = (None, None, None)
    if is_float8:
        stored = (pick(None, "e4m3", "e5m2"), pick("e4m3", "e5m2"), pick("e4m3", "e5m2"))
    scale = pick("default", "negative", "traced", "zero", "tiny", "large", "huge",
                 p=(0.55, 0.1, 0.15, 0.04, 0.04, 0.06, 0.06))  # fmt: skip
    presets = (pick(*FP8), pick(*FP8)) if is_float8 else ("native", pick(*FP8))
    presets = tuple(dict.fromkeys(presets[::-1] if rng.random() < 0.3 else presets))
    gradient = None
    if not is_float8 and not large and rng.random() < 0.6:
        fp8_too = scale == "default" and rng.random() < 0.4
        gradient = next(p for p in presets if (p != "native") == fp8_too)
    forms = [f for f in FORMS if f != "packed" or seqlen_q == seqlen_k]
    if is_float8:  # descales are not mapped
        forms = [f for f in forms if f not in ("mapped", "looped", "leading")]
    if batch % 2 or batch == 0:
        forms = [f for f in forms if f != "leading"]
    spoiled = None
    if not is_float8 and rng.random() < 0.15 and scale not in UNMODELLED:
        spoiled = (pick(*MAIN), pick(np.nan, np.inf, -np.inf))
    return Case(
        seed, index, batch, seqlen_q, seqlen_k, heads_kv, group,
        head_dim=pick(64, 128, 256),
        causal=pick(None, "bottom_right", "top_left"),
        dtype=pick("bfloat16", "float16"),
        stored=stored,
        descale=pick(*DESCALE_SHAPES),
        presets=presets,
        scale=scale,
        data=(pick(*DATA), pick(*DATA)),
        form=pick(*forms),
        gradient=gradient,
        deterministic=bool(rng.random() < 0.5),
        spoiled=spoiled,
    )  # fmt: skip


def _length(rng: np.random.Generator, large: bool) -> int:
    kind = rng.random()
    if large:
        return int(rng.integers(1500, 6000))
    if kind < 0.03:
        return 0
    if kind < 0.2:
        return int(rng.integers(1, 18))
    if kind < 0.55:  # about the edges of tiles
        return int(
            max(TILES[rng.integers(len(TILES))] * rng.integers(1, 3) + rng.integers(-2, 3), 1)
        )
    return int(np.exp(rng.uniform(np.log(2), np.log(2500))))


def spoil(case: Case, clean: dict[str, Any]) -> dict[str, Any]:
    """The inputs with one number replaced by one that is not finite."""
    assert case.spoiled is not None
    operand, number = case.spoiled
    bad = {**clean, operand: clean[operand].copy()}
    if bad[operand].size:
        bad[operand][place(case)] = number
    return bad


def place(case: Case) -> tuple[int, ...]:
    """Where in case.spoiled's operand its number stands."""
    assert case.spoiled is not None
    is_query = case.spoiled[0] == "query"
    shape = (
        case.batch,
        case.seqlen_q if is_query else case.seqlen_k,
        case.heads_kv * (case.group if is_query else 1),
        case.head_dim,
    )
    rng = np.random.default_rng([case.seed, case.index, zlib.crc32(b"place")])
    return tuple(int(rng.integers(n)) for n in shape)
