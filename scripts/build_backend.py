"""The build backend (PEP 517): scikit-build-core, plus the choice of the CUDA compiler.

What it adds to scikit-build-core, by two environment variables:

JAX_FA3_CUDA   AUTO (default)  build the kernels; where that fails, install without them. The wheel
                               then holds the reason, which `jax_fa3.show_config()` prints.
               ON              build the kernels or fail.
               OFF             pure Python.
JAX_FA3_NVCC   auto (default)  the nvcc of this machine; without one, NVIDIA's packages from PyPI.
               pypi            NVIDIA's packages from PyPI, whatever the machine has.
               system          the nvcc of this machine, never PyPI's.

The nvcc of this machine is the first of: CUDACXX, PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from scikit_build_core import build as _scikit_build
from scikit_build_core.build import (  # the hooks that need nothing of ours
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = Mapping[str, Any]

# The release that the kernels were tuned and measured with; another one gives other machine code.
PYPI_COMPILER = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
)
TOOLKIT_FOLDER = "/usr/local/cuda/bin"
NOTE = "jax_fa3/_build_note.txt"  # in a wheel without kernels: why it has none
SEE_MORE = "run `JAX_FA3_CUDA=ON pip install -v .` to see the whole build"


class CannotBuildError(Exception):
    """Why the kernels cannot be built: a sentence with its cure."""


# ---- what the user asked for -----------------------------------------------------------


def _choice(name: str, choices: tuple[str, ...]) -> str:
    value = os.environ.get(name) or choices[0]
    if value not in choices:
        raise SystemExit(f"jax_fa3: {name} must be one of {', '.join(choices)}; got '{value}'.")
    return value


def _cuda() -> str:
    return _choice("JAX_FA3_CUDA", ("AUTO", "ON", "OFF"))


def _source() -> str:
    return _choice("JAX_FA3_NVCC", ("auto", "pypi", "system"))


# ---- which compilers there are ---------------------------------------------------------


def _named_nvcc(settings: Settings) -> str | None:
    named = settings.get("cmake.define.CMAKE_CUDA_COMPILER") or os.environ.get("CUDACXX")
    return str(named) if named else None


def system_nvcc(settings: Settings) -> str | None:
    """The nvcc of this machine, or None. One that the user named is taken unseen."""
    if named := _named_nvcc(settings):
        return named
    folders = [
        Path(os.environ[name], "bin") for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ
    ]
    search = os.pathsep.join(
        [os.environ.get("PATH", os.defpath), *map(str, folders), TOOLKIT_FOLDER]
    )
    return shutil.which("nvcc", path=search)


def pypi_root() -> Path | None:
    """The folder of NVIDIA's compiler packages in this Python, or None."""
    try:
        spec = importlib.util.find_spec("nvidia.cu13")
    except ModuleNotFoundError:
        return None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if os.access(Path(folder, "bin", "nvcc"), os.X_OK):
            return Path(folder)
    return None


def _missing_host() -> str | None:
    """What this machine lacks so that no nvcc could help, as a sentence."""
    if sys.platform != "linux":
        return f"the kernels build on Linux only, and this is {sys.platform}; use a Linux machine."
    compilers = (
        [os.environ["CXX"].split()[0]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    )
    if not any(shutil.which(name) for name in compilers):
        return (
            f"no C++ compiler was found (looked for {', '.join(compilers)}); install g++ "
            "and install jax_fa3 again."
        )
    return None


def _wants_pypi(settings: Settings) -> bool:
    switch, source = _cuda(), _source()
    if switch == "OFF" or _missing_host() is not None:
        return False
    return source == "pypi" or (source == "auto" and system_nvcc(settings) is None)


def compiler_settings(settings: Settings) -> dict[str, str]:
    """The scikit-build-core settings that select nvcc; raises CannotBuildError without one."""
    if (why := _missing_host()) is not None:
        raise CannotBuildError(why)
    if not _wants_pypi(settings):
        if _named_nvcc(settings):
            return {}  # CMake reads it where we did
        nvcc = system_nvcc(settings)
        if nvcc is None:
            raise CannotBuildError(
                "no nvcc was found and JAX_FA3_NVCC=system forbids PyPI's; put nvcc 12.3 or newer "
                "on PATH, or unset JAX_FA3_NVCC."
            )
        return {"cmake.define.CMAKE_CUDA_COMPILER": nvcc}
    root = pypi_root()
    if root is None:
        raise CannotBuildError(
            "no nvcc was found, and NVIDIA's compiler packages are not in the build environment; "
            f"without build isolation run `pip install {' '.join(PYPI_COMPILER)}` first."
        )
    return {"cmake.define.CMAKE_CUDA_COMPILER": str(root / "bin" / "nvcc")}


# ---- what went wrong -------------------------------------------------------------------


@contextlib.contextmanager
def recorded_output() -> Iterator[list[str]]:
    """Passes the output of this process and its children on, and keeps its lines too."""
    lines: list[str] = []
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    read_end, write_end = os.pipe()

    def pump() -> None:
        with open(read_end, encoding="utf-8", errors="replace") as stream:
            for line in stream:
                lines.append(line.rstrip("\n"))
                os.write(saved[0], line.encode())

    reader = threading.Thread(target=pump)
    reader.start()
    os.dup2(write_end, 1)
    os.dup2(write_end, 2)
    os.close(write_end)
    try:
        yield lines
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(saved[0], 1)  # the last writers of the pipe go, so that the reader ends
        os.dup2(saved[1], 2)
        reader.join()
        os.close(saved[0])
        os.close(saved[1])


def reason(lines: list[str]) -> str:
    """One sentence, with its cure, on why the build with this output failed."""
    if any("No space left on device" in line for line in lines):
        return (
            f"no space is left on the device while building in {tempfile.gettempdir()}; free some "
            "or point TMPDIR at another disk."
        )
    if any("cuda_runtime.h: No such file" in line for line in lines):
        return (
            "nvcc found no headers of the CUDA runtime (cuda_runtime.h); install them beside it or "
            "point CUDACXX at an nvcc that has them."
        )
    complaints = _cmake_errors(lines)
    ours = [text for text in complaints if text.startswith("jax_fa3: ")]
    if ours:
        return ours[0].removeprefix("jax_fa3: ")
    compile_error = re.compile(r"error\s*:|#error|nvcc fatal|Killed|command not found")
    for text in [line.strip() for line in lines if compile_error.search(line)] + complaints:
        return f"the build stopped with '{text}'; {SEE_MORE}."
    return f"the build stopped; {SEE_MORE}."


def _cmake_errors(lines: list[str]) -> list[str]:
    """The messages of CMake's errors, each on one line as it was written."""
    messages: list[list[str]] = []
    inside = False
    for line in lines:
        if line.startswith("CMake Error"):
            inside = True
            messages.append([])
        elif inside and line.startswith("  "):
            messages[-1].append(line.strip())
        elif line.strip():
            inside = False
    return [" ".join(" ".join(words).split()) for words in messages if words]


# ---- the hooks -------------------------------------------------------------------------


def _build(
    hook: Callable[..., str],
    wheel_directory: str,
    config_settings: Settings | None,
    metadata_directory: str | None,
) -> str:
    settings = dict(config_settings or {})
    switch = _cuda()
    if switch == "OFF":
        return hook(wheel_directory, settings, metadata_directory)
    try:
        choice = compiler_settings(settings)
        with recorded_output() as lines:
            try:
                return hook(wheel_directory, {**choice, **settings}, metadata_directory)
            except (SystemExit, OSError) as error:
                lines.append(str(error))
        why = reason(lines)
    except CannotBuildError as error:
        why = str(error)
    if switch == "ON":
        raise SystemExit(f"jax_fa3: {why}")
    return _build_pure(hook, wheel_directory, settings, why)


def _build_pure(
    hook: Callable[..., str], wheel_directory: str, settings: Settings, why: str
) -> str:
    """A wheel without kernels that says why it has none; its tag says that it fits any machine."""
    print(f"jax_fa3: installing WITHOUT GPU kernels: {why}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder, "note.txt")
        note.write_text(why + "\n", encoding="utf-8")
        pure = {
            "wheel.cmake": "false",
            "wheel.py-api": "py3",
            f"wheel.force-include.{note}": NOTE,
        }
        kept = {k: v for k, v in settings.items() if not k.startswith("cmake.")}
        # No metadata_directory: the tag differs from the one prepared for a wheel with kernels.
        return hook(wheel_directory, {**kept, **pure}, None)


def build_wheel(
    wheel_directory: str,
    config_settings: Settings | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Builds a wheel; see the top of this file."""
    return _build(_scikit_build.build_wheel, wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: Settings | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Builds an editable wheel; see the top of this file."""
    return _build(
        _scikit_build.build_editable, wheel_directory, config_settings, metadata_directory
    )


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    """What scikit-build-core asks for, and the compiler where the machine has none."""
    requires = list(_scikit_build.get_requires_for_build_wheel(dict(config_settings or {})))
    return requires + list(PYPI_COMPILER if _wants_pypi(config_settings or {}) else ())


def get_requires_for_build_editable(config_settings: Settings | None = None) -> list[str]:
    """As get_requires_for_build_wheel."""
    requires = list(_scikit_build.get_requires_for_build_editable(dict(config_settings or {})))
    return requires + list(PYPI_COMPILER if _wants_pypi(config_settings or {}) else ())
