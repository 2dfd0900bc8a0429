"""Repository @installed: headers and libraries of the Python packages and the CUDA toolkit here.

The Python is $JAX_FA3_PYTHON, else python3; it must have jaxlib and nanobind, and pytest for the
tests. nvcc is $CUDACXX, else the one on PATH, in $CUDA_HOME or in /usr/local/cuda.
$JAX_FA3_KERNELS_LIBRARY, when set, is an archive of the kernels to link instead of compiling them.
"""

_ASK_PYTHON = """
import importlib.util, sys, sysconfig
def folder(package):
    spec = importlib.util.find_spec(package)
    return spec.submodule_search_locations[0] if spec else ""
print(sys.executable)
print(sys._base_executable)
print("%d.%d" % sys.version_info[:2])
print(sysconfig.get_path("include"))
print(folder("jaxlib"))
print(folder("nanobind"))
"""

def _find_python(ctx):
    named = ctx.os.environ.get("JAX_FA3_PYTHON")
    python = named if named else ctx.which("python3")
    if not python:
        fail("jax_fa3: no python3 on PATH; set JAX_FA3_PYTHON.")
    asked = ctx.execute([python, "-P", "-c", _ASK_PYTHON])
    if asked.return_code:
        fail("jax_fa3: %s must be Python 3.11 or newer; it says: %s" % (python, asked.stderr))
    path, base, version, include, jaxlib, nanobind = asked.stdout.split("\n")[:6]
    for package, folder in [("jaxlib", jaxlib), ("nanobind", nanobind)]:
        if not folder:
            fail("jax_fa3: %s was not found for %s; install it there with pip." % (package, path))
    if not ctx.path(include + "/Python.h").exists:
        fail("jax_fa3: Python.h is not in %s; install the headers of Python." % include)
    return struct(
        path = path,
        base = base,
        stable_abi = int(version.split(".")[1]) >= 12,
        include = include,
        jaxlib = jaxlib,
        nanobind = nanobind,
    )

def _find_cuda(ctx):
    nvcc = ctx.os.environ.get("CUDACXX") or ctx.which("nvcc")
    for root in [ctx.os.environ.get("CUDA_HOME"), "/usr/local/cuda"]:
        if not nvcc and root and ctx.path(root + "/bin/nvcc").exists:
            nvcc = root + "/bin/nvcc"
    if not nvcc:
        fail("jax_fa3: no CUDA compiler was found; put nvcc 12.3 or newer on PATH or set CUDACXX.")

    # nvcc may be a script elsewhere: it knows where its toolkit is.
    dry = ctx.execute([nvcc, "--dryrun", "-x", "cu", "-c", "/dev/null", "-o", "/dev/null"])
    root = None
    for line in dry.stderr.split("\n"):
        if line.startswith("#$ TOP="):
            root = line[len("#$ TOP="):].strip()
    if not root:
        fail("jax_fa3: %s does not say where its toolkit is: %s" % (nvcc, dry.stderr))
    release = ctx.execute([root + "/bin/ptxas", "--version"]).stdout.strip()
    version = release.split("\n")[3].split(", V")[1] if ", V" in release else "unknown"
    for lib in ["lib64", "lib", "targets/x86_64-linux/lib"]:
        cudart = ctx.path("%s/%s/libcudart_static.a" % (root, lib))
        if cudart.exists:
            return struct(nvcc = nvcc, root = root, cudart = cudart, ptxas_version = version)
    fail("jax_fa3: libcudart_static.a is not in %s; install CUDA's runtime library." % root)

def _installed_impl(ctx):
    python = _find_python(ctx)
    cuda = _find_cuda(ctx)
    ctx.symlink(python.include, "python")
    ctx.symlink(python.nanobind, "nanobind")
    ctx.symlink(python.jaxlib + "/include/xla/ffi", "jaxlib/xla/ffi")
    ctx.symlink(cuda.root + "/include", "cuda/include")
    ctx.symlink(cuda.cudart, "cuda/libcudart_static.a")
    kernels = ctx.os.environ.get("JAX_FA3_KERNELS_LIBRARY", "")
    if kernels:
        if not ctx.path(kernels).exists:
            fail("jax_fa3: JAX_FA3_KERNELS_LIBRARY must be a libjax_fa3_kernels.a; %s does not exist." % kernels)
        ctx.symlink(kernels, "kernels/libjax_fa3_kernels.lo")
    ctx.file("facts.bzl", "\n".join([
        "KERNELS_LIBRARY = %r" % ("@installed//:kernels/libjax_fa3_kernels.lo" if kernels else ""),
        "NVCC = %r" % str(cuda.nvcc),
        "PTXAS_VERSION = %r" % cuda.ptxas_version,
        "EXTENSION = %r" % ("_ext.abi3.so" if python.stable_abi else "_ext.so"),
        "PYTHON = %r" % python.path,
        "ABI_DEFINES = %r" % (["Py_LIMITED_API=0x030C0000"] if python.stable_abi else []),
        "",
    ]))
    ctx.template("BUILD.bazel", Label("//bazel:installed.BUILD.tpl"), {"%{python}": python.base})

installed = repository_rule(
    implementation = _installed_impl,
    environ = ["JAX_FA3_PYTHON", "JAX_FA3_KERNELS_LIBRARY", "CUDACXX", "CUDA_HOME", "PATH"],
    local = True,
    doc = "What is installed here; see the top of this file.",
)
