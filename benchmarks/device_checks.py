"""Two devices against one: context parallelism, sharding under jit and in shard_map, Flax.

Every check is a row {"kind": "check", "check": name, "errors": {result: [ours, yardstick]}, "ok"}.
Errors are relative L2 norms against float32 attention computed on the CPU; the yardstick is the
error of one device (or of Flax's own attention in bfloat16), and ours may be 1.5 times it plus
0.1 % (12 % for a float8 layer next to a bfloat16 one).
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa3

Row = dict[str, Any]
Arrays = tuple[np.ndarray[Any, Any], ...]

_COLLECTIVE = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
PRECISIONS = ("native", "fp8")
NAMES = ("out", "logsumexp", "dquery", "dkey", "dvalue")
FACTOR, FLOOR = 1.5, 1e-3
FLOAT8_FLOOR = 0.12  # of a float8 layer next to one in bfloat16


def mesh_of(devices: list[Any], kind: Any = AxisType.Auto) -> Mesh:
    """All devices along "x"."""
    return Mesh(np.array(devices), ("x",), axis_types=(kind,))


def make_inputs(seqlen: int, heads_q: int, heads_kv: int, head_dim: int, batch: int = 2) -> Arrays:
    """query, key, value and dout in bfloat16; every head has a magnitude of its own."""
    rng = np.random.default_rng(5)
    return tuple(
        (rng.normal(size=(batch, seqlen, heads, head_dim)) * (1 + 0.1 * np.arange(heads))[:, None])
        .astype(jnp.bfloat16)
        for heads in (heads_q, heads_kv, heads_kv, heads_q)
    )  # fmt: skip


def collectives(compiled: Any) -> list[str]:
    """Collective operations of a compiled program."""
    return sorted(set(_COLLECTIVE.findall(compiled.as_text())))


def compile_all(lowered: dict[Any, Any]) -> dict[Any, Any]:
    """Every lowered program compiled, several at a time; by name."""
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(lowered, pool.map(lambda x: x.compile(), lowered.values()), strict=True))


def row_of(
    check: str, names: Any, ours: Any, yardstick: Any, exact: Any, floor: float = FLOOR
) -> Row:
    """Compares trees of arrays leaf by leaf."""
    errors: dict[str, list[float]] = {}
    leaves = map(jax.tree.leaves, (ours, yardstick, exact))
    for name, a, b, truth in zip(names, *leaves, strict=True):
        truth = np.asarray(truth, np.float64)
        size = max(float(np.linalg.norm(truth)), 1e-30)
        errors[name] = [
            float(np.linalg.norm(np.asarray(x, np.float64) - truth)) / size for x in (a, b)
        ]
    # NaN compares false, so it is never ok.
    ok = all(mine <= FACTOR * theirs + floor for mine, theirs in errors.values())
    short = {name: [float(f"{e:.4g}") for e in pair] for name, pair in errors.items()}
    return {"kind": "check", "check": check, "ok": ok, "errors": short}


def with_gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """(query, key, value, dout) -> (out, logsumexp), then the gradients that dout pulls back."""

    def both(query: Any, key: Any, value: Any, dout: Any) -> Any:
        results, pull = jax.vjp(fn, query, key, value)
        return (*results, *pull((dout, 0.1 * jnp.ones_like(results[1]))))

    return both


def attend(**options: Any) -> Callable[..., Any]:
    """`attention` with its logsumexp."""
    return functools.partial(jax_fa3.attention, return_logsumexp=True, **options)


def exact_of(arrays: Arrays, is_causal: bool) -> Any:
    """Results and gradients of float32 attention on the CPU, as NumPy arrays."""
    fn = attend(implementation="xla", precision="native", is_causal=is_causal)
    cpu = jax.devices("cpu")[0]
    wide = [jax.device_put(np.asarray(x, np.float32), cpu) for x in arrays]
    return jax.tree.map(np.asarray, jax.jit(with_gradients(fn))(*wide))


# ---- context parallelism -------------------------------------------------------------------------


def parallel(mesh: Mesh, layout: str, **options: Any) -> Callable[..., Any]:
    """context_parallel_attention on whole sequences in natural order."""
    size = mesh.shape["x"]
    fn = functools.partial(
        jax_fa3.context_parallel_attention,
        axis_name="x",
        layout=layout,
        return_logsumexp=True,
        **options,
    )
    mapped = jax.shard_map(
        fn, mesh=mesh, in_specs=(P(None, "x"),) * 3, out_specs=(P(None, "x"), P(None, None, "x"))
    )
    if layout == "contiguous":
        return mapped

    def natural(*args: Any) -> Any:
        out, logsumexp = mapped(*(jax_fa3.zigzag_shard(x, size) for x in args))
        unshard = functools.partial(jax_fa3.zigzag_unshard, num_shards=size)
        return unshard(out), unshard(logsumexp, axis=2)

    return natural


def context_parallel(devices: list[Any], implementation: str, seqlen: int) -> Iterator[Row]:
    """Every strategy, both layouts, both precisions, grouped heads; gradients of the causal ones.

    Six query heads on three key heads: with "ulysses" groups straddle two devices.
    """
    arrays = make_inputs(seqlen, 6, 3, 64)
    mesh = mesh_of(devices)
    sharded = jax.device_put(arrays, NamedSharding(mesh, P(None, "x")))
    on_one = jax.device_put(arrays, devices[0])
    cases = [
        (strategy, layout, is_causal, precision)
        for precision in PRECISIONS
        for strategy in ("ring", "all_gather", "ulysses")
        for layout, is_causal in (("contiguous", False), ("contiguous", True), ("zigzag", True))
    ]
    programs: dict[str, Any] = {}
    for precision in PRECISIONS:
        for is_causal in (False, True):
            options = {"precision": precision, "implementation": implementation}
            fn = attend(is_causal=is_causal, **options)
            programs[f"one {is_causal} {precision}"] = with_gradients(fn), on_one
    for case in cases:
        strategy, layout, is_causal, precision = case
        fn = parallel(
            mesh,
            layout,
            strategy=strategy,
            is_causal=is_causal,
            precision=precision,
            implementation=implementation,
        )
        # Gradients compile slowly; the two layouts of the ring and one of each other show all code.
        graded = is_causal and (strategy == "ring" or layout == "zigzag")
        programs[str(case)] = (with_gradients(fn), sharded) if graded else (fn, sharded[:3])
    lowered = {name: jax.jit(fn).lower(*args) for name, (fn, args) in programs.items()}
    compiled = compile_all(lowered)
    exact = {is_causal: exact_of(arrays, is_causal) for is_causal in (False, True)}
    for case in cases:
        strategy, layout, is_causal, precision = case
        args = programs[str(case)][1]
        ours = compiled[str(case)](*args)
        one = compiled[f"one {is_causal} {precision}"](*on_one)
        count = len(ours)
        name = f"{strategy} {layout} {'causal' if is_causal else 'full'} {precision}"
        row = row_of(name, NAMES[:count], ours, one[:count], exact[is_causal][:count])
        yield {**row, "collectives": collectives(compiled[str(case)])}


# ---- sharding under jit and in shard_map ---------------------------------------------------------


@contextlib.contextmanager
def partitioner(shardy: bool) -> Iterator[None]:
    """Shardy or GSPMD for what is compiled inside."""
    name = "jax_use_shardy_partitioner"
    before = getattr(jax.config, name)
    jax.config.update(name, shardy)
    try:
        yield
    finally:
        jax.config.update(name, before)


class Sharded(NamedTuple):
    """One way to split attention: what runs, on which mesh, and the specs of query and of key."""

    fn: Callable[..., Any]
    mesh: Mesh
    spec: Any
    kv_spec: Any
    shardy: bool = True

    def programs(self, arrays: Arrays) -> dict[str, tuple[Any, Any]]:
        """(lowered, arguments) of the forward pass and of both passes."""
        specs = (self.spec, self.kv_spec, self.kv_spec, self.spec)
        explicit = AxisType.Explicit in self.mesh.axis_types
        with jax.set_mesh(self.mesh) if explicit else contextlib.nullcontext():
            args = [
                jax.device_put(x, NamedSharding(self.mesh, s))
                for x, s in zip(arrays, specs, strict=True)
            ]
            return {
                "forward": (jax.jit(self.fn).lower(*args[:3]), args[:3]),
                "both": (jax.jit(with_gradients(self.fn)).lower(*args), args),
            }


def ways_to_split(fn: Any, devices: list[Any], fp8: bool, one_key_head: bool) -> dict[str, Sharded]:
    """Batch and heads, by both partitioners, on an explicit mesh and in shard_map; by name."""
    mesh, explicit = mesh_of(devices), mesh_of(devices, AxisType.Explicit)
    batch, heads = P("x"), P(None, None, "x")
    cases = {"heads": (heads, P() if one_key_head else heads)}
    if not one_key_head:
        cases["batch"] = (batch, batch)
    found: dict[str, Sharded] = {}
    for axis, (spec, kv_spec) in cases.items():
        found[f"shardy {axis}"] = Sharded(fn, mesh, spec, kv_spec)
        if fp8:  # one way of partitioning shows the other calls
            continue
        found[f"gspmd {axis}"] = Sharded(fn, mesh, spec, kv_spec, shardy=False)
        found[f"explicit {axis}"] = Sharded(fn, explicit, spec, kv_spec)
        mapped = jax.shard_map(
            fn,
            mesh=mesh,
            in_specs=(spec, kv_spec, kv_spec),
            out_specs=(spec, P("x") if axis == "batch" else P(None, "x")),
        )
        found[f"shard_map {axis}"] = Sharded(mapped, mesh, spec, kv_spec)
    return found


def sharding(devices: list[Any], implementation: str, seqlen: int) -> Iterator[Row]:
    """Batch and heads split over the devices: no collective, and the results of one device.

    With a single key head, query heads are split and key and value are on every device; only there
    may the gradients be summed over devices.
    """
    for title, heads in {"grouped": (8, 4), "one key head": (4, 1)}.items():
        arrays = make_inputs(seqlen, *heads, 64)
        exact = exact_of(arrays, True)
        on_one = jax.device_put(arrays, devices[0])
        for precision in PRECISIONS:
            fn = attend(is_causal=True, precision=precision, implementation=implementation)
            one = jax.jit(with_gradients(fn))(*on_one)
            ways = ways_to_split(fn, devices, precision == "fp8", heads[1] == 1)
            for shardy in (True, False):
                chosen = {name: way for name, way in ways.items() if way.shardy == shardy}
                with partitioner(shardy):
                    lowered = {name: way.programs(arrays) for name, way in chosen.items()}
                    flat = {(n, k): x for n, pair in lowered.items() for k, (x, _) in pair.items()}
                    compiled = compile_all(flat)
                for name, way in chosen.items():
                    forward, both = compiled[name, "forward"], compiled[name, "both"]
                    args = lowered[name]["both"][1]
                    ours, plain = both(*args), forward(*args[:3])
                    row = row_of(f"{name} {title} {precision}", NAMES, ours, one, exact)
                    found, of_both = collectives(forward), collectives(both)
                    allowed = [] if way.kv_spec != P() else ["all-reduce"]
                    row["ok"] = row["ok"] and not found and set(of_both) <= set(allowed)
                    same = map(np.array_equal, jax.tree.leaves(plain), one[:2])
                    yield {
                        **row,
                        "collectives": found,
                        "collectives_of_gradient": of_both,
                        "same_bits_as_one_device": all(same),
                    }


# ---- Flax ----------------------------------------------------------------------------------------


def flax_adapters(devices: list[Any], implementation: str, seqlen: int) -> Iterator[Row]:
    """linen and nnx layers with our attention, on one device and with the batch split over all."""
    from flax import linen, nnx

    from jax_fa3.flax import linen_attention_fn, nnx_attention_fn

    heads, width = 4, 256
    x = np.random.default_rng(2).normal(size=(len(devices), seqlen, width)).astype(np.float32)
    plain = linen.MultiHeadDotProductAttention(heads)
    cpu = jax.devices("cpu")[0]
    mask = np.tri(seqlen, dtype=bool)[None, None]
    with jax.default_device(cpu):
        variables = jax.tree.map(np.asarray, jax.jit(plain.init)(jax.random.key(0), x))

    def linen_layer(x: Any, dtype: Any, attention_fn: Any = None) -> Any:
        chosen = {} if attention_fn is None else {"attention_fn": attention_fn}
        module = linen.MultiHeadDotProductAttention(heads, dtype=dtype, **chosen)
        return module.apply(variables, x, mask=None if chosen else mask)

    def nnx_layer(x: Any, dtype: Any, attention_fn: Any = None) -> Any:
        chosen = {} if attention_fn is None else {"attention_fn": attention_fn}
        module = nnx.MultiHeadAttention(
            heads, width, dtype=dtype, decode=False, rngs=nnx.Rngs(0), **chosen
        )
        return module(x, mask=None if chosen else mask)

    apis = {"linen": (linen_layer, linen_attention_fn), "nnx": (nnx_layer, nnx_attention_fn)}

    def graded(layer: Any) -> Callable[..., Any]:
        def both(x: Any) -> Any:
            out, pull = jax.vjp(layer, x)
            return out, pull(jnp.cos(out))[0]

        return both

    mesh = mesh_of(devices)
    split = jax.device_put(x, NamedSharding(mesh, P("x")))
    on_one = jax.device_put(x, devices[0])
    for api, (layer, adapter) in apis.items():
        exact = jax.jit(graded(lambda x, layer=layer: layer(x, jnp.float32)))(
            jax.device_put(x, cpu)
        )
        theirs = jax.jit(graded(lambda x, layer=layer: layer(x, jnp.bfloat16)))(on_one)
        for precision, title, arg in (
            ("native", "one device", on_one),
            ("native", "batch split", split),
            ("fp8", "batch split", split),
        ):
            fn = adapter(is_causal=True, precision=precision, implementation=implementation)
            ours = graded(lambda x, layer=layer, fn=fn: layer(x, jnp.bfloat16, fn))
            compiled = jax.jit(ours).lower(arg).compile()
            name = f"flax {api} {title} {precision}"
            floor = FLOOR if precision == "native" else FLOAT8_FLOOR
            row = row_of(name, ("out", "dx"), compiled(arg), theirs, exact, floor)
            row["collectives"] = collectives(compiled)
            row["ok"] = row["ok"] and not row["collectives"]
            yield row
