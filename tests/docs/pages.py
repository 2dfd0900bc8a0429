"""The Markdown files that people read, and what stands in them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(path for path in ROOT.glob("docs/**/*.md") if "_generated" not in path.parts),
        ROOT / "benchmarks" / "README.md",
        *ROOT.glob(".github/**/*.md"),
    ]
)


class Block(NamedTuple):
    """A fenced block: its language, its text, its first line, and why it is not run (or "")."""

    language: str
    text: str
    line: int
    needs: str


def name(page: Path) -> str:
    """The page as test names spell it."""
    return page.relative_to(ROOT).as_posix()


def tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def blocks(page: Path) -> list[Block]:
    """Fenced blocks in order. `<!-- needs ... -->` on the line above says what one cannot do
    without."""
    found = []
    previous = None
    for token in tokens(page):
        if token.type == "fence" and not token.info.startswith("{"):
            comment = "" if previous is None else previous.content.strip()
            is_need = comment.startswith("<!-- needs ") and comment.endswith("-->")
            needs = comment.removeprefix("<!-- ").removesuffix("-->").strip() if is_need else ""
            assert token.map is not None
            found.append(Block(token.info.strip(), token.content, token.map[0] + 2, needs))
        previous = token if token.type == "html_block" else None
    return found


def links(page: Path) -> Iterator[str]:
    """Targets of links and pictures."""
    for token in tokens(page):
        for child in token.children or ():
            target = child.attrs.get("href" if child.type == "link_open" else "src")
            if child.type in ("link_open", "image") and target is not None:
                yield str(target)


def quoted_paths(page: Path) -> Iterator[str]:
    """Code in the text that names a file or folder of the repository, such as `cuda/fwd/`."""
    roots = {path.name for path in ROOT.iterdir() if path.is_dir()}
    for token in tokens(page):
        for child in token.children or ():
            text = child.content.split("::")[0]
            is_path = child.type == "code_inline" and re.fullmatch(r"[\w.-]+(/[\w.-]*)+", text)
            if is_path and text.split("/")[0] in roots:
                yield text


def anchors(page: Path) -> set[str]:
    """What `#...` may name: each heading in lower case, blanks as hyphens."""
    parsed = tokens(page)
    titles = [
        after.content for token, after in itertools.pairwise(parsed) if token.type == "heading_open"
    ]
    plain = ("".join(c for c in title.lower() if c.isalnum() or c in " -_") for title in titles)
    return {title.strip().replace(" ", "-") for title in plain}
