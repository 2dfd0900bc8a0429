"""Builds the host side of the CUDA headers as a module, with the host compiler alone."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import jax
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCES = {
    "host_module.cc": "-O0",
    "host_quantize.cc": "-O1",  # runs the kernels
    "host_graphs.cc": "-O0",
}


def cuda_include() -> Path | None:
    """Folder of the CUDA headers: a toolkit's, or that of NVIDIA's Python packages."""
    nvcc = shutil.which("nvcc")
    candidates = [
        Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include",
        *([Path(nvcc).resolve().parents[1] / "include"] if nvcc else []),
        *sorted(Path("/usr/local").glob("cuda-*/include")),
        *sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/include")),
    ]
    for folder in candidates:
        if all((folder / name).exists() for name in ("cuda_runtime_api.h", "cuda_fp8.h")):
            return folder
    return None


def build(folder: Path, include: Path, pybind11_include: str) -> Path:
    compiler = os.environ.get("CXX", "g++")
    flags = [
        *("-std=c++17", "-fPIC", "-ffp-contract=off"),
        *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
        *(f"-I{ROOT}", f"-I{sysconfig.get_path('include')}"),
        *("-isystem", str(include), "-isystem", pybind11_include),
        *("-isystem", jax.ffi.include_dir()),
    ]
    inputs = [*HERE.glob("*.cc"), *HERE.glob("*.h"), *ROOT.glob("cuda/common/*.h")]
    inputs += [*ROOT.glob("cuda/quantize/*.*h"), *ROOT.glob("cuda/ptx/*.cuh")]
    inputs += [*ROOT.glob("bindings/*.h")]
    text = "".join([compiler, sys.version, *flags]).encode()
    text += b"".join(path.read_bytes() for path in sorted(inputs))
    work = folder / hashlib.sha256(text).hexdigest()[:16]
    library = work / f"host_module{sysconfig.get_config_var('EXT_SUFFIX')}"
    if library.exists():
        return library
    work.mkdir(parents=True, exist_ok=True)
    objects = {name: work / f"{os.getpid()}-{name}.o" for name in SOURCES}
    running = [
        subprocess.Popen(
            [compiler, optimize, *flags, "-c", str(HERE / name), "-o", str(objects[name])]
        )
        for name, optimize in SOURCES.items()
    ]
    assert {process.wait() for process in running} == {0}, "the host module does not compile"
    partial = work / f"{os.getpid()}.so"
    subprocess.run(
        [compiler, "-shared", *map(str, objects.values()), "-o", str(partial)], check=True
    )
    partial.replace(library)  # atomic: several test workers may build at once
    return library


@pytest.fixture(scope="session")
def host(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory):
    """The module host_module."""
    pybind11 = pytest.importorskip("pybind11", reason="needs pybind11 (extra 'test')")
    include = cuda_include()
    if include is None:
        pytest.skip("needs the CUDA headers cuda_runtime_api.h and cuda_fp8.h (set CUDA_HOME)")
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("needs a C++ compiler (g++, or set CXX)")
    cache = getattr(pytestconfig, "cache", None)
    folder = cache.mkdir("host_module") if cache else tmp_path_factory.mktemp("host_module")
    library = build(folder, include, pybind11.get_include())
    spec = importlib.util.spec_from_file_location("host_module", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
