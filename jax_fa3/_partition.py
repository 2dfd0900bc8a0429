"""Sharding under jit: batch and heads are split, everything else must be whole on each device.

partition() builds every sharding itself from that of query (what JAX hands over may differ per
operand): batch axes and head axes of query hold for all arrays; key and value follow with the
longest prefix of the head axes whose device count divides num_heads_kv. When query heads are split
further than that, each device picks the KV heads of its own query heads, and the backward pass adds
up their gradients.

Inside shard_map the local op is called as it is. Explicit meshes never arrive here: `_attention`
wraps them in shard_map.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jax_fa3 import _compat, _grad, _local
from jax_fa3._layout import Layout, axes_of, layout_of
from jax_fa3._local import Call
from jax_fa3._shapes import Operands

Arrays = tuple[jax.Array, ...]

_WHOLE = ("seqlen_q", "seqlen_k", "dim", "dim_v")
_NAMES_OF_WHOLE = {
    "seqlen_q": "seqlen",
    "seqlen_k": "seqlen",
    "dim": "head_dim",
    "dim_v": "head_dim",
}


def forward(call: Call, *arrays: jax.Array) -> Arrays:
    """out and logsumexp, partitioned over batch and heads."""
    run = _local_forward(call) if _compat.in_manual_region() else _forward(call)
    return tuple(run(*arrays))


def backward(call: Call, *arrays: jax.Array) -> Arrays:
    """Cotangents of the operands that want one; arrays are the operands and the four of
    `_grad.Results`."""
    run = _local_backward(call) if _compat.in_manual_region() else _backward(call)
    return tuple(run(*arrays))


def refuse_sharded(
    function: str, argument: str, shape: Sequence[int], split: Sequence[Any]
) -> None:
    """Raises when an axis that must be whole is split; split as `_compat.split_of` gives it."""
    labels = _local.LABELS[argument]
    own = zip(shape[len(shape) - len(labels) :], split[len(split) - len(labels) :], strict=True)
    for (size, entry), label in zip(own, labels, strict=True):
        if label in _WHOLE and size != 1 and entry is not None:
            axis = _NAMES_OF_WHOLE[label]
            cure = "call context_parallel_attention in jax.shard_map, or " * (axis == "seqlen")
            raise ValueError(
                f"{function}: the {axis} axis of {argument} must not be sharded; got it sharded "
                f"over mesh axes {axes_of(entry)!r}. Shard batch or heads instead, {cure}make it "
                "whole with jax.lax.with_sharding_constraint (jax.reshard on an explicit mesh)."
            )


def must_be_whole(argument: str) -> bool:
    """Whether the operand has an axis that no device may hold a part of."""
    return any(label in _WHOLE for label in _local.LABELS[argument])


def check_whole(function: str, operands: Mapping[str, Any]) -> None:
    """Raises ValueError when an axis that must be whole is sharded; function names the caller."""
    for name, x in operands.items():
        refuse_sharded(function, name, x.shape, _compat.split_of(x))


def _pick_heads(
    arrays: dict[str, jax.Array], layout: Layout, group: int
) -> tuple[dict[str, jax.Array], jax.Array | None]:
    """KV heads that this device's query heads need, when query heads are split further than KV
    heads.

    Returns the operands, and the index of each picked head (None: all heads, in order).
    """
    heads_q, heads_kv = arrays["query"].shape[-2], arrays["key"].shape[-2]
    if not layout.heads_rest or heads_kv * group == heads_q:
        return arrays, None
    first = jax.lax.axis_index(layout.heads_rest) * heads_q
    if heads_q <= group and group % heads_q == 0:
        heads = jnp.reshape(first // group, (1,))
    else:  # a device's query heads straddle groups: one KV head per query head
        heads = (first + jnp.arange(heads_q)) // group
    picked = dict(arrays)
    for name, x in arrays.items():
        if "head_kv" in _local.LABELS[name]:
            axis = x.ndim - len(_local.LABELS[name]) + _local.LABELS[name].index("head_kv")
            picked[name] = jnp.take(x, heads, axis=axis, mode="clip")
    return picked, heads


def _put_heads(name: str, grad: jax.Array, heads: jax.Array, heads_kv: int) -> jax.Array:
    """Inverse of `_pick_heads` for a cotangent: adds the picked heads into zeros of all heads."""
    labels = _local.LABELS[name]
    axis = grad.ndim - len(labels) + labels.index("head_kv")
    moved = jnp.moveaxis(grad, axis, 0)
    zeros = jnp.zeros((heads_kv, *moved.shape[1:]), moved.dtype)
    return jnp.moveaxis(zeros.at[heads].add(moved), 0, axis)


def over_explicit_mesh(
    function: str, operands: Operands, run: Callable[[Operands], tuple[jax.Array, jax.Array]]
) -> tuple[jax.Array, jax.Array]:
    """run inside a shard_map over the Explicit mesh axes that query's type names for batch and
    heads.

    Key, value and the rest are resharded to follow query; on the remaining explicit axes all is
    whole.
    """
    arrays = {
        name: x[None] if name in _local.UNBATCHED else x
        for name, x in _local.present(operands).items()
    }
    types = {name: jax.typeof(x) for name, x in arrays.items()}
    check_whole(function, types)
    layout = layout_of(types["query"].sharding.mesh, types)
    group = operands.query.shape[-2] // operands.key.shape[-2]
    # A mesh in scope must not be named again; without one, that of query's type is meant.
    in_scope = not jax.sharding.get_abstract_mesh().empty
    specs = {name: layout.spec(x.shape, _local.LABELS[name]) for name, x in arrays.items()}

    def place(name: str, x: jax.Array) -> jax.Array:
        return _compat.reshard(x, NamedSharding(layout.mesh, specs[name]))

    def body(local: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        picked, _ = _pick_heads(local, layout, group)
        own = {name: x[0] if name in _local.UNBATCHED else x for name, x in picked.items()}
        return run(Operands(**own))

    shape_q = operands.query.shape
    out_specs = (
        layout.spec((*shape_q[:3], operands.value.shape[-1]), _local.OUT_LABELS),
        layout.spec((shape_q[0], shape_q[2], shape_q[1]), _local.LOGSUMEXP_LABELS),
    )
    # NOTE: where other axes are manual already, JAX gives residuals of the inner shard_map the
    # sharding of the outer one as well and cannot lower its gradient: there only operands are kept.
    mapped = jax.shard_map(
        jax.checkpoint(body) if _compat.in_manual_region() else body,
        mesh=None if in_scope else layout.mesh,
        in_specs=(specs,),
        out_specs=out_specs,
        axis_names=set(_compat.explicit_axes(operands.query)),
    )

    def whole(given: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, logsumexp = mapped({name: place(name, x) for name, x in given.items()})
        return out, logsumexp

    # Eagerly and with no mesh in scope, small operands still live on one device: jit moves them.
    out, logsumexp = whole(arrays) if in_scope else jax.jit(whole)(arrays)
    return out, logsumexp


@cache
def whole(function: str, argument: str) -> Callable[..., Arrays]:
    """(x,) of one operand, for code that XLA partitions itself; a split axis that it would gather
    is refused."""
    labels = _local.LABELS[argument]

    def jax_fa3_whole(x: jax.Array) -> Arrays:
        return (x,)

    def infer(mesh: Mesh, args: Sequence[Any], results: Sequence[Any]) -> Any:
        return (args[0].sharding,)

    def partition(mesh: Mesh, args: Sequence[Any], results: Sequence[Any]) -> Any:
        check_whole(function, {argument: args[0]})
        same = args[0].sharding
        return mesh, jax_fa3_whole, (same,), (same,)

    rule = _rule([labels], [labels])
    return _compat.partitioned(jax_fa3_whole, partition=partition, infer=infer, sharding_rule=rule)


def _local_forward(call: Call) -> Callable[..., Arrays]:
    def jax_fa3_forward(*arrays: jax.Array) -> Arrays:
        return _local.forward(call.operands(arrays), call)

    return jax_fa3_forward


def _local_backward(call: Call) -> Callable[..., Arrays]:
    def jax_fa3_backward(*arrays: jax.Array) -> Arrays:
        own, results = arrays[: len(call.names)], _grad.Results(*arrays[len(call.names) :])
        grads = _grad.backward(call.operands(own), results, call)
        return tuple(grads[name] for name in call.names if name in grads)

    return jax_fa3_backward


@cache
def _forward(call: Call) -> Callable[..., Arrays]:
    names, run = call.names, _local_forward(call)
    labels = (_local.OUT_LABELS, _local.LOGSUMEXP_LABELS)

    def shardings(mesh: Mesh, args: Sequence[Any], results: Sequence[Any]) -> tuple[Layout, Any]:
        layout = layout_of(mesh, dict(zip(names, args, strict=True)))
        return layout, tuple(layout.named(r.shape, s) for r, s in zip(results, labels, strict=True))

    def infer(mesh: Mesh, args: Sequence[Any], results: Sequence[Any]) -> Any:
        # NOTE: an exception here would abort the process; partition() is where to refuse.
        return shardings(mesh, args, results)[1]

    def partition(mesh: Mesh, args: Sequence[Any], results: Sequence[Any]) -> Any:
        check_whole(call.function, dict(zip(names, args, strict=False)))
        layout, out_shardings = shardings(mesh, args, results)
        group = _group(names, args)

        def lower(*arrays: jax.Array) -> Arrays:
            with _compat.empty_mesh():
                picked, _ = _pick_heads(dict(zip(names, arrays, strict=True)), layout, group)
                return tuple(run(*picked.values()))

        in_shardings = tuple(
            layout.named(x.shape, _local.LABELS[name]) for name, x in zip(names, args, strict=True)
        )
        return mesh, lower, out_shardings, in_shardings

    rule = _rule([_local.LABELS[name] for name in names], list(labels))
    return _compat.partitioned(run, partition=partition, infer=infer, sharding_rule=rule)


@cache
def _backward(call: Call) -> Callable[..., Arrays]:
    names, run = call.names, _local_backward(call)
    in_labels = [_local.LABELS[name] for name in names]
    in_labels += 2 * [_local.OUT_LABELS, _local.LOGSUMEXP_LABELS]

    def wanted(args: Sequence[Any]) -> list[str]:
        return [n for n, x in zip(names, args, strict=False) if call.wants_gradient(n, x)]

    def shardings(mesh: Mesh, args: Sequence[Any], results: Sequence[Any]) -> tuple[Layout, Any]:
        layout = layout_of(mesh, dict(zip(names, args, strict=False)))
        pairs = zip(wanted(args), results, strict=True)
        return layout, tuple(layout.named(r.shape, _local.LABELS[name]) for name, r in pairs)

    def infer(mesh: Mesh, args: Sequence[Any], results: Sequence[Any]) -> Any:
        return shardings(mesh, args, results)[1]

    def partition(mesh: Mesh, args: Sequence[Any], results: Sequence[Any]) -> Any:
        check_whole(call.function, dict(zip(names, args, strict=False)))
        layout, out_shardings = shardings(mesh, args, results)
        group, targets = _group(names, args), wanted(args)

        def lower(*arrays: jax.Array) -> Arrays:
            with _compat.empty_mesh():
                own = dict(zip(names, arrays, strict=False))
                picked, heads = _pick_heads(own, layout, group)
                grads = run(*picked.values(), *arrays[len(names) :])
                done: list[jax.Array] = []
                for name, grad, sharding in zip(targets, grads, out_shardings, strict=True):
                    split = {a for entry in sharding.spec for a in axes_of(entry)}
                    added = tuple(axis for axis in layout.every if axis not in split)
                    total = grad.astype(jnp.float32) if added else grad
                    if heads is not None and "head_kv" in _local.LABELS[name]:
                        total = _put_heads(name, total, heads, own["key"].shape[-2])
                    total = _compat.psum(total, added)
                    done.append(total.astype(grad.dtype))
                return tuple(done)

        in_shardings = tuple(
            layout.named(x.shape, label) for x, label in zip(args, in_labels, strict=True)
        )
        return mesh, lower, out_shardings, in_shardings

    def rule(mesh: Mesh, values: Sequence[Any], results: Sequence[Any]) -> Any:
        # Cotangents exist for these operands, in the order of the operands.
        targets = [
            n
            for n, t in zip(names, values, strict=False)
            if _is_float_type(t.element_type) and not (n == "softmax_scale" and call.constant_scale)
        ]
        return _rule(in_labels, [_local.LABELS[n] for n in targets])(mesh, values, results)

    return _compat.partitioned(run, partition=partition, infer=infer, sharding_rule=rule)


def _is_float_type(element_type: Any) -> bool:
    """Whether an MLIR element type is a float wider than 8 bits (see `is_differentiable`)."""
    return str(element_type) in ("bf16", "f16", "f32", "f64")


def _group(names: Sequence[str], args: Sequence[Any]) -> int:
    shapes = {name: x.shape for name, x in zip(names, args, strict=False)}
    return int(shapes["query"][-2] // shapes["key"][-2])


def _rule(
    in_labels: Sequence[Sequence[str]], out_labels: Sequence[Sequence[str]]
) -> Callable[..., Any]:
    """Shardy rule: batch and heads are shared factors, every other axis is a factor of its own.

    Sequence axes are deliberately not linked: a sharding of the result further down must not travel
    back into query, where it would be refused.
    """

    def build(mesh: Mesh, values: Sequence[Any], results: Sequence[Any]) -> Any:
        del mesh
        counter = iter(range(1 << 30))
        same_heads = _head_counts_agree(in_labels, values)

        def factors(shape: Sequence[int], labels: Sequence[str]) -> list[str]:
            batch = len(shape) - len(labels)
            keys = [f"batch{i}" for i in range(batch)] + list(labels)
            named: list[str] = []
            for size, key in zip(shape, keys, strict=True):
                if size == 1 or key in _WHOLE:
                    named.append(f"own{next(counter)}")
                elif key in ("head_q", "head_kv"):
                    named.append("heads" if same_heads else key)
                else:
                    named.append(key)
            return named

        return _compat.sharding_rule(
            [factors(t.shape, s) for t, s in zip(values, in_labels, strict=True)],
            [factors(t.shape, s) for t, s in zip(results, out_labels, strict=True)],
        )

    return build


def _head_counts_agree(labels: Sequence[Sequence[str]], values: Sequence[Any]) -> bool:
    counts: dict[str, int] = {}
    for own, value in zip(labels, values, strict=True):
        for label in own:
            if label in ("head_q", "head_kv"):
                axis = len(value.shape) - len(own) + list(own).index(label)
                counts[label] = max(counts.get(label, 1), value.shape[axis])
    return counts.get("head_q") == counts.get("head_kv")
