/* What kernels of score_backward work from, and what they do before the products: the gradients in
 * front of dt_proj, and which keys of a split have one. */
#ifndef FDMA_CUDA_SM80_SCORE_GRADIENTS_CUH
#define FDMA_CUDA_SM80_SCORE_GRADIENTS_CUH

#include "cuda/device/element.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/sm80/score.cuh"

static constexpr int find_threads = 256;
static constexpr int split_threads = 128;
static constexpr int split_warps = split_threads / 32;
static constexpr int tile_keys = 16; // of a product
static constexpr int tile_heads = 8; // of a product, each in two parts

struct gradient_params {
    score_params score; // v, dt_proj as weights, and where their products are: dt
    const void *a;
    const float *dbias;
    const uint8_t *key_valid;                                            // NULL: all
    void *dv, *ddt_proj, *da;                                            // dv NULL: not wanted
    int64_t dbias_batch, dbias_head, dv_batch, dv_row, dv_head, ddt_row; // strides in elements
    int64_t valid_batch;
    float *ddt;     // [batch][kv_heads][kv_len], in the place of dt
    float *dt_sums; // [batch * splits][kv_heads][channels]
    float *a_sums;  // [batch * splits][kv_heads]
    int64_t kv_len, split_keys;
    int32_t batch, splits, kv_heads, head_dim, channels;
    int32_t key_warps; // of a block, that have the same channels
    bool dv_aligned, is_exp, accumulate;
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

/* What a key's dbias of one kv head makes of the gradients of dt and of a. */
struct key_gradient {
    float ddt, da;
};

__device__ static inline key_gradient find_gradient(float dbias, float dt, float a, bool is_exp) {
    const float plus = isnan(dt) ? dt : fmaxf(dt, 0) + log1pf(expf(-fabsf(dt))); // softplus
    const float dz = is_exp ? dbias * expf(a * plus) : dbias;
    return {dz * a / (1 + expf(-dt)), dz * plus};
}

/* The sum over a block of find_threads, in the first thread. */
__device__ static inline float sum_block(float x) {
    __shared__ float of_warp[find_threads / 32];
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2)
        x += __shfl_xor_sync(~0u, x, lane);
    if (threadIdx.x % 32 == 0)
        of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    for (int warp = 1; warp < find_threads / 32 && threadIdx.x == 0; warp++)
        x += of_warp[warp];
    return x;
}

/* From dt to ddt, 0 where dbias is, and what a split adds to da: of kv head blockIdx.y. */
template <typename element>
__global__ void __launch_bounds__(find_threads)
    find_gradients(const __grid_constant__ gradient_params params) {
    const split_place place = find_split(params);
    const int32_t g = blockIdx.y;
    const float *const dbias = params.dbias + place.b * params.dbias_batch + g * params.dbias_head;
    const uint8_t *const valid = params.key_valid + place.b * params.valid_batch;
    float *const ddt = params.ddt + ((int64_t)place.b * params.kv_heads + g) * params.kv_len;
    const float a = params.score.wide_a ? ((const float *)params.a)[g]
                                        : to_float(((const element *)params.a)[g]);
    float da = 0;
    griddepcontrol_wait(); // for dt
    griddepcontrol_launch_dependents();
    for (int64_t j = place.first + threadIdx.x; j < place.end; j += find_threads) {
        key_gradient gradient = {};
        if (dbias[j] != 0 && (params.key_valid == nullptr || valid[j] != 0)) // NaN is a gradient
            gradient = find_gradient(dbias[j], ddt[j], a, params.is_exp);
        ddt[j] = gradient.ddt;
        da += gradient.da;
    }
    da = sum_block(da);
    if (threadIdx.x == 0)
        params.a_sums[(int64_t)place.split * params.kv_heads + g] = da;
}

/* ddt of a sequence's kv heads from g on. */
__device__ static inline const float *ddt_of(const gradient_params &params, int32_t b, int32_t g) {
    return params.ddt + ((int64_t)b * params.kv_heads + g) * params.kv_len;
}

/* Keys with a gradient, of split_threads of a split, and their ddt of `heads` kv heads; up to a
 * whole tile it is zeros. Rows are such that a warp's reads are in different banks. */
template <int heads> struct key_list {
    alignas(16) int32_t of_warp[split_warps];
    alignas(16) float ddt[split_threads][heads + 4];
    int64_t key[split_threads];
    int32_t count;
};

/* The place of this thread's key in the list, if it is `mine`. */
template <int heads> __device__ static inline int32_t find_place(key_list<heads> *list, bool mine) {
    const unsigned mask = __ballot_sync(~0u, mine);
    const int warp = threadIdx.x / 32;
    int32_t place = __popc(mask & lanemask_lt()), all = 0;
    __syncthreads(); // the last list is read
    if (threadIdx.x % 32 == 0)
        list->of_warp[warp] = __popc(mask);
    __syncthreads();
    for (int w = 0; w < split_warps; w++) {
        place += w < warp ? list->of_warp[w] : 0;
        all += list->of_warp[w];
    }
    if (threadIdx.x == 0)
        list->count = all;
    for (int x = threadIdx.x; x < tile_keys * heads && all % tile_keys != 0; x += split_threads)
        if (all + x / heads < (all / tile_keys + 1) * tile_keys)
            list->ddt[all + x / heads][x % heads] = 0;
    return place;
}

/* Lists, ascending, the keys from `first` on, up to split_threads of them, that have a gradient of
 * any of `heads` kv heads from g on, and these. */
template <int heads>
__device__ static inline void list_keys(key_list<heads> *list, const gradient_params &params,
                                        int32_t b, int32_t g, int64_t first, int64_t end) {
    const float *const ddt = ddt_of(params, b, g);
    const int64_t j = first + threadIdx.x;
    const int32_t count = min(heads, params.kv_heads - g);
    bool mine = false;
#pragma unroll 8
    for (int n = 0; n < heads; n++)
        mine |= n < count && j < end && ddt[n * params.kv_len + j] != 0;
    const int32_t place = find_place(list, mine);
    if (mine)
        list->key[place] = j;
#pragma unroll 8
    for (int n = 0; n < heads; n++)
        if (mine)
            list->ddt[place][n] = n < count ? ddt[n * params.kv_len + j] : 0;
    __syncthreads();
}

#endif
