"""Two GPUs in one process: attributes, tensor maps and streams belong to the device of the call."""

from __future__ import annotations

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu import reference

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu]


def test_each_device_in_turn_gives_the_same_bits() -> None:
    """The second device first, then the first, then in turns with another shape."""
    devices = jax.devices("gpu")[:2]
    shapes = [{"seqlen_q": 300, "seqlen_k": 517}, {"seqlen_q": 129, "seqlen_k": 64}]
    inputs = [
        cases.make_inputs(
            cases.Case("devices", **sizes, num_heads_q=6, num_heads_kv=2, head_dim=head_dim),
            cases.BFLOAT16,
        )
        for sizes in shapes
        for head_dim in (64, 128)
    ]

    @jax.jit
    def every(x):
        return [reference.attend(x, causal="bottom_right", **p) for p in reference.PRESETS.values()]

    first: dict[int, object] = {}
    for turn in range(20):
        device = devices[(turn + 1) % 2]
        for number, arrays in enumerate(inputs):
            there = jax.tree.map(lambda a, d=device: jax.device_put(jnp.asarray(a), d), arrays)
            got = jax.tree.map(np.asarray, every(there))
            expected = first.setdefault(number, got)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
                np.testing.assert_array_equal(a, b)
