"""`python -m jax_fa3`: self-check without an argument, otherwise one of its sub-commands."""

from __future__ import annotations

import os
import sys

from jax_fa3._cli.main import main
from jax_fa3._install import hidden_installation

if __name__ == "__main__":
    # In a checkout that hides an installed package, -P makes Python look past the current folder.
    if not sys.flags.safe_path and hidden_installation() is not None:
        os.execv(sys.executable, [sys.executable, "-P", "-m", "jax_fa3", *sys.argv[1:]])
    sys.exit(main())
