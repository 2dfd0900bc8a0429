"""Why the compiled extension of this installation cannot be imported, as a sentence with its
cure."""

from __future__ import annotations

import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_FOLDER = Path(__file__).parent
# Written by scripts/build_backend.py into a wheel whose kernels could not be built.
_NOTE = "_build_note.txt"
_REINSTALL = "run `pip install --force-reinstall --no-deps .` in the sources with this Python"


def hidden_installation(folder: Path = _FOLDER) -> Path | None:
    """The installed package, with an extension or a note, that the one in `folder` is found before.

    Python looks in the current folder first, so in a checkout it finds the sources, which have
    neither.
    """
    if _is_built(folder):
        return None
    here = folder.resolve()
    others = (Path(entry, "jax_fa3") for entry in sys.path if entry)
    return next((path for path in others if path.resolve() != here and _is_built(path)), None)


def _is_built(folder: Path) -> bool:
    return any(folder.glob("_ext*.so")) or (folder / _NOTE).exists()


def import_failure(error: ImportError, folder: Path = _FOLDER) -> str:
    """What `error`, raised by importing jax_fa3._ext from `folder`, means to a user."""
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    files = sorted(path.name for path in folder.glob("_ext*.so"))
    if isinstance(error, ModuleNotFoundError) and error.name == "jax_fa3._ext":
        missing = "the compiled extension jax_fa3._ext is not in this installation"
        note = folder / _NOTE
        foreign = [f for f in files if f.removeprefix("_ext") not in EXTENSION_SUFFIXES]
        if foreign:
            return f"{foreign[0]} was built for another Python than this {python}; {_REINSTALL}"
        if note.exists():
            return f"{missing}: {note.read_text(encoding='utf-8').strip().removesuffix('.')}"
        if (installed := hidden_installation(folder)) is not None:
            return (
                f"the sources in {folder} hide the installation in {installed}; start Python in "
                "another folder"
            )
        return f"{missing}; run `JAX_FA3_CUDA=ON pip install .` in the sources, on Linux"
    # A stable-ABI module serves its own Python and all later ones; an earlier one finds it too.
    if (
        files == ["_ext.abi3.so"]
        and ".abi3.so" in EXTENSION_SUFFIXES
        and sys.version_info < (3, 12)
    ):
        return f"{files[0]} needs Python 3.12 or newer and this is {python}; {_REINSTALL}"
    return f"the compiled extension jax_fa3._ext does not load: {error}"
