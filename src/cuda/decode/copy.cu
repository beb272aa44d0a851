/* fdma_cache_copy() on any device from compute capability 8.0. A thread block copies one row of
 * one kv head, in all sequences of the call, slice by slice. It reads a slice from all sequences
 * before it writes any, because a sequence may be both read and written. */
#include "cuda/decode/pages.cuh"
#include "cuda/device/host.cuh"

static constexpr int copy_threads = 256;
static constexpr int slices_bytes = 32 * 1024; // of all sequences, in shared memory
static constexpr int most_copied = 1024;       // sequences
static constexpr int most_slice = 256;         // bytes

struct copy_plan {
    head_view k, v;
    page_view pages;
    number_view<float> score, bias;
    number_view<int32_t> position;
    int32_t *seen;
    const int32_t *from, *to;
    int32_t count, sequences, kv_heads, rows;
    int32_t element_bytes, row_bytes, slice; // bytes
};

struct copy_memory {
    alignas(16) char slices[slices_bytes];
    int32_t from[most_copied], to[most_copied]; // first indices of k and v; to -1: do not copy a
                                                // row
    int32_t position[most_copied];
    float score[most_copied], bias[most_copied];
};

/* Copies a row of k or v for every sequence that has a key in it. `second` is the index on the
 * second axis. */
template <typename unit>
__device__ static void copy_rows(copy_memory &shared, const copy_plan &plan, const head_view &view,
                                 int32_t g, int32_t second) {
    char *const base = (char *)view.data + plan.element_bytes * (second * view.row + g * view.head);
    const int64_t sequence = plan.element_bytes * view.batch;
    for (int32_t begin = 0; begin < plan.row_bytes; begin += plan.slice) {
        const int32_t units = min(plan.slice, plan.row_bytes - begin) / (int32_t)sizeof(unit);
        unit *const slices = (unit *)shared.slices;
        for (int32_t i = threadIdx.x; i < plan.count * units; i += copy_threads)
            if (shared.to[i / units] >= 0)
                slices[i] =
                    ((const unit *)(base + shared.from[i / units] * sequence + begin))[i % units];
        __syncthreads();
        for (int32_t i = threadIdx.x; i < plan.count * units; i += copy_threads)
            if (shared.to[i / units] >= 0)
                ((unit *)(base + shared.to[i / units] * sequence + begin))[i % units] = slices[i];
        __syncthreads();
    }
}

/* Entry n of `from` or `to`; -1 if it is no sequence of the cache. */
__device__ static int32_t sequence_at(const copy_plan &plan, const int32_t *list, int32_t n) {
    return list[n] >= 0 && list[n] < plan.sequences ? list[n] : -1;
}

/* Finds the source and the target of a row, if it has a key and the two differ. If the page of
 * either is missing, the key is lost. */
__device__ static void find_rows(copy_memory &shared, const copy_plan &plan, int32_t n,
                                 int32_t from, int32_t to, int32_t row) {
    shared.to[n] = -1;
    if (shared.position[n] < 0 || to < 0 || from == to)
        return;
    const row_indices source = indices_of(plan.pages, from, row);
    const row_indices target = indices_of(plan.pages, to, row);
    if (source.first < 0 || target.first < 0) {
        shared.position[n] = -1;
    } else if (source.first != target.first) {
        shared.from[n] = source.first;
        shared.to[n] = target.first;
    }
}

/* Reads the numbers of one row, or, for row -1, the count of tokens seen. */
__device__ static void read_numbers(copy_memory &shared, const copy_plan &plan, int32_t g,
                                    int32_t row) {
    for (int32_t n = threadIdx.x; n < plan.count; n += copy_threads) {
        const int32_t from = sequence_at(plan, plan.from, n);
        const bool is_there = from >= 0;
        if (row < 0) {
            shared.position[n] = is_there ? plan.seen[from] : 0;
            continue;
        }
        shared.position[n] = is_there ? plan.position.at(from, g)[row] : -1;
        shared.score[n] = is_there ? plan.score.at(from, g)[row] : -INFINITY;
        shared.bias[n] = is_there ? plan.bias.at(from, g)[row] : 0;
        find_rows(shared, plan, n, from, sequence_at(plan, plan.to, n), row);
    }
    __syncthreads();
}

__device__ static void write_numbers(const copy_memory &shared, const copy_plan &plan, int32_t g,
                                     int32_t row) {
    for (int32_t n = threadIdx.x; n < plan.count; n += copy_threads) {
        const int32_t to = sequence_at(plan, plan.to, n);
        if (to >= 0 && row < 0) {
            plan.seen[to] = shared.position[n];
        } else if (to >= 0) {
            plan.position.at(to, g)[row] = shared.position[n];
            if (shared.position[n] < 0)
                continue; // the score and the bias of an empty row are never read
            plan.score.at(to, g)[row] = shared.score[n];
            plan.bias.at(to, g)[row] = shared.bias[n];
        }
    }
}

template <typename unit>
static __global__ void __launch_bounds__(copy_threads, 2)
    copy_sequences(const __grid_constant__ copy_plan plan) {
    extern __shared__ __align__(16) char bytes[];
    copy_memory &shared = *(copy_memory *)bytes;
    const int32_t g = (int32_t)(blockIdx.x % plan.kv_heads);
    const int32_t row = (int32_t)(blockIdx.x / plan.kv_heads) - 1; // -1: the count of tokens seen,
                                                                   // which kv head 0 copies
    if (row < 0 && g > 0)
        return;
    read_numbers(shared, plan, g, row);
    if (row >= 0) {
        const int32_t second = indices_of(plan.pages, 0, row).row;
        copy_rows<unit>(shared, plan, plan.k, g, second);
        copy_rows<unit>(shared, plan, plan.v, g, second);
    }
    write_numbers(shared, plan, g, row);
}

static copy_plan plan_copy(const fdma_problem *problem) {
    const fdma_cache *const cache = &problem->cache;
    copy_plan plan = {};
    plan.k = view_of(&cache->k);
    plan.v = view_of(&cache->v);
    plan.pages = pages_of(cache);
    plan.score = numbers_of<float>(&cache->table.score);
    plan.bias = numbers_of<float>(&cache->bias);
    plan.position = numbers_of<int32_t>(&cache->table.position);
    plan.seen = (int32_t *)cache->table.seen.data;
    plan.from = (const int32_t *)problem->from.data;
    plan.to = (const int32_t *)problem->to.data;
    plan.count = (int32_t)problem->batch;
    plan.sequences = (int32_t)cache->sequences;
    plan.kv_heads = (int32_t)cache->kv_heads;
    plan.rows = (int32_t)rows_of_cache(cache);
    plan.element_bytes = (int32_t)fdma_dtype_size(problem->dtype);
    plan.row_bytes = (int32_t)cache->head_dim * plan.element_bytes;
    plan.slice = min(slices_bytes / max(plan.count, 1) / 16 * 16, most_slice);
    return plan;
}

static bool is_aligned(const copy_plan &plan, const head_view &view) {
    return (uintptr_t)view.data % 16 == 0 &&
           (view.batch | view.row | view.head) * plan.element_bytes % 16 == 0;
}

static fdma_status run(const fdma_problem *problem) {
    const copy_plan plan = plan_copy(problem);
    const launch_shape shape = {dim3((unsigned)(((int64_t)plan.rows + 1) * plan.kv_heads)),
                                dim3(copy_threads), sizeof(copy_memory)};
    if (plan.count == 0)
        return FDMA_OK;
    return is_aligned(plan, plan.k) && is_aligned(plan, plan.v)
               ? launch("cache_copy", copy_sequences<uint4>, shape, problem, plan)
               : launch("cache_copy", copy_sequences<uint16_t>, shape, problem, plan);
}

static const char *refuses(const fdma_problem *problem) {
    if (problem->dtype == FDMA_FLOAT64)
        return "float64 caches";
    if (problem->batch > most_copied)
        return "more than 1024 sequences that are copied at once";
    if ((rows_of_cache(&problem->cache) + 1) * problem->kv_heads > INT32_MAX)
        return "more than 2^31 - 1 rows of all heads";
    return fdma_refuses_before_sm80(problem);
}

FDMA_CUDA_TABLE(fdma_cuda_sm80_cache_copy, {"cuda/sm80", operation_cache_copy, fdma_missing_sm80,
                                            refuses, no_workspace, run, true, 0});
