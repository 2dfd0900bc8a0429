"""Which path is chosen, what explain says, and every refusal of implementation="cuda"."""

from __future__ import annotations

import dataclasses
import functools
import platform
import re
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rules.support import attend, inputs

import jax_fa3
from jax_fa3 import Quantization, _compat, _extension, _install

KERNELS = [
    {
        "name": f"fwd_{dtype}_d{head_dim}_{softmax}",
        "dtype": dtype,
        "head_dim": head_dim,
        "block_q": 128,
        "block_kv": 128,
        "num_stages": 2,
        "math_warpgroups": 2,
        "cluster_size": 1,
        "pipeline": "pingpong",
        "softmax": softmax,
    }
    for dtype in ("e4m3", "e5m2")
    for head_dim in (64, 128, 256)
    for softmax in ("exact", "linear")
]


def structs(head_dim: int = 64, dtype: Any = jnp.bfloat16, head_dim_v: int | None = None) -> Any:
    def one(seqlen: int, heads: int, dim: int) -> Any:
        return jax.ShapeDtypeStruct((2, seqlen, heads, dim), dtype)

    return one(5, 6, head_dim), one(7, 3, head_dim), one(7, 3, head_dim_v or head_dim)


UNSERVED = [
    ({}, {"head_dim": 96}, "head_dim 96 is not served by the kernels .64, 128 and 256 are"),
    ({}, {"head_dim_v": 32}, "a head_dim of value that differs.*32 and 64"),
    ({}, {"dtype": jnp.float32}, "float32 inputs are not served.*cast to bfloat16"),
    ({"window_size": (3, 0)}, {}, r"window_size=\(3, 0\) is not served"),
    ({"logits_soft_cap": 20.0}, {}, "logits_soft_cap=20.0 is not served"),
    ({"sinks": jnp.zeros(6)}, {}, "sinks is not served"),
    ({"key_seqlens": jnp.array([3, 4])}, {}, "key_seqlens is not served"),
    ({"mask": jnp.ones((5, 7), bool)}, {}, "mask is not served"),
    ({"bias": jnp.ones((5, 7))}, {}, "bias is not served"),
    (
        {"quantization": Quantization.per_tensor()},
        {},
        'quantization with query="tensor" is not served.*"row"',
    ),
    (
        {"quantization": Quantization(accumulate="one_level")},
        {},
        'quantization with accumulate="one_level"',
    ),
]


@pytest.mark.usefixtures("extension")
class TestWithExtension:
    @pytest.mark.parametrize(("options", "shapes", "reason"), UNSERVED)
    def test_unserved_requests(self, options: Any, shapes: Any, reason: str) -> None:
        args = structs(**shapes)
        plan = jax_fa3.explain(*args, **options)
        assert plan.path == "xla"
        assert plan.targets == ()
        with pytest.raises(NotImplementedError, match=f"^attention: {reason}"):
            jax_fa3.explain(*args, implementation="cuda", **options)
        arrays = [jnp.ones(x.shape, x.dtype) for x in args]
        with pytest.raises(NotImplementedError, match=reason):
            attend("cuda", **options)(*arrays)
        jax.eval_shape(attend(**options), *args)

    def test_served_requests(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_extension, "kernels", lambda: KERNELS)
        plan = jax_fa3.explain(*structs(head_dim=128), quantization=Quantization.fast())
        assert plan.path == "cuda"
        assert plan.targets == ("jax_fa3_quantize_fwd_fp8",)
        assert dict(plan.kernel)["name"] == "fwd_e4m3_d128_linear"
        text = str(plan)
        for part in (
            "fwd_e4m3_d128_linear",
            "block_q: 128",
            "num_stages: 2",
            "cluster_size: 1",
        ):
            assert part in text
        assert "query and key rotated" in text
        assert "not xla: the kernel serves this request" in text
        with pytest.raises(dataclasses.FrozenInstanceError):
            plan.path = "xla"  # type: ignore[misc]

    def test_build_without_the_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_extension, "kernels", lambda: KERNELS)
        plan = jax_fa3.explain(*structs(), precision="native")
        assert plan.path == "xla"
        assert "this build has no kernel for head_dim 64 and bf16" in str(plan)

    @pytest.mark.parametrize("capability", ["8.0", "8.9", "10.0", "12.0"])
    def test_other_architectures(self, monkeypatch: pytest.MonkeyPatch, capability: str) -> None:
        monkeypatch.setattr(_compat, "cuda_capabilities", lambda: (capability,))
        plan = jax_fa3.explain(*structs())
        assert plan.path == "xla"
        assert f"have {capability}" in str(plan)
        with pytest.raises(RuntimeError, match=rf"9\.0 \(Hopper\) exactly.*have {capability}"):
            attend("cuda")(*inputs())
        monkeypatch.setattr(_compat, "cuda_capabilities", lambda: (capability, "9.0"))
        assert jax_fa3.explain(*structs()).path == "cuda"

    @pytest.mark.parametrize(
        ("built", "driver", "served"),
        [
            (13000, 12040, False),
            (13020, 13000, True),
            (12080, 13000, True),
            (12080, 12030, True),
            (13000, None, True),
        ],
    )
    def test_older_drivers(
        self, monkeypatch: pytest.MonkeyPatch, built: int, driver: int | None, served: bool
    ) -> None:
        """One that has no CUDA of the kernels' major number would fail at the launch."""
        monkeypatch.setattr(_extension, "cuda_version", lambda: built)
        monkeypatch.setattr(_compat, "driver_cuda_version", lambda: driver)
        assert jax_fa3.explain(*structs()).path == "cuda"  # no device here: nothing to refuse
        monkeypatch.setattr(_compat, "cuda_capabilities", lambda: ("9.0",))
        plan = jax_fa3.explain(*structs())
        assert plan.path == ("cuda" if served else "xla")
        said = (
            "the kernels were built with CUDA 13.0 and the driver serves CUDA 12.4; update the "
            "driver, or build jax_fa3 with nvcc 12"
        )
        assert (said in str(plan)) != served

    def test_cuda_demanded_for_arrays_on_the_cpu(self) -> None:
        with pytest.raises(RuntimeError, match=r"query must be on a CUDA device.*got it on cpu"):
            attend("cuda")(*inputs())

    def test_implementation_xla_is_followed(self) -> None:
        plan = jax_fa3.explain(*structs(), implementation="xla")
        assert plan.path == "xla"
        assert 'implementation="xla" was asked for' in str(plan)

    def test_unknown_keyword(self) -> None:
        with pytest.raises(
            TypeError, match=r"explain: keywords must be those of attention; got foo"
        ):
            jax_fa3.explain(*structs(), foo=1)


class TestWithoutExtension:
    @pytest.fixture(autouse=True)
    def missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_extension, "_EXT", None)
        monkeypatch.setattr(_extension, "_UNAVAILABLE_REASON", "the extension is not built")

    def test_none_runs_the_xla_path(self) -> None:
        args = inputs()
        out, _ = jax.jit(attend(precision="native"))(*args)
        assert out.shape == args[0].shape
        assert "the extension is not built" in str(jax_fa3.explain(*args))

    def test_cuda_raises(self) -> None:
        with pytest.raises(RuntimeError, match="cannot run: the extension is not built"):
            attend("cuda")(*inputs())
        with pytest.raises(RuntimeError, match="cannot run: the extension is not built"):
            jax.eval_shape(attend("cuda"), *structs())

    def test_show_config(self) -> None:
        text = jax_fa3.show_config()
        assert jax.__version__ in text
        assert "the extension is not built" in text
        assert "runtime 0." in text

    def test_show_config_answers_a_bug_report(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """System, packages, driver, the variables that change JAX, and what built the kernels."""
        monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/here")
        fake = _FakeExtension((0, 3), _extension.TARGETS)
        monkeypatch.setattr(_extension, "_EXT", fake)
        monkeypatch.setattr(_extension, "_UNAVAILABLE_REASON", None)
        text = jax_fa3.show_config()
        lines = dict(re.split(" {2,}", line, maxsplit=1) for line in text.splitlines())
        assert platform.platform() in lines["python"]
        assert f"numpy {np.__version__}" in lines["packages"]
        assert "nvcc 13.0.88" in text
        assert "ptxas 13.0.80" in text
        assert "host compiler GCC 12.2.0" in text
        assert "CUDA runtime 13.0, for sm_90a" in text
        assert "extension 0.3" in lines["XLA FFI"]
        assert "XLA_FLAGS=--xla_dump_to=/here" in lines["settings"]
        assert "jax_enable_x64=" in lines["settings"]
        assert lines["driver"]


class TestDriver:
    ask = staticmethod(_compat.driver_cuda_version.__wrapped__)

    def fake(self, monkeypatch: pytest.MonkeyPatch, status: int, version: int) -> None:
        def get_version(pointer: Any) -> int:
            pointer._obj.value = version
            return status

        library = types.SimpleNamespace(cuDriverGetVersion=get_version)
        monkeypatch.setattr(_compat.ctypes, "CDLL", {"libcuda.so.1": library}.__getitem__)

    def test_what_it_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake(monkeypatch, 0, 12040)
        assert self.ask() == 12040

    @pytest.mark.parametrize(("status", "version"), [(0, 0), (3, 12040)])
    def test_no_answer(self, monkeypatch: pytest.MonkeyPatch, status: int, version: int) -> None:
        self.fake(monkeypatch, status, version)
        assert self.ask() is None


class _FakeExtension:
    cuda_version = 13000
    nvcc_version = "13.0.88"
    ptxas_version = "13.0.80"
    host_compiler = "GCC 12.2.0"
    gpu_architecture = "sm_90a"

    def __init__(self, version: tuple[int, int], targets: tuple[str, ...]) -> None:
        self.ffi_api_version = version
        self.targets = targets

    def registrations(self) -> dict[str, Any]:
        return dict.fromkeys(self.targets)

    def kernels(self) -> list[dict[str, Any]]:
        return []


class TestLoading:
    """Registration never happens when it could be refused later, while JAX starts its backend."""

    def load(self, monkeypatch: pytest.MonkeyPatch, fake: Any) -> tuple[Any, list[str]]:
        registered: list[str] = []

        def imported(name: str) -> Any:
            if isinstance(fake, Exception):
                raise fake
            return fake

        monkeypatch.setattr(_extension.importlib, "import_module", imported)
        monkeypatch.setattr(
            jax.ffi, "register_ffi_target", lambda name, *a, **k: registered.append(name)
        )
        return _extension._load()[1], registered

    def test_fitting_versions_register(self, monkeypatch: pytest.MonkeyPatch) -> None:
        major, minor = _compat.runtime_ffi_version() or (0, 0)
        for version in ((major, minor), (major, minor - 1)):
            reason, registered = self.load(monkeypatch, _FakeExtension(version, _extension.TARGETS))
            assert reason is None
            assert registered == list(_extension.TARGETS)

    def test_newer_extension_is_not_registered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        major, minor = _compat.runtime_ffi_version() or (0, 0)
        for version in ((major, minor + 1), (major + 1, 0)):
            reason, registered = self.load(monkeypatch, _FakeExtension(version, _extension.TARGETS))
            assert f"built for XLA FFI {version[0]}.{version[1]}" in reason
            assert f"has {major}.{minor}" in reason
            assert registered == []

    def test_missing_handler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        version = _compat.runtime_ffi_version() or (0, 0)
        reason, registered = self.load(monkeypatch, _FakeExtension(version, _extension.TARGETS[:1]))
        assert f"lacks the handlers {', '.join(_extension.TARGETS[1:])}" in reason
        assert registered == []

    def test_not_installed_and_not_loadable(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        # The package under test may hold an extension of another Python, which is named first.
        said = functools.partial(_install.import_failure, folder=tmp_path)
        monkeypatch.setattr(_install, "import_failure", said)
        monkeypatch.setattr(_install, "hidden_installation", lambda folder: None)
        absent = ModuleNotFoundError("No module", name="jax_fa3._ext")
        assert "not in this installation" in self.load(monkeypatch, absent)[0]
        broken = ImportError("undefined symbol: foo")
        assert "does not load: undefined symbol: foo" in self.load(monkeypatch, broken)[0]
