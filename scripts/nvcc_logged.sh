#!/bin/sh
# nvcc_logged.sh LOG_DIR NVCC ARGS...: runs nvcc, keeps what ptxas reports in LOG_DIR, one file per
# object, and fails on the ptxas advisories that mean a kernel does not run as written.
# CMake uses it as the CUDA compiler launcher.
set -u
log_dir=$1
shift

object=
previous=
for argument in "$@"; do
  [ "$previous" = "-o" ] && object=$argument
  previous=$argument
done
if [ -z "$object" ]; then
  exec "$@"
fi

mkdir -p "$log_dir"
# The log's name holds the path seen from the source root: two folders may hold files of one name.
log=$log_dir/$(echo "${object##*.dir/}" | tr / _).ptxas.log
"$@" 2>"$log"
status=$?

# Pass on what a person should read: everything but the register report, which stays in the log.
grep -vE '^ptxas info|^ *[0-9]+ bytes stack frame|^$' "$log" >&2

if [ "$status" -eq 0 ] && grep -qE 'C75(08|10|11|12|13|14|15)' "$log"; then
  echo "nvcc_logged: $(basename "$object"): ptxas serialised wgmma or ignored setmaxnreg:" >&2
  grep -E 'C75(08|10|11|12|13|14|15)' "$log" >&2
  rm -f "$object"
  exit 1
fi
exit "$status"
