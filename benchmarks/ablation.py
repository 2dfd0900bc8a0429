"""What each choice of the forward kernels is worth: variants of the table in cuda/fwd/config.h.

python benchmarks/ablation.py build --folder build/ablation          # needs nvcc, no GPU
python benchmarks/ablation.py time --folder build/ablation           # needs a Hopper GPU, no nvcc

A variant is a kernel as built with some fields of its config changed, or with tiles dealt out by a
fixed stride. `build` compiles each into a library of its own, and notes beside it what the compiler
said; `time` checks each against the kernel as built, lets them take turns, and prints a Markdown
table (TFLOP/s).
"""

from __future__ import annotations

import harness  # isort: skip  # sets how JAX allocates, before JAX is imported

import argparse
import ctypes
import dataclasses
import math
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import row_tables

import jax_fa3
from jax_fa3 import _ffi
from jax_fa3._cli import bench, contenders, grid, results, text, timing

ROOT = Path(__file__).resolve().parents[1]
SHAPES = ((8192, False), (8192, True), (1024, True))  # seqlen, is_causal
CLOSE = 0.03  # relative L2 to the kernel as built; exponentials differ between FP8 variants


@dataclasses.dataclass(frozen=True)
class Variant:
    """A config of cuda/fwd/config.h with changed fields; `fixed_tiles` leaves out the counter."""

    base: str
    changes: tuple[tuple[str, str], ...] = ()
    fixed_tiles: bool = False

    @property
    def name(self) -> str:
        """What is different, in words of the config table."""
        parts = [f"{field[1:]} {value.split('::')[-1]}" for field, value in self.changes]
        parts += ["tiles by a fixed stride"] if self.fixed_tiles else []
        return ", ".join(parts) or "as built"

    @property
    def is_fp8(self) -> bool:
        return self.base.startswith("FwdFp8")

    @property
    def head_dim(self) -> int:
        return int(self.base.split("D")[1].split("<")[0])

    @property
    def library(self) -> str:
        """File name without the suffix."""
        return "".join(c if c.isalnum() else "_" for c in f"{self.base} {self.name}")


def _variants() -> list[Variant]:
    found = []

    def add(base: str, *changes: dict[str, str]) -> None:
        found.append(Variant(base))
        found.append(Variant(base, fixed_tiles=True))
        found.extend(Variant(base, tuple(change.items())) for change in changes)

    def pipelines(*names: str) -> list[dict[str, str]]:
        return [{"kPipeline": f"Pipeline::k{name}"} for name in names]

    def seams(*names: str) -> list[dict[str, str]]:
        return [{"kSeam": f"Seam::k{name}"} for name in names]

    for head_dim, other in ((64, "Intra"), (128, "Both")):
        exact = f"FwdFp8D{head_dim}<ptx::E4m3, Exp2::kExact>"
        add(
            exact,
            *pipelines("Serial", "PingPong", other),
            *({"kMufuEighths": share} for share in ("3", "5", "8")),
            *({"kPromoteEvery": blocks} for blocks in ("1", "2")),
            *({"kNumStages": stages} for stages in ("2", "3")),
            {"kHeadroom": "1.0f"},
            *seams("Plain", "LooksAhead" if head_dim == 64 else "Scores"),
            {"kQueryStages": "2"},
            {"kMathWarpgroups": "2" if head_dim == 64 else "3"},
            *([{"kClusterSize": "2"}] if head_dim == 128 else []),
        )
    add(
        "FwdFp8D256<ptx::E4m3, Exp2::kExact>",
        *pipelines("PingPong"),
        *({"kMufuEighths": share} for share in ("2", "6", "8")),
        {"kClusterSize": "1"},
    )
    add("Fwd16D64<ptx::Bf16>", *pipelines("Serial", "PingPong", "Intra"),
        *seams("Plain", "LooksAhead"), {"kQueryStages": "2"}, {"kMathWarpgroups": "2"},
        {"kBlockKv": "64"}, {"kBlockKv": "96"}, {"kNumStages": "2"})  # fmt: skip
    add("Fwd16D128<ptx::Bf16>", *pipelines("Serial", "PingPong", "Both"),
        *seams("Scores", "LooksAhead"), {"kTwoProbBuffers": "false"},
        {"kBlockKv": "64"}, {"kBlockKv": "96"})  # fmt: skip
    add(
        "Fwd16D256<ptx::Bf16>",
        *pipelines("Serial", "PingPong", "Both"),
        {"kTwoProbBuffers": "false"},
    )
    return found


VARIANTS = tuple(_variants())


# ---- build ---------------------------------------------------------------------------------------


def source(variant: Variant) -> str:
    """A translation unit that puts the variant where the dispatch of the package stands."""
    fields = {
        "kPipeline": "Pipeline",
        "kTwoProbBuffers": "bool",
        "kSeam": "Seam",
        "kHeadroom": "float",
    }
    members = "".join(
        f"  static constexpr {fields.get(field, 'int')} {field} = {value};\n"
        for field, value in variant.changes
    )
    taken = "params.tile_counter = nullptr;" if variant.fixed_tiles else ""
    refuse = "return cudaErrorInvalidValue;"
    run = f"{taken} return launch_fwd<Variant>(params, stream);"
    return f"""\
#include "cuda/fwd/launch.cuh"
#include "cuda/fwd/launch.h"
#include "bindings/handlers.h"
#include "xla/ffi/api/ffi.h"
namespace jax_fa3 {{
struct Variant : {variant.base} {{
{members}}};
cudaError_t launch_fwd_fp8(const Fp8Params& given, ElementKind, int, Exp2, cudaStream_t stream) {{
  Fp8Params params = given; (void)params; (void)stream; {run if variant.is_fp8 else refuse}
}}
cudaError_t launch_fwd_native(const NativeParams& given, ElementKind, int, cudaStream_t stream) {{
  NativeParams params = given; (void)params; (void)stream; {refuse if variant.is_fp8 else run}
}}
}}  // namespace jax_fa3
extern "C" XLA_FFI_Error* ablation_forward(XLA_FFI_CallFrame* frame) {{
  return jax_fa3::{"kFwdFp8Handler" if variant.is_fp8 else "kFwdHandler"}(frame);
}}
"""


def build(variants: Sequence[Variant], folder: Path, jobs: int) -> None:
    """One library per variant; those whose kernels spill or are serialised say so."""
    if shutil.which("nvcc") is None:
        raise text.UsageError("build needs nvcc on PATH")
    folder.mkdir(parents=True, exist_ok=True)
    compiler = ["nvcc", "-O3", "-std=c++17", "-gencode", "arch=compute_90a,code=sm_90a"]
    compiler += ["-Xcompiler=-fPIC", "-cudart=static", f"-I{ROOT}", f"-I{jax.ffi.include_dir()}"]

    def compile_object(path: Path) -> Path:
        target = folder / f"{path.stem}.o"
        subprocess.run([*compiler, "-c", str(path), "-o", str(target)], check=True)
        return target

    common = [
        compile_object(ROOT / "bindings/fwd_ffi.cc"),
        compile_object(ROOT / "cuda/common/tensor_map.cu"),
        compile_object(ROOT / "cuda/fwd/tile_counter.cu"),
    ]

    def compile_variant(variant: Variant) -> str:
        path = folder / f"{variant.library}.cu"
        path.write_text(source(variant))
        command = [*compiler, "-Xptxas=-v", "-shared", str(path), *map(str, common)]
        command += ["-Xlinker=--no-undefined", "-o", str(path.with_suffix(".so"))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        path.with_suffix(".note").write_text("does not compile")
        if done.returncode != 0:
            return f"{variant.base}, {variant.name}: does not compile\n{done.stderr[-500:]}"
        words = done.stderr.replace(",", " ").split()
        spilled = any(a != "0" for a, b, c in zip(words, words[1:], words[2:], strict=False)
                      if (b, c) == ("bytes", "spill"))  # fmt: skip
        notes = ["spills"] if spilled else []
        notes += ["is serialised"] if "C751" in done.stderr else []
        path.with_suffix(".note").write_text(", ".join(notes))
        return f"{variant.base}, {variant.name}: {', '.join(notes) or 'ok'}"

    with ThreadPoolExecutor(jobs) as pool:
        for line in pool.map(compile_variant, variants):
            print(line, flush=True)


# ---- time ----------------------------------------------------------------------------------------


def register(variant: Variant, folder: Path) -> str | None:
    """The FFI target of a built variant; None when it was not built."""
    path = folder / f"{variant.library}.so"
    if not path.exists():
        return None
    target = f"jax_fa3_ablation_{variant.library}"
    handler = ctypes.CDLL(str(path)).ablation_forward
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="CUDA")
    return target


def operands(variant: Variant, shape: grid.Shape) -> tuple[jax.Array, ...]:
    """What the kernel reads: images, or bfloat16 arrays and the softmax scale."""
    size = (shape.batch, shape.seqlen_q, shape.num_heads_q, shape.head_dim)
    query, key, value = (
        jax.random.normal(seed, size, jnp.bfloat16)
        for seed in jax.random.split(jax.random.key(0), 3)
    )
    if variant.is_fp8:
        return tuple(contenders.quantize((query, key, value), jax_fa3.Quantization.accurate()))
    return query, key, value, jnp.float32(shape.head_dim**-0.5)


def forward(variant: Variant, target: str, shape: grid.Shape) -> Any:
    """The variant as a function of its operands."""
    if variant.is_fp8:
        return lambda *images: _ffi.fwd_fp8(
            _ffi.Images(*images),
            seqlen_q=shape.seqlen_q,
            seqlen_k=shape.seqlen_k,
            is_causal=shape.is_causal,
            bottom_right=True,
            linear_exp="kLinear" in variant.base,
            out_dtype=jnp.bfloat16,
            target=target,
        )
    return lambda *args: _ffi.fwd_native(
        *args, is_causal=shape.is_causal, bottom_right=True, target=target
    )


def time_base(
    variants: Sequence[Variant], folder: Path, rounds: int, turn_s: float, record: results.Recorder
) -> None:
    """Rows of one config's variants, the kernel as built first."""
    targets = {v: target for v in variants if (target := register(v, folder)) is not None}
    if variants[0] not in targets:
        raise text.UsageError(f"{folder} must hold {variants[0].library}.so; run the step build")
    for seqlen, is_causal in SHAPES:
        head_dim = variants[0].head_dim
        shape = grid.square(16_384 // seqlen, seqlen, 2048 // head_dim, head_dim, is_causal)
        arrays = operands(variants[0], shape)
        sides: dict[str, timing.Side] = {}
        errors: dict[Variant, float] = {}
        expected = None
        for variant, target in targets.items():
            try:
                side = timing.jax_side(forward(variant, target, shape), *arrays)
            except jax.errors.JaxRuntimeError as error:  # more shared memory than there is, say
                print(f"{variant.base}, {variant.name}: {str(error)[:200]}", file=sys.stderr)
                errors[variant] = math.nan
                continue
            out = np.asarray(jax.tree.leaves(side.launch())[0], np.float32)
            expected = out if expected is None else expected
            errors[variant] = float(np.linalg.norm(out - expected) / np.linalg.norm(expected))
            if errors[variant] <= CLOSE:
                sides[variant.name] = side
        turns = timing.take_turns(sides, timing.SUSTAINED, rounds, turn_s=turn_s)
        record.add(row(v, shape, folder, errors.get(v), turns.get(v.name)) for v in variants)


def row(
    variant: Variant,
    shape: grid.Shape,
    folder: Path,
    error: float | None,
    turns: timing.Turns | None,
) -> dict[str, Any]:
    """One measurement; without turns the note says why there are none."""
    path = folder / f"{variant.library}.note"
    note = path.read_text(encoding="utf-8") if path.exists() else "not built"
    if error is not None and turns is None:
        note = "does not run" if math.isnan(error) else f"WRONG ({error:.1e})"
    return {
        "kind": "ablation",
        "kernel": variant.base.replace("ptx::", ""),
        "variant": variant.name,
        "note": note,
        **dataclasses.asdict(shape),
        "tflops": None if turns is None else round(shape.flops / turns.median / 1e9, 1),
        "ms": None if turns is None else round(turns.median, 5),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("step", choices=("build", "time"), help="compile the variants, or let them take turns")
    add("--folder", type=Path, default=ROOT / "build/ablation", help="default build/ablation")
    add("--jobs", type=text.positive_int, default=2, help="compilers at a time (default 2)")
    add("--rounds", type=text.positive_int, default=3, help="turns of each variant (default 3)")
    add("--seconds", type=text.positive_float, default=0.05, help="of a turn (default 0.05)")
    bench.add_head_dims_flag(parser)
    add("--json", type=Path, metavar="FILE", help="write a result file, after every shape")
    flags = parser.parse_args(arguments)
    chosen = [variant for variant in VARIANTS if variant.head_dim in flags.head_dims]
    if flags.step == "build":
        build(chosen, flags.folder, flags.jobs)
        return 0
    record = results.Recorder(flags.json)
    for base in dict.fromkeys(variant.base for variant in chosen):
        variants = [variant for variant in chosen if variant.base == base]
        time_base(variants, flags.folder, flags.rounds, flags.seconds, record)
    record.close()
    print(row_tables.ablation_table(record.rows))
    return 0


if __name__ == "__main__":
    sys.exit(harness.exit_with_usage(main))
