/* Finds packed sequences (sequences.cuh), on any device from compute capability 8.0. */
#include "core/integers.h"
#include "cuda/device/host.cuh"
#include "cuda/device/ptx.cuh"

static constexpr int clamp_threads = 1024;
static constexpr int clamp_warps = clamp_threads / 32;
static constexpr int range_threads = 256;

__device__ static int32_t most_of_lower_lanes(int32_t value) {
    const int lane = threadIdx.x % 32;
    for (int step = 1; step < 32; step *= 2) {
        const int32_t lower = __shfl_up_sync(~0u, value, step);
        value = lane >= step ? max(value, lower) : value;
    }
    return value;
}

/* One thread block clamps all starts, clamp_threads of them at a time. */
static __global__ void __launch_bounds__(clamp_threads)
    clamp_starts(const int32_t *starts, const packed_sequences sequences, int32_t kv_len) {
    __shared__ int32_t most[clamp_warps];
    const int warp = threadIdx.x / 32;
    int32_t before = 0; // the largest of all earlier starts
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    for (int64_t first = 0; first <= sequences.count; first += clamp_threads) {
        const int64_t n = first + threadIdx.x;
        const bool counts = n > 0 && n <= sequences.count;
        int32_t value = most_of_lower_lanes(counts ? min(max(starts[n], 0), kv_len) : 0);
        if (threadIdx.x % 32 == 31)
            most[warp] = value;
        __syncthreads();
        value = max(value, before);
        for (int w = 0; w < clamp_warps; w++) {
            value = w < warp ? max(value, most[w]) : value;
            before = max(before, most[w]);
        }
        if (n <= sequences.count)
            sequences.starts[n] = value;
        __syncthreads(); // every thread has read the largest of each warp
    }
}

static __global__ void __launch_bounds__(range_threads)
    find_ranges(const packed_sequences sequences, int32_t kv_len) {
    const int64_t position = (int64_t)blockIdx.x * range_threads + threadIdx.x;
    const int32_t *const starts = sequences.starts;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (position >= kv_len)
        return;
    int32_t low = 0, high = sequences.count; // starts[low] <= position, or high is the count
    const int32_t end = starts[high];
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        if (starts[middle] <= position)
            low = middle;
        else
            high = middle;
    }
    const bool inside = position < end;
    sequences.ranges[position] =
        inside ? make_int2(starts[low], starts[high]) : make_int2(end, end);
    if (sequences.index != NULL)
        sequences.index[position] = (uint32_t)(inside ? low : sequences.count);
}

packed_sequences fdma_cuda_lay_out_sequences(const fdma_problem *problem, fdma_arena *arena,
                                             bool with_index) {
    packed_sequences sequences = {};
    if (!is_present(&problem->starts))
        return sequences;
    sequences.count = (int32_t)(problem->starts.shape[0] - 1);
    sequences.starts = take<int32_t>(arena, problem->starts.shape[0]);
    sequences.ranges = take<int2>(arena, problem->kv_len);
    if (with_index)
        sequences.index = take<uint32_t>(arena, problem->kv_len);
    return sequences;
}

fdma_status fdma_cuda_find_sequences(const char *what, const fdma_problem *problem,
                                     const packed_sequences &sequences) {
    const int32_t kv_len = (int32_t)problem->kv_len;
    if (sequences.starts == NULL || kv_len == 0)
        return FDMA_OK;
    FDMA_TRY(launch(what, clamp_starts, {dim3(1), dim3(clamp_threads), 0, start_early}, problem,
                    (const int32_t *)problem->starts.data, sequences, kv_len));
    const launch_shape shape = {dim3((unsigned)divide_up(problem->kv_len, (int64_t)range_threads)),
                                dim3(range_threads), 0, start_early};
    return launch(what, find_ranges, shape, problem, sequences, kv_len);
}
