"""Graphs that a handler keeps, over a CUDA runtime that only writes down what it is asked for."""

import pytest

NOTHING = frozenset()
FAILED = 9  # cudaErrorInvalidConfiguration


@pytest.fixture
def graphs(host):
    return host.KeptGraphs()


def test_the_same_call_is_one_launch(graphs):
    assert graphs.run(7, [1, 2, 3], NOTHING) == (
        0,
        ["record", "make", "launch graph"],
        [1, 2, 3],
    )
    for _ in range(3):
        assert graphs.run(7, [1, 2, 3], NOTHING) == (0, ["launch graph"], [1, 2, 3])


def test_a_new_call_changes_the_graph_that_was_not_used_for_longest(graphs):
    most = graphs.most
    for key in range(most):
        assert "make" in graphs.run(key, [key], NOTHING)[1]
    graphs.run(0, [0], NOTHING)
    assert graphs.run(most, [most], NOTHING) == (0, ["record", "change", "launch graph"], [most])
    for key in (0, *range(2, most + 1)):  # 1 gave way
        assert graphs.run(key, [key], NOTHING) == (0, ["launch graph"], [key])
    assert graphs.run(1, [1], NOTHING) == (0, ["record", "change", "launch graph"], [1])


def test_graphs_of_one_form_give_way_to_each_other(graphs):
    for key in range(graphs.most):
        graphs.run(key, [key] * (1 + (key == 9)), NOTHING)
    made = ["record", "change", "launch graph"]
    assert graphs.run(90, [4, 5], NOTHING) == (0, made, [4, 5])  # in place of 9
    assert graphs.run(0, [0], NOTHING)[1] == ["launch graph"]
    anew = ["record", "destroy", "make", "launch graph"]
    assert graphs.run(91, [1, 2, 3], NOTHING) == (0, anew, [1, 2, 3])  # of 1


def test_clusters_of_a_graph_do_not_change(graphs):
    """CUDA may accept the change and launch the clusters that there were."""
    for key in range(graphs.most):
        graphs.run(key, [-1, 100 if key == 9 else 1], NOTHING)
    changed = ["record", "change", "launch graph"]
    assert graphs.run(90, [-1, 101], NOTHING) == (0, changed, [-1, 101])  # in place of 9
    assert graphs.run(91, [-1, 2], NOTHING) == (0, changed, [-1, 2])  # of 0
    anew = ["record", "destroy", "make", "launch graph"]
    assert graphs.run(92, [100, -1], NOTHING) == (0, anew, [100, -1])  # of 1
    for key, work in ((90, [-1, 101]), (91, [-1, 2]), (92, [100, -1])):
        assert graphs.run(key, work, NOTHING) == (0, ["launch graph"], work)


@pytest.mark.parametrize("refused", ["stream", "record", "end", "count", "attribute", "make"])
def test_a_refused_graph_leaves_the_launches(graphs, refused):
    status, asked, done = graphs.run(7, [1, 2], {refused})
    assert (status, done) == (0, [1, 2])
    assert "launch graph" not in asked
    assert graphs.run(7, [1, 2], NOTHING) == (0, ["record", "make", "launch graph"], [1, 2])


def test_a_graph_that_cannot_be_changed_is_made_anew(graphs):
    for key in range(graphs.most):
        graphs.run(key, [key], NOTHING)
    anew = ["record", "change", "destroy", "make", "launch graph"]
    assert graphs.run(90, [4], {"change"}) == (0, anew, [4])
    assert graphs.run(91, [5], NOTHING) == (0, ["record", "change", "launch graph"], [5])
    status, asked, done = graphs.run(92, [6], {"change", "make"})
    assert (status, asked, done) == (0, ["record", "change", "destroy", "make"], [6])
    assert graphs.run(92, [6], NOTHING) == (0, ["record", "make", "launch graph"], [6])


def test_a_failed_launch_is_the_calls(graphs):
    assert graphs.run(7, [1], {"launch"}) == (FAILED, ["record"], [])
    assert graphs.run(7, [1], NOTHING) == (0, ["record", "make", "launch graph"], [1])


def test_a_failed_graph_is_no_error_of_the_next_launch(graphs):
    status, *_ = graphs.run(7, [1], {"launch graph"})
    assert status != 0
    assert graphs.run(8, [2], {"make"})[::2] == (0, [2])


def test_a_failed_launch_is_no_error_of_the_next_one(host):
    """CUDA keeps an error until it is asked, and the next launch asks."""
    message, left = host.launched(FAILED)
    assert message.startswith("target: launch failed: why")
    assert left == 0
    assert host.launched(0) == ("", 0)


def test_long_and_recorded_calls_are_launched(host):
    assert host.launch_short(False, 7, [1, 2], NOTHING) == (0, [], [1, 2])
    assert host.launch_short(True, 7, [1, 2], {"not recording"}) == (0, [], [1, 2])
    assert host.launch_short(True, 7, [1, 2], {"ask"}) == (0, ["ask"], [1, 2])
    for asked in (["record", "make", "launch graph"], ["launch graph"]):
        assert host.launch_short(True, 7, [1, 2], NOTHING) == (0, asked, [1, 2])
