"""Shared by the tests of sharding."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax.sharding import Mesh, NamedSharding
from rules.support import attend

NEEDS_EIGHT = pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="needs eight CPU devices")
SIZES: dict[str, Any] = {"lead": (4,), "heads_q": 8, "heads_kv": 4}
NATIVE = attend(precision="native", is_causal=True)
PLAIN = attend("xla", precision="native", is_causal=True)


def put(mesh: Mesh, arrays: Any, *specs: Any) -> list[jax.Array]:
    return [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]


def spec_of(x: jax.Array) -> tuple[Any, ...]:
    spec = tuple(x.sharding.spec)
    return spec + (None,) * (x.ndim - len(spec))
