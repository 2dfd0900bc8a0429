"""The backward kernels against float64, over shapes, dtypes and transformations."""

from __future__ import annotations

from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from gpu import reference, reference_gradients

import jax_fa3
from jax_fa3 import _ffi

pytestmark = pytest.mark.gpu

# Odd lengths, tiles that end on their edge, one row, one key, more rows than keys, GQA 1, 3 and 8.
SHAPES = (
    (1, 1, 1, 2, 2),
    (2, 128, 128, 3, 1),
    (1, 64, 300, 8, 1),
    (1, 300, 64, 4, 4),
    (1, 129, 127, 2, 2),
    (2, 257, 640, 6, 2),
    (1, 1000, 1024, 2, 1),
    (3, 5, 700, 2, 2),
    (2, 300, 450, 4, 2),  # an even number of key blocks, whose CTAs share copies at head_dim 128
)

# (head_dim, deterministic): at head_dim 256 the order of additions is fixed either way.
WAYS = [(64, False), (64, True), (128, False), (128, True), (256, False)]


def draw(shape: tuple[int, ...], head_dim: int, dtype: Any) -> tuple[dict[str, Any], Any, Any]:
    """Inputs, dout and dlogsumexp."""
    batch, rows, keys, heads, heads_kv = shape
    case = cases.Case("bwd", batch=batch, seqlen_q=rows, seqlen_k=keys, num_heads_q=heads,
                      num_heads_kv=heads_kv, head_dim=head_dim)  # fmt: skip
    rng = np.random.default_rng(5)
    inputs = cases.make_inputs(case, dtype)
    dout = rng.normal(size=inputs["query"].shape).astype(np.float32)
    return inputs, dout, rng.normal(size=(batch, heads, rows)).astype(np.float32)


@pytest.mark.parametrize("dtype", [cases.BFLOAT16, cases.FLOAT16], ids=str)
@pytest.mark.parametrize(("head_dim", "deterministic"), WAYS)
@pytest.mark.parametrize("causal", [None, "bottom_right", "top_left"])
def test_native_shapes(causal: str | None, head_dim: int, deterministic: bool, dtype: Any) -> None:
    """Every shape against float64; what the kernel leaves unwritten is poison."""
    masks = {} if causal is None else {"is_causal": True, "causal_alignment": causal}
    limit = tolerances.BACKWARD_BF16 if dtype == cases.BFLOAT16 else tolerances.BACKWARD_F16
    for shape in SHAPES:
        inputs, dout, dlogsumexp = draw(shape, head_dim, dtype)

        def kernel(x: Any, dout: Any, dlogsumexp: Any) -> Any:
            options = {"precision": "native", "implementation": "cuda", **masks}
            return reference_gradients.of_call(
                x, dout, dlogsumexp, deterministic=deterministic, **options
            )

        actual = reference.run(kernel, inputs, dout, dlogsumexp)
        scale = head_dim**-0.5
        expected = reference_gradients.exact(inputs, dout, dlogsumexp, causal=causal, scale=scale)
        for name in reference.MAIN:
            tolerances.check_close(actual[name], expected[name], limit)


@pytest.mark.parametrize(("head_dim", "deterministic"), WAYS)
@pytest.mark.parametrize("causal", [None, "bottom_right"])
@pytest.mark.parametrize("bare", [False, True])
def test_fp8_against_its_model(
    bare: bool, causal: str | None, head_dim: int, deterministic: bool
) -> None:
    """Gradients of attention over the quantised operands, straight through every rounding."""
    fields = {"hadamard": False, "smooth_key": False, "center_value": False} if bare else {}
    options: dict[str, Any] = {
        "precision": "fp8",
        "quantization": jax_fa3.Quantization(**fields),
        "is_causal": causal is not None,
        "deterministic": deterministic,
    }
    shapes = [(2, 257, 640, 6, 2), (1, 129, 127, 2, 2)]
    if (head_dim, deterministic) == (128, False):
        shapes.append((1, 4100, 4200, 1, 1))  # long enough for float8 scores
    for shape in shapes:
        inputs, dout, dlogsumexp = draw(shape, head_dim, cases.BFLOAT16)

        def kernel(x: Any, dout: Any, dlogsumexp: Any, options: Any = options) -> Any:
            return reference_gradients.of_call(
                x, dout, dlogsumexp, implementation="cuda", **options
            )

        actual = reference.run(kernel, inputs, dout, dlogsumexp)
        with jax.default_device(jax.devices("cpu")[0]):
            expected, _ = reference_gradients.model(inputs, dout, dlogsumexp, causal, options)
        for name in reference.MAIN:
            tolerances.check_close(actual[name], expected[name], tolerances.BACKWARD_FP8)


@pytest.mark.parametrize(("head_dim", "deterministic"), WAYS)
@pytest.mark.parametrize("precision", ["native", "fp8"])
def test_without_a_logsumexp_its_gradient_counts_as_zeros(
    precision: str, head_dim: int, deterministic: bool
) -> None:
    inputs, dout, dlogsumexp = draw((2, 257, 640, 6, 2), head_dim, cases.BFLOAT16)
    options = {"precision": precision, "deterministic": deterministic, "is_causal": True}

    def kernel(x: Any, dout: Any, zeros: Any) -> Any:
        def unseen(*args: Any) -> Any:
            return jax_fa3.attention(*args, implementation="cuda", **options)

        args = [x[name] for name in reference.MAIN]
        out, pull = jax.vjp(unseen, *args)
        seen = reference_gradients.of_call(x, dout, zeros, implementation="cuda", **options)
        return dict(zip(reference.MAIN, pull(dout.astype(out.dtype)), strict=True)), seen

    actual, expected = reference.run(kernel, inputs, dout, 0 * dlogsumexp)
    limit = tolerances.BACKWARD_BF16 if precision == "native" else tolerances.BACKWARD_FP8
    for name in reference.MAIN:
        tolerances.check_close(actual[name], expected[name], limit)


def images_of(x: Any, image_dtype: Any) -> _ffi.Images:
    """Quantised operands of every exact-softmax step, with query in units of its own."""
    return _ffi.quantize_operands(
        _ffi.QuantizerInputs(
            *(x[name] for name in reference.MAIN),
            *(jnp.float32(0.1), jnp.float32(1)),
            image_dtype=image_dtype,
            hadamard=True,
            smooth_key=True,
            center_value=True,
            wants_shift=True,
        )
    )


@pytest.mark.parametrize("image_dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("causal", [None, "bottom_right", "top_left"])
def test_keys_from_images_are_those_from_arrays(causal: str | None, image_dtype: Any) -> None:
    """dkey and dvalue agree bit by bit, also where a granule or a channel is not finite."""
    for index, shape in enumerate(SHAPES):
        inputs, dout, dlogsumexp = draw(shape, 128, cases.BFLOAT16)
        if index % 3 == 2:
            inputs["key"][0, -1, 0, 3] = np.nan
            inputs["value"][-1, 0, -1, 5] = np.inf
        sizes = {"seqlen_q": shape[1], "seqlen_k": shape[2]}
        masks = {"is_causal": causal is not None, "bottom_right": causal == "bottom_right"}
        mean = np.ones((shape[0], shape[4], 128), np.float32) if index % 2 else None

        def both(
            x: Any, *results: Any, sizes: Any = sizes, masks: Any = masks, mean: Any = mean
        ) -> Any:
            dout, dlogsumexp = results
            scale = jnp.float32(np.log(2))
            images = images_of(x, image_dtype)
            query, key, value = _ffi.dequantize_operands(images, **sizes)
            out, logsumexp = _ffi.fwd_native(query, key, value, scale, **masks)
            rotation = None if mean is None else _ffi.Rotation(scale, jnp.asarray(mean))

            def grads(query: Any, keys: Any) -> Any:
                return query, *_ffi.bwd(
                    *(query, keys, out, logsumexp, dout.astype(out.dtype), dlogsumexp, scale),
                    **masks,
                    wants_scale=False,
                    deterministic=False,
                    rotation=rotation,
                )[:3]

            own, keys = _ffi.bwd_operands(
                images, **sizes, is_causal=causal is not None, deterministic=False
            )
            assert isinstance(keys, _ffi.BwdImages)
            return grads(query, (key, value)), grads(own, keys)

        of_arrays, of_images = reference.run(both, inputs, dout, dlogsumexp)
        for i in (0, 2, 3):  # query, dkey, dvalue
            reference.assert_same_bits(of_images[i], of_arrays[i])
        old, new = (x[1].astype(np.float32) for x in (of_arrays, of_images))
        size = np.abs(old[np.isfinite(old)]).max(initial=0)
        np.testing.assert_allclose(new, old, rtol=0, atol=2**-8 * size)


@pytest.mark.parametrize("causal", [None, "bottom_right", "top_left"])
def test_float8_scores_of_long_queries(causal: str | None) -> None:
    """Gradients are those from arrays up to the rounding of scores, and repeat; also with rows of
    zeros, of other sizes, and rows, keys and channels that are not finite."""
    for index, shape in enumerate(
        [(1, 4096, 256, 2, 1), (2, 4133, 200, 3, 3), (1, 4161, 128, 2, 2)]
    ):
        inputs, dout, dlogsumexp = draw(shape, 128, cases.BFLOAT16)
        rows = np.exp2(-(np.arange(shape[1]) % 24) / 2).astype(np.float32)[None, :, None, None]
        inputs["query"] = (inputs["query"].astype(np.float32) * rows).astype(cases.BFLOAT16)
        inputs["query"][:, 5::13] = 0
        if index == 1:
            inputs["query"][-1, 70, -1, 7] = np.inf
            inputs["key"][0, -1, 0, 3] = np.nan
            inputs["value"][-1, 0, -1, 5] = np.inf
        sizes = {"seqlen_q": shape[1], "seqlen_k": shape[2]}
        masks = {"is_causal": causal is not None, "bottom_right": causal == "bottom_right"}

        def three(
            x: Any, *results: Any, sizes: Any = sizes, masks: Any = masks
        ) -> tuple[Any, Any, Any]:
            dout, dlogsumexp = results
            scale = jnp.float32(np.log(2))
            images = images_of(x, jnp.float8_e4m3fn)
            query, key, value = _ffi.dequantize_operands(images, **sizes)
            out, logsumexp = _ffi.fwd_native(query, key, value, scale, **masks)

            def grads(query: Any, keys: Any) -> Any:
                return query, *_ffi.bwd(
                    *(query, keys, out, logsumexp, dout.astype(out.dtype), dlogsumexp, scale),
                    **masks,
                    wants_scale=False,
                    deterministic=False,
                )[:3]

            own, keys = _ffi.bwd_operands(
                images, **sizes, is_causal=causal is not None, deterministic=False
            )
            assert isinstance(keys, _ffi.BwdImages)
            assert keys.q_codes.shape[2] > 0
            return grads(query, (key, value)), grads(own, keys), grads(own, keys)

        of_arrays, of_images, again = reference.run(three, inputs, dout, dlogsumexp)
        reference.assert_same_bits(of_images[0], of_arrays[0])  # query
        for i in (1, 2, 3):
            old, new = (x[i].astype(np.float32) for x in (of_arrays, of_images))
            np.testing.assert_array_equal(np.isfinite(new), np.isfinite(old))
            old, new = (np.nan_to_num(x, posinf=0, neginf=0) for x in (old, new))
            assert np.linalg.norm(new - old) <= 2**-6 * np.linalg.norm(old)
        for i in (2, 3):  # dkey, dvalue
            reference.assert_same_bits(again[i], of_images[i])


@pytest.mark.parametrize(("head_dim", "deterministic"), WAYS)
@pytest.mark.parametrize("causal", [None, "bottom_right"])
def test_error_next_to_cudnn(causal: str | None, head_dim: int, deterministic: bool) -> None:
    """On normal data no head is more than 1.2 times as far from float64 as cuDNN's."""
    shape, limit = (2, 512, 512, 4, 4), 1.2
    rng = np.random.default_rng(8)
    size = (shape[0], shape[1], shape[3], head_dim)
    inputs = {name: rng.normal(size=size).astype(cases.BFLOAT16) for name in reference.MAIN}
    dout = rng.normal(size=size).astype(cases.BFLOAT16)
    zero = np.zeros((shape[0], shape[3], shape[1]), np.float32)

    def both(x: Any, dout: Any) -> Any:
        def grads(attend: Any) -> Any:
            _, pull = jax.vjp(lambda x: attend(*(x[name] for name in reference.MAIN)), x)
            return pull(dout)[0]

        def cudnn(q: Any, k: Any, v: Any) -> Any:
            return jax.nn.dot_product_attention(
                q, k, v, is_causal=causal is not None, implementation="cudnn"
            )

        def ours(q: Any, k: Any, v: Any) -> Any:
            return jax_fa3.attention(
                *(q, k, v),
                is_causal=causal is not None,
                precision="native",
                deterministic=deterministic,
                implementation="cuda",
            )

        return grads(ours), grads(cudnn)

    ours, theirs = reference.run(both, inputs, dout)
    exact = reference_gradients.exact(
        inputs, dout.astype(np.float32), zero, causal=causal, scale=head_dim**-0.5
    )
    for name in reference.MAIN:
        error = tolerances.rel_l2(ours[name], exact[name])
        rival = tolerances.rel_l2(theirs[name], exact[name])
        assert (error <= limit * rival).all(), (name, error, rival)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("precision", "head_dim"), [("native", 64), ("fp8", 64), ("fp8", 128)])
def test_vmap_of_grad_is_the_loop(precision: str, head_dim: int, deterministic: bool) -> None:
    """Shared keys get one gradient per example; a mapped softmax_scale is a launch for each."""
    inputs, dout, _ = draw((3, 200, 333, 4, 2), head_dim, cases.BFLOAT16)
    scales = np.array([0.05, 0.125, 0.3], np.float32)
    query, key, value = (jnp.asarray(inputs[name])[:, None] for name in reference.MAIN)

    def loss(q: Any, k: Any, v: Any, scale: Any, dout: Any) -> Any:
        out = jax_fa3.attention(
            *(q, k, v),
            softmax_scale=scale,
            precision=precision,
            is_causal=True,
            deterministic=deterministic,
            implementation="cuda",
        )
        return jnp.sum(out.astype(jnp.float32) * dout)

    grad = jax.grad(loss, argnums=(0, 1, 2, 3))
    axes = (0, None, 0, 0, 0)
    arrays = (query, key[0], value, scales, jnp.asarray(dout)[:, None])
    mapped = jax.jit(jax.vmap(grad, in_axes=axes))(*arrays)
    single = jax.jit(grad)
    for i in range(3):
        one = single(*(x if axis is None else x[i] for x, axis in zip(arrays, axes, strict=True)))
        for whole, part in zip(mapped, one, strict=True):
            np.testing.assert_allclose(
                np.asarray(whole[i], np.float32), np.asarray(part, np.float32), rtol=0.02, atol=1e-3
            )


@pytest.mark.parametrize(
    ("causal", "sizes"),
    [
        (None, (700, 1200)),
        ("bottom_right", (700, 1200)),
        ("top_left", (700, 1200)),  # CTAs whose keys nobody sees have their shares too
        ("bottom_right", (1200, 700)),  # rows without keys
    ],
)
def test_many_heads(causal: str | None, sizes: tuple[int, int]) -> None:
    """So many that CTAs prepare later ones: as in a fixed order, where none does."""
    inputs, dout, dlogsumexp = draw((2, *sizes, 80, 40), 128, cases.BFLOAT16)
    masks = {} if causal is None else {"is_causal": True, "causal_alignment": causal}

    def gradients(deterministic: bool) -> Any:
        def kernel(x: Any, dout: Any, dlogsumexp: Any) -> Any:
            options = {"precision": "native", "implementation": "cuda", **masks}
            return reference_gradients.of_call(
                x, dout, dlogsumexp, deterministic=deterministic, **options
            )

        return reference.run(kernel, inputs, dout, dlogsumexp)

    actual, expected = gradients(False), gradients(True)
    for name in reference.MAIN:
        tolerances.check_close(actual[name], expected[name], tolerances.BACKWARD_BF16)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_repeats_within_the_order_of_additions(head_dim: int) -> None:
    """dk and dv repeat bit by bit; dq is added up in any order, so only its last bits move.

    At head_dim 256 the order is fixed without deterministic=True.
    """
    inputs, dout, dlogsumexp = draw((2, 700, 1500, 4, 2), head_dim, cases.BFLOAT16)
    fixed = head_dim == 256
    options = {"precision": "native", "is_causal": True}
    run = jax.jit(lambda x: reference_gradients.of_call(x, dout, dlogsumexp, **options))
    assert "jax_fa3_bwd" in run.lower(inputs).as_text()
    first = jax.tree.map(np.asarray, run(inputs))
    size = np.abs(first["query"].astype(np.float32)).max()
    for _ in range(50):
        again = jax.tree.map(np.asarray, run(inputs))
        np.testing.assert_array_equal(again["key"], first["key"])
        np.testing.assert_array_equal(again["value"], first["value"])
        moved = again["query"].astype(np.float32) - first["query"].astype(np.float32)
        assert np.abs(moved).max() <= (0.0 if fixed else 2**-8 * size)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_memory_grows_with_seqlen(head_dim: int) -> None:
    """Temporary memory of forward and backward is linear in seqlen."""

    def bytes_at(seqlen: int) -> int:
        x = jax.ShapeDtypeStruct((1, seqlen, 2, head_dim), jnp.bfloat16)

        def loss(q: Any, k: Any, v: Any) -> Any:
            return jnp.sum(jax_fa3.attention(q, k, v, is_causal=True).astype(jnp.float32))

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert bytes_at(16_384) <= 4.2 * bytes_at(4_096)
