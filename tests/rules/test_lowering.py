"""What a program lowered for CUDA holds: custom calls, operands and attributes. Needs no GPU."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rules.support import attend, calls, cuda_text, executions, inputs, loss_of

import jax_fa3
from jax_fa3 import Quantization, _extension

pytestmark = pytest.mark.usefixtures("extension")

FP8_CALL = "jax_fa3_quantize_fwd_fp8"  # as one, so that a short one is one launch for the host
FP8_PARTS = ["jax_fa3_quantize", "jax_fa3_fwd_fp8"]  # before a backward pass that quantises too


def line_of(text: str, target: str) -> str:
    (line,) = (x for x in text.splitlines() if f"custom_call @{target}(" in x)
    return line


def attributes(text: str, target: str) -> dict[str, str]:
    (body,) = re.findall(r"mhlo\.backend_config = \{([^}]*)\}", line_of(text, target))
    return dict(entry.strip().split(" = ", 1) for entry in body.split(", "))


def types(text: str, target: str) -> tuple[list[str], list[str]]:
    signature = line_of(text, target).rsplit(" : (", 1)[1]
    operands, results = signature.split(") -> ")
    return re.findall(r"tensor<([^>]*)>", operands), re.findall(r"tensor<([^>]*)>", results)


def test_fp8_call_operands_and_attributes() -> None:
    args = inputs(seqlen_q=70, seqlen_k=700)
    text = cuda_text(attend(is_causal=True), *args)
    assert calls(text) == [FP8_CALL]
    operands, results = types(text, FP8_CALL)
    assert operands == [
        "2x70x6x64xbf16",
        "2x700x3x64xbf16",
        "2x700x3x64xbf16",
        "f32",  # one factor for all heads: no kernel fills an array with it
        "f32",
    ]
    assert results == [
        "2x70x6x64xbf16",
        "2x6x70xf32",
        "1xi32",
        "2x6x128x64xf8E4M3FN",
        "2x6x128xf32",
        "2x6x128xf32",
        "2x3x768x64xf8E4M3FN",
        "2x3x6xf32",
        "2x3x6x64x128xf8E4M3FN",
        "2x3x64xf32",
        "2x3x64xf32",
        "2x3x3x4x64xf32",  # two chunks of keys, and one slot more
    ]
    assert attributes(text, FP8_CALL) == {
        "hadamard": "true",
        "smooth_key": "true",
        "center_value": "true",
        "wants_shift": "true",
        "is_causal": "true",
        "bottom_right": "true",
        "linear_exp": "false",
    }


def test_the_parts_of_the_fp8_call() -> None:
    args = inputs(seqlen_q=70, seqlen_k=700)
    text = cuda_text(attend(is_causal=True), *args)
    graded = cuda_text(lambda *args: jax.vjp(attend(is_causal=True), *args)[0], *args)
    assert calls(graded) == FP8_PARTS
    of_parts = [types(graded, part) for part in FP8_PARTS]
    operands, results = types(text, FP8_CALL)
    assert operands == of_parts[0][0]
    assert results == of_parts[1][1] + of_parts[0][1]
    assert of_parts[1][0] == of_parts[0][1][:8]
    both = attributes(graded, FP8_PARTS[0]) | attributes(graded, FP8_PARTS[1])
    assert both == attributes(text, FP8_CALL) | {"seqlen_k": "700 : i64"}


@pytest.mark.parametrize(
    ("quantization", "name", "value"),
    [
        (Quantization.fast(), "linear_exp", "true"),
        (Quantization(hadamard=False), "hadamard", "false"),
        (Quantization(smooth_key=False), "smooth_key", "false"),
        (Quantization(center_value=False), "center_value", "false"),
    ],
)
def test_quantization_reaches_the_attributes(
    quantization: Quantization, name: str, value: str
) -> None:
    text = cuda_text(attend(quantization=quantization), *inputs())
    assert attributes(text, FP8_CALL)[name] == value


def test_e5m2_images() -> None:
    text = cuda_text(attend(quantization=Quantization(dtype="e5m2")), *inputs())
    images = [t for t in types(text, FP8_CALL)[1] if "f8" in t]
    assert len(images) == 3
    assert all(t.endswith("f8E5M2") for t in images)


def test_float8_inputs_skip_what_needs_wide_inputs() -> None:
    query, key, value = inputs()
    cache = key.astype(jnp.float8_e4m3fn), value.astype(jnp.float8_e5m2)
    fn = attend(key_descale=2.0, value_descale=3.0)
    text = cuda_text(fn, query, *cache)
    assert types(text, FP8_CALL)[0][:3] == [
        "2x5x6x64xbf16",
        "2x7x3x64xf8E4M3FN",
        "2x7x3x64xf8E5M2",
    ]
    steps = ("hadamard", "smooth_key", "center_value")
    assert {attributes(text, FP8_CALL)[name] for name in steps} == {"false"}
    out, _ = jax.eval_shape(
        attend(query_descale=1.0, key_descale=2.0, value_descale=3.0),
        query.astype(jnp.float8_e4m3fn),
        *cache,
    )
    assert out.dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_native_call(dtype: Any) -> None:
    short = {jnp.bfloat16: "bf16", jnp.float16: "f16"}[dtype]
    fn = attend(precision="native", is_causal=True, causal_alignment="top_left", softmax_scale=0.1)
    text = cuda_text(fn, *inputs(dtype=dtype))
    assert calls(text) == ["jax_fa3_fwd"]
    operands, results = types(text, "jax_fa3_fwd")
    assert operands == [f"2x5x6x64x{short}", *[f"2x7x3x64x{short}"] * 2, "f32"]
    assert results == [f"2x5x6x64x{short}", "2x6x5xf32", "1xi32"]  # the tile counter
    assert attributes(text, "jax_fa3_fwd") == {"is_causal": "true", "bottom_right": "false"}


def test_x64_mode_does_not_widen_operands() -> None:
    args = inputs()
    with jax.enable_x64(True):
        text = cuda_text(attend(softmax_scale=0.25), *args)
    assert "f64" not in line_of(text, FP8_CALL)


def test_cuda_only_holds_the_calls_of_the_default() -> None:
    args = inputs()
    assert calls(cuda_text(attend("cuda"), *args)) == calls(cuda_text(attend(), *args)) != []


@pytest.mark.parametrize("precision", ["fp8", "native"])
def test_cuda_only_is_refused_where_it_is_lowered_for_another_platform(precision: str) -> None:
    args = inputs()
    message = r'^attention: implementation="cuda" must be lowered for platform cuda; got cpu\. Pass'
    fn = attend("cuda", precision=precision)
    with pytest.raises(RuntimeError, match=message):
        jax.jit(fn)(*args)
    with pytest.raises(RuntimeError, match=message):
        jax.jit(jax.vmap(jax.grad(loss_of(fn))))(*(x[None] for x in args))
    with pytest.raises(RuntimeError, match=r"got cpu, cuda\."):
        jax.export.export(jax.jit(fn), platforms=("cpu", "cuda"))(*args)


def test_implementation_xla_holds_no_call() -> None:
    assert calls(cuda_text(attend("xla"), *inputs())) == []


@pytest.mark.parametrize("options", [{"window_size": (3, 0)}, {"logits_soft_cap": 5.0}])
def test_unserved_requests_take_the_xla_path(options: dict[str, Any]) -> None:
    assert calls(cuda_text(attend(**options), *inputs())) == []


@pytest.mark.parametrize("size", [{"lead": (0,)}, {"seqlen_q": 0}, {"seqlen_k": 0}])
def test_empty_sizes_reach_no_target(size: dict[str, Any]) -> None:
    for implementation in (None, "cuda"):
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(**size)]
        assert calls(cuda_text(attend(implementation), *structs)) == []


def test_vmap_of_query_alone_does_not_repeat_key_and_value() -> None:
    query = inputs(lead=(5, 2))[0]
    _, key, value = inputs()
    fn = jax.vmap(attend(precision="native"), (0, None, None))
    text = cuda_text(fn, query, key, value)
    operands, _ = types(text, "jax_fa3_fwd")
    assert operands[:3] == ["2x5x30x64xbf16", "2x7x3x64xbf16", "2x7x3x64xbf16"]


def test_vmap_folds_into_one_call() -> None:
    args = inputs(lead=(5, 2))
    text = cuda_text(jax.vmap(attend(precision="native")), *args)
    assert types(text, "jax_fa3_fwd")[0][:2] == ["10x5x6x64xbf16", "10x7x3x64xbf16"]


class TestRematPolicies:
    """How often the forward kernel runs in a training step."""

    def count(self, wrap: Any) -> int:
        query, key, value = inputs(seqlen_q=7)

        def layer(x: Any, weight: Any) -> Any:
            out, _ = attend(precision="native")(x, key, value)
            return out * weight  # its gradient needs out

        def loss(x: Any, weight: Any) -> Any:
            return jnp.sum(wrap(layer)(x, weight).astype(jnp.float32))

        weight = jnp.ones((), jnp.bfloat16)
        return executions(cuda_text(jax.value_and_grad(loss, (0, 1)), query, weight), "jax_fa3_fwd")

    def test_without_remat_once(self) -> None:
        assert self.count(lambda layer: layer) == 1

    def test_plain_remat_twice(self) -> None:
        assert self.count(jax.checkpoint) == 2

    def test_named_policy_once(self) -> None:
        policy = jax_fa3.checkpoint_policy()
        assert self.count(lambda layer: jax.checkpoint(layer, policy=policy)) == 1
        names = jax.checkpoint_policies.save_only_these_names("jax_fa3_out", "jax_fa3_logsumexp")
        assert self.count(lambda layer: jax.checkpoint(layer, policy=names)) == 1


class TestExport:
    def exported(self, fn: Any, *structs: Any) -> Any:
        return jax.export.export(
            jax.jit(fn),
            platforms=("cuda",),
            disabled_checks=jax_fa3.export_disabled_checks(),
        )(*structs)

    def test_export_for_cuda_and_serialise(self) -> None:
        pytest.importorskip("flatbuffers", reason="needs flatbuffers to serialise an export")
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs()]
        exported = self.exported(attend(precision="native"), *structs)
        again = jax.export.deserialize(exported.serialize(vjp_order=1))
        assert again.platforms == ("cuda",)
        assert calls(again.mlir_module()) == ["jax_fa3_fwd"]
        assert "jax_fa3_bwd" in calls(again.vjp().mlir_module())

    def test_the_names_are_documented(self) -> None:
        named = re.findall(r'"(jax_fa3_\w+)"', str(jax_fa3.export_disabled_checks.__doc__))
        assert tuple(named) == _extension.TARGETS

    def test_symbolic_batch(self) -> None:
        (batch,) = jax.export.symbolic_shape("batch")
        structs = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in inputs()]
        assert calls(self.exported(attend(), *structs).mlir_module()) == [FP8_CALL]

    @pytest.mark.skipif(len(jax.devices("cpu")) < 2, reason="needs two CPU devices")
    def test_a_program_of_several_devices(self) -> None:
        """docs/sharding.md says which."""

        def on_mesh(kind: AxisType) -> tuple[Any, list[Any]]:
            mesh = jax.make_mesh((2,), ("dp",), (kind,), devices=jax.devices("cpu")[:2])
            own = NamedSharding(mesh, P("dp"))
            structs = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own) for x in inputs()]
            specs = {"in_specs": (P("dp"),) * 3, "out_specs": (P("dp"), P("dp"))}
            return jax.shard_map(attend(), mesh=mesh, **specs), structs

        (manual, automatic), (_, explicit) = map(on_mesh, (AxisType.Auto, AxisType.Explicit))
        for fn, structs in ((manual, automatic), (attend(), explicit)):
            exported = self.exported(fn, *structs)
            assert exported.nr_devices == 2
            assert calls(exported.mlir_module()) == [FP8_CALL]
        with pytest.raises(NotImplementedError, match="serialization"):
            self.exported(attend(), *automatic)

    def test_without_the_list_jax_refuses(self) -> None:
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs()]
        with pytest.raises(ValueError, match=FP8_CALL):
            jax.export.export(jax.jit(attend()), platforms=("cuda",))(*structs)


def test_gradient_holds_the_forward_kernel_once_and_saves_by_name() -> None:
    args = inputs()
    text = cuda_text(jax.value_and_grad(loss_of(attend()), (0, 1, 2)), *args)
    backward = ["jax_fa3_quantize", "jax_fa3_dequantize", "jax_fa3_bwd"]
    assert calls(text) == [*FP8_PARTS, *backward]
    jaxpr = str(jax.make_jaxpr(jax.grad(loss_of(attend())))(*args))
    assert "name=jax_fa3_out" in jaxpr
    assert "name=jax_fa3_logsumexp" in jaxpr


@pytest.mark.parametrize("precision", ["native", "fp8"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_where_the_gradient_runs_and_what_explain_says(
    head_dim: int, deterministic: bool, precision: str
) -> None:
    """On kernels either way; those that add up in a fixed order need no sum in memory."""
    options = {"precision": precision, "deterministic": deterministic}
    args = [jax.ShapeDtypeStruct((2, n, 3, head_dim), jnp.bfloat16) for n in (70, 90, 90)]
    text = cuda_text(jax.grad(loss_of(attend(**options)), (0, 1, 2)), *args)
    explained = str(jax_fa3.explain(*args, **options))
    reads_images = precision == "fp8" and head_dim == 128 and not deterministic
    target = "jax_fa3_bwd_fp8" if reads_images else "jax_fa3_bwd"
    assert f"the backward pass runs CUDA ({target})" in explained
    assert ("jax_fa3_dequantize" in calls(text)) == (precision == "fp8" and not reads_images)
    assert ("jax_fa3_dequantize_query" in calls(text)) == reads_images
    assert ("% longer" in explained) == (deterministic and head_dim != 256)
    assert attributes(text, target)["deterministic"] == str(deterministic).lower()
    _, results = types(text, target)
    in_order = deterministic or head_dim == 256
    sum_rows = 0 if in_order else 128
    assert results[-1] == f"2x3x{sum_rows}x{head_dim}xf32"
    # Where no launch follows the sum in memory, the rotation is taken back by a call of its own.
    is_rotated = precision == "fp8"
    assert attributes(text, target)["rotated"] == str(is_rotated and not in_order).lower()
    assert ("jax_fa3_unrotate" in calls(text)) == (is_rotated and in_order)


@pytest.mark.parametrize(
    ("image", "causal", "seqlen", "is_long"),
    [
        *(("e4m3", False, 2048, True), ("e4m3", False, 2047, False)),
        *(("e4m3", True, 4096, True), ("e4m3", True, 4095, False), ("e5m2", True, 4096, False)),
    ],
)
def test_long_queries_of_the_backward_pass_come_as_codes_too(
    image: str, causal: bool, seqlen: int, is_long: bool
) -> None:
    args = [jax.ShapeDtypeStruct((1, n, 2, 128), jnp.bfloat16) for n in (seqlen, 128, 128)]
    attention = attend(is_causal=causal, quantization=Quantization(dtype=image))
    text = cuda_text(jax.grad(loss_of(attention), (0, 1, 2)), *args)
    rows = seqlen if is_long else 0
    float8 = {"e4m3": "f8E4M3FN", "e5m2": "f8E5M2"}[image]
    codes = [f"1x2x{rows}x128x{float8}", f"1x2x{rows // 64}xf32"]
    assert types(text, "jax_fa3_dequantize_query")[1] == [f"1x{seqlen}x2x128xbf16", *codes]
    assert types(text, "jax_fa3_bwd_fp8")[0][1:3] == codes


@pytest.mark.parametrize("image", ["e4m3", "e5m2"])
def test_the_backward_pass_that_reads_images(image: str) -> None:
    """Of key and value it takes what the quantiser wrote, and of query the array."""
    args = [jax.ShapeDtypeStruct((2, *n, 128), jnp.bfloat16) for n in ((70, 6), (130, 3), (130, 3))]
    attention = attend(is_causal=True, quantization=Quantization(dtype=image))
    text = cuda_text(jax.grad(loss_of(attention), (0, 1, 2)), *args)
    float8 = {"e4m3": "f8E4M3FN", "e5m2": "f8E5M2"}[image]
    query = "2x70x6x128xbf16"
    no_codes = [f"2x6x0x128x{float8}", "2x6x0xf32"]
    images = [f"2x3x256x128x{float8}", "2x3x2xf32", f"2x3x2x128x128x{float8}"]
    assert types(text, "jax_fa3_dequantize_query") == (
        [f"2x6x128x128x{float8}", "2x6x128xf32"],
        [query, *no_codes],
    )
    operands, results = types(text, "jax_fa3_bwd_fp8")
    rows = ["2x6x70xf32", query, "2x6x70xf32"]
    assert operands == [
        *(query, *no_codes, *images, "2x3x128xf32", "2x3x128xf32"),
        *(query, *rows, "f32", "f32", "2x3x128xf32"),
    ]
    assert results == [
        *(query, "2x130x3x128xbf16", "2x130x3x128xbf16"),
        *("2x6x2xf32", "2x6x128x4xf32", "2x6x128x4xf32", "2x6x128x128xf32"),
    ]
    assert attributes(text, "jax_fa3_bwd_fp8") == {
        "is_causal": "true",
        "bottom_right": "true",
        "wants_scale_grads": "false",
        "deterministic": "false",
        "rotated": "true",
    }


@pytest.mark.parametrize("returns", [False, True])
def test_the_mean_of_the_keys_is_computed_where_the_logsumexp_has_a_gradient(returns: bool) -> None:
    args = [jax.ShapeDtypeStruct((2, n, 3, 128), jnp.bfloat16) for n in (70, 90, 90)]

    def gradients(query: Any, key: Any, value: Any) -> Any:
        def attention(*args: Any) -> Any:
            return jax_fa3.attention(*args, return_logsumexp=returns)

        results, pull = jax.vjp(attention, query, key, value)
        return pull(results)

    text = cuda_text(gradients, *args)
    _, _, on_cuda = text.partition("@jax_fa3_quantize")
    assert ("stablehlo.reduce(" in on_cuda.partition("@jax_fa3_bwd_fp8")[0]) == returns


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "options", "target"),
    [
        (64, {"precision": "native"}, "jax_fa3_bwd"),
        (256, {"precision": "native"}, "jax_fa3_bwd"),
        (128, {}, "jax_fa3_bwd_fp8"),
        (128, {"deterministic": True}, "jax_fa3_bwd"),
    ],
)
def test_the_gradient_of_a_logsumexp_that_nobody_sees_has_no_rows(
    head_dim: int, options: dict[str, Any], target: str, returns: bool
) -> None:
    """Alone and mapped: nobody writes and reads zeros."""

    def gradients(*args: Any) -> Any:
        def attention(*args: Any) -> Any:
            return jax_fa3.attention(*args, return_logsumexp=returns, **options)

        results, pull = jax.vjp(attention, *args)
        return pull(results)

    for function, lead in ((gradients, ()), (jax.vmap(gradients), (5,))):
        args = [
            jax.ShapeDtypeStruct((*lead, 2, n, 3, head_dim), jnp.bfloat16) for n in (70, 90, 90)
        ]
        text = cuda_text(function, *args)
        batch = 10 if lead else 2
        sums = f"{batch}x3x{70 if returns else 0}xf32"
        assert types(text, target)[0][-4:-1] == [sums, "f32", "f32"]
        if "deterministic" in options:
            mean = f"{batch if returns else 0}x3x{head_dim}xf32"
            assert types(text, "jax_fa3_unrotate")[0][-2:] == [mean, sums]


@pytest.mark.parametrize("returns", [False, True])
def test_queries_are_shifted_where_the_logsumexp_is_returned(returns: bool) -> None:
    """By what smoothing takes from their logits, and alike in the passes of one gradient."""
    args = inputs()

    def attention(*args: Any) -> Any:
        return jax_fa3.attention(*args, return_logsumexp=returns)

    def gradients(*args: Any) -> Any:
        results, pull = jax.vjp(attention, *args)
        return pull(results)

    def like_jax(*args: Any) -> Any:
        return jax_fa3.dot_product_attention(*args, return_residual=returns)

    expected = str(returns).lower()
    for function in (attention, like_jax):
        assert attributes(cuda_text(function, *args), FP8_CALL)["wants_shift"] == expected
    assert re.findall(r"wants_shift = (\w+)", cuda_text(gradients, *args)) == [expected] * 2


def test_gradients_of_float16_inputs_are_taken_back_by_a_call_of_their_own() -> None:
    args = [jax.ShapeDtypeStruct((2, n, 3, 128), jnp.float16) for n in (70, 90, 90)]
    text = cuda_text(jax.grad(loss_of(attend()), (0, 1, 2)), *args)
    assert attributes(text, "jax_fa3_bwd_fp8")["rotated"] == "false"
    assert "jax_fa3_unrotate" in calls(text)
