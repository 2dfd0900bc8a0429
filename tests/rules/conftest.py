"""Meshes of eight CPU devices, and both partitioners."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    devices = np.array(jax.devices("cpu")[:8]).reshape(2, 4)
    return Mesh(devices, ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture(scope="module")
def explicit() -> Mesh:
    devices = np.array(jax.devices("cpu")[:8]).reshape(2, 4)
    return Mesh(devices, ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)


@pytest.fixture(params=[True, False], ids=["shardy", "gspmd"])
def partitioner(request: pytest.FixtureRequest) -> Iterator[bool]:
    name = "jax_use_shardy_partitioner"
    before = getattr(jax.config, name)
    jax.config.update(name, request.param)
    yield request.param
    jax.config.update(name, before)
