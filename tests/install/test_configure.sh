#!/bin/sh
# Configures the project as a user does who names nothing: with Makefiles, and with CUDA where nvcc
# is found.
#   test_configure.sh CMAKE SOURCE_DIRECTORY
set -eu
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$1" -S "$2" -B "$scratch" -G "Unix Makefiles"
[ -e "$scratch/Makefile" ]
# Nothing is built: ctest says so in a few lines, and does not search for every program.
said=$("$(dirname "$1")/ctest" --test-dir "$scratch" -N 2>&1 || true)
echo "$said" | grep "No test is built: cmake --build $scratch"
[ "$(echo "$said" | wc -l)" -lt 20 ]
