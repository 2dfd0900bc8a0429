"""The same call gives the same bits: alone, under load, from threads, inside command buffers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import processes
import pytest
from gpu import reference

pytestmark = pytest.mark.gpu

# Launches are recorded and replayed: anything a handler does outside its stream, or any pointer or
# scalar frozen at the first run, shows.
COMMAND_BUFFER_FLAGS = (
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,WHILE "
    "--xla_gpu_graph_min_graph_size=1"
)


def inputs_of(head_dim: int, dtype: Any = cases.BFLOAT16, **sizes: int) -> dict[str, Any]:
    case = cases.Case("repeat", **{"seqlen_q": 1000, "seqlen_k": 1500, "num_heads_q": 12,
                      "num_heads_kv": 4, **sizes}, head_dim=head_dim)  # fmt: skip
    return jax.tree.map(jnp.asarray, cases.make_inputs(case, dtype))


def test_fifty_runs_agree() -> None:
    """Every kernel, 50 times over memory that other results were in."""
    many = {
        (head_dim, dtype): inputs_of(head_dim, np.dtype(dtype))
        for head_dim in (64, 128, 256)
        for dtype in ("bfloat16", "float16")
    }
    calls = [
        (place, preset)
        for place in many
        for preset in reference.PRESETS
        if preset == "native" or place[1] == "bfloat16"
    ]
    calls += [((head_dim, "bfloat16"), "e5m2_fast") for head_dim in (64, 128, 256)]
    fast_e5m2 = reference.jax_fa3.Quantization(dtype="e5m2", softmax="linear")
    presets = {**reference.PRESETS, "e5m2_fast": {"quantization": fast_e5m2}}

    @jax.jit
    def every(many: Any) -> Any:
        return [
            reference.attend(many[place], causal=causal, **presets[preset])
            for place, preset in calls
            for causal in (None, "bottom_right")
        ]

    first = every(many)
    assert all(bool(jnp.any(out != 0)) for out, _ in first)
    different = jax.jit(reference.count_different)
    counts = [different(every(many), first) for _ in range(50)]
    assert [int(count) for count in counts] == [0] * 50


@pytest.mark.parametrize("precision", ["native", "fp8"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_fifty_gradients_agree(head_dim: int, precision: str) -> None:
    """deterministic=True, on the kernels: grouped heads, every mask, odd lengths."""
    x = inputs_of(head_dim, batch=2, seqlen_q=700, seqlen_k=1111, num_heads_q=6, num_heads_kv=2)
    names = ("query", "key", "value")
    dout = jax.random.normal(jax.random.key(1), x["query"].shape, jnp.bfloat16)
    masks = [{}] + [
        {"is_causal": True, "causal_alignment": corner} for corner in ("bottom_right", "top_left")
    ]

    @jax.jit
    def every(x: Any) -> Any:
        def loss(main: Any, mask: Any) -> Any:
            out, logsumexp = reference.jax_fa3.attention(
                *main, **mask, precision=precision, deterministic=True, return_logsumexp=True
            )
            seen = jnp.where(jnp.isneginf(logsumexp), 0.0, logsumexp)
            return jnp.sum((out * dout).astype(jnp.float32)) + jnp.sum(jnp.sin(seen))

        return [jax.grad(loss)([x[name] for name in names], mask) for mask in masks]

    assert every.lower(x).as_text().count("jax_fa3_bwd") >= len(masks)
    first = every(x)
    assert all(bool(jnp.any(g != 0)) for g in jax.tree.leaves(first))
    different = jax.jit(reference.count_different)
    counts = [different(every(x), first) for _ in range(50)]
    assert [int(count) for count in counts] == [0] * 50


def test_stream_order() -> None:
    """A long product makes the query, an in-place sum consumes the output, 200 times."""
    x = inputs_of(128, batch=1, num_heads_q=8, num_heads_kv=2)
    wide = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.bfloat16)

    @jax.jit
    def attend_product(wide: Any, x: Any) -> Any:
        # Slow enough that an attention on another stream would read the query too early.
        product = (wide @ wide) @ wide
        query = product[: x["query"].size // 8192].reshape(x["query"].shape) / 2.0**16
        query = query.astype(jnp.bfloat16)
        return {
            p: reference.attend({**x, "query": query}, **reference.PRESETS[p])
            for p in ("accurate", "native")
        }

    consume = jax.jit(
        lambda total, found, first: total + reference.count_different(found, first),
        donate_argnums=0,
    )
    first = attend_product(wide, x)
    assert all(bool(jnp.all(jnp.isfinite(out))) for out, _ in first.values())
    total = jnp.int32(0)
    for _ in range(200):
        total = consume(total, attend_product(wide, x), first)
    assert int(total) == 0


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_of_a_gated_output(head_dim: int) -> None:
    """A long product makes the cotangent, 200 times each of two: kernels that start early wait."""
    x = inputs_of(head_dim, batch=1, seqlen_q=700, num_heads_q=8, num_heads_kv=2)
    wide = jax.random.normal(jax.random.key(0), (4096, 4096), jnp.bfloat16)
    main = [x[name] for name in ("query", "key", "value")]

    @jax.jit
    def grads(wide: Any, main: Any, sign: Any) -> Any:
        product = ((wide @ wide) @ wide).reshape(-1)[: main[0].size].reshape(main[0].shape)
        gate = jax.nn.sigmoid(sign * product.astype(jnp.float32) / 4096)

        def loss(main: Any, precision: str) -> Any:
            out = reference.jax_fa3.attention(
                *main, is_causal=True, precision=precision, deterministic=True
            )
            return jnp.sum(out.astype(jnp.float32) * gate)

        return [jax.grad(loss)(main, precision) for precision in ("native", "fp8")]

    signs = (jnp.float32(1), jnp.float32(-1))  # memory holds the other one's numbers
    first = [grads(wide, main, sign) for sign in signs]
    different = jax.jit(reference.count_different)
    assert int(different(*first)) > 0
    counts = [
        different(grads(wide, main, sign), expected)
        for _ in range(200)
        for sign, expected in zip(signs, first, strict=True)
    ]
    assert [int(count) for count in counts] == [0] * 400


def test_two_threads() -> None:
    """Two jitted functions at once; handlers are called from several threads."""
    work = {
        "fp8": (inputs_of(64, seqlen_q=333), {"causal": "bottom_right"}),
        "native": (inputs_of(128, seqlen_k=777), {"precision": "native"}),
    }
    functions = {
        name: jax.jit(lambda x, options=options: reference.attend(x, **options))
        for name, (_, options) in work.items()
    }
    first = {name: jax.block_until_ready(functions[name](work[name][0])) for name in work}
    different = jax.jit(reference.count_different)
    start = threading.Barrier(len(work))
    counts: dict[str, list[int]] = {}

    def repeat(name: str) -> None:
        start.wait()
        results = [different(functions[name](work[name][0]), first[name]) for _ in range(200)]
        counts[name] = [int(x) for x in results]

    threads = [threading.Thread(target=repeat, args=(name,)) for name in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == {name: [0] * 200 for name in work}


def scan_and_calls() -> dict[str, Any]:
    """A scan of 50 steps whose inputs change, and 10 calls of each of two programs with new inputs.

    The second is the gradients without a mask, whose kernels overlap and come in clusters at
    head_dim 128. Each dquery has the same bits at each run: where its order is
    not fixed, it is a sum over two key blocks.
    """
    x = inputs_of(64, seqlen_q=130, seqlen_k=260, num_heads_q=6, num_heads_kv=2)

    def step(query: Any, turn: Any) -> Any:
        shifted = {**x, "query": query, "key": jnp.roll(x["key"], turn, axis=1)}
        scale = 0.1 + 0.001 * turn.astype(jnp.float32)
        found = {
            p: reference.attend(
                shifted, causal="bottom_right", softmax_scale=scale, **reference.PRESETS[p]
            )
            for p in ("accurate", "native")
        }
        mixed = found["accurate"].out + found["native"].out
        return (0.5 * query + mixed).astype(query.dtype), found

    def scan(query: Any) -> Any:
        return jax.lax.scan(step, query, jnp.arange(50))

    _, scanned = jax.jit(scan)(x["query"])
    once = jax.jit(lambda query, turn: step(query, turn)[1])
    called = [once(jnp.flip(x["query"], 1) * (1 + i), jnp.int32(7 * i)) for i in range(10)]

    sizes = {"seqlen_q": 300, "seqlen_k": 250, "num_heads_q": 6, "num_heads_kv": 2}
    inputs = {head_dim: inputs_of(head_dim, **sizes) for head_dim in (64, 128, 256)}
    ways = [(64, "native", False), (64, "native", True), (256, "native", True)]
    ways += [(128, "native", False), (128, "native", True), (128, "accurate", False)]

    @jax.jit
    def gradients(inputs: Any) -> Any:
        def loss(main: Any, options: Any) -> Any:
            return jnp.sum(jnp.sin(reference.attend(main, **options).out.astype(jnp.float32)))

        return [
            jax.grad(loss)(
                inputs[head_dim], {**reference.PRESETS[preset], "deterministic": deterministic}
            )
            for head_dim, preset, deterministic in ways
        ]

    changed = [
        jax.tree.map(lambda x, i=i: jnp.roll(x, i, axis=1) * (1 + i), inputs) for i in range(10)
    ]
    differentiated = [gradients(inputs) for inputs in changed]
    leaves = jax.tree.leaves((scanned, called, differentiated))
    return {str(i): np.asarray(leaf, np.float32) for i, leaf in enumerate(leaves)}


def test_command_buffers(tmp_path: Path) -> None:
    """The same bits with launches recorded into command buffers, and with none."""
    kinds = {"recorded": COMMAND_BUFFER_FLAGS, "plain": "--xla_gpu_enable_command_buffer="}
    results = {}
    tests = str(Path(__file__).resolve().parents[1])
    for kind, flags in kinds.items():
        target = tmp_path / f"{kind}.npz"
        program = (
            f"import sys; sys.path.insert(0, {tests!r}); "
            "import numpy as np; from gpu import test_determinism as t; "
            f"np.savez({str(target)!r}, **t.scan_and_calls())"
        )
        # This process holds most of the memory.
        processes.output_of("-c", program, XLA_FLAGS=flags, XLA_PYTHON_CLIENT_PREALLOCATE="false")
        results[kind] = dict(np.load(target))
    assert all(np.isfinite(x).all() and (x != 0).any() for x in results["plain"].values())
    reference.assert_same_bits(results["recorded"], results["plain"])
    # The inputs changed from step to step, so must the results.
    steps = results["plain"]["0"]
    assert (np.abs(np.diff(steps, axis=0)).reshape(49, -1).max(axis=1) > 0).all()


@pytest.mark.parametrize(
    ("head_dim", "deterministic", "causal"),
    [(128, False, None), (64, True, None), (128, True, "bottom_right"), (256, True, None)],
)
def test_gradients_in_graphs(head_dim: int, deterministic: bool, causal: str | None) -> None:
    """Two in one of XLA's graphs, whose kernels overlap; more arrays than it has recordings."""

    def gradients(*both: Any) -> Any:
        def loss(main: Any) -> Any:
            result = reference.attend(
                main, causal=causal, precision="native", deterministic=deterministic
            )
            return jnp.sum(jnp.sin(result.out.astype(jnp.float32)))

        return [jax.grad(loss)(main) for main in both]

    @jax.jit
    def compare(found: Any, expected: Any) -> Any:
        """Bits that differ, and how far a dquery whose order is not fixed is away."""
        far = jnp.float32(0)
        if not deterministic:
            for a, b in zip(found, expected, strict=True):
                a, b = (x.pop("query").astype(jnp.float32) for x in (a, b))
                error = jnp.abs(a - b) - 2.0**-7 * jnp.abs(b)
                far = jnp.maximum(far, jnp.max(error) / jnp.std(b))
        return reference.count_different(found, expected), far

    in_graph = jax.jit(gradients, compiler_options={"xla_gpu_graph_min_graph_size": 1})
    plain = jax.jit(gradients, compiler_options={"xla_gpu_graph_min_graph_size": 10**6})
    x = inputs_of(head_dim, batch=1, seqlen_q=2000, seqlen_k=2048, num_heads_q=8)
    places = [jax.tree.map(lambda x, i=i: jnp.roll(x, i, axis=1), x) for i in range(20)]
    expected = [plain(place, places[0]) for place in places]
    counts = []
    for i in np.random.default_rng(0).permutation(60) % 20:
        reference.poison()
        counts.append(compare(in_graph(places[i], places[0]), expected[i]))
    assert [int(count) for count, _ in counts] == [0] * 60
    assert all(float(far) < 1e-3 for _, far in counts)  # NaN is not
