/* The gradients of fdma_score() on any device from compute capability 8.0: dbias -> ddt -> dv,
 * ddt_proj and da. Keys without a gradient are not read.
 *
 * Where a block has all channels and heads it reads v once: find_gradients() and then add_tile()
 * on each tile. Otherwise one kernel writes ddt to the workspace, and another takes it from there.
 * What a split of keys adds to ddt_proj and da is added up in the order of splits, whose number
 * follows from kv_len and the channels alone. Source: docs/algorithm.md, backward. */
#include "cuda/sm80/score_gradients.cuh"

static constexpr int finish_columns = 32, finish_parts = 8; // of splits, a thread each
static constexpr int few_heads = 8, many_heads = 32;        // whose sums a thread holds

/* Writes a tile's ddt to the workspace, of the heads from g on. */
__device__ static inline void put_gradients(const tile_gradients &tile,
                                            const gradient_params &params, const key_list &list,
                                            int32_t b, int32_t g, int32_t n) {
    const int h = threadIdx.x / tile_keys, t = threadIdx.x % tile_keys, at = n * tile_keys + t;
    if (h < dot_heads && g + h < params.kv_heads && at < list.count)
        params.ddt[(b * params.kv_len + list.key[at]) * params.kv_heads + g + h] = tile.ddt[t][h];
}

/* ddt of the listed keys, of dot_heads kv heads from g on; returns what they add to da. A step is a
 * block of channels of a tile. */
template <typename element>
__device__ static inline float take_list(tile_slot *ring, tile_gradients *tile,
                                         const gradient_params &params, const key_list &list,
                                         int32_t b, int32_t g) {
    const int32_t blocks = (params.channels + block_channels - 1) / block_channels;
    const int32_t steps = (list.count + tile_keys - 1) / tile_keys * blocks;
    const int32_t own_c = threadIdx.x * thread_channels;
    float da = 0, low[half_sums] = {}, high[half_sums] = {}; // heads
    for (int32_t step = 1 - stages; step < steps; step++) {
        const int32_t ahead = step + stages - 1, n = step / blocks;
        if (ahead < steps)
            copy_tile<element>(ring + ahead % stages, params, list, b, ahead / blocks,
                               own_c + ahead % blocks * block_channels, false);
        cp_async_commit_group();
        if (step < 0)
            continue;
        cp_async_wait_group<stages - 1>();
        const int32_t c = own_c + step % blocks * block_channels;
        add_dots<element>(low, ring[step % stages], params, g, c);
        add_dots<element>(high, ring[step % stages], params, g + half_heads, c);
        if ((step + 1) % blocks != 0)
            continue;
        put_dots(tile, low, 0);
        put_dots(tile, high, 1);
        __syncthreads();
        find_gradient<element>(tile, params, list, g, n);
        __syncthreads();
        add_coefficients(da, *tile);
        put_gradients(*tile, params, list, b, g, n);
#pragma unroll
        for (int x = 0; x < half_sums; x++)
            low[x] = high[x] = 0;
    }
    return da;
}

/* ddt of all keys that have a gradient, of dot_heads kv heads, and what they add to da. */
template <typename element>
__global__ void __launch_bounds__(split_threads, 1) find_ddt(const gradient_params params) {
    tile_slot *const ring = &shared_memory<tile_slot>();
    __shared__ key_list list;
    __shared__ tile_gradients tile;
    const split_place place = find_split(params);
    const int32_t g = blockIdx.y * dot_heads;
    float da = 0;
    for (int64_t first = place.first; first < place.end; first += split_threads) {
        list_keys(&list, params, place.b, g, first, place.end);
        da += take_list<element>(ring, &tile, params, list, place.b, g);
    }
    put_coefficients(params, place.split, g, da);
}

/* A tile's ddt out of the workspace, of `heads` heads from g on. */
template <int heads>
__device__ static inline void load_gradients(float (*ddt)[heads], const gradient_params &params,
                                             const key_list &list, int32_t b, int32_t g,
                                             int32_t n) {
    for (int x = threadIdx.x; x < heads * tile_keys; x += split_threads) {
        const int t = x / heads, h = x % heads, at = n * tile_keys + t;
        const bool there = at < list.count && g + h < params.kv_heads;
        ddt[t][h] =
            there ? params.ddt[(b * params.kv_len + list.key[at]) * params.kv_heads + g + h] : 0;
    }
    __syncthreads();
}

/* ddt of a tile whose channels and heads are all this block's. */
template <typename element>
__device__ static inline void find_gradients(tile_gradients *tile, const tile_slot &slot,
                                             const gradient_params &params, const key_list &list,
                                             int32_t n) {
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
        float sums[half_sums] = {};
        add_dots<element>(sums, slot, params, half * half_heads, threadIdx.x * thread_channels);
        put_dots(tile, sums, half);
    }
    __syncthreads();
    find_gradient<element>(tile, params, list, 0, n);
    __syncthreads();
}

__device__ static inline void add_product(float4 &sum, float x, float4 y) {
    sum.x = fmaf(x, y.x, sum.x);
    sum.y = fmaf(x, y.y, sum.y);
    sum.z = fmaf(x, y.z, sum.z);
    sum.w = fmaf(x, y.w, sum.w);
}

/* Writes old + x to dv. */
template <typename element>
__device__ static inline void put_four(element *to, uint2 old, float4 x, bool aligned) {
    using type = element_type<element>;
    const float4 y = unpack_four<element>(old);
    const uint2 sum =
        make_uint2(type::pack(x.x + y.x, x.y + y.y), type::pack(x.z + y.z, x.w + y.w));
    if (aligned)
        *(uint2 *)to = sum;
    else
        for (int n = 0; n < thread_channels; n++)
            to[n] = ((const element *)&sum)[n];
}

/* What a key adds to the sums of eight heads, and these to its dv. */
__device__ static inline void add_key(float4 *sums, float4 &dv, const float *ddt, float4 v,
                                      const float4 (&weights)[few_heads]) {
    float x[few_heads];
    *(float4 *)&x[0] = *(const float4 *)&ddt[0];
    *(float4 *)&x[4] = *(const float4 *)&ddt[4];
    const bool finite = fabsf(v.x + v.y + v.z + v.w) < INFINITY;
#pragma unroll
    for (int n = 0; n < few_heads; n++) {
        add_product(dv, x[n], weights[n]);
        if (finite || x[n] != 0) // 0 * NaN is NaN
            add_product(sums[n], x[n], v);
    }
}

/* A tile against this thread's channels, from c on: dv of its keys, and its share of ddt_proj. */
template <typename element, int heads>
__device__ static inline void add_tile(float4 (&sums)[heads], const float (*ddt)[heads],
                                       const tile_slot &slot, const gradient_params &params,
                                       const key_list &list, int32_t b, int32_t g, int32_t c,
                                       int32_t tile) {
    constexpr int together = 2; // keys that weights are loaded for
    element *const dv =
        (element *)params.dv + b * params.dv_batch + channel_offset(params, c, params.dv_head);
    const int32_t count = min(list.count - tile * tile_keys, tile_keys);
    float4 weights[few_heads];
    load_heads<element>(weights, params, g, c);
#pragma unroll 1
    for (int t = 0; t < count; t += together) {
        float4 add[together] = {};
#pragma unroll
        for (int n = 0; n < heads; n += few_heads) {
            if (heads > few_heads)
                load_heads<element>(weights, params, g + n, c);
#pragma unroll
            for (int x = 0; x < together; x++)
                add_key(sums + n, add[x], ddt[t + x] + n,
                        unpack_four<element>(slot.v[t + x][threadIdx.x]), weights);
        }
#pragma unroll
        for (int x = 0; x < together; x++)
            if (params.dv != nullptr && t + x < count)
                put_four(dv + list.key[tile * tile_keys + t + x] * params.dv_row,
                         slot.dv[t + x][threadIdx.x], add[x], params.dv_aligned);
    }
}

/* ddt by key and head. */
template <int heads> struct split_memory {
    key_list list;
    tile_gradients tile;
    alignas(16) float ddt[tile_keys][heads];
};

/* The listed keys against a thread's channels; returns what they add to da, where it is fused. */
template <typename element, int heads>
__device__ static inline float add_list(float4 (&sums)[heads], tile_slot *ring,
                                        split_memory<heads> *shared, const gradient_params &params,
                                        int32_t b, int32_t g, int32_t c) {
    const key_list &list = shared->list;
    const int32_t tiles = (list.count + tile_keys - 1) / tile_keys;
    const bool is_fused = heads == few_heads && params.is_fused;
    const float (*const ddt)[heads] =
        is_fused ? (const float (*)[heads])shared->tile.ddt : shared->ddt;
    float da = 0;
    for (int32_t n = 1 - stages; n < tiles; n++) {
        const int32_t ahead = n + stages - 1;
        if (ahead < tiles)
            copy_tile<element>(ring + ahead % stages, params, list, b, ahead, c,
                               params.dv != nullptr);
        cp_async_commit_group();
        if (n < 0)
            continue;
        cp_async_wait_group<stages - 1>();
        const tile_slot &slot = ring[n % stages];
        if (is_fused) {
            find_gradients<element>(&shared->tile, slot, params, list, n);
            add_coefficients(da, shared->tile);
        } else {
            load_gradients<heads>(shared->ddt, params, list, b, g, n);
        }
        if (c < params.channels)
            add_tile<element>(sums, ddt, slot, params, list, b, g, c, n);
        __syncthreads();
    }
    return da;
}

/* dv of a split's keys, what they add to ddt_proj, and, where it is fused, to da: of `heads` kv
 * heads from g on and a block of channels. */
template <typename element, int heads>
__global__ void __launch_bounds__(split_threads, heads == few_heads ? 2 : 1)
    add_keys(const gradient_params params, const int32_t g) {
    tile_slot *const ring = &shared_memory<tile_slot>();
    __shared__ split_memory<heads> shared;
    const split_place place = find_split(params);
    const int32_t c = blockIdx.y * block_channels + threadIdx.x * thread_channels;
    float4 sums[heads] = {};
    float da = 0;
    for (int64_t first = place.first; first < place.end; first += split_threads) {
        list_keys(&shared.list, params, place.b, g, first, place.end);
        da += add_list<element>(sums, ring, &shared, params, place.b, g, c);
    }
    if (heads == few_heads && params.is_fused)
        put_coefficients(params, place.split, g, da);
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
    const bool there = is_coefficient ? threadIdx.x == 0 : c < params.channels;
    const float *const from =
        is_coefficient ? params.a_sums + g : params.dt_sums + (int64_t)g * params.channels + c;
    const int64_t stride = (int64_t)params.kv_heads * (is_coefficient ? 1 : params.channels);
    const float sum = add_up(from, there ? splits : 0, stride);
    if (!there || threadIdx.y > 0)
        return;
    if (is_coefficient)
        put_sum<element>(params.da, g, sum, params.wide_a, params.accumulate);
    else
        put_sum<element>(params.ddt_proj, g * params.ddt_row + c, sum, params.wide_dt_proj,
                         params.accumulate);
}

static constexpr size_t ring_bytes = stages * sizeof(tile_slot);
static_assert(ring_bytes + sizeof(split_memory<many_heads>) <= least_shared_bytes, "fits anywhere");

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
    const launch_shape keys = {dim3(blocks, blocks_y), dim3(split_threads), ring_bytes};
    for (int32_t g = 0; g < params.kv_heads; g += (int32_t)heads)
        FDMA_TRY(launch("score_backward", add_keys<element, heads>, keys, problem, params, g));
    return FDMA_OK;
}

template <typename element>
static fdma_status run_type(const fdma_problem *problem, const gradient_params &params) {
    const unsigned blocks = (unsigned)params.batch * params.splits;
    const unsigned heads = (unsigned)params.kv_heads;
    const unsigned columns = (params.channels + finish_columns - 1) / finish_columns;
    const launch_shape dots = {dim3(blocks, (heads + dot_heads - 1) / dot_heads),
                               dim3(split_threads), ring_bytes};
    if (blocks > 0 && !params.is_fused)
        FDMA_TRY(launch("score_backward", find_ddt<element>, dots, problem, params));
    if (blocks > 0 && params.kv_heads <= few_heads)
        FDMA_TRY((launch_keys<element, few_heads>(problem, params)));
    else if (blocks > 0)
        FDMA_TRY((launch_keys<element, many_heads>(problem, params)));
    return launch("score_backward", finish_sums<element>,
                  {dim3(columns + 1, heads), dim3(finish_columns, finish_parts)}, problem, params);
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
