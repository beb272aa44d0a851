/* What kernels of score_backward share: which keys of a split have a gradient, and what it is in
 * front of dt_proj.
 *
 * A block takes a split of a sequence's keys; it lists those that have a gradient, some at a time,
 * and takes the list tile by tile. Its threads have four channels each. */
#ifndef FDMA_CUDA_SM80_SCORE_GRADIENTS_CUH
#define FDMA_CUDA_SM80_SCORE_GRADIENTS_CUH

#include "cuda/device/element.cuh"
#include "cuda/device/host.cuh"

static constexpr int split_threads = 256;
static constexpr int split_warps = split_threads / 32;
static constexpr int thread_channels = 4;
static constexpr int block_channels = split_threads * thread_channels;
static constexpr int tile_keys = 8; // a warp's sums of a tile are tile_keys * dot_heads
static constexpr int dot_heads = 8; // whose dt a block computes at once
static constexpr int tile_sums = tile_keys * dot_heads;

struct gradient_params {
    const float *dbias;
    const void *v, *dt_proj, *a;
    const uint8_t *key_valid; // NULL: all
    void *dv, *ddt_proj, *da; // dv NULL: not wanted
    int64_t dbias_batch, dbias_head, v_batch, v_row, v_head, dv_batch, dv_row, dv_head;
    int64_t dt_row, ddt_row, valid_batch; // strides in elements
    float *ddt;                           // [batch][kv_len][kv_heads], of keys with a gradient
    float *dt_sums;                       // [batch * splits][kv_heads][channels]
    float *a_sums;                        // [batch * splits][kv_heads]
    int64_t kv_len, split_keys;
    int32_t batch, splits, kv_heads, head_dim, channels;
    bool wide_dt_proj, wide_a; // float32, beside v's type
    bool v_aligned, dv_aligned, dt_aligned;
    bool is_exp, accumulate;
    bool is_fused; // one block has all channels and heads: ddt stays in shared memory
};

/* Keys with a gradient, of split_threads of a split. */
struct key_list {
    int32_t count;
    int32_t of_warp[split_warps];
    int64_t key[split_threads];
};

/* Of a tile: what is summed up for da, and ddt, by head and key; 0 where there is no gradient. */
struct tile_gradients {
    alignas(16) float of_warp[split_warps][tile_sums];
    alignas(16) float ddt[dot_heads][tile_keys];
    float da[dot_heads][tile_keys];
};

/* Where a block's split is. */
struct split_place {
    int32_t b, split; // split: of all sequences
    int64_t first, end;
};

__device__ static inline split_place find_split(const gradient_params &params) {
    const int32_t split = blockIdx.x, b = split / params.splits;
    const int64_t first = split % params.splits * params.split_keys;
    return {b, split, first, min(first + params.split_keys, params.kv_len)};
}

__device__ static inline float dbias_of(const gradient_params &params, int32_t b, int32_t g,
                                        int64_t j) {
    return params.dbias[b * params.dbias_batch + g * params.dbias_head + j];
}

__device__ static inline bool has_gradient(const gradient_params &params, int32_t b, int64_t j) {
    if (params.key_valid != nullptr && params.key_valid[b * params.valid_batch + j] == 0)
        return false;
    for (int32_t g = 0; g < params.kv_heads; g++)
        if (dbias_of(params, b, g, j) != 0) // NaN is a gradient
            return true;
    return false;
}

/* Lists, ascending, the keys from `first` on, up to split_threads of them, that have a gradient. */
__device__ static inline void list_keys(key_list *list, const gradient_params &params, int32_t b,
                                        int64_t first, int64_t end) {
    const int64_t j = first + threadIdx.x;
    const bool mine = j < end && has_gradient(params, b, j);
    const unsigned mask = __ballot_sync(~0u, mine);
    const int warp = threadIdx.x / 32;
    int32_t before = __popc(mask & ((1u << threadIdx.x % 32) - 1)), all = 0;
    __syncthreads(); // the last list is read
    if (threadIdx.x % 32 == 0)
        list->of_warp[warp] = __popc(mask);
    __syncthreads();
    for (int w = 0; w < split_warps; w++) {
        before += w < warp ? list->of_warp[w] : 0;
        all += list->of_warp[w];
    }
    if (mine)
        list->key[before] = j;
    if (threadIdx.x == 0)
        list->count = all;
    __syncthreads();
}

/* Four neighbouring elements, of v's type or float32. */
template <typename element>
__device__ static inline float4 load_four(const element *from, bool aligned) {
    if (!aligned)
        return make_float4(to_float(from[0]), to_float(from[1]), to_float(from[2]),
                           to_float(from[3]));
    alignas(16) element raw[4];
    if (sizeof(element) == 4)
        *(uint4 *)raw = *(const uint4 *)from;
    else
        *(uint2 *)raw = *(const uint2 *)from;
    return make_float4(to_float(raw[0]), to_float(raw[1]), to_float(raw[2]), to_float(raw[3]));
}

/* Of kv head g, from a channel on. */
template <typename element>
__device__ static inline float4 load_weights(const gradient_params &params, int32_t g,
                                             int32_t channel) {
    const int64_t at = g * params.dt_row + channel;
    if (params.wide_dt_proj)
        return load_four((const float *)params.dt_proj + at, params.dt_aligned);
    return load_four((const element *)params.dt_proj + at, params.dt_aligned);
}

/* A key's offset in v or dv, of a channel of all heads. */
__device__ static inline int64_t channel_offset(const gradient_params &params, int32_t channel,
                                                int64_t head_stride) {
    return channel / params.head_dim * head_stride + channel % params.head_dim;
}

__device__ static inline float dot(float4 x, float4 y, float sum) {
    return fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, fmaf(x.w, y.w, sum))));
}

/* Lanes `step` apart share out the sums that they have left, and add up what both have. */
template <int step> __device__ static inline void share_sums(float (&sums)[tile_sums]) {
    constexpr int half = step * tile_sums / 32;
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < half; i++) {
        const float low = sums[i], high = sums[i + half];
        sums[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, step);
    }
}

/* Adds up over the lanes of a warp: lane l comes to have sums 2 l and 2 l + 1 in the first two. */
__device__ static inline void scatter_sums(float (&sums)[tile_sums]) {
    static_assert(tile_sums == 64, "two sums a lane in the end");
    share_sums<16>(sums);
    share_sums<8>(sums);
    share_sums<4>(sums);
    share_sums<2>(sums);
    share_sums<1>(sums);
}

/* dt of a tile's keys, of the heads from g on, by warp: sums of the channels of its threads. */
template <typename element>
__device__ static inline void dot_tile(tile_gradients *tile, const gradient_params &params,
                                       int32_t b, int32_t g, const int64_t *keys, int32_t count) {
    float sums[tile_sums] = {}; // [head][key]
    for (int32_t c = threadIdx.x * thread_channels; c < params.channels; c += block_channels) {
        const element *const v = (const element *)params.v + b * params.v_batch +
                                 channel_offset(params, c, params.v_head);
        float4 values[tile_keys];
#pragma unroll
        for (int t = 0; t < tile_keys; t++)
            values[t] = t < count ? load_four(v + keys[t] * params.v_row, params.v_aligned)
                                  : make_float4(0, 0, 0, 0);
#pragma unroll
        for (int n = 0; n < dot_heads; n++) {
            if (g + n >= params.kv_heads)
                continue;
            const float4 weights = load_weights<element>(params, g + n, c);
#pragma unroll
            for (int t = 0; t < tile_keys; t++)
                sums[n * tile_keys + t] = dot(values[t], weights, sums[n * tile_keys + t]);
        }
    }
    scatter_sums(sums);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    *(float2 *)&tile->of_warp[warp][lane * 2] = make_float2(sums[0], sums[1]);
}

/* A thread a key and head: from dt to the gradients of dt and a. */
template <typename element>
__device__ static inline void find_gradient(tile_gradients *tile, const gradient_params &params,
                                            int32_t b, int32_t g, const int64_t *keys,
                                            int32_t count) {
    const int n = threadIdx.x / tile_keys, t = threadIdx.x % tile_keys;
    const bool there = n < dot_heads && g + n < params.kv_heads && t < count;
    const float dbias = there ? dbias_of(params, b, g + n, keys[t]) : 0;
    if (n >= dot_heads)
        return;
    tile->ddt[n][t] = tile->da[n][t] = 0;
    if (dbias == 0)
        return;
    float dt = 0;
    for (int warp = 0; warp < split_warps; warp++)
        dt += tile->of_warp[warp][threadIdx.x];
    const float a = params.wide_a ? ((const float *)params.a)[g + n]
                                  : to_float(((const element *)params.a)[g + n]);
    const float plus = isnan(dt) ? dt : fmaxf(dt, 0) + log1pf(expf(-fabsf(dt))); // softplus
    const float dz = params.is_exp ? dbias * expf(a * plus) : dbias;
    tile->da[n][t] = dz * plus;
    tile->ddt[n][t] = dz * a / (1 + expf(-dt));
}

/* ddt and da of a tile, in shared memory. */
template <typename element>
__device__ static inline void find_gradients(tile_gradients *tile, const gradient_params &params,
                                             int32_t b, int32_t g, const int64_t *keys,
                                             int32_t count) {
    dot_tile<element>(tile, params, b, g, keys, count);
    __syncthreads();
    find_gradient<element>(tile, params, b, g, keys, count);
    __syncthreads();
}

/* Adds a tile to thread n's sum of da, of head n. */
__device__ static inline void add_coefficients(float &sum, const tile_gradients *tile) {
    if (threadIdx.x < dot_heads)
#pragma unroll
        for (int t = 0; t < tile_keys; t++)
            sum += tile->da[threadIdx.x][t];
}

#endif
