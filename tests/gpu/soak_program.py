"""How soak.py runs a case: its program, compiled once, on every draw, alone and among others."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu import reference, reference_gradients
from gpu.reference import MAIN, Result
from gpu.soak_cases import Case, spoil

import jax_fa3

OFFSET = 5
IN_FLIGHT_BYTES = 2**30  # of results; calls of `repeat` hold theirs until all have ended


def stored_arrays(case: Case, inputs: dict[str, Any]) -> dict[str, Any]:
    """What the program takes: the inputs as `case.form` lays them out."""
    arrays = dict(inputs)
    if case.form == "packed":
        arrays = {n: x for n, x in inputs.items() if n not in MAIN}
        if any(case.stored):  # dtypes may differ
            return dict(inputs)
        arrays["packed"] = np.concatenate([inputs[n] for n in MAIN], axis=2)
    elif case.form == "transposed":
        arrays |= {n: np.ascontiguousarray(np.swapaxes(inputs[n], 1, 2)) for n in MAIN}
    elif case.form == "offset":
        widths = ((0, 0), (OFFSET, OFFSET + 1), (0, 0), (0, 0))
        arrays |= {
            n: np.pad(inputs[n].astype(np.float32), widths, constant_values=np.nan).astype(
                inputs[n].dtype
            )
            for n in MAIN
        }
    return arrays


def _unstored(case: Case, arrays: dict[str, Any]) -> dict[str, Any]:
    arrays = dict(arrays)
    if "packed" in arrays:
        heads_q = case.heads_kv * case.group
        ends = (heads_q, heads_q + case.heads_kv)
        arrays |= dict(zip(MAIN, jnp.split(arrays.pop("packed"), ends, axis=2), strict=True))
    elif case.form == "transposed":
        arrays |= {n: jnp.swapaxes(arrays[n], 1, 2) for n in MAIN}
    elif case.form == "offset":
        ends = {"query": case.seqlen_q, "key": case.seqlen_k, "value": case.seqlen_k}
        arrays |= {n: arrays[n][:, OFFSET : OFFSET + ends[n]] for n in MAIN}
    return arrays


def _attend(case: Case, *main: Any, **options: Any) -> Any:
    """jax_fa3.attention of [batch, seqlen, heads, head_dim] by way of `case.form`."""

    def one(x: Any) -> Any:
        return jax_fa3.attention(*x, **options)

    if case.form == "mapped":
        return jax.vmap(one)(main)
    if case.form == "looped" and case.batch:
        return jax.lax.map(one, main)
    if case.form == "leading":
        found = one([x.reshape(2, x.shape[0] // 2, *x.shape[1:]) for x in main])
        return [x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for x in found]
    return one(main)


class Program:
    """A compiled case, its draws of data on the device, and what the first runs returned."""

    def __init__(self, case: Case, implementation: str) -> None:
        self.case, self.is_kernel = case, implementation == "cuda"
        self.host = [case.inputs(draw) for draw in range(len(case.data))]
        if case.spoiled is not None:
            self.host.append(spoil(case, self.host[0]))
        scale = case.softmax_scale()
        arguments = [
            (stored_arrays(case, x), *case.cotangents(i), np.float32(scale or 0))
            for i, x in enumerate(self.host)
        ]
        self.arguments = jax.block_until_ready(jax.tree.map(jnp.asarray, arguments))

        def run(arrays: dict[str, Any], dout: Any, dlogsumexp: Any, traced_scale: Any) -> Any:
            given = _unstored(case, arrays)
            main = [given.pop(name) for name in MAIN]
            own: dict[str, Any] = {
                "softmax_scale": traced_scale if case.scale == "traced" else scale,
                "implementation": implementation,
            }
            found = {}
            for preset in case.presets:
                options = {**case.options(preset), **own, **given}
                found[preset] = Result(*_attend(case, *main, return_logsumexp=True, **options))
            grads = None
            if case.gradient is not None:
                grads = reference_gradients.of_call(
                    dict(zip(MAIN, main, strict=True)), dout, dlogsumexp,
                    attend=lambda *x, **options: _attend(case, *x, **options),
                    **case.options(case.gradient), **own,
                )  # fmt: skip
            return found, grads

        self.compiled = jax.jit(run).lower(*self.arguments[0]).compile()
        self.first: list[Any] = []

    @property
    def size(self) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(self.arguments))

    @property
    def result_size(self) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(self.first[0]))

    def run_first(self) -> None:
        """Every draw on poisoned memory."""
        for arguments in self.arguments:
            reference.poison()
            found = self.compiled(*arguments)
            self.first.append(jax.tree.map(np.asarray, found))

    def assert_repeats(self, found: Any, draw: int) -> None:
        """Another run's bits; dquery only where its order of additions is fixed."""
        first, again = self.first[draw], jax.tree.map(np.asarray, found)
        if self.case.gradient and not (self.case.deterministic or self.case.head_dim == 256):
            first, again = (
                (f, {n: g for n, g in gs.items() if n != "query"}) for f, gs in (first, again)
            )
        reference.assert_same_bits(again, first)


def repeat(pool: list[Program], count: int, rng: np.random.Generator) -> int:
    """Many calls of several programs in flight, launched by two threads; their bits must repeat.

    Fewer than 2 * count where so many results would take too much memory. Returns how many.
    """
    largest = max(p.result_size for p in pool)
    count = min(count, max(IN_FLIGHT_BYTES // 2 // max(largest, 1), 1))
    plan = [
        [
            (p := pool[rng.integers(len(pool))], int(rng.integers(len(p.arguments))))
            for _ in range(count)
        ]
        for _ in range(2)
    ]
    failures: list[BaseException] = []
    together = threading.Barrier(2)

    def launch(calls: list[tuple[Program, int]]) -> None:
        try:
            together.wait()
            found = [program.compiled(*program.arguments[draw]) for program, draw in calls]
            for (program, draw), result in zip(calls, found, strict=True):
                try:
                    program.assert_repeats(result, draw)
                except AssertionError as error:
                    raise AssertionError(
                        f"{program.case}, draw {draw}: not repeated: {error}"
                    ) from error
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=launch, args=(calls,)) for calls in plan]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return 2 * count
