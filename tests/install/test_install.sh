#!/bin/sh
# Installs a build into a new prefix, moves it, and builds use.c against it with pkg-config, with
# pkg-config and the static library, and with find_package.
#   test_install.sh CMAKE BUILD_DIRECTORY COMPILER
set -eu
cmake=$1
build=$2
compiler=$3
here=$(cd "$(dirname "$0")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"$cmake" --install "$build" --prefix "$scratch/first"
mv "$scratch/first" "$scratch/moved"
prefix=$scratch/moved
PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name fdma.pc)")
export PKG_CONFIG_PATH
libdir=$(pkg-config --variable=libdir fdma)

echo "pkg-config, shared"
# shellcheck disable=SC2046 # words are wanted
"$compiler" -std=c11 -o "$scratch/shared" "$here/use.c" $(pkg-config --cflags --libs fdma) -lm \
    "-Wl,-rpath,$libdir"
"$scratch/shared"

echo "pkg-config, static"
# shellcheck disable=SC2046
"$compiler" -std=c11 -o "$scratch/static" $(pkg-config --cflags fdma) "$here/use.c" \
    "$libdir/libfdma.a" $(pkg-config --static --libs fdma | sed 's/-lfdma\b//')
"$scratch/static"

echo "the static library asks for threads, which glibc before 2.34 has in a library of their own"
if [ "$(uname)" = Linux ]; then
    pkg-config --static --libs fdma | grep -q -e -pthread
    grep -q -e 'INTERFACE_LINK_LIBRARIES.*-pthread' "$(find "$prefix" -name fdma-targets.cmake)"
fi

echo "the soname: with the minor version while the major one is 0"
number() { sed -n "s/^#define FDMA_VERSION_$1 //p" "$prefix/include/fdma.h"; }
compatible=$(number MAJOR)
[ "$compatible" != 0 ] || compatible=0.$(number MINOR)
readelf -d "$libdir/libfdma.so" | grep -q "soname: \[libfdma.so.$compatible\]"

echo "find_package"
"$cmake" -S "$here" -B "$scratch/package" -DCMAKE_PREFIX_PATH="$prefix" \
    -DCMAKE_C_COMPILER="$compiler" >/dev/null
"$cmake" --build "$scratch/package"
"$scratch/package/use_fdma"
"$scratch/package/use_fdma_static"
if readelf -d "$scratch/package/use_fdma_static" | grep libfdma; then
    echo "fdma::fdma_static links the shared library"
    exit 1
fi

echo "find_package of other versions"
has_version() {
    rm -rf "$scratch/versions"
    mkdir "$scratch/versions"
    printf '%s\n' "cmake_minimum_required(VERSION 3.22)" "project(versions LANGUAGES NONE)" \
        "find_package(fdma $1 REQUIRED)" >"$scratch/versions/CMakeLists.txt"
    "$cmake" -S "$scratch/versions" -B "$scratch/versions/build" -DCMAKE_PREFIX_PATH="$prefix" \
        >"$scratch/versions/log" 2>&1
}
has_version "$compatible"
for version in 0.1 "$(($(number MAJOR) + 1))" "$(number MAJOR).$(($(number MINOR) + 1))"; do
    if has_version "$version"; then
        echo "find_package(fdma $version) accepts $compatible"
        exit 1
    fi
done

echo "the installed command"
"$prefix/bin/fdma" info >/dev/null
[ "$("$scratch/shared")" = "$("$scratch/package/use_fdma")" ]

echo "its manual page, and completion of command lines"
grep -q '^.SS fdma attend$' "$prefix/share/man/man1/fdma.1"
bash -n "$prefix/share/bash-completion/completions/fdma"
[ -s "$prefix/share/zsh/site-functions/_fdma" ]
[ -s "$prefix/share/fish/vendor_completions.d/fdma.fish" ]
[ -s "$prefix/share/doc/fdma/LICENSE" ]
