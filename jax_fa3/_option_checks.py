"""Checks of single options: scalars, flags, choices, windows. No JAX computation."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np


def show(shape: Iterable[Any]) -> str:
    """A shape as messages print it: [2, seqlen_k, 4, 64]."""
    return "[" + ", ".join(str(size) for size in shape) + "]"


def has_shape(value: Any) -> bool:
    """Whether the value has what every array has: a shape and a dtype (NumPy's classes do too)."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, type)


def describe(value: Any) -> str:
    """A received value as messages print it: arrays by dtype and shape, the rest by repr, in one
    line."""
    if has_shape(value):
        return f"{value.dtype}{show(value.shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 200 else f"{text[:197]}..."


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Whether the dtype is a float, ml_dtypes included (numpy does not count those)."""
    if np.issubdtype(dtype, np.floating):
        return True
    if np.issubdtype(dtype, np.complexfloating):
        return False
    try:
        ml_dtypes.finfo(dtype)
    except ValueError:
        return False
    return True


def is_number(value: Any) -> bool:
    """Whether the value is a Python or numpy real number, flags excluded."""
    return isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))


# Factors on the logits meet log2(e) in float32: below this, no product overflows.
LARGEST_NUMBER = 2e38


def dtype_of(name: str, argument: str, value: Any) -> np.dtype[Any]:
    """The dtype of an array; typed PRNG keys have none that numpy knows."""
    try:
        dtype: np.dtype[Any] = np.dtype(value.dtype)
    except TypeError:
        raise TypeError(
            f"{name}: {argument} must be an array of numbers; got {value.dtype}."
        ) from None
    return dtype


def check_size(name: str, argument: str, value: Any) -> None:
    """Refuses a number known at trace time that is not finite or too large for float32."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if not is_number(value):
        return
    if isinstance(value, np.float16):  # the limit below has no float16
        value = np.float32(value)
    if value != value or value in (math.inf, -math.inf):
        raise ValueError(f"{name}: {argument} must be finite; got {value!r}.")
    if not -LARGEST_NUMBER < value < LARGEST_NUMBER:
        raise ValueError(
            f"{name}: {argument} must be below {LARGEST_NUMBER:g} in magnitude; got"
            f" {_number(value)}."
        )


def _number(value: Any) -> str:
    """A number as messages print it; Python's ints have no limit."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    return repr(value)


def check_array(name: str, argument: str, value: Any) -> None:
    """Refuses what has a shape and a dtype but holds no numbers that JAX takes."""
    dtype = dtype_of(name, argument, value)
    is_masked = isinstance(value, np.ma.MaskedArray)
    if is_masked or not (hasattr(value, "__array__") or hasattr(value, "__jax_array__")):
        raise TypeError(f"{name}: {argument} must be an array; got {type(value).__name__}.")
    if isinstance(value, (np.ndarray, np.generic)):
        is_numeric = dtype.kind in "biufcV" and dtype.type is not np.void
        if not is_numeric or not dtype.isnative or dtype.char in "gG":
            raise TypeError(f"{name}: {argument} must be an array of numbers; got {dtype}.")


def check_arrays(name: str, given: Mapping[str, Any]) -> None:
    """`check_array` of all but numbers and what has no shape; argument names map to values."""
    for argument, value in given.items():
        if has_shape(value) and not is_number(value):
            check_array(name, argument, value)


def check_convertible(name: str, argument: str, value: Any) -> None:
    """Accepts what jnp.asarray makes an array of numbers of: arrays and nested lists."""
    if has_shape(value):
        check_array(name, argument, value)
        return
    try:
        kind = np.asarray(value).dtype.kind
    except ValueError:  # lists of different lengths
        kind = "O"
    if kind not in "biuf":
        raise TypeError(f"{name}: {argument} must be an array; got {type(value).__name__}.")


def shape_and_dtype(name: str, argument: str, value: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of an array, a ShapeDtypeStruct or a Python number.

    Raises: TypeError for anything else.
    """
    if has_shape(value):
        return tuple(value.shape), dtype_of(name, argument, value)
    if is_number(value):
        kind = np.int32 if isinstance(value, numbers.Integral) else np.float32
        return (), np.dtype(kind)
    raise TypeError(f"{name}: {argument} must be an array; got {type(value).__name__}.")


def check_scalar(name: str, argument: str, value: Any) -> None:
    """Accepts None, Python and numpy numbers and real arrays of rank 0, traced or not."""
    if value is None:
        return
    if has_shape(value):
        dtype = dtype_of(name, argument, value)
        if not (np.issubdtype(dtype, np.integer) or is_floating(dtype)):
            raise TypeError(f"{name}: {argument} must be a real number; got {describe(value)}.")
        if tuple(value.shape) != ():
            raise ValueError(
                f"{name}: {argument} must be a scalar; got an array of shape {show(value.shape)}."
            )
    elif not is_number(value):
        raise TypeError(f"{name}: {argument} must be a real number; got {describe(value)}.")
    check_size(name, argument, value)


def check_flag(name: str, argument: str, value: Any) -> bool:
    """Accepts bool and numpy.bool_; a traced flag cannot choose a kernel."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(
            f"{name}: {argument} must be a bool known at trace time; got {describe(value)}."
        )
    return bool(value)


def check_choice(name: str, argument: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """Accepts one of a few names."""
    if not (value is None or isinstance(value, str)) or value not in choices:
        listed = " or ".join('"' + c + '"' if isinstance(c, str) else str(c) for c in choices)
        raise ValueError(f"{name}: {argument} must be {listed}; got {describe(value)}.")
    return value


def check_window(name: str, argument: str, value: Any) -> tuple[int | None, int | None] | None:
    """Normalises a window to a tuple of ints or Nones; (None, None) is no window."""
    if value is None:
        return None
    rule = "must be None or a pair (left, right) of non-negative ints or None"
    pair = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(pair, (tuple, list)):
        raise TypeError(f"{name}: {argument} {rule}; got {describe(value)}.")
    if len(pair) != 2:
        raise ValueError(f"{name}: {argument} {rule}; got {describe(value)}.")
    sides: list[int | None] = []
    for side in pair:
        if side is None:
            sides.append(None)
            continue
        if isinstance(side, (bool, np.bool_)) or not isinstance(side, numbers.Integral):
            raise TypeError(f"{name}: {argument} {rule}; got {describe(value)}.")
        if side < 0:
            raise ValueError(
                f"{name}: {argument} {rule}; got {tuple(pair)!r}. None leaves a side open."
            )
        sides.append(int(side))
    if sides == [None, None]:
        return None
    return sides[0], sides[1]


def check_soft_cap(name: str, value: Any) -> float | None:
    """Normalises logits_soft_cap to a positive finite float."""
    if value is None:
        return None
    if not is_number(value):
        raise TypeError(
            f"{name}: logits_soft_cap must be a number known at trace time or None; got"
            f" {describe(value)}."
        )
    check_size(name, "logits_soft_cap", value)
    if np.float32(value) <= 0:
        raise ValueError(f"{name}: logits_soft_cap must be positive in float32; got {value!r}.")
    return float(value)
