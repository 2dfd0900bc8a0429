"""The rivals, each behind one class: why it cannot run here, or how to launch it.

key         what                                                             from
cudnn       jax.nn.dot_product_attention(implementation="cudnn")             JAX
cudnn_fp8   cuDNN's FP8 attention: one scale per tensor, FP8 output          JAX, a private module
fa3         FlashAttention-3 forward, bf16; its wheel has no f16             fa3-fwd (torch)
fa3_fp8     the same in e4m3, bf16 output                                    fa3-fwd (torch)
fa3jax      FlashAttention-3 in JAX, 16 bits, head_dim 128                   flash-attn3-jax
tokamax     Pallas Mosaic-GPU kernel, 16 bits, its configs for an H100       tokamax

FP8 rivals get inputs that are quantised already (a plain cast, scale 1), like our kernel alone.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa3._cli import contenders, text, timing
from jax_fa3._cli.contenders import Contender, Unavailable, inputs
from jax_fa3._cli.grid import Shape
from jax_fa3._cli.timing import Side, jax_side

Tensors = tuple[Any, Any, Any]
# A call that takes longer takes the device far longer than torch takes the host (up to 0.2 ms),
# even if the host was disturbed while the first calls were timed.
_LONG_FOR_TORCH_S = 2e-3


class Rival:
    """Base: a subclass names its modules and what they serve, and says how to compute.

    `side` times it; `compute` returns one output for the accuracy table.
    """

    key = ""
    package = ""  # what to install, for the message
    module = ""  # importable when the package is there
    precisions: tuple[str, ...] = ("bf16",)
    head_dims: tuple[int, ...] = ()  # the only ones that it serves, where it says so

    def unavailable(self, precision: str, head_dim: int) -> str | None:
        """Why it cannot run in this process, or None."""
        if precision not in self.precisions:
            return f"{self.key} has no {precision}"
        if jax.default_backend() != "gpu":
            return f"{self.key} needs a GPU"
        if self.module and importlib.util.find_spec(self.module) is None:
            return f"{self.key} needs the package {self.package}"
        if self.head_dims and head_dim not in self.head_dims:
            return f"{self.key} serves head_dim {', '.join(map(str, self.head_dims))} only"
        return None

    def side(self, shape: Shape, precision: str) -> Side:
        """Ready to be timed."""
        raise NotImplementedError

    def compute(self, arrays: Tensors, precision: str, *, is_causal: bool) -> Any:
        """Output of one call on NumPy or JAX inputs of 16 bits, as something NumPy reads."""
        raise NotImplementedError

    def contender(
        self, precision: str = "bf16", side: Callable[[Shape], Side] | None = None
    ) -> Contender:
        """As the timing code wants it; `side` is timed in place of its own."""

        def build(shape: Shape) -> Side:
            reason = self.unavailable(precision, shape.head_dim)
            if reason is not None:
                raise Unavailable(reason)
            try:
                return self.side(shape, precision) if side is None else side(shape)
            except Exception as error:  # a rival that fails is skipped and named in the results
                raise Unavailable(f"{type(error).__name__}: {str(error)[:200]}") from error

        return Contender(self.key, precision, None, False, build)


class JaxRival(Rival):
    """A rival that is a JAX function of query, key, value."""

    def function(self, precision: str, *, is_causal: bool) -> Callable[..., Any]:
        """The function to jit."""
        raise NotImplementedError

    def side(self, shape: Shape, precision: str) -> Side:
        operands = inputs(shape, _jax_dtype(precision))
        return jax_side(self.function(precision, is_causal=shape.is_causal), *operands)

    def compute(self, arrays: Tensors, precision: str, *, is_causal: bool) -> Any:
        operands = [jnp.asarray(x).astype(_jax_dtype(precision)) for x in arrays]
        # One jitted function per variant, so that equal shapes compile once.
        jitted = self.__dict__.setdefault("_jitted", {})
        if (precision, is_causal) not in jitted:
            jitted[precision, is_causal] = jax.jit(self.function(precision, is_causal=is_causal))
        return jitted[precision, is_causal](*operands).astype(jnp.float32)


class Cudnn(JaxRival):
    key = "cudnn"
    precisions = ("bf16", "f16")

    def function(self, precision: str, *, is_causal: bool) -> Callable[..., Any]:
        return contenders.cudnn_call(is_causal=is_causal)


class CudnnFp8(JaxRival):
    """Its softmax is scaled by 256 before the cast, which changes nothing on normal inputs."""

    key = "cudnn_fp8"
    precisions = ("fp8",)

    def function(self, precision: str, *, is_causal: bool) -> Callable[..., Any]:
        # The only use of a private name of JAX in this folder.
        private = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
        one = jnp.ones((1, 1, 1, 1), jnp.float32)
        params = dict.fromkeys(private.FP8Params.__annotations__, one)
        params["scale_s"], params["descale_s"] = one * 256.0, one / 256.0
        mask = private.MaskType.CAUSAL if is_causal else private.MaskType.NO_MASK

        def call(q: Any, k: Any, v: Any) -> Any:
            return private.dot_product_attention(
                q,
                k,
                v,
                fp8_params=params,
                scale=q.shape[-1] ** -0.5,
                mask_type=mask,
                qkv_layout="BTNH",
                use_fp8=True,
            )[0]

        return call


class FlashAttention3Jax(JaxRival):
    key, package, module = "fa3jax", "flash-attn3-jax", "flash_attn3_jax"
    precisions = ("bf16", "f16")
    head_dims = (128,)

    def function(self, precision: str, *, is_causal: bool) -> Callable[..., Any]:
        package = importlib.import_module(self.module)
        return lambda q, k, v: package.flash_mha(q, k, v, is_causal=is_causal)


class Tokamax(JaxRival):
    key, package, module = "tokamax", "tokamax", "tokamax"
    precisions = ("bf16", "f16")

    def function(self, precision: str, *, is_causal: bool) -> Callable[..., Any]:
        package = importlib.import_module(self.module)
        _share_tuning(importlib.import_module("tokamax._src.ops.attention.api"))

        def call(q: Any, k: Any, v: Any) -> Any:
            return package.dot_product_attention(
                q, k, v, is_causal=is_causal, implementation="mosaic"
            )

        return jax.jit(call)  # which a program that holds several calls lowers once


def _share_tuning(api: Any) -> None:
    """Lets tokamax use what it ships for an H100: a config for each shape of this grid.

    It looks configs up by the card's name, and on an H200 would take those of a heuristic: 7 %
    slower at head_dim 64, causal, and 2 % faster at 128 without a mask (8k).
    """
    forward = api.IMPLEMENTATIONS["mosaic_gpu"]
    card = jax.local_devices()[0].device_kind
    for op in (forward, forward.vjp):
        known = op.get_autotuning_cache(card)
        if not known:
            known.update(op.get_autotuning_cache("NVIDIA H100 80GB HBM3"))


class FlashAttention3(Rival):
    """Through torch, whose way to the device is longer than a short call: those are replayed from a
    CUDA graph, as JAX runs several in one program."""

    key, package, module = "fa3", "fa3-fwd", "fa3_fwd_interface"
    precisions = ("bf16",)

    def unavailable(self, precision: str, head_dim: int) -> str | None:
        reason = super().unavailable(precision, head_dim)
        if reason is None and importlib.util.find_spec("torch") is None:
            return f"{self.key} needs the package torch"
        return reason

    def side(self, shape: Shape, precision: str) -> Side:
        torch, interface = importlib.import_module("torch"), importlib.import_module(self.module)
        kv = (shape.batch, shape.seqlen_k, shape.num_heads_kv, shape.head_dim)
        sizes = ((shape.batch, shape.seqlen_q, shape.num_heads_q, shape.head_dim), kv, kv)
        tensors = [
            torch.randn(size, device="cuda", dtype=torch.bfloat16).to(_torch_dtype(precision))
            for size in sizes
        ]

        def launch() -> Any:
            with torch.no_grad():
                return interface.flash_attn_func(*tensors, causal=shape.is_causal)

        def wait(_: Any) -> None:
            torch.cuda.synchronize()

        wait(launch())
        side = Side(launch, wait)
        if timing.seconds_per_launch(side) > _LONG_FOR_TORCH_S:
            return side
        # Where that fails, so does this rival: its time would be the host's.
        graph = torch.cuda.CUDAGraph()
        # JAX's threads use the device too; only what this thread does counts.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(timing.LAUNCHES_OF_SHORT):
                launch()
        wait(graph.replay())
        return Side(graph.replay, wait, timing.LAUNCHES_OF_SHORT)

    def compute(self, arrays: Tensors, precision: str, *, is_causal: bool) -> Any:
        torch, interface = importlib.import_module("torch"), importlib.import_module(self.module)
        tensors = [
            torch.from_numpy(np.asarray(x).astype("float32")).cuda().to(_torch_dtype(precision))
            for x in arrays
        ]
        with torch.no_grad():
            out = interface.flash_attn_func(*tensors, causal=is_causal)
        out = out[0] if isinstance(out, tuple) else out
        return out.float().cpu().numpy()


class FlashAttention3Fp8(FlashAttention3):
    key = "fa3_fp8"
    precisions = ("fp8",)


RIVALS: dict[str, Rival] = {
    rival.key: rival
    for rival in (
        Cudnn(),
        CudnnFp8(),
        FlashAttention3(),
        FlashAttention3Fp8(),
        FlashAttention3Jax(),
        Tokamax(),
    )
}


def add_rivals_flag(parser: argparse.ArgumentParser) -> None:
    """--rivals, for every program that compares with them."""
    text.add_list_flag(
        parser, "--rivals", ["cudnn", "cudnn_fp8", "fa3", "fa3_fp8"], of=(*RIVALS, "none")
    )


def _jax_dtype(precision: str) -> Any:
    if precision == "fp8":
        return jnp.float8_e4m3fn
    return contenders.JAX_DTYPES[precision]


def _torch_dtype(precision: str) -> Any:
    torch = importlib.import_module("torch")
    return torch.float8_e4m3fn if precision == "fp8" else torch.bfloat16
