#!/usr/bin/env bash
# The tests that see most for their time, on the jax_fa3 that is installed in a venv.
#
#   scripts/smoke_test.sh VENV      VENV must have the test extra
set -euo pipefail
[[ $# -eq 1 ]] || { sed -n '4p' "$0" >&2; exit 2; }
venv=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."

export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
export PYTHONSAFEPATH=1  # the checkout must not shadow the installed package
"$venv/bin/pytest" -p no:cacheprovider -n 2 -m "not gpu" \
  tests/build/test_extension.py tests/build/test_import.py tests/rules/test_explain.py \
  tests/rules/test_lowering.py
