#!/bin/sh
# nvcc_strict.sh NVCC ARGUMENT...: runs the compiler, shows only what it says beside the resources
# of each kernel, and fails where ptxas serialised wgmma or spilled registers of a tuned kernel.
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
"$@" >"$log" 2>&1
status=$?
grep -vE '^ptxas info|bytes stack frame|^ *$' "$log" >&2
if grep -E 'C7508|C7510|C7511|C7515' "$log" >&2; then
    echo "nvcc_strict: wgmma is serialised, or setmaxnreg ignored" >&2
    status=1
fi
exit $status
