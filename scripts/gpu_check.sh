#!/usr/bin/env bash
# Checks everything that needs a Hopper GPU and writes one result file.
#
#   scripts/gpu_check.sh [--python PYTHON] [--no-build] [--out FILE] [--dry-run]
#                        [--skip PHASE,...] [--only PHASE,...] [--limit PHASE=SECONDS ...]
#                        [--turn SECONDS] [--rivals LIST] [--logs FOLDER]
#                        [--grid "FLAGS"] [--gradients "FLAGS"] [--errors "FLAGS"]
#
# Phases, in order:
#   build      pip install of this checkout with its kernels (left out by --no-build: then the
#              installed package counts, or else an extension built into the source tree)
#   selfcheck  python -m jax_fa3
#   tests      pytest -m gpu
#   memcheck, racecheck, synccheck   compute-sanitizer on tests/gpu/sanitize_shapes.py
#   speed      benchmarks/bench_attention.py
#   gradients  benchmarks/bench_backward.py
#   accuracy   benchmarks/accuracy.py
#
# --limit   time limit of a phase; a phase beyond it counts as failed (default below)
# --turn    length of one timed turn (default 0.15: about seven minutes of GPU time for the grid)
# --grid    more flags for benchmarks/bench_attention.py, --gradients for benchmarks/bench_backward.py,
#           --errors for benchmarks/accuracy.py: parts of the grid when time is short
# --out     default benchmarks/results/gpu_check.json
# --logs    default build/gpu_check; what is in it is removed
# --dry-run runs what a machine without a GPU can: tiny sizes, XLA path, no sanitizer, tests listed
#
# PYTHON (default python3) needs the test extra; fa3-fwd with torch adds rivals. Relative paths start
# at the checkout. Exit code: 0 when every phase that was not skipped passed, 2 for bad usage.
set -euo pipefail
cd "$(dirname "$0")/.."

phases=(build selfcheck tests memcheck racecheck synccheck speed gradients accuracy)
declare -A limit=([build]=1200 [selfcheck]=180 [tests]=900 [memcheck]=600 [racecheck]=600
  [synccheck]=600 [speed]=900 [gradients]=600 [accuracy]=600)
python=python3
out=benchmarks/results/gpu_check.json
work=build/gpu_check
turn=0.15
grid=()
gradients=()
errors=()
rivals=cudnn,cudnn_fp8,fa3,fa3_fp8
skip=,
only=
dry=()
command="scripts/gpu_check.sh ${*@Q}"

usage() { sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "scripts/gpu_check.sh"; }
die() { echo "gpu_check: $1" >&2; exit 2; }
known() { [[ " ${phases[*]} " == *" $1 "* ]] || die "there is no phase '$1' (${phases[*]})."; }
known_all() { local name; for name in ${1//,/ }; do known "$name"; done; }

while [[ $# -gt 0 ]]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --no-build) skip+=build, ; shift; continue ;;
    --dry-run) dry=(--dry-run); shift; continue ;;
    --python | --skip | --only | --limit | --turn | --out | --rivals | --logs | --grid | --gradients | \
      --errors)
      [[ $# -ge 2 ]] || die "$1 needs a value." ;;
    *) die "there is no flag '$1'; see --help." ;;
  esac
  case $1 in
    --python) python=$2 ;;
    --skip) known_all "$2"; skip+=$2, ;;
    --only) known_all "$2"; only=,$2, ;;
    --limit)
      known "${2%%=*}"
      [[ $2 =~ ^[a-z]+=[1-9][0-9]*$ ]] || die "--limit must be PHASE=SECONDS; got $2."
      limit[${2%%=*}]=${2#*=} ;;
    --turn) turn=$2 ;;
    --out) out=$2 ;;
    --rivals) rivals=$2 ;;
    --logs) work=$2 ;;
    --grid) read -ra grid <<<"$2" ;;
    --gradients) read -ra gradients <<<"$2" ;;
    --errors) read -ra errors <<<"$2" ;;
  esac
  shift 2
done
python=$(command -v "$python") || die "--python must be a program."

rm -rf "$work"
mkdir -p "$work"
: >"$work/phases.tsv"

# ---- phases --------------------------------------------------------------------------------------
# Each phase_NAME sets `argv` to what it runs; an empty argv with `missing` set means it cannot run.
phase_build() {
  argv=(env JAX_FA3_CUDA=ON "$python" -m pip install --no-deps --force-reinstall .)
}
phase_selfcheck() { argv=("$python" -m jax_fa3); }
phase_tests() {
  argv=("$python" -m pytest -m gpu -q -p no:cacheprovider)
  if [[ ${#dry[@]} -gt 0 ]]; then argv+=(--collect-only); fi
}
sanitize() {
  local program=("$python" tests/gpu/sanitize_shapes.py "${dry[@]}") tool
  if [[ ${#dry[@]} -gt 0 ]]; then
    argv=("${program[@]}" --head-dims 64)
    return
  fi
  tool=$(command -v compute-sanitizer || true)
  [[ -n $tool || ! -x ${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer ]] ||
    tool=${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer
  if [[ -z $tool ]]; then
    missing="compute-sanitizer is neither on PATH nor in CUDA_HOME/bin"
    return
  fi
  # Command buffers hide kernels from the tools.
  argv=(env "XLA_FLAGS=${XLA_FLAGS:-} --xla_gpu_enable_command_buffer=" "$tool" --tool "$1"
    --error-exitcode 9 --print-limit 20 "${program[@]}")
}
phase_memcheck() { sanitize memcheck; }
phase_racecheck() { sanitize racecheck; }
phase_synccheck() { sanitize synccheck; }
phase_speed() {
  argv=("$python" benchmarks/bench_attention.py --seconds "$turn" --rivals "$rivals"
    --json "$work/speed.json" "${grid[@]}" "${dry[@]}")
}
phase_gradients() {
  argv=("$python" benchmarks/bench_backward.py --seconds "$turn" --json "$work/gradients.json"
    "${gradients[@]}" "${dry[@]}")
}
phase_accuracy() {
  argv=("$python" benchmarks/accuracy.py --rivals "$rivals" --json "$work/accuracy.json"
    "${errors[@]}" "${dry[@]}")
}

# detail NAME: what the summary says about a phase; the last line that counts something.
detail() {
  local log=$work/$1.log
  case $1 in
    memcheck | racecheck | synccheck)
      grep -hE '(ERROR|RACECHECK) SUMMARY|calls, [0-9]+ wrong' "$log" | tr '\n' ' ' ;;
    *) grep -v '^[[:space:]]*$' "$log" | tail -n 1 ;;
  esac | tr '\t' ' ' | cut -c 1-200
}

run_phase() {  # run_phase NAME
  local name=$1 status=passed start=$SECONDS code=0 text=""
  if [[ $skip == *",$name,"* || (-n $only && $only != *",$name,"*) ]]; then
    printf '%s\tskipped\t0\t\n' "$name" >>"$work/phases.tsv"
    return
  fi
  argv=()
  missing=""
  "phase_$name"
  if [[ ${#argv[@]} -eq 0 ]]; then
    echo "== $name: cannot run: $missing"
    printf '%s\tmissing\t0\t%s\n' "$name" "$missing" >>"$work/phases.tsv"
    return
  fi
  echo "== $name (at most ${limit[$name]} s)"
  timeout --kill-after=20 "${limit[$name]}" "${argv[@]}" >"$work/$name.log" 2>&1 || code=$?
  case $code in
    0) ;;
    124 | 137) status=timeout ;;
    *) status=failed ;;
  esac
  [[ $status == passed ]] || tail -n 30 "$work/$name.log"
  text=$(detail "$name" || true)
  printf '%s\t%s\t%s\t%s\n' "$name" "$status" "$((SECONDS - start))" "$text" >>"$work/phases.tsv"
}

# With --no-build the installed package is meant; without one, the source tree.
if [[ $skip == *,build,* ]] &&
  ! (cd "$work" && env -u PYTHONPATH "$python" -c 'import jax_fa3' 2>/dev/null); then
  export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
fi
# `python -m` must not find the source tree before the installed package.
export PYTHONSAFEPATH=1
for name in "${phases[@]}"; do
  # Programs of benchmarks/ import their neighbours, so they may see their own folder.
  if [[ $name == speed || $name == gradients || $name == accuracy ]]; then unset PYTHONSAFEPATH; fi
  run_phase "$name"
done

# ---- one file and a summary ----------------------------------------------------------------------
files=()
for file in "$work/speed.json" "$work/gradients.json" "$work/accuracy.json"; do
  [[ -f $file ]] && files+=("$file")
done
"$python" benchmarks/collect.py "${files[@]}" --phases "$work/phases.tsv" --command "$command" \
  --out "$out" || { echo "gpu_check: the result file could not be written" >&2; exit 1; }

echo
awk -F'\t' '{ printf "%-10s %-8s %5s s  %s\n", $1, $2, $3, $4 }' "$work/phases.tsv"
if bad=$(awk -F'\t' '$2 != "passed" && $2 != "skipped" { printf " %s", $1 }' "$work/phases.tsv") &&
  [[ -n $bad ]]; then
  echo "gpu_check: NOT ok:$bad"
  exit 1
fi
echo "gpu_check: ok"
