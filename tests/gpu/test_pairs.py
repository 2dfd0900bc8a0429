"""The FP8 forward at head_dim 256, where two CTAs share keys and values (cuda/fwd/kernel.cuh)."""

from __future__ import annotations

import functools
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu import reference
from gpu.reference import attend, run_presets
from gpu.test_fwd import check

pytestmark = pytest.mark.gpu

# seqlen_q, seqlen_k, num_heads_q, num_heads_kv, causal; tiles have 128 rows and 128 keys.
CALLS = {
    "halves": (250, 1100, 3, 1, None),
    "halves under a mask": (1000, 4099, 1, 1, "bottom_right"),
    "halves that see little": (500, 4096, 3, 1, "top_left"),
    "neighbours": (300, 1153, 4, 2, None),
    "neighbours under a mask": (300, 2100, 8, 1, "bottom_right"),
    "neighbours without keys": (2500, 2048, 2, 1, "bottom_right"),
    "alone": (300, 1100, 3, 3, None),
    "alone under a mask": (513, 4100, 3, 1, "top_left"),
}


MOST_ROWS_OF_A_GRAPH = 2**16  # is_short in bindings/ffi_check.h


def inputs_of(*sizes: int, batch: int = 1) -> dict[str, Any]:
    names = ("seqlen_q", "seqlen_k", "num_heads_q", "num_heads_kv")
    shape = dict(zip(names, sizes, strict=True))
    return cases.make_inputs(cases.Case("pairs", batch=batch, head_dim=256, **shape))


@pytest.mark.parametrize("name", CALLS)
def test_pairs(name: str, record_property: Any) -> None:
    """Outside of a graph, where short calls would go into one: many times the same sequence."""
    *sizes, causal = CALLS[name]
    inputs = inputs_of(*sizes)
    batch = MOST_ROWS_OF_A_GRAPH // (sizes[0] * sizes[2]) + 1
    many = {name: np.repeat(x, batch, axis=0) for name, x in inputs.items()}
    results = run_presets(("accurate", "fast", "e5m2"), many, causal=causal)
    first = jax.tree.map(lambda x: x[:1], results)
    reference.assert_same_bits(jax.tree.map(lambda x: np.repeat(x, batch, axis=0), first), results)
    check(first, inputs, causal=causal, softmax_scale=None, note=record_property)


def test_pairs_in_graphs() -> None:
    """Calls with pairs and without, in any order, in graphs that a handler keeps and in XLA's."""
    rng = np.random.default_rng(0)
    shapes: list[tuple[tuple[int, ...], str | None]] = [
        ((1024, 1024, 4, 4), None),  # halves
        ((1024, 1000, 4, 4), None),  # alone, with as many launches
        ((1024, 1152, 4, 2), None),  # neighbours
        ((4096, 4096, 2, 2), "bottom_right"),  # halves
        ((4096, 4000, 2, 2), "bottom_right"),  # alone
    ]
    calls = []
    for sizes, causal in shapes:
        call = functools.partial(attend, causal=causal)
        in_graphs = [
            jax.jit(call),
            jax.jit(call, compiler_options={"xla_gpu_graph_min_graph_size": 1}),
        ]
        batch = MOST_ROWS_OF_A_GRAPH // (sizes[0] * sizes[2]) + 1
        inputs = jax.tree.map(jnp.asarray, inputs_of(*sizes, batch=batch))
        expected = jax.jit(call)(inputs)  # too long for a kept graph, too few for one of XLA's
        for place in range(4):  # more than a handler keeps
            one = jax.tree.map(lambda x, i=place: x[i : i + 1], (inputs, expected))
            calls += [(in_graph, *one) for in_graph in in_graphs]
    count_different = jax.jit(reference.count_different)
    for _ in range(4):
        counts = []
        for i in rng.permutation(len(calls)):
            in_graph, inputs, expected = calls[i]
            reference.poison()
            counts.append(count_different(in_graph(inputs), expected))
        assert [int(count) for count in counts] == [0] * len(calls)


@pytest.mark.parametrize(
    ("sizes", "causal"),
    [
        ((4096, 2048, 4, 2), "bottom_right"),  # half of the tiles see no key: the counter is busy
        ((512, 1100, 21, 7), None),
        ((8448, 4096, 1, 1), "bottom_right"),
    ],
)
def test_no_tile_is_lost(sizes: tuple[int, ...], causal: str | None) -> None:
    """Many tiles from the counter, 300 times: each is stored, over memory that held NaN."""
    inputs = inputs_of(*sizes, batch=8)
    assert 8 * sizes[0] * sizes[2] > MOST_ROWS_OF_A_GRAPH
    arrays = jax.tree.map(jnp.asarray, inputs)
    call = jax.jit(functools.partial(attend, causal=causal))
    count_different = jax.jit(reference.count_different)
    first = jax.block_until_ready(call(arrays))
    counts = []
    for _ in range(300):
        reference.poison()
        counts.append(count_different(call(arrays), first))
    assert [int(count) for count in counts] == [0] * 300
    one, result = jax.tree.map(lambda x: np.asarray(x[-1:]), (inputs, first))
    check({"accurate": result}, one, causal=causal, softmax_scale=None, note=lambda *_: None)
