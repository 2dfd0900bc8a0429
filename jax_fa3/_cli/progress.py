"""A progress bar when tqdm is installed and stderr is a terminal; nothing otherwise."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def progress(items: Sequence[T], description: str) -> Iterator[T]:
    """Yields items, showing how far it is."""
    if sys.stderr.isatty():
        try:
            tqdm = importlib.import_module("tqdm").tqdm
        except ImportError:
            pass
        else:
            yield from tqdm(items, desc=description, leave=False)
            return
    yield from items
