"""The ring's transfers run beside attention: read from programs compiled for several GPUs, by one.

What XLA makes of a program is known before it runs: between the start and the end of a transfer
stand the calls that hide it.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa3

pytestmark = pytest.mark.gpu

SEQLEN, HEADS, HEAD_DIM = 65_536, 8, 128


def compiled(devices: int, layout: str, precision: str, graded: bool) -> str:
    """The scheduled program of causal ring attention over so many GPUs."""
    like = topologies.get_topology_desc(
        platform="cuda", topology_name=f"{devices} GPUs", topology=f"1x1x{devices}"
    )
    mesh = Mesh(np.array(like.devices), ("x",), axis_types=(AxisType.Auto,))
    local = functools.partial(
        jax_fa3.context_parallel_attention,
        axis_name="x",
        layout=layout,
        is_causal=True,
        precision=precision,
        implementation="cuda",
    )
    fn: Any = jax.shard_map(local, mesh=mesh, in_specs=(P(None, "x"),) * 3, out_specs=P(None, "x"))
    if graded:
        whole = fn
        fn = jax.grad(lambda *args: jnp.sum(whole(*args).astype(jnp.float32)), (0, 1, 2))
    x = jax.ShapeDtypeStruct(
        (1, SEQLEN, HEADS, HEAD_DIM), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "x"))
    )
    return str(jax.jit(fn).lower(x, x, x).compile().as_text())


def order_of(text: str) -> str:
    """What runs one after the other: ( and ) are start and end of a transfer, ! one that nothing
    runs beside, f and b attention forward and backward, c a branch."""
    bodies: dict[str, list[str]] = {}
    name = entry = ""
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            name = head[2]
            entry = name if head[1] else entry
        bodies.setdefault(name, []).append(line)
    found = []
    for line in bodies[entry]:
        operation = re.search(r" = .*? ([a-z][\w\-]*)\(%", line)
        if operation is None:
            continue
        marks = {
            "collective-permute-start": "(",
            "collective-permute-done": ")",
            "collective-permute": "!",
            "conditional": "c",
        }
        if operation[1] in marks:
            found.append(marks[operation[1]])
        called = re.search(r"calls=%([\w.\-]+)", line)
        text_of_call = "\n".join([line, *bodies.get(called[1] if called else "", [])])
        if operation[1] in ("custom-call", "fusion"):
            target = re.search(r'custom_call_target="jax_fa3_(fwd|bwd)', text_of_call)
            found += target[1][0] if target else ""
    return "".join(found)


@pytest.mark.parametrize(
    ("devices", "layout", "precision"),
    [
        (2, "zigzag", "native"),
        (2, "zigzag", "fp8"),
        (4, "zigzag", "native"),
        (4, "contiguous", "fp8"),
    ],
)
def test_every_transfer_of_the_forward_pass_hides(
    devices: int, layout: str, precision: str
) -> None:
    order = order_of(compiled(devices, layout, precision, False))
    assert order.count("(") == devices - 1
    assert "!" not in order
    assert "()" not in order


def test_only_the_way_home_shows_in_the_backward_pass() -> None:
    order = order_of(compiled(2, "zigzag", "native", True))
    start, end = order[: order.index("b")], order[order.index("b") :]
    assert start == "(ff)ff("
    assert end in ("bb)bb()", "bb)bb!")
