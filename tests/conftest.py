"""Settings of every test: eight CPU devices, and skips that say what they need."""

from __future__ import annotations

import gc
import os

# Before the first import of jax: sharding tests need several devices of one host.
_FLAG = "--xla_force_host_platform_device_count=8"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()

import pytest  # noqa: E402

from jax_fa3 import _compat, _extension  # noqa: E402

_GPUS_NEEDED = {"gpu": 1, "multigpu": 2}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests whose GPUs, or whose compiled extension, are not here."""
    for item in items:
        needed = max(
            (count for mark, count in _GPUS_NEEDED.items() if item.get_closest_marker(mark)),
            default=0,
        )
        if needed == 0:
            continue
        found = sum(capability == "9.0" for capability in _compat.cuda_capabilities())
        if found < needed:
            reason = f"needs {needed} GPU(s) of compute capability 9.0; found {found}"
            item.add_marker(pytest.mark.skip(reason=reason))
        elif _extension.unavailable_reason() is not None:
            reason = f"needs the compiled extension: {_extension.unavailable_reason()}"
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Spares the garbage collector what was imported: three percent of the time of a run."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extension counts as registered and no CUDA device as present.

    Then `attention` takes the kernel's stack (custom_vjp, vmap and sharding rules) on any machine:
    a program lowered for the CPU runs its XLA branch, one lowered for CUDA holds the custom calls.
    """
    monkeypatch.setattr(_extension, "_EXT", None)
    monkeypatch.setattr(_extension, "_UNAVAILABLE_REASON", None)
    monkeypatch.setattr(_compat, "cuda_capabilities", tuple)
