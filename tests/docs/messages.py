"""Every message that the sources can raise, as a template: "…" stands for a filled-in value."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
GAP = "…"
# Functions whose returned strings say why no kernel runs or is built; messages are made of them.
REASONS = {"_unserved", "missing_reason", "_load", "import_failure", "_missing_host", "reason"}
# Functions that raise their last argument later, in a transformation or while lowering.
DEFERRED = {"on_lowering", "reverse_mode_only", "first_order_only"}


class Message(NamedTuple):
    """A template and where it stands."""

    text: str
    place: str


def all_messages() -> list[Message]:
    """Of the Python package, of the handlers and of the build."""
    found = []
    for path in [*sorted((ROOT / "jax_fa3").rglob("*.py")), ROOT / "scripts" / "build_backend.py"]:
        found += python_messages(path.read_text(encoding="utf-8"), _name(path))
    for path in sorted((ROOT / "bindings").iterdir()):
        found += handler_messages(path.read_text(encoding="utf-8"), _name(path))
    for path in sorted((ROOT / "bazel").glob("*.bzl")):
        found += starlark_messages(path.read_text(encoding="utf-8"), _name(path))
    for path in (ROOT / "CMakeLists.txt", *sorted((ROOT / "cmake").glob("*.cmake"))):
        found += cmake_messages(path.read_text(encoding="utf-8"), _name(path))
    return found


def python_messages(source: str, place: str) -> list[Message]:
    """Texts that `raise` and `DEFERRED` are given, and that `REASONS` return."""
    tree = ast.parse(source)
    assigned = [
        (target.id, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    names = [name for name, _ in assigned]
    is_text = (ast.Constant, ast.JoinedStr, ast.BinOp)
    constants = {
        name: value
        for name, value in assigned
        if names.count(name) == 1 and isinstance(value, is_text)
    }
    nodes: list[tuple[int, ast.expr]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            nodes.append((node.lineno, node.exc.args[-1]))
        if isinstance(node, ast.Call) and _called(node) in DEFERRED:
            nodes.append((node.lineno, node.args[-1]))
        if isinstance(node, ast.FunctionDef) and node.name in REASONS:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return) and inner.value is not None:
                    value = inner.value
                    nodes.append(
                        (inner.lineno, value.elts[-1] if isinstance(value, ast.Tuple) else value)
                    )
    texts = ((line, _without_prefix(_template(node, constants))) for line, node in nodes)
    return [
        Message(text, f"{place}:{line}") for line, text in texts if text.replace(GAP, "").strip()
    ]


def starlark_messages(source: str, place: str) -> list[Message]:
    """Texts of fail(...) in a Bazel file, which Python's parser reads."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _called(node) == "fail":
            value = node.args[0]
            if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mod):
                value = value.left
            text = _without_prefix(_template(value, {}).replace("%s", GAP))
            found.append(Message(text, f"{place}:{node.lineno}"))
    return found


def _called(node: ast.Call) -> str:
    """The last name of the function called."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _template(node: ast.expr, constants: dict[str, ast.expr]) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part, constants) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        known = isinstance(node.value, ast.Name) and node.value.id in constants
        return _template(node.value, constants) if known else GAP
    if isinstance(node, ast.Name) and node.id in constants:
        return _template(constants[node.id], constants)
    if isinstance(node, ast.BinOp):
        return _template(node.left, constants) + _template(node.right, constants)
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    if is_method and node.func.attr == "format":
        return re.sub(r"\{+\w*\}+", GAP, _template(node.func.value, constants))
    return GAP


def _without_prefix(text: str) -> str:
    """The template less the name of the function that speaks."""
    return re.sub(rf"^(?:[\w.]+|{GAP}): ", "", text)


def handler_messages(source: str, place: str) -> list[Message]:
    """Texts that the FFI handlers return: what `require`, `fail` and `ffi::Error` are given."""
    found = []
    for match in re.finditer(r"\b(?:require|fail|ffi::Error)\(", source):
        literals = [text for text, _ in _literals(_arguments(source, match.end()))]
        text = GAP.join(literals)
        if len(text) > 10:
            line = source.count("\n", 0, match.start()) + 1
            found.append(Message(re.sub(rf"^{GAP}?: ", "", text), f"{place}:{line}"))
    return found


def cmake_messages(source: str, place: str) -> list[Message]:
    """Texts of message(FATAL_ERROR ...) and message(WARNING ...)."""
    found = []
    for match in re.finditer(r"\bmessage\((?:FATAL_ERROR|WARNING)", source):
        text = "".join(text for text, _ in _literals(_arguments(source, match.end())))
        line = source.count("\n", 0, match.start()) + 1
        text = re.sub(r"\$\{\w+\}", GAP, text).removeprefix("jax_fa3: ")
        found.append(Message(text, f"{place}:{line}"))
    return found


def _arguments(source: str, start: int) -> str:
    """From start to the bracket that closes the call, brackets inside strings left out."""
    quoted = [span for _, span in _literals(source[start:])]
    depth = 1
    for index, character in enumerate(source[start:]):
        if any(first <= index < last for first, last in quoted):
            continue
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return source[start : start + index]
    raise ValueError("a call does not end")


def _literals(source: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """String literals and where they lie."""
    for match in re.finditer(r'"((?:[^"\\\n]|\\.)*)"', source):
        yield match[1].replace('\\"', '"'), match.span()


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))
