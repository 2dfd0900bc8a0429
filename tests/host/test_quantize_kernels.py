"""The quantiser's kernels, run on the host thread by thread, write what the NumPy model says.

Inputs and outputs lie in memory that ends at a guard page; outputs start out poisoned.
"""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from gpu import image_model, quantize_data
from gpu.quantize_data import Case


def run_on_host(host, case, q, k, v, factor, v_factor, q_run=0):
    """Results as arrays, images as uint8, with the means out of the workspace."""
    raw = raw_results(host, case, q, k, v, factor, v_factor, q_run)
    rows = int(host.round_up(case.seqlen_q, 64))
    keys = int(host.round_up(case.seqlen_k, 128))
    q_lead = (case.batch, case.num_heads_kv * case.group_size)
    kv_lead = (case.batch, case.num_heads_kv)
    shapes = {
        "q_image": (*q_lead, rows, case.head_dim),
        "q_descale": (*q_lead, rows),
        "q_shift": (*q_lead, rows),
        "k_image": (*kv_lead, keys, case.head_dim),
        "k_descale": (*kv_lead, keys // 128),
        "v_image": (*kv_lead, keys // 128, case.head_dim, 128),
        "v_descale": (*kv_lead, case.head_dim),
        "v_mean": (*kv_lead, case.head_dim),
        "workspace": (*kv_lead, host.quantize_chunks(case.seqlen_k) + 1, 4, case.head_dim),
    }
    results = {
        name: raw[name].view(np.uint8 if "image" in name else np.float32).reshape(shape)
        for name, shape in shapes.items()
    }
    positions = host.image_position(np.arange(case.head_dim))
    results["k_mean"] = results["workspace"][:, :, -1, 0, positions]  # rotated where k is
    results["centre"] = results["workspace"][:, :, -1, 2]
    assert not raw["tile_counter"].any()
    return results


def raw_results(host, case, q, k, v, factor, v_factor, q_run=0):
    """What the kernels write, as bytes by name."""

    def as_bytes(x):
        return np.ascontiguousarray(x).view(np.uint8)

    return host.quantize_on_host(
        *(as_bytes(x) for x in (q, k, v)),
        *(x.dtype.name for x in (q, k, v)),
        quantize_data.DTYPES[case.image_dtype].name,
        factor,
        v_factor,
        case.hadamard,
        case.smooth_key,
        case.center_value,
        case.wants_shift,
        q_run,
    )


def model_of(case, inputs, **means):
    return image_model.quantize(
        *inputs, **case.flags(), dtype=quantize_data.DTYPES[case.image_dtype], **means
    )


@pytest.mark.parametrize("case", quantize_data.cases(), ids=str)
def test_kernels_match_the_model(host, case):
    inputs = quantize_data.make(case)
    results = run_on_host(host, case, *inputs)
    means = {"k_mean": results["k_mean"], "v_mean": results["centre"]}
    quantize_data.check(case, results, model_of(case, inputs, **means), exact=True)
    quantize_data.check(case, results, model_of(case, inputs), exact=False)


def test_one_factor_for_all_heads(host):
    """One number, and nothing behind it, stands for an array of it."""
    case = Case(seqlen_q=70, seqlen_k=130, head_dim=64, v_dtype="e4m3", center_value=False)
    q, k, v, *factors = quantize_data.make(case)
    one = [np.float32(x[0, 0]) for x in factors]
    filled = raw_results(host, case, q, k, v, *(np.full((2, 2), x) for x in one))
    for name, result in raw_results(host, case, q, k, v, *one).items():
        np.testing.assert_array_equal(result, filled[name], name)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_images_multiply_to_the_logits(host, head_dim):
    """Read back through the layout functions, q . k is the factor times the true product."""
    case = Case(seqlen_q=70, seqlen_k=200, head_dim=head_dim, batch=1, num_heads_kv=1, group_size=2)
    q, k, v, factor, v_factor = quantize_data.make(case)
    results = run_on_host(host, case, q, k, v, factor, v_factor)
    dtype = ml_dtypes.float8_e4m3fn

    def read_rows(codes, group):
        rows, columns = np.meshgrid(*map(np.arange, codes.shape), indexing="ij")
        return (
            codes.reshape(-1)[host.row_image_offset(head_dim, group, rows, columns)]
            .view(dtype)
            .astype(float)
        )

    k_rows = (
        read_rows(results["k_image"][0, 0], 128)
        * np.repeat(results["k_descale"][0, 0], 128)[:, None]
    )
    for head in range(2):
        q_rows = read_rows(results["q_image"][0, head], 64) * results["q_descale"][0, head][:, None]
        logits = (q_rows @ k_rows.T + results["q_shift"][0, head][:, None])[:70, :200]
        exact = factor[0, 0] * q[0, :, head].astype(float) @ k[0, :, 0].astype(float).T
        # e4m3 rounds by 2.65 % rms, twice
        assert np.linalg.norm(logits - exact) < 0.05 * np.linalg.norm(exact)

    channels, keys = np.meshgrid(np.arange(head_dim), np.arange(128), indexing="ij")
    offsets = host.value_image_offset(channels, keys)
    granules = [
        image.reshape(-1)[offsets].view(dtype).astype(float) for image in results["v_image"][0, 0]
    ]
    value = np.concatenate(granules, axis=1)[:, :200].T * results["v_descale"][0, 0]
    exact = v[0, :, 0].astype(float)
    assert np.linalg.norm(value + results["v_mean"][0, 0] - exact) < 0.04 * np.linalg.norm(exact)


@pytest.mark.parametrize("image_dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_dequantised_operands_multiply_to_the_logits(host, head_dim, image_dtype):
    """Images of several batches and heads come back in the natural layout, q and k unrounded."""
    case = Case(seqlen_q=70, seqlen_k=200, head_dim=head_dim, batch=2, num_heads_kv=2,
                group_size=2, image_dtype=image_dtype)  # fmt: skip
    q, k, v, factor, v_factor = quantize_data.make(case)
    results = run_on_host(host, case, q, k, v, factor, v_factor)
    raw = host.dequantize_on_host(
        raw_results(host, case, q, k, v, factor, v_factor),
        quantize_data.DTYPES[image_dtype].name, case.batch, 70, 200, 4, 2, head_dim,
    )  # fmt: skip
    query, key, value = (
        raw[name].view(ml_dtypes.bfloat16).reshape(x.shape)
        for name, x in (("q", q), ("k", k), ("v", v))
    )
    # Rotated coordinates stand in their order.
    rotated = image_model.rotate(q.astype(np.float32)) / np.float32(head_dim)
    rotated *= np.repeat(factor, 2, axis=1)[:, None, :, None]
    noise = 0.1 if image_dtype == "e5m2" else 0.05
    assert np.linalg.norm(query.astype(float) - rotated) < noise * np.linalg.norm(rotated)
    for batch in range(case.batch):
        for head in range(4):
            logits = query[batch, :, head].astype(float) @ key[batch, :, head // 2].astype(float).T
            logits += results["q_shift"][batch, head, :70, None]
            exact = q[batch, :, head].astype(float) @ k[batch, :, head // 2].astype(float).T
            exact *= factor[batch, head // 2]
            assert np.linalg.norm(logits - exact) < noise * np.linalg.norm(exact)
    exact = v.astype(float)
    assert np.linalg.norm(value.astype(float) - exact) < noise * np.linalg.norm(exact)
    # On the format's grid, so nothing was lost on the way.
    scaled = (
        query.astype(np.float32) / np.swapaxes(results["q_descale"][:, :, :70], 1, 2)[..., None]
    )
    np.testing.assert_array_equal(scaled.astype(quantize_data.DTYPES[image_dtype]), scaled)


@pytest.mark.parametrize("has_mean", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_are_rotated_back(host, head_dim, has_mean):
    """The transposed rotation, the factor of query, and what the mean of the keys adds to it."""
    rng = np.random.default_rng(2)
    dq, dk = (
        rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
        for shape in ((2, 70, 6, head_dim), (2, 131, 3, head_dim))
    )
    k_mean = rng.standard_normal((2, 3, head_dim)).astype(np.float32)
    row_sums = rng.standard_normal((2, 6, 70)).astype(np.float32)
    if not has_mean:
        k_mean, row_sums = k_mean[:0], row_sums[..., :0]
    raw = host.unrotate_on_host(
        dq.view(np.uint8), dk.view(np.uint8), 0.3, k_mean, row_sums, head_dim
    )
    matrix = image_model.rotate(np.eye(head_dim, dtype=np.float32)).astype(float)  # x -> x @ matrix
    of_rows = dq.astype(float) @ matrix.T * (np.log2(np.e) / head_dim)
    of_mean = 0.0
    if has_mean:
        of_mean = np.swapaxes(row_sums, 1, 2)[..., None] * np.repeat(k_mean, 2, axis=1)[:, None]
    for name, x, exact in (("dq", dq, 0.3 * (of_rows + of_mean)), ("dk", dk, dk @ matrix.T)):
        result = raw[name].view(ml_dtypes.bfloat16).reshape(x.shape).astype(float)
        np.testing.assert_allclose(result, exact, rtol=2**-8, atol=1e-5 * np.abs(exact).max())


def stepped(codes, count, steps):
    """`count` of the codes that are neither small nor large, moved up by `steps`."""
    codes = codes.copy()
    places = np.flatnonzero((codes > 0x30) & (codes < 0x60))[:count]
    codes.flat[places] += steps
    return codes


def test_check_rejects_wrong_images(host):
    """The comparison of this file can fail: swapped heads, a shifted key, a wrong scale. It lets
    tensor cores round a few codes of q the other way."""
    case = Case()
    inputs = quantize_data.make(case)
    results = run_on_host(host, case, *inputs)
    model = model_of(case, inputs)
    for name, change in (
        ("k_image", lambda x: x[:, ::-1]),
        ("q_image", lambda x: np.roll(x, 1, axis=2)),
        ("q_image", lambda x: stepped(x, 1, 2)),
        ("q_image", lambda x: stepped(x, 50, 1)),
        ("v_image", lambda x: np.roll(x, 1, axis=-1)),
        ("v_image", np.zeros_like),
        ("q_descale", lambda x: 2 * x),
        ("q_shift", lambda x: 1.001 * x),
        ("v_mean", lambda x: x + 1e-2),
    ):
        with pytest.raises(AssertionError):
            quantize_data.check(case, results | {name: change(results[name])}, model, exact=False)
    near = results | {"q_image": stepped(results["q_image"], 1, 1)}
    quantize_data.check(case, near, model, exact=False)
    with pytest.raises(AssertionError, match=r"1 of .* codes differ"):
        quantize_data.check(case, near, model, exact=True)


@pytest.mark.parametrize("wants_shift", [False, True])
@pytest.mark.parametrize(("head_dim", "seqlen_q"), [(64, 577), (128, 577), (256, 300)])
def test_runs_of_query_tiles(host, head_dim, seqlen_q, wants_shift):
    """However many tiles of q a block takes, and in whichever launch, the bits are the same."""
    case = Case(seqlen_q=seqlen_q, seqlen_k=130, head_dim=head_dim, batch=1, data="bad",
                wants_shift=wants_shift)  # fmt: skip
    inputs = quantize_data.make(case)
    single = run_on_host(host, case, *inputs, q_run=1)
    for q_run in (2, 3, 8):
        several = run_on_host(host, case, *inputs, q_run=q_run)
        for name in ("q_image", "q_descale", "q_shift"):
            np.testing.assert_array_equal(several[name], single[name], f"{name}, runs of {q_run}")


def test_two_batches_do_not_mix(host):
    """A batch alone gives the same bits as the same batch beside another."""
    case = Case(seqlen_q=129, seqlen_k=130)
    inputs = quantize_data.make(case)
    both = run_on_host(host, case, *inputs)
    alone = run_on_host(host, dataclasses.replace(case, batch=1), *(x[1:] for x in inputs))
    for name, result in alone.items():
        np.testing.assert_array_equal(both[name][1:], result, name)


# ---- single values -----------------------------------------------------------------------------

FLOATS = np.concatenate(
    [
        np.ldexp(np.float32(1), np.arange(-149, 128)),
        np.ldexp(np.nextafter(np.float32(2), np.float32(0)), np.arange(-149, 127)),
        np.ldexp(np.float32(1.75), np.arange(-140, 127)),
        np.random.default_rng(0).standard_normal(1000).astype(np.float32),
    ]
).astype(np.float32)


@pytest.mark.parametrize(("head_dim", "limit"), [(64, 16), (128, 16), (256, 8)])
def test_operand_exponent(host, head_dim, limit):
    amax = np.abs(FLOATS)
    exponent = host.operand_exponent(amax, head_dim)
    np.testing.assert_array_equal(exponent, image_model.operand_exponent(amax, head_dim))
    scaled = np.ldexp(amax.astype(np.float64), -exponent)
    inside = (scaled >= limit / 2) & (scaled < limit)
    assert inside[amax >= 2.0**-122].all()
    assert (scaled < limit).all()
    assert host.operand_range(head_dim) == limit
    assert limit**2 * head_dim < 65504  # scores fit float16
    assert host.operand_exponent(0.0, head_dim) == 0
    np.testing.assert_array_equal(host.power_of_two(exponent), np.ldexp(np.float32(1), exponent))


@pytest.mark.parametrize(("e5m2", "value_range"), [(False, 448.0), (True, 57344.0)])
def test_value_scale(host, e5m2, value_range):
    amax = np.abs(FLOATS)
    amax = amax[(amax > 2.0**-60) & (amax < 2.0**60)]
    exponent = host.value_exponent(amax, e5m2)
    scaled = np.ldexp(amax.astype(np.float64), -exponent)
    assert ((scaled > value_range / 2) & (scaled <= value_range)).all()
    np.testing.assert_array_equal(
        host.value_descale(amax, False, 1.0, e5m2), amax / np.float32(value_range)
    )
    np.testing.assert_array_equal(
        host.value_multiplier(amax, False, 1.0, e5m2), np.float32(value_range) / amax
    )
    np.testing.assert_array_equal(
        host.value_descale(amax, True, 3.0, e5m2), 3 * np.ldexp(np.float32(1), exponent)
    )
    for zero in (
        host.value_descale(0.0, False, 1.0, e5m2),
        host.value_multiplier(0.0, False, 1.0, e5m2),
    ):
        assert zero == 1
    tiny = host.value_multiplier(np.float32(1e-44), False, 1.0, e5m2)
    assert np.isfinite(tiny)


@pytest.mark.parametrize(("e5m2", "name"), [(False, "e4m3"), (True, "e5m2")])
def test_codes_of_every_16_bit_value_and_back(host, e5m2, name):
    dtype = quantize_data.DTYPES[name]
    bits = np.arange(2**16, dtype=np.uint16)
    for is_bf16, wide in ((True, ml_dtypes.bfloat16), (False, np.float16)):
        with np.errstate(invalid="ignore"):
            values = bits.view(wide).astype(np.float32)
        np.testing.assert_array_equal(
            host.pair_value(bits.astype(np.uint32), False, is_bf16), values
        )
        np.testing.assert_array_equal(
            host.pair_value(bits.astype(np.uint32) << 16, True, is_bf16), values
        )
        np.testing.assert_array_equal(
            host.pair_has_nonfinite(bits.astype(np.uint32), is_bf16), ~np.isfinite(values)
        )
        np.testing.assert_array_equal(
            host.pair_has_nonfinite(bits.astype(np.uint32) << 16, is_bf16), ~np.isfinite(values)
        )
        codes = host.cast_code(values, e5m2)
        expected = image_model.canonical(image_model.cast(values, dtype))
        np.testing.assert_array_equal(image_model.canonical(codes), expected)
    codes = np.arange(256, dtype=np.uint32)
    np.testing.assert_array_equal(
        host.widen_code(codes, e5m2), codes.astype(np.uint8).view(dtype).astype(np.float32)
    )


def test_signs(host):
    columns = np.arange(256)
    expected = image_model.signs(256)
    np.testing.assert_array_equal(host.is_negated(columns), expected < 0)
    even = columns[::2]
    masks = (expected[::2] < 0) * 0x8000 + (expected[1::2] < 0) * 0x80000000
    pairs = np.uint32(0x3F80C040)
    np.testing.assert_array_equal(host.with_signs(pairs, even), pairs ^ masks.astype(np.uint32))


def test_image_positions(host):
    for head_dim in (64, 128, 256):
        positions = host.image_position(np.arange(head_dim))
        order = image_model.image_order(head_dim)
        np.testing.assert_array_equal(order[positions], np.arange(head_dim))


def test_rotation_keeps_products():
    rng = np.random.default_rng(0)
    q, k = rng.integers(-8, 9, (2, 5, 128)).astype(np.float32)
    np.testing.assert_array_equal(image_model.rotate(q) @ image_model.rotate(k).T, 128 * (q @ k.T))


# ---- launch ------------------------------------------------------------------------------------


def grid(
    host,
    batch=2,
    seqlen_q=100,
    seqlen_k=1000,
    heads_q=6,
    heads_kv=2,
    head_dim=128,
    hadamard=True,
    f8=False,
    shift=True,
):
    return host.quantize_grid(
        batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, hadamard, f8, shift
    )


def test_grid(host):
    assert grid(host) == (8, 4, 32, 12, 0, 0)
    assert grid(host, batch=70_000)[3] == 420_000
    assert grid(host, seqlen_k=2**20)[:2] == (4 * 2048, 4)
    assert grid(host, seqlen_q=2**13 + 1)[3] == 12 * 65  # too few tiles for runs
    assert grid(host, seqlen_q=2**14 + 1)[3] == 12 * 43  # runs of three, the last one shorter
    # without the shift, query images need not wait for the means
    assert grid(host, shift=False) == (8, 4, 32, 12, 12, 0)
    assert grid(host, seqlen_q=2**14 + 1, shift=False)[3:] == (780, 780 - 241, 241)
    assert grid(host, seqlen_q=2**17, shift=False)[3:] == (6144, 6144 - 320, 320)
    # fewer of them late beside many ends
    heads = {"heads_q": 16, "heads_kv": 16, "shift": False}
    assert grid(host, batch=4, seqlen_q=4096, **heads)[3:] == (1024, 1024 - 320, 320)
    assert grid(host, batch=8, seqlen_q=2048, **heads)[3:] == (1024, 1024 - 256, 256)


@pytest.mark.parametrize(
    "change",
    [
        {"batch": 0},
        {"seqlen_q": 0},
        {"seqlen_k": 0},
        {"heads_q": 5},
        {"heads_kv": 0},
        {"head_dim": 96},
        {"hadamard": True, "f8": True},
        {"batch": 2**30, "heads_q": 2},
        {"batch": 2**31 - 1, "heads_q": 2**31 - 2, "seqlen_q": 2**31 - 1},
        {"batch": 2**20, "seqlen_k": 2**31 - 1},
    ],
    ids=str,
)
def test_launch_refuses(host, change):
    assert grid(host, **change) is None
