/* What kernels of score_backward share: which keys of a split have a gradient, and what it is in
 * front of dt_proj.
 *
 * A block takes a split of a sequence's keys; it lists those that have a gradient, some at a time,
 * and takes the list tile by tile. Its threads have four channels each. */
#ifndef FDMA_CUDA_SM80_SCORE_GRADIENTS_CUH
#define FDMA_CUDA_SM80_SCORE_GRADIENTS_CUH

#include "cuda/device/host.cuh"
#include "cuda/device/ptx.cuh"

static constexpr int split_threads = 256;
static constexpr int split_warps = split_threads / 32;
static constexpr int thread_channels = 4; // of 16 bits: 8 bytes
static constexpr int block_channels = split_threads * thread_channels;
static constexpr int tile_keys = 8;
static constexpr int dot_heads = 8;  // whose dt a block computes at once
static constexpr int half_heads = 4; // whose dt a thread's registers hold
static constexpr int half_sums = half_heads * tile_keys;
static constexpr int stages = 2; // of tiles: one is under way to shared memory

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

/* Keys with a gradient, of split_threads of a split, and dbias of dot_heads kv heads. */
struct key_list {
    int32_t count;
    int32_t of_warp[split_warps];
    int64_t key[split_threads];
    float dbias[dot_heads][split_threads];
};

/* Of a tile: ddt, and what is summed up for da, by key and head; 0 where there is no gradient. */
struct tile_gradients {
    float of_warp[split_warps][dot_heads * tile_keys];
    alignas(16) float ddt[tile_keys][dot_heads];
    float da[tile_keys][dot_heads];
};

/* A thread's four channels of a tile's keys, of v and of dv; no other thread reads them. */
struct tile_slot {
    uint2 v[tile_keys][split_threads];
    uint2 dv[tile_keys][split_threads];
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

__device__ static inline bool is_valid(const gradient_params &params, int32_t b, int64_t j) {
    return params.key_valid == nullptr || params.key_valid[b * params.valid_batch + j] != 0;
}

/* dbias of a key, of the heads from g on; whether any head's, of all, is not 0. */
__device__ static inline bool load_dbias(float (&dbias)[dot_heads], const gradient_params &params,
                                         int32_t b, int32_t g, int64_t j) {
    bool any = false; // NaN is a gradient
    for (int32_t n = 0; n < params.kv_heads; n++)
        any |= (n < g || n >= g + dot_heads) && dbias_of(params, b, n, j) != 0;
#pragma unroll
    for (int n = 0; n < dot_heads; n++) {
        dbias[n] = g + n < params.kv_heads ? dbias_of(params, b, g + n, j) : 0;
        any |= dbias[n] != 0;
    }
    return any;
}

/* Lists, ascending, the keys from `first` on, up to split_threads of them, that have a gradient. */
__device__ static inline void list_keys(key_list *list, const gradient_params &params, int32_t b,
                                        int32_t g, int64_t first, int64_t end) {
    const int64_t j = first + threadIdx.x;
    float dbias[dot_heads] = {};
    const bool mine = j < end && is_valid(params, b, j) && load_dbias(dbias, params, b, g, j);
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
    if (mine) {
        list->key[before] = j;
#pragma unroll
        for (int n = 0; n < dot_heads; n++)
            list->dbias[n][before] = dbias[n];
    }
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

/* Four elements as they are; `there`: or zeros. */
template <typename element>
__device__ static inline void copy_four(uint2 *to, const element *from, bool there, bool aligned) {
    if (aligned) {
        cp_async_8(shared_address(to), from, there ? sizeof *to : 0);
        return;
    }
    alignas(8) element raw[thread_channels] = {};
    for (int x = 0; x < thread_channels && there; x++)
        raw[x] = from[x];
    *to = *(const uint2 *)raw;
}

template <typename element> __device__ static inline float4 unpack_four(uint2 four) {
    const element *const raw = (const element *)&four;
    return make_float4(to_float(raw[0]), to_float(raw[1]), to_float(raw[2]), to_float(raw[3]));
}

/* Starts copying tile n of the listed keys, this thread's channels from c on; dv where it is
 * wanted. */
template <typename element>
__device__ static inline void copy_tile(tile_slot *slot, const gradient_params &params,
                                        const key_list &list, int32_t b, int32_t n, int32_t c,
                                        bool with_dv) {
    const element *const v =
        (const element *)params.v + b * params.v_batch + channel_offset(params, c, params.v_head);
    const element *const dv = (const element *)params.dv + b * params.dv_batch +
                              channel_offset(params, c, params.dv_head);
#pragma unroll 2
    for (int t = 0; t < tile_keys; t++) {
        const bool there = n * tile_keys + t < list.count && c < params.channels;
        const int64_t key = there ? list.key[n * tile_keys + t] : 0;
        copy_four(&slot->v[t][threadIdx.x], there ? v + key * params.v_row : v, there,
                  params.v_aligned);
        if (with_dv)
            copy_four(&slot->dv[t][threadIdx.x], there ? dv + key * params.dv_row : dv, there,
                      params.dv_aligned);
    }
}

__device__ static inline float dot(float4 x, float4 y, float sum) {
    return fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, fmaf(x.w, y.w, sum))));
}

/* Lanes `step` apart share out the sums that they have left, and add up what both have. */
template <int step> __device__ static inline void share_sums(float (&sums)[half_sums]) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < step; i++) {
        const float low = sums[i], high = sums[i + step];
        sums[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, step);
    }
}

/* Adds up over the lanes of a warp: lane l comes to have sum l in the first one. */
__device__ static inline void scatter_sums(float (&sums)[half_sums]) {
    static_assert(half_sums == 32, "a sum a lane");
    share_sums<16>(sums);
    share_sums<8>(sums);
    share_sums<4>(sums);
    share_sums<2>(sums);
    share_sums<1>(sums);
}

/* Weights of `heads` heads from g on; 0 for those that are not there. */
template <typename element, int heads>
__device__ static inline void load_heads(float4 (&weights)[heads], const gradient_params &params,
                                         int32_t g, int32_t c) {
#pragma unroll
    for (int n = 0; n < heads; n++)
        weights[n] = g + n < params.kv_heads && c < params.channels
                         ? load_weights<element>(params, g + n, c)
                         : make_float4(0, 0, 0, 0);
}

/* Products of a thread's channels from c on, of half_heads heads from g on, [head][key]. */
template <typename element>
__device__ static inline void add_dots(float (&sums)[half_sums], const tile_slot &slot,
                                       const gradient_params &params, int32_t g, int32_t c) {
    float4 weights[half_heads];
    load_heads<element>(weights, params, g, c);
#pragma unroll
    for (int t = 0; t < tile_keys; t++) {
        const float4 v = unpack_four<element>(slot.v[t][threadIdx.x]);
#pragma unroll
        for (int n = 0; n < half_heads; n++)
            sums[n * tile_keys + t] = dot(v, weights[n], sums[n * tile_keys + t]);
    }
}

/* Half `half` of a tile's sums over the threads of a warp. */
__device__ static inline void put_dots(tile_gradients *tile, float (&sums)[half_sums], int half) {
    scatter_sums(sums);
    tile->of_warp[threadIdx.x / 32][half * half_sums + threadIdx.x % 32] = sums[0];
}

/* A thread a key and head: from dt to the gradients of dt and a; of tile n, heads from g on. */
template <typename element>
__device__ static inline void find_gradient(tile_gradients *tile, const gradient_params &params,
                                            const key_list &list, int32_t g, int32_t n) {
    const int h = threadIdx.x / tile_keys, t = threadIdx.x % tile_keys;
    const bool there = h < dot_heads && n * tile_keys + t < list.count;
    if (h >= dot_heads)
        return;
    const float dbias = there ? list.dbias[h][n * tile_keys + t] : 0;
    tile->ddt[t][h] = tile->da[t][h] = 0;
    if (dbias == 0)
        return;
    float dt = 0;
    for (int warp = 0; warp < split_warps; warp++)
        dt += tile->of_warp[warp][threadIdx.x];
    const float a = params.wide_a ? ((const float *)params.a)[g + h]
                                  : to_float(((const element *)params.a)[g + h]);
    const float plus = isnan(dt) ? dt : fmaxf(dt, 0) + log1pf(expf(-fabsf(dt))); // softplus
    const float dz = params.is_exp ? dbias * expf(a * plus) : dbias;
    tile->da[t][h] = dz * plus;
    tile->ddt[t][h] = dz * a / (1 + expf(-dt));
}

/* Adds a tile to thread h's sum of da, of head h. */
__device__ static inline void add_coefficients(float &sum, const tile_gradients &tile) {
    if (threadIdx.x < dot_heads)
#pragma unroll
        for (int t = 0; t < tile_keys; t++)
            sum += tile.da[t][threadIdx.x];
}

/* Writes what a split adds to da, of the heads from g on. */
__device__ static inline void put_coefficients(const gradient_params &params, int32_t split,
                                               int32_t g, float sum) {
    if (threadIdx.x < dot_heads && g + (int32_t)threadIdx.x < params.kv_heads)
        params.a_sums[(int64_t)split * params.kv_heads + g + threadIdx.x] = sum;
}

#endif
