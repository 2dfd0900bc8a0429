"""FP8 rows that one key leads by far: what the others weigh together, and the ends of P's codes."""

from __future__ import annotations

import cases
import numpy as np
import pytest
import tolerances
from gpu import reference
from gpu.reference import run_presets

gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_one_key_beside_thousands(head_dim: int) -> None:
    """One key weighs as much as 8,192 others, each of which has 2^-13 of its probability."""
    arrays = cases.led_by_one_key(rows=200, keys=8192, head_dim=head_dim, logit=9)
    inputs = {name: x.astype(cases.BFLOAT16) for name, x in arrays.items()}
    exact = reference.exact(inputs)
    for name, result in run_presets(tolerances.AGAINST_EXACT, inputs).items():
        tolerances.check_close(result.out, exact.out, tolerances.AGAINST_EXACT[name])


@gpu
def test_float8_query_with_a_scale_that_float16_rounds() -> None:
    """A float8 query's row factor is no power of two; float16 makes logits here larger by 2^-11.

    One key sets a base near 250 in log2 units, another one passes it by less than what a base
    endures. 1/16 more, and its P has the code behind the largest number, NaN.
    """
    rng = np.random.default_rng(7)
    query = rng.uniform(1.2, 2.4, (1, 4000, 1, 64)).astype(cases.E4M3)
    key = np.zeros((1, 256, 1, 64), np.float32)
    key[0, [0, 128]] = 8
    key[0, 128, 0, :7] = 9
    value = rng.normal(size=key.shape).astype(cases.E4M3)
    inputs = {"query": query, "key": key.astype(cases.E4M3), "value": value}
    inputs |= {name: np.float32(1) for name in reference.DESCALES}
    scale = (1 + 1.02 * 2.0**-11) * 0.25 / reference.LOG2_E
    exact = reference.exact(inputs, softmax_scale=scale)
    for name, result in run_presets(tolerances.AGAINST_EXACT, inputs, softmax_scale=scale).items():
        tolerances.check_close(result.out, exact.out, tolerances.AGAINST_EXACT[name])
