"""Sizes of a timing grid. FLOPs follow the papers: 4 * batch * heads * Sq * Sk * D, half if causal.

The FlashAttention-3 grid keeps tokens (batch * seqlen) and width (heads * head_dim) constant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

TOKENS, HIDDEN = 16_384, 2_048
SEQLENS = (512, 1024, 2048, 4096, 8192, 16_384)
HEAD_DIMS = (64, 128, 256)


@dataclasses.dataclass(frozen=True)
class Shape:
    """One attention call of a grid."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    is_causal: bool

    @classmethod
    def of(cls, row: dict[str, Any]) -> Shape:
        """That of a result file's row."""
        return cls(**{field.name: row[field.name] for field in dataclasses.fields(cls)})

    @property
    def name(self) -> str:
        """E.g. B8_S2048_H16_D128_c; _n is not causal."""
        seqlen = f"S{self.seqlen_q}"
        if self.seqlen_k != self.seqlen_q:
            seqlen += f"x{self.seqlen_k}"
        heads = f"H{self.num_heads_q}"
        if self.num_heads_kv != self.num_heads_q:
            heads += f"x{self.num_heads_kv}"
        return f"B{self.batch}_{seqlen}_{heads}_D{self.head_dim}_{'c' if self.is_causal else 'n'}"

    @property
    def flops(self) -> float:
        """Of a forward pass."""
        full = 4.0 * self.batch * self.num_heads_q * self.seqlen_q * self.seqlen_k * self.head_dim
        return full / 2 if self.is_causal else full


def square(
    batch: int, seqlen: int, heads: int, head_dim: int, is_causal: bool, group: int = 1
) -> Shape:
    """seqlen_q == seqlen_k; group query heads share a key head."""
    return Shape(batch, seqlen, seqlen, heads, heads // group, head_dim, is_causal)


def grid(
    head_dims: Iterable[int] = HEAD_DIMS,
    seqlens: Iterable[int] = SEQLENS,
    causal: Iterable[bool] = (False, True),
    *,
    tokens: int = TOKENS,
    hidden: int = HIDDEN,
    group: int = 1,
) -> list[Shape]:
    """Every combination, head_dim outermost; group query heads share a key head."""
    seqlens, causal = tuple(seqlens), tuple(causal)

    def heads(head_dim: int) -> int:
        return max(hidden // head_dim // group, 1) * group

    return [
        square(max(tokens // seqlen, 1), seqlen, heads(head_dim), head_dim, is_causal, group)
        for head_dim in head_dims
        for is_causal in causal
        for seqlen in seqlens
    ]


def headline(causal: Iterable[bool] = (False, True)) -> list[Shape]:
    """Batch 16, seqlen 8,192, 16 heads of 128."""
    return [square(16, 8192, 16, 128, is_causal) for is_causal in causal]
