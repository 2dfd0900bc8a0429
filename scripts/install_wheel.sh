#!/usr/bin/env bash
# Installs a wheel of jax_fa3 into a new venv and runs the self-check there, as a user would.
#
#   scripts/install_wheel.sh VENV PYTHON WHEEL [REQUIREMENT ...]
#
# A REQUIREMENT (jax==0.10.2) goes into the same install; the test extra does too. VENV is made anew,
# and stays. Needs uv on PATH (extra 'dev').
set -euo pipefail
[[ $# -ge 3 ]] || { sed -n '4p' "$0" >&2; exit 2; }
venv=$1 python=$2 wheel=$3
shift 3

uv venv --quiet --clear --python "$python" "$venv"
uv pip install --quiet --python "$venv/bin/python" "${wheel}[test]" "$@"
uv pip check --python "$venv/bin/python"

export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
cd "$venv"
bin/python -P -m jax_fa3
