"""The parts that make the site: what they read from the sources, and what they refuse."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType

import pytest
from docs.pages import ROOT

from jax_fa3 import _extension


def load(name: str) -> ModuleType:
    """A module of docs/_ext, which is on no import path."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "_ext" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


kernel_source = load("kernel_source")
docstrings = load("docstrings")
finished_site = load("finished_site")


# ---- cuda/ as the pictures show it ----
@pytest.mark.skipif(not _extension.kernels(), reason="needs the compiled extension")
def test_kernels_are_those_of_the_extension() -> None:
    read = [
        {
            "name": kernel.name,
            "dtype": kernel.dtype,
            "head_dim": kernel.constants["kHeadDim"],
            "block_q": kernel.constants["kBlockQ"],
            "block_kv": kernel.constants["kBlockKv"],
            "num_stages": kernel.constants["kNumStages"],
            "math_warpgroups": kernel.constants["kMathWarpgroups"],
            "cluster_size": kernel.constants["kClusterSize"],
            "pipeline": kernel.pipeline,
            "softmax": kernel.softmax,
        }
        for kernel in kernel_source.kernels()
    ]
    assert read == [facts for facts in _extension.kernels() if facts["name"].startswith("fwd_")]


def test_shared_memory_adds_up() -> None:
    for kernel in kernel_source.kernels():
        sizes = [size for _, size in kernel.buffers()]
        assert min(sizes) > 0
        assert sum(sizes) == kernel.layout["kBytes"] < 227 * 1024


def test_barriers_of_the_map() -> None:
    found = {barrier.name: barrier for barrier in kernel_source.barriers()}
    assert len(found) == 6
    for buffer in ("q", "k", "v"):
        full = next(b for name, b in found.items() if name.startswith(f"{buffer}_full"))
        empty = next(b for name, b in found.items() if name.startswith(f"{buffer}_empty"))
        assert (full.waiter, empty.waiter) == ("math", "load")
        assert full.arrivals.endswith(f" {buffer}")


def test_a_meaning_may_go_on() -> None:
    text = """
// mbarriers  name        arrivals         waiter  meaning
//            k_full[s]   1 + bytes of k   math    k stage s has landed, with
//                                                 its scale
//            k_empty[s]  every math warp  load    k stage s was read
//            v_full[s], v_empty[s]        likewise
"""
    assert [(b.name, b.arrivals, b.waiter, b.meaning) for b in kernel_source.barriers(text)] == [
        ("k_full[s]", "1 + bytes of k", "math", "k stage s has landed, with its scale"),
        ("k_empty[s]", "every math warp", "load", "k stage s was read"),
        ("v_full[s]", "1 + bytes of v", "math", "v stage s has landed"),
        ("v_empty[s]", "every math warp", "load", "v stage s was read"),
    ]


ORDER = """
// Order      one step of the kIntra pipeline, block j:
//              issue S = Q K_j^T;  issue acc (+)= P_{j-1} V_{j-1};  wait for S, release k;
//              mask, softmax -> P_j;  wait for acc, release v;  rescale
//            At the seam it goes on.
"""


def test_a_step_is_drawn_in_the_order_of_the_map() -> None:
    steps = kernel_source.steps(ORDER)
    assert steps == [
        kernel_source.Step("issue", "S", "Q K(j)ᵀ"),
        kernel_source.Step("issue", "acc", "P(j-1) V(j-1)"),
        kernel_source.Step("wait", "S", releases="k"),
        kernel_source.Step("softmax"),
        kernel_source.Step("wait", "acc", releases="v"),
        kernel_source.Step("other"),
    ]
    pytest.importorskip("matplotlib", reason="needs matplotlib (extra 'bench')")
    bars, releases = load("kernel_figures").schedule(steps, 3)
    assert [name for _, name in releases] == ["K(j)", "V(j-1)", "K(j+1)", "V(j)"]
    by_row = [[text for row, *_, text, _ in bars if row == wanted and text] for wanted in range(3)]
    assert by_row == [
        ["S = Q K(j)ᵀ", "P(j-1) V(j-1)", "S = Q K(j+1)ᵀ", "P(j) V(j)"],
        ["wait for S", "softmax → P(j)", "wait for S", "softmax → P(j+1)"],
        ["copy K(j+3)", "copy V(j+2)", "copy K(j+4)", "copy V(j+3)"],
    ]
    for row in range(3):  # a unit does one thing at a time
        times = [bar[1:3] for bar in bars if bar[0] == row]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(times))


def test_an_order_that_waits_for_nothing_is_refused() -> None:
    assert len(kernel_source.steps()) >= 5  # the kernel's own
    with pytest.raises(kernel_source.SourceError, match="must issue two products and wait"):
        kernel_source.steps(ORDER.replace("wait for acc, release v;", ""))
    with pytest.raises(kernel_source.SourceError, match="no order of a kIntra step"):
        kernel_source.steps("// Order      as it comes\n")


def test_unknown_sources_are_refused() -> None:
    body = "static constexpr int kA = 1 == 2 ? 3 : 4, kB = kA * (kA < 2 ? 5 : (kA + 1) * 6) / 7;"
    assert kernel_source._evaluate(body, {}) == {"kA": 4, "kB": 17}
    with pytest.raises(kernel_source.SourceError, match="cannot evaluate 'size_of<Q>'"):
        kernel_source._evaluate("static constexpr int kA = size_of<Q>;", {})
    with pytest.raises(kernel_source.SourceError, match="no struct Missing"):
        kernel_source._body("struct Other { };", "Missing")


# ---- docstrings ----
def test_short_sections_become_fields() -> None:
    lines = ["Returns: an array", "  of floats.", "Raises:", "  ValueError: why.", "Source: paper."]
    assert docstrings.expanded(lines) == [
        *("", ":returns: an array", "  of floats."),
        *("Raises:", "  ValueError: why."),
        *("", "Source:", "  paper."),
    ]


# ---- links ----
def site(folder: Path, body: str) -> list[str]:
    (folder / "other.html").write_text('<h1 id="here">x</h1>', encoding="utf-8")
    (folder / "page.html").write_text(body, encoding="utf-8")
    found: list[str] = finished_site.problems(folder)
    return found


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('<a href="other.html#here">', None),
        ('<a href="#top">', None),
        ('<a href="https://example.org">', None),
        ('<img src="data:image/png;base64,x">', None),
        ('<a href="gone.html">', "leads to no file"),
        ('<a href="other.html#gone">', "leads to no anchor"),
        ('<a href="http://example.org">', "is no https address"),
        ('<script src="https://example.org/x.js"></script>', "is on another server"),
        ('<link href="//example.org/font.css">', "is on another server"),
        ('<img src="picture.svg">', "leads to no file"),
    ],
)
def test_wrong_links_are_found(tmp_path: Path, body: str, words: str | None) -> None:
    found = site(tmp_path, body)
    assert [sentence.split("' ")[-1] for sentence in found] == ([] if words is None else [words])


def test_a_font_of_another_server_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text('@import url("https://example.org/f.css");', encoding="utf-8")
    assert len(site(tmp_path, "")) == 1
