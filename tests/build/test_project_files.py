"""Facts that stand in one place only, and files that quote each other."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from importlib import metadata
from pathlib import Path

import pytest
import yaml

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


def test_asm_stands_in_cuda_ptx_alone():
    sources = [f for f in ROOT.glob("cuda/**/*") if f.suffix in (".cu", ".cuh", ".h")]
    found = {f.parent.name for f in sources if re.search(r"\basm\b", f.read_text())}
    assert found == {"ptx"}


@pytest.mark.parametrize(
    ("name", "command"),
    [("install_pattern", "pip install . && python -m jax_fa3"), ("test_pattern", "pytest ")],
)
def test_ci_finds_the_commands_of_the_readme(name, command):
    """.ci/run takes them from README.md: one line each, as it looks for them."""
    pattern = re.search(rf"{name}='(.+)'", (ROOT / ".ci/run").read_text())[1]
    python_pattern = pattern.replace(r"\(", "(").replace(r"\)", ")")
    (found,) = re.findall(python_pattern, (ROOT / "README.md").read_text(), flags=re.M)
    assert found.startswith(command)


def pins(*extras):
    """Version of each tool of these extras; every one must be pinned."""
    wanted = [r for extra in extras for r in PYPROJECT["project"]["optional-dependencies"][extra]]
    assert [r for r in wanted if "==" not in r] == []
    return dict(requirement.split("==") for requirement in wanted)


def test_hooks_call_the_pinned_tools():
    """The hooks bring no versions of their own, and .ci/run checks style and types through them."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repo["repo"] for repo in hooks] == ["local"]
    entries = [hook["entry"] for hook in hooks[0]["hooks"]]
    assert {hook["language"] for hook in hooks[0]["hooks"]} == {"system"}
    assert {entry.split()[0] for entry in entries} == {"ruff", "clang-format", "mypy"}
    assert {"pre-commit", "ruff", "clang-format", "mypy"} <= set(pins("dev"))
    ci = (ROOT / ".ci" / "run").read_text()
    assert 'pre-commit" run --all-files' in ci
    assert re.findall(r"\$tools/(ruff|mypy|clang-format)", ci) == []


def test_installed_tools_are_the_pinned_ones():
    wanted = pins("dev", "docs")
    installed = {name: found for name in wanted if (found := version_of(name)) is not None}
    if not installed:
        pytest.skip("needs a tool of the dev or docs extra")
    assert installed == {name: wanted[name] for name in installed}


def version_of(package):
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@pytest.mark.parametrize("form", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml")))
def test_issue_forms_ask_for_the_configuration(form):
    fields = yaml.safe_load(form.read_text())["body"]
    (config,) = [field for field in fields if field.get("id") == "config"]
    assert "jax_fa3.show_config()" in config["attributes"]["description"]
    assert config["validations"]["required"] == (form.stem != "feature_request")


def test_pull_requests_ask_for_the_configuration():
    text = (ROOT / ".github" / "pull_request_template.md").read_text()
    assert "jax_fa3.show_config()" in text


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


@pytest.fixture
def configure(tmp_path):
    """Configures with the given defines and variables: (status, output on one line)."""
    cmake = cmake_of_this_python()
    if cmake is None:
        pytest.skip("needs the cmake of the dev extra")
    # A make that does nothing: nothing is built here but CMake wants one.
    make = tmp_path / "make"
    make.write_text("#!/bin/sh\n")
    make.chmod(0o755)

    def run(*defines, **variables):
        command = [cmake, "-S", ROOT, "-B", tmp_path / "out", "-G", "Unix Makefiles"]
        command += [f"-DCMAKE_MAKE_PROGRAM={make}", *(f"-D{define}" for define in defines)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    return run


def test_configuring_without_a_cuda_compiler(configure, tmp_path):
    status, output = configure(
        "CMAKE_FIND_ROOT_PATH=/nowhere",
        "CMAKE_FIND_ROOT_PATH_MODE_PROGRAM=ONLY",
        PATH=str(tmp_path),
    )
    assert status == 1
    assert (
        "jax_fa3: no CUDA compiler was found, looking for nvcc; put nvcc 12.3 or newer on PATH"
        in output
    )


def nvcc_of_release(folder, version):
    """A program that says what nvcc of that release says, and compiles nothing."""
    nvcc = folder / "nvcc"
    said = f"Cuda compilation tools, release {version.rsplit('.', 1)[0]}, V{version}"
    nvcc.write_text(f"#!/bin/sh\necho '{said}'\n")
    nvcc.chmod(0o755)
    return str(nvcc)


@pytest.fixture
def nvcc(tmp_path):
    """Enough of an nvcc for what is checked before CUDA is enabled."""
    return nvcc_of_release(tmp_path, "13.0.88")


@pytest.mark.parametrize("version", ["11.8.89", "12.2.140"])
def test_older_nvcc_is_refused(configure, tmp_path, version):
    """In our words: CMake's trial of an nvcc that does not know sm_90a ends with its own."""
    nvcc = nvcc_of_release(tmp_path, version)
    status, output = configure(CUDACXX=nvcc, PATH=os.environ["PATH"])
    assert status == 1
    assert (
        f"jax_fa3: nvcc must be 12.3 or newer; got '{version}' ({nvcc}). Point CUDACXX at" in output
    ), output


def test_other_architecture_is_refused(configure, nvcc):
    status, output = configure("CMAKE_CUDA_ARCHITECTURES=80", CUDACXX=nvcc, PATH=os.environ["PATH"])
    assert status == 1
    assert "CMAKE_CUDA_ARCHITECTURES must be 90a-real" in output
    assert "got '80'" in output


def test_missing_jaxlib_and_missing_ffi_headers_are_named(configure, nvcc, tmp_path):
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    status, output = configure(f"Python_EXECUTABLE={python}", CUDACXX=nvcc, PATH=os.environ["PATH"])
    assert status == 1
    assert f"has the XLA FFI headers, was not found for {python}; install it" in output
    (site_packages,) = (tmp_path / "venv" / "lib").glob("python3*/site-packages")
    include = site_packages / "jaxlib" / "include"
    include.mkdir(parents=True)
    (site_packages / "jaxlib" / "__init__.py").touch()
    status, output = configure(f"Python_EXECUTABLE={python}", CUDACXX=nvcc, PATH=os.environ["PATH"])
    assert status == 1
    assert f"(xla/ffi/api/ffi.h) are not in {include}; install jaxlib again." in output


def test_missing_python_headers_are_named(configure, nvcc, tmp_path):
    nowhere = tmp_path / "include"
    status, output = configure(
        f"Python_EXECUTABLE={sys.executable}",
        f"Python_INCLUDE_DIR={nowhere}",
        CUDACXX=nvcc,
        PATH=os.environ["PATH"],
    )
    assert status == 1
    assert "(Python.h) were not found for" in output
    assert "on Debian the package python3-dev." in output


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")
def test_kernels_of_other_sources_are_refused(configure, tmp_path):
    library = tmp_path / "libjax_fa3_kernels.a"
    defines = f"Python_EXECUTABLE={sys.executable}", f"JAX_FA3_KERNELS_LIBRARY={library}"
    status, output = configure(*defines, PATH=os.environ["PATH"])
    assert status == 1
    assert f"{library} does not exist" in output
    library.touch()
    library.with_suffix(".a.sources").write_text("0" * 64)
    status, output = configure(*defines, PATH=os.environ["PATH"])
    assert status == 1
    assert "was not built from the sources in cuda/" in output
