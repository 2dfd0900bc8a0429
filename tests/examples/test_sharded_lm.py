"""The sharded language model: the same losses on every mesh, and only the collectives it needs."""

import ast
import re
from pathlib import Path

import processes
import pytest

pytest.importorskip("flax", reason="needs the examples extra")
pytest.importorskip("optax", reason="needs the examples extra")

EXAMPLE = Path(__file__).parents[2] / "examples" / "sharded_lm.py"


def run_example(*flags):
    """(mesh, collectives, loss by step) that the example prints, run as a user would."""
    output = processes.output_of(EXAMPLE, "--cpu-devices", 8, *flags)
    mesh = re.search(r"^mesh: (\{.*\}) of ", output, flags=re.M)[1]
    found = re.search(r"^collectives of a step: (\{.*\})$", output, flags=re.M)[1]
    losses = re.findall(r"^step (\d+): loss ([0-9.]+)$", output, flags=re.M)
    return (
        ast.literal_eval(mesh),
        ast.literal_eval(found),
        {int(step): float(loss) for step, loss in losses},
    )


@pytest.mark.slow
def test_every_mesh_learns_the_same():
    mesh, found, losses = run_example("--mesh", "2,1,4", "--steps", "11", "--precision", "native")
    assert mesh == {"data": 2, "sequence": 1, "model": 4}
    # Sums of gradients and of partial products; attention itself moves nothing.
    assert set(found) == {"all-reduce"}
    assert losses[0] > 4.8  # 128 symbols: log(128) = 4.85 is to know nothing
    assert losses[10] < 3.8

    mesh, found, split = run_example("--mesh", "2,2,2", "--steps", "11")
    assert mesh == {"data": 2, "sequence": 2, "model": 2}
    assert set(found) == {"all-reduce", "collective-permute"}
    assert split == pytest.approx(losses, abs=0.02)


def test_a_bad_mesh_is_refused():
    with pytest.raises(AssertionError, match="must be DATA,SEQUENCE,MODEL; got 2,4"):
        run_example("--mesh", "2,4")
