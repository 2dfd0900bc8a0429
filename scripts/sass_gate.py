#!/usr/bin/env python3
"""Checks the machine code of jax_fa3/_ext: did the compiler build the kernels that we wrote?

    python scripts/sass_gate.py [EXTENSION.so] [--ptxas-logs DIR] [--same-code-as OTHER.so]

Without EXTENSION it takes the one that this Python would import. DIR holds the reports that the
build kept (JAX_FA3_PTXAS_LOG_DIR, or ptxas/ in the build folder); without it the compiler's own
advisories go unchecked. OTHER is an extension that must hold the same machine code.
Prints one line per kernel, then one sentence per failure.
Exit status: 0 all good, 1 a check failed, 2 could not check.
No GPU is needed, but cuobjdump and nvdisasm are: from a CUDA toolkit or from the `dev` extra.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

# ---- what we expect --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rule:
    """What the machine code of one family of kernels must and must not hold.

    An opcode covers its variants: "MUFU.EX2" stands for MUFU.EX2.F16 too. A required entry lists
    alternatives.
    """

    family: str
    pattern: str  # searched in the kernel's name, demangled or not
    at_least: int  # how many such kernels the extension must hold
    required: tuple[tuple[str, ...], ...]
    forbidden: tuple[str, ...]


SPILLS = ("LDL", "STL")  # registers that went to local memory and back
OLD_MMA = ("HMMA", "IMMA", "QMMA")  # the pre-Hopper tensor core path
ATOMICS = ("UBLKRED", "RED", "ATOM", "ATOMG")  # additions in whatever order they arrive
LOADS = ("UBLKCP", "UTMALDG")  # a bulk copy, with or without a tensor map

# The first rule that matches a kernel counts; a kernel that none matches is a failure.
RULES = (
    Rule(
        family="fp8 exact",
        pattern=r"fwd_kernel.*FwdFp8.*Exp2[)E]0",
        at_least=6,
        required=(("QGMMA",), LOADS, ("USETMAXREG",), ("MUFU.EX2",)),
        forbidden=(*SPILLS, *OLD_MMA, "HGMMA"),
    ),
    Rule(
        family="fp8 linear",  # exp2 is arithmetic on the byte, so MUFU is not required
        pattern=r"fwd_kernel.*FwdFp8.*Exp2[)E]1",
        at_least=6,
        required=(("QGMMA",), LOADS, ("USETMAXREG",)),
        forbidden=(*SPILLS, *OLD_MMA, "HGMMA"),
    ),
    Rule(
        family="16-bit",
        pattern=r"fwd_kernel.*Fwd16",
        at_least=6,
        required=(("HGMMA",), LOADS, ("USETMAXREG",), ("MUFU.EX2",)),
        forbidden=(*SPILLS, *OLD_MMA, "QGMMA"),
    ),
    Rule(
        family="backward",
        pattern=r"bwd_kernel",
        at_least=4,
        required=(("HGMMA",), LOADS, ("USETMAXREG",), ("MUFU.EX2",), ("UBLKRED",), ("STSM",)),
        forbidden=(*SPILLS, *OLD_MMA, "QGMMA"),
    ),
    Rule(
        family="backward wide",  # promises a fixed order of additions
        pattern=r"bwd_wide_(keys|queries)_kernel",
        at_least=4,
        required=(("HGMMA",), LOADS, ("USETMAXREG",), ("MUFU.EX2",)),
        forbidden=(*SPILLS, *OLD_MMA, *ATOMICS, "QGMMA"),
    ),
    Rule(
        family="backward rows",  # what runs before and after it
        pattern=r"bwd_(rows|queries)_kernel",
        at_least=10,
        required=(),
        forbidden=(*SPILLS, *OLD_MMA, "QGMMA", "HGMMA"),
    ),
    Rule(
        family="rotation",  # multiplies by a Hadamard matrix, a product too small for wgmma
        pattern=r"fa3(::|8)(quantize|unrotate)[<I]",
        at_least=12,
        required=(("HMMA",),),
        forbidden=(*SPILLS, "IMMA", "QMMA", "QGMMA", "HGMMA"),
    ),
    Rule(
        family="quantize",
        pattern=r"[Qq]uantize",
        at_least=1,
        required=(),
        forbidden=(*SPILLS, *OLD_MMA, "QGMMA", "HGMMA"),
    ),
)
ARCHITECTURE = "sm_90a"
COLUMNS = ("QGMMA", "HGMMA", "MUFU.EX2", "LDL", "STL", "BAR")
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
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
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


# ---- the checks ------------------------------------------------------------------------


def rule_of(kernel: Kernel) -> Rule | None:
    """The first rule whose pattern is found in the kernel's name or symbol."""
    for rule in RULES:
        if re.search(rule.pattern, kernel.name) or re.search(rule.pattern, kernel.symbol):
            return rule
    return None


def short_name(kernel: Kernel) -> str:
    """The kernel's name without namespaces and what follows from its template arguments."""
    return re.sub(r"^void |\(jax_fa3::FwdTraits.*$|jax_fa3::(ptx::)?", "", kernel.name)


def check_kernel(kernel: Kernel) -> list[str]:
    """Sentences on what is wrong with one kernel."""
    rule = rule_of(kernel)
    if rule is None:
        return [
            f"{short_name(kernel)}: no rule covers this kernel; add one to RULES in sass_gate.py."
        ]
    failures = [
        f"{short_name(kernel)}: holds no {' or '.join(options)}, which a kernel of family "
        f"'{rule.family}' needs."
        for options in rule.required
        if not any(kernel.count(option) for option in options)
    ]
    for opcode in rule.forbidden:
        if count := kernel.count(opcode):
            why = "spills registers" if opcode in SPILLS else "uses the wrong unit"
            failures.append(f"{short_name(kernel)}: {why}: {count} {opcode} instructions.")
    return failures


def check_extension(
    kernels: Mapping[str, Kernel], architectures: Iterable[str], ptx_files: Iterable[str]
) -> list[str]:
    """Sentences on what is wrong with the extension as a whole."""
    failures = []
    if set(architectures) != {ARCHITECTURE}:
        found = ", ".join(sorted(architectures)) or "none"
        failures.append(
            f"the extension must hold code for {ARCHITECTURE} and nothing else; got {found}."
        )
    failures += [f"the extension must hold no PTX; got {name}." for name in ptx_files]
    have = Counter(rule.family for k in kernels.values() if (rule := rule_of(k)))
    failures += [
        f"the extension must hold at least {rule.at_least} kernels of family '{rule.family}'; "
        f"got {have[rule.family]}."
        for rule in RULES
        if have[rule.family] < rule.at_least
    ]
    return failures


def check_ptxas(kernels: Mapping[str, Kernel], logs: Mapping[str, str]) -> list[str]:
    """Sentences on what the build reports say; `logs` is text by file name."""
    failures = []
    seen: dict[str, PtxasEntry] = {}
    for file, text in logs.items():
        entries, advisories = parse_ptxas(text)
        seen.update(entries)
        failures += [f"{file}: {line}" for line in advisories]
    for symbol, kernel in kernels.items():
        if symbol not in seen:
            failures.append(
                f"{short_name(kernel)}: no ptxas report; the logs are of another build."
            )
        elif spilled := seen[symbol].spill_bytes:
            failures.append(f"{short_name(kernel)}: ptxas reports {spilled} bytes of spills.")
    return failures


def check_same_code(ours: Mapping[str, list[str]], other: Mapping[str, list[str]]) -> list[str]:
    """A sentence per kernel whose instructions differ between two extensions."""
    failures = []
    for symbol in sorted(ours.keys() | other.keys()):
        if symbol not in ours or symbol not in other:
            failures.append(f"{symbol}: is in one of the two extensions only.")
        elif ours[symbol] != other[symbol]:
            differing = sum(a != b for a, b in zip(ours[symbol], other[symbol], strict=False))
            failures.append(
                f"{symbol}: the two extensions hold other machine code: {len(ours[symbol])} and "
                f"{len(other[symbol])} instructions, {differing} of them differ."
            )
    return failures


def table(kernels: Iterable[Kernel], logs: Mapping[str, str]) -> str:
    """One line per kernel: registers, spilled bytes (from the logs) and instruction counts."""
    entries: dict[str, PtxasEntry] = {}
    for text in logs.values():
        entries.update(parse_ptxas(text)[0])
    rows: list[tuple[str, ...]] = [("family", "registers", "spills", *COLUMNS, "kernel")]
    for kernel in sorted(kernels, key=lambda k: k.name):
        rule = rule_of(kernel)
        entry = entries.get(kernel.symbol)
        rows.append(
            (
                rule.family if rule else "?",
                "?" if kernel.registers is None else str(kernel.registers),
                "?" if entry is None else str(entry.spill_bytes),
                *(str(kernel.count(opcode)) for opcode in COLUMNS),
                short_name(kernel),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *middle, last = row
        numbers = "  ".join(c.rjust(w) for c, w in zip(middle, widths[1:-1], strict=True))
        lines.append(f"{first.ljust(widths[0])}  {numbers}  {last}".rstrip())
    return "\n".join(lines)


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


def main(argv: list[str] | None = None) -> int:
    """Runs the gate; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("extension", type=Path, nargs="?", help="default: the installed one")
    parser.add_argument("--ptxas-logs", type=Path, help="folder of *.ptxas.log files")
    parser.add_argument("--same-code-as", type=Path, help="another extension to compare with")
    args = parser.parse_args(argv)
    compared: list[str] = []
    try:
        extension = args.extension or find_extension()
        if not extension.is_file():
            raise CannotCheckError(f"{extension} does not exist.")
        kernels, architectures, ptx_files = read_extension(extension)
        logs = {}
        if args.ptxas_logs is not None:
            logs = {p.name: p.read_text() for p in sorted(args.ptxas_logs.glob("*.ptxas.log"))}
            if not logs:
                raise CannotCheckError(f"{args.ptxas_logs} holds no *.ptxas.log file.")
        if args.same_code_as is not None:
            compared = check_same_code(
                parse_code(dump_sass(extension)), parse_code(dump_sass(args.same_code_as))
            )
    except CannotCheckError as error:
        print(f"sass_gate: {error}", file=sys.stderr)
        return 2

    print(table(kernels.values(), logs))
    failures = check_extension(kernels, architectures, ptx_files) + compared
    for kernel in kernels.values():
        failures += check_kernel(kernel)
    if args.ptxas_logs is not None:
        failures += check_ptxas(kernels, logs)
    for failure in failures:
        print(f"sass_gate: {failure}", file=sys.stderr)
    print(f"sass_gate: {len(kernels)} kernels, {len(failures)} failures ({extension.name})")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
