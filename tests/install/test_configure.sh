#!/bin/sh
# Configures the project as a user does who names nothing: with Makefiles, and with CUDA where nvcc
# is found.
#   test_configure.sh CMAKE SOURCE_DIRECTORY
set -eu
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$1" -S "$2" -B "$scratch" -G "Unix Makefiles"
[ -e "$scratch/Makefile" ]
