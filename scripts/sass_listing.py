"""What cuobjdump, nvdisasm and ptxas say about the kernels of an extension; sass_gate.py judges it.

parse_* read text; read_extension and dump_sass run the tools on a file.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from pathlib import Path

# ptxas: C7508 setmaxnreg ignored; the others: wgmma serialised.
FATAL_ADVISORIES = ("C7508", "C7510", "C7511", "C7512", "C7513", "C7514", "C7515")

# ---- reading what the tools print ------------------------------------------------------


@dataclasses.dataclass
class Kernel:
    """One kernel function of the extension."""

    symbol: str
    name: str = ""  # demangled; the symbol where there is no demangler
    opcodes: Counter[str] = dataclasses.field(default_factory=Counter)
    registers: int | None = None  # per thread, as launched
    product: int = -1  # where the last wgmma so far is
    loop: tuple[int, int] | None = None  # the shortest with a wgmma: bytes, and where it begins

    def count(self, opcode: str) -> int:
        """How many instructions are `opcode` or a variant of it."""
        return sum(
            n for op, n in self.opcodes.items() if op == opcode or op.startswith(opcode + ".")
        )


@dataclasses.dataclass(frozen=True)
class PtxasEntry:
    """What ptxas reported for one kernel function."""

    registers: int
    spill_bytes: int  # stores plus loads


_FUNCTION = re.compile(r"^\s*Function\s*:\s*(\S+)")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.x]*)")
_BRANCH = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/.*\bBRA\S*\s[^;]*\b0x([0-9a-f]+)")
_ARCH = re.compile(r"^\s*(?:arch = |code for )(\S+)")


def parse_sass(text: str) -> tuple[dict[str, Kernel], set[str]]:
    """`cuobjdump --dump-sass` -> (kernels by symbol, architectures seen)."""
    kernels: dict[str, Kernel] = {}
    architectures: set[str] = set()
    kernel: Kernel | None = None
    for line in text.splitlines():
        if match := _INSTRUCTION.match(line):
            if kernel is not None:
                kernel.opcodes[match[1]] += 1
                if match[1].startswith("HGMMA"):
                    kernel.product = int(line.split("*")[1], 16)
                elif branch := _BRANCH.match(line):
                    end, start = (int(place, 16) for place in branch.groups())
                    if start <= kernel.product and (kernel.loop or (end,))[0] >= end - start:
                        kernel.loop = (end - start, start)
        elif match := _FUNCTION.match(line):
            kernel = kernels.setdefault(match[1], Kernel(match[1], match[1]))
        elif match := _ARCH.match(line):
            architectures.add(match[1])
    return kernels, architectures


def parse_code(text: str) -> dict[str, list[str]]:
    """`cuobjdump --dump-sass` -> (instructions with their operands by symbol)."""
    code: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if match := _FUNCTION.match(line):
            lines = code.setdefault(match[1], [])
        elif _INSTRUCTION.match(line):
            lines.append(line.rsplit("/*", 1)[0].split("*/", 1)[1].strip())
    return code


def parse_resource_usage(text: str) -> dict[str, int]:
    """`cuobjdump --dump-resource-usage` -> registers by symbol."""
    found = re.findall(r"Function\s+(\S+?):\s+REG:(\d+)", text)
    return {symbol: int(registers) for symbol, registers in found}


def parse_ptxas(text: str) -> tuple[dict[str, PtxasEntry], list[str]]:
    """A kept build report -> (entries by symbol, the fatal advisories in it)."""
    entries = {
        match[1]: PtxasEntry(int(match[4]), int(match[2]) + int(match[3]))
        for match in re.finditer(
            r"Compiling entry function '(\S+)'(?:(?!Compiling entry function).)*?"
            r"(\d+) bytes spill stores, (\d+) bytes spill loads"
            r"(?:(?!Compiling entry function).)*?Used (\d+) registers",
            text,
            flags=re.DOTALL,
        )
    }
    advisories = [
        line.strip()
        for line in text.splitlines()
        if any(f"({code})" in line or f" {code}" in line for code in FATAL_ADVISORIES)
    ]
    return entries, advisories


# ---- running the tools -----------------------------------------------------------------


class CannotCheckError(Exception):
    """The gate could not look at the extension at all."""


def find_tool(name: str) -> Path:
    """cuobjdump or nvdisasm: on PATH, in a CUDA toolkit, or in this Python's site-packages."""
    site_packages = Path(sysconfig.get_path("purelib"))
    folders = [Path(p) for p in os.environ.get("PATH", "").split(os.pathsep) if p]
    folders += [Path(p, "bin") for v in ("CUDA_HOME", "CUDA_PATH") if (p := os.environ.get(v))]
    folders += [Path("/usr/local/cuda/bin"), *sorted(site_packages.glob("nvidia/*/bin"))]
    for folder in folders:
        if os.access(folder / name, os.X_OK):
            return folder / name
    raise CannotCheckError(f"{name} was not found; pip install nvidia-cuda-{name}.")


def find_extension() -> Path:
    """The extension that this Python would import, found without importing it."""
    spec = importlib.util.find_spec("jax_fa3")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            if (path := Path(folder, f"_ext{suffix}")).exists():
                return path
    raise CannotCheckError("jax_fa3._ext is not installed for this Python; name the file.")


def run(command: list[str]) -> str:
    """Standard output of `command`, with the folder of nvdisasm on PATH for cuobjdump's sake."""
    path = os.pathsep.join([str(find_tool("nvdisasm").parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": path}
    )
    if done.returncode != 0:
        raise CannotCheckError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout


def demangle(symbols: list[str]) -> list[str]:
    """Readable names; the symbols themselves where no c++filt is installed."""
    if not symbols or shutil.which("c++filt") is None:
        return symbols
    done = subprocess.run(
        ["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def same_images(first: Path, second: Path) -> bool:
    """Whether two extensions hold the same bytes for the GPU; False also where nothing can tell."""
    if shutil.which("objcopy") is None:
        return False
    images = []
    for extension in (first, second):
        with tempfile.TemporaryDirectory() as folder:
            image, rest = Path(folder, "image"), Path(folder, "rest")
            dump = ["objcopy", "--dump-section", f".nv_fatbin={image}", str(extension), str(rest)]
            subprocess.run(dump, capture_output=True, check=False)
            images.append(image.read_bytes() if image.exists() else b"")
    return images[0] == images[1] != b""


@functools.cache
def dump_sass(extension: Path) -> str:
    """The machine code of a built extension, as text; takes seconds."""
    return run([str(find_tool("cuobjdump")), "--dump-sass", str(extension)])


def read_extension(extension: Path) -> tuple[dict[str, Kernel], set[str], list[str]]:
    """(kernels by symbol, architectures, names of PTX files) of a built extension."""
    cuobjdump = str(find_tool("cuobjdump"))
    kernels, architectures = parse_sass(dump_sass(extension))
    registers = parse_resource_usage(run([cuobjdump, "--dump-resource-usage", str(extension)]))
    for kernel, name in zip(kernels.values(), demangle(list(kernels)), strict=True):
        kernel.name = name
        kernel.registers = registers.get(kernel.symbol)
    ptx = re.findall(r"PTX file\s+\d+:\s*(\S+)", run([cuobjdump, "--list-ptx", str(extension)]))
    return kernels, architectures, ptx
