"""The wheel gate accepts good wheels and rejects every kind of bad one (made-up wheels)."""

import importlib.util
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "wheel_gate.py"


def load_gate():
    spec = importlib.util.spec_from_file_location("wheel_gate", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gate = load_gate()

ABI3 = "jax_fa3-1.2-cp312-abi3-manylinux_2_34_x86_64.whl"
CP311 = "jax_fa3-1.2-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"
LIBRARIES = {
    ABI3: "jax_fa3/_ext.abi3.so",
    CP311: "jax_fa3/_ext.cpython-311-x86_64-linux-gnu.so",
}


def members(name):
    rest = ["LICENSE", "RECORD"]
    return [
        *(f"jax_fa3/{required}" for required in gate.REQUIRED),
        *(f"jax_fa3-1.2.dist-info/{file}" for file in rest),
        LIBRARIES[name],
    ]


@pytest.mark.parametrize("name", LIBRARIES)
def test_good_wheel_passes(tmp_path, name, capsys):
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        for member in members(name):
            wheel.writestr(member, "text")
    assert gate.main([str(tmp_path / name)]) == 0
    assert f"of 20  {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("jax_fa3-1.2-cp312-abi3-linux_x86_64.whl", "must be manylinux"),
        ("jax_fa3-1.2-cp312-abi3-manylinux_2_39_x86_64.whl", "glibc 2.34 or older"),
        ("jax_fa3-1.2-cp313-cp313-manylinux_2_34_x86_64.whl", "cp311-cp311 or cp312-abi3; got cp3"),
        ("jax_fa3-1.2-py3-none-any.whl", "got py3-none"),
        ("other-1.2-cp312-abi3-manylinux_2_34_x86_64.whl", "must be named"),
    ],
)
def test_bad_name_fails(name, words):
    assert any(words in failure for failure in gate.check_name(name))


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("jax_fa3.libs/libstdc++.so.6", "must hold jax_fa3 alone"),
        ("tests/conftest.py", "must hold jax_fa3 alone"),
        ("jax_fa3/_ext.cpython-312-x86_64-linux-gnu.so", "must hold one library"),
    ],
)
def test_extra_file_fails(extra, words):
    assert any(words in failure for failure in gate.check_contents(ABI3, [*members(ABI3), extra]))


@pytest.mark.parametrize("index", range(len(members(ABI3))))
def test_missing_file_fails(index):
    kept = members(ABI3)
    gone = kept.pop(index)
    expected = 0 if gone.endswith("RECORD") else 1
    assert len(gate.check_contents(ABI3, kept)) == expected


def test_library_of_another_python_fails():
    (failure,) = gate.check_contents(ABI3, [LIBRARIES[CP311], *members(ABI3)[:-1]])
    assert "must hold one library" in failure


def test_size():
    assert gate.check_size(ABI3, gate.SIZE_LIMIT) == []
    (failure,) = gate.check_size(ABI3, gate.SIZE_LIMIT + 1)
    assert "at most 20,000,000 bytes; got 20,000,001" in failure
    assert gate.SIZE_LIMIT == 20_000_000  # what we promise


def test_no_wheel_is_an_error(capsys):
    assert gate.main([]) == 2
    assert "name the wheels" in capsys.readouterr().err
