# Sourced. find_python 3.11: prints the path of such a Python that can make a venv; fails without one.
find_python() {
  local candidate
  for candidate in "$(command -v "python$1" || true)" \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
    if [[ -x $candidate ]] && "$candidate" -c "
import ensurepip, sys, venv
sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "${0##*/}: Python $1 must be on PATH as python$1 or installed in pyenv." >&2
  return 1
}
