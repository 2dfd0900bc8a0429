#!/usr/bin/env bash
# Builds the extension for one Python into jax_fa3/ of this source tree, for development.
#
#   scripts/build_inplace.sh [PYTHON] [-DNAME=VALUE ...]
#
# PYTHON (default: python3) must have jaxlib and nanobind. Objects stay in build/<version>, so that
# a second call is quick.
set -euo pipefail
cd "$(dirname "$0")/.."

python=python3
if [[ $# -gt 0 && $1 != -* ]]; then
  python=$1
  shift
fi
die() { echo "build_inplace: $1" >&2; exit 1; }
python=$(command -v "$python") || die "PYTHON must be a program; got $python."
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
"$python" -c 'import jaxlib, nanobind' || die "run '$python -m pip install jaxlib nanobind' first."

# Stable ABI needs CMake 3.26; a pip-installed one next to the Python is used when there is one.
cmake=$(dirname "$python")/cmake
[[ -x $cmake ]] || cmake=cmake
generator=()
command -v ninja >/dev/null && generator=(-G Ninja)

"$cmake" -S . -B "build/$version" "${generator[@]}" -DPython_EXECUTABLE="$python" "$@"
"$cmake" --build "build/$version" --parallel "${JAX_FA3_COMPILE_JOBS:-2}"
"$cmake" --install "build/$version" --prefix .
ls -l jax_fa3/_ext*.so
