"""Short calls are launched as CUDA graphs that the handlers keep, with the same bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa3

pytestmark = pytest.mark.gpu

PRESETS: dict[str, dict[str, Any]] = {
    "fast": {"precision": "fp8", "quantization": jax_fa3.Quantization.fast()},
    "fp8": {"precision": "fp8"},
}
# XLA records the handlers' launches into a graph of its own.
RECORDED = {"xla_gpu_graph_min_graph_size": 1}


def calls(**options: Any) -> dict[str, Any]:
    def call(preset: str) -> Any:
        return jax.jit(
            lambda q, k, v: jax_fa3.attention(
                q, k, v, is_causal=True, implementation="cuda", **PRESETS[preset]
            ),
            **options,
        )

    return {preset: call(preset) for preset in PRESETS}


def launched() -> int:
    from jax_fa3 import _ext

    return int(_ext.graph_launches())


def bits(out: Any) -> Any:
    return np.asarray(out.view(jnp.uint16))


def draw(rng: np.random.Generator, *shape: int) -> Any:
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for _ in range(3))


@pytest.fixture(autouse=True)
def needs_one_device() -> None:
    if jax.local_device_count() != 1:
        pytest.skip("needs one visible device: no graphs are kept beside others")


def test_a_short_fp8_forward_is_one_graph() -> None:
    rng = np.random.default_rng(0)
    call = calls()["fp8"]
    for shape, count in (((1, 256, 2, 64), 1), ((2, 4096, 16, 64), 0)):
        operands = draw(rng, *shape)
        jax.block_until_ready(call(*operands))
        before = launched()
        for _ in range(5):
            jax.block_until_ready(call(*operands))
        assert launched() - before == 5 * count


def test_graphs_keep_the_bits() -> None:
    """More arrays than graphs are kept, in any order, from four threads at once. Those of the last
    shape have more tiles than SMs, and launches that overlap where the others' do not."""
    rng = np.random.default_rng(1)
    kept, recorded = calls(), calls(compiler_options=RECORDED)
    cases = []
    shapes = ((1, 256, 2, 64), (2, 130, 4, 128), (1, 77, 3, 256), (1, 1, 1, 64), (8, 130, 40, 64))
    for shape in shapes:
        for _ in range(6):
            operands = draw(rng, *shape)
            for preset in PRESETS:
                cases.append((preset, operands, bits(recorded[preset](*operands))))

    def work(seed: int) -> list[int]:
        wrong: list[int] = []
        for _ in range(3):
            order = np.random.default_rng(seed).permutation(len(cases))
            outs = [kept[cases[i][0]](*cases[i][1]) for i in order]
            wrong += [
                int(i)
                for i, out in zip(order, outs, strict=True)
                if not np.array_equal(bits(out), cases[i][2])
            ]
        return wrong

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [[]] * 4
