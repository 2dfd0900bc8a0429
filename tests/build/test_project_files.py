"""Facts that stand in one place only, and files that quote each other."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_build_uses_the_oldest_supported_jaxlib():
    """Built on newer FFI headers the extension would be refused by the oldest jaxlib we allow."""
    (pin,) = [r for r in PYPROJECT["build-system"]["requires"] if r.startswith("jaxlib")]
    (floor,) = [r for r in PYPROJECT["project"]["dependencies"] if r.startswith("jax>")]
    assert pin.split("==")[1] == floor.split(">=")[1]


def test_version_is_in_pyproject_only():
    version = re.escape(PYPROJECT["project"]["version"])
    files = [ROOT / "CMakeLists.txt", *ROOT.glob("jax_fa3/*.py"), *ROOT.glob("bindings/*")]
    assert [f.name for f in files if re.search(rf'["\s]{version}["\s]', f.read_text())] == []


def test_ci_finds_the_readme_test_command():
    """.ci/run takes its test command from README.md: the line that it looks for must be there."""
    pattern = re.search(r"readme_pattern='(.+)'", (ROOT / ".ci/run").read_text())[1]
    python_pattern = pattern.replace(r"\(", "(").replace(r"\)", ")")
    found = re.findall(python_pattern, (ROOT / "README.md").read_text(), flags=re.M)
    assert len(found) == 1
    assert found[0].startswith("pytest")


def test_tools_have_the_same_pins_everywhere():
    """The hooks call the pinned tools of the dev extra and bring no versions of their own."""
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"repo: (\S+)", hooks) == ["local"]
    assert all(
        "==" in requirement for requirement in PYPROJECT["project"]["optional-dependencies"]["dev"]
    )


FAKE_NVCC = """#!/bin/sh
while [ $# -gt 0 ]; do [ "$1" = -o ] && echo object > "$2"; shift; done
echo "$FAKE_MESSAGE" >&2
exit "$FAKE_STATUS"
"""


@pytest.fixture
def logged(tmp_path):
    """Runs the compile wrapper around a compiler that prints `message`."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(FAKE_NVCC)
    nvcc.chmod(0o755)

    def run(message, status=0):
        command = ["sh", str(ROOT / "scripts/nvcc_logged.sh"), str(tmp_path / "logs"), str(nvcc)]
        command += ["-c", "a.cu", "-o", str(tmp_path / "a.o")]
        env = {**os.environ, "FAKE_MESSAGE": message, "FAKE_STATUS": str(status)}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=env)

    return run


def test_compile_wrapper_keeps_the_report(logged, tmp_path):
    done = logged("ptxas info    : Used 168 registers")
    assert (done.returncode, done.stderr) == (0, "")
    (log,) = (tmp_path / "logs").iterdir()
    assert log.name.endswith("a.o.ptxas.log")
    assert "168 registers" in log.read_text()


@pytest.mark.parametrize("code", ["C7508", "C7510", "C7511", "C7512", "C7513", "C7514", "C7515"])
def test_compile_wrapper_fails_on_serialised_wgmma(logged, tmp_path, code):
    done = logged(f"ptxas info    : ({code}) Potential Performance Loss: wgmma serialized")
    assert done.returncode == 1
    assert code in done.stderr
    assert not (tmp_path / "a.o").exists()


def test_compile_wrapper_passes_on_warnings_and_errors(logged):
    done = logged("a.cu(3): error: expected a ';'", status=2)
    assert done.returncode == 2
    assert "expected a ';'" in done.stderr


def test_wgmma_header_is_up_to_date():
    command = [sys.executable, str(ROOT / "scripts/generate_wgmma.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def cmake_of_this_python():
    """The cmake beside this Python (dev extra), or None."""
    cmake = Path(sys.executable).parent / "cmake"
    return cmake if cmake.exists() else None


@pytest.mark.skipif(cmake_of_this_python() is None, reason="needs the cmake of the dev extra")
@pytest.mark.parametrize(
    ("switch", "code", "words"),
    [
        ("AUTO", 0, "this install has NO GPU kernels"),
        ("OFF", 0, "Configuring done"),
        ("ON", 1, "JAX_FA3_CUDA=ON but no CUDA compiler was found"),
        ("MAYBE", 1, "JAX_FA3_CUDA must be AUTO, ON or OFF; got 'MAYBE'"),
    ],
)
def test_configures_without_any_compiler(tmp_path, switch, code, words):
    # A make that does nothing: CMake wants one to write files for, no language is enabled.
    make = tmp_path / "make"
    make.write_text("#!/bin/sh\n")
    make.chmod(0o755)
    command = [cmake_of_this_python(), "-S", ROOT, "-B", tmp_path / "out", "-G", "Unix Makefiles"]
    command += [f"-DCMAKE_MAKE_PROGRAM={make}", f"-DJAX_FA3_CUDA={switch}"]
    env = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == code, done.stderr
    assert words in " ".join((done.stdout + done.stderr).split())
