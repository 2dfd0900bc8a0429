"""Who takes part in a timing: our variants, cuDNN, and whoever benchmarks/ adds.

A contender says for each shape that it is ready (a `Side`) or why it is not (`Unavailable`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_fa3
from jax_fa3 import _compat, _explain, _ffi
from jax_fa3._cli.accuracy import PRESETS, options
from jax_fa3._cli.grid import Shape
from jax_fa3._cli.text import UsageError
from jax_fa3._cli.timing import REGIMES, Side, Turns, jax_side, speed_ratio, take_turns

JAX_DTYPES: dict[str, Any] = {"bf16": jnp.bfloat16, "f16": jnp.float16}


class Unavailable(Exception):
    """This contender cannot run this shape here; the text says why."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """Who may be timed.

    Attributes:
      impl: jax_fa3, jax_fa3_xla or a rival's key.
      precision: fp8, bf16 or f16.
      preset: of jax_fa3 in fp8, else None.
      with_quantize: whether the time holds the conversion from 16-bit inputs.
      build: makes the Side for a shape; raises Unavailable.
    """

    impl: str
    precision: str
    preset: str | None
    with_quantize: bool
    build: Callable[[Shape], Side]

    @property
    def label(self) -> str:
        """Unique within one comparison."""
        parts = [self.impl, self.precision if self.preset is None else self.preset]
        return " ".join([*parts, *(["with quantise"] if self.with_quantize else [])])

    @property
    def is_ours(self) -> bool:
        """Whether rows of this contender carry ratios."""
        return self.impl.startswith("jax_fa3")


def inputs(shape: Shape, dtype: Any, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normal query, key, value of a shape, drawn on the device."""
    kv = (shape.batch, shape.seqlen_k, shape.num_heads_kv, shape.head_dim)
    sizes = ((shape.batch, shape.seqlen_q, shape.num_heads_q, shape.head_dim), kv, kv)
    query, key, value = (
        _drawn(math.prod(size), jnp.dtype(dtype), 3 * seed + number).reshape(size)
        for number, size in enumerate(sizes)
    )
    return query, key, value


@functools.lru_cache(maxsize=6)
def _drawn(count: int, dtype: Any, seed: int) -> jax.Array:
    """Normal numbers; shapes of a grid hold equally many, so most of them draw nothing anew."""

    def draw(key: jax.Array) -> jax.Array:
        # Not drawn in float8, which has too few numbers to draw from.
        return jax.random.normal(key, (count,), jnp.bfloat16).astype(dtype)

    drawn: jax.Array = jax.jit(draw)(jax.random.key(seed))
    return drawn


def kernels_run() -> bool:
    """Whether this process has a GPU that our kernels can run on."""
    return bool(_compat.cuda_capabilities()) and _explain.missing_reason() is None


def require_gpu(cure: str = "Pass --dry-run to try the program.") -> None:
    """Raises UsageError, which ends with the cure, unless JAX computes on a GPU here."""
    if jax.default_backend() != "gpu":
        raise UsageError(
            f"measuring needs a GPU; this process runs on {jax.default_backend()}. {cure}"
        )


def our_call(preset: str, *, is_causal: bool) -> Callable[..., Any]:
    """`jax_fa3.attention` of query, key and value, with the options of a preset."""
    return functools.partial(
        jax_fa3.attention,
        is_causal=is_causal,
        implementation="cuda" if kernels_run() else "xla",
        **options(preset),
    )


def our_name(preset: str, dtype: str = "bf16") -> dict[str, Any]:
    """What a row says of `our_call`: where no kernel runs, impl names the XLA path."""
    native = preset in ("native", "deterministic")
    return {
        "impl": "jax_fa3" if kernels_run() else "jax_fa3_xla",
        "precision": dtype if native else "fp8",
        "preset": None if preset == "native" else preset,
    }


def ours(preset: str, *, dtype: str = "bf16", with_quantize: bool = True) -> Contender:
    """`jax_fa3.attention` (or, without with_quantize, the fp8 kernel alone on quantised inputs).

    Args:
      preset: a name in PRESETS; "native" is the 16-bit kernel, which quantises nothing.
    Where no kernel runs, the XLA path takes part under the name jax_fa3_xla.
    """
    native = preset == "native"

    def build(shape: Shape) -> Side:
        operands = inputs(shape, JAX_DTYPES[dtype])
        if not native and not with_quantize:
            if not kernels_run():
                raise Unavailable("the kernel alone needs a GPU that it can run on")
            return _kernel_alone(shape, operands, preset)
        try:
            return jax_side(our_call(preset, is_causal=shape.is_causal), *operands)
        except (NotImplementedError, RuntimeError) as error:
            raise Unavailable(_first_line(error)) from error

    return Contender(
        **our_name(preset, dtype), with_quantize=with_quantize and not native, build=build
    )


def cudnn_call(*, is_causal: bool) -> Callable[..., Any]:
    """`jax.nn.dot_product_attention(implementation="cudnn")` of query, key and value."""
    return functools.partial(
        jax.nn.dot_product_attention, is_causal=is_causal, implementation="cudnn"
    )


def cudnn(dtype: str = "bf16") -> Contender:
    """cuDNN through JAX."""

    def build(shape: Shape) -> Side:
        if jax.default_backend() != "gpu":
            raise Unavailable("cuDNN needs a GPU")

        call = cudnn_call(is_causal=shape.is_causal)
        try:
            return jax_side(call, *inputs(shape, JAX_DTYPES[dtype]))
        except Exception as error:  # whatever a rival raises must not end our run
            raise Unavailable(_first_line(error)) from error

    return Contender("cudnn", dtype, None, False, build)


def quantize(
    operands: tuple[jax.Array, jax.Array, jax.Array], quantization: jax_fa3.Quantization
) -> _ffi.Images:
    """query, key and value as the FP8 kernels read them."""
    query, key, value = operands
    inputs = _ffi.QuantizerInputs(
        query,
        key,
        value,
        factor=jnp.float32(query.shape[-1] ** -0.5 * math.log2(math.e)),
        v_factor=jnp.float32(1),
        image_dtype=jnp.float8_e5m2 if quantization.dtype == "e5m2" else jnp.float8_e4m3fn,
        hadamard=bool(quantization.hadamard),  # "auto" is on for 64, 128 and 256
        smooth_key=quantization.smooth_key,
        center_value=quantization.center_value,
        wants_shift=False,
    )
    return _ffi.quantize_operands(inputs)


@dataclasses.dataclass
class Comparison:
    """One shape, timed: turns and clocks by label, and who could not take part."""

    turns: dict[str, Turns]
    skipped: dict[str, str]

    def ratios(self, label: str, rivals: list[str]) -> dict[str, float]:
        """Speed of `label` over that of each rival that ran."""
        return {
            rival: speed_ratio(self.turns[label], self.turns[rival])
            for rival in rivals
            if rival in self.turns
        }


def compare(
    shape: Shape,
    contenders: list[Contender],
    *,
    regime: str,
    rounds: int,
    turn_s: float | None = None,
    more: Callable[[Comparison], list[str]] | None = None,
) -> Comparison:
    """Builds every contender for the shape and lets those that can run take turns.

    more: names who goes on after the rounds, by label; see `take_turns`.
    """
    sides: dict[str, Side] = {}
    skipped: dict[str, str] = {}
    for contender in contenders:
        try:
            sides[contender.label] = contender.build(shape)
        except Unavailable as error:
            skipped[contender.label] = str(error)
    if not sides:
        return Comparison({}, skipped)

    def further(turns: dict[str, Turns]) -> list[str]:
        return [] if more is None else more(Comparison(turns, skipped))

    turns = take_turns(sides, REGIMES[regime], rounds, turn_s=turn_s, more=further)
    return Comparison(turns, skipped)


def _kernel_alone(
    shape: Shape, operands: tuple[jax.Array, jax.Array, jax.Array], preset: str
) -> Side:
    quantization = PRESETS[preset]
    if quantization is None:
        raise Unavailable("native quantises nothing")
    query, key, value = operands
    plan = jax_fa3.explain(query, key, value, is_causal=shape.is_causal, quantization=quantization)
    if plan.path != "cuda":
        raise Unavailable(dict(plan.not_taken)["cuda"])

    def call(*images: jax.Array) -> Any:
        return _ffi.fwd_fp8(
            _ffi.Images(*images),
            seqlen_q=shape.seqlen_q,
            seqlen_k=shape.seqlen_k,
            is_causal=shape.is_causal,
            bottom_right=True,
            linear_exp=quantization.softmax == "linear",
            out_dtype=query.dtype,
        )

    images = jax.jit(functools.partial(quantize, quantization=quantization))(operands)
    return jax_side(call, *images)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
