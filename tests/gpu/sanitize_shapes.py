"""A few tiny shapes through every kernel, forward and backward, to be run under compute-sanitizer.

compute-sanitizer --tool memcheck --error-exitcode 9 python tests/gpu/sanitize_shapes.py

Plain Python and little else on the device: inputs and the float64 check are NumPy. Sizes end inside
tiles, queries outnumber keys or the other way round, key heads are shared, CTAs go once more round
their rings of tiles. --dry-run runs the XLA
path instead, on any device.
"""

from __future__ import annotations

import os

# Every array its own allocation, so that a step outside one is seen.
os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import argparse
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jax_fa3
from jax_fa3 import Quantization
from jax_fa3._cli import accuracy

FP8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
LIMIT = 0.2  # relative L2; e5m2 has two bits. A lost tile or a wrong scale is far beyond it.


class Call(NamedTuple):
    """One call; stored: "bf16", "f16", a float8 kind, or "kv " and a kind with bf16 queries."""

    name: str
    seqlen_q: int
    seqlen_k: int
    stored: str
    options: dict[str, Any]
    batch: int = 2


def fp8(**fields: Any) -> dict[str, Any]:
    return {"precision": "fp8", "quantization": Quantization(**fields)}


MANY = 140  # times 4 heads: more than three tiles for each of the 132 CTAs of an H100
NATIVE = {"precision": "native"}
CAUSAL = {"is_causal": True}
ALONE = {"return_logsumexp": False}  # of many heads, queries are then quantised in two launches
IN_ORDER = {"deterministic": True}
TOP_LEFT = {"is_causal": True, "causal_alignment": "top_left"}
CALLS = (
    Call("exact", 37, 53, "bf16", fp8()),
    Call("exact causal", 333, 517, "bf16", {**fp8(), **CAUSAL}),
    Call("exact more queries", 205, 131, "f16", {**fp8(), **CAUSAL}),
    Call("linear", 200, 333, "f16", fp8(softmax="linear")),
    Call("linear top left", 129, 257, "bf16", {**fp8(softmax="linear"), **TOP_LEFT}),
    Call("e5m2", 129, 257, "bf16", fp8(dtype="e5m2")),
    Call("e5m2 linear causal", 65, 193, "f16", {**fp8(dtype="e5m2", softmax="linear"), **CAUSAL}),
    Call("bare", 70, 140, "bf16", fp8(hadamard=False, smooth_key=False, center_value=False)),
    Call("float8 e4m3", 97, 161, "e4m3", fp8()),
    Call("float8 e5m2 causal", 97, 161, "e5m2", {**fp8(dtype="e5m2"), **CAUSAL}),
    Call("float8 key, value", 3, 259, "kv e4m3", fp8()),
    Call("native", 37, 53, "bf16", NATIVE),
    Call("native causal", 333, 517, "bf16", {**NATIVE, **CAUSAL}),
    Call("native f16 top left", 205, 131, "f16", {**NATIVE, **TOP_LEFT}),
    Call("one key", 5, 1, "bf16", fp8()),
    Call("exact sampled", 37, 1100, "bf16", fp8()),
    Call("exact many tiles", 21, 150, "bf16", {**fp8(), **CAUSAL}, MANY),
    Call("exact alone", 5, 37, "bf16", {**fp8(), **ALONE}, 2 * MANY),
    Call("native many tiles", 21, 150, "bf16", {**NATIVE, **CAUSAL}, MANY),
)
GRADIENTS = (
    Call("native", 37, 53, "bf16", NATIVE),
    Call("native causal", 133, 197, "bf16", {**NATIVE, **CAUSAL}),
    Call("native f16 causal more queries", 205, 131, "f16", {**NATIVE, **CAUSAL}),
    Call("exact causal", 133, 197, "bf16", {**fp8(), **CAUSAL}),
    Call("exact long", 2051, 131, "bf16", fp8()),
    Call("exact long causal", 4099, 197, "bf16", {**fp8(), **CAUSAL}),
    Call("deterministic causal", 133, 197, "bf16", {**NATIVE, **CAUSAL, **IN_ORDER}),
    Call("deterministic f16 more queries", 205, 131, "f16", {**NATIVE, **IN_ORDER}),
)
HEADS_Q, HEADS_KV = 4, 2


def run(call: Call, head_dim: int, implementation: str) -> float:
    """Relative L2 error of one call against float64."""
    problem = accuracy.Problem(
        call.seqlen_q, call.seqlen_k, HEADS_Q, HEADS_KV, head_dim, batch=call.batch
    )
    wide = "f16" if call.stored == "f16" else "bf16"
    arrays = dict(zip(("query", "key", "value"), accuracy.draw(problem, dtype=wide), strict=True))
    exact = {name: x.astype(np.float32) for name, x in arrays.items()}
    descales: dict[str, Any] = {}
    kind = FP8.get(call.stored.split()[-1])
    for name in arrays if kind is not None else ():
        if name == "query" and call.stored.startswith("kv "):
            continue
        descale = np.float32({"query": 0.5, "key": 2.0, "value": 0.25}[name])
        arrays[name] = (exact[name] / descale).astype(kind)
        exact[name] = arrays[name].astype(np.float32) * descale
        descales[f"{name}_descale"] = descale

    options = {"return_logsumexp": True, **descales, **call.options}

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        found = jax_fa3.attention(q, k, v, implementation=implementation, **options)
        return found if options["return_logsumexp"] else (found, jnp.zeros(()))

    out, logsumexp = jax.jit(attend)(*arrays.values())
    query, key, value = exact.values()
    is_causal = call.options.get("is_causal", False)
    if call.options.get("causal_alignment") == "top_left":
        expected = top_left(query, key, value)
    else:
        expected = accuracy.reference(query, key, value, is_causal=is_causal)
    if np.isnan(np.asarray(logsumexp)).any():
        return float("nan")
    return accuracy.errors(out, expected).rel_l2


def run_gradient(call: Call, head_dim: int, implementation: str) -> float:
    """Largest relative L2 error of the three gradients of one call against float64."""
    problem = accuracy.Problem(
        call.seqlen_q, call.seqlen_k, HEADS_Q, HEADS_KV, head_dim, batch=call.batch
    )
    arrays = accuracy.draw(problem, dtype=call.stored)
    dout = np.flip(arrays[0], axis=1)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return jax_fa3.attention(q, k, v, implementation=implementation, **call.options)

    found = jax.jit(lambda *x: jax.vjp(attend, *x[:3])[1](x[3]))(*arrays, dout)
    expected = gradients(*arrays, dout, is_causal=call.options.get("is_causal", False))
    return max(accuracy.errors(x, y).rel_l2 for x, y in zip(found, expected, strict=True))


def gradients(query: Any, key: Any, value: Any, dout: Any, *, is_causal: bool) -> list[Any]:
    """dquery, dkey and dvalue in float64; rows that see nothing give none."""
    q, k, v, do = (np.moveaxis(np.asarray(x, np.float64), 2, 1) for x in (query, key, value, dout))
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    scores = q @ np.swapaxes(k, -1, -2) * scale
    if is_causal:  # the last query sees all keys
        rows, columns = np.indices(scores.shape[-2:])
        scores[..., columns > rows + k.shape[2] - q.shape[2]] = -np.inf
    top = scores.max(axis=-1, keepdims=True)
    p = np.exp(scores - np.where(np.isfinite(top), top, 0))
    p /= np.maximum(p.sum(axis=-1, keepdims=True), np.finfo(np.float64).tiny)
    ds = p * (do @ np.swapaxes(v, -1, -2) - np.sum((p @ v) * do, axis=-1, keepdims=True)) * scale
    per_query = [ds @ k, np.swapaxes(ds, -1, -2) @ q, np.swapaxes(p, -1, -2) @ do]
    sums = [x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(axis=2) for x in per_query[1:]]
    return [np.moveaxis(x, 1, 2) for x in (per_query[0], *sums)]


def top_left(query: Any, key: Any, value: Any) -> Any:
    """Causal reference aligned top left: rows beyond the keys see all of them."""
    square = min(query.shape[1], key.shape[1])
    head = accuracy.reference(query[:, :square], key[:, :square], value[:, :square], is_causal=True)
    tail = accuracy.reference(query[:, square:], key, value, is_causal=False)
    return np.concatenate([head, tail], axis=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="the XLA path, on any device")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    flags = parser.parse_args()
    implementation = "xla" if flags.dry_run else "cuda"
    work = [(call.name, call, run) for call in CALLS]
    work += [(f"gradient of {call.name}", call, run_gradient) for call in GRADIENTS]
    failed = 0
    for head_dim in flags.head_dims:
        for name, call, function in work:
            error = function(call, head_dim, implementation)
            good = error <= LIMIT
            failed += not good
            print(f"{'ok' if good else 'WRONG'}  D{head_dim}  {name}: {error:.2e}", flush=True)
    print(f"{len(work) * len(flags.head_dims)} calls, {failed} wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Not sys.exit: racecheck 2025.3 crashes while the CUDA runtimes of JAX are torn down, when its
    # work is done.
    os._exit(code)
