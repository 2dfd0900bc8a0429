"""Module extension for MODULE.bazel; a file of its own, since earlier Bazels do not know the word."""

load(":installed.bzl", "installed")

def _impl(module_ctx):  # buildifier: disable=unused-variable
    installed(name = "installed")

installed_extension = module_extension(implementation = _impl)
