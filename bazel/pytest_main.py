"""Runs pytest on the arguments, inside a py_test."""

import importlib.util
import os
import sys
from pathlib import Path

# Bazel starts the Python below a venv, or a venv of its own: go to the one that has the packages.
if python := os.environ.pop("JAX_FA3_PYTHON", None):
    os.environ["PYTHONPATH"] = str(Path(__file__).absolute().parents[1])
    os.execv(python, [python, "-P", __file__, *sys.argv[1:]])

import pytest

# A jax_fa3 that is installed in the same Python must not be tested in place of what Bazel built.
package = importlib.util.find_spec("jax_fa3").origin
if not package.startswith(os.environ["TEST_SRCDIR"]):
    sys.exit(f"jax_fa3 must come from {os.environ['TEST_SRCDIR']}; it comes from {package}")
# Bazel gives every test a folder of its own, and no home.
os.environ.setdefault("HOME", os.environ["TEST_TMPDIR"])
sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]]))
