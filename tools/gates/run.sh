#!/bin/sh
# Runs the gates: what guards the form of the code. A line a gate, all of them whatever fails, the
# exit status 1 if any did. Each gate's full output is in build/gates/NAME.log.
#   run.sh [FUZZ_SECONDS]    how long each fuzzer runs; 30 by default
set -u
cd "$(dirname "$0")/../.." || exit 1
fuzz_seconds=${1:-30}
jobs=$(nproc)
logs=build/gates
python=.venv/bin/python
passed=0
failed=0
mkdir -p "$logs"

reason() { # reason LOG: the line that says most
    grep -iE 'error|fail|crash|[1-9][0-9]* (against|too|differences|mistakes)' "$1" |
        grep -v 'Errors while running CTest' | tail -n 1 | sed 's/^[[:space:]]*//' | cut -c 1-160
}

gate() { # gate NAME COMMAND...
    name=$1
    shift
    if "$@" >"$logs/$name.log" 2>&1; then
        echo "ok    $name"
        passed=$((passed + 1))
    else
        echo "FAIL  $name: $(reason "$logs/$name.log") ($logs/$name.log)"
        failed=$((failed + 1))
    fi
}

build() { # build DIRECTORY CMAKE_OPTION...: everything, with warnings as errors
    directory=build/gates/$1
    shift
    cmake -S . -B "$directory" -G Ninja -DFDMA_WERROR=ON "$@" &&
        cmake --build "$directory" -j "$jobs"
}

c_tests() { # c_tests DIRECTORY
    ctest --test-dir "$1" --output-on-failure --no-tests=error -j "$jobs"
}

clang_tests() {
    build clang -DCMAKE_C_COMPILER=clang -DCMAKE_BUILD_TYPE=Release && c_tests build/gates/clang
}

sanitized_tests() {
    cmake --preset asan && cmake --build --preset asan -j "$jobs" &&
        OMP_NUM_THREADS=2 c_tests build/asan
}

header_alone() {
    for compiler in gcc clang; do
        "$compiler" -std=c11 -pedantic -Wall -Wextra -Werror -fsyntax-only -x c include/fdma.h ||
            return 1
    done
    for compiler in g++ clang++; do
        "$compiler" -std=c++11 -pedantic -Wall -Wextra -Werror -fsyntax-only -x c++ \
            include/fdma.h || return 1
    done
}

build_fuzzers() {
    build fuzz -DCMAKE_C_COMPILER=clang -DCMAKE_BUILD_TYPE=RelWithDebInfo -DFDMA_OPENMP=OFF \
        -DFDMA_FUZZ=ON -DFDMA_BUILD_TOOLS=OFF "-DFDMA_SANITIZE=address;undefined"
}

fuzz() { # fuzz NAME: from the kept inputs, into a scratch corpus; a crash leaves its input behind
    scratch=build/gates/fuzz/corpus_$1
    mkdir -p "$scratch"
    if ! "build/gates/fuzz/tests/fuzz_$1" -max_total_time="$fuzz_seconds" -timeout=10 \
        -rss_limit_mb=4096 -print_final_stats=1 -artifact_prefix="$scratch/../$1-" \
        "$scratch" "tests/fuzz/corpus/$1"; then
        echo "fuzz_$1 crashed: fix it and keep build/gates/fuzz/$1-* in tests/fuzz/corpus/$1"
        return 1
    fi
}

gate format tools/gates/format.sh
gate arrows_find_plants "$python" tools/gates/check_arrows.py --self-test
gate arrows "$python" tools/gates/check_arrows.py
gate sizes_find_plants "$python" tools/gates/check_sizes.py --self-test
gate sizes "$python" tools/gates/check_sizes.py
gate symbols_find_plants "$python" tools/gates/check_symbols.py --self-test
gate symbols "$python" tools/gates/check_symbols.py build/libfdma.so
gate header header_alone
echo "      compiling with gcc and clang, and running the C tests of clang's build"
gate gcc build gcc -DCMAKE_C_COMPILER=gcc -DCMAKE_BUILD_TYPE=Release
gate clang clang_tests
echo "      running the C tests under the address and undefined behaviour sanitizers"
gate sanitizers sanitized_tests
echo "      fuzzing, $fuzz_seconds seconds each"
gate fuzz_build build_fuzzers
gate fuzz_safetensors fuzz safetensors
gate fuzz_arguments fuzz arguments

echo "gates: $passed passed, $failed failed"
[ "$failed" = 0 ]
