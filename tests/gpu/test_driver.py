"""What the driver of this machine says of itself: the kernels are refused where it is too old."""

from __future__ import annotations

import pytest

import jax_fa3
from jax_fa3 import _compat, _extension

pytestmark = pytest.mark.gpu


def test_driver_serves_the_cuda_of_the_kernels() -> None:
    driver, built = _compat.driver_cuda_version(), _extension.cuda_version()
    assert driver is not None
    assert built is not None
    assert driver // 1000 >= built // 1000
    assert f", CUDA {_extension.cuda_release(driver)}" in jax_fa3.show_config()
