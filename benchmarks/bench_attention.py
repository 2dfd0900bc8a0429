"""Speed of the forward pass over the FlashAttention-3 grid, next to rivals, as JSON rows.

python benchmarks/bench_attention.py --json benchmarks/results/fwd.json

16,384 tokens, width 2,048, head_dim 64, 128 and 256, seqlen 512 to 16k, with and without a causal
mask, plus batch 16, seqlen 8,192, 16 heads of 128. Ours twice: the kernel alone on quantised
inputs, and whole calls from bf16 (`with_quantize`). With --seconds 0.15 the usual rounds of the
grid take about seven minutes of GPU time; compiling and contested ratios come on top.
"""

from __future__ import annotations

import harness  # isort: skip  # sets how JAX allocates, before JAX is imported

import argparse
import sys
from collections.abc import Sequence

import contested
from rivals import RIVALS, add_rivals_flag

from jax_fa3._cli import bench, contenders, grid, text
from jax_fa3._cli.contenders import Contender

PRESETS = ("accurate", "fast")
NATIVE = ("bf16", "f16")
QUANTIZE = {"kernel": (False,), "whole": (True,), "both": (False, True)}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    bench.add_grid_flags(made)
    add = made.add_argument
    text.add_list_flag(made, "--presets", PRESETS, of=(*PRESETS, "none"), about="presets in fp8,")
    text.add_list_flag(
        made,
        "--native",
        ["bf16"],
        of=(*NATIVE, "none"),
        about="dtypes in 16 bits,",
    )
    add("--quantize", choices=QUANTIZE, default="both", help="fp8: the kernel, whole calls or both")
    add_rivals_flag(made)
    contested.add_flag(made)
    add("--no-headline", action="store_true", help="leave out batch 16, seqlen 8,192")
    add("--only-headline", action="store_true", help="nothing but batch 16, seqlen 8,192")
    return made


def groups(flags: argparse.Namespace) -> list[list[Contender]]:
    """Who takes turns with whom: fp8 with fp8 rivals and cuDNN, 16 bits with 16 bits."""
    rivals = [RIVALS[key] for key in flags.rivals if key != "none"]
    found = []
    fp8 = [
        contenders.ours(preset, with_quantize=with_quantize)
        for preset in flags.presets
        if preset != "none"
        for with_quantize in QUANTIZE[flags.quantize]
    ]
    if fp8:
        others = [r.contender("fp8") for r in rivals if "fp8" in r.precisions]
        others += [r.contender("bf16") for r in rivals if r.key == "cudnn"]
        found.append([*fp8, *others])
    for dtype in flags.native:
        if dtype != "none":
            others = [r.contender(dtype) for r in rivals if dtype in r.precisions]
            found.append([contenders.ours("native", dtype=dtype), *others])
    if not found:
        raise text.UsageError("--presets none with --native none leaves nothing to time")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    flags = parser().parse_args(arguments)
    shapes = bench.shapes_of(flags)
    if not flags.dry_run and not flags.no_headline:
        causal = bench.CAUSAL[flags.causal]
        # First, since it brings the card to its power limit.
        shapes = grid.headline(causal) + ([] if flags.only_headline else shapes)
    entrants = groups(flags)
    record = bench.recorder(flags)
    more = contested.more_rounds(flags, "fwd")
    bench.time_shapes(flags, shapes, entrants, record, more_for=more)
    return bench.finish(flags, record)


if __name__ == "__main__":
    sys.exit(harness.exit_with_usage(main))
