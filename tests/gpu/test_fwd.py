"""The forward kernels against float64 and against their NumPy models; edges and hostile inputs.

Tests without the gpu marker check the references, the limits and the choice of cases, anywhere.
"""

from __future__ import annotations

import contextlib
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
from oracle import numpy_reference as oracle

import jax_fa3

gpu = pytest.mark.gpu
FP8 = ("accurate", "fast", "e5m2")
CAUSALS = (None, "bottom_right", "top_left")
LENGTHS = (1, 7, 63, 64, 65, 127, 128, 129, 191, 255, 257, 1000, 4096)


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
        j = (2 * i + 4 * r) % len(LENGTHS)
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
    check(results, inputs, causal=call.causal, softmax_scale=scale, note=record_property)


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
    """Rows whose logits rise by `step` every 40 keys in the order of visit, last key first."""
    rng = np.random.default_rng(11)
    for head_dim, dtype in itertools.product((64, 128, 256), (cases.BFLOAT16, np.float16)):
        query, key, value = (
            rng.normal(size=(1, n, 3, head_dim)).astype(np.float32) for n in (200, 1100, 1100)
        )
        query[..., 0] = np.where(rng.random((1, 200, 3)) < 0.1, 4, -1)  # the others fall
        level = (1099 - np.arange(1100)) // 40 * step * head_dim**0.5 / 4
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


# ---- long contexts -------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("seqlen_k", [4096, 32_768, 131_072])
def test_constant_values(seqlen_k: int) -> None:
    """Values of 1 give 1 however many keys there are: sums keep up with their weights."""
    rng = np.random.default_rng(seqlen_k)
    query = rng.normal(size=(1, 130, 4, 128)).astype(cases.BFLOAT16)
    key = rng.normal(size=(1, seqlen_k, 2, 128)).astype(cases.BFLOAT16)
    wide = {"query": query, "key": key, "value": np.ones_like(key)}
    narrow = {name: x[..., :64] for name, x in wide.items()}

    def every(wide: Any, narrow: Any) -> Any:
        results = {}
        for softmax, center, (size, x) in itertools.product(
            ("exact", "linear"), (True, False), {128: wide, 64: narrow}.items()
        ):
            quantization = jax_fa3.Quantization(softmax=softmax, center_value=center)
            results[f"{softmax} {center} {size}"] = attend(x, quantization=quantization).out
        results["native 128"] = attend(wide, precision="native").out
        return results

    for name, out in run(every, wide, narrow).items():
        error = np.abs(out.astype(np.float64) - 1).max()
        # 0.3 % and the rounding to bfloat16. Uncentred values are not part of a preset: sums of 512
        # truncated products shrink by up to half a percent, the row sum not quite as much.
        limit = 1e-2 if "False" in name else 3e-3 + 2.0**-9
        assert error <= limit, (name, error)


@gpu
def test_error_does_not_grow_with_keys() -> None:
    """Random values; the error at 128k keys is at most about twice that at 4k."""
    rng = np.random.default_rng(4)
    query = rng.normal(size=(1, 64, 2, 128)).astype(cases.BFLOAT16)
    key, value = (rng.normal(size=(1, 131_072, 1, 128)).astype(cases.BFLOAT16) for _ in range(2))
    errors = {}
    for keys in (4096, 131_072):
        inputs = {"query": query, "key": key[:, :keys], "value": value[:, :keys]}
        exact = reference.exact(inputs)
        for name, result in run_presets(("accurate", "fast"), inputs).items():
            errors[name, keys] = tolerances.rel_l2(result.out, exact.out).max()
            lse_error = np.abs(result.logsumexp - exact.logsumexp).max()
            assert lse_error < 0.03, (name, keys, lse_error)
    for name in ("accurate", "fast"):
        assert 0 < errors[name, 4096] < 0.12, errors
        assert errors[name, 131_072] <= 2 * errors[name, 4096], errors


@gpu
def test_needles() -> None:
    """One key among 128k answers each row, wherever it stands."""
    keys, head_dim = 131_072, 128
    rng = np.random.default_rng(5)
    places = np.array([0, 1, 127, 128, 511, 512, 77_777, 77_778, 100_000, keys - 129, keys - 1])
    key = rng.normal(size=(1, keys, 2, head_dim)).astype(cases.BFLOAT16)
    value = rng.choice([-1.0, 1.0], size=(1, keys, 2, head_dim)).astype(cases.BFLOAT16)
    needle = key[:, places].astype(np.float32)
    # Logit 24 at its own key; the others together weigh e^12.
    length = (needle**2).sum(axis=-1, keepdims=True)
    query = np.repeat(needle * 24 * head_dim**0.5 / length, 3, axis=2).astype(cases.BFLOAT16)
    inputs = {"query": query, "key": key, "value": value}
    expected = np.repeat(value[:, places].astype(np.float64), 3, axis=2)
    for name, result in run_presets(("accurate", "fast", "native"), inputs).items():
        assert np.abs(result.out.astype(np.float64) - expected).max() < 0.08, name
        assert np.abs(result.logsumexp - 24).max() < (0.05 if name == "native" else 0.6), name


@gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_large_logits(head_dim: int) -> None:
    """Logits to +-1e4: finite, each row takes the value of its key, logsumexp is its logit."""
    rng = np.random.default_rng(6)
    key = rng.normal(size=(2, 300, 2, head_dim)).astype(np.float16)
    value = rng.normal(size=(2, 300, 2, head_dim)).astype(np.float16)
    places = rng.permutation(300)[:200]
    own = key[:, places].astype(np.float32)
    query = own * 1e4 * head_dim**0.5 / (own**2).sum(axis=-1, keepdims=True)
    query = np.repeat(query, 2, axis=2).astype(np.float16)
    expected = np.repeat(value[:, places].astype(np.float64), 2, axis=2)
    presets = ("accurate", "fast", "native")
    for sign in (1, -1):
        inputs = {"query": sign * query, "key": key, "value": value}
        results = run_presets(presets, inputs, softmax_scale=np.float32(sign * head_dim**-0.5))
        for name, result in results.items():
            error = np.abs(result.out.astype(np.float64) - expected)
            assert error.max() < (4e-3 if name == "native" else 0.25), name
            assert np.abs(result.logsumexp - 1e4).max() < (10 if name == "native" else 250), name
    # All logits near -1e4: keys share a large mean that every query opposes.
    shared = (key + np.float16(4)).astype(np.float16)
    opposed = np.full_like(query, -1e4 * head_dim**0.5 / (4 * head_dim))
    inputs = {"query": opposed, "key": shared, "value": value}
    for name, result in run_presets(presets, inputs, causal="bottom_right").items():
        out = result.out.astype(np.float64)
        assert np.isfinite(out).all(), name
        assert np.isfinite(result.logsumexp).all(), name
        # A mean of values stays among them (v_image rounds by up to 2^-4 of the largest).
        limit = np.abs(value.astype(np.float64)).max() * 1.07
        assert np.abs(out).max() <= limit, name
        assert (result.logsumexp < -4000).all(), name
    # One key 100 times the rest.
    spiked = key.copy()
    spiked[:, 77] *= 100
    inputs = {"query": 3 * rng.normal(size=query.shape).astype(np.float16), "key": spiked,
              "value": value}  # fmt: skip
    for name, result in run_presets(presets, inputs, causal="bottom_right").items():
        assert np.isfinite(result.out.astype(np.float32)).all(), name
        assert np.isfinite(result.logsumexp).all(), name


# ---- numbers that are not finite -----------------------------------------------------------------


def spoiled(operand: str, number: float, where: tuple[int, int, int, int]) -> tuple[Any, Any]:
    """(clean inputs, the same with one number replaced) of 300 rows and keys, 4 and 2 heads."""
    case = cases.Case("spoiled", seqlen_q=300, seqlen_k=300, num_heads_q=4, num_heads_kv=2,
                      head_dim=128)  # fmt: skip
    clean = cases.make_inputs(case)
    bad = {**clean, operand: clean[operand].copy()}
    bad[operand][where] = number
    return clean, bad


def affected(operand: str, where: tuple[int, int, int, int], causal: str | None) -> Any:
    """bool [2, 4, 300]: the rows that may see the number."""
    batch, position, head, _ = where
    rows = np.zeros((2, 4, 300), bool)
    if operand == "query":
        rows[batch, head, position] = True
    else:
        rows[batch, 2 * head : 2 * head + 2] = reference.visible(300, 300, causal)[:, position]
    return rows


@gpu
@pytest.mark.parametrize("causal", [None, "bottom_right"])
@pytest.mark.parametrize(("operand", "number"), [
    ("query", np.nan), ("query", -np.inf), ("key", np.nan), ("key", np.inf), ("value", np.nan),
    ("value", -np.inf),
])  # fmt: skip
def test_not_finite_fp8(operand: str, number: float, causal: str | None) -> None:
    """Every row that sees the number is NaN, no other row notices more than a change of scales."""
    where = (1, 201, 1, 37)
    clean, bad = spoiled(operand, number, where)
    rows = affected(operand, where, causal)
    presets = ("accurate", "fast")
    results = run_presets(presets, bad, causal=causal)
    before = run_presets(presets, clean, causal=causal)
    for name in presets:
        out, logsumexp = (np.asarray(x, np.float64) for x in results[name])
        by_row = np.moveaxis(out, 1, 2)
        assert np.isnan(by_row[rows]).all(), name
        assert np.isnan(logsumexp[rows]).all(), name
        assert np.isfinite(by_row[~rows]).all(), name
        assert np.isfinite(logsumexp[~rows]).all(), name
        # Means and scales of that head leave the number out, hence not the same bits.
        near = np.moveaxis(before[name].out.astype(np.float64), 1, 2)
        assert np.abs(by_row - near)[~rows].max() < 0.3, name
        others = ~rows.any(axis=-1)
        np.testing.assert_array_equal(by_row[others], near[others])


@gpu
@pytest.mark.parametrize("causal", [None, "bottom_right"])
def test_not_finite_native(causal: str | None) -> None:
    """NaN in a query or key: as in FP8. NaN in a value: see below.

    Known limits of the 16-bit kernels, whose products read the operands as they are:
    - A NaN or infinite value that a causal mask hides still meets probability 0 in P V when its
      block of 128 keys is visible to some row of the same tile, and 0 * NaN is NaN. Only rows of
      tiles that skip the block are safe (tiles are 128 rows at head_dim 128). Other channels of
      the row are right.
    - An infinite key gives logits of +inf (the row becomes NaN) or -inf (it counts as unseen).
    Keys past seqlen_k are read as zeros, so nothing behind the tensor gets in.
    """
    presets = ("native",)
    for operand in ("query", "key"):
        where = (1, 201, 1, 37)
        clean, bad = spoiled(operand, np.nan, where)
        rows = affected(operand, where, causal)
        out, logsumexp = run_presets(presets, bad, causal=causal)["native"]
        before = run_presets(presets, clean, causal=causal)["native"]
        assert np.isnan(np.moveaxis(out, 1, 2)[rows].astype(np.float32)).all()
        assert np.isnan(logsumexp[rows]).all()
        same = np.moveaxis(out, 1, 2)[~rows], np.moveaxis(before.out, 1, 2)[~rows]
        np.testing.assert_array_equal(*(x.astype(np.float32) for x in same))
        np.testing.assert_array_equal(logsumexp[~rows], before.logsumexp[~rows])
    for number in (np.nan, np.inf):
        where = (1, 290, 1, 37)  # third block of keys: rows 0 .. 255 belong to tiles without it
        clean, bad = spoiled("value", number, where)
        rows = affected("value", where, causal)
        out, logsumexp = run_presets(presets, bad, causal=causal)["native"]
        before = run_presets(presets, clean, causal=causal)["native"]
        out, near = (np.moveaxis(np.asarray(x, np.float32), 1, 2) for x in (out, before.out))
        assert not np.isfinite(out[..., 37][rows]).any()
        np.testing.assert_array_equal(np.delete(out, 37, -1), np.delete(near, 37, -1))
        np.testing.assert_array_equal(logsumexp, before.logsumexp)
        if causal:
            np.testing.assert_array_equal(out[:, :, :256], near[:, :, :256])


@gpu
def test_keys_past_the_end_do_not_matter() -> None:
    """A view of a longer array whose rest is NaN: tails of tiles read zeros, not neighbours."""
    case = cases.Case("tail", seqlen_q=70, seqlen_k=400, head_dim=64)
    inputs = cases.make_inputs(case)
    for name in ("key", "value"):
        inputs[name][:, 333:] = np.nan
    short = {"query": inputs["query"], **{n: inputs[n][:, :333].copy() for n in ("key", "value")}}

    def sliced(x: dict[str, Any]) -> Any:
        own = {n: x[n] if n == "query" else x[n][:, :333] for n in x}
        return {p: attend(own, **reference.PRESETS[p]) for p in ("accurate", "native")}

    reference.assert_same_bits(run(sliced, inputs), run_presets(("accurate", "native"), short))


# ---- size limits ---------------------------------------------------------------------------------


@gpu
def test_more_than_65535_batch_heads() -> None:
    """Every one of 70,000 batches comes out as it does in a small call."""
    shape = (70_000, 1, 64)
    many = {
        name: jax.random.normal(jax.random.key(i), (shape[0], n, *shape[1:]), jnp.bfloat16)
        for i, (name, n) in enumerate({"query": 2, "key": 3, "value": 3}.items())
    }
    some = np.array([0, 1, 2, 40_000, 65_534, 65_535, 65_536, 69_998, 69_999])
    few = {name: np.asarray(x[some]) for name, x in many.items()}

    def every(x: dict[str, Any]) -> Any:
        return {p: attend(x, **reference.PRESETS[p]) for p in ("accurate", "fast", "native")}

    results = run(every, many)
    picked = jax.tree.map(lambda x: x[some], results)
    reference.assert_same_bits(picked, run(every, few))
    for out, logsumexp in results.values():
        assert np.isfinite(out.astype(np.float32)).all()
        assert np.isfinite(logsumexp).all()
    # Heads instead of batches: 65,538 query heads over 3 key heads.
    wide = {
        "query": jax.random.normal(jax.random.key(4), (1, 2, 65_538, 64), jnp.bfloat16),
        "key": jax.random.normal(jax.random.key(5), (1, 5, 3, 64), jnp.bfloat16),
        "value": jax.random.normal(jax.random.key(6), (1, 5, 3, 64), jnp.bfloat16),
    }
    last = {"query": wide["query"][:, :, -2:], **{n: wide[n][:, :, -1:] for n in ("key", "value")}}
    results = run(every, wide).items()
    ends = {n: reference.Result(x.out[:, :, -2:], x.logsumexp[:, -2:]) for n, x in results}
    reference.assert_same_bits(ends, run(every, last))


@gpu
@pytest.mark.slow
def test_more_than_2_to_the_31_elements() -> None:
    """The last rows of a query, and the last keys, beyond the 2^31st element."""
    heads, head_dim = 128, 128
    seqlen = 2**31 // (heads * head_dim) + 256
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    tail = {
        name: draw(jax.random.key(i), (1, 256, heads, head_dim), jnp.bfloat16)
        for i, name in enumerate(("query", "key", "value"))
    }
    # Each row of the last 64 answers to one key of the last 256; what stands before weighs nothing.
    needle = tail["key"][:, -64:].astype(jnp.float32)
    aimed = needle * 40 * head_dim**0.5 / jnp.sum(needle**2, axis=-1, keepdims=True)
    expected = np.asarray(tail["value"][:, -64:], np.float64)
    plain = {"quantization": jax_fa3.Quantization(smooth_key=False, center_value=False)}
    every = jax.jit(
        lambda x: {
            "fp8": attend(x, **plain),
            "native": attend(x, precision="native"),
        }
    )
    fill = jax.jit(
        lambda x: jnp.concatenate([jnp.zeros((1, seqlen - 256, heads, head_dim), x.dtype), x], 1)
    )

    long_query = {**tail, "query": fill(tail["query"])}
    results = every(long_query)
    last = jax.tree.map(np.asarray, {n: (x.out[:, -256:], x.logsumexp[:, :, -256:])
                                     for n, x in results.items()})  # fmt: skip
    del long_query, results
    reference.assert_same_bits(last, {n: tuple(x) for n, x in every(tail).items()})

    long_keys = {"query": aimed.astype(jnp.bfloat16), "key": fill(tail["key"]),
                 "value": fill(tail["value"])}  # fmt: skip
    for name, result in every(long_keys).items():
        error = np.abs(np.asarray(result.out, np.float64) - expected)
        assert error.max() < (0.03 if name == "native" else 0.4), (name, error.max())


# ---- without a GPU: references, limits -----------------------------------------------------------


@pytest.mark.parametrize("causal", CAUSALS)
def test_references_agree_with_the_oracle(causal: str | None) -> None:
    """Whole matrices here, row by row in tests/oracle."""
    masks = {} if causal is None else {"is_causal": True, "causal_alignment": causal}
    for dtype, size in ((cases.BFLOAT16, (37, 29)), (cases.E4M3, (11, 150))):
        case = cases.Case("reference", seqlen_q=size[0], seqlen_k=size[1])
        inputs = cases.make_inputs(case, dtype)
        for got, expected in zip(
            reference.exact(inputs, causal=causal), oracle.attention(**inputs, **masks), strict=True
        ):
            np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-9)
        operands = reference.quantized(inputs)
        for linear in (False, True):
            got = reference.fp8_model(operands, causal=causal, linear=linear)
            expected = oracle.attention_fp8(operands, linear=linear, **masks)
            # A few P stand on a tie of float32 and float64.
            assert tolerances.rel_l2(got.out, expected[0]).max() < 2e-3
            np.testing.assert_allclose(got.logsumexp, expected[1], atol=5e-3)


@pytest.mark.parametrize("preset", ["accurate", "native"])
def test_kernel_limits_reject(preset: str) -> None:
    """Zeros, a factor of 1.1, swapped heads, a mask off by one, a lost descale, one bad head."""
    case = cases.by_name("causal")
    native = preset == "native"
    inputs = cases.make_inputs(case, cases.BFLOAT16 if native else cases.E4M3)
    limit = tolerances.KERNEL_NATIVE if native else tolerances.KERNEL_FP8
    options = {"causal": "bottom_right", "softmax_scale": None}
    exact = reference.exact(inputs, **options)
    model = reference.model(preset, inputs, **options)
    tolerances.check_kernel(model, exact, model, limit)
    out, logsumexp = model.out.astype(np.float64), model.logsumexp
    shifted = oracle.attention(**inputs, mask=np.tri(37, 53, 17, dtype=bool))
    wrong = {
        "zeros": (np.zeros_like(out), logsumexp),
        "times 1.1": (1.1 * out, logsumexp),
        "heads swapped": (out[:, :, ::-1], logsumexp),
        "batch swapped": (out[::-1], logsumexp),
        "mask off by one": shifted,
        "mask off by one in out only": (shifted[0], logsumexp),
        "one head wrong": (np.concatenate([out[:, :, :-1], 1.1 * out[:, :, -1:]], 2), logsumexp),
        "a NaN": (np.where(np.arange(37)[:, None, None] == 3, np.nan, out), logsumexp),
        "logsumexp zero": (out, np.zeros_like(logsumexp)),
        "logsumexp in base 2": (out, logsumexp / np.log(2)),
        "logsumexp of other heads": (out, logsumexp[:, ::-1]),
        "logsumexp +inf": (out, np.where(np.arange(37) == 3, np.inf, logsumexp)),
    }
    for lost in (name for name in reference.DESCALES if name in inputs):
        wrong[f"{lost} lost"] = reference.exact({**inputs, lost: 1.0}, **options)
    accepted = []
    for what, result in wrong.items():
        with contextlib.suppress(AssertionError):
            tolerances.check_kernel(result, exact, model, limit)
            accepted.append(what)
    assert accepted == []


def test_kernel_limits_reject_a_lost_empty_row() -> None:
    """An empty row that holds something, or whose logsumexp is finite or +inf."""
    inputs = cases.make_inputs(cases.Case("empty", seqlen_q=9, seqlen_k=5))
    exact = reference.exact(inputs, causal="bottom_right")
    model = reference.model("native", inputs, causal="bottom_right", softmax_scale=None)
    for number in (0.0, np.inf, np.nan):
        logsumexp = np.where(np.isneginf(model.logsumexp), number, model.logsumexp)
        with pytest.raises(AssertionError):
            tolerances.check_kernel((model.out, logsumexp), exact, model, tolerances.KERNEL_NATIVE)
    out = model.out.astype(np.float64)
    out[0, 0] = out[0, 8]
    with pytest.raises(AssertionError):
        tolerances.check_kernel((out, model.logsumexp), exact, model, tolerances.KERNEL_NATIVE)
