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
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for `python -P`, and where a test loads this file

from sass_listing import (
    CannotCheckError,
    Kernel,
    PtxasEntry,
    dump_sass,
    find_extension,
    parse_code,
    parse_ptxas,
    read_extension,
    same_images,
)

# ---- what we expect --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Exponentials:
    """How many a kernel holds: the compiler copies whole steps.

    Softmaxes of more steps than are multiplied mean that each takes more of them.
    """

    opcode: str
    step: int  # of each thread
    outside: int = 0  # how many more may stand outside of steps: new bases, row sums
    scores: tuple[str, int] | None = None  # opcode of Q K^T, and how many one step issues


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
    exponentials: Exponentials | None = None
    loop_on_line: bool = False  # whether the loop of products must begin a line of 128 bytes


SPILLS = ("LDL", "STL")  # registers that went to local memory and back
OLD_MMA = ("HMMA", "IMMA", "QMMA")  # the pre-Hopper tensor core path
ATOMICS = ("UBLKRED", "RED", "ATOM", "ATOMG")  # additions in whatever order they arrive
LOADS = ("UBLKCP", "UTMALDG")  # a bulk copy, with or without a tensor map
MULTICAST = "UBLKCP.S.G.MULTICAST"  # one copy for two CTAs
# V comes as the product wants it: FP8 from the quantiser, 16 bits by wgmma's own transposition.
TRANSPOSES = ("LDSM", "MOVM", "STSM.16.MT88")
WHY = (("spills registers", SPILLS), ("transposes", TRANSPOSES))  # what a forbidden opcode shows


def _fp8(head_dim: int, value_columns: tuple[int, ...], *, linear: bool) -> Rule:
    """FP8 forward: f16 scores, and P V with a column of ones, which brings the row sum.

    value_columns: widths of the P V that hold that column.
    """
    scores = "QGMMA.64x128x32.F16"
    products = (scores, *(f"QGMMA.64x{n}x32.F32" for n in value_columns))
    return Rule(
        family=f"fp8 {'linear' if linear else 'exact'} {head_dim}",
        pattern=rf"fwd_kernel.*FwdFp8D{head_dim}[I<].*Exp2[)E]{int(linear)}",
        at_least=2,
        required=(
            *((product,) for product in products),
            (MULTICAST,) if head_dim == 256 else LOADS,
            ("USETMAXREG",),
        ),
        # linear: exp2 is arithmetic on the byte
        forbidden=(*SPILLS, *OLD_MMA, *TRANSPOSES, "HGMMA", *(("MUFU.EX2.F16",) if linear else ())),
        # exact: half of 64 scores, the other half is arithmetic on the byte
        exponentials=(
            None if linear else Exponentials("MUFU.EX2.F16", 32, scores=(scores, head_dim // 32))
        ),
    )


def _native(head_dims: str, scores: int) -> Rule:
    """Forward at 16 bits; `scores` of a thread in each step."""
    return Rule(
        family=f"16-bit {head_dims.replace('|', ', ')}",
        pattern=rf"fwd_kernel.*Fwd16D({head_dims})[I<]",
        at_least=2 * len(head_dims.split("|")),
        required=(("HGMMA",), LOADS, ("USETMAXREG",)),
        forbidden=(*SPILLS, *OLD_MMA, *TRANSPOSES, "QGMMA"),
        exponentials=Exponentials("MUFU.EX2", scores, outside=15),
    )


def _added(
    family: str,
    pattern: str,
    at_least: int,
    *,
    loop_on_line: bool = False,
    float8_scores: bool = False,
) -> Rule:
    """Backward that adds dQ up in memory."""
    return Rule(
        family=family,
        pattern=pattern,
        at_least=at_least,
        required=(
            *(("HGMMA",), LOADS, ("USETMAXREG",), ("UBLKRED",), ("STSM",)),
            *([("QGMMA.64x64x32.F32",)] if float8_scores else []),
        ),
        forbidden=(*SPILLS, *OLD_MMA, *([] if float8_scores else ["QGMMA"])),
        exponentials=Exponentials("MUFU.EX2", 32),
        loop_on_line=loop_on_line,
    )


# The first rule that matches a kernel counts; a kernel that none matches is a failure.
RULES = (
    *(
        _fp8(head_dim, columns, linear=linear)
        for head_dim, columns in ((64, (72,)), (128, (136,)), (256, (136, 40)))
        for linear in (False, True)
    ),
    _native("64|128", 64),
    _native("256", 32),
    _added(
        "backward with float8 scores",
        r"bwd_(causal_)?kernel.*Float8",
        at_least=2,
        loop_on_line=True,
        float8_scores=True,
    ),
    _added("backward", r"bwd_kernel.*(Lb0E|Codes)", at_least=5),
    _added("backward causal", r"bwd_causal_kernel", at_least=3, loop_on_line=True),
    Rule(
        family="backward in order",  # promises a fixed order of additions
        pattern=r"bwd_(kernel.*Lb1E|wide_keys_kernel|dq_kernel)",
        at_least=12,
        required=(("HGMMA",), LOADS, ("USETMAXREG",)),
        forbidden=(*SPILLS, *OLD_MMA, *ATOMICS, "QGMMA"),
        exponentials=Exponentials("MUFU.EX2", 32),
    ),
    Rule(
        family="backward rows",  # what runs before and after it
        pattern=r"bwd_(rows|queries)_kernel",
        at_least=14,
        required=(),
        forbidden=(*SPILLS, *OLD_MMA, "QGMMA", "HGMMA"),
    ),
    Rule(
        family="means",  # where no rows are rotated beside them
        pattern=r"quantizeILi\d+ELb0ELb0ELNS_12QuantizeStepE0E",
        at_least=3,
        required=(),
        forbidden=(*SPILLS, *OLD_MMA, "QGMMA", "HGMMA"),
    ),
    Rule(
        family="rotation",  # products with a Hadamard matrix or with ones, too small for wgmma
        pattern=r"fa3(::|8)(quantize|unrotate)[<I]",
        at_least=24,
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
    Rule(
        family="tile counter",  # cleared before a forward kernel
        pattern=r"tile_counter_kernel",
        at_least=1,
        required=(("STG",),),
        forbidden=(*SPILLS, *ATOMICS, *OLD_MMA, "QGMMA", "HGMMA"),
    ),
)
ARCHITECTURE = "sm_90a"
COLUMNS = ("QGMMA", "HGMMA", "MUFU.EX2", "LDL", "STL", "BAR")

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
            why = next((w for w, those in WHY if opcode in those), "uses the wrong unit")
            failures.append(f"{short_name(kernel)}: {why}: {count} {opcode} instructions.")
    if rule.exponentials is not None:
        failures += check_exponentials(kernel, rule.exponentials)
    if rule.loop_on_line and (kernel.loop is None or kernel.loop[1] % 128):
        found = "there is none" if kernel.loop is None else f"got {kernel.loop[1]:#x}"
        failures.append(
            f"{short_name(kernel)}: the loop of products must begin at a multiple of 128 bytes; "
            f"{found}. BwdTraits::kLoopFill counts what goes before it in 16 bytes."
        )
    return failures


def check_exponentials(kernel: Kernel, rule: Exponentials) -> list[str]:
    """Sentences on how many exponentials one kernel holds."""
    found = kernel.count(rule.opcode)
    steps, rest = divmod(found, rule.step)
    if not steps or rest > rule.outside:
        return [
            f"{short_name(kernel)}: must hold {rule.step} {rule.opcode} for each copy of a step "
            f"and at most {rule.outside} others; got {found}."
        ]
    if rule.scores is not None:
        opcode, each = rule.scores
        multiplied = kernel.count(opcode)
        if 0 < multiplied < steps * each:
            return [
                f"{short_name(kernel)}: must hold at most {rule.step} {rule.opcode} for every "
                f"{each} {opcode}; got {found} and {multiplied}."
            ]
    return []


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
        # The same bytes in two extensions of one build; two builds differ in paths of sources.
        if args.same_code_as is not None and not same_images(extension, args.same_code_as):
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
