"""`python -m jax_fa3`: self-check without an argument, otherwise one of its sub-commands."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from jax_fa3._cli.main import main


def shadowing_source_tree() -> bool:
    """Whether this is a checkout without the extension that hides an installed package with one.

    `python -m` looks in the current folder first, so in a checkout it finds the sources.
    """
    here = Path(__file__).resolve().parent
    if sys.flags.safe_path or any(here.glob("_ext*.so")):
        return False
    folders = (Path(entry) / "jax_fa3" for entry in sys.path if entry)
    return any(f.resolve() != here and any(f.glob("_ext*.so")) for f in folders)


if __name__ == "__main__":
    if shadowing_source_tree():
        os.execv(sys.executable, [sys.executable, "-P", "-m", "jax_fa3", *sys.argv[1:]])
    sys.exit(main())
