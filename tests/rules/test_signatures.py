"""What type checkers are told: whether a second result comes back, and every keyword."""

from __future__ import annotations

import inspect
import typing
from typing import Any

import pytest

import jax_fa3

SECOND = ("return_logsumexp", "return_residual")
FUNCTIONS = [
    name
    for name in jax_fa3.__all__
    if inspect.isfunction(getattr(jax_fa3, name))
    and set(SECOND) & set(inspect.signature(getattr(jax_fa3, name)).parameters)
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_overloads_have_all_parameters(name: str) -> None:
    function: Any = getattr(jax_fa3, name)
    parameters = inspect.signature(function).parameters
    overloads = typing.get_overloads(function)
    (flag,) = set(SECOND) & set(parameters)
    hints = [typing.get_type_hints(overload) for overload in overloads]
    assert [typing.get_args(hint[flag]) for hint in hints] == [(False,), (True,)]
    for overload, hint in zip(overloads, hints, strict=True):
        own = set(inspect.signature(overload).parameters)
        (options,) = typing.get_args(hint["options"])
        assert (own - {"options"}) | set(options.__annotations__) == set(parameters)
        assert not own & set(options.__annotations__)


def test_functions_with_two_results() -> None:
    names = {"attention", "attention_varlen", "context_parallel_attention", "dot_product_attention"}
    assert set(FUNCTIONS) == names
