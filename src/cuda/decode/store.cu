/* fdma_cache_store() and fdma_cache_copy() on any device from compute capability 8.0. The first
 * kernel of fdma_cache_store() empties rows and counts tokens. The second one writes the kept keys
 * to their rows. Also lists of requests, and the bias of given scores. */
extern "C" {
#include "core/cache.h"
#include "cuda/cuda.h"
}

#include "cuda/decode/cache.cuh"
#include "cuda/device/host.cuh"
#include "cuda/device/ptx.cuh"

static constexpr int store_threads = 256;
static constexpr int warp_keys = 8; // keys of a warp of the second kernel
static constexpr int block_keys = store_threads / 32 * warp_keys;
static constexpr int copied_keys = 4; // keys whose loads are in flight together

/* A prompt as given by starts and index. Clamped, because they may hold any number. */
struct prompt_range {
    int32_t sequence;   // of the cache; -1: skipped
    int32_t first, end; // range of keys of the call
};

struct store_plan {
    head_view k, v, cache_k, cache_v;
    page_view pages;
    number_view<float> score, cache_score, cache_bias;
    number_view<int32_t> expiry, slot, position;
    int32_t *seen;
    const int32_t *index, *starts; // NULL: absent
    int32_t *seen_before;          // [prompts], in the workspace: tokens before each prompt
    int32_t count;                 // of prompts
    int32_t sequences, kv_heads, rows, carried_len, new_len;
    int32_t row_bytes;
    fdma_bias_form bias_form;
};

__device__ static prompt_range prompt_of(const store_plan &plan, int32_t n) {
    const int32_t sequence = plan.index != NULL ? plan.index[n] : n;
    prompt_range prompt = {-1, 0, plan.new_len};
    if (plan.starts != NULL) {
        prompt.first = clamp(plan.starts[n], 0, plan.new_len);
        prompt.end = clamp(plan.starts[n + 1], prompt.first, plan.new_len);
    }
    if (sequence < 0 || sequence >= plan.sequences)
        return prompt;
    prompt.sequence = sequence;
    return prompt;
}

__device__ static void count_tokens(const store_plan &plan, int32_t n, const prompt_range &prompt) {
    int32_t seen = 0;
    if (prompt.sequence >= 0) {
        if (plan.carried_len > 0)
            seen = clamp(plan.seen[prompt.sequence], 0, INT32_MAX - plan.new_len);
        plan.seen[prompt.sequence] = seen + prompt.end - prompt.first;
    }
    plan.seen_before[n] = seen;
}

/* A block empties some rows of one kv head of one prompt, except carried keys that are kept to the
 * end. */
static __global__ void __launch_bounds__(store_threads, 2)
    empty_rows(const __grid_constant__ store_plan plan) {
    const int64_t head = head_of_block();
    const int32_t n = (int32_t)(head / plan.kv_heads), g = (int32_t)(head % plan.kv_heads);
    const int64_t row = (int64_t)blockIdx.x * store_threads + threadIdx.x;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (n >= plan.count)
        return;
    const prompt_range prompt = prompt_of(plan, n);
    if (g == 0 && row == 0)
        count_tokens(plan, n, prompt);
    if (prompt.sequence < 0 || row >= plan.rows)
        return;
    const int32_t *const expiry = plan.expiry.at(plan.starts != NULL ? 0 : n, g);
    if (row < plan.carried_len && expiry[row] >= plan.carried_len + plan.new_len)
        return;
    plan.cache_score.at(prompt.sequence, g)[row] = -INFINITY;
    plan.position.at(prompt.sequence, g)[row] = -1;
}

struct kept_keys {
    row_indices at; // of this lane's key in the cache; no_row_indices(): not copied
    int32_t first;  // key of lane 0
    uint32_t lanes; // lanes whose keys are copied
};

struct row_copy {
    const char *from;
    char *to;
};

__device__ static row_copy copy_of_key(const store_plan &plan, bool is_v, const row_indices &to,
                                       int32_t b, int32_t m, int32_t g, int32_t element_bytes) {
    const head_view &cache = is_v ? plan.cache_v : plan.cache_k, &keys = is_v ? plan.v : plan.k;
    return {(const char *)keys.data +
                element_bytes * (b * keys.batch + m * keys.row + g * keys.head),
            (char *)cache.data +
                element_bytes * (to.first * cache.batch + to.row * cache.row + g * cache.head)};
}

/* Copies the rows of kept keys, copied_keys at a time, k with the first half of a warp and v with
 * the second half, in elements of a type that suits their alignment. */
template <typename unit>
__device__ static void copy_kept(const store_plan &plan, const kept_keys &kept, int32_t b,
                                 int32_t g, int32_t element_bytes) {
    const int32_t units = plan.row_bytes / (int32_t)sizeof(unit), lane = threadIdx.x % 32;
    uint32_t left = kept.lanes;
    while (left != 0) {
        row_copy copy[copied_keys];
#pragma unroll
        for (int i = 0; i < copied_keys; i++) {
            const int32_t other = left != 0 ? __ffs(left) - 1 : 0;
            const row_indices to = {__shfl_sync(~0u, kept.at.first, other),
                                    __shfl_sync(~0u, kept.at.row, other)};
            copy[i] = copy_of_key(plan, lane >= 16, to, b, kept.first + other, g, element_bytes);
            copy[i].to = left != 0 ? copy[i].to : NULL;
            left &= left - 1;
        }
#pragma unroll 1
        for (int32_t n = lane % 16; n < units; n += 16) {
            unit values[copied_keys];
#pragma unroll
            for (int i = 0; i < copied_keys; i++)
                if (copy[i].to != NULL)
                    values[i] = ((const unit *)copy[i].from)[n];
#pragma unroll
            for (int i = 0; i < copied_keys; i++)
                if (copy[i].to != NULL)
                    ((unit *)copy[i].to)[n] = values[i];
        }
    }
}

/* Writes score, position and bias of key `own` of the call to its row. A row whose page is missing
 * becomes empty. */
__device__ static void store_numbers(const store_plan &plan, const prompt_range &prompt, int32_t b,
                                     int32_t n, int32_t g, int32_t own, int32_t row, bool is_lost) {
    const float score = plan.score.at(b, g)[own];
    plan.cache_score.at(prompt.sequence, g)[row] = is_lost ? -INFINITY : score;
    plan.position.at(prompt.sequence, g)[row] =
        is_lost ? -1 : plan.seen_before[n] + own - prompt.first;
    if (plan.bias_form != FDMA_BIAS_NONE && !is_lost)
        plan.cache_bias.at(prompt.sequence, g)[row] = bias_of(plan.bias_form, score);
}

/* A block takes some keys of one kv head of one prompt. The data it reads before its wait was
 * complete before empty_rows() let it start. */
template <typename unit>
static __global__ void __launch_bounds__(store_threads, 2)
    store_keys(const __grid_constant__ store_plan plan, const int32_t element_bytes) {
    const int64_t head = head_of_block();
    const int32_t n = (int32_t)(head / plan.kv_heads), g = (int32_t)(head % plan.kv_heads);
    const int32_t b = plan.starts != NULL ? 0 : n, lane = threadIdx.x % 32;
    const bool is_there = n < plan.count;
    const prompt_range prompt = is_there ? prompt_of(plan, n) : prompt_range{-1, 0, 0};
    // keys of the prompt before this warp's keys; the grid covers prompts of any length
    const int64_t before = (int64_t)blockIdx.x * block_keys + threadIdx.x / 32 * warp_keys;
    const bool has_keys = before < prompt.end - prompt.first;
    const int32_t first = prompt.first + (has_keys ? (int32_t)before : 0);
    int32_t row = -1;
    row_indices at = no_row_indices();
    if (prompt.sequence >= 0 && has_keys && lane < warp_keys && first + lane < prompt.end) {
        const int32_t key = plan.carried_len + first + lane;
        const int32_t slot = plan.slot.at(b, g)[key];
        row = plan.expiry.at(b, g)[key] >= plan.carried_len + prompt.end ? slot : -1;
    }
    const bool has_row = row >= 0 && row < plan.rows;
    if (has_row)
        at = indices_of(plan.pages, prompt.sequence, row);
    griddepcontrol_wait(); // for empty_rows()
    griddepcontrol_launch_dependents();
    copy_kept<unit>(plan, {at, first, __ballot_sync(~0u, at.first >= 0)}, b, g, element_bytes);
    if (has_row)
        store_numbers(plan, prompt, b, n, g, first + lane, row, at.first < 0);
}

static store_plan lay_out(const fdma_problem *problem, fdma_arena *arena) {
    const fdma_cache *const cache = &problem->cache;
    store_plan plan = {};
    plan.k = view_of(&problem->k);
    plan.v = view_of(&problem->v);
    plan.cache_k = view_of(&cache->k);
    plan.cache_v = view_of(&cache->v);
    plan.pages = pages_of(cache);
    plan.score = numbers_of<float>(&problem->score);
    plan.cache_score = numbers_of<float>(&cache->table.score);
    plan.cache_bias = numbers_of<float>(&cache->bias);
    plan.position = numbers_of<int32_t>(&cache->table.position);
    plan.expiry = numbers_of<int32_t>(&problem->expiry);
    plan.slot = numbers_of<int32_t>(&problem->slot);
    plan.seen = (int32_t *)cache->table.seen.data;
    plan.index = (const int32_t *)problem->index.data;
    plan.starts = (const int32_t *)problem->starts.data;
    plan.count = (int32_t)count_prompts(problem);
    plan.sequences = (int32_t)cache->sequences;
    plan.kv_heads = (int32_t)problem->kv_heads;
    plan.rows = (int32_t)rows_of_cache(cache);
    plan.carried_len = (int32_t)problem->carried_len;
    plan.new_len = (int32_t)problem->new_len;
    plan.row_bytes = (int32_t)(problem->head_dim * (int64_t)fdma_dtype_size(problem->dtype));
    plan.bias_form = problem->bias_form;
    plan.seen_before = take<int32_t>(arena, plan.count);
    return plan;
}

static bool is_aligned(const store_plan &plan, int64_t bytes_per_element) {
    const head_view *const views[] = {&plan.k, &plan.v, &plan.cache_k, &plan.cache_v};
    for (const head_view *const view : views)
        if ((uintptr_t)view->data % 16 != 0 ||
            (view->batch | view->row | view->head) * bytes_per_element % 16 != 0)
            return false;
    return true;
}

static fdma_status run_store(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const store_plan plan = lay_out(problem, &arena);
    const int64_t heads = (int64_t)plan.count * plan.kv_heads;
    const int32_t bytes_per_element = (int32_t)fdma_dtype_size(problem->dtype);
    if (heads == 0)
        return FDMA_OK;
    const launch_shape rows = {grid_of(divide_up(max(plan.rows, 1), store_threads), heads),
                               dim3(store_threads), 0, start_early};
    FDMA_TRY(launch("cache_store", empty_rows, rows, problem, plan));
    if (plan.new_len == 0)
        return FDMA_OK;
    const launch_shape keys = {grid_of(divide_up(plan.new_len, block_keys), heads),
                               dim3(store_threads), 0, start_early};
    return is_aligned(plan, bytes_per_element)
               ? launch("cache_store", store_keys<uint4>, keys, problem, plan, bytes_per_element)
               : launch("cache_store", store_keys<uint16_t>, keys, problem, plan,
                        bytes_per_element);
}

static const char *refuses_store(const fdma_problem *problem) {
    if (problem->dtype == FDMA_FLOAT64)
        return "float64 caches";
    if (count_prompts(problem) * problem->kv_heads > INT32_MAX)
        return "more than 2^31 - 1 heads";
    if (problem->kv_len > INT32_MAX - 256)
        return "more than 2^31 - 257 keys";
    return fdma_refuses_before_sm80(problem);
}

/* ---- the requests of fdma_prefill() ---- */

/* Parameters of a kernel, which the call and a CUDA graph copy. */
struct number_list {
    int32_t number[512];
};
static constexpr int most_listed = sizeof(number_list) / sizeof(int32_t);

static __global__ void __launch_bounds__(most_listed)
    write_list(const number_list list, int32_t *__restrict__ to, const int32_t count) {
    const int32_t n = (int32_t)threadIdx.x;
    if (n < count)
        to[n] = list.number[n];
}

extern "C" fdma_status fdma_cuda_list_requests(const fdma_problem *whole) {
    const prefill_requests *const requests = &whole->prefill;
    for (int64_t first = 0; requests->index != NULL && first < requests->count;
         first += most_listed) {
        number_list list = {};
        const int64_t left = requests->count - first;
        const int32_t count = left < most_listed ? (int32_t)left : most_listed;
        for (int32_t n = 0; n < count; n++)
            list.number[n] = requests->index[first + n];
        const launch_shape shape = {dim3(1), dim3(most_listed)};
        FDMA_TRY(
            launch("prefill", write_list, shape, whole, list, requests->listed + first, count));
    }
    return FDMA_OK;
}

/* A thread has a token of a kv head. */
static __global__ void __launch_bounds__(store_threads)
    fill_bias(const number_view<float> score, const number_view<float> bias, const int32_t tokens,
              const int32_t kv_heads) {
    const int64_t g = head_of_block(), m = (int64_t)blockIdx.x * store_threads + threadIdx.x;
    if (g < kv_heads && m < tokens)
        bias.at(0, (int32_t)g)[m] = bias_of(FDMA_BIAS_EXP, score.at(0, (int32_t)g)[m]);
}

extern "C" fdma_status fdma_cuda_fill_prompt_bias(const fdma_problem *whole) {
    const number_view<float> score = numbers_of<float>(&whole->score);
    const number_view<float> bias = numbers_of<float>(&whole->bias);
    const int32_t tokens = (int32_t)whole->new_len, kv_heads = (int32_t)whole->kv_heads;
    const launch_shape shape = {grid_of(divide_up(max(tokens, 1), store_threads), kv_heads),
                                dim3(store_threads)};
    return launch("prefill", fill_bias, shape, whole, score, bias, tokens, kv_heads);
}

/* ---- fdma_cache_copy() ---- */

/* A thread block copies one row of one kv head, in all sequences of the call, slice by slice. It
 * reads a slice from all sequences before it writes any, because a sequence may be both read and
 * written. */

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

static fdma_status run_copy(const fdma_problem *problem) {
    const copy_plan plan = plan_copy(problem);
    const launch_shape shape = {dim3((unsigned)(((int64_t)plan.rows + 1) * plan.kv_heads)),
                                dim3(copy_threads), sizeof(copy_memory)};
    if (plan.count == 0)
        return FDMA_OK;
    return is_aligned(plan, plan.k) && is_aligned(plan, plan.v)
               ? launch("cache_copy", copy_sequences<uint4>, shape, problem, plan)
               : launch("cache_copy", copy_sequences<uint16_t>, shape, problem, plan);
}

static const char *refuses_copy(const fdma_problem *problem) {
    if (problem->dtype == FDMA_FLOAT64)
        return "float64 caches";
    if (problem->batch > most_copied)
        return "more than 1024 sequences that are copied at once";
    if ((rows_of_cache(&problem->cache) + 1) * problem->kv_heads > INT32_MAX)
        return "more than 2^31 - 1 rows of all heads";
    return fdma_refuses_before_sm80(problem);
}

FDMA_CUDA_TABLE(fdma_cuda_sm80_cache,
                {"cuda/sm80", operation_cache_store, fdma_missing_sm80, refuses_store,
                 workspace_of<lay_out>, run_store, true, 0},
                {"cuda/sm80", operation_cache_copy, fdma_missing_sm80, refuses_copy, no_workspace,
                 run_copy, true, 0});
