"""Two GPUs in one process: attributes, tensor maps and streams belong to the device of the call."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

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
        for head_dim in (64, 128, 256)
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


def test_two_threads_at_once_give_the_same_bits() -> None:
    """One thread per device and both on the first: handlers run at the same time."""
    devices = jax.devices("gpu")[:2]
    inputs = [
        cases.make_inputs(
            cases.Case(
                "threads", seqlen_q=seqlen, seqlen_k=517, num_heads_q=6, num_heads_kv=2, head_dim=64
            ),
            cases.BFLOAT16,
        )
        for seqlen in (129, 1200)
    ]

    @jax.jit
    def every(x: Any) -> Any:
        return [reference.attend(x, causal="bottom_right", **p) for p in reference.PRESETS.values()]

    def repeat(device: Any, arrays: Any, times: int) -> Any:
        there = jax.tree.map(lambda a: jax.device_put(jnp.asarray(a), device), arrays)
        return [jax.tree.map(np.asarray, every(there)) for _ in range(times)]

    alone = [repeat(devices[0], arrays, 1)[0] for arrays in inputs]
    placements = [(devices[0], 0), (devices[1], 1), (devices[0], 1), (devices[1], 0)]
    with ThreadPoolExecutor(len(placements)) as pool:
        futures = [pool.submit(repeat, device, inputs[i], 50) for device, i in placements]
        for (_, i), future in zip(placements, futures, strict=True):
            for got in future.result():
                reference.assert_same_bits(got, alone[i])


def test_one_program_over_both_devices_with_alternating_shapes() -> None:
    """Batch split over the devices, 100 calls: every device has its own tensor maps."""
    devices = jax.devices("gpu")[:2]
    mesh = jax.sharding.Mesh(np.array(devices), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    inputs = [
        cases.make_inputs(
            cases.Case(
                "mesh", batch=4, seqlen_q=seqlen, seqlen_k=300, num_heads_q=4, num_heads_kv=2,
                head_dim=128,
            ),
            cases.BFLOAT16,
        )
        for seqlen in (65, 257)
    ]  # fmt: skip

    @jax.jit
    def every(x: Any) -> Any:
        return [reference.attend(x, causal="bottom_right", **p) for p in reference.PRESETS.values()]

    on_one = [jax.tree.map(np.asarray, every(jax.device_put(x, devices[0]))) for x in inputs]
    sharded = [jax.device_put(x, split) for x in inputs]
    for turn in range(100):
        number = turn % 2
        reference.assert_same_bits(every(sharded[number]), on_one[number])
