#!/bin/sh
# nvcc_strict.sh [--no-spills] NVCC ARGUMENT...: runs the compiler and shows its output, except for
# the resources of each kernel. A release build fails where ptxas serialised wgmma or ignored
# setmaxnreg (debug builds, which trap in every wait, may); with --no-spills also where it spilled
# registers.
no_spills=
if [ "$1" = --no-spills ]; then
    no_spills=1
    shift
fi
case " $* " in
    *" -DNDEBUG "*) release=1 ;;
    *) release= ;;
esac
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
"$@" >"$log" 2>&1
status=$?
grep -vE '^ptxas info|bytes stack frame|^ *$' "$log" >&2
if [ -n "$release" ] && grep -E 'C75(08|1[0-5]|20)' "$log" >&2; then
    echo "nvcc_strict: error: wgmma is serialised, or setmaxnreg ignored" >&2
    status=1
fi
if [ -n "$no_spills" ] && grep -q 'Registers are spilled' "$log"; then
    echo "nvcc_strict: error: registers are spilled" >&2
    status=1
fi
exit $status
