"""Write cuda/ptx/wgmma.cuh: one wrapper per wgmma shape that a kernel uses.

Run without arguments to rewrite the header, with --check to fail when it is out of date.
"""

import pathlib
import sys

HEADER = pathlib.Path(__file__).resolve().parent.parent / "cuda" / "ptx" / "wgmma.cuh"

INTRO = """\
// Written by scripts/generate_wgmma.py; change that file, not this one.
//
// wgmma.mma_async, one wrapper per shape in use: D[64][kN] (+)= A[64][K] B[K][kN], where K is 32
// bytes of one operand row. All 128 threads of a warpgroup call it together, between wgmma_fence
// and wgmma_commit. `accumulate` = 0 overwrites D. WgmmaSs takes A and B from shared memory
// (descriptors), WgmmaRs takes A from four registers. 16-bit operands: WgmmaSs reads both K-major,
// WgmmaRs reads B MN-major, WgmmaRsK reads it K-major, WgmmaSsMn reads both MN-major.
#pragma once

#include <cstdint>

namespace jax_fa3::ptx {

// Operand element types.
struct E4m3 {};
struct E5m2 {};
struct Bf16 {};
struct F16 {};

// Acc is float (kN / 2 registers) or uint32_t (kN / 4 registers of two f16 each).
template <class A, class B, class Acc, int kN>
struct WgmmaSs;
template <class A, class B, class Acc, int kN>
struct WgmmaRs;
template <class A, class B, class Acc, int kN>
struct WgmmaRsK;
template <class A, class B, class Acc, int kN>
struct WgmmaSsMn;
"""

_VALUE_COLUMNS = (32, 40, 64, 72, 128, 136)  # FP8: of P V, with the ones column or in parts
# (kind, A, B, accumulator, n)
SHAPES = [
    *[("WgmmaSs", t, t, "f16", 128) for t in ("E4m3", "E5m2")],
    *[("WgmmaRs", "E4m3", t, "f32", n) for t in ("E4m3", "E5m2") for n in _VALUE_COLUMNS],
    ("WgmmaSs", "E4m3", "E4m3", "f32", 64),
    *[("WgmmaSs", t, t, "f32", n) for t in ("Bf16", "F16") for n in (64, 128)],
    *[("WgmmaRs", t, t, "f32", n) for t in ("Bf16", "F16") for n in (64, 128, 256)],
    *[("WgmmaRsK", t, t, "f32", 64) for t in ("Bf16", "F16")],
    *[("WgmmaSsMn", t, t, "f32", 64) for t in ("Bf16", "F16")],
]


def wrapper(kind: str, a: str, b: str, acc: str, n: int) -> str:
    """Text of one specialisation."""
    count = n // 2 if acc == "f32" else n // 4
    c_type, constraint = ("float", "f") if acc == "f32" else ("uint32_t", "r")
    is_fp8 = a in ("E4m3", "E5m2")
    k = 32 if is_fp8 else 16
    registers = ", ".join(f"%{i}" for i in range(count))
    lines = [f'        "{{{registers}}}, "']
    operands = ", ".join(f'"+{constraint}"(d[{i}])' for i in range(count))
    if kind in ("WgmmaRs", "WgmmaRsK"):
        source = "{" + ", ".join(f"%{count + i}" for i in range(4)) + f"}}, %{count + 4}, use_d"
        predicate = count + 5
        inputs = '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)'
        parameter = "const uint32_t* a"
        # 16-bit B from a row-major [K][N] tile is MN-major: its transpose bit is 1.
        tail = "1, 1" if is_fp8 else "1, 1, 0" if kind == "WgmmaRsK" else "1, 1, 1"
    else:
        source = f"%{count}, %{count + 1}, use_d"
        predicate = count + 2
        inputs = '"l"(a), "l"(b), "r"(accumulate)'
        parameter = "uint64_t a"
        transposes = ", 1, 1" if kind == "WgmmaSsMn" else ", 0, 0"
        tail = "1, 1" + ("" if is_fp8 else transposes)
    return "\n".join(
        [
            "template <>",
            f"struct {kind}<{a}, {b}, {c_type}, {n}> {{",
            f"  static __device__ __forceinline__ void run({c_type} (&d)[{count}], {parameter},",
            "                                             uint64_t b, int accumulate) {",
            "    asm volatile(",
            f'        "{{.reg .pred use_d; setp.ne.b32 use_d, %{predicate}, 0; "',
            f'        "wgmma.mma_async.sync.aligned.m64n{n}k{k}.{acc}.{a.lower()}.{b.lower()} "',
            *lines,
            f'        "{source}, {tail};}}"',
            f"        : {operands}",
            f"        : {inputs});",
            "  }",
            "};",
        ]
    )


def text() -> str:
    """The whole header."""
    body = "\n\n".join(wrapper(*shape) for shape in SHAPES)
    end = "// clang-format on\n\n}  // namespace jax_fa3::ptx\n"
    return f"{INTRO}\n// clang-format off\n{body}\n{end}"


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        if HEADER.read_text() != text():
            sys.exit(f"{HEADER.name} is out of date: run scripts/generate_wgmma.py")
    else:
        HEADER.write_text(text())
