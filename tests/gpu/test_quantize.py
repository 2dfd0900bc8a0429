"""The quantiser on the GPU writes what the NumPy model says.

`tests/host` runs the same source against the same model without a GPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu import image_model, quantize_data
from gpu.quantize_data import Case

from jax_fa3 import _ffi

pytestmark = pytest.mark.gpu


def quantize(case, q, k, v, factor, v_factor):
    """jax arrays in, _ffi.Images out, through jit."""
    call = jax.jit(
        lambda *operands: _ffi.quantize_operands(
            _ffi.QuantizerInputs(
                *operands, image_dtype=quantize_data.DTYPES[case.image_dtype], **case.flags()
            )
        )
    )
    return call(q, k, v, factor, v_factor)


def as_numpy(images):
    """Results by name, images as uint8 codes."""
    arrays = {name: np.asarray(value) for name, value in images._asdict().items()}
    return {name: x.view(np.uint8) if "image" in name else x for name, x in arrays.items()}


@pytest.mark.parametrize("case", quantize_data.cases(), ids=str)
def test_images_match_the_model(case):
    inputs = quantize_data.make(case)
    results = as_numpy(quantize(case, *map(jnp.asarray, inputs)))
    model = image_model.quantize(
        *inputs, **case.flags(), dtype=quantize_data.DTYPES[case.image_dtype]
    )
    # The last bits of means and of what tensor cores add up may differ, and with them a few codes.
    exact = not (case.hadamard or case.smooth_key or case.center_value)
    quantize_data.check(case, results, model, exact=exact)


def test_one_factor_for_all_heads():
    """Scalars give what arrays of them give."""
    case = Case(seqlen_q=300, seqlen_k=700, v_dtype="e4m3", center_value=False)
    q, k, v, *factors = map(jnp.asarray, quantize_data.make(case))
    one = [x[0, 0] for x in factors]
    filled = as_numpy(quantize(case, q, k, v, *(jnp.full((2, 2), x) for x in one)))
    for name, result in as_numpy(quantize(case, q, k, v, *one)).items():
        np.testing.assert_array_equal(result, filled[name], name)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_two_runs_agree_in_every_bit(head_dim):
    case = Case(seqlen_q=1000, seqlen_k=3001, head_dim=head_dim, data="outliers")
    inputs = [jnp.asarray(x) for x in quantize_data.make(case)]
    first = as_numpy(quantize(case, *inputs))
    for _ in range(20):
        for name, again in as_numpy(quantize(case, *inputs)).items():
            np.testing.assert_array_equal(again, first[name], name)


def test_more_than_65535_batch_heads():
    """The last of 70,000 batches comes out as it does alone."""
    case = Case(seqlen_q=2, seqlen_k=3, head_dim=64, batch=70_000, num_heads_kv=1, group_size=1)
    key = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(key[0], (70_000, 2, 1, 64), jnp.bfloat16)
    k = jax.random.normal(key[1], (70_000, 3, 1, 64), jnp.bfloat16)
    v = jax.random.normal(key[2], (70_000, 3, 1, 64), jnp.bfloat16)
    ones = jnp.ones((70_000, 1), jnp.float32)
    many = quantize(case, q, k, v, ones, ones)
    alone = as_numpy(quantize(case, *(x[-1:] for x in (q, k, v, ones, ones))))
    for name, result in many._asdict().items():
        last = np.asarray(result[-1:])
        np.testing.assert_array_equal(last.view(alone[name].dtype), alone[name], name)


@pytest.mark.parametrize("wants_shift", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_runs_of_query_tiles(head_dim, wants_shift):
    """With so many tiles that a CTA takes several, a batch comes out as it does alone."""
    case = Case(seqlen_q=700, seqlen_k=65, head_dim=head_dim, batch=90, wants_shift=wants_shift)
    inputs = [jnp.asarray(x) for x in quantize_data.make(case)]
    many = as_numpy(quantize(case, *inputs))
    for batch in (0, 41, 89):
        alone = as_numpy(quantize(case, *(x[batch : batch + 1] for x in inputs)))
        for name, result in alone.items():
            np.testing.assert_array_equal(many[name][batch : batch + 1], result, name)


@pytest.mark.slow
def test_tensors_over_2_to_the_31_elements():
    """Rows beyond the 2^31st element of q, k and v come out as in a short call."""
    heads, head_dim = 128, 128
    seqlen = 2**31 // (heads * head_dim) + 256  # a multiple of 128
    case = Case(head_dim=head_dim, smooth_key=False, center_value=False)
    keys = jax.random.split(jax.random.key(1), 3)
    tail_shape = (1, 256, heads, head_dim)
    tails = [jax.random.normal(key, tail_shape, jnp.bfloat16) for key in keys]
    # v's scale spans the sequence. The body does not exceed the tail, and a key that no sample has
    # makes the long call, too, take the magnitudes of all values.
    assert (seqlen - 256) % 64 == 0
    tails[2] = tails[2].at[:, 1].set(1000.0)
    q, k, v = (
        jnp.concatenate([jnp.zeros((1, seqlen - 256, heads, head_dim), x.dtype), x], 1)
        for x in tails
    )
    ones = jnp.ones((1, heads), jnp.float32)
    long = quantize(case, q, k, v, ones, ones)
    del q, k, v
    short = as_numpy(quantize(case, *tails, ones, ones))
    np.testing.assert_array_equal(np.asarray(long.v_descale), short["v_descale"])
    for name, axis_rows in (
        ("q_image", 256),
        ("q_descale", 256),
        ("k_image", 256),
        ("k_descale", 2),
        ("v_image", 2),
    ):
        last = np.asarray(getattr(long, name)[:, :, -axis_rows:])
        np.testing.assert_array_equal(last.view(short[name].dtype), short[name], name)
