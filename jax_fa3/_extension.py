"""The compiled extension: its targets (named only here), their registration and its own facts.

Importing this file registers the handlers when the compiled extension is there and fits the
installed jaxlib. It never asks for a device. When registration is not possible,
`unavailable_reason()` says why.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, Final

import jax
import jax.export

from jax_fa3 import _compat, _install

TARGET_QUANTIZE: Final = "jax_fa3_quantize"
TARGET_DEQUANTIZE: Final = "jax_fa3_dequantize"
TARGET_DEQUANTIZE_QUERY: Final = "jax_fa3_dequantize_query"
TARGET_FWD_FP8: Final = "jax_fa3_fwd_fp8"
TARGET_QUANTIZE_FWD_FP8: Final = "jax_fa3_quantize_fwd_fp8"
TARGET_FWD: Final = "jax_fa3_fwd"
TARGET_BWD: Final = "jax_fa3_bwd"
TARGET_BWD_FP8: Final = "jax_fa3_bwd_fp8"
TARGET_UNROTATE: Final = "jax_fa3_unrotate"
TARGETS: Final = (
    TARGET_QUANTIZE,
    TARGET_DEQUANTIZE,
    TARGET_DEQUANTIZE_QUERY,
    TARGET_FWD_FP8,
    TARGET_QUANTIZE_FWD_FP8,
    TARGET_FWD,
    TARGET_BWD,
    TARGET_BWD_FP8,
    TARGET_UNROTATE,
)


def _load() -> tuple[ModuleType | None, str | None]:
    """Imports the extension and registers its targets: (module, None) or (None, reason)."""
    try:
        ext = importlib.import_module("jax_fa3._ext")
    except ImportError as error:
        return None, _install.import_failure(error)
    built = tuple(ext.ffi_api_version)
    runtime = _compat.runtime_ffi_version()
    if runtime is None:
        return None, "the FFI version of the installed jaxlib could not be read from its headers"
    # An older handler runs on a newer jaxlib of the same major version, never the reverse; a queued
    # registration that is refused would break JAX itself, so it is not attempted.
    if built[0] != runtime[0] or built[1] > runtime[1]:
        return None, (
            f"jax_fa3._ext was built for XLA FFI {built[0]}.{built[1]}, the installed jaxlib has "
            f"{runtime[0]}.{runtime[1]}; install a newer jaxlib or rebuild jax_fa3 against this one"
        )
    handlers = ext.registrations()
    missing = [target for target in TARGETS if target not in handlers]
    if missing:
        return None, f"jax_fa3._ext lacks the handlers {', '.join(missing)}; rebuild jax_fa3"
    for target in TARGETS:
        jax.ffi.register_ffi_target(target, handlers[target], platform="CUDA", api_version=1)
    return ext, None


_EXT, _UNAVAILABLE_REASON = _load()


def unavailable_reason() -> str | None:
    """Why the CUDA targets are not registered, or None when they are."""
    return _UNAVAILABLE_REASON


def kernels() -> list[dict[str, Any]]:
    """Facts about each kernel in the extension (name, tile, stages, ...); [] without it."""
    return [] if _EXT is None else list(_EXT.kernels())


def is_paired(
    *, block_q: int, seqlen_q: int, seqlen_k: int, group_size: int, is_causal: bool
) -> bool:
    """Whether CTAs of a call form clusters, where its kernel has a cluster_size of 2."""
    return _EXT is not None and bool(
        _EXT.is_paired(
            block_q=block_q,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            group_size=group_size,
            is_causal=is_causal,
        )
    )


def cuda_version() -> int | None:
    """CUDA version the extension was built with (13000 = 13.0); None without it."""
    return None if _EXT is None else int(_EXT.cuda_version)


def cuda_release(version: int) -> str:
    """13020 as "13.2"."""
    return f"{version // 1000}.{version % 1000 // 10}"


def build_facts() -> dict[str, str]:
    """What the extension was built with: compilers, CUDA runtime, GPU architecture; {} without
    it."""
    if _EXT is None:
        return {}
    return {
        "nvcc": _EXT.nvcc_version,
        "ptxas": _EXT.ptxas_version,
        "host compiler": _EXT.host_compiler,
        "CUDA runtime": cuda_release(_EXT.cuda_version),
        "for": _EXT.gpu_architecture,
    }


def built_ffi_version() -> tuple[int, int] | None:
    """XLA FFI version the extension was built for; None without it."""
    return None if _EXT is None else (int(_EXT.ffi_api_version[0]), int(_EXT.ffi_api_version[1]))


def export_disabled_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What `jax.export.export` needs as disabled_checks to accept this package's custom calls.

    Exported programs name the targets "jax_fa3_quantize", "jax_fa3_dequantize",
    "jax_fa3_dequantize_query", "jax_fa3_fwd_fp8", "jax_fa3_quantize_fwd_fp8", "jax_fa3_fwd",
    "jax_fa3_bwd", "jax_fa3_bwd_fp8" and "jax_fa3_unrotate"; load them in a process that has
    imported a jax_fa3 with the same targets.

    Returns: one check for each target.
    """
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in TARGETS]
