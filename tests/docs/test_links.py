"""Links of the Markdown files, as they are read in a repository, lead somewhere.

The site checks its own links while it is built (docs/_ext/finished_site.py).
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from docs import pages


def complaint(page: Path, target: str) -> str | None:
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        well_formed = parts.scheme == "https" and "." in parts.netloc and " " not in target
        return None if well_formed else "is no https address"
    goal = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not goal.exists():
        return "leads to no file"
    if parts.fragment and parts.fragment not in pages.anchors(goal):
        return "leads to no heading"
    return None


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_links(page: Path) -> None:
    found = [(target, complaint(page, target)) for target in pages.links(page)]
    assert [(target, words) for target, words in found if words is not None] == []


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_paths(page: Path) -> None:
    """Files that the text names exist; a page's own folder counts too (benchmarks/README.md)."""
    folders = (pages.ROOT, page.parent)
    gone = [
        path
        for path in pages.quoted_paths(page)
        if not any((folder / path).exists() for folder in folders)
    ]
    assert gone == []


def test_quoted_paths_are_found() -> None:
    found = list(pages.quoted_paths(pages.ROOT / "docs" / "kernels.md"))
    assert "cuda/fwd/kernel.cuh" in found


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("other.md", None),
        ("other.md#a-heading", None),
        ("#this-page", None),
        ("https://example.org/x", None),
        ("missing.md", "leads to no file"),
        ("other.md#none", "leads to no heading"),
        ("http://example.org", "is no https address"),
        ("https://example", "is no https address"),
    ],
)
def test_a_wrong_link_is_noticed(tmp_path: Path, target: str, words: str | None) -> None:
    (tmp_path / "other.md").write_text("# A heading\n")
    page = tmp_path / "page.md"
    page.write_text(f"# This page\n\n[x]({target})\n")
    assert list(pages.links(page)) == [target]
    assert complaint(page, target) == words
