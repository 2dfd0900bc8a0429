"""`import jax_fa3` works without the extension, without a GPU and under python -O."""

import importlib.metadata
import re
import sys
from pathlib import Path

import processes
import pytest

import jax_fa3
from jax_fa3 import _install

# A None in sys.modules makes the import system report the module as not found.
HIDE_EXTENSION = "import sys; sys.modules['jax_fa3._ext'] = None\n"


def run_python(code, tmp_path, *flags):
    """Runs `code` on the same jax_fa3 in a fresh interpreter, with a user's warnings as errors."""
    return processes.output_of(*flags, "-W", "error::UserWarning", "-c", code, cwd=tmp_path)


ATTEND = """
import jax.numpy as jnp, jax_fa3
x = jnp.ones((2, 3, 2, 64), jnp.bfloat16)
out = jax_fa3.attention(x, x, x, {options})
print(out.shape, bool((out == 1).all()))
"""


@pytest.mark.parametrize("flags", [(), ("-O",)], ids=["plain", "-O"])
def test_attention_works_without_the_extension(tmp_path, flags):
    code = HIDE_EXTENSION + ATTEND.format(options="precision='native'")
    assert run_python(code, tmp_path, *flags).strip() == "(2, 3, 2, 64) True"


def test_cuda_without_the_extension_says_why(tmp_path):
    attend = ATTEND.format(options="implementation='cuda'")
    code = HIDE_EXTENSION + (
        "try:\n"
        f"    exec({attend!r})\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    output = run_python(code, tmp_path)
    assert "NotImplementedError" in output or "RuntimeError" in output
    assert "_ext" in output


def test_import_starts_no_backend_and_loads_no_driver(tmp_path):
    code = (
        "import jax_fa3\n"
        "from jax._src import xla_bridge\n"
        "maps = open('/proc/self/maps').read()\n"
        "print(xla_bridge.backends_are_initialized(), 'libcuda.so' in maps)\n"
    )
    assert run_python(code, tmp_path).split() == ["False", "False"]


def test_import_asserts_nothing_at_run_time(tmp_path):
    """python -O strips asserts: the checks on arguments must still be there."""
    code = (
        "import jax.numpy as jnp, jax_fa3\n"
        "q, k = jnp.ones((2, 3, 2, 64), jnp.bfloat16), jnp.ones((2, 3, 2, 32), jnp.bfloat16)\n"
        "try:\n"
        "    jax_fa3.attention(q, k, k)\n"
        "except ValueError as error:\n"
        "    print('refused:', error)\n"
    )
    assert run_python(code, tmp_path, "-O").startswith("refused: attention: ")


def test_older_jax_is_named_with_the_cure(tmp_path):
    code = (
        "import jax\n"
        "jax.__version__, jax.__version_info__ = '0.9.2', (0, 9, 2)\n"
        "try:\n"
        "    import jax_fa3\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    expected = "jax_fa3: jax must be 0.10.2 or newer; got 0.9.2. Run `pip install -U jax`."
    assert run_python(code, tmp_path).strip() == expected


def test_oldest_jax_is_the_one_of_the_metadata():
    """The sentence above and pyproject.toml name one release."""
    source = Path(jax_fa3.__file__).with_name("_compat.py").read_text()
    oldest = re.search(r"jax must be (\S+) or newer", source)[1]
    assert f"jax.__version_info__ < ({oldest.replace('.', ', ')})" in source
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"jax>={oldest}"' in pyproject


class TestImportFailure:
    """Why the extension is not there, told from the files that are."""

    absent = ModuleNotFoundError("No module", name="jax_fa3._ext")

    @pytest.fixture(autouse=True)
    def nothing_installed(self, monkeypatch):
        monkeypatch.setattr(sys, "path", [])

    def test_no_file_and_no_note(self, tmp_path):
        reason = _install.import_failure(self.absent, tmp_path)
        assert reason.startswith("the compiled extension jax_fa3._ext is not in this installation;")
        assert "JAX_FA3_CUDA=ON pip install ." in reason

    def test_note_of_the_build_is_passed_on(self, tmp_path):
        (tmp_path / "_build_note.txt").write_text("no nvcc was found; install one.\n")
        reason = _install.import_failure(self.absent, tmp_path)
        assert reason == (
            "the compiled extension jax_fa3._ext is not in this installation: no nvcc was found; "
            "install one"
        )

    @pytest.mark.parametrize("name", ["_ext.abi3.so", "_build_note.txt"])
    def test_sources_that_hide_an_installation(self, tmp_path, monkeypatch, name):
        sources, installed = tmp_path / "checkout" / "jax_fa3", tmp_path / "site" / "jax_fa3"
        for folder in (sources, installed):
            folder.mkdir(parents=True)
        monkeypatch.setattr(sys, "path", ["", str(sources.parent), str(installed.parent)])
        assert "not in this installation;" in _install.import_failure(self.absent, sources)
        (installed / name).touch()
        assert _install.import_failure(self.absent, sources) == (
            f"the sources in {sources} hide the installation in {installed}; start Python in "
            "another folder"
        )

    def test_extension_of_another_python(self, tmp_path):
        (tmp_path / "_ext.cpython-38-x86_64-linux-gnu.so").touch()
        reason = _install.import_failure(self.absent, tmp_path)
        here = f"{sys.version_info[0]}.{sys.version_info[1]}"
        assert reason.startswith(
            "_ext.cpython-38-x86_64-linux-gnu.so was built for another Python than this "
            f"{here}; run `pip install"
        )

    def test_stable_abi_on_an_older_python(self, tmp_path, monkeypatch):
        (tmp_path / "_ext.abi3.so").touch()
        error = ImportError("undefined symbol: PyObject_GetTypeData")
        monkeypatch.setattr(sys, "version_info", (3, 11, 7))
        assert _install.import_failure(error, tmp_path).startswith(
            "_ext.abi3.so needs Python 3.12 or newer and this is 3.11; run `pip install"
        )
        monkeypatch.setattr(sys, "version_info", (3, 12, 1))
        assert "undefined symbol" in _install.import_failure(error, tmp_path)


def test_version_is_that_of_the_installed_package():
    try:
        version = importlib.metadata.version("jax_fa3")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs an installed jax_fa3; this is the source tree")
    assert jax_fa3.__version__ == version
