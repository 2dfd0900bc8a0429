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

CUDA = Path(__file__).parents[2] / "cuda"

_DECLARATION = re.compile(r"(?:static|inline) constexpr (?:int|bool|float|Pipeline|Exp2) ([^;]+);")
_INSTANCE = re.compile(
    r"info<(?P<config>\w+)<ptx::(?P<element>\w+)(?:, Exp2::(?P<mode>\w+))?>>"
    r'\("(?P<dtype>\w+)", "(?P<softmax>\w+)"\)'
)


class SourceError(Exception):
    """The CUDA sources are no longer written the way this file reads them."""


# FwdSmem: what starts at an offset, and the constant that says in how many equal parts it is cut.
_BUFFERS = {
    "kQuery": ("q", "kQueryStages"),
    "kKeys": ("k", "kNumStages"),
    "kValues": ("v", "kNumStages"),
    "kStaging": ("output staging", ""),
    "kFactors": ("factors", ""),
    "kTiles": ("tiles", ""),
    "kKeyScales": ("key scales", ""),
    "kBarriers": ("barriers", ""),
}


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
        """As `_ext.kernels()` spells it."""
        return str(self.constants["kPipeline"]).removeprefix("k").lower().replace("serial", "none")

    def buffers(self) -> list[tuple[str, int]]:
        """(name, bytes) of everything in shared memory, in order of address."""
        starts = [name for name in self.layout if name in _BUFFERS]
        parts = []
        for name, end in zip(starts, [*starts[1:], "kBytes"], strict=True):
            size = self.layout[end] - self.layout[name]
            label, count_name = _BUFFERS[name]
            count = self.constants.get(count_name, 1)
            labels = [label] if count == 1 else [f"{label}[{part}]" for part in range(count)]
            parts += [(label, size // count) for label in labels if size]
        return parts


@dataclasses.dataclass(frozen=True)
class Barrier:
    """A line of the barrier table above the kernel."""

    name: str
    arrivals: str
    waiter: str
    meaning: str


@dataclasses.dataclass(frozen=True)
class Step:
    """One thing that a math warpgroup does to a block, in the order of the map above the kernel.

    Attributes:
      kind: "issue" (a product for the tensor cores), "wait" (for one), "softmax" or "other".
      what: the product issued or waited for ("S", "acc"), else "".
      formula: of an issued product, with (j) and (j+1) for the blocks, else "".
      releases: the buffer that is handed back after a wait ("k", "v"), else "".
    """

    kind: str
    what: str = ""
    formula: str = ""
    releases: str = ""


def kernels() -> list[Kernel]:
    """Every kernel that dispatch.cu lists, in its order."""
    dispatch, config_text, smem_text, layout_text = (
        re.sub(r"//[^\n]*", "", (CUDA / name).read_text(encoding="utf-8"))
        for name in ("fwd/dispatch.cu", "fwd/config.h", "fwd/smem.cuh", "common/layout.h")
    )
    common = _evaluate(layout_text, {})
    found = []
    for match in _INSTANCE.finditer(dispatch):
        element = match["element"]
        known: dict[str, Any] = {"Element": element, "ElementType": element, "kMode": match["mode"]}
        known |= common
        known |= _evaluate(_body(config_text, match["config"]), known)
        known |= _evaluate(_body(config_text, "FwdTraits"), known)
        layout = _evaluate(_body(smem_text, "FwdSmem"), known)
        name = f"fwd_{match['dtype']}_d{known['kHeadDim']}_{match['softmax']}"
        found.append(Kernel(name, match["dtype"], match["softmax"], known, layout))
    if len(found) != dispatch.count("info<") or not found:
        raise SourceError("dispatch.cu: fwd_kernels() must list info<Config<ptx::Element>>(...)")
    return found


def barriers(text: str | None = None) -> list[Barrier]:
    """The mbarriers of the map above the kernel; v_full and v_empty stand "likewise"."""
    if text is None:
        text = (CUDA / "fwd" / "kernel.cuh").read_text(encoding="utf-8")
    table = re.search(r"// mbarriers +name +arrivals +waiter +meaning\n((?://  {6,}.*\n)+)", text)
    if table is None:
        raise SourceError("kernel.cuh: the map above the kernel has no table of mbarriers")
    rows: list[list[str]] = []
    for line in table[1].splitlines():
        columns = re.split(r" {2,}", line[2:].strip())
        if len(columns) == 1 and rows:  # a meaning goes on
            rows[-1][-1] += f" {columns[0]}"
        else:
            rows.append(columns)
    result = [Barrier(*row) for row in rows if len(row) == 4]
    likewise = [row[0].split(", ") for row in rows if row[1:] == ["likewise"]]
    if len(result) + len(likewise) != len(rows) or len(likewise) != 1:
        raise SourceError("kernel.cuh: a line of the table of mbarriers has not four columns")
    for name in likewise[0]:
        like = next(b for b in result if b.name == name.replace("v_", "k_"))
        meaning = like.meaning.split(",")[0].replace("k stage", "v stage")
        result.append(Barrier(name, like.arrivals.replace(" k", " v"), like.waiter, meaning))
    return result


def steps(text: str | None = None) -> list[Step]:
    """The order of a step of the overlapped pipelines, from the map above the kernel."""
    if text is None:
        text = (CUDA / "fwd" / "kernel.cuh").read_text(encoding="utf-8")
    order = re.search(r"// Order +one step of the kIntra pipeline, .*:\n((?://  {13,}.*\n)+)", text)
    if order is None:
        raise SourceError("kernel.cuh: the map above the kernel has no order of a kIntra step")
    words = " ".join(line[2:].strip() for line in order[1].splitlines())
    found = [_step(phrase.strip()) for phrase in words.split(";")]
    issued = [step.what for step in found if step.kind == "issue"]
    waited = [step.what for step in found if step.kind == "wait"]
    if len(issued) != 2 or sorted(issued) != sorted(waited) or len(set(issued)) != 2:
        raise SourceError("kernel.cuh: a kIntra step must issue two products and wait for each")
    return found


def _step(phrase: str) -> Step:
    if issue := re.fullmatch(r"issue (\w+) \(?\+?\)?= (.+)", phrase):
        formula = re.sub(r"_\{([^}]+)\}|_(\w)", lambda m: f"({m[1] or m[2]})", issue[2])
        return Step("issue", issue[1], formula.replace("^T", "ᵀ"))
    if wait := re.fullmatch(r"wait for (\w+), release (\w)", phrase):
        return Step("wait", wait[1], releases=wait[2])
    return Step("softmax" if "softmax" in phrase else "other")


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
    """text with each `a ? b : c` as Python writes it, brackets from the inside out."""
    groups: list[str] = []
    while (bracket := re.search(r"\(([^()]*)\)", text)) is not None:
        groups.append(_choice(bracket[1]))
        text = f"{text[: bracket.start()]}@{len(groups) - 1}@{text[bracket.end() :]}"
    text = _choice(text)
    while "@" in text:
        text = re.sub(r"@(\d+)@", lambda place: f"({groups[int(place[1])]})", text)
    return text


def _choice(text: str) -> str:
    """`a ? b : c` without brackets; one may stand in the last branch of another."""
    condition, mark, rest = text.partition("?")
    if not mark:
        return text
    then, _, otherwise = rest.partition(":")
    return f"({then}) if ({condition}) else ({_choice(otherwise)})"
