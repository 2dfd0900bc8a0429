"""`show_config`: what is installed, what the kernels need, and why they cannot run if they
cannot."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import jax

from jax_fa3 import _compat, _explain, _extension

# What else decides how JAX and the kernels behave.
_PACKAGES = ("numpy", "ml_dtypes", "flax", "jax-cuda12-plugin", "jax-cuda13-plugin")
_VARIABLES = ("XLA_FLAGS", "CUDA_VISIBLE_DEVICES")
_VARIABLE_PREFIX = "JAX_"
_DRIVER = Path("/proc/driver/nvidia/version")


def show_config() -> str:
    """Versions, devices and the state of the compiled extension, as text to print or paste.

    Starts JAX's backends, since it lists the devices. Never raises for a missing extension or GPU:
    it says what is missing.

    Returns: several lines, "name  value".
    """
    lines = [
        _line("jax_fa3", _version("jax_fa3")),
        _line("python", f"{platform.python_version()}, {platform.platform()}"),
        _line("jax, jaxlib", f"{_version('jax')}, {_version('jaxlib')}"),
        _line("packages", _packages()),
        _line(
            "XLA FFI",
            f"runtime {_dotted(_compat.runtime_ffi_version())}, extension "
            f"{_dotted(_extension.built_ffi_version())}",
        ),
        _line("extension", _extension_state()),
        _line("driver", _driver()),
        _line("settings", _settings()),
        _line("default backend", _compat.default_backend()),
    ]
    for device in jax.local_devices():
        capability = getattr(device, "compute_capability", None)
        suffix = "" if capability is None else f", compute capability {capability}"
        lines.append(_line(f"device {device.id}", f"{device.device_kind}{suffix}"))
    lines.append(_line("kernels", _kernels()))
    for facts in _extension.kernels():
        lines.append("  " + ", ".join(f"{key}={value}" for key, value in facts.items()))
    return "\n".join(lines)


def _line(name: str, value: str) -> str:
    return f"{name:<15}  {value}"


def _packages() -> str:
    found = [(name, _version(name)) for name in _PACKAGES]
    return ", ".join(f"{name} {version}" for name, version in found if version[0].isdigit())


def _extension_state() -> str:
    reason = _extension.unavailable_reason()
    if reason is not None:
        return f"not usable: {reason}"
    built = ", ".join(f"{name} {value}" for name, value in _extension.build_facts().items())
    return f"registered; built with {built}" if built else "registered"


def _driver() -> str:
    """The first line of what the NVIDIA kernel module says of itself, and the CUDA it serves."""
    try:
        module = _DRIVER.read_text(encoding="utf-8").split("\n")[0].removeprefix("NVRM version: ")
    except OSError:
        return "no NVIDIA kernel module is loaded"
    cuda = _compat.driver_cuda_version()
    return module if cuda is None else f"{module}, CUDA {_extension.cuda_release(cuda)}"


def _settings() -> str:
    """Variables of JAX and XLA in this process, and 64-bit mode, which code can switch too."""
    names = sorted(
        name for name in os.environ if name in _VARIABLES or name.startswith(_VARIABLE_PREFIX)
    )
    x64 = [f"jax_enable_x64={jax.config.read('jax_enable_x64')}"]
    return ", ".join(x64 + [f"{name}={os.environ[name]}" for name in names])


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
