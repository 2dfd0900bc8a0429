"""Who takes further turns where a ratio is near its floor."""

from __future__ import annotations

import argparse
import importlib

import pytest
from cli.helpers import BENCHMARKS

from jax_fa3._cli import contenders, grid
from jax_fa3._cli.contenders import Contender
from jax_fa3._cli.timing import Turns

OURS = Contender("jax_fa3", "bf16", None, False, lambda _: None)
FA3 = Contender("fa3", "bf16", None, False, lambda _: None)
CUDNN = Contender("cudnn", "bf16", None, False, lambda _: None)
SHAPE = grid.square(8, 2048, 16, 128, True)  # at least 1.0 over fa3, nothing over cudnn


@pytest.fixture
def rule(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("contested")


def rounds_taken(rule, ratios, most=45, group=(OURS, FA3, CUDNN), **more):
    """Rounds of ours with fa3, whose ratios come over and over; and of everyone else."""
    flags = argparse.Namespace(regime="sustained", contested=most, **more)
    ask = rule.more_rounds(flags, "fwd")(SHAPE, list(group))
    turns = {one.label: Turns() for one in group}
    names = list(turns)
    taken = 0
    while names:
        for _ in range(4 if taken else 5):
            for name in names:
                is_fa3 = name == FA3.label
                turns[name].ms.append(ratios[taken % len(ratios)] if is_fa3 else 1.0)
            taken += 1
        names = ask(contenders.Comparison(turns, {}))
        assert taken <= 100
    return [len(own.ms) for own in turns.values()]


@pytest.mark.parametrize(
    ("ratios", "rounds"),
    [
        ([1.03], 5),  # not near
        ([0.97], 5),
        ([1.03, 1.0, 1.06, 1.03, 1.01], 17),  # not near, nor to be told from the floor
        ([1.01], 9),  # near and clear
        ([0.99], 9),
        ([0.98, 1.0, 1.02, 1.0, 1.0, 0.99, 1.01], 41),  # unclear until it is known to 0.3 %
        ([1.0, 0.95, 1.05, 0.97, 1.03], 45),  # unclear to the end
    ],
)
def test_two_go_on_until_it_is_clear(rule, ratios, rounds):
    ours, fa3, cudnn = rounds_taken(rule, ratios)
    assert (ours, fa3, cudnn) == (rounds, rounds, 5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("seqlen", "goal"), [(8192, 0.92), (4096, 0.85)])
def test_what_quantising_leaves_of_the_kernel_goes_on_too(rule, seqlen, goal, is_causal):
    alone, whole = (
        Contender("jax_fa3", "fp8", "accurate", with_quantize, lambda _: None)
        for with_quantize in (False, True)
    )
    flags = argparse.Namespace(regime="sustained", contested=45)
    for group in (1, 8):
        shape = grid.square(16_384 // seqlen, seqlen, 16, 128, is_causal, group)
        for share, goes_on in ((goal - 0.004, True), (goal - 0.03, False)):
            turns = {alone.label: Turns([share] * 5), whole.label: Turns([1.0] * 5)}
            ask = rule.more_rounds(flags, "fwd")(shape, [alone, whole])
            named = ask(contenders.Comparison(turns, {}))
            assert named == ([alone.label, whole.label] if goes_on else [])


def test_most_rounds_is_a_flag(rule):
    assert rounds_taken(rule, [1.0, 0.95, 1.05, 0.97, 1.03], most=12) == [13, 13, 5]
    assert rounds_taken(rule, [1.0], most=1) == [5, 5, 5]


def test_a_rival_that_did_not_run_is_no_reason(rule):
    assert rounds_taken(rule, [1.0], group=(OURS, CUDNN)) == [5, 5]


def test_who_left_does_not_come_back(rule):
    flags = argparse.Namespace(regime="sustained", contested=45)
    ask = rule.more_rounds(flags, "fwd")(SHAPE, [OURS, FA3])
    far, near = Turns([1.1] * 5), Turns([1.0] * 5)
    assert ask(contenders.Comparison({OURS.label: near, FA3.label: far}, {})) == []
    assert ask(contenders.Comparison({OURS.label: near, FA3.label: near}, {})) == []


def test_a_fixed_order_has_a_floor_over_the_default(rule):
    ordered = Contender("jax_fa3", "bf16", "deterministic", False, lambda _: None)
    flags = argparse.Namespace(regime="sustained", contested=45)
    shape = grid.square(1, 16_384, 32, 64, False)
    ask = rule.more_rounds(flags, "bwd")(shape, [OURS, ordered, CUDNN])
    turns = {OURS.label: Turns([1.0] * 5), ordered.label: Turns([1.24] * 5)}
    turns[CUDNN.label] = Turns([1.21] * 5)
    done = contenders.Comparison(turns, {})
    assert ask(done) == [OURS.label, ordered.label, CUDNN.label]
