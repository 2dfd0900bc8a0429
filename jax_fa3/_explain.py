"""Which path serves a request, and why each other one does not.

`plan` is the only place that decides; `attention` follows it and `explain` prints it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from jax_fa3 import _compat, _extension, _ffi, _grad, _shapes
from jax_fa3._shapes import Config, Dims

SERVED_CAPABILITY = "9.0"

# What the kernels make of a request for precision="fp8"; anything else runs on the XLA path.
_SERVED_QUANTIZATION = {
    "query": "row",
    "key": "block",
    "value": "channel",
    "accumulate": "two_level",
}
# How much longer a backward pass takes at most whose sums have a fixed order, in percent of the
# default's time, from benchmarks/results/. At head_dim 256 the default has one too.
_COST_OF_ORDER = {64: 25, 128: 20}
_UNSERVED_OPERANDS = (
    "sinks",
    "query_segment_ids",
    "key_segment_ids",
    "query_seqlens",
    "key_seqlens",
    "mask",
    "bias",
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What would run for one request; str() prints it.

    Attributes:
      function: name of the public function asked about.
      path: "cuda" (kernel where the program is lowered for CUDA) or "xla".
      targets: custom-call targets of a forward pass, in order; () for "xla". Where a gradient is
        taken, FP8 has two: "jax_fa3_quantize" and "jax_fa3_fwd_fp8".
      kernel: facts about the kernel (name, tile, stages, ...), as pairs; () when unknown or unused.
        cluster_size is 1 where this call goes without what the kernel can do.
      quantization: how query, key and value become float8, in words.
      not_taken: (path, why not) for every other path.
      notes: what else a reader should know.
    """

    function: str
    path: Literal["cuda", "xla"]
    targets: tuple[str, ...]
    kernel: tuple[tuple[str, Any], ...]
    quantization: str
    not_taken: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        runs = "the blocked XLA path" if self.path == "xla" else f"CUDA ({', '.join(self.targets)})"
        lines = [f"{self.function} runs: {runs}"]
        lines += [f"  {key}: {value}" for key, value in self.kernel]
        lines += [f"  quantisation: {self.quantization}"]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  not {path}: {reason}" for path, reason in self.not_taken]
        return "\n".join(lines)


def plan(
    function: str,
    dims: Dims,
    config: Config,
    dtypes: Mapping[str, Any],
    given: Iterable[str],
    implementation: Literal["cuda", "xla"] | None,
    spelled: Mapping[str, str] | None = None,
) -> Plan:
    """Chooses the path of one request.

    Args:
      dtypes: of query, key and value.
      given: names of the optional operands that were passed.
      spelled: the function's own names for some of attention's arguments.
    Raises (only for implementation="cuda"):
      NotImplementedError: no kernel serves the request.
      RuntimeError: a kernel does, but it cannot run in this installation or on these devices.
    """
    unserved = _unserved(dims, config, dtypes, given, spelled or {})
    missing = missing_reason()
    if implementation == "cuda":
        if unserved is not None:
            raise NotImplementedError(
                f'{function}: {unserved}; got implementation="cuda". Pass '
                'implementation="xla" or None.'
            )
        if missing is not None:
            raise RuntimeError(f'{function}: implementation="cuda" cannot run: {missing}.')
    quantization = _describe_quantization(config, dims, dtypes)
    other = ("native kernel", 'precision="fp8" was asked for')
    if config.precision == "native":
        other = ("fp8 kernel", 'precision="native" was asked for')
    refused = 'implementation="xla" was asked for' if implementation == "xla" else unserved
    refused = missing if refused is None else refused
    if refused is not None:
        return Plan(function, "xla", (), (), quantization, (("cuda", refused), other))
    targets: tuple[str, ...] = (_extension.TARGET_QUANTIZE_FWD_FP8,)
    if config.precision == "native":
        targets = (_extension.TARGET_FWD,)
    facts = _kernel_facts(dims, config, dtypes) or {}
    if facts.get("cluster_size") == 2 and not _is_paired(facts["block_q"], dims, config):
        facts["cluster_size"] = 1
    reason = "the kernel serves this request" if implementation is None else 'implementation="cuda"'
    return Plan(
        function,
        "cuda",
        targets,
        tuple(facts.items()),
        quantization,
        (("xla", reason), other),
        _notes(dims, config, dtypes, given, implementation),
    )


def _notes(
    dims: Dims,
    config: Config,
    dtypes: Mapping[str, Any],
    given: Iterable[str],
    implementation: str | None,
) -> tuple[str, ...]:
    reason = _grad.unserved_reason(dims.head_dim, dims.head_dim_v, dtypes.values(), given)
    reads_images = config.precision == "fp8" and _ffi.bwd_reads_images(
        dims.head_dim, deterministic=config.deterministic
    )
    target = _extension.TARGET_BWD_FP8 if reads_images else _extension.TARGET_BWD
    notes = [f"the backward pass runs CUDA ({target})"]
    if config.deterministic and dims.head_dim in _COST_OF_ORDER:
        notes = [
            f"{notes[0]}; deterministic=True made it take up to {_COST_OF_ORDER[dims.head_dim]} % "
            "longer where that was measured (H200, bfloat16, 2,048 to 16,384 tokens)"
        ]
    if reason is not None:
        notes = [f"the backward pass recomputes on the XLA path: {reason}"]
    if dims.is_empty:
        notes.append("a size is zero, so no kernel is launched")
    if implementation is None and not _compat.cuda_capabilities():
        notes.append("this process has no CUDA device; run here, the same op takes its XLA branch")
    return tuple(notes)


def missing_reason() -> str | None:
    """Why no kernel can run here, however well it serves the request."""
    reason = _extension.unavailable_reason()
    if reason is not None:
        return reason
    capabilities = _compat.cuda_capabilities()
    if capabilities and SERVED_CAPABILITY not in capabilities:
        have = ", ".join(sorted(set(capabilities)))
        return (
            f"the kernels need compute capability {SERVED_CAPABILITY} (Hopper) exactly; "
            f"the CUDA devices of this process have {have}"
        )
    built = _extension.cuda_version()
    driver = _compat.driver_cuda_version() if capabilities else None
    # Code of one CUDA release runs on drivers of all releases with its major number, and later.
    if built is not None and driver is not None and driver // 1000 < built // 1000:
        return (
            f"the kernels were built with CUDA {_extension.cuda_release(built)} and the driver "
            f"serves CUDA {_extension.cuda_release(driver)}; update the driver, or build jax_fa3 "
            f"with nvcc {driver // 1000}"
        )
    return None


def _unserved(
    dims: Dims,
    config: Config,
    dtypes: Mapping[str, Any],
    given: Iterable[str],
    spelled: Mapping[str, str],
) -> str | None:
    """The first rule of the kernels that the request breaks, with the value received."""
    names = {str(dtype) for dtype in dtypes.values()}
    if "float32" in names:
        return "float32 inputs are not served by the kernels (cast to bfloat16)"
    if dims.head_dim not in _ffi.SERVED_HEAD_DIMS:
        return f"head_dim {dims.head_dim} is not served by the kernels (64, 128 and 256 are)"
    if dims.head_dim_v != dims.head_dim:
        return (
            f"a head_dim of value that differs from query's is not served by the kernels "
            f"({dims.head_dim_v} and {dims.head_dim})"
        )
    for what, size in dims._asdict().items():
        if isinstance(size, int) and size >= 2**30:  # `jax.export` has sizes without a value
            return f"a {what} of {size} is not served by the kernels (below 2^30 is)"
    if config.window_size is not None:
        window = spelled.get("window_size", "window_size")
        return f"{window}={config.window_size} is not served by the kernels"
    if config.logits_soft_cap is not None:
        return f"logits_soft_cap={config.logits_soft_cap} is not served by the kernels"
    for name in given:
        if name in _UNSERVED_OPERANDS:
            return f"{spelled.get(name, name)} is not served by the kernels"
    if config.precision == "native":
        if any(name.startswith("float8") for name in names):
            return 'float8 inputs with precision="native" are not served by the kernels'
    else:
        for field, value in _SERVED_QUANTIZATION.items():
            got = getattr(config.quantization, field)
            if got != value:
                return (
                    f'quantization with {field}="{got}" is not served by the kernels ("{value}" is)'
                )
    if _extension.kernels() and _kernel_facts(dims, config, dtypes) is None:
        return f"this build has no kernel for head_dim {dims.head_dim} and {_kind(config, dtypes)}"
    return None


def _kind(config: Config, dtypes: Mapping[str, Any]) -> str:
    """The kernel's dtype as `_ext.kernels()` spells it."""
    if config.precision == "fp8":
        return config.quantization.dtype
    return {"bfloat16": "bf16", "float16": "f16"}[str(dtypes["query"])]


def _kernel_facts(dims: Dims, config: Config, dtypes: Mapping[str, Any]) -> dict[str, Any] | None:
    for facts in _extension.kernels():
        if facts.get("dtype") != _kind(config, dtypes) or facts.get("head_dim") != dims.head_dim:
            continue
        if config.precision == "fp8" and facts.get("softmax") != config.quantization.softmax:
            continue
        return dict(facts)
    return None


def _is_paired(block_q: int, dims: Dims, config: Config) -> bool:
    """Whether CTAs of this call form clusters; True for a size of `jax.export` without a value."""
    sizes = (dims.seqlen_q, dims.seqlen_k, dims.num_heads_q, dims.num_heads_kv)
    if not all(isinstance(size, int) for size in sizes):
        return True
    return _extension.is_paired(
        block_q=block_q,
        seqlen_q=dims.seqlen_q,
        seqlen_k=dims.seqlen_k,
        group_size=dims.num_heads_q // dims.num_heads_kv,
        is_causal=config.is_causal,
    )


def _describe_quantization(config: Config, dims: Dims, dtypes: Mapping[str, Any]) -> str:
    if config.precision == "native":
        return "none"
    quantization = config.quantization
    rotated = quantization.hadamard
    if rotated == "auto":
        wide = not any(str(dtypes[name]).startswith("float8") for name in ("query", "key"))
        rotated = wide and dims.head_dim in (64, 128, 256)
    steps = [f"query per {quantization.query}", f"key per {quantization.key}"]
    steps.append(f"value per {quantization.value}")
    if rotated:
        steps.append("query and key rotated")
    if quantization.smooth_key and not str(dtypes["key"]).startswith("float8"):
        steps.append("key mean removed")
    if quantization.center_value and not str(dtypes["value"]).startswith("float8"):
        steps.append("value mean removed")
    steps.append(f"{quantization.softmax} exponential, {quantization.accumulate} sums")
    return f"{quantization.dtype}: " + ", ".join(steps)


def explain(query: Any, key: Any, value: Any, **options: Any) -> Plan:
    """What `jax_fa3.attention` would run for these arguments, and why no other path.

    Args: those of `jax_fa3.attention`; arrays may be `jax.ShapeDtypeStruct`.
    Returns: a frozen `Plan`; print it.
    Raises:
      ValueError, TypeError, NotImplementedError, RuntimeError: as `attention` for these arguments.
    """
    unknown = set(options) - _KEYWORDS
    if unknown:
        raise TypeError(
            f"explain: keywords must be those of attention; got {', '.join(sorted(unknown))}."
        )
    return plan_of("attention", query, key, value, **options)[1]


def plan_of(
    function: str,
    query: Any,
    key: Any,
    value: Any,
    *,
    spelled: Mapping[str, str] | None = None,
    **options: Any,
) -> tuple[Config, Plan]:
    """Checks the arguments of the public function of that name; its static options and its plan."""
    dims, config = _shapes.check_attention(function, query, key, value, spelled=spelled, **options)
    dtypes = {"query": query.dtype, "key": key.dtype, "value": value.dtype}
    given = [name for name in _UNSERVED_OPERANDS if options.get(name) is not None]
    implementation = options.get("implementation")
    return config, plan(function, dims, config, dtypes, given, implementation, spelled)


_KEYWORDS = set(inspect.signature(_shapes.check_attention).parameters) - {
    "function_name",
    "spelled",
    "query",
    "key",
    "value",
}
