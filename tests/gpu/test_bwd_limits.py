"""The backward kernels where probabilities are 0 or 1: large logits, and nothing to see."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import pytest
from gpu import reference, reference_gradients

pytestmark = pytest.mark.gpu

# (precision, head_dim, deterministic): at head_dim 256 the order of additions is fixed either way.
WAYS = [
    (precision, head_dim, deterministic)
    for precision in ("native", "fp8")
    for head_dim, deterministic in ((64, False), (64, True), (128, False), (128, True), (256, True))
]


def gradients(inputs: Any, dout: Any, dlogsumexp: Any, **options: Any) -> dict[str, Any]:
    """Of one call, in float32, over poisoned memory."""

    def kernel(x: Any, dout: Any, dlogsumexp: Any) -> Any:
        return reference_gradients.of_call(x, dout, dlogsumexp, implementation="cuda", **options)

    grads = reference.run(kernel, inputs, dout, dlogsumexp)
    return {name: np.asarray(x, np.float32) for name, x in grads.items()}


def draw(rows: int, keys: int, head_dim: int, heads: tuple[int, int]) -> tuple[Any, Any, Any]:
    """Inputs, dout and dlogsumexp."""
    rng = np.random.default_rng(23)
    sizes = {"query": (rows, heads[0]), "key": (keys, heads[1]), "value": (keys, heads[1])}
    inputs = {
        name: rng.normal(size=(2, *size, head_dim)).astype(cases.BFLOAT16)
        for name, size in sizes.items()
    }
    dout = rng.normal(size=inputs["query"].shape).astype(np.float32)
    return inputs, dout, rng.normal(size=(2, heads[0], rows)).astype(np.float32)


@pytest.mark.parametrize(("precision", "head_dim", "deterministic"), WAYS)
def test_logits_of_ten_thousand(precision: str, head_dim: int, deterministic: bool) -> None:
    """Each row has one key at 1e4 and others down to -1e4 and less: at 16 bits its value gets the
    row's dout and nothing else a gradient; after an FP8 forward all is finite."""
    rows, keys = 2100, 300
    inputs, dout, dlogsumexp = draw(rows, keys, head_dim, (4, 2))
    places = np.arange(rows) * 7 % keys
    own = inputs["key"][:, places].astype(np.float32)
    aimed = own * 1e4 * head_dim**0.5 / (own**2).sum(axis=-1, keepdims=True)
    dlogsumexp = np.zeros_like(dlogsumexp)
    for sign in (1, -1):
        query = (sign * np.repeat(aimed, 2, axis=2)).astype(cases.BFLOAT16)
        grads = gradients(
            {**inputs, "query": query}, dout, dlogsumexp, precision=precision,
            softmax_scale=np.float32(sign * head_dim**-0.5), deterministic=deterministic,
        )  # fmt: skip
        assert all(np.isfinite(g).all() for g in grads.values()), sign
        if precision == "fp8":
            continue
        expected = np.zeros(grads["value"].shape)
        np.add.at(expected, (slice(None), places), dout.reshape(2, rows, 2, 2, -1).sum(axis=3))
        error = np.linalg.norm(grads["value"] - expected)
        assert error <= 2e-2 * np.linalg.norm(expected), sign
        # Next to what stands there where dP - delta does not cancel; it leaves the output's 2^-9.
        size = head_dim**-0.5 * np.linalg.norm(dout)
        assert np.linalg.norm(grads["query"]) <= 3e-2 * size * head_dim**0.5, sign
        assert np.linalg.norm(grads["key"]) <= 3e-2 * size * np.abs(aimed).max(), sign


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_scale_of_zero(head_dim: int) -> None:
    """All weights are equal: each value gets the group's sum of dout over the number of keys."""
    inputs, dout, dlogsumexp = draw(130, 300, head_dim, (4, 2))
    grads = gradients(inputs, dout, dlogsumexp, precision="native", softmax_scale=np.float32(0.0))
    assert np.abs(grads["query"]).max() < 1e-12
    assert np.abs(grads["key"]).max() < 1e-12
    mean = dout.reshape(2, 130, 2, 2, -1).sum(axis=(1, 3))[:, None] / 300
    expected = np.broadcast_to(mean, grads["value"].shape)
    assert np.linalg.norm(grads["value"] - expected) <= 1e-2 * np.linalg.norm(expected)


@pytest.mark.parametrize(("precision", "head_dim", "deterministic"), WAYS)
@pytest.mark.parametrize(
    ("corner", "rows", "keys"),
    [
        ("bottom_right", 300, 130),
        ("bottom_right", 4300, 200),  # long enough for float8 scores at head_dim 128
        ("top_left", 130, 300),
        ("top_left", 4100, 4300),
    ],
)
def test_unseen_gets_exactly_zero(
    corner: str, rows: int, keys: int, precision: str, head_dim: int, deterministic: bool
) -> None:
    """Rows that see no key, and keys and values that no row sees; all others have a gradient."""
    inputs, dout, dlogsumexp = draw(rows, keys, head_dim, (3, 1))
    grads = gradients(
        inputs, dout, dlogsumexp, precision=precision, deterministic=deterministic,
        is_causal=True, causal_alignment=corner,
    )  # fmt: skip
    seen = reference.visible(rows, keys, corner)
    assert not seen.any(axis=1 if rows > keys else 0).all()
    for name, is_seen in (
        ("query", seen.any(axis=1)),
        ("key", seen.any(axis=0)),
        ("value", seen.any(axis=0)),
    ):
        assert np.isfinite(grads[name]).all(), name
        assert (grads[name][:, ~is_seen] == 0).all(), name
        # Softmax over one key is constant: its row's gradient may vanish.
        assert (grads[name][:, is_seen] != 0).any(axis=-1).mean() > 0.99, name
