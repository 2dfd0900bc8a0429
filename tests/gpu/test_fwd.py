"""The forward kernels against float64 and against their NumPy models, in every kind of call."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from gpu import reference
from gpu.reference import attend, run, run_presets

import jax_fa3

gpu = pytest.mark.gpu
FP8 = ("accurate", "fast", "e5m2")
CAUSALS = (None, "bottom_right", "top_left")
LENGTHS = (1, 7, 63, 64, 65, 127, 128, 129, 191, 255, 257, 512, 513, 640, 641, 1000, 4096)


# ---- every length, head_dim, group size, mask, dtype and kind of scale ---------------------------


@dataclasses.dataclass(frozen=True)
class Call:
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    group_size: int
    causal: str | None
    dtype: str
    scale: str

    def __str__(self) -> str:
        return (
            f"{self.seqlen_q}x{self.seqlen_k}-d{self.head_dim}-g{self.group_size}-{self.causal}-"
            f"{self.dtype}-{self.scale}"
        )

    def inputs(self) -> dict[str, Any]:
        heads_kv = 1 if self.seqlen_q * self.seqlen_k > 300_000 else 2
        case = cases.Case(
            str(self),
            seqlen_q=self.seqlen_q,
            seqlen_k=self.seqlen_k,
            num_heads_q=heads_kv * self.group_size,
            num_heads_kv=heads_kv,
            head_dim=self.head_dim,
        )
        return cases.make_inputs(case, np.dtype(self.dtype))

    def softmax_scale(self) -> Any:
        size = self.head_dim**-0.5
        return {"default": None, "negative": -0.7 * size, "traced": np.float32(1.3 * size)}[
            self.scale
        ]


def calls() -> list[Call]:
    """Each length four times as seqlen_q and as seqlen_k, under every mask."""
    found = []
    for r, i in itertools.product(range(4), range(len(LENGTHS))):
        j = (6 * i + 10 * r) % len(LENGTHS)
        group = (1, 3, 4, 8)[(i + 2 * r) % 4]
        if LENGTHS[i] * LENGTHS[j] > 300_000:
            group = 3
        found.append(
            Call(
                LENGTHS[i],
                LENGTHS[j],
                (64, 128, 256)[(i + r) % 3],
                group,
                CAUSALS[r % 3],
                ("bfloat16", "float16")[i // 2 % 2],
                ("default", "negative", "traced")[i % 3],
            )
        )
    return found


def test_calls_cover_pairs() -> None:
    """Every pair of two options occurs, and every length under every mask and head_dim."""
    options = ("head_dim", "group_size", "causal", "dtype", "scale")
    with_length = itertools.product(("seqlen_q", "seqlen_k"), ("head_dim", "causal"))
    for a, b in (*itertools.combinations(options, 2), *with_length):
        found = {(getattr(call, a), getattr(call, b)) for call in calls()}
        values = [{getattr(call, name) for call in calls()} for name in (a, b)]
        assert not set(itertools.product(*values)) - found, (a, b)
    # At head_dim 256 the FP8 kernel sums blocks 0 to 3 in the output's registers, later ones in
    # slices.
    whole = {call.seqlen_k for call in calls() if call.head_dim == 256 and call.causal is None}
    assert {512, 513, 640, 641} <= whole


def check(
    results: dict[str, Any], inputs: dict[str, Any], *, causal: Any, softmax_scale: Any, note: Any
) -> None:
    """All presets of one call against float64 and their models."""
    exact = reference.exact(inputs, causal=causal, softmax_scale=softmax_scale)
    failed = []
    for preset, result in results.items():
        model = reference.model(preset, inputs, causal=causal, softmax_scale=softmax_scale)
        limit = tolerances.KERNEL_NATIVE if preset == "native" else tolerances.KERNEL_FP8
        assert result.out.dtype == model.out.dtype
        assert result.logsumexp.dtype == np.float32
        try:
            measured = tolerances.check_kernel(result, exact, model, limit)
        except AssertionError as error:
            failed.append(f"{preset}: {error}")
        else:
            note(preset, measured)
    assert not failed, "\n".join(failed)


@gpu
@pytest.mark.parametrize("call", calls(), ids=str)
def test_call(call: Call, record_property: Any) -> None:
    inputs, scale = call.inputs(), call.softmax_scale()
    results = run_presets(
        ("accurate", "fast", "native", *(("e5m2",) if call.scale == "traced" else ())),
        inputs,
        causal=call.causal,
        softmax_scale=scale,
    )

    def note(preset: str, measured: dict[str, float]) -> None:
        record_property(preset, measured)
        if preset == "native" and call.dtype == "float16":
            assert measured["error"] <= 1e-3  # 3.3e-4 within 128 random calls on an H200

    check(results, inputs, causal=call.causal, softmax_scale=scale, note=note)


@gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_outliers(head_dim: int, record_property: Any) -> None:
    """The paper's distribution, in which one number sets the scale of its row."""
    case = cases.Case("outliers", seqlen_q=513, seqlen_k=771, head_dim=head_dim)
    inputs = cases.make_inputs(case, distribution="outlier")
    results = run_presets(("accurate", "fast", "native"), inputs, causal="bottom_right")
    check(results, inputs, causal="bottom_right", softmax_scale=None, note=record_property)


@gpu
@pytest.mark.parametrize("step", [0.3, 2.0, 7.0, 40.0])
def test_rising_maxima(step: float) -> None:
    """Rows whose logits rise by `step` every 40 keys in the order of visit, first key first."""
    rng = np.random.default_rng(11)
    for head_dim, dtype in itertools.product((64, 128, 256), (cases.BFLOAT16, np.float16)):
        query, key, value = (
            rng.normal(size=(1, n, 3, head_dim)).astype(np.float32) for n in (200, 1100, 1100)
        )
        query[..., 0] = np.where(rng.random((1, 200, 3)) < 0.1, 4, -1)  # the others fall
        level = np.arange(1100) // 40 * step * head_dim**0.5 / 4
        key[..., 0] = level[None, :, None]
        inputs = {
            "query": query.astype(dtype),
            "key": key.astype(dtype),
            "value": value.astype(dtype),
        }
        result = run_presets(("native",), inputs)["native"]
        exact = reference.exact(inputs)
        assert tolerances.rel_l2(result.out, exact.out).max() < 2.0**-6, (head_dim, dtype)
        error = np.abs(result.logsumexp - exact.logsumexp) / (1 + np.abs(exact.logsumexp))
        assert error.max() < 1e-4, (head_dim, dtype)


@gpu
def test_zero_scale() -> None:
    """The mean of the keys' values; the scores must not become 0 * -inf."""
    case = cases.Case("zero scale", seqlen_q=131, seqlen_k=77)
    inputs = cases.make_inputs(case)
    for scale in (0.0, np.float32(0)):
        results = run_presets(("accurate", "fast", "native"), inputs, causal="bottom_right",
                              softmax_scale=scale)  # fmt: skip
        check(results, inputs, causal="bottom_right", softmax_scale=0.0, note=lambda *_: None)


# ---- float8 inputs -------------------------------------------------------------------------------

# Powers and thirds, different for every (batch, kv head).
QUERY_DESCALE = np.array([[1, 0.5], [0.25, 2]], np.float32)
KEY_DESCALE = np.array([[1, 2], [4, 8]], np.float32)
VALUE_DESCALE = np.array([[1, 3], [9, 27]], np.float32)
FLOAT8_CALLS = {
    "batch_heads": ("e4m3", "e4m3", "e4m3", 64, lambda x: x),
    "heads": ("e4m3", "e4m3", "e4m3", 128, lambda x: x[1]),
    "scalar": ("e4m3", "e4m3", "e4m3", 64, lambda x: x[1, 0]),
    "number": ("e4m3", "e4m3", "e4m3", 64, lambda x: float(x[0, 1])),
    "transposed": ("e4m3", "e4m3", "e4m3", 128, lambda x: np.asarray(x.T.copy()).T),
    "e5m2_inputs": ("e5m2", "e5m2", "e5m2", 128, lambda x: x),
    "mixed_inputs": ("e4m3", "e5m2", "e4m3", 64, lambda x: x),
    "wide_query": ("bfloat16", "e4m3", "e4m3", 64, lambda x: x),
    "wide_query_f16": ("float16", "e4m3", "e5m2", 128, lambda x: x),
    "wide_heads": ("e4m3", "e4m3", "e4m3", 256, lambda x: x),
    "wide_heads_e5m2": ("bfloat16", "e5m2", "e5m2", 256, lambda x: x[0]),
}


def float8_inputs(name: str) -> dict[str, Any]:
    """q [2, 131, 8, D] and k, v [2, 259, 2, D]; logits of a few units after the descales."""
    *dtypes, head_dim, shape_of = FLOAT8_CALLS[name]
    kinds = {"e4m3": cases.E4M3, "e5m2": cases.E5M2}
    rng = np.random.default_rng(7)
    inputs = {}
    descales = {"query": QUERY_DESCALE, "key": KEY_DESCALE, "value": VALUE_DESCALE}
    for (operand, descale), dtype in zip(descales.items(), dtypes, strict=True):
        shape = (2, 131, 8, head_dim) if operand == "query" else (2, 259, 2, head_dim)
        x = rng.normal(size=shape) * (1 if operand == "value" else 0.7)
        inputs[operand] = x.astype(
            kinds.get(dtype, np.dtype(dtype if dtype not in kinds else "f4"))
        )
        if dtype in kinds:
            inputs[f"{operand}_descale"] = shape_of(descale)
    return inputs


@gpu
@pytest.mark.parametrize("name", FLOAT8_CALLS)
def test_float8_inputs(name: str, record_property: Any) -> None:
    inputs = float8_inputs(name)
    results = run_presets(("accurate", "fast"), inputs, causal="bottom_right")
    check(results, inputs, causal="bottom_right", softmax_scale=None, note=record_property)


@gpu
@pytest.mark.parametrize("name", ["scalar", "e5m2_inputs", "wide_query", "wide_heads"])
def test_float8_inputs_with_a_negative_scale(name: str) -> None:
    """The row's largest score has the smallest logit, whoever holds the factor."""
    inputs = float8_inputs(name)
    results = run_presets(("accurate", "fast"), inputs, causal="bottom_right", softmax_scale=-0.1)
    check(results, inputs, causal="bottom_right", softmax_scale=-0.1, note=lambda *_: None)


# ---- small and empty -----------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiny_shapes(head_dim: int) -> None:
    """1 to 17 rows and keys, all in one program."""
    sizes = [*((i, 18 - i) for i in range(1, 18)), *((i, i) for i in range(1, 18))]
    inputs = [
        cases.make_inputs(
            cases.Case(f"tiny{q}x{k}", seqlen_q=q, seqlen_k=k, head_dim=head_dim), np.float16
        )
        for q, k in sizes
    ]
    presets = ("accurate", "native")

    def every(many: Any) -> Any:
        return [
            {p: attend(x, causal=CAUSALS[i % 3], **reference.PRESETS[p]) for p in presets}
            for i, x in enumerate(many)
        ]

    for i, results in enumerate(run(every, inputs)):
        check(results, inputs[i], causal=CAUSALS[i % 3], softmax_scale=None, note=lambda *_: None)


@gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 2), (2048, 1024), (401, 130)])
def test_rows_without_keys(seqlen_q: int, seqlen_k: int, head_dim: int) -> None:
    """Bottom-right with more rows than keys: output exactly 0, logsumexp -inf."""
    case = cases.Case("empty rows", seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads_q=4,
                      num_heads_kv=2, head_dim=head_dim)  # fmt: skip
    inputs = cases.make_inputs(case)
    results = run_presets(("accurate", "fast", "e5m2", "native"), inputs, causal="bottom_right")
    empty = seqlen_q - seqlen_k
    for name, result in results.items():
        assert (result.out[:, :empty] == 0).all(), name
        assert np.isneginf(result.logsumexp[:, :, :empty]).all(), name
        assert (result.out[:, empty:] != 0).any(axis=-1).all(), name
        assert np.isfinite(result.out.astype(np.float32)).all(), name
        assert np.isfinite(result.logsumexp[:, :, empty:]).all(), name
    if seqlen_q < 1000:
        check(results, inputs, causal="bottom_right", softmax_scale=None, note=lambda *_: None)


@gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_without_the_logsumexp(head_dim: int) -> None:
    """Results are the same where nobody sees the logsumexp, which is another one then: keys have a
    mean."""
    case = cases.Case(
        "alone", seqlen_q=700, seqlen_k=1100, num_heads_q=4, num_heads_kv=2, head_dim=head_dim
    )
    inputs = cases.make_inputs(case, distribution="biased")

    def every(inputs: Any, returns: bool) -> Any:
        def attention(*main: Any) -> Any:
            found = jax_fa3.attention(
                *main,
                return_logsumexp=returns,
                implementation=reference.IMPLEMENTATION,
                **reference.PRESETS["accurate"],
            )
            return found[0] if returns else found

        main = [inputs[name] for name in reference.MAIN]
        out, pull = jax.vjp(attention, *main)
        return [x.astype(jnp.float32) for x in (attention(*main), out, *pull(jnp.sin(out)))]

    (alone, *of_alone), (beside, *of_beside) = (
        run(lambda x, returns=returns: every(x, returns), inputs) for returns in (False, True)
    )
    np.testing.assert_array_equal(alone, beside)
    np.testing.assert_array_equal(alone, of_alone[0])
    for got, wanted in zip(of_alone, of_beside, strict=True):
        assert np.linalg.norm(got - wanted) < 2e-3 * np.linalg.norm(wanted)


@gpu
def test_causal_alignment() -> None:
    """Both alignments by name, from short to past a tile."""
    sizes = [(1, 4), (3, 128), (128, 3), (2, 5), (5, 2), (127, 129), (129, 127), (193, 385)]
    calls = [(sizes[i // 2], CAUSALS[1 + i % 2]) for i in range(2 * len(sizes))]
    inputs = [
        cases.make_inputs(cases.Case(f"align{q}x{k}", seqlen_q=q, seqlen_k=k))
        for (q, k), _ in calls
    ]
    presets = ("accurate", "native")

    def every(many: Any) -> Any:
        return [
            {p: attend(x, causal=causal, **reference.PRESETS[p]) for p in presets}
            for x, (_, causal) in zip(many, calls, strict=True)
        ]

    for results, x, (_, causal) in zip(run(every, inputs), inputs, calls, strict=True):
        check(results, x, causal=causal, softmax_scale=None, note=lambda *_: None)


@gpu
@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k"), [(0, 16, 32), (2, 0, 32), (2, 16, 0), (2, 0, 0)]
)
def test_zero_sizes(batch: int, seqlen_q: int, seqlen_k: int) -> None:
    """Right shapes, zeros and -inf, no launch error left behind."""
    inputs = {
        "query": np.ones((batch, seqlen_q, 4, 64), cases.BFLOAT16),
        "key": np.ones((batch, seqlen_k, 2, 64), cases.BFLOAT16),
        "value": np.ones((batch, seqlen_k, 2, 64), cases.BFLOAT16),
    }

    def every(x: dict[str, Any]) -> Any:
        def loss(x: dict[str, Any]) -> Any:
            return jnp.sum(attend(x).out.astype(jnp.float32))

        return {p: attend(x, **reference.PRESETS[p]) for p in reference.PRESETS}, jax.grad(loss)(x)

    results, grads = run(every, inputs)
    for out, logsumexp in results.values():
        assert out.shape == (batch, seqlen_q, 4, 64)
        assert logsumexp.shape == (batch, 4, seqlen_q)
        assert (out == 0).all()
        assert np.isneginf(logsumexp).all()
    for name, x in inputs.items():
        assert grads[name].shape == x.shape
        assert (grads[name] == 0).all()
    after = cases.make_inputs(cases.Case("after", seqlen_q=3, seqlen_k=5))
    check(run_presets(("accurate",), after), after, causal=None, softmax_scale=None,
          note=lambda *_: None)  # fmt: skip
