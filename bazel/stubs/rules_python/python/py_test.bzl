"""The Python rule that this Bazel has built in."""

py_test = native.py_test
