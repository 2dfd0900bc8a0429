"""The training example reaches the accuracy that it is there to show."""

import re
from pathlib import Path

import processes
import pytest

pytest.importorskip("sklearn", reason="needs the examples extra")
pytest.importorskip("optax", reason="needs the examples extra")
pytest.importorskip("tqdm", reason="needs the examples extra")

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits_transformer.py"


def run_example(*flags):
    """What the example prints, run as a user would on the jax_fa3 under test."""
    return processes.output_of(EXAMPLE, *flags)


def accuracy_of(output):
    return float(re.search(r"^test accuracy: ([0-9.]+) %$", output, flags=re.M)[1])


@pytest.mark.slow
def test_fp8_training_passes_95_percent():
    output = run_example()
    assert accuracy_of(output) > 95.0
    assert "attention runs: " in output
    assert "quantisation: e4m3" in output


def test_an_untrained_model_does_not():
    """The accuracy comes from training: this is what the test above must tell apart."""
    output = run_example("--steps", "0", "--precision", "native")
    assert accuracy_of(output) < 50.0
    assert "quantisation: none" in output
