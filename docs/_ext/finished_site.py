"""Sphinx extension: looks at the finished site and fails the build when a link leads nowhere.

Links inside the site must lead to a file and an anchor that exist. The site must work without a
network: no page may load anything from another server. Links to other sites are only read, not
followed: https, a host, no blanks.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
_CSS_LOAD = re.compile(r"""(?:@import\s+|url\()\s*["']?((?:https?:)?//[^"')\s]+)""")


class _Page(HTMLParser):
    """What a page links to, what it loads and the anchors that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = {"", "top"}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if found.get(_LOADS.get(tag, "")):
            # A canonical or search link is an address, not a load; those we keep are relative.
            self.loads.append(found[_LOADS[tag]])


def problems(site: Path) -> list[str]:
    """One sentence for everything that is wrong with the HTML and CSS files under site."""
    pages: dict[Path, _Page] = {}
    for path in sorted(site.rglob("*.html")):
        pages[path.resolve()] = page = _Page()
        page.feed(path.read_text(encoding="utf-8"))
    found = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        for target in page.loads + page.links:
            complaint = _complaint(path, target, pages, loaded=target in page.loads)
            if complaint is not None:
                found.append(f"{name}: {target!r} {complaint}")
    for path in sorted(site.rglob("*.css")):
        for target in _CSS_LOAD.findall(path.read_text(encoding="utf-8")):
            found.append(f"{path.relative_to(site)}: {target!r} is on another server")
    return found


def _complaint(path: Path, target: str, pages: dict[Path, _Page], *, loaded: bool) -> str | None:
    parts = urlsplit(target)
    if parts.scheme == "data":
        return None
    if parts.scheme or parts.netloc:
        if loaded:
            return "is on another server"
        if parts.scheme == "https" and "." in parts.netloc and " " not in target:
            return None
        return "is no https address"
    goal = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if goal.is_dir():
        goal /= "index.html"
    if not goal.is_file():
        return "leads to no file"
    if goal in pages and unquote(parts.fragment) not in pages[goal].anchors:
        return "leads to no anchor"
    return None


def _check(app: Any, exception: Exception | None) -> None:
    if exception is not None or app.builder.format != "html":
        return
    found = problems(Path(app.outdir))
    if found:
        from sphinx.errors import SphinxError  # here: the tests of `problems` do without Sphinx

        raise SphinxError("the site has wrong links:\n" + "\n".join(found))


def setup(app: Any) -> dict[str, bool]:
    app.connect("build-finished", _check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
