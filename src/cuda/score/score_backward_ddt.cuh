/* The parameters of the kernels of score_backward, and the first of these kernels: from dbias and
 * dt it makes ddt, the gradient of dt, as operands of the tensor cores.
 *
 * An operand has ddt as a sum of two limbs of v's type. So 8 kv heads fill an mma, either as its 16
 * summands or as its 16 rows. */
#pragma once

#include "cuda/device/element.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/score/score.cuh"

static constexpr int find_threads = 256;
static constexpr int find_warps = find_threads / 32;
static constexpr int tile_keys = 16;           // of a product
static constexpr int tile_heads = 8;           // of a product, each in two limbs
static constexpr int round_tiles = find_warps; // of a round: the tiles of a thread block
static constexpr int round_keys = round_tiles * tile_keys;

struct gradient_params {
    score_params score; // v, the weights, and their products: dt
    const void *a;
    number_view<const float> dbias;
    const uint8_t *key_valid; // NULL: all
    int64_t valid_batch;
    head_view dv; // data NULL: not wanted
    void *ddt_proj, *da, *ddt_bias;
    int64_t ddt_row;
    float *ddt;          // [batch][kv_heads][kv_len], in place of dt
    void *operands;      // tile_operands [blocks of kv heads][batch][tiles]
    uint32_t *masks;     // of the same tiles; bit i: key i has a gradient
    float *dt_sums;      // [batch * splits][kv_heads][channels]
    float *a_sums;       // [batch * rounds][kv_heads]
    float *dt_bias_sums; // [batch * rounds][kv_heads]; NULL: ddt_bias is not wanted
    int32_t batch, kv_len, kv_heads, head_dim, channels;
    int32_t tiles, split_tiles; // of a sequence, of a split; multiples of round_tiles
    int32_t splits;             // of a sequence
    int32_t key_warps;          // warps of a thread block that have the same channels
    bool dv_aligned, is_exp, accumulate;
};

struct alignas(16) operand {
    uint32_t pairs[4];
};

/* ddt of a tile as operands of mma, and the factors that undo their scales. */
template <int head_tiles> struct alignas(16) tile_operands {
    operand keys[head_tiles][32];  // with keys as rows
    operand heads[head_tiles][32]; // with heads as rows: the upper limbs, then the lower ones
    float key_unscale[tile_keys];
    float head_unscale[head_tiles * tile_heads];
};

struct split_range {
    int32_t b, tile; // tile: the first, in its sequence
};

__device__ static split_range find_split(const gradient_params &params) {
    const int32_t split = opaque(blockIdx.x); // not hoisted, to save registers
    return {split / params.splits, split % params.splits * params.split_tiles};
}

__device__ static int32_t split_length(const gradient_params &params, split_range range) {
    return min(params.split_tiles, params.tiles - range.tile);
}

__device__ static int64_t first_tile(const gradient_params &params, int32_t head_block, int32_t b) {
    return ((int64_t)head_block * params.batch + b) * params.tiles;
}

__device__ static float *ddt_of(const gradient_params &params, int32_t b, int32_t g) {
    return params.ddt + ((int64_t)b * params.kv_heads + g) * params.kv_len;
}

__device__ static bool is_valid(const gradient_params &params, int32_t b, int32_t j) {
    return params.key_valid == NULL || params.key_valid[b * params.valid_batch + j] != 0;
}

/* The gradients of dt and a from one key and kv head. If dbias is not 0 but ddt is, ddt is stored
 * as -0: it is still a term of the sums, because 0 * inf is NaN. */
struct key_gradient {
    float ddt, da;
};

__device__ static bool is_term(float ddt) { return __float_as_uint(ddt) != 0; }

template <typename element>
__device__ static key_gradient find_gradient(const gradient_params &params, int32_t g, float dbias,
                                             float dt) {
    if (dbias == 0)
        return {};
    const float a = load_of_head<element>(params.a, params.score.wide_a, g);
    const float plus = softplus(dt);
    const float dz = params.is_exp ? dbias * expf(a * plus) : dbias;
    const float ddt = dz * a / (1 + expf(-dt));
    return {ddt == 0 ? -0.0f : ddt, dz * plus};
}

/* A power of two that scales numbers up to `most` to the upper range of float16, and its
 * inverse. */
struct power_scale {
    float factor, inverse;
};

template <typename element> __device__ static power_scale find_power(float most) {
    const int exponent = __float_as_int(most) >> 23;
    if (is_bfloat16<element>() || exponent == 255) // bfloat16 needs no scale; inf and NaN have none
        return {1, 1};
    const int bounded = max(exponent, 15);
    return {__int_as_float((268 - bounded) << 23), __int_as_float((bounded - 14) << 23)};
}

/* x and y as two limbs each: the upper bits, and the remainder. */
template <typename element>
__device__ static void split_limbs(uint32_t &upper, uint32_t &lower, float x, float y) {
    alignas(4)
        element pair[2] = {from_float_toward_zero<element>(x), from_float_toward_zero<element>(y)};
    upper = *(const uint32_t *)pair;
    lower = element_type<element>::pack(isinf(x) ? 0 : x - to_float(pair[0]),
                                        isinf(y) ? 0 : y - to_float(pair[1]));
}

/* ddt of a round by key and head, in rows padded so that a warp reads from different banks; each
 * key's term of da; and the divisors of the weights of each head. */
template <int head_tiles> struct round_gradients {
    static constexpr int heads = head_tiles * tile_heads, row = heads + 4;
    alignas(16) float ddt[round_keys][row];
    float da[heads][round_keys];
    float scales[heads];
};

/* Writes the operand with keys as rows. A lane has keys lane / 4 and lane / 4 + 8. */
template <typename element, int head_tiles>
__device__ static void arrange_keys(tile_operands<head_tiles> *to,
                                    const round_gradients<head_tiles> &from) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * tile_keys;
    operand limbs[head_tiles];
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
        const power_scale scale = find_power<element>(quad_max(most));
        to->key_unscale[key] = scale.inverse;
#pragma unroll
        for (int tile = 0; tile < head_tiles; tile++)
            split_limbs<element>(limbs[tile].pairs[half], limbs[tile].pairs[2 + half],
                                 pair[tile].x * scale.factor, pair[tile].y * scale.factor);
    }
#pragma unroll
    for (int tile = 0; tile < head_tiles; tile++)
        to->keys[tile][lane] = limbs[tile];
}

/* Writes the operand with heads as rows. A lane has head lane / 4 of a tile of heads. */
template <typename element, int head_tiles>
__device__ static void arrange_heads(tile_operands<head_tiles> *to,
                                     const round_gradients<head_tiles> &from) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * tile_keys;
#pragma unroll
    for (int tile = 0; tile < head_tiles; tile++) {
        const int head = tile * tile_heads + lane / 4;
        float x[4], most = 0;
        operand limbs;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[i] = from.ddt[first + lane % 4 * 2 + i / 2 * 8 + i % 2][head];
            most = fmaxf(most, fabsf(x[i]));
        }
        const power_scale scale = find_power<element>(quad_max(most));
        to->head_unscale[head] = scale.inverse;
#pragma unroll
        for (int half = 0; half < 2; half++)
            split_limbs<element>(limbs.pairs[half * 2], limbs.pairs[half * 2 + 1],
                                 x[half * 2] * scale.factor, x[half * 2 + 1] * scale.factor);
        to->heads[tile][lane] = limbs;
    }
}

/* The keys of a warp's tile that have a gradient, a bit each. */
template <int head_tiles>
__device__ static uint32_t find_mask(const round_gradients<head_tiles> &from) {
    const int lane = threadIdx.x % 32;
    const float *const row = from.ddt[threadIdx.x / 32 * tile_keys + lane % tile_keys];
    bool any = false;
#pragma unroll
    for (int head = lane / tile_keys; head < from.heads; head += 2)
        any |= is_term(row[head]);
    const uint32_t both = __ballot_sync(~0u, any);
    return (both | both >> tile_keys) & 0xffff;
}

/* Sets ddt of a thread's key, for every second kv head from g on; 0 where dbias is 0. */
template <typename element, int head_tiles>
__device__ static void take_key(round_gradients<head_tiles> *round, const gradient_params &params,
                                int32_t b, int32_t g, int32_t j) {
    constexpr int together = 4; // heads that are loaded at once
    const int key = threadIdx.x % round_keys, first = threadIdx.x / round_keys;
    const bool is_key = j < params.kv_len, there = is_key && is_valid(params, b, j);
#pragma unroll 1
    for (int n = first; n < round->heads; n += 2 * together) {
        float dbias[together], dt[together];
#pragma unroll
        for (int x = 0; x < together; x++) {
            const int32_t head = g + n + 2 * x;
            const bool is_head = head < params.kv_heads;
            dbias[x] = is_head && there ? params.dbias.at(b, head)[j] : 0;
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

__device__ static float sum_lanes(float x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2)
        x += __shfl_xor_sync(~0u, x, lane);
    return x;
}

/* The sum over the keys of a round of numbers `stride` apart, in every lane of a warp. */
__device__ static float sum_round(const float *of_key, int stride) {
    float sum = 0;
    for (int key = threadIdx.x % 32; key < round_keys; key += 32)
        sum += of_key[key * stride];
    return sum_lanes(sum);
}

/* Writes the terms of a round in da and ddt_bias. A warp takes a head. */
template <int head_tiles>
__device__ static void put_coefficients(const round_gradients<head_tiles> &round,
                                        const gradient_params &params, int32_t g) {
    for (int n = threadIdx.x / 32; n < round.heads && g + n < params.kv_heads; n += find_warps) {
        const int64_t at = (int64_t)blockIdx.x * params.kv_heads + g + n;
        const float da = sum_round(round.da[n], 1);
        if (threadIdx.x % 32 == 0)
            params.a_sums[at] = da;
        if (params.dt_bias_sums == NULL)
            continue;
        const float ddt_bias = sum_round(&round.ddt[0][n], round.row);
        if (threadIdx.x % 32 == 0)
            params.dt_bias_sums[at] = ddt_bias;
    }
}

/* Makes ddt from dt, its operands, and its terms of da and ddt_bias. A thread block takes a round
 * of a sequence's keys, and a block of kv heads. */
template <typename element, int head_tiles>
static __global__ void __launch_bounds__(find_threads)
    find_gradients(const __grid_constant__ gradient_params params) {
    __shared__ round_gradients<head_tiles> round;
    const int32_t g = blockIdx.y * round.heads, rounds = params.tiles / round_tiles;
    const int32_t b = blockIdx.x / rounds, tile = blockIdx.x % rounds * round_tiles;
    const int64_t mine = first_tile(params, blockIdx.y, b) + tile + threadIdx.x / 32;
    griddepcontrol_wait(); // for score_keys() and find_scales()
    griddepcontrol_launch_dependents();
    if (threadIdx.x < round.heads)
        round.scales[threadIdx.x] =
            params.score.scales != NULL && g + (int32_t)threadIdx.x < params.kv_heads
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
