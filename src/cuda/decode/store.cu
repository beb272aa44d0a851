/* fdma_cache_store() on any device from compute capability 8.0. The first kernel empties rows and
 * counts tokens, the second one writes the kept keys to their rows. */
extern "C" {
#include "core/cache.h"
}
#include "cuda/decode/streams.cuh"
#include "cuda/device/ptx.cuh"

static constexpr int store_threads = 256;
static constexpr int warp_keys = 8;    // that a warp of the second kernel looks at together
static constexpr int block_keys = 256; // that a block of it looks at

/* A prompt as starts, index and the cache's seen say; clamped, since they may hold anything. */
struct prompt_range {
    int32_t sequence;   // of the cache; -1: skipped
    int32_t seen;       // tokens before the prompt
    int32_t first, end; // among the keys of the call
};

struct store_plan {
    head_view k, v, cache_k, cache_v;
    page_view pages;
    number_view<float> score, cache_score, cache_bias;
    number_view<int32_t> expiry, slot, position;
    int32_t *seen;
    const int32_t *index, *starts; // NULL: absent
    prompt_range *prompts;         // [prompts], in the workspace
    int32_t count;                 // of prompts
    int32_t sequences, kv_heads, rows, carried_len, new_len;
    int32_t row_bytes;
    fdma_bias_form bias_form;
};

__device__ static prompt_range prompt_of(const store_plan &plan, int32_t n) {
    const int32_t sequence = plan.index != NULL ? plan.index[n] : n;
    prompt_range prompt = {-1, 0, 0, plan.new_len};
    if (plan.starts != NULL) {
        prompt.first = clamp(plan.starts[n], 0, plan.new_len);
        prompt.end = clamp(plan.starts[n + 1], prompt.first, plan.new_len);
    }
    if (sequence < 0 || sequence >= plan.sequences)
        return prompt;
    prompt.sequence = sequence;
    if (plan.carried_len > 0)
        prompt.seen = clamp(plan.seen[sequence], 0, INT32_MAX - plan.new_len);
    return prompt;
}

/* A block has one kv head of one prompt: it empties all rows but those of carried keys that are
 * kept to the end. */
static __global__ void __launch_bounds__(store_threads, 2)
    empty_rows(const __grid_constant__ store_plan plan) {
    const int32_t n = (int32_t)(blockIdx.x / plan.kv_heads);
    const int32_t g = (int32_t)(blockIdx.x % plan.kv_heads);
    const int32_t sequence = plan.index != NULL ? plan.index[n] : n;
    const int32_t kv_len = plan.carried_len + plan.new_len;
    if (g == 0 && threadIdx.x == 0) {
        const prompt_range prompt = prompt_of(plan, n);
        plan.prompts[n] = prompt;
        if (prompt.sequence >= 0)
            plan.seen[prompt.sequence] = prompt.seen + prompt.end - prompt.first;
    }
    if (sequence < 0 || sequence >= plan.sequences)
        return;
    const int32_t *const expiry = plan.expiry.at(plan.starts != NULL ? 0 : n, g);
    for (int32_t row = threadIdx.x; row < plan.rows; row += store_threads)
        if (row >= plan.carried_len || expiry[row] < kv_len) {
            plan.cache_score.at(sequence, g)[row] = -INFINITY;
            plan.position.at(sequence, g)[row] = -1;
        }
}

/* Copies a row with half a warp, in elements of a type that suits its alignment. */
template <typename unit>
__device__ static void copy_units(void *to, const void *from, int32_t bytes) {
#pragma unroll 1
    for (int32_t n = threadIdx.x % 16; n < bytes / (int32_t)sizeof(unit); n += 16)
        ((unit *)to)[n] = ((const unit *)from)[n];
}

/* Copies k or v of key m of prompt b to its row in the cache. */
template <typename unit>
__device__ static void copy_key(const store_plan &plan, bool is_v, const row_indices &to, int32_t b,
                                int32_t m, int32_t g, int32_t element_bytes) {
    const head_view &cache = is_v ? plan.cache_v : plan.cache_k, &keys = is_v ? plan.v : plan.k;
    copy_units<unit>(
        (char *)cache.data +
            element_bytes * (to.first * cache.batch + to.row * cache.row + g * cache.head),
        (const char *)keys.data + element_bytes * (b * keys.batch + m * keys.row + g * keys.head),
        plan.row_bytes);
}

/* A block has some keys of one kv head of one prompt. A row whose page is missing becomes empty. */
template <typename unit>
static __global__ void __launch_bounds__(store_threads, 2)
    store_keys(const __grid_constant__ store_plan plan, const int32_t element_bytes) {
    const int64_t head = head_of_block();
    if (head >= (int64_t)plan.count * plan.kv_heads)
        return;
    const int32_t n = (int32_t)(head / plan.kv_heads), g = (int32_t)(head % plan.kv_heads);
    const int32_t b = plan.starts != NULL ? 0 : n, lane = threadIdx.x % 32;
    const prompt_range prompt = plan.prompts[n];
    const int32_t from = prompt.first + (int32_t)blockIdx.x * block_keys;
    const int32_t end = min(prompt.end, from + block_keys);
    if (prompt.sequence < 0)
        return;
    const int32_t *const expiry = plan.expiry.at(b, g) + plan.carried_len;
    const int32_t *const slot = plan.slot.at(b, g) + plan.carried_len;
    for (int32_t first = from + (int32_t)threadIdx.x / 32 * warp_keys; first < end;
         first += store_threads / 32 * warp_keys) {
        const int32_t own = first + lane;
        const bool is_kept =
            lane < warp_keys && own < end && expiry[own] >= plan.carried_len + prompt.end;
        const int32_t own_row = is_kept ? slot[own] : -1;
        const bool has_row = own_row >= 0 && own_row < plan.rows;
        const row_indices own_at =
            has_row ? indices_of(plan.pages, prompt.sequence, own_row) : no_row_indices();
        for (uint32_t left = __ballot_sync(~0u, own_at.first >= 0); left != 0; left &= left - 1) {
            const int32_t other = __ffs(left) - 1;
            const row_indices to = {__shfl_sync(~0u, own_at.first, other),
                                    __shfl_sync(~0u, own_at.row, other)};
            copy_key<unit>(plan, lane >= 16, to, b, first + other, g, element_bytes);
        }
        if (!has_row)
            continue;
        const bool is_lost = own_at.first < 0;
        const float score = plan.score.at(b, g)[own];
        plan.cache_score.at(prompt.sequence, g)[own_row] = is_lost ? -INFINITY : score;
        plan.position.at(prompt.sequence, g)[own_row] =
            is_lost ? -1 : prompt.seen + own - prompt.first;
        if (plan.bias_form != FDMA_BIAS_NONE && !is_lost)
            plan.cache_bias.at(prompt.sequence, g)[own_row] = bias_of(plan.bias_form, score);
    }
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
    plan.prompts = take<prompt_range>(arena, plan.count);
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

static fdma_status run(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const store_plan plan = lay_out(problem, &arena);
    const int64_t heads = (int64_t)plan.count * plan.kv_heads;
    const int32_t bytes_per_element = (int32_t)fdma_dtype_size(problem->dtype);
    if (heads == 0)
        return FDMA_OK;
    FDMA_TRY(launch("cache_store", empty_rows, {dim3((unsigned)heads), dim3(store_threads)},
                    problem, plan));
    if (plan.new_len == 0)
        return FDMA_OK;
    const launch_shape keys = {grid_of(divide_up(plan.new_len, block_keys), heads),
                               dim3(store_threads)};
    return is_aligned(plan, bytes_per_element)
               ? launch("cache_store", store_keys<uint4>, keys, problem, plan, bytes_per_element)
               : launch("cache_store", store_keys<uint16_t>, keys, problem, plan,
                        bytes_per_element);
}

static const char *refuses(const fdma_problem *problem) {
    if (problem->dtype == FDMA_FLOAT64)
        return "float64 caches";
    if (count_prompts(problem) * problem->kv_heads > INT32_MAX)
        return "more than 2^31 - 1 heads";
    if (problem->kv_len > INT32_MAX - block_keys)
        return "more than 2^31 - 257 keys";
    return fdma_refuses_before_sm80(problem);
}

FDMA_CUDA_TABLE(fdma_cuda_sm80_cache_store, {"cuda/sm80", operation_cache_store, fdma_missing_sm80,
                                             refuses, workspace_of<lay_out>, run, true, false});
