/* The gradients of fdma_score() on any device from compute capability 8.0: dbias -> ddt -> dv,
 * ddt_proj and da. Keys without a gradient are not read.
 *
 * Where a block has all channels and heads it reads v once: find_gradients() and then add_tile()
 * on each tile. Otherwise one kernel writes ddt to the workspace, and another takes it from there.
 * What a split of keys adds to ddt_proj and da is added up in the order of splits, whose number
 * follows from kv_len and the channels alone. Source: docs/algorithm.md, backward. */
#include "cuda/sm80/score_gradients.cuh"

static constexpr int finish_threads = 256;
static constexpr int few_heads = 8, many_heads = 32; // whose sums a thread holds

/* ddt by head and key, of the heads of a launch. */
template <int heads> struct split_memory {
    key_list list;
    tile_gradients tile;
    alignas(16) float ddt[heads][tile_keys];
};

/* ddt of all keys that have a gradient, of dot_heads kv heads, and what they add to da. */
template <typename element>
__global__ void __launch_bounds__(split_threads, 1) find_ddt(const gradient_params params) {
    __shared__ key_list list;
    __shared__ tile_gradients tile;
    const split_place place = find_split(params);
    const int32_t g = blockIdx.y * dot_heads;
    const int32_t n = threadIdx.x / tile_keys, t = threadIdx.x % tile_keys;
    float da = 0;
    for (int64_t first = place.first; first < place.end; first += split_threads) {
        list_keys(&list, params, place.b, first, place.end);
        for (int32_t at = 0; at < list.count; at += tile_keys) {
            const int64_t *const keys = list.key + at;
            const int32_t count = min(list.count - at, tile_keys);
            find_gradients<element>(&tile, params, place.b, g, keys, count);
            add_coefficients(da, &tile);
            if (n < dot_heads && g + n < params.kv_heads && t < count)
                params.ddt[(place.b * params.kv_len + keys[t]) * params.kv_heads + g + n] =
                    tile.ddt[n][t];
            __syncthreads();
        }
    }
    if (threadIdx.x < dot_heads && g + threadIdx.x < params.kv_heads)
        params.a_sums[(int64_t)place.split * params.kv_heads + g + threadIdx.x] = da;
}

/* A tile's ddt out of the workspace, of the heads from g on. */
template <int heads>
__device__ static inline void load_gradients(split_memory<heads> *shared,
                                             const gradient_params &params, int32_t b, int32_t g,
                                             const int64_t *keys, int32_t count) {
    for (int x = threadIdx.x; x < heads * tile_keys; x += split_threads) {
        const int t = x / heads, n = x % heads;
        const bool there = t < count && g + n < params.kv_heads;
        shared->ddt[n][t] =
            there ? params.ddt[(b * params.kv_len + keys[t]) * params.kv_heads + g + n] : 0;
    }
    __syncthreads();
}

__device__ static inline void add_product(float4 &sum, float x, float4 y) {
    sum.x = fmaf(x, y.x, sum.x);
    sum.y = fmaf(x, y.y, sum.y);
    sum.z = fmaf(x, y.z, sum.z);
    sum.w = fmaf(x, y.w, sum.w);
}

template <typename element>
__device__ static inline void add_four(element *to, float4 x, bool aligned) {
    const float4 old = load_four((const element *)to, aligned);
    alignas(8)
        const element sum[4] = {from_float<element>(old.x + x.x), from_float<element>(old.y + x.y),
                                from_float<element>(old.z + x.z), from_float<element>(old.w + x.w)};
    if (aligned)
        *(uint2 *)to = *(const uint2 *)sum;
    else
        for (int i = 0; i < 4; i++)
            to[i] = sum[i];
}

/* A tile against this thread's channels, from c on: dv of its keys, and its share of ddt_proj. */
template <typename element, int heads>
__device__ static inline void add_tile(float4 (&sums)[heads], const float (*ddt)[tile_keys],
                                       const gradient_params &params, int32_t b, int32_t g,
                                       int32_t c, const int64_t *keys, int32_t count) {
    const element *const v =
        (const element *)params.v + b * params.v_batch + channel_offset(params, c, params.v_head);
    element *const dv =
        (element *)params.dv + b * params.dv_batch + channel_offset(params, c, params.dv_head);
    float4 values[tile_keys], add[tile_keys] = {};
#pragma unroll
    for (int t = 0; t < tile_keys; t++)
        values[t] = t < count ? load_four(v + keys[t] * params.v_row, params.v_aligned)
                              : make_float4(0, 0, 0, 0);
#pragma unroll
    for (int n = 0; n < heads; n++) {
        if (g + n >= params.kv_heads)
            continue;
        const float4 weights = load_weights<element>(params, g + n, c);
#pragma unroll
        for (int t = 0; t < tile_keys; t++) {
            const float x = ddt[n][t];
            if (x == 0) // all lanes; v may be NaN
                continue;
            add_product(sums[n], x, values[t]);
            add_product(add[t], x, weights);
        }
    }
    if (params.dv == nullptr)
        return;
#pragma unroll
    for (int t = 0; t < tile_keys; t++)
        if (t < count)
            add_four(dv + keys[t] * params.dv_row, add[t], params.dv_aligned);
}

/* dv of a split's keys, what they add to ddt_proj, and, where it is fused, to da: of `heads` kv
 * heads from g on and a block of channels. */
template <typename element, int heads>
__global__ void __launch_bounds__(split_threads, 1)
    add_keys(const gradient_params params, const int32_t g) {
    __shared__ split_memory<heads> shared;
    const split_place place = find_split(params);
    const int32_t c = blockIdx.y * block_channels + threadIdx.x * thread_channels;
    const bool is_fused = heads == few_heads && params.is_fused;
    const float (*const ddt)[tile_keys] = is_fused ? shared.tile.ddt : shared.ddt;
    float4 sums[heads] = {};
    float da = 0;
    for (int64_t first = place.first; first < place.end; first += split_threads) {
        list_keys(&shared.list, params, place.b, first, place.end);
        for (int32_t at = 0; at < shared.list.count; at += tile_keys) {
            const int64_t *const keys = shared.list.key + at;
            const int32_t count = min(shared.list.count - at, tile_keys);
            if (is_fused) {
                find_gradients<element>(&shared.tile, params, place.b, g, keys, count);
                add_coefficients(da, &shared.tile);
            } else {
                load_gradients(&shared, params, place.b, g, keys, count);
            }
            if (c < params.channels)
                add_tile<element>(sums, ddt, params, place.b, g, c, keys, count);
            __syncthreads();
        }
    }
    if (is_fused && threadIdx.x < dot_heads && g + threadIdx.x < params.kv_heads)
        params.a_sums[(int64_t)place.split * params.kv_heads + g + threadIdx.x] = da;
    if (c >= params.channels)
        return;
    float *const to =
        params.dt_sums + ((int64_t)place.split * params.kv_heads + g) * params.channels + c;
#pragma unroll
    for (int n = 0; n < heads; n++)
        if (g + n < params.kv_heads)
            *(float4 *)(to + (int64_t)n * params.channels) = sums[n];
}

/* Writes a sum as v's type or float32, or adds it to what is there. */
template <typename element>
__device__ static inline void put_sum(void *to, int64_t at, float sum, bool wide, bool add) {
    if (wide)
        ((float *)to)[at] = add ? ((float *)to)[at] + sum : sum;
    else
        ((element *)to)[at] = from_float<element>(add ? to_float(((element *)to)[at]) + sum : sum);
}

/* Adds up `count` numbers that lie `stride` apart. */
__device__ static inline float add_up(const float *from, int64_t count, int64_t stride) {
    float sum = 0;
#pragma unroll 8
    for (int64_t n = 0; n < count; n++)
        sum += from[n * stride];
    return sum;
}

/* A thread a channel of kv head blockIdx.y; the first one takes the head's coefficient too. */
template <typename element>
__global__ void __launch_bounds__(finish_threads) finish_sums(const gradient_params params) {
    const int64_t splits = (int64_t)params.batch * params.splits;
    const int32_t c = blockIdx.x * finish_threads + threadIdx.x, g = blockIdx.y;
    const int64_t each = (int64_t)params.kv_heads * params.channels;
    if (c < params.channels)
        put_sum<element>(params.ddt_proj, g * params.ddt_row + c,
                         add_up(params.dt_sums + (int64_t)g * params.channels + c, splits, each),
                         params.wide_dt_proj, params.accumulate);
    if (c == 0)
        put_sum<element>(params.da, g, add_up(params.a_sums + g, splits, params.kv_heads),
                         params.wide_a, params.accumulate);
}

/* Splits of a sequence: enough blocks for a large device, whose sums take 16 MB at most. */
static void plan_splits(gradient_params *params) {
    const int64_t most_splits = 256, least_keys = 64, most_sums = 4 << 20;
    const int64_t each = (int64_t)params->kv_heads * params->channels;
    const int64_t fit = each > 0 && most_sums / each > 1 ? most_sums / each : 1;
    int64_t splits = (params->kv_len + least_keys - 1) / least_keys;
    splits = splits < most_splits ? splits : most_splits;
    splits = splits < fit ? splits : fit;
    splits = splits > 0 ? splits : 1;
    params->split_keys = (params->kv_len + splits - 1) / splits;
    params->splits = (int32_t)splits;
}

static void describe_tensors(const fdma_problem *problem, gradient_params *params) {
    const fdma_tensor *const v = &problem->v, *const dv = &problem->dv;
    const fdma_tensor *const dt_proj = &problem->dt_proj;
    params->dbias = (const float *)problem->dbias.data;
    params->dbias_batch = problem->dbias.stride[0];
    params->dbias_head = problem->dbias.stride[1];
    params->v = v->data;
    params->v_batch = v->stride[0];
    params->v_row = v->stride[1];
    params->v_head = v->stride[2];
    params->dv = dv->data;
    params->dv_batch = dv->stride[0];
    params->dv_row = dv->stride[1];
    params->dv_head = dv->stride[2];
    params->dt_proj = dt_proj->data;
    params->dt_row = dt_proj->stride[0];
    params->a = problem->a.data;
    params->ddt_proj = problem->ddt_proj.data;
    params->ddt_row = problem->ddt_proj.stride[0];
    params->da = problem->da.data;
    params->key_valid = (const uint8_t *)problem->key_valid.data;
    params->valid_batch = problem->key_valid.stride[0];
    params->wide_dt_proj = dt_proj->dtype == FDMA_FLOAT32;
    params->wide_a = problem->a.dtype == FDMA_FLOAT32;
    params->v_aligned = is_aligned(v->data, v->stride[0] | v->stride[1] | v->stride[2]);
    params->dv_aligned = is_aligned(dv->data, dv->stride[0] | dv->stride[1] | dv->stride[2]);
    params->dt_aligned = is_aligned(dt_proj->data, dt_proj->stride[0]);
}

static gradient_params plan_gradients(const fdma_problem *problem, fdma_arena *arena) {
    gradient_params params = {};
    describe_tensors(problem, &params);
    params.kv_len = problem->kv_len;
    params.batch = (int32_t)problem->batch;
    params.kv_heads = (int32_t)problem->kv_heads;
    params.head_dim = (int32_t)problem->head_dim;
    params.channels = params.kv_heads * params.head_dim;
    params.is_exp = problem->bias_form == FDMA_BIAS_EXP;
    params.accumulate = problem->accumulate;
    params.is_fused = params.kv_heads <= few_heads && params.channels <= block_channels;
    plan_splits(&params);
    const int64_t splits = (int64_t)params.batch * params.splits * params.kv_heads;
    params.dt_sums =
        (float *)fdma_arena_take(arena, (size_t)(splits * params.channels) * sizeof(float));
    params.a_sums = (float *)fdma_arena_take(arena, (size_t)splits * sizeof(float));
    if (!params.is_fused)
        params.ddt = (float *)fdma_arena_take(
            arena, (size_t)(problem->batch * problem->kv_len * problem->kv_heads) * sizeof(float));
    return params;
}

static size_t workspace(const fdma_problem *problem) {
    fdma_arena arena = {};
    plan_gradients(problem, &arena);
    return fdma_arena_size(&arena);
}

template <typename element, int heads>
static fdma_status launch_keys(const fdma_problem *problem, const gradient_params &params) {
    const unsigned blocks = (unsigned)params.batch * params.splits;
    const unsigned blocks_y = (params.channels + block_channels - 1) / block_channels;
    const launch_shape keys = {dim3(blocks, blocks_y), dim3(split_threads)};
    for (int32_t g = 0; g < params.kv_heads; g += (int32_t)heads)
        FDMA_TRY(launch("score_backward", add_keys<element, heads>, keys, problem, params, g));
    return FDMA_OK;
}

template <typename element>
static fdma_status run_type(const fdma_problem *problem, const gradient_params &params) {
    const unsigned blocks = (unsigned)params.batch * params.splits;
    const unsigned heads = (unsigned)params.kv_heads;
    const launch_shape dots = {dim3(blocks, (heads + dot_heads - 1) / dot_heads),
                               dim3(split_threads)};
    const launch_shape finish = {
        dim3((params.channels + finish_threads - 1) / finish_threads, heads), dim3(finish_threads)};
    if (blocks > 0 && !params.is_fused)
        FDMA_TRY(launch("score_backward", find_ddt<element>, dots, problem, params));
    if (blocks > 0 && params.kv_heads <= few_heads)
        FDMA_TRY((launch_keys<element, few_heads>(problem, params)));
    else if (blocks > 0)
        FDMA_TRY((launch_keys<element, many_heads>(problem, params)));
    return launch("score_backward", finish_sums<element>, finish, problem, params);
}

static fdma_status run(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const gradient_params params = plan_gradients(problem, &arena);
    if (params.channels == 0)
        return FDMA_OK;
    return problem->dtype == FDMA_BFLOAT16 ? run_type<__nv_bfloat16>(problem, params)
                                           : run_type<__half>(problem, params);
}

static const char *refuses(const fdma_problem *problem) {
    enum { most_blocks = 1 << 30, most_channels = 1 << 20, most_heads = 65535 };
    if (problem->dtype != FDMA_FLOAT16 && problem->dtype != FDMA_BFLOAT16)
        return "float32 tensors on CUDA: cast v to bfloat16 or float16";
    if (problem->dbias.dtype == FDMA_FLOAT64)
        return "float64 dbias, supported: float32";
    if (problem->batch > most_blocks / 256 || problem->kv_heads > most_heads ||
        problem->kv_heads * problem->head_dim > most_channels)
        return "more than 2^22 sequences, 2^16 heads or 2^20 channels a key";
    return fdma_refuses_before_sm80(problem);
}

static const kernel_row rows[] = {
    {"cuda/sm80", operation_score_backward, fdma_missing_sm80, refuses, workspace, run, true},
};

extern "C" const kernel_table fdma_cuda_sm80_score_backward = {rows, sizeof rows / sizeof rows[0]};
