"""Text for the terminal: tables, lists in flags, and the error that means bad usage."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Sequence


class UsageError(Exception):
    """The command cannot do what the flags ask for; ends with exit code 2."""


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns padded to their widest entry; numbers should arrive formatted."""
    cells = [list(map(str, header)), *([str(x) for x in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def _comma_list(
    of: Callable[[str], object], choices: Collection[object] = ()
) -> Callable[[str], list[object]]:
    """An argparse type: "a,b" to a list, each entry converted and checked."""

    def parse(text: str) -> list[object]:
        values = []
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            try:
                value = of(part)
            except ValueError as error:
                raise argparse.ArgumentTypeError(f"{part!r} is not valid: {error}") from None
            if choices and value not in choices:
                listed = ", ".join(map(str, choices))
                raise argparse.ArgumentTypeError(f"{part!r} is not one of {listed}")
            values.append(value)
        if not values:
            raise argparse.ArgumentTypeError("the list is empty")
        return values

    return parse


def add_list_flag(
    parser: argparse.ArgumentParser,
    flag: str,
    default: Collection[object],
    *,
    of: Collection[str] = (),
    about: str = "",
) -> None:
    """A flag whose value is "a,b": entries of `of`, or whole numbers of at least 1.

    Its help is `about`, what may be chosen and the default.
    """
    words = " ".join(filter(None, [about, f"of {', '.join(of)}" if of else ""]))
    usual = f"default {'all' if list(default) == list(of) else ','.join(map(str, default))}"
    parser.add_argument(
        flag,
        type=_comma_list(str, of) if of else _comma_list(positive_int),
        default=list(default),
        metavar="LIST",
        help=f"{words} ({usual})" if words else usual,
    )


def positive_int(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1; got {text!r}")
    return value


def positive_float(text: str) -> float:
    """An argparse type: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0; got {text!r}")
    return value
