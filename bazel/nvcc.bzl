"""cuda_library: kernels compiled by nvcc for Hopper, as CMake does it (cmake/kernels.cmake)."""

load("@installed//:facts.bzl", "KERNELS_LIBRARY", "NVCC", "PTXAS_VERSION")
load("@rules_cc//cc:defs.bzl", "cc_library")

_FLAGS = [
    "-gencode=arch=compute_90a,code=[sm_90a]",
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "-DJAX_FA3_PTXAS_VERSION='\"%s\"'" % PTXAS_VERSION,
    "-lineinfo",
    "--ptxas-options=-v",
    "-Werror=all-warnings",
    "-Xcompiler=-Wall,-Werror,-Wno-unknown-pragmas,-fPIC,-fvisibility=hidden,-fvisibility-inlines-hidden",
]

def cuda_library(name, srcs, hdrs, **kwargs):
    """A cc_library of the objects of srcs; the report of ptxas lies beside each object.

    With JAX_FA3_KERNELS_LIBRARY in the environment that archive is linked in place of the objects,
    which can still be built one by one.

    Args:
      name: of the library.
      srcs: .cu files, each compiled by itself.
      hdrs: what they include, from the root of the repository.
      **kwargs: passed to cc_library.
    """
    logged = "scripts/nvcc_logged.sh"
    objects = []
    for source in srcs:
        stem = source[:-len(".cu")]
        native.genrule(
            name = stem + "_nvcc",
            srcs = [source] + hdrs,
            outs = [stem + ".o", stem + ".ptxas.log"],
            cmd = " && ".join([
                "logs=$$(mktemp -d)",
                "sh $(location %s) $$logs %s %s -I. -c $(location %s) -o $(location %s.o)" %
                (logged, NVCC, " ".join(_FLAGS), source, stem),
                "cat $$logs/* > $(location %s.ptxas.log)" % stem,
            ]),
            message = "Compiling with nvcc",
            tools = [logged],
        )
        objects.append(stem + ".o")
    native.filegroup(
        name = name + "_ptxas_logs",
        srcs = [source[:-len(".cu")] + ".ptxas.log" for source in srcs],
    )
    cc_library(
        name = name,
        srcs = [KERNELS_LIBRARY] if KERNELS_LIBRARY else objects,
        hdrs = [header for header in hdrs if header.endswith(".h")],
        alwayslink = True,
        linkstatic = True,
        **kwargs
    )
