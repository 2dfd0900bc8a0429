"""What the built extension links, exports and declares."""

import ast
import ctypes.util
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jax_fa3
from jax_fa3 import _compat

SPEC = importlib.util.find_spec("jax_fa3._ext")
# A source tree may hold the extension of another Python: stable ABI means 3.12 or newer.
FOREIGN = SPEC is not None and SPEC.origin.endswith(".abi3.so") and sys.version_info < (3, 12)
pytestmark = pytest.mark.skipif(
    SPEC is None or FOREIGN,
    reason="needs jax_fa3._ext for this Python (an install with nvcc)",
)
needs_readelf = pytest.mark.skipif(
    shutil.which("readelf") is None, reason="needs readelf (binutils)"
)


@pytest.fixture(scope="module")
def ext():
    import jax_fa3._ext as module

    return module


def readelf(ext, *options):
    command = ["readelf", "--wide", *options, ext.__file__]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@needs_readelf
def test_links_no_cuda_library(ext):
    needed = re.findall(r"\(NEEDED\)\s+Shared library: \[(.+?)\]", readelf(ext, "--dynamic"))
    assert "libc.so.6" in needed
    assert not [name for name in needed if re.match(r"lib(cuda|nv|cublas)", name)], needed


@needs_readelf
def test_exports_its_init_function_and_nothing_else(ext):
    exported = [
        fields[7]
        for line in readelf(ext, "--dyn-syms").splitlines()
        if len(fields := line.split()) >= 8
        and fields[4] in ("GLOBAL", "WEAK", "UNIQUE")
        and fields[6] not in ("UND", "Ndx")
    ]
    assert exported == ["PyInit__ext"]


@needs_readelf
def test_is_stripped(ext):
    assert ".symtab" not in readelf(ext, "--sections")


def test_is_small(ext):
    """A wheel holds little else and compresses it to a third at most: far below the 20 MB limit."""
    assert Path(ext.__file__).stat().st_size < 27_000_000


def test_says_what_built_it(ext):
    for version in (ext.nvcc_version, ext.ptxas_version):
        assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert re.match(r"(GCC|Clang) \d+\.", ext.host_compiler)
    assert ext.gpu_architecture == "sm_90a"


def test_stub_names_what_the_module_holds(ext):
    stub = Path(importlib.util.find_spec("jax_fa3").origin).with_name("_ext.pyi")
    declared = set()
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            declared.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            declared.add(node.target.id)
    assert declared == {name for name in dir(ext) if not name.startswith("_")}


def test_stub_types_hold(ext):
    assert isinstance(ext.cuda_version, int)
    assert ext.cuda_version >= 12030
    assert [type(number) for number in ext.ffi_api_version] == [int, int]
    for name, handler in ext.registrations().items():
        assert name.startswith("jax_fa3_")
        assert type(handler).__name__ == "PyCapsule"


def test_every_target_has_a_handler(ext):
    handlers = ext.registrations()
    assert set(handlers) == {
        "jax_fa3_quantize",
        "jax_fa3_dequantize",
        "jax_fa3_dequantize_query",
        "jax_fa3_unrotate",
        "jax_fa3_fwd_fp8",
        "jax_fa3_quantize_fwd_fp8",
        "jax_fa3_fwd",
        "jax_fa3_bwd",
        "jax_fa3_bwd_fp8",
    }


def test_kernel_list_is_complete(ext):
    """One kernel per head_dim, dtype and softmax; every fact that `explain` shows is there."""
    kernels = ext.kernels()
    facts = {"name", "dtype", "head_dim", "block_q", "block_kv", "num_stages"}
    facts |= {"math_warpgroups", "cluster_size", "pipeline", "softmax"}
    assert all(set(kernel) == facts for kernel in kernels)
    names = [kernel["name"] for kernel in kernels]
    assert len(set(names)) == len(names)
    fp8 = {(k["dtype"], k["head_dim"]) for k in kernels if k["dtype"] in ("e4m3", "e5m2")}
    native = {(k["dtype"], k["head_dim"]) for k in kernels if k["dtype"] in ("bf16", "f16")}
    assert fp8 == {(dtype, d) for dtype in ("e4m3", "e5m2") for d in (64, 128, 256)}
    assert native == {(dtype, d) for dtype in ("bf16", "f16") for d in (64, 128, 256)}


def test_explain_names_the_cluster_size_of_the_call(ext, monkeypatch):
    """Where the tiles of a call do not pair, its CTAs share nothing."""
    monkeypatch.setattr(_compat, "cuda_capabilities", tuple)

    def of(seqlen, heads=3, **options):
        q, k = (jax.ShapeDtypeStruct((2, seqlen, n, 256), "bfloat16") for n in (heads, 3))
        return dict(jax_fa3.explain(q, k, k, **options).kernel)["cluster_size"]

    assert (of(1023), of(1024)) == (1, 2)
    assert (of(2048, is_causal=True), of(2048, 6, is_causal=True)) == (1, 2)
    assert of(2048, precision="native") == 1


def test_ffi_version_is_not_newer_than_the_installed_jaxlib(ext):
    header = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
    major, minor = (
        int(re.search(rf"#define XLA_FFI_API_{part}\s+(\d+)", header)[1])
        for part in ("MAJOR", "MINOR")
    )
    assert ext.ffi_api_version[0] == major
    assert ext.ffi_api_version[1] <= minor
    # The build takes its headers from the oldest jaxlib (pyproject.toml).
    if importlib.metadata.version("jaxlib") == "0.10.2":
        assert tuple(ext.ffi_api_version) == (major, minor) == (0, 3)


def test_imports_without_a_driver(ext):
    """The module is loaded by now; on a machine without a driver that is the proof."""
    if ctypes.util.find_library("cuda") is not None:
        pytest.skip("needs a machine without libcuda")
    assert ext.kernels()
