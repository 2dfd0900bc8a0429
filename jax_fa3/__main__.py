"""`python -m jax_fa3`: self-check without an argument, otherwise one of its sub-commands."""

from __future__ import annotations

import sys

from jax_fa3._cli.main import main

if __name__ == "__main__":
    sys.exit(main())
