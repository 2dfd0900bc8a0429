"""Every public name has a docstring that says what its users need, and a place on the API page."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from docs.pages import ROOT

import jax_fa3
import jax_fa3.flax

PUBLIC = {f"jax_fa3.{name}": getattr(jax_fa3, name) for name in jax_fa3.__all__}
FLAX = ("linen_attention_fn", "nnx_attention_fn")
PUBLIC |= {f"jax_fa3.flax.{name}": getattr(jax_fa3.flax, name) for name in FLAX}
FUNCTIONS = {name: thing for name, thing in PUBLIC.items() if inspect.isfunction(thing)}


def test_the_api_page_holds_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    module, found = "", []
    for directive, name in re.findall(r"\.\. (currentmodule|autofunction|autoclass):: (\S+)", page):
        if directive == "currentmodule":
            module = name
        else:
            found.append(f"{module}.{name}")
    assert sorted(found) == sorted(PUBLIC)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_is_described(name: str) -> None:
    text = inspect.getdoc(FUNCTIONS[name]) or ""
    described = parameters_in(text)
    # "the rest: as in `attention`" stands for parameters that `attention` describes.
    if re.search(r"^  the rest: as in `attention`|^Args: those of `jax_fa3.attention`", text, re.M):
        described |= parameters_in(inspect.getdoc(jax_fa3.attention) or "")
    own = {
        parameter.name.lstrip("*")
        for parameter in inspect.signature(FUNCTIONS[name]).parameters.values()
        if name != "jax_fa3.explain" or parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    assert own - described == set()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_and_errors_are_described(name: str) -> None:
    text = inspect.getdoc(FUNCTIONS[name]) or ""
    assert re.search(r"^Returns: \S", text, re.M)
    if inspect.signature(FUNCTIONS[name]).parameters:
        raises = re.search(r"^Raises:\n((?:  .*\n?)+)", text, re.M)
        assert raises is not None
        assert re.match(r"  [A-Z]\w+Error(?:, [A-Z]\w+Error)*: \S", raises[1])


def parameters_in(text: str) -> set[str]:
    """Names before the colons of the section Args."""
    section = re.search(r"^Args:\n((?:  .*\n)+)", text, re.M)
    if section is None:
        return set()
    heads: list[Any] = re.findall(r"^  (\w[\w, ]*): ", section[1], re.M)
    return {name.strip() for head in heads for name in head.split(",")}


def test_a_missing_parameter_is_noticed() -> None:
    text = "What.\n\nArgs:\n  x: an array.\n  rows, axis: sizes.\n    more: of it.\nReturns: y.\n"
    assert parameters_in(text) == {"x", "rows", "axis"}
