"""WORKSPACE (Bazel 4 and 5) and MODULE.bazel (6 and later) give the build files the same things.

CI runs the first; what is checked of the second stands in it. These files are Python as far as its
parser looks, so that what they name can be compared.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD_FILES = [
    ROOT / "BUILD.bazel",
    ROOT / "bazel/installed.BUILD.tpl",
    *sorted((ROOT / "bazel").glob("*.b*")),
]


def calls(path):
    """[(function, positional strings, keywords with strings)] of the top level of a file."""
    found = []
    for node in ast.parse(path.read_text()).body:
        call = getattr(node, "value", None)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            strings = [a.value for a in call.args if isinstance(a, ast.Constant)]
            words = {
                k.arg: k.value.value for k in call.keywords if isinstance(k.value, ast.Constant)
            }
            found.append((call.func.id, strings, words))
    return found


def loaded_repositories():
    texts = [path.read_text() for path in BUILD_FILES]
    return {name for text in texts for name in re.findall(r'load\("@(\w+)//', text)}


def test_both_files_declare_what_is_loaded():
    loaded = loaded_repositories()
    assert {"installed", "rules_cc", "rules_python"} <= loaded
    workspace = {
        words["name"]
        for function, _, words in calls(ROOT / "WORKSPACE")
        if function in ("local_repository", "installed")
    }
    module = set()
    for function, strings, words in calls(ROOT / "MODULE.bazel"):
        if function == "bazel_dep":
            module.add(words["name"])
        elif function == "use_repo":
            module.update(strings)
    assert loaded <= workspace
    assert loaded == module


def test_both_files_register_the_same_toolchains():
    registered = [
        [strings for function, strings, _ in calls(ROOT / name) if function.startswith("register_")]
        for name in ("WORKSPACE", "MODULE.bazel")
    ]
    assert registered[0] == registered[1] != []


def test_the_module_extension_exists():
    ((file, name),) = [
        strings
        for function, strings, _ in calls(ROOT / "MODULE.bazel")
        if function == "use_extension"
    ]
    path = ROOT / file.removeprefix("//").replace(":", "/")
    assert re.search(rf"^{name} = module_extension\(", path.read_text(), flags=re.M)


@pytest.mark.parametrize("path", BUILD_FILES, ids=lambda path: path.name)
def test_rules_of_languages_are_loaded(path):
    """Bazel 8 has no built-in cc_ and py_ rules: each one that is used must be loaded."""
    text = path.read_text()
    used = set(re.findall(r"^\s*((?:cc|py)_\w+)\(", text, flags=re.M))
    loads = {name for block in re.findall(r"load\((.+?)\)", text) for name in block.split('"')}
    assert used <= loads, used - loads
