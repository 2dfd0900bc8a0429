"""`show_config`: what is installed, what the kernels need, and why they cannot run if they
cannot."""

from __future__ import annotations

import platform
from importlib import metadata

import jax

from jax_fa3 import _compat, _explain, _ffi


def show_config() -> str:
    """Versions, devices and the state of the compiled extension, as text to print or paste.

    Starts JAX's backends, since it lists the devices.
    """
    lines = [
        f"jax_fa3          {_version('jax_fa3')}",
        f"python           {platform.python_version()}",
        f"jax, jaxlib      {_version('jax')}, {_version('jaxlib')}",
        f"XLA FFI          runtime {_dotted(_compat.runtime_ffi_version())}, extension "
        f"{_dotted(_ffi.built_ffi_version())}",
        f"extension        {_extension()}",
        f"default backend  {_compat.default_backend()}",
    ]
    for device in jax.local_devices():
        capability = getattr(device, "compute_capability", None)
        suffix = "" if capability is None else f", compute capability {capability}"
        lines.append(f"device {device.id:<9} {device.device_kind}{suffix}")
    lines.append(f"kernels          {_kernels()}")
    for facts in _ffi.kernels():
        lines.append("  " + ", ".join(f"{key}={value}" for key, value in facts.items()))
    return "\n".join(lines)


def _extension() -> str:
    reason = _ffi.unavailable_reason()
    if reason is not None:
        return f"not usable: {reason}"
    built = _ffi.cuda_version()
    return "registered" if built is None else f"registered, built with CUDA {built}"


def _kernels() -> str:
    reason = _explain.missing_reason()
    if reason is not None:
        return f"cannot run: {reason}"
    if not _compat.cuda_capabilities():
        return "can be lowered for CUDA; this process has no CUDA device to run them on"
    return "can run"


def _dotted(version: tuple[int, int] | None) -> str:
    return "unknown" if version is None else f"{version[0]}.{version[1]}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed (source tree)"
