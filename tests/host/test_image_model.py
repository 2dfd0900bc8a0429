"""The NumPy model of the images and the plain-JAX model behind implementation="xla" agree.

The kernels are compared with the first, the public function's XLA path uses the second.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu import image_model, quantize_data
from gpu.quantize_data import Case

from jax_fa3 import Quantization, _fp8_model
from jax_fa3._shapes import Config, Operands

CASES = [
    Case(head_dim=64),
    Case(head_dim=256, seqlen_q=130),
    Case(data="biased", seqlen_k=257),
    Case(q_dtype="f16", k_dtype="f16", v_dtype="f16", data="outliers", image_dtype="e5m2"),
    Case(data="bad"),
    Case(data="zeros"),
    Case(data="bad", hadamard=False, smooth_key=False, center_value=False, head_dim=64),
    Case(q_dtype="e4m3", k_dtype="e4m3", v_dtype="e4m3", hadamard=False),
    Case(q_dtype="bf16", k_dtype="e5m2", v_dtype="e5m2", hadamard=False, data="bad"),
    Case(v_dtype="e4m3"),
    # scales made of a sample, and values beyond them
    Case(seqlen_k=1300, data="biased"),
    Case(seqlen_k=1300, data="bad", image_dtype="e5m2"),
    Case(seqlen_k=1300, data="beyond"),
    Case(seqlen_k=1300, data="beyond", center_value=False),
]


def natural_order(host, case, images):
    """q, k [batch, seqlen, heads, head_dim] and v alike, as codes, out of the images."""
    head_dim = case.head_dim
    order = image_model.image_order(head_dim)
    found = []
    for image, seqlen, group in (
        (images["q_image"], case.seqlen_q, 64),
        (images["k_image"], case.seqlen_k, 128),
    ):
        rows, columns = np.meshgrid(np.arange(image.shape[2]), np.arange(head_dim), indexing="ij")
        offsets = host.row_image_offset(head_dim, group, rows, columns)
        stored = image.reshape(*image.shape[:2], -1)[..., offsets]
        codes = np.empty_like(stored)
        codes[..., order] = stored
        found.append(np.swapaxes(codes[:, :, :seqlen], 1, 2))
    image = images["v_image"]
    keys, channels = np.meshgrid(np.arange(128), np.arange(head_dim), indexing="ij")
    granules = image.reshape(*image.shape[:3], -1)[..., host.value_image_offset(channels, keys)]
    codes = granules.reshape(*image.shape[:2], -1, head_dim)
    found.append(np.swapaxes(codes[:, :, : case.seqlen_k], 1, 2))
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_models_agree(host, case):
    q, k, v, _, v_factor = quantize_data.make(case)
    lead = (case.batch, case.num_heads_kv)
    descale = np.random.default_rng(5).uniform(0.5, 2, (2, *lead)).astype(np.float32)
    operands = Operands(
        *(jnp.asarray(x) for x in (q, k, v)),
        jnp.float32(case.head_dim**-0.5),
        jnp.asarray(descale[0]) if case.q_dtype.startswith("e") else None,
        jnp.asarray(descale[1]) if case.k_dtype.startswith("e") else None,
        jnp.asarray(v_factor) if case.v_dtype.startswith("e") else None,
    )
    quantization = Quantization(
        dtype=case.image_dtype,
        smooth_key=case.smooth_key,
        center_value=case.center_value,
        hadamard=case.hadamard,
    )
    config = Config(
        False, "bottom_right", None, None, "fp8", quantization, False, np.dtype(jnp.bfloat16)
    )
    dtype = quantize_data.DTYPES[case.image_dtype]
    factor = np.broadcast_to(_fp8_model.logits_factor(operands), v_factor.shape)
    with jax.default_matmul_precision("highest"):
        plain = _fp8_model.quantize_operands(operands, config)
    images = image_model.quantize(q, k, v, factor, v_factor, dtype=dtype, **case.flags())

    for name, codes in zip(
        ("query", "key", "value"), natural_order(host, case, images), strict=True
    ):
        wanted = image_model.cast(np.asarray(getattr(plain, name)), dtype)
        distance = image_model.code_distance(codes, wanted)
        # The means' last bits depend on the order of summation; query has none of them.
        assert distance.max() <= (name != "query"), name
        assert (distance > 0).mean() < 1e-3, name
    rows = slice(0, case.seqlen_q)
    np.testing.assert_array_equal(images["q_descale"][..., rows], plain.query_descale)
    by_key = np.repeat(images["k_descale"], 128, axis=-1)[..., : case.seqlen_k]
    np.testing.assert_array_equal(by_key, plain.key_descale)
    np.testing.assert_allclose(images["v_descale"], plain.value_descale, rtol=1e-5)
    np.testing.assert_allclose(images["v_mean"], plain.value_mean, rtol=1e-5, atol=1e-5)
    shift, wanted = images["q_shift"][..., rows], np.asarray(plain.query_shift)
    good = np.isfinite(shift)
    scale = np.abs(wanted[good]).max(initial=1e-30)
    np.testing.assert_allclose(shift[good], wanted[good], rtol=0, atol=1e-5 * scale)
