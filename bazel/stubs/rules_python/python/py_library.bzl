"""The Python rule that this Bazel has built in."""

py_library = native.py_library
