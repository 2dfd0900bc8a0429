"""Compiled ahead of time, kept on disk, exported to another process, run from several threads."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import processes
import pytest
from jax import export
from rules.support import assert_close, attend, inputs, loss_of

import jax_fa3

pytestmark = pytest.mark.usefixtures("extension")


def both(precision: str) -> Any:
    """Results and gradients."""
    fn = attend(precision=precision, is_causal=True)
    return lambda *args: (fn(*args), jax.grad(loss_of(fn), (0, 1, 2))(*args))


def in_new_process(program: str, *arguments: Any) -> Any:
    """What a program prints as JSON."""
    output = processes.output_of("-c", program, *arguments, JAX_PLATFORMS="cpu")
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize("precision", ["fp8", "native"])
def test_lowered_and_compiled_ahead_of_time(precision: str) -> None:
    args = inputs()
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    traced = jax.jit(both(precision)).trace(*structs)
    compiled = traced.lower().compile()
    assert_close(compiled(*args), jax.jit(both(precision))(*args), 1e-6)
    assert compiled.cost_analysis()["flops"] > 0
    with pytest.raises(TypeError, match="compiled"):
        compiled(*inputs(seqlen_k=8))
    # The same trace serves a machine with another accelerator.
    assert "jax_fa3_" in jax.jit(both(precision)).trace(*structs).lower(
        lowering_platforms=("cuda",)
    ).as_text()  # fmt: skip


CACHED = """
import json, sys
import jax, jax.numpy as jnp
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
import jax_fa3
from jax_fa3 import _extension
_extension._UNAVAILABLE_REASON = None  # the stack of the kernels, on its XLA branch
q = jnp.linspace(-1, 1, 2 * 4 * 2 * 64, dtype=jnp.bfloat16).reshape(2, 4, 2, 64)
loss = lambda q: jax_fa3.attention(q, q + 1, q - 1).astype(jnp.float32).sum()
value, grad = jax.jit(jax.value_and_grad(loss))(q)
found = [name for name in hits if name.startswith("/jax/compilation_cache/cache_")]
print(json.dumps({"hits": found.count("/jax/compilation_cache/cache_hits"),
                  "misses": found.count("/jax/compilation_cache/cache_misses"),
                  "value": float(value), "grad": float(jnp.sum(jnp.abs(grad)))}))
"""


def test_the_persistent_cache_serves_a_second_process(tmp_path: Path) -> None:
    first = in_new_process(CACHED, tmp_path)
    assert first["misses"] > 0
    assert any(tmp_path.iterdir())
    second = in_new_process(CACHED, tmp_path)
    assert second["misses"] == 0
    assert second["hits"] > 0
    assert (second["value"], second["grad"]) == (first["value"], first["grad"])


EXPORTED = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
import jax_fa3
from jax import export
exported = export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
args = [jnp.asarray(x, jnp.bfloat16) for x in np.load(sys.argv[2]).values()]
out, logsumexp = exported.call(*args)
grads = exported.vjp().call(*args, out, logsumexp)
text = exported.mlir_module()
print(json.dumps({"targets": [name for name in jax_fa3._extension.TARGETS if f"@{name}(" in text],
                  "out": out.astype(jnp.float32).tolist(),
                  "grads": [float(jnp.abs(g.astype(jnp.float32)).sum()) for g in grads[:3]]}))
"""


def test_an_export_for_both_platforms_runs_in_a_new_process(tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers", reason="needs flatbuffers to serialise an export")
    args = inputs()
    fn = attend(is_causal=True)
    exported = export.export(
        jax.jit(fn),
        platforms=("cpu", "cuda"),
        disabled_checks=jax_fa3.export_disabled_checks(),
    )(*args)
    (tmp_path / "program").write_bytes(exported.serialize(vjp_order=1))
    np.savez(tmp_path / "args.npz", *(np.asarray(x, np.float32) for x in args))
    found = in_new_process(EXPORTED, tmp_path / "program", tmp_path / "args.npz")
    assert found["targets"] == ["jax_fa3_quantize_fwd_fp8"]
    (out, logsumexp), pull = jax.vjp(fn, *args)
    assert_close(jnp.asarray(found["out"], jnp.bfloat16), out, 1e-2)
    wanted = [float(jnp.abs(g.astype(jnp.float32)).sum()) for g in pull((out, logsumexp))]
    assert found["grads"] == pytest.approx(wanted, rel=2e-2)


def test_threads_trace_compile_and_run_at_once() -> None:
    """Each thread builds programs of its own and runs one that all share."""
    args = inputs()
    shared = jax.jit(both("native"))

    def work(number: int) -> Any:
        fn = attend(precision="native", softmax_scale=0.1 * (1 + number), is_causal=number % 2 == 0)
        mapped = jax.jit(jax.vmap(fn, (0, None, None)))
        own = [mapped(jnp.stack([args[0]] * (2 + number)), *args[1:])[0][-1] for _ in range(3)]
        return own[-1], shared(*args)

    alone = [work(number) for number in range(4)]
    jax.clear_caches()
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(work, range(4)))
    assert_close(together, alone, 1e-6)
    assert float(jnp.abs(alone[0][0] - alone[2][0]).max()) > 1e-2
