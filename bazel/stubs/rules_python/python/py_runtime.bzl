"""The Python rule that this Bazel has built in."""

py_runtime = native.py_runtime
