"""The text that train_gpt.py learns: the sources of Python's standard library, as bytes."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

HELD_OUT = 32  # every 32nd file is not trained on
FOLDERS_LEFT_OUT = {
    *("site-packages", "dist-packages"),  # not the standard library
    *("test", "tests", "idle_test"),
    *("idlelib", "lib2to3", "tkinter"),  # some distributions package them apart
    "encodings",  # tables of numbers
}


class Text(NamedTuple):
    train: np.ndarray  # uint8 [bytes]
    held_out: np.ndarray  # uint8 [bytes]
    sha256: str


def standard_library() -> Text:
    """The *.py files of the running Python, about 9 MB, in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    kept = [p for p in paths if FOLDERS_LEFT_OUT.isdisjoint(p.split("/")) and (root / p).is_file()]
    files = [(root / path).read_bytes() for path in kept]
    train = b"".join(data for i, data in enumerate(files) if i % HELD_OUT)
    held_out = b"".join(files[::HELD_OUT])
    digest = hashlib.sha256(train + held_out).hexdigest()
    return Text(np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8), digest)


def starts_of(step: int, batch: int, seqlen: int, seed: int, length: int) -> np.ndarray:
    """Where the windows of a step's batch start in a text of `length` bytes: int32 [batch].

    An epoch cuts the text at a random place into windows and shuffles them. No state is kept: the
    number of the step is the whole position in the data.
    """
    windows = length // seqlen - 1  # one less, for the place of the cut and for the last target
    epoch, place = divmod(step, windows // batch)
    rng = np.random.default_rng((seed, epoch))
    cut, order = rng.integers(seqlen), rng.permutation(windows)
    return (order[place * batch : (place + 1) * batch] * seqlen + cut).astype(np.int32)
