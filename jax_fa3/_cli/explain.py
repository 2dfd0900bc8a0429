"""`python -m jax_fa3 explain`: what `attention` would run for a shape, and why nothing else."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax
import jax.numpy as jnp

import jax_fa3
from jax_fa3._cli.accuracy import PRESETS
from jax_fa3._cli.text import positive_float, positive_int

_DTYPES: dict[str, Any] = {
    "bf16": jnp.bfloat16,
    "f16": jnp.float16,
    "f32": jnp.float32,
    "e4m3": jnp.float8_e4m3fn,
    "e5m2": jnp.float8_e5m2,
}


def add_parser(commands: Any) -> None:
    """Adds the sub-command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain",
        help="print which kernel would serve a shape, and why no other path",
        description=(
            "Prints the plan of jax_fa3.attention for one shape without computing anything. "
            'Exit code 1: implementation "cuda" was asked for and cannot serve it; 2: the flags '
            "contradict each other."
        ),
    )
    add = parser.add_argument
    add("--batch", type=positive_int, default=2, metavar="N", help="batch size (default 2)")
    add("--seqlen-q", type=positive_int, default=2048, metavar="N", help="queries (default 2048)")
    add("--seqlen-k", type=positive_int, metavar="N", help="keys (default: as many as queries)")
    add("--heads-q", type=positive_int, default=16, metavar="N", help="query heads (default 16)")
    add("--heads-kv", type=positive_int, metavar="N", help="key heads (default: --heads-q)")
    add("--head-dim", type=positive_int, default=128, metavar="N", help="head_dim (default 128)")
    add("--head-dim-v", type=positive_int, metavar="N", help="of value (default: --head-dim)")
    add("--dtype", choices=_DTYPES, default="bf16", help="of the inputs (default bf16)")
    add("--preset", choices=PRESETS, default="accurate", help="fp8 preset, or native for 16 bits")
    add("--causal", action="store_true", help="causal mask")
    add("--causal-alignment", choices=("bottom_right", "top_left"), default="bottom_right")
    add("--window-left", type=int, metavar="N", help="keys to the left that a query sees")
    add("--window-right", type=int, metavar="N", help="keys to the right that a query sees")
    add("--soft-cap", type=positive_float, metavar="X", help="logits_soft_cap")
    add("--implementation", choices=("cuda", "xla"), help="as in attention (default: the best)")
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Prints the plan."""
    dtype = _DTYPES[flags.dtype]
    heads_kv = flags.heads_kv or flags.heads_q
    seqlen_k = flags.seqlen_k or flags.seqlen_q
    shapes = {
        "query": (flags.batch, flags.seqlen_q, flags.heads_q, flags.head_dim),
        "key": (flags.batch, seqlen_k, heads_kv, flags.head_dim),
        "value": (flags.batch, seqlen_k, heads_kv, flags.head_dim_v or flags.head_dim),
    }
    options: dict[str, Any] = {
        "is_causal": flags.causal,
        "causal_alignment": flags.causal_alignment,
        "logits_soft_cap": flags.soft_cap,
        "implementation": flags.implementation,
        "precision": "native" if flags.preset == "native" else "fp8",
        "quantization": PRESETS[flags.preset],
    }
    if flags.window_left is not None or flags.window_right is not None:
        options["window_size"] = (flags.window_left, flags.window_right)
    if flags.dtype in ("e4m3", "e5m2"):
        for name in shapes:
            options[f"{name}_descale"] = jax.ShapeDtypeStruct((), jnp.float32)
    arrays = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    try:
        plan = jax_fa3.explain(**arrays, **options)
    except (NotImplementedError, RuntimeError) as error:
        print(f"jax_fa3: {error}", file=sys.stderr)
        return 1
    except (TypeError, ValueError) as error:
        print(f"jax_fa3: {error}", file=sys.stderr)
        return 2
    print(plan)
    return 0
