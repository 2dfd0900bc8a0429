"""Inputs for tests of the quantiser, and the comparison of its results with the NumPy model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import ml_dtypes
import numpy as np
from gpu import image_model

DTYPES = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
FORMAT_MAX = {"e4m3": 448.0, "e5m2": 57344.0}
LENGTHS = (1, 7, 63, 64, 65, 127, 128, 129, 191, 255, 257, 1000)


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes, dtypes and flags of one call. `data` names a generator below."""

    seqlen_q: int = 65
    seqlen_k: int = 129
    head_dim: int = 128
    group_size: int = 3
    batch: int = 2
    num_heads_kv: int = 2
    q_dtype: str = "bf16"
    k_dtype: str = "bf16"
    v_dtype: str = "bf16"
    image_dtype: str = "e4m3"
    data: str = "normal"
    hadamard: bool = True
    smooth_key: bool = True
    center_value: bool = True
    wants_shift: bool = True

    def flags(self) -> dict[str, bool]:
        return {
            "hadamard": self.hadamard,
            "smooth_key": self.smooth_key,
            "center_value": self.center_value,
            "wants_shift": self.wants_shift,
        }

    def __str__(self) -> str:
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return "-".join(changed) or "default"


def cases() -> list[Case]:
    """What both the host run of the kernels and the GPU check."""
    found = [
        # every length as a query and as a key length, never both alike
        *(
            Case(seqlen_q=q, seqlen_k=k, head_dim=head_dim, group_size=group)
            for q, k, head_dim, group in zip(
                LENGTHS, reversed(LENGTHS), (64, 128, 256) * 4, (1, 3, 4, 1) * 3, strict=True
            )
        ),
        Case(seqlen_q=1000, seqlen_k=1, head_dim=64),
        Case(seqlen_k=2049, head_dim=128, group_size=1, batch=1),  # five chunks of statistics
        Case(seqlen_k=2049, head_dim=64, group_size=1, batch=1, v_dtype="e4m3"),
        Case(seqlen_k=2049, head_dim=256, group_size=1, batch=1),
        # statistics of a sample, and values that do not fit the scales made of it
        *(
            Case(seqlen_k=1300, head_dim=head_dim, group_size=1, batch=1, v_dtype=dtype, data=data)
            for data in ("biased", "bad", "beyond")
            for head_dim, dtype in ((64, "bf16"), (128, "f16"), (256, "bf16"))
        ),
        Case(seqlen_k=1300, batch=1, image_dtype="e5m2", data="beyond"),
        Case(seqlen_k=1300, batch=1, data="beyond", center_value=False),
        Case(seqlen_k=1300, batch=1, data="zeros"),
        # query images that wait for no mean
        *(
            Case(
                seqlen_q=200,
                seqlen_k=1100,
                head_dim=head_dim,
                batch=1,
                data=data,
                wants_shift=False,
            )
            for head_dim, data in ((64, "beyond"), (128, "bad"), (256, "biased"))
        ),
        Case(v_dtype="e4m3", wants_shift=False),  # without a last launch
        # data
        *(
            Case(
                seqlen_k=257,
                head_dim=head_dim,
                data=data,
                q_dtype=dtype,
                k_dtype=dtype,
                v_dtype=dtype,
            )
            for data in ("outliers", "zeros", "constant", "bad", "biased", "tiny")
            for head_dim, dtype in ((64, "bf16"), (128, "f16"), (256, "bf16"))
        ),
        Case(data="huge"),
        Case(data="bad", hadamard=False, smooth_key=False),
        Case(data="bad", image_dtype="e5m2"),
        # dtypes
        Case(q_dtype="f16", k_dtype="bf16", v_dtype="f16", image_dtype="e5m2"),
        Case(q_dtype="f16", k_dtype="f16", v_dtype="f16", head_dim=64),
        *(
            Case(q_dtype=q, k_dtype=k, v_dtype=v, image_dtype=image, hadamard=False, data=data)
            for q, k, v, image, data in (
                ("e4m3", "e4m3", "e4m3", "e4m3", "normal"),
                ("e5m2", "e5m2", "e5m2", "e5m2", "normal"),
                ("e4m3", "e4m3", "e4m3", "e4m3", "bad"),
                ("e5m2", "e5m2", "e5m2", "e5m2", "bad"),
                ("bf16", "e4m3", "e4m3", "e4m3", "normal"),
                ("e4m3", "bf16", "f16", "e4m3", "normal"),
                ("e5m2", "e4m3", "bf16", "e5m2", "zeros"),
            )
        ),
        Case(v_dtype="e4m3"),
        Case(head_dim=256, q_dtype="f16", k_dtype="f16", v_dtype="e4m3", image_dtype="e5m2"),
        Case(head_dim=256, q_dtype="e4m3", k_dtype="e4m3", v_dtype="e4m3", hadamard=False),
        Case(head_dim=256, hadamard=False, smooth_key=False, center_value=False),
        # flags
        *(
            Case(hadamard=h, smooth_key=s, center_value=c, head_dim=64)
            for h in (False, True)
            for s in (False, True)
            for c in (False, True)
        ),
    ]
    return list(dict.fromkeys(found))


def make(case: Case, seed: int = 0) -> tuple[np.ndarray, ...]:
    """(q, k, v, factor, v_factor) of a case; every head has its own magnitude, factors of odd heads
    are negative."""
    rng = np.random.default_rng(seed)
    num_heads_q = case.num_heads_kv * case.group_size
    q = _values(rng, case, (case.batch, case.seqlen_q, num_heads_q, case.head_dim))
    k = _values(rng, case, (case.batch, case.seqlen_k, case.num_heads_kv, case.head_dim))
    v = _values(rng, case, (case.batch, case.seqlen_k, case.num_heads_kv, case.head_dim))
    lead = (case.batch, case.num_heads_kv)
    sign = np.where(np.arange(case.num_heads_kv) % 2, -1, 1)
    factor = (rng.uniform(0.05, 0.3, lead) * sign).astype(np.float32)
    v_factor = (rng.uniform(0.5, 2, lead) * sign).astype(np.float32)
    arrays = [
        x.astype(DTYPES[dtype])
        for x, dtype in ((q, case.q_dtype), (k, case.k_dtype), (v, case.v_dtype))
    ]
    if case.data == "bad":
        for array in arrays:
            _spoil(rng, array)
    return *arrays, factor, v_factor


def _values(rng: np.random.Generator, case: Case, shape: tuple[int, ...]) -> np.ndarray:
    scale = (2.0 ** np.arange(shape[2]) / 4)[:, None]
    x = rng.standard_normal(shape) * scale
    if case.data == "outliers":
        x += 30 * rng.standard_normal(shape) * (rng.random(shape) < 0.01)
    elif case.data == "biased":
        x += 5 * rng.standard_normal((shape[0], 1, *shape[2:]))
    elif case.data == "zeros":
        x[:, :, 0] = 0  # a whole head
        x[:, ::2] = 0  # every other row
        x[..., 3] = 0  # a channel
    elif case.data == "constant":
        x[:] = x[:, :1]  # all rows alike: what is left after centring is (nearly) nothing
    elif case.data == "tiny":
        x *= 2.0**-22 if "f16" in (case.q_dtype, case.k_dtype) else 2.0**-128
    elif case.data == "beyond":
        if shape[1] > 1001:
            x[:, :, -1, 6] = 0
            x[:, 1001, -1, 5:7] = 2000, 1e-3  # of one head; not in the sample
    elif case.data == "huge":
        x *= 1e36  # bfloat16 only
    return x


def _spoil(rng: np.random.Generator, array: np.ndarray) -> None:
    """NaN and infinities in a few rows; the last row and row 0 of head 0 among them."""
    batch, seqlen, heads, head_dim = array.shape
    values = [np.nan, np.inf, -np.inf]
    for i in range(max(2, seqlen // 20)):
        row = (seqlen - 1, 0)[i] if i < 2 else rng.integers(seqlen)
        place = (rng.integers(batch), row, 0 if i < 2 else rng.integers(heads))
        array[(*place, rng.integers(head_dim))] = values[i % 3]


def check(
    case: Case, results: Mapping[str, np.ndarray], model: Mapping[str, np.ndarray], *, exact: bool
) -> None:
    """Compares results (images as uint8 codes) with the model.

    exact: the model used the results' own means and order of additions, so that every code must
    agree. Otherwise the last bits of a mean may differ, or of a rotated value (tensor cores cut off
    other bits than float32 does), and with them a few codes by one step.
    """
    for name, share in (("q_image", 1e-4), ("k_image", 1e-3), ("v_image", 1e-3)):
        assert results[name].shape == model[name].shape, name
        distance = image_model.code_distance(results[name], model[name])
        differ = f"{name}: {(distance > 0).sum()} of {distance.size} codes differ"
        if exact:
            assert distance.max() == 0, differ
        elif case.data == "constant" and name != "q_image":
            continue  # nothing but the means' rounding errors is left
        else:
            assert distance.max() <= 1, f"{name}: off by {distance.max()} steps"
            assert (distance > 0).mean() < share, differ
    np.testing.assert_array_equal(results["q_descale"], model["q_descale"], "q_descale")
    if exact or case.data != "constant":
        np.testing.assert_array_equal(results["k_descale"], model["k_descale"], "k_descale")
        rtol = 0 if exact else 1e-5
        np.testing.assert_allclose(
            results["v_descale"], model["v_descale"], rtol, 0, err_msg="v_descale"
        )

    # Sums in float32 in an order of the kernel's own: errors relative to the magnitudes added.
    # The shift of a row with NaN or Inf is not defined: its logits are NaN anyway.
    good = np.isfinite(model["q_shift"])
    shift, expected = results["q_shift"][good], model["q_shift"][good]
    limit = 1e-5 * np.maximum(np.abs(expected).max(initial=0), np.float32(1e-30))
    assert (np.abs(shift - expected) <= limit).all() or case.data == "huge", "q_shift"
    if "k_mean" in results and not exact:
        limit = 1e-5 * np.abs(model["k_mean"]).max(initial=0)
        error = np.abs(results["k_mean"] - model["k_mean"])
        assert (error <= limit).all() or case.data == "huge", "k_mean"
    # v_mean follows the codes: one of them off by a step moves its channel's mean.
    amax = np.abs(model["v_mean"]).max(initial=0)
    amax = amax + np.abs(model["v_descale"]) * FORMAT_MAX[case.image_dtype]
    limit = (1e-5 if exact else 1e-5 + 0.3 / case.seqlen_k) * amax
    error = np.abs(results["v_mean"] - model["v_mean"])
    assert (error <= limit).all() or case.data == "huge", "v_mean"
