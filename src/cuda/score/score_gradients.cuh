/* What kernels of score_backward work from, and the gradients in front of dt_proj: from dbias and
 * dt to ddt, arranged as the tensor cores want it.
 *
 * ddt takes part in products as the sum of two numbers of v's type, so that a product over 8 kv
 * heads is one over 16 of the tensor cores, and a product for 8 kv heads one of 16 rows. */
#ifndef FDMA_CUDA_SCORE_SCORE_GRADIENTS_CUH
#define FDMA_CUDA_SCORE_SCORE_GRADIENTS_CUH

#include "cuda/device/element.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/score/score.cuh"

static constexpr int find_threads = 256;
static constexpr int find_warps = find_threads / 32;
static constexpr int tile_keys = 16;           // of a product
static constexpr int tile_heads = 8;           // of a product, each in two parts
static constexpr int round_tiles = find_warps; // whose gradients a block finds
static constexpr int round_keys = round_tiles * tile_keys;

struct gradient_params {
    score_params score; // v, dt_proj as weights, and where their products are: dt
    const void *a;
    const float *dbias;
    const uint8_t *key_valid;                                            // NULL: all
    void *dv, *ddt_proj, *da;                                            // dv NULL: not wanted
    int64_t dbias_batch, dbias_head, dv_batch, dv_row, dv_head, ddt_row; // strides in elements
    int64_t valid_batch;
    float *ddt;      // [batch][kv_heads][kv_len], in the place of dt
    void *operands;  // tile_operands [blocks of kv heads][batch][tiles]
    uint32_t *masks; // of tiles likewise: bit i: key i has a gradient
    float *dt_sums;  // [batch * splits][kv_heads][channels]
    float *a_sums;   // [batch * rounds][kv_heads]
    int32_t batch, kv_len, kv_heads, head_dim, channels;
    int32_t tiles, split_tiles; // of a sequence, of a split: multiples of round_tiles
    int32_t splits;             // of a sequence
    int32_t key_warps;          // of a block, that have the same channels
    bool dv_aligned, is_exp, accumulate;
};

/* ddt of a tile as mma wants it, a chunk for each lane, and what the sums are to be multiplied
 * with. */
template <int head_tiles> struct alignas(16) tile_operands {
    uint4 keys[head_tiles][32];  // with keys as rows
    uint4 heads[head_tiles][32]; // with heads: the upper parts, then the lower ones
    float back_of_key[tile_keys];
    float back_of_head[head_tiles * tile_heads];
};

/* Where a block's split is. */
struct split_place {
    int32_t b, tile; // in its sequence
};

__device__ static inline split_place find_split(const gradient_params &params) {
    const int32_t split = opaque(blockIdx.x); // computed where it is wanted: registers are few
    return {split / params.splits, split % params.splits * params.split_tiles};
}

/* Its tiles. */
__device__ static inline int32_t split_length(const gradient_params &params, split_place place) {
    return min(params.split_tiles, params.tiles - place.tile);
}

/* The index of a sequence's first tile, for a block of kv heads. */
__device__ static inline int64_t first_tile(const gradient_params &params, int32_t head_block,
                                            int32_t b) {
    return ((int64_t)head_block * params.batch + b) * params.tiles;
}

__device__ static inline float *ddt_of(const gradient_params &params, int32_t b, int32_t g) {
    return params.ddt + ((int64_t)b * params.kv_heads + g) * params.kv_len;
}

__device__ static inline bool is_valid(const gradient_params &params, int32_t b, int32_t j) {
    return params.key_valid == nullptr || params.key_valid[b * params.valid_batch + j] != 0;
}

/* What a key's dbias of one kv head makes of the gradients of dt and of a. Where dbias is not 0, a
 * ddt that is is -0: a term all the same, since 0 * inf is NaN. */
struct key_gradient {
    float ddt, da;
};

__device__ static inline bool is_term(float ddt) { return __float_as_uint(ddt) != 0; }

template <typename element>
__device__ static inline key_gradient find_gradient(const gradient_params &params, int32_t g,
                                                    float dbias, float dt) {
    if (dbias == 0)
        return {};
    const float a = params.score.wide_a ? ((const float *)params.a)[g]
                                        : to_float(((const element *)params.a)[g]);
    const float plus = softplus(dt);
    const float dz = params.is_exp ? dbias * expf(a * plus) : dbias;
    const float ddt = dz * a / (1 + expf(-dt));
    return {ddt == 0 ? -0.0f : ddt, dz * plus};
}

/* The power of two that brings `most` to where float16 is densest, and the one back. */
struct power {
    float there, back;
};

template <typename element> __device__ static inline power find_power(float most) {
    const int exponent = __float_as_int(most) >> 23;
    if (is_bfloat16<element>() || exponent == 255) // which can do without; inf and NaN have none
        return {1, 1};
    const int bounded = max(exponent, 15);
    return {__int_as_float((268 - bounded) << 23), __int_as_float((bounded - 14) << 23)};
}

/* x and y as sums of two numbers each: the upper bits, and what they leave over. */
template <typename element>
__device__ static inline void split_pair(uint32_t &upper, uint32_t &lower, float x, float y) {
    alignas(4)
        element pair[2] = {from_float_toward_zero<element>(x), from_float_toward_zero<element>(y)};
    upper = *(const uint32_t *)pair;
    lower = element_type<element>::pack(isinf(x) ? 0 : x - to_float(pair[0]),
                                        isinf(y) ? 0 : y - to_float(pair[1]));
}

/* ddt of a round by key and head, in rows such that a warp's reads are in different banks; what
 * each adds to da; and what the weights of each head were divided by. */
template <int head_tiles> struct round_gradients {
    static constexpr int heads = head_tiles * tile_heads;
    alignas(16) float ddt[round_keys][heads + 4];
    float da[heads][round_keys];
    float scales[heads];
};

/* A warp's tile with keys as rows: a lane has keys lane / 4 and that + 8. */
template <typename element, int head_tiles>
__device__ static inline void arrange_keys(tile_operands<head_tiles> *to,
                                           const round_gradients<head_tiles> &from) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * tile_keys;
    uint32_t parts[head_tiles][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int key = half * 8 + lane / 4;
        float2 pair[head_tiles];
        float most = 0;
#pragma unroll
        for (int tile = 0; tile < head_tiles; tile++) {
            const int head = tile * tile_heads + lane % 4 * 2;
            pair[tile] = *(const float2 *)&from.ddt[first + key][head];
            pair[tile].x *= from.scales[head];
            pair[tile].y *= from.scales[head + 1];
            most = fmaxf(most, fmaxf(fabsf(pair[tile].x), fabsf(pair[tile].y)));
        }
        const power factor = find_power<element>(quad_max(most));
        to->back_of_key[key] = factor.back;
#pragma unroll
        for (int tile = 0; tile < head_tiles; tile++)
            split_pair<element>(parts[tile][half], parts[tile][2 + half],
                                pair[tile].x * factor.there, pair[tile].y * factor.there);
    }
#pragma unroll
    for (int tile = 0; tile < head_tiles; tile++)
        to->keys[tile][lane] =
            make_uint4(parts[tile][0], parts[tile][1], parts[tile][2], parts[tile][3]);
}

/* With heads as rows: a lane has head lane / 4 of a tile of heads. */
template <typename element, int head_tiles>
__device__ static inline void arrange_heads(tile_operands<head_tiles> *to,
                                            const round_gradients<head_tiles> &from) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * tile_keys;
#pragma unroll
    for (int tile = 0; tile < head_tiles; tile++) {
        const int head = tile * tile_heads + lane / 4;
        float x[4], most = 0;
        uint32_t parts[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[i] = from.ddt[first + lane % 4 * 2 + i / 2 * 8 + i % 2][head];
            most = fmaxf(most, fabsf(x[i]));
        }
        const power factor = find_power<element>(quad_max(most));
        to->back_of_head[head] = factor.back;
#pragma unroll
        for (int half = 0; half < 2; half++)
            split_pair<element>(parts[half * 2], parts[half * 2 + 1], x[half * 2] * factor.there,
                                x[half * 2 + 1] * factor.there);
        to->heads[tile][lane] = make_uint4(parts[0], parts[1], parts[2], parts[3]);
    }
}

/* Which keys of a warp's tile have a gradient. */
template <int head_tiles>
__device__ static inline uint32_t find_mask(const round_gradients<head_tiles> &from) {
    const int lane = threadIdx.x % 32;
    const float *const row = from.ddt[threadIdx.x / 32 * tile_keys + lane % tile_keys];
    bool any = false;
#pragma unroll
    for (int head = lane / tile_keys; head < from.heads; head += 2)
        any |= is_term(row[head]);
    const uint32_t both = __ballot_sync(~0u, any);
    return (both | both >> tile_keys) & 0xffff;
}

/* ddt of a thread's key, of every second of the kv heads from g on; 0 where dbias is. */
template <typename element, int head_tiles>
__device__ static inline void take_key(round_gradients<head_tiles> *round,
                                       const gradient_params &params, int32_t b, int32_t g,
                                       int32_t j) {
    constexpr int together = 4; // heads whose numbers are loaded at once
    const int key = threadIdx.x % round_keys, first = threadIdx.x / round_keys;
    const bool is_key = j < params.kv_len, there = is_key && is_valid(params, b, j);
#pragma unroll 1
    for (int n = first; n < round->heads; n += 2 * together) {
        float dbias[together], dt[together];
#pragma unroll
        for (int x = 0; x < together; x++) {
            const int32_t head = g + n + 2 * x;
            const bool is_head = head < params.kv_heads;
            dbias[x] = is_head && there
                           ? params.dbias[b * params.dbias_batch + head * params.dbias_head + j]
                           : 0;
            dt[x] = is_head && is_key ? ddt_of(params, b, head)[j] : 0;
        }
#pragma unroll
        for (int x = 0; x < together; x++) {
            const int32_t head = g + n + 2 * x;
            const key_gradient gradient = find_gradient<element>(params, head, dbias[x], dt[x]);
            if (head < params.kv_heads && is_key)
                ddt_of(params, b, head)[j] = gradient.ddt;
            round->ddt[key][n + 2 * x] = gradient.ddt;
            round->da[n + 2 * x][key] = gradient.da;
        }
    }
}

/* The sum over a warp, in every lane. */
__device__ static inline float sum_lanes(float x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2)
        x += __shfl_xor_sync(~0u, x, lane);
    return x;
}

/* Writes what a round adds to da, a warp a head. */
template <int head_tiles>
__device__ static inline void put_coefficients(const round_gradients<head_tiles> &round,
                                               const gradient_params &params, int32_t g) {
    for (int n = threadIdx.x / 32; n < round.heads && g + n < params.kv_heads; n += find_warps) {
        float sum = 0;
        for (int key = threadIdx.x % 32; key < round_keys; key += 32)
            sum += round.da[n][key];
        sum = sum_lanes(sum);
        if (threadIdx.x % 32 == 0)
            params.a_sums[(int64_t)blockIdx.x * params.kv_heads + g + n] = sum;
    }
}

/* A block a round of a sequence's keys and a block of kv heads: from dt to ddt, its operands, and
 * what they add to da. */
template <typename element, int head_tiles>
__global__ void __launch_bounds__(find_threads)
    find_gradients(const __grid_constant__ gradient_params params) {
    __shared__ round_gradients<head_tiles> round;
    const int32_t g = blockIdx.y * round.heads, rounds = params.tiles / round_tiles;
    const int32_t b = blockIdx.x / rounds, tile = blockIdx.x % rounds * round_tiles;
    const int64_t mine = first_tile(params, blockIdx.y, b) + tile + threadIdx.x / 32;
    griddepcontrol_wait(); // for dt, and the scales
    griddepcontrol_launch_dependents();
    if (threadIdx.x < round.heads)
        round.scales[threadIdx.x] =
            params.score.scales != nullptr && g + (int32_t)threadIdx.x < params.kv_heads
                ? params.score.scales[g + threadIdx.x]
                : 1;
    take_key<element>(&round, params, b, g, tile * tile_keys + (int32_t)threadIdx.x % round_keys);
    __syncthreads();
    tile_operands<head_tiles> *const to = (tile_operands<head_tiles> *)params.operands + mine;
    arrange_keys<element>(to, round);
    arrange_heads<element>(to, round);
    const uint32_t mask = find_mask(round);
    if (threadIdx.x % 32 == 0)
        params.masks[mine] = mask;
    put_coefficients(round, params, g);
}

#endif
