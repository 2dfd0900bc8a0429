"""benchmarks/ablation.py, as far as a machine without a GPU or a compiler can."""

from __future__ import annotations

import functools
import importlib
import re

import jax
import pytest
from cli.helpers import BENCHMARKS, ROOT

from jax_fa3._cli import grid


@pytest.fixture
def ablation(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("ablation")


def test_variants_change_what_is_built(ablation):
    """Each variant sets a field of its config to another value, in a library of its own."""
    config = (ROOT / "cuda/fwd/config.h").read_text()
    for variant in ablation.VARIANTS:
        struct = variant.base.split("<")[0]
        body = re.search(rf"struct {struct} {{(.*?)\n}};", config, re.DOTALL)[1]
        for field, value in variant.changes:
            built = re.search(rf"{field} = ([\w:.]+)", body)[1]
            assert value != built, (variant, built)
            assert f" {field} = {value};" in ablation.source(variant)
    libraries = {variant.library for variant in ablation.VARIANTS}
    assert len(libraries) == len(ablation.VARIANTS) > 20


def test_fp8_variants_read_images(ablation):
    variants = {variant.head_dim: variant for variant in ablation.VARIANTS if variant.is_fp8}
    for head_dim, variant in variants.items():
        shape = grid.square(2, 130, 3, head_dim, False)
        images = jax.eval_shape(functools.partial(ablation.operands, variant, shape))
        assert images[0].shape == (2, 3, 192, head_dim)
