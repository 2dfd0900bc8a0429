"""The build backend picks the right compiler and says in one sentence why a build failed."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("scikit_build_core", reason="needs scikit-build-core (extra 'dev')")


def load_backend():
    path = ROOT / "scripts" / "build_backend.py"
    spec = importlib.util.spec_from_file_location("build_backend", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


backend = load_backend()


def program(path, text="#!/bin/sh\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A Linux machine with a C++ compiler, without nvcc, and no choice made; its folder."""
    monkeypatch.chdir(ROOT)
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH", "CXX", "JAX_FA3_CUDA", "JAX_FA3_NVCC"):
        monkeypatch.delenv(name, raising=False)
    program(tmp_path / "bin" / "c++")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(backend, "TOOLKIT_FOLDER", str(tmp_path / "toolkit"))
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path


def compiler_requirements():
    return [r for r in backend.get_requires_for_build_wheel({}) if r.startswith("nvidia-")]


# ---- where the compiler comes from -----------------------------------------------------


def test_no_nvcc_brings_nvidias_packages(bare):
    assert compiler_requirements() == list(backend.PYPI_COMPILER)
    assert any(r.startswith("nvidia-cuda-nvcc==") for r in backend.PYPI_COMPILER)
    editable = backend.get_requires_for_build_editable({})
    assert editable[-len(backend.PYPI_COMPILER) :] == list(backend.PYPI_COMPILER)


@pytest.mark.parametrize("place", ["PATH", "CUDA_HOME", "CUDA_PATH", "toolkit"])
def test_nvcc_of_the_machine_is_used(bare, monkeypatch, place):
    folder = {"PATH": "bin", "toolkit": "toolkit"}.get(place, "cuda/bin")
    nvcc = program(bare / folder / "nvcc")
    if place.startswith("CUDA"):
        monkeypatch.setenv(place, str(bare / "cuda"))
    assert compiler_requirements() == []
    assert backend.compiler_settings({}) == {"cmake.define.CMAKE_CUDA_COMPILER": str(nvcc)}


def test_named_nvcc_is_left_to_cmake(bare, monkeypatch):
    program(bare / "bin" / "nvcc")
    monkeypatch.setenv("CUDACXX", "/else/where/nvcc")
    assert compiler_requirements() == []
    assert backend.compiler_settings({}) == {}
    monkeypatch.delenv("CUDACXX")
    named = {"cmake.define.CMAKE_CUDA_COMPILER": "/else/where/nvcc"}
    assert backend.compiler_settings(named) == {}


def test_pypi_wins_when_asked_for(bare, monkeypatch):
    program(bare / "bin" / "nvcc")
    monkeypatch.setenv("JAX_FA3_NVCC", "pypi")
    assert compiler_requirements() == list(backend.PYPI_COMPILER)
    nvcc = program(bare / "cu13" / "bin" / "nvcc")
    monkeypatch.setattr(backend, "pypi_root", lambda: bare / "cu13")
    assert backend.compiler_settings({}) == {"cmake.define.CMAKE_CUDA_COMPILER": str(nvcc)}


def test_nothing_is_brought_that_is_not_wanted(bare, monkeypatch):
    monkeypatch.setenv("JAX_FA3_CUDA", "OFF")
    assert compiler_requirements() == []
    monkeypatch.setenv("JAX_FA3_CUDA", "AUTO")
    monkeypatch.setenv("JAX_FA3_NVCC", "system")
    assert compiler_requirements() == []
    with pytest.raises(backend.CannotBuildError, match="JAX_FA3_NVCC=system forbids PyPI's; put"):
        backend.compiler_settings({})


def test_packages_that_are_not_there_are_named(bare, monkeypatch):
    monkeypatch.setattr(backend, "pypi_root", lambda: None)
    with pytest.raises(backend.CannotBuildError, match="pip install nvidia-cuda-nvcc=="):
        backend.compiler_settings({})


def test_no_cxx_compiler(bare, monkeypatch):
    (bare / "bin" / "c++").unlink()
    assert compiler_requirements() == []
    with pytest.raises(backend.CannotBuildError, match=r"no C\+\+ compiler .*; install g\+\+"):
        backend.compiler_settings({})
    monkeypatch.setenv("CXX", "mycxx -m64")
    with pytest.raises(backend.CannotBuildError, match=r"looked for mycxx\)"):
        backend.compiler_settings({})


def test_other_systems(bare, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert compiler_requirements() == []
    with pytest.raises(backend.CannotBuildError, match="on Linux only, and this is darwin"):
        backend.compiler_settings({})


@pytest.mark.parametrize("name", ["JAX_FA3_CUDA", "JAX_FA3_NVCC"])
def test_unknown_choice(bare, monkeypatch, name):
    monkeypatch.setenv(name, "maybe")
    with pytest.raises(SystemExit, match=rf"{name} must be one of .*; got 'maybe'\.$"):
        backend.get_requires_for_build_wheel({})


# ---- why it failed ---------------------------------------------------------------------

WRAPPED = """\
-- The CXX compiler identification is GNU 12.2.0
CMake Error at CMakeLists.txt:88 (message):
  jax_fa3: the XLA FFI headers (xla/ffi/api/ffi.h) are not in /opt/include;
  install jaxlib again.


-- Configuring incomplete, errors occurred!
"""


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (WRAPPED, "are not in /opt/include; install jaxlib again."),
        ("a.cu(3): warning: unused\na.cu(4): error: expected a ';'\n", "with 'a.cu(4): error: exp"),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_90a'", "with 'nvcc fatal   : Unsup"),
        ("a.cc:1:10: fatal error: x.h: No such file or directory", "fatal error: x.h: No such"),
        ("<command-line>: fatal error: cuda_runtime.h: No such file or directory", "no headers of"),
        ("error: could not write: No space left on device", "no space is left on the device"),
        ("g++: fatal error: Killed signal terminated program cc1plus", "Killed"),
        ("nothing that we know", "the build stopped; run `JAX_FA3_CUDA=ON pip install -v .`"),
    ],
)
def test_reason(output, words):
    sentence = backend.reason(output.splitlines())
    assert words in sentence
    assert "\n" not in sentence
    assert sentence.endswith(".")


def test_output_is_recorded_and_passed_on(capfd):
    with backend.recorded_output() as lines:
        subprocess.run(["sh", "-c", "echo from a child; echo error >&2"], check=True)
        os.write(1, b"from here\n")
    assert sorted(lines) == ["error", "from a child", "from here"]
    assert "from a child" in capfd.readouterr().out
    os.write(1, b"after\n")
    assert "after" in capfd.readouterr().out


# ---- whole builds with a compiler that fails -------------------------------------------


def build(tmp_path, *, prefix=(), setup="pass", **variables):
    """Runs build_wheel in a process of its own: (status, output, wheel or None)."""
    nvcc = program(
        tmp_path / "bad" / "nvcc", "#!/bin/sh\necho 'nvcc fatal : out of order' >&2\nexit 1\n"
    )
    code = (
        f"import sys; sys.path.insert(0, 'scripts'); import build_backend as b; {setup}; "
        f"b.build_wheel({str(tmp_path / 'dist')!r})"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_FA3_", "CUDA"))}
    env |= {"CUDACXX": str(nvcc), "PYTHONPATH": "", **variables}
    done = subprocess.run(
        [*prefix, sys.executable, "-c", code],
        cwd=ROOT,
        env={k: v for k, v in env.items() if v is not None},
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = sorted((tmp_path / "dist").glob("*.whl"))
    return done.returncode, done.stdout + done.stderr, wheels[0] if wheels else None


def note_of(wheel):
    """Why a wheel without kernels has none: one line."""
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as files:
        assert not [name for name in files.namelist() if name.endswith(".so")]
        note = files.read("jax_fa3/_build_note.txt").decode()
    assert note.count("\n") == 1
    return note


def with_mount(mount):
    """The start of a command line whose rest runs after that `mount`, which nobody else sees."""
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    if shutil.which("nvcc") is None or shutil.which("cmake") is None:
        pytest.skip("needs nvcc and cmake")
    if shutil.which("unshare") is None or subprocess.run([*command, "true"]).returncode:
        pytest.skip("needs the right to mount a file system in a namespace (unshare)")
    return command


def test_auto_falls_back_and_says_why(tmp_path):
    status, output, wheel = build(tmp_path)
    assert status == 0, output
    note = note_of(wheel)
    assert f"jax_fa3: installing WITHOUT GPU kernels: {note}" in output
    nvcc = tmp_path / "bad" / "nvcc"
    assert note.startswith(f"{nvcc} does not run (nvcc fatal : out of order); point CUDACXX at")


def test_no_nvcc_and_pypi_forbidden(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "c++").symlink_to(shutil.which("c++") or "c++")
    setup = f"b.TOOLKIT_FOLDER = {str(tmp_path)!r}"
    path = str(tmp_path / "bin")
    _, output, wheel = build(tmp_path, setup=setup, CUDACXX=None, PATH=path, JAX_FA3_NVCC="system")
    assert wheel is not None, output
    assert note_of(wheel) == (
        "no nvcc was found and JAX_FA3_NVCC=system forbids PyPI's; put nvcc 12.3 or newer on PATH, "
        "or unset JAX_FA3_NVCC.\n"
    )


def test_on_fails_with_the_same_sentence(tmp_path):
    status, output, wheel = build(tmp_path, JAX_FA3_CUDA="ON")
    assert (status, wheel) == (1, None)
    nvcc = tmp_path / "bad" / "nvcc"
    assert output.splitlines()[-1].startswith(f"jax_fa3: {nvcc} does not run (nvcc fatal")


def test_full_disk(tmp_path):
    """A real one: the build folder lies on a file system of 2 MB."""
    small = tmp_path / "small"
    small.mkdir()
    prefix = with_mount(f'mount -t tmpfs -o size=2m none "{small}"')
    _, output, wheel = build(
        tmp_path, prefix=prefix, TMPDIR=str(small), CUDACXX=shutil.which("nvcc")
    )
    assert wheel is not None, output
    assert note_of(wheel).startswith(
        f"no space is left on the device while building in {small}; free some or point TMPDIR at"
    )


def test_headers_of_cuda_are_missing(tmp_path):
    """A real nvcc that finds its folder of headers empty."""
    nvcc = shutil.which("nvcc") or "nvcc"
    prefix = with_mount(
        f"""folder=$({nvcc} --dryrun -x cu -c /dev/null -o /dev/null 2>&1 |
        sed -n 's/.*INCLUDES="-I\\([^"]*\\)".*/\\1/p') && mount -t tmpfs none "$folder" """
    )
    _, output, wheel = build(tmp_path, prefix=prefix, CUDACXX=nvcc)
    assert wheel is not None, output
    assert note_of(wheel) == (
        "nvcc found no headers of the CUDA runtime (cuda_runtime.h); install them beside it or "
        "point CUDACXX at an nvcc that has them.\n"
    )


def test_off_builds_a_pure_wheel_without_a_note(tmp_path):
    status, output, wheel = build(tmp_path, JAX_FA3_CUDA="OFF")
    assert status == 0, output
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as files:
        assert "jax_fa3/_build_note.txt" not in files.namelist()
        assert "jax_fa3/_install.py" in files.namelist()
