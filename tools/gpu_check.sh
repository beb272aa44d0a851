#!/bin/sh
# Checks and measures the CUDA backend on a machine with a GPU: builds for its architecture, runs the
# tests of CUDA kernels in C and in Python, compute-sanitizer, and the benchmarks against peers. It
# needs cmake, ninja, nvcc and a python3 with PyTorch and pytest, but no network and no cJSON.
#   gpu_check.sh [quick|full] --out DIR     quick: up to 9 minutes; full, the default: up to 20
# Prints a line for each step, runs every step even if one fails, and exits 1 if any failed. DIR gets
# log.txt, peers-cuda.json, peers-cuda.svg, peers-cuda-cases.svg, host_time-cuda.json, decode-cuda.json,
# streams-cuda.json, cuda.json and model-step-cuda.json (full), and tables.md.
# FDMA_COMMIT names the commit where there is no git.
set -u
length=full
out=
while [ $# -gt 0 ]; do
    case $1 in
    quick | full) length=$1 ;;
    --out)
        [ $# -gt 1 ] || { echo "gpu_check: --out needs a folder" >&2; exit 2; }
        out=$2
        shift
        ;;
    *)
        echo "gpu_check: '$1' is not quick, full or --out DIR" >&2
        exit 2
        ;;
    esac
    shift
done
[ -n "$out" ] || { echo "gpu_check: --out DIR is missing" >&2; exit 2; }
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
cd "$(dirname "$0")/.." || exit 2

log=$out/log.txt
build=build/gpu
passed=0
failed=0
: >"$log"

seconds() { date +%s; }

report() { # report WORD NAME SINCE TEXT
    printf '%-5s %-22s %4d s  %s\n' "$1" "$2" $(($(seconds) - $3)) "$4" | tee -a "$log"
}

step() { # step NAME SECONDS COMMAND...: logs the output and prints its last line
    name=$1
    limit=$2
    shift 2
    since=$(seconds)
    printf '\n== %s: %s\n' "$name" "$*" >>"$log"
    timeout -k 5 "$limit" "$@" >"$log.step" 2>&1
    status=$?
    cat "$log.step" >>"$log"
    last=$(grep -v '^ *$' "$log.step" | tail -n 1 | cut -c 1-110)
    rm -f "$log.step"
    if [ "$status" = 0 ]; then
        passed=$((passed + 1))
        report ok "$name" "$since" "$last"
    else
        failed=$((failed + 1))
        [ "$status" = 124 ] && last="longer than $limit s; $last"
        report FAIL "$name" "$since" "$last"
    fi
    return "$status"
}

skip() { # skip NAME REASON
    report skip "$1" "$(seconds)" "$2"
}

capability() { # of the first device, without the dot: 90
    nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d '. ' |
        grep . || python3 -c 'import torch; print("%d%d" % torch.cuda.get_device_capability(0))' \
        2>/dev/null
}

sanitize() { # sanitize NAME SECONDS TOOL FILTER OPTION...: runs fdma check FILTER under TOOL
    name=$1
    limit=$2
    tool=$3
    filter=$4
    shift 4
    step "$name" "$limit" compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 5 \
        "$build/fdma" check --device cuda "$filter" "$@"
}

# Adds the hash of the kernels, and FDMA_COMMIT if it is set, to the first line of FILE.
stamp() { # stamp FILE
    hash=$(python3 benchmarks/kernels_hash.py) || return 1
    sed -i "1s/^{/{\"kernels\": \"$hash\", /" "$1"
    [ -z "${FDMA_COMMIT:-}" ] || sed -i "1s/\"commit\": [^,}]*/\"commit\": \"$FDMA_COMMIT\"/" "$1"
}

tables() {
    for file in "$@"; do
        [ -s "$file" ] && { python3 benchmarks/bench.py table "$file" || return 1; }
        echo
    done >"$out/tables.md"
    wc -l "$out/tables.md"
}

tests="test_cuda test_cuda_lists test_cuda_select test_cuda_top test_cuda_short test_cuda_calls test_cuda_carried test_cuda_workspace
    test_cuda_score_backward"
# of any backend; see tests/c/backend.h
backend_tests="test_cases test_forward test_backward_shapes test_sequences test_cache
    test_cache_batch test_cache_long test_cache_store test_prefill test_streams test_stream_attention test_sink_logit
    test_probabilities test_rotate test_dropout test_masks test_mask_gradients"
begin=$(seconds)
arch=$(capability)
[ -n "$arch" ] || { echo "gpu_check: no CUDA device" >&2; exit 1; }
# shellcheck disable=SC2086 # lists of targets
step configure 60 cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DFDMA_CUDA=ON \
    "-DFDMA_CUDA_ARCHITECTURES=$arch" &&
    step build 300 cmake --build "$build" -j "$(nproc)" --target fdma_shared fdma_tool $tests \
        $backend_tests
[ "$failed" = 0 ] || { echo "gpu_check: not built, see $log" && exit 1; }

FDMA_LIBRARY=$PWD/$build/libfdma.so
PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH}
export FDMA_LIBRARY PYTHONPATH
export PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE=1

step info 20 "$build/fdma" info
step check 300 "$build/fdma" check --device cuda
for test in $tests; do
    step "$test" 200 "$build/tests/$test"
done
for test in $backend_tests; do
    step "$test" 200 "$build/tests/$test" cuda
done
step pytest 200 python3 -m pytest tests/python/test_cuda.py tests/python/test_attention.py \
    tests/python/test_backward.py tests/python/test_fused.py tests/python/test_compile.py \
    tests/python/test_cuda_cache.py tests/python/test_sequences.py -k cuda -q -p no:cacheprovider

if ! command -v compute-sanitizer >/dev/null; then
    skip sanitizer "compute-sanitizer is not installed"
elif ! timeout 30 compute-sanitizer --tool memcheck "$build/fdma" info >>"$log" 2>&1; then
    skip sanitizer "compute-sanitizer does not run on this machine"
else
    sanitize memcheck-window 45 memcheck window/
    sanitize racecheck-sm80 45 racecheck window/1 --kernel cuda/sm80
    if [ "$length" = full ]; then
        sanitize memcheck-padding 60 memcheck padding
        sanitize memcheck-row 60 memcheck row/
        sanitize memcheck-packed 60 memcheck packed/
        step memcheck-calls 90 compute-sanitizer --tool memcheck --error-exitcode 9 \
            --print-limit 5 --report-api-errors no "$build/tests/test_cuda_calls"
        sanitize racecheck-scores 45 racecheck scores/s --kernel cuda/sm80/d64
        # not of backward on 9.0: where one lane arrives at an mbarrier for its warp, after
        # __syncwarp(), racecheck does not see that the other lanes' reads come before
    fi
fi

# peers compiles the kernels of FlashAttention-4, if it is installed: about 10 s for each shape
if [ "$length" = quick ]; then
    step peers 210 python3 benchmarks/bench.py peers --device cuda --quick --json "$out/peers-cuda.json"
    step host_time 60 python3 benchmarks/bench.py host_time --quick --out "$out"
else
    step peers 420 python3 benchmarks/bench.py peers --device cuda --json "$out/peers-cuda.json"
    step host_time 60 python3 benchmarks/bench.py host_time --out "$out"
    step bench 100 "$build/fdma" bench --device cuda --json "$out/cuda.json" && stamp "$out/cuda.json"
fi
step decode 60 python3 benchmarks/bench.py decode --out "$out"
if [ "$length" = quick ]; then
    step streams 60 python3 benchmarks/bench.py streams --quick --out "$out"
else
    step streams 120 python3 benchmarks/bench.py streams --out "$out"
    step model_step 180 python3 benchmarks/bench.py model_step --out "$out" --modes eager --layouts h8g4d128 \
        --batches 1 --lengths 4096 65536 --contexts 4096 65536 --seconds 2
fi
if python3 -c 'import matplotlib' 2>/dev/null; then
    step picture 30 python3 benchmarks/bench.py picture "$out/peers-cuda.json" \
        --out "$out/peers-cuda.svg"
else
    skip picture "matplotlib is not installed"
fi
since=$(seconds)
if text=$(tables "$out/peers-cuda.json" "$out/host_time-cuda.json" "$out/decode-cuda.json" \
    "$out/streams-cuda.json" "$out/cuda.json" "$out/model-step-cuda.json" 2>&1); then
    report ok tables "$since" "$text"
else
    failed=$((failed + 1))
    report FAIL tables "$since" "$text"
fi
echo "gpu_check: $passed passed, $failed failed, $(($(seconds) - begin)) s"
[ "$failed" = 0 ]
