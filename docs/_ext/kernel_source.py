"""What the CUDA sources say about the forward kernels: their constants, layouts and barriers.

The site's tables and pictures are made from this, so they cannot disagree with the code. Only the
subset of C++ that these headers use is understood; anything else raises SourceError, which fails
the build of the site.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FWD = Path(__file__).parents[2] / "cuda" / "fwd"

_DECLARATION = re.compile(r"static constexpr (?:int|bool|float|Pipeline|Exp2) ([^;]+);")
_INSTANCE = re.compile(
    r"info<(?P<config>\w+)<ptx::(?P<element>\w+)(?:, Exp2::(?P<mode>\w+))?>>"
    r'\("(?P<dtype>\w+)", "(?P<softmax>\w+)"\)'
)


class SourceError(Exception):
    """The CUDA sources are no longer written the way this file reads them."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One forward kernel.

    Attributes:
      name: as `_ext.kernels()` spells it.
      dtype, softmax: of the same dict.
      constants: every constant of its config and its FwdTraits.
      layout: byte offsets of FwdSmem, and kBytes and kAllocation.
    """

    name: str
    dtype: str
    softmax: str
    constants: Mapping[str, Any]
    layout: Mapping[str, int]

    @property
    def pipeline(self) -> str:
        return str(self.constants["kPipeline"]).removeprefix("k").lower()

    def buffers(self) -> list[tuple[str, int]]:
        """(name, bytes) of everything in shared memory, in order of address."""
        c, at = self.constants, self.layout
        stages = c["kNumStages"]
        parts = [("q", at["kKeys"] - at["kQuery"])]
        parts += [(f"k[{s}]", (at["kValues"] - at["kKeys"]) // stages) for s in range(stages)]
        parts += [(f"v[{s}]", (at["kStaging"] - at["kValues"]) // stages) for s in range(stages)]
        parts += [("output staging", at["kBarriers"] - at["kStaging"])]
        parts += [("barriers", at["kBytes"] - at["kBarriers"])]
        return parts


@dataclasses.dataclass(frozen=True)
class Barrier:
    """A line of the barrier table above the kernel."""

    name: str
    arrivals: str
    waiter: str
    meaning: str


def kernels() -> list[Kernel]:
    """Every kernel that dispatch.cu lists, in its order."""
    dispatch, config_text, smem_text = (
        _without_comments((FWD / name).read_text(encoding="utf-8"))
        for name in ("dispatch.cu", "config.h", "smem.cuh")
    )
    found = []
    for match in _INSTANCE.finditer(dispatch):
        element = match["element"]
        known: dict[str, Any] = {"Element": element, "ElementType": element, "kMode": match["mode"]}
        known |= _evaluate(_body(config_text, match["config"]), known)
        known |= _evaluate(_body(config_text, "FwdTraits"), known)
        layout = _evaluate(_body(smem_text, "FwdSmem"), known)
        name = f"fwd_{match['dtype']}_d{known['kHeadDim']}_{match['softmax']}"
        found.append(Kernel(name, match["dtype"], match["softmax"], known, layout))
    if len(found) != dispatch.count("info<") or not found:
        raise SourceError("dispatch.cu: fwd_kernels() must list info<Config<ptx::Element>>(...)")
    return found


def barriers() -> list[Barrier]:
    """The mbarriers of the map above the kernel; v_full and v_empty stand "likewise"."""
    text = (FWD / "kernel.cuh").read_text(encoding="utf-8")
    table = re.search(r"// mbarriers +name +arrivals +waiter +meaning\n((?://  {6,}.*\n)+)", text)
    if table is None:
        raise SourceError("kernel.cuh: the map above the kernel has no table of mbarriers")
    rows = [re.split(r" {2,}", line[2:].strip()) for line in table[1].splitlines()]
    result = [Barrier(*row) for row in rows if len(row) == 4]
    likewise = [row[0].split(", ") for row in rows if row[1:] == ["likewise"]]
    if len(result) + len(likewise) != len(rows) or len(likewise) != 1:
        raise SourceError("kernel.cuh: a line of the table of mbarriers has not four columns")
    for name in likewise[0]:
        like = next(b for b in result if b.name == name.replace("v_", "k_"))
        meaning = like.meaning.replace("k stage", "v stage")
        result.append(Barrier(name, like.arrivals.replace(" k", " v"), like.waiter, meaning))
    return result


def _without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*", "", text)


def _body(text: str, struct: str) -> str:
    """What stands between the braces of a struct."""
    start = re.search(rf"struct {struct}\s*{{", text)
    if start is None:
        raise SourceError(f"no struct {struct} in config.h or smem.cuh")
    depth = 1
    for end in range(start.end(), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start.end() : end]
    raise SourceError(f"struct {struct} does not end")


def _evaluate(body: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """The constants declared in a struct's body, given those it may use."""
    values: dict[str, Any] = {}

    def same(match: re.Match[str]) -> str:
        return "true" if known[match[1]] == match[2] else "false"

    body = re.sub(r"std::is_same_v<(\w+), ptx::(\w+)>", same, body)
    for declaration in _DECLARATION.finditer(body):
        for part in declaration[1].split(","):
            name, separator, expression = part.partition("=")
            if not separator or expression.startswith("="):
                raise SourceError(f"cannot read the constant {part.strip()!r}")
            values[name.strip()] = _value(expression, {**known, **values})
    return values


def _value(expression: str, known: Mapping[str, Any]) -> Any:
    """A constant expression: arithmetic, comparisons, logic, ?: and enumerators."""
    text = " ".join(expression.split())
    text = re.sub(r"\b(?:Pipeline|Exp2)::(\w+)", r"'\1'", text)
    text = re.sub(r"\b(?:Config|Traits)::", "", text)
    text = re.sub(r"(\d)\.0f\b", r"\1.0", text)
    text = text.replace("&&", " and ").replace("||", " or ")
    text = re.sub(r"!(?!=)", " not ", text).replace("/", "//")
    names = {name: value for name, value in known.items() if name.startswith("k")}
    names |= {"true": True, "false": False}
    try:
        return eval(_conditional(text), {"__builtins__": {}}, names)  # our own sources
    except Exception as error:
        raise SourceError(f"cannot evaluate {' '.join(expression.split())!r}: {error}") from error


def _conditional(text: str) -> str:
    """`a ? b : c` as Python writes it; one may stand in the last branch of another."""
    condition, mark, rest = text.partition("?")
    if not mark:
        return text
    then, _, otherwise = rest.partition(":")
    return f"(({then}) if ({condition}) else ({_conditional(otherwise)}))"
