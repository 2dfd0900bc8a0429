# Of repository @installed, written by //bazel:installed.bzl.
load("@rules_cc//cc:defs.bzl", "cc_library")
load("@rules_python//python:py_runtime.bzl", "py_runtime")
load("@rules_python//python:py_runtime_pair.bzl", "py_runtime_pair")
load(":facts.bzl", "ABI_DEFINES")

package(default_visibility = ["//visibility:public"])

exports_files(glob(
    ["kernels/*"],
    allow_empty = True,
))

cc_library(
    name = "python_headers",
    hdrs = glob(["python/**/*.h"]),
    defines = ABI_DEFINES,
    includes = ["python"],
)

cc_library(
    name = "xla_ffi",
    hdrs = glob(["jaxlib/**/*.h"]),
    includes = ["jaxlib"],
)

cc_library(
    name = "cudart",
    srcs = ["cuda/libcudart_static.a"],
    hdrs = glob([
        "cuda/include/**/*.h",
        "cuda/include/**/*.hpp",
    ]),
    includes = ["cuda/include"],
    linkopts = [
        "-ldl",
        "-lpthread",
        "-lrt",
    ],
)

cc_library(
    name = "nanobind",
    srcs = ["nanobind/src/nb_combined.cpp"],
    hdrs = glob(["nanobind/include/**/*.h"]),
    copts = [
        "-fno-strict-aliasing",
        "-fvisibility=hidden",
        "-Os",
        "-w",
    ],
    includes = ["nanobind/include"],
    local_defines = [
        "NB_BUILD",
        "NB_COMPACT_ASSERTIONS",
    ],
    textual_hdrs = glob([
        "nanobind/src/*.cpp",
        "nanobind/src/*.h",
        "nanobind/ext/robin_map/include/**/*.h",
    ]),
    deps = [
        ":python_headers",
        ":robin_map",
    ],
)

cc_library(
    name = "robin_map",
    hdrs = glob(["nanobind/ext/robin_map/include/**/*.h"]),
    includes = ["nanobind/ext/robin_map/include"],
)

py_runtime(
    name = "python_runtime",
    interpreter_path = "%{python}",
    python_version = "PY3",
    stub_shebang = "#!%{python}",
)

py_runtime_pair(
    name = "python_runtime_pair",
    py3_runtime = ":python_runtime",
)

toolchain(
    name = "python_toolchain",
    toolchain = ":python_runtime_pair",
    toolchain_type = "@rules_python//python:toolchain_type",
)
