"""Goals of the design notes beside what result files hold."""

from __future__ import annotations

import importlib

import pytest
from cli.helpers import BENCHMARKS


def row(**fields):
    return {
        "kind": "fwd", "impl": "jax_fa3", "precision": "fp8", "preset": "accurate", "batch": 2,
        "seqlen_q": 8192, "seqlen_k": 8192, "num_heads_q": 16, "num_heads_kv": 2, "head_dim": 128,
        "is_causal": True, "regime": "sustained", "with_quantize": False, "ratio": {}, **fields,
    }  # fmt: skip


@pytest.fixture
def goals(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("goals")


def test_goals_stand_beside_what_was_reached(goals):
    square = {"num_heads_kv": 16}
    step = {"kind": "step", "with_quantize": True, **square}
    rows = [
        row(ratio={"cudnn_fp8": 1.5, "fa3_fp8": 1.304}, **square),
        row(ratio={"fa3_fp8": 1.2}, seqlen_q=4096, seqlen_k=4096, batch=4, **square),
        row(ratio={"fa3_fp8": 1.296}, is_causal=False, **square),
        row(ratio={"fa3_fp8": 9.0}, regime="burst", **square),
        row(ratio={"fa3_fp8": 9.0}),  # grouped heads
        row(ratio={"fa3_fp8": 9.0}, preset="fast", **square),
        row(ratio={"fa3_fp8": 1.1}, batch=16, **square),
        row(ratio={"cudnn": 1.3, "fa3jax": 1.12}, **step),
        row(ratio={"cudnn": 1.4, "fa3jax": 1.2}, preset="fast", **step),  # has no goal
        row(ratio={"kernel": 0.95}, with_quantize=True),
    ]
    forward = goals.goals_table("forward", rows).splitlines()
    long, large = (line.split(" | the faster rival | 1.1 | 1.3 | ") for line in forward[2:])
    assert long == ["| FP8 D=128, 4k and longer", "1.296 | 1.200 to 1.304 | 1 of 3 |"]
    assert large == ["| FP8 D=128, batch 16, 8k", "- | 1.100 | 0 of 1 |"]
    backward = goals.goals_table("backward", rows)
    assert "8k | flash-attn3-jax | 1.15 | 1.15 | - | 1.120 | 0 of 1 |" in backward
    assert "8k | cuDNN | 1.3 | 1.3 | - | 1.300 | 1 of 1 |" in backward
    quantiser = goals.goals_table("quantiser", rows)
    assert "8 query heads to a key head | the kernel alone | - | 0.92 | - | 0.950 |" in quantiser
    assert goals.goals_table("quantiser", rows[:1]) == ""


def test_what_a_fixed_order_costs_is_taken_shape_by_shape(goals):
    own = {"kind": "bwd", "precision": "bf16"}
    ordered = {**own, "preset": "deterministic"}
    rows = [
        row(**own, preset=None, ratio={"cudnn": 1.3}),
        row(**ordered, ratio={"cudnn": 1.3, "default": 0.8}),
        row(**ordered, ratio={"default": 0.9}),  # the same shape again, beside other rivals
        row(**ordered, ratio={"cudnn": 1.3}, seqlen_q=4096),  # without the default
        row(**ordered, ratio={"default": 0.88}, is_causal=False),
        {"kind": "soak"},
    ]
    lines = goals.order_table(rows).splitlines()
    assert lines[2:] == ["| 128 | 1.136 | 1.250 |"]
    assert goals.order_table(rows[:1] + rows[3:4]) == ""


def test_floors_of_a_row(goals):
    square = {"num_heads_kv": 16}
    fp8 = {"cudnn_fp8": 1.5, "fa3_fp8": 1.1}
    assert goals.floors(row(ratio=fp8, **square)) == {"cudnn_fp8": 1.1, "fa3_fp8": 1.1}
    assert goals.floors(row(ratio=fp8)) == {}  # grouped heads
    bwd = {"kind": "bwd", "precision": "bf16", **square}
    both = {"cudnn": 1.3, "fa3jax": 1.0}
    assert goals.floors(row(preset=None, ratio=both, **bwd)) == {"fa3jax": 1.0}
    ordered = {"preset": "deterministic", "ratio": {**both, "default": 0.9}, **bwd}
    assert goals.floors(row(**ordered)) == {"default": 0.8}
    assert goals.floors(row(head_dim=256, **ordered)) == {}
