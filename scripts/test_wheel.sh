#!/usr/bin/env bash
# Installs jax_fa3 into a new venv and tests it there as a user's machine would: the imports, the
# self-check, and the tests that see most for their time.
#
#   scripts/test_wheel.sh VENV PYTHON WHAT [REQUIREMENT ...]
#
# WHAT is a wheel or "." for these sources; a REQUIREMENT (jax==0.10.2) goes into the same install.
# VENV is made anew, and stays.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ $# -ge 3 ]] || { sed -n '5p' "$0" >&2; exit 2; }
venv=$1 python=$2 what=$3
shift 3

"$python" -m venv --clear "$venv"
"$venv/bin/python" -m pip install --quiet --upgrade pip
"$venv/bin/python" -m pip install --quiet "${what}[test]" "$@"
"$venv/bin/python" -m pip check

export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
export PYTHONSAFEPATH=1  # the checkout must not shadow the installed package
(cd "$venv" && bin/python -m jax_fa3)
"$venv/bin/pytest" -p no:cacheprovider -n 2 -m "not gpu" \
  tests/build/test_extension.py tests/build/test_import.py tests/rules/test_explain.py \
  tests/rules/test_lowering.py
