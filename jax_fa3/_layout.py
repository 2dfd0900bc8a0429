"""Which mesh axes split what: the layout of one call, read from the sharding of its operands."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jax_fa3 import _compat, _local

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which mesh axes split what.

    Attributes:
      batch: mesh axes of each batch axis.
      heads: mesh axes of the query heads, major first.
      heads_kv: the prefix of heads that splits the KV heads.
    """

    mesh: Mesh | AbstractMesh
    batch: tuple[Axes, ...]
    heads: Axes
    heads_kv: Axes

    @property
    def every(self) -> Axes:
        return sum(self.batch, ()) + self.heads

    @property
    def heads_rest(self) -> Axes:
        """Axes that split query heads but not KV heads."""
        return self.heads[len(self.heads_kv) :]

    def spec(self, shape: Sequence[int], labels: Sequence[str]) -> PartitionSpec:
        """Sharding of an array with these sizes; axes of size 1 are shared and stay whole."""
        by_label = {"head_q": self.heads, "head_kv": self.heads_kv}
        axes = (*self.batch, *(by_label.get(label, ()) for label in labels))
        return _compat.partition_spec(
            *((a or None) if size != 1 else None for a, size in zip(axes, shape, strict=True))
        )

    def named(self, shape: Sequence[int], labels: Sequence[str]) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(shape, labels))


def axes_of(entry: Any) -> Axes:
    """Mesh axes in one entry of a PartitionSpec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def whole_prefix(mesh: Mesh | AbstractMesh, axes: Axes, size: int, used: set[str]) -> Axes:
    """Longest prefix of axes, free of used ones, whose device count divides size."""
    taken: list[str] = []
    for axis in axes:
        if axis in used or size % math.prod(mesh.shape[a] for a in (*taken, axis)):
            break
        taken.append(axis)
    return tuple(taken)


def layout_of(mesh: Mesh | AbstractMesh, operands: Mapping[str, Any]) -> Layout:
    """The layout that query's sharding asks for; key and value are asked where query says nothing.

    operands: by name, each with shape and sharding.
    """
    full = _local.batch_shape(dict(operands))
    used: set[str] = set()
    batch: list[Axes] = []
    for axis, size in enumerate(full):
        entries = [
            axes_of(_compat.split_of(operands[name])[axis])
            for name in ("query", "key", "value")
            if operands[name].shape[axis] != 1
        ]
        batch.append(whole_prefix(mesh, next((a for a in entries if a), ()), size, used))
        used.update(batch[-1])
    heads_q, heads_kv = operands["query"].shape[-2], operands["key"].shape[-2]
    entries = [axes_of(_compat.split_of(operands["query"])[-2])]
    if heads_q == heads_kv:
        entries += [axes_of(_compat.split_of(operands[name])[-2]) for name in ("key", "value")]
    heads = whole_prefix(mesh, next((a for a in entries if a), ()), heads_q, used)
    return Layout(mesh, tuple(batch), heads, whole_prefix(mesh, heads, heads_kv, set()))
