#!/usr/bin/env python3
"""Checks finished wheels: names, tags, size and contents.

    python scripts/wheel_gate.py WHEEL...

Prints one line per wheel, then one sentence per failure; exit status 1 with a failure.
"""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

SIZE_LIMIT = 20_000_000  # bytes, of one wheel
NEWEST_GLIBC = (2, 34)  # of RHEL 9; Debian 12 and Ubuntu 22.04 have newer ones
PYTHON_TAGS = ("cp311-cp311", "cp312-abi3")
REQUIRED = ("__init__.py", "_ext.pyi", "py.typed")  # in jax_fa3/


def check_name(name: str) -> list[str]:
    """Sentences on what is wrong with a wheel's file name."""
    match = re.fullmatch(r"jax_fa3-[^-]+-(\w+-\w+)-([\w.]+)\.whl", name)
    if match is None:
        return [f"{name}: must be named jax_fa3-<version>-<python>-<abi>-<platform>.whl."]
    failures = []
    if match[1] not in PYTHON_TAGS:
        failures.append(f"{name}: must be tagged {' or '.join(PYTHON_TAGS)}; got {match[1]}.")
    glibc = re.findall(r"manylinux_(\d+)_(\d+)_x86_64", match[2])
    # A wheel may carry several tags; the oldest system that it names is the one that counts.
    if not glibc or min((int(a), int(b)) for a, b in glibc) > NEWEST_GLIBC:
        newest = ".".join(map(str, NEWEST_GLIBC))
        failures.append(f"{name}: must be manylinux for glibc {newest} or older; got {match[2]}.")
    return failures


def check_contents(name: str, members: list[str]) -> list[str]:
    """Sentences on what is wrong with the list of files in a wheel."""
    failures = []
    outside = [m for m in members if not re.match(r"jax_fa3(-[^/]+\.dist-info)?/", m)]
    if outside:  # a bundled library too: it would lie in jax_fa3.libs
        failures.append(f"{name}: must hold jax_fa3 alone; got {', '.join(outside[:3])}.")
    libraries = [m for m in members if re.search(r"\.so(\.|$)", m)]
    suffix = "abi3" if "-abi3-" in name else r"cpython-311-\S+"
    if len(libraries) != 1 or not re.fullmatch(rf"jax_fa3/_ext\.{suffix}\.so", libraries[0]):
        failures.append(f"{name}: must hold one library, jax_fa3/_ext; got {libraries}.")
    failures += [
        f"{name}: must hold jax_fa3/{required}."
        for required in REQUIRED
        if f"jax_fa3/{required}" not in members
    ]
    if not any(m.endswith("/LICENSE") for m in members):
        failures.append(f"{name}: must hold the licence.")
    return failures


def check_size(name: str, size: int) -> list[str]:
    """A sentence when the wheel is too large."""
    if size <= SIZE_LIMIT:
        return []
    return [f"{name}: must be at most {SIZE_LIMIT:,} bytes; got {size:,}."]


def main(arguments: list[str]) -> int:
    """Checks each wheel; returns the exit status."""
    if not arguments:
        print("wheel_gate: name the wheels to check.", file=sys.stderr)
        return 2
    failures = []
    for path in map(Path, arguments):
        size = path.stat().st_size
        with zipfile.ZipFile(path) as files:
            members = [m for m in files.namelist() if not m.endswith("/")]
        failures += check_name(path.name) + check_size(path.name, size)
        failures += check_contents(path.name, members)
        print(f"{size / 1e6:6.2f} MB of {SIZE_LIMIT / 1e6:.0f}  {path.name}")
    for failure in failures:
        print(f"wheel_gate: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
