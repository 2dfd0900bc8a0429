"""Parser of `python -m jax_fa3` and its exit codes: 0 fine, 1 a check failed, 2 bad usage."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from jax_fa3._cli import bench, check, explain, selfcheck
from jax_fa3._cli.text import UsageError


def parser() -> argparse.ArgumentParser:
    """The parser with every sub-command; each namespace carries its `run`."""
    top = argparse.ArgumentParser(
        prog="python -m jax_fa3",
        description=(
            "Without a command: a self-check of this installation in under a minute. It needs no "
            "GPU."
        ),
        epilog="Exit code: 0 all is well, 1 a check failed, 2 bad usage.",
    )
    top.set_defaults(run=selfcheck.run)
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    for module in (check, bench, explain):
        module.add_parser(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    namespace = parser().parse_args(arguments)
    try:
        code = int(namespace.run(namespace))
        sys.stdout.flush()
        return code
    except UsageError as error:
        print(f"jax_fa3: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jax_fa3: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader is gone (`| head`). What Python still holds for it must not raise at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
