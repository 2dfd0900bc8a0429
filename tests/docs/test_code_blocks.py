"""The code that people copy from the pages runs."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path
from typing import Any

import pytest

from docs import pages

LANGUAGES = {"python", "console", "text", ""}  # "" is a shell command, as README.md writes them
WITH_PYTHON = [p for p in pages.PAGES if any(b.language == "python" for b in pages.blocks(p))]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=pages.name)
def test_python_runs(page: Path) -> None:
    """The blocks of a page, one after another as a reader would, but those that need more than a
    CPU."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in pages.blocks(page):
        if block.language == "python" and not block.needs:
            # The line numbers of a traceback are those of the page.
            tree = ast.parse("\n" * (block.line - 1) + block.text, filename=str(page))
            exec(compile(tree, str(page), "exec"), namespace)


@pytest.mark.parametrize(
    ("page", "block"),
    [
        pytest.param(page, block, id=f"{pages.name(page)}:{block.line}")
        for page in pages.PAGES
        for block in pages.blocks(page)
        if block.needs
    ],
)
def test_what_needs_more_compiles(page: Path, block: pages.Block) -> None:
    assert block.language == "python"
    compile(block.text, str(page), "exec")
    pytest.skip(f"compiled, not run: {block.needs}")


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_shell_commands_parse(page: Path) -> None:
    for block in pages.blocks(page):
        assert block.language in LANGUAGES, f"line {block.line}"
        if block.language not in ("console", ""):
            continue
        lines = block.text.splitlines()
        if block.language == "console":  # the lines without a prompt are output
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
            assert lines, f"line {block.line}: no command"
        done = subprocess.run(
            ["bash", "-n"], input="\n".join(lines), capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), f"line {block.line}"


def test_blocks_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- needs a GPU: why -->\n```python\n1 / 0\n```\n\n```{figure} x\n```\n")
    assert pages.blocks(page) == [pages.Block("python", "1 / 0\n", 3, "needs a GPU: why")]
