"""Sphinx extension: the docstrings' short form of a section, "Returns: what", as a field list.

Napoleon reads a section only when its name stands alone on a line; the package writes short ones
on the line of the name.
"""

from __future__ import annotations

import re
from typing import Any

_FIELDS = {"Returns": ":returns:", "Raises": ":raises:", "Args": ":param the arguments:"}
_SHORT = re.compile(r"(Args|Raises|Returns|Transformations|Numerics|Source): (\S.*)")


def expanded(lines: list[str]) -> list[str]:
    """The lines with "Section: text" (continued by indented lines) in a form that Sphinx reads."""
    result: list[str] = []
    for line in lines:
        short = _SHORT.fullmatch(line)
        if short is None:
            result.append(line)
            continue
        name, text = short.groups()
        if name in _FIELDS:
            result += ["", f"{_FIELDS[name]} {text}"]
        else:
            result += ["", f"{name}:", f"  {text}"]
    return result


def _process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    del app, what, name, obj, options
    lines[:] = expanded(lines)


def setup(app: Any) -> dict[str, bool]:
    # Before napoleon, which listens with the default priority of 500.
    app.connect("autodoc-process-docstring", _process, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
