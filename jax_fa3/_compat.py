"""What differs between JAX versions, or is not public in all of them: the only such file.

Supported: JAX 0.10.2 and newer. Everything here is a thin wrapper with a stable meaning, so that no
other file looks at ``jax.__version__`` or imports a private name.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np

if jax.__version_info__ < (0, 10, 2):  # first, since what follows is not in every older release
    raise ImportError(
        f"jax_fa3: jax must be 0.10.2 or newer; got {jax.__version__}. Run `pip install -U jax`."
    )

from jax.ad_checkpoint import checkpoint_name
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

_P = ParamSpec("_P")
_R = TypeVar("_R")


def runtime_ffi_version() -> tuple[int, int] | None:
    """(major, minor) of the FFI in the installed jaxlib, read from its header; None if
    unreadable."""
    try:
        header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
        text = header.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = [
        re.search(rf"#define\s+XLA_FFI_API_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR")
    ]
    if found[0] is None or found[1] is None:
        return None
    return int(found[0].group(1)), int(found[1].group(1))


def cuda_capabilities() -> tuple[str, ...]:
    """Compute capability ("9.0") of every CUDA device of this process; () without one.

    Starts JAX's backends on first use, therefore never called while importing.
    """
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return ()
    return tuple(str(getattr(device, "compute_capability", "unknown")) for device in devices)


@functools.cache
def driver_cuda_version() -> int | None:
    """The CUDA version that the driver serves (13000 = 13.0); None where it cannot be asked.

    Asks the library that JAX uses, which may be newer than the kernel module (a compatibility
    package).
    """
    version = ctypes.c_int(0)
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value if status == 0 and version.value > 0 else None


def default_backend() -> str:
    """Name of the default backend ("cpu", "gpu"); starts the backends."""
    return jax.default_backend()


def in_manual_region() -> bool:
    """Whether the code being traced stands inside shard_map (any mesh axis is manual)."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def _varying_axes(x: Any) -> frozenset[str]:
    """Manual mesh axes over which x differs between devices."""
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset() if kind is None else frozenset(kind.varying)


def _to_varying(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """x marked as differing over all of axes; its transpose sums over the axes that are new."""
    missing = tuple(sorted(axes - _varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def mark_varying(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """All arrays brought to the union of their varying axes."""
    union = frozenset[str]().union(*(_varying_axes(x) for x in arrays))
    return [_to_varying(x, union) for x in arrays]


def explicit_axes(x: Any) -> frozenset[str]:
    """Axes that are Explicit (sharding is part of the type) in the mesh of x."""
    mesh = jax.typeof(x).sharding.mesh
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in kinds if kind == AxisType.Explicit)


def is_explicit(x: Any) -> bool:
    """Whether the type of x states its sharding: some axis of its mesh is Explicit."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types


def known_split(x: Any) -> tuple[Any, ...]:
    """`split_of` for what is known of x while tracing; no axis of a traced array without a type
    that says more."""
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        return split_of(x)
    return split_of(jax.typeof(x)) if is_explicit(x) else (None,) * x.ndim


class Placed(NamedTuple):
    """An operand or result as the partitioner knows it.

    split: as `split_of` gives it; a mesh axis stands at every axis of the array that it has a part
    in splitting, since Shardy may split two of them by parts of one mesh axis.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    split: tuple[Any, ...]


def split_of(x: Any) -> tuple[Any, ...]:
    """Mesh axes that split each axis of x (array, type, struct or `Placed`), major first; None
    where none does.

    A mesh axis of one device splits nothing.
    """
    if isinstance(x, Placed):
        return x.split
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return (None,) * len(x.shape)
    sizes = sharding.mesh.shape

    def splitting(entry: Any) -> Any:
        axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
        return tuple(axis for axis in axes if sizes[axis] > 1) or None

    entries = tuple(splitting(entry) for entry in sharding.spec)
    return entries + (None,) * (len(x.shape) - len(entries))


def _placed(mesh: Any, x: Any) -> Placed:
    """x, whose sharding is in XLA's terms: each axis in tiles, each tile on its devices."""
    rank = len(x.shape)
    tiling = None if x.sharding is None else x.sharding._to_xla_hlo_sharding(rank)
    if tiling is None or not tiling.is_tiled():
        return Placed(tuple(x.shape), x.dtype, x.sharding, (None,) * rank)
    shape = tiling.tile_assignment_dimensions()
    tiles = np.empty((mesh.size, rank), np.int64)
    tiles[tiling.tile_assignment_devices()] = np.argwhere(np.ones(shape, bool))[:, :rank]
    tiles = tiles.reshape(*mesh.devices.shape, rank)
    # How many tiles the first and the last device along a mesh axis are apart: more for major ones.
    steps = {
        axis: (tiles.take(-1, k) - tiles.take(0, k)).reshape(-1, rank).max(axis=0)
        for k, axis in enumerate(mesh.axis_names)
    }

    def splitting(i: int) -> tuple[str, ...] | None:
        axes = [axis for axis in mesh.axis_names if steps[axis][i] > 0]
        return tuple(sorted(axes, key=lambda axis: -steps[axis][i])) or None

    return Placed(tuple(x.shape), x.dtype, x.sharding, tuple(map(splitting, range(rank))))


def partition_spec(*entries: Any) -> PartitionSpec:
    """PartitionSpec, typed."""
    return PartitionSpec(*entries)  # type: ignore[no-untyped-call, unused-ignore]


def reshard(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """x with this sharding on an explicit mesh."""
    moved: jax.Array = jax.reshard(x, sharding)  # type: ignore[no-untyped-call, unused-ignore]
    return moved


def psum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sum of x over mesh axes; x itself when there are none."""
    if not axes:
        return x
    total: jax.Array = jax.lax.psum(x, axes)  # type: ignore[no-untyped-call, unused-ignore]
    return total


def named_residual(x: jax.Array, name: str) -> jax.Array:
    """x under a name that remat policies know."""
    named: jax.Array = checkpoint_name(x, name)  # type: ignore[no-untyped-call, unused-ignore]
    return named


def any_rank(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """fn, free to broadcast whatever jax_numpy_rank_promotion its caller chose."""

    @functools.wraps(fn)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with jax.numpy_rank_promotion("allow"):
            return fn(*args, **kwargs)

    return wrapped


def linear_identity(name: str, on_use: Callable[..., Any], *, mappable: bool = True) -> Primitive:
    """A primitive of one operand and of its type that can be traced and transposed.

    Lowering or computing it calls on_use(platforms, **parameters), which is to raise; so does
    mapping it unless it is mappable.
    """
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x, **_: x)

    def lower(ctx: Any, x: Any, **parameters: Any) -> Any:
        on_use(", ".join(ctx.module_context.platforms), **parameters)
        return [x]

    def compute(x: Any, **parameters: Any) -> Any:
        on_use(jax.default_backend(), **parameters)
        return x

    primitive.def_impl(compute)
    mlir.register_lowering(primitive, lower)
    ad.deflinear2(primitive, lambda cotangent, _, **__: [cotangent])
    if mappable:
        batching.defvectorized(primitive)
    else:
        batching.primitive_batchers[primitive] = lambda x, d, **rest: (compute(*x, **rest), d[0])
    return primitive


def identity(name: str, on_tangent: Callable[..., Any]) -> Primitive:
    """A primitive that returns the last of one or two operands of one type.

    Its tangent is on_tangent(that of the first operand, **parameters). Unlike a custom_jvp it keeps
    this rule wherever it is differentiated, also when a scan is, twice.
    """
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda *operands, **_: operands[-1])
    primitive.def_impl(lambda *operands, **_: operands[-1])
    mlir.register_lowering(primitive, lambda ctx, *operands, **_: [operands[-1]])

    def jvp(primals: Any, tangents: Any, **parameters: Any) -> Any:
        tangent = tangents[0]
        if not isinstance(tangent, ad.Zero):
            tangent = on_tangent(tangent, **parameters)
        return primitive.bind(*primals, **parameters), tangent

    def batch(operands: Any, dims: Any, **parameters: Any) -> Any:
        size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
        mapped = [batching.bdim_at_front(x, d, size) for x, d in zip(operands, dims, strict=True)]
        return primitive.bind(*mapped, **parameters), 0

    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch
    return primitive


def partitioned(
    fn: Callable[..., Any],
    *,
    partition: Callable[..., Any],
    infer: Callable[..., Any],
    sharding_rule: Callable[..., Any],
) -> Callable[..., Any]:
    """fn with its own partitioning under jit, for Shardy (the rule) and GSPMD (infer).

    partition and infer get operands and results as `Placed`; JAX itself would refuse what splits an
    axis by a part of a mesh axis.

    fn may close over array constants: jit keeps them out of custom_partitioning's sight, which
    takes none.
    """

    def placed(callback: Callable[..., Any]) -> Callable[..., Any]:
        def run(mesh: Any, args: Sequence[Any], results: Sequence[Any]) -> Any:
            return callback(mesh, *([_placed(mesh, x) for x in xs] for xs in (args, results)))

        return run

    op: Any = custom_partitioning(jax.jit(fn))  # type: ignore[no-untyped-call, unused-ignore]
    op.def_partition(
        partition=placed(partition),
        infer_sharding_from_operands=placed(infer),
        sharding_rule=sharding_rule,
        decode_shardings=False,
    )
    call: Callable[..., Any] = op
    return call


def sharding_rule(
    operands: Sequence[Sequence[str]], results: Sequence[Sequence[str]]
) -> SdyShardingRule:
    """Shardy rule from the factor name of every axis of every operand and result."""

    def mapping(names: Sequence[str]) -> Any:
        return ArrayMapping(*names)  # type: ignore[no-untyped-call, unused-ignore]

    return SdyShardingRule(tuple(map(mapping, operands)), tuple(map(mapping, results)))


@contextlib.contextmanager
def empty_mesh() -> Iterator[None]:
    """Trace as if no mesh were set; what partition() lowers must contain no sharding annotation."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        yield


def result_types(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Types of fn's results with the varying axes and the mesh they have where they are computed.

    ``jax.eval_shape`` loses the mesh inside a partly manual shard_map; a jaxpr's out_avals keep it.
    """
    return list(jax.make_jaxpr(fn)(*args).out_avals)
