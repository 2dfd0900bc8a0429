"""`attention` as `attention_fn=` of Flax's multi-head attention modules, linen and nnx.

Import this module by name; `import jax_fa3` alone does not import Flax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa3 import _attention, _shapes
from jax_fa3 import _option_checks as checks

try:
    from flax.linen.dtypes import promote_dtype as _promote_dtype
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] != "flax":
        raise
    raise ImportError(
        "jax_fa3.flax: flax must be installed; got no module of that name. Run `pip install flax`."
    ) from error

__all__ = ["FlaxOptions", "linen_attention_fn", "nnx_attention_fn"]


class FlaxOptions(_attention.SharedOptions, _attention.PaddingOptions, total=False):
    """Keywords of both adapters: those of `jax_fa3.attention` that Flax does not pass itself."""

    precision: Literal["fp8", "native"] | None


_WIDE_DTYPES = (*_shapes.SIXTEEN_BIT_DTYPES, _shapes.FLOAT32)
_ARRAYS = (
    "softmax_scale",
    "sinks",
    "query_segment_ids",
    "key_segment_ids",
    "query_seqlens",
    "key_seqlens",
)


def linen_attention_fn(**options: Unpack[FlaxOptions]) -> Callable[..., jax.Array]:
    """`attention_fn` for `flax.linen.MultiHeadDotProductAttention`::

        nn.MultiHeadDotProductAttention(8, attention_fn=linen_attention_fn(is_causal=True))

    Prefer the option is_causal to a causal mask: the kernel serves it, and a mask built under jit
    cannot be recognised. A mask is honoured whatever it holds; it runs on the XLA path, block by
    block. A concrete mask (built outside jit) that is the causal triangle, or all True, is taken
    as what it means.

    Args:
      options: as in `jax_fa3.attention`, with two other defaults: precision None means "fp8" for
        16-bit inputs and "native" for float32; causal_alignment is "top_left", as in Flax. The
        option deterministic is about gradients, Flax's own about dropout.
    Returns: a function with the signature and meaning of `flax.linen.dot_product_attention`, but
      rows that see no key are 0 (Flax averages all values), and the softmax is float32 whatever
      force_fp32_for_softmax and precision say. Several leading batch axes, grouped heads and
      masks of any dtype (0 hides) are served. One query row with a mask is a step of cached
      decoding: there the mask alone says which keys are seen, is_causal is not applied.
    Raises:
      TypeError: an option, or a keyword of a call, is unknown.
      NotImplementedError: in a call: dropout that is not deterministic; sow_weights=True (module)
        or einsums of one's own; window_size in a step of cached decoding.
      ValueError, RuntimeError: in a call, as `jax_fa3.attention`.
    """
    name = "linen_attention_fn"
    checked = _check_options(name, options)

    def attention_fn(
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        mask: Any = None,
        broadcast_dropout: bool = True,
        dropout_rng: Any = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Any = None,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
        **unknown: Any,
    ) -> jax.Array:
        # linen passes the keywords named above and drops all others without a word.
        del broadcast_dropout, dropout_rng, precision, force_fp32_for_softmax
        _refuse_unknown(name, unknown)
        _refuse_dropout(name, dropout_rate, deterministic)
        _refuse_module(name, module)
        _check_arrays(name, dtype, query=query, key=key, value=value, bias=bias, mask=mask)
        for argument, given in {
            "einsum_dot_general": einsum_dot_general,
            "qk_attn_weights_einsum": qk_attn_weights_einsum,
            "attn_weights_value_einsum": attn_weights_value_einsum,
        }.items():
            if given is not None:
                raise NotImplementedError(
                    f"{name}: {argument} must be None (the products are part of the kernel); got "
                    f"{checks.describe(given)}. precision and quantization of {name} choose how "
                    "they are computed."
                )
        query, key, value = _promote_dtype(query, key, value, dtype=dtype)
        return _attend(_Request(name, query, key, value, bias, mask), checked)

    return attention_fn


def nnx_attention_fn(**options: Unpack[FlaxOptions]) -> Callable[..., jax.Array]:
    """`attention_fn` for `flax.nnx.MultiHeadAttention`::

        nnx.MultiHeadAttention(8, 512, attention_fn=nnx_attention_fn(), decode=False, rngs=rngs)

    Say is_causal=True here or in the call of the module, rather than passing a causal mask.

    Args:
      options: as in `linen_attention_fn`.
    Returns: a function with the signature and meaning of `flax.nnx.dot_product_attention`, with
      the differences told in `linen_attention_fn`. is_causal of a call adds to the option's.
    Raises:
      TypeError, NotImplementedError, ValueError, RuntimeError: as `linen_attention_fn`.
    """
    name = "nnx_attention_fn"
    checked = _check_options(name, options)

    def attention_fn(
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        mask: Any = None,
        broadcast_dropout: bool = True,
        dropout_rng: Any = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        promote_dtype: Callable[..., Any] | None = None,
        is_causal: bool = False,
        **unknown: Any,
    ) -> jax.Array:
        del broadcast_dropout, dropout_rng, precision
        _refuse_unknown(name, unknown)
        _refuse_dropout(name, dropout_rate, deterministic)
        _refuse_module(name, module)
        _check_arrays(name, dtype, query=query, key=key, value=value, bias=bias, mask=mask)
        own = dict(checked)
        if checks.check_flag(name, "is_causal", is_causal):
            own["is_causal"] = True
        if not (promote_dtype is None or callable(promote_dtype)):
            raise TypeError(
                f"{name}: promote_dtype must be a function or None; got"
                f" {checks.describe(promote_dtype)}."
            )
        if promote_dtype is None:
            query, key, value = _promote_dtype(query, key, value, dtype=dtype)
        else:
            query, key, value = promote_dtype((query, key, value), dtype=dtype)
        return _attend(_Request(name, query, key, value, bias, mask), own)

    return attention_fn


@dataclasses.dataclass(frozen=True)
class _Request:
    """The arrays of one call, query, key and value of one dtype; function names the adapter."""

    function: str
    query: Any
    key: Any
    value: Any
    bias: Any
    mask: Any


def _attend(request: _Request, options: dict[str, Any]) -> jax.Array:
    query, mask = request.query, request.mask
    static = {name: x for name, x in options.items() if name not in _ARRAYS}
    implementation = static.pop("implementation", None)
    if static["precision"] is None:
        static["precision"] = "native" if query.dtype == jnp.float32 else "fp8"
    if mask is not None and query.ndim >= 3 and query.shape[-3] == 1:
        # Row 0 stands at cache_index, which only the mask knows, not at the first or last key.
        static["is_causal"] = False
        if (
            checks.check_window(request.function, "window_size", static.get("window_size"))
            is not None
        ):
            raise NotImplementedError(
                f"{request.function}: window_size must be None for one query row with a mask (a "
                "step of cached decoding, whose position is not known here); got "
                f"{static['window_size']!r}. Put the window into the mask."
            )
    elif mask is not None:
        meaning = _meaning(request, top_left=static["causal_alignment"] == "top_left")
        if meaning is not None:
            mask = None
            static["is_causal"] = static["is_causal"] or meaning == "causal"
    if mask is not None:
        mask = jnp.asarray(mask) != 0
    out, _ = _attention.run(
        request.function,
        query,
        request.key,
        request.value,
        arrays={
            "bias": None if request.bias is None else jnp.asarray(request.bias),
            "mask": mask,
            **{name: options[name] for name in _ARRAYS if name in options},
        },
        static=static,
        return_logsumexp=False,
        implementation=implementation,
    )
    return out


def _meaning(request: _Request, *, top_left: bool) -> Literal["all", "causal"] | None:
    """What a mask with known values says, where an option says the same at no cost.

    The triangle is keys <= row, so it is an option only where is_causal is aligned "top_left".
    """
    mask, query, key = request.mask, request.query, request.key
    if isinstance(mask, jax.core.Tracer) or not hasattr(mask, "shape"):
        return None
    if min(query.ndim, key.ndim) < 3:
        return None
    if isinstance(mask, jax.Array) and not mask.is_fully_addressable:
        return None
    sizes = (query.shape[-3], key.shape[-3])
    full = (*query.shape[:-3], query.shape[-2], *sizes)
    tail = full[max(len(full) - mask.ndim, 0) :]
    if mask.ndim > len(full) or any(a not in (1, b) for a, b in zip(mask.shape, tail, strict=True)):
        return None  # attention refuses it
    seen = np.asarray(jax.device_get(mask)) != 0
    if seen.all():
        return "all"
    if top_left and seen.shape[-2:] == sizes and (seen == np.tri(*sizes, dtype=bool)).all():
        return "causal"
    return None


def _check_options(name: str, options: Any) -> dict[str, Any]:
    """The options with the defaults of the adapters; values are checked in each call."""
    known = FlaxOptions.__annotations__
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TypeError(f"{name}: options must be among {', '.join(known)}; got {unknown[0]}.")
    defaults = {"is_causal": False, "causal_alignment": "top_left", "precision": None}
    checked = {**defaults, **options}
    checks.check_flag(name, "is_causal", checked["is_causal"])
    checks.check_choice(name, "precision", checked["precision"], (None, "fp8", "native"))
    return checked


def _check_arrays(name: str, dtype: Any, **arrays: Any) -> None:
    """Before the arrays are promoted to dtype; shapes and dtypes are checked in `attention`."""
    for argument, x in arrays.items():
        if x is None and argument in ("bias", "mask"):
            continue
        checks.check_convertible(name, argument, x)
        if checks.has_shape(x) and np.dtype(x.dtype) in _shapes.FLOAT8_DTYPES:
            raise TypeError(
                f"{name}: {argument} must not be float8 (there is no argument for its descale);"
                f" got {x.dtype}."
            )
    try:
        is_wide = not checks.has_shape(dtype) and np.dtype(dtype) in _WIDE_DTYPES
    except (TypeError, ValueError):
        is_wide = False
    if not (dtype is None or is_wide):
        raise TypeError(
            f"{name}: dtype must be bfloat16, float16, float32 or None; got"
            f" {checks.describe(dtype)}."
        )


def _refuse_unknown(name: str, unknown: dict[str, Any]) -> None:
    for argument, value in unknown.items():
        raise TypeError(
            f"{name}: {argument} must not be passed (this adapter does not know it); got "
            f"{checks.describe(value)}."
        )


def _refuse_dropout(name: str, dropout_rate: Any, deterministic: Any) -> None:
    if checks.is_number(dropout_rate) and dropout_rate == 0:
        return
    if not checks.check_flag(name, "deterministic", deterministic):
        raise NotImplementedError(
            f"{name}: dropout_rate must be 0 unless deterministic=True (dropout of attention "
            f"weights is not served); got {checks.describe(dropout_rate)}. Apply dropout to the "
            "output of the layer."
        )


def _refuse_module(name: str, module: Any) -> None:
    if module is not None:
        raise NotImplementedError(
            f"{name}: module must be None (attention weights are never stored, so sow_weights=True "
            f"is not served); got {type(module).__name__}."
        )
