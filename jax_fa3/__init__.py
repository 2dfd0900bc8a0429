"""FlashAttention-3-class FP8 attention for NVIDIA Hopper, in JAX."""

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

from jax_fa3._attention import attention
from jax_fa3._config_report import show_config
from jax_fa3._context_parallel import context_parallel_attention, zigzag_shard, zigzag_unshard
from jax_fa3._dot_product import dot_product_attention
from jax_fa3._explain import Plan, explain
from jax_fa3._extension import export_disabled_checks
from jax_fa3._merge import merge_attention
from jax_fa3._quantize import Quantization, QuantizedTensor, dequantize, quantize
from jax_fa3._varlen import attention_varlen
from jax_fa3._vjp import checkpoint_policy

try:
    __version__ = _version("jax_fa3")
except _PackageNotFoundError:  # imported from a source tree that is not installed
    __version__ = "0.0.0+source"

__all__ = [
    "Plan",
    "Quantization",
    "QuantizedTensor",
    "attention",
    "attention_varlen",
    "checkpoint_policy",
    "context_parallel_attention",
    "dequantize",
    "dot_product_attention",
    "explain",
    "export_disabled_checks",
    "merge_attention",
    "quantize",
    "show_config",
    "zigzag_shard",
    "zigzag_unshard",
]
