/* The gradients of fdma_score() on any device from compute capability 8.0: dbias -> ddt -> dv,
 * ddt_proj and da. Keys without a gradient get none, and what they hold reaches nothing.
 *
 * The products that fdma_score() begins with are made again, to the workspace, and from them ddt.
 * Then a block takes a split of a sequence's keys: it lists those with a gradient, some at a time,
 * and its warps take the list tile by tile, each some channels, reading v and dv once. What a split
 * adds to ddt_proj and da is added up in the order of splits, whose number follows from kv_len and
 * the channels alone. Source: docs/algorithm.md, backward. */
#include "cuda/sm80/score_products.cuh"

static constexpr int finish_columns = 32, finish_parts = 8; // of splits, a thread each

/* For up to 8, and for more kv heads at a time. Of a float32 dt_proj two parts take part: as precise
 * as ddt. */
template <typename element, int parts> using few_heads = product_config<element, parts, 1, 64, 3>;
template <typename element, int parts> using many_heads = product_config<element, parts, 4, 32, 4>;

template <typename config> struct split_memory {
    key_list<config::heads> list;
    float scales[config::heads];
    union {
        tile_slot<config> ring[split_warps][config::stages];
        warp_sums<config> sums[split_warps][32];
    };
};

/* The listed keys against a warp's channels: every params.key_warps-th tile from `tile` on. */
template <typename config>
__device__ static inline void take_list(warp_sums<config> &sums, split_memory<config> *shared,
                                        const gradient_params &params, const warp_channels &at,
                                        int32_t g, int32_t tile) {
    constexpr int stages = config::stages;
    const key_list<config::heads> &list = shared->list;
    tile_slot<config> *const ring = shared->ring[threadIdx.x / 32];
    const int32_t tiles = (list.count + tile_keys - 1) / tile_keys;
    int filled = 0, free = 0;
    warp_weights<config> weights;
    if (tile >= tiles)
        return;
    for (int ahead = 0; ahead < stages - 1; ahead++, free++) {
        if (tile + ahead * params.key_warps < tiles)
            copy_tile(ring + free, params, list, at, tile + ahead * params.key_warps);
        cp_async_commit_group();
    }
    load_weights(weights, params, g, at.first);
    for (; tile < tiles; tile += params.key_warps) {
        const int32_t next = tile + (stages - 1) * params.key_warps;
        __syncwarp(); // the slot is read
        if (next < tiles)
            copy_tile(ring + free, params, list, at, next);
        cp_async_commit_group();
        cp_async_wait_group<stages - 1>();
        __syncwarp();
        if (params.dv != nullptr)
            add_to_dv(ring[filled], weights, params, list, shared->scales, at, tile);
        add_to_sums(sums, ring[filled], list, tile);
        free = filled;
        filled = filled + 1 < stages ? filled + 1 : 0;
    }
    __syncwarp();
}

/* Adds up the sums of warps that have the same channels, in the first of them. */
template <typename config>
__device__ static inline void join_sums(warp_sums<config> &sums, split_memory<config> *shared,
                                        int key_warps) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncthreads(); // the rings are read
    if (warp % key_warps != 0)
        shared->sums[warp][lane] = sums;
    __syncthreads();
    for (int other = warp + 1; warp % key_warps == 0 && other < warp + key_warps; other++)
#pragma unroll
        for (int tile = 0; tile < config::head_tiles; tile++)
#pragma unroll
            for (int n = 0; n < config::channel_tiles; n++) {
                const float2 more = shared->sums[other][lane].of[tile][n];
                sums.of[tile][n].x += more.x;
                sums.of[tile][n].y += more.y;
            }
}

/* Writes what a split adds to ddt_proj; whether all of that is numbers. */
template <typename config>
__device__ static inline bool put_sums(const warp_sums<config> &sums, const gradient_params &params,
                                       float *to, int32_t g, int32_t first) {
    const int lane = threadIdx.x % 32;
    bool are_numbers = true;
#pragma unroll
    for (int tile = 0; tile < config::head_tiles; tile++)
#pragma unroll
        for (int n = 0; n < config::channel_tiles; n++) {
            const int32_t head = g + tile * tile_heads + lane / 4, c = first + n * 8 + lane % 4 * 2;
            const float2 sum = sums.of[tile][n];
            if (head < params.kv_heads && c < params.channels) {
                *(float2 *)(to + (int64_t)head * params.channels + c) = sum;
                are_numbers &= !isnan(sum.x) && !isnan(sum.y);
            }
        }
    return are_numbers;
}

/* The sum of a split for one head and channel, key by key. */
template <typename element>
__device__ static float sum_plainly(const gradient_params &params, const split_place &place,
                                    int32_t g, int32_t c) {
    const element *const v = (const element *)params.score.v + place.b * params.score.v_batch +
                             channel_offset(params, c, params.score.v_head);
    const float *const ddt = ddt_of(params, place.b, g);
    float sum = 0;
    for (int64_t j = place.first; j < place.end; j++)
        if (ddt[j] != 0)
            sum += ddt[j] * to_float(v[j * params.score.v_row]);
    return sum;
}

/* Sums that are not numbers again: in a product, a key that only other heads give a gradient counts
 * as 0 * v, which may be NaN. */
template <typename config>
__device__ static __noinline__ void mend_sums(const gradient_params &params, float *to, int32_t g,
                                              int32_t first) {
    const split_place place = find_split(params);
    const int end_of_heads = min(config::heads, params.kv_heads - g);
    const int end_of_channels = min(config::channels, params.channels - first);
    __syncwarp();
#pragma unroll 1
    for (int head = g; head < g + end_of_heads; head++)
#pragma unroll 1
        for (int c = first + threadIdx.x % 32; c < first + end_of_channels; c += 32) {
            float *const sum = to + (int64_t)head * params.channels + c;
            if (isnan(*sum))
                *sum = sum_plainly<typename config::element>(params, place, head, c);
        }
}

/* dv of a split's keys, and what they add to ddt_proj, of the kv heads from g on and a block of
 * channels. */
template <typename config>
__global__ void __launch_bounds__(split_threads, 2)
    add_keys(const __grid_constant__ gradient_params params, const int32_t g) {
    split_memory<config> *const shared = &shared_memory<split_memory<config>>();
    const split_place place = find_split(params);
    const int warp = threadIdx.x / 32, channel_warps = split_warps / params.key_warps;
    const int32_t first = (blockIdx.y * channel_warps + warp / params.key_warps) * config::channels;
    const warp_channels at = find_channels<config>(params, place.b, first);
    warp_sums<config> sums = {};
    griddepcontrol_wait(); // for ddt and the weights
    griddepcontrol_launch_dependents();
    if (threadIdx.x < config::heads)
        shared->scales[threadIdx.x] =
            params.score.scales != nullptr && g + (int32_t)threadIdx.x < params.kv_heads
                ? params.score.scales[g + threadIdx.x]
                : 1;
    for (int64_t j = place.first; j < place.end; j += split_threads) {
        list_keys(&shared->list, params, place.b, g, j, place.end);
        take_list(sums, shared, params, at, g, warp % params.key_warps);
    }
    join_sums(sums, shared, params.key_warps);
    float *const to = params.dt_sums + (int64_t)place.split * params.kv_heads * params.channels;
    if (warp % params.key_warps == 0 && !__all_sync(~0u, put_sums(sums, params, to, g, first)))
        mend_sums<config>(params, to, g, first);
}

/* Writes a sum as v's type or float32, or adds it to what is there. */
template <typename element>
__device__ static inline void put_sum(void *to, int64_t at, float sum, bool wide, bool add) {
    if (wide)
        ((float *)to)[at] = add ? ((float *)to)[at] + sum : sum;
    else
        ((element *)to)[at] = from_float<element>(add ? to_float(((element *)to)[at]) + sum : sum);
}

/* Adds up `count` numbers that lie `stride` apart, a part of them in each row of threads; the first
 * row has all. */
__device__ static inline float add_up(const float *from, int64_t count, int64_t stride) {
    __shared__ float parts[finish_parts][finish_columns];
    const int64_t each = (count + finish_parts - 1) / finish_parts, first = threadIdx.y * each;
    const int64_t end = min(first + each, count);
    float sum = 0;
#pragma unroll 8
    for (int64_t n = first; n < end; n++)
        sum += from[n * stride];
    __syncthreads();
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    for (int n = 1; n < finish_parts && threadIdx.y == 0; n++)
        sum += parts[n][threadIdx.x];
    return sum;
}

/* A column of threads a channel of kv head blockIdx.y, or in the last block its coefficient. */
template <typename element>
__global__ void __launch_bounds__(finish_columns *finish_parts)
    finish_sums(const gradient_params params) {
    const int64_t splits = (int64_t)params.batch * params.splits;
    const int32_t g = blockIdx.y, c = blockIdx.x * finish_columns + threadIdx.x;
    const bool is_coefficient = blockIdx.x + 1 == gridDim.x;
    griddepcontrol_wait(); // for the sums
    griddepcontrol_launch_dependents();
    const bool there = is_coefficient ? threadIdx.x == 0 : c < params.channels;
    const float *const from =
        is_coefficient ? params.a_sums + g : params.dt_sums + (int64_t)g * params.channels + c;
    const int64_t stride = (int64_t)params.kv_heads * (is_coefficient ? 1 : params.channels);
    const float sum = add_up(from, there ? splits : 0, stride);
    if (!there || threadIdx.y > 0)
        return;
    if (is_coefficient)
        put_sum<element>(params.da, g, sum, params.score.wide_a, params.accumulate);
    else
        put_sum<element>(params.ddt_proj, g * params.ddt_row + c, sum, params.score.wide_dt_proj,
                         params.accumulate);
}

/* Splits of a sequence: enough blocks for a large device, whose sums take no more than an eighth of
 * v, or 16 MB. */
static void plan_splits(gradient_params *params) {
    const int64_t most_splits = 256, least_keys = 64, least_sums = 4 << 20;
    const int64_t each = (int64_t)params->kv_heads * params->channels;
    const int64_t share = params->kv_len * params->channels / 16;
    const int64_t sums = share > least_sums ? share : least_sums;
    const int64_t fit = each > 0 && sums / each > 1 ? sums / each : 1;
    int64_t splits = (params->kv_len + least_keys - 1) / least_keys;
    splits = splits < most_splits ? splits : most_splits;
    splits = splits < fit ? splits : fit;
    splits = splits > 0 ? splits : 1;
    params->split_keys = (params->kv_len + splits - 1) / splits;
    params->splits = (int32_t)splits;
}

static gradient_params plan_gradients(const fdma_problem *problem, fdma_arena *arena) {
    const fdma_tensor *const dv = &problem->dv;
    gradient_params params = {};
    params.score = fdma_cuda_plan_products(problem, arena);
    params.ddt = params.score.score;
    params.a = problem->a.data;
    params.dbias = (const float *)problem->dbias.data;
    params.dbias_batch = problem->dbias.stride[0];
    params.dbias_head = problem->dbias.stride[1];
    params.dv = dv->data;
    params.dv_batch = dv->stride[0];
    params.dv_row = dv->stride[1];
    params.dv_head = dv->stride[2];
    params.dv_aligned = is_aligned(dv->data, dv->stride[0] | dv->stride[1] | dv->stride[2]);
    params.ddt_proj = problem->ddt_proj.data;
    params.ddt_row = problem->ddt_proj.stride[0];
    params.da = problem->da.data;
    params.key_valid = (const uint8_t *)problem->key_valid.data;
    params.valid_batch = problem->key_valid.stride[0];
    params.kv_len = problem->kv_len;
    params.batch = (int32_t)problem->batch;
    params.kv_heads = (int32_t)problem->kv_heads;
    params.head_dim = (int32_t)problem->head_dim;
    params.channels = params.kv_heads * params.head_dim;
    params.is_exp = problem->bias_form == FDMA_BIAS_EXP;
    params.accumulate = problem->accumulate;
    plan_splits(&params);
    const int64_t splits = (int64_t)params.batch * params.splits * params.kv_heads;
    params.dt_sums =
        (float *)fdma_arena_take(arena, (size_t)(splits * params.channels) * sizeof(float));
    params.a_sums = (float *)fdma_arena_take(arena, (size_t)splits * sizeof(float));
    return params;
}

static size_t workspace(const fdma_problem *problem) {
    fdma_arena arena = {};
    plan_gradients(problem, &arena);
    return fdma_arena_size(&arena);
}

/* As many warps of a block have channels of their own as there are channels for. */
template <typename config>
static fdma_status launch_keys(const fdma_problem *problem, gradient_params params) {
    static_assert(sizeof(split_memory<config>) <= least_shared_bytes, "fits anywhere");
    launch_shape keys;
    params.key_warps = split_warps;
    while (params.key_warps > 1 &&
           split_warps / params.key_warps * config::channels < params.channels)
        params.key_warps /= 2;
    const int block_channels = split_warps / params.key_warps * config::channels;
    keys.grid = dim3((unsigned)params.batch * params.splits,
                     (unsigned)((params.channels + block_channels - 1) / block_channels));
    keys.block = dim3(split_threads);
    keys.shared_bytes = sizeof(split_memory<config>);
    keys.after_dependency = true;
    for (int32_t g = 0; g < params.kv_heads; g += config::heads)
        FDMA_TRY(launch("score_backward", add_keys<config>, keys, problem, params, g));
    return FDMA_OK;
}

template <typename element, int parts>
static fdma_status launch_parts(const fdma_problem *problem, const gradient_params &params) {
    if (params.kv_heads <= few_heads<element, parts>::heads)
        return launch_keys<few_heads<element, parts>>(problem, params);
    return launch_keys<many_heads<element, parts>>(problem, params);
}

template <typename element>
static fdma_status run_type(const fdma_problem *problem, const gradient_params &params) {
    const unsigned columns = (params.channels + finish_columns - 1) / finish_columns;
    launch_shape find, finish;
    find.grid = dim3((unsigned)params.batch * params.splits, (unsigned)params.kv_heads);
    find.block = dim3(find_threads);
    find.after_dependency = true;
    finish.grid = dim3(columns + 1, (unsigned)params.kv_heads);
    finish.block = dim3(finish_columns, finish_parts);
    if (params.batch > 0 && params.kv_len > 0) {
        FDMA_TRY(fdma_cuda_run_products(problem, params.score));
        FDMA_TRY(launch("score_backward", find_gradients<element>, find, problem, params));
        if (params.score.parts == 1)
            FDMA_TRY((launch_parts<element, 1>(problem, params)));
        else
            FDMA_TRY((launch_parts<element, 2>(problem, params)));
        finish.after_dependency = true;
    }
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
