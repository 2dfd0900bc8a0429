"""NaN and infinity in the forward kernels stay where they belong."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import pytest
from gpu import reference
from gpu.reference import attend, run, run_presets

gpu = pytest.mark.gpu


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
