/* The products of score_backward on the tensor cores, for a tile of keys and a warp's channels: ddt
 * times dt_proj, which is added to dv, and ddt times v, which is summed for ddt_proj. */
#pragma once

#include "cuda/score/score_backward_ddt.cuh"

static constexpr int split_threads = 128;
static constexpr int split_warps = split_threads / 32;
static constexpr int quad_tiles = 4; // tiles of 8 channels; a lane has one vector of each quad

template <typename element_, int limbs_, int head_tiles_, int quads_, int stages_, int step_tiles_>
struct product_config {
    using element = element_;
    using operands = tile_operands<head_tiles_>;
    static constexpr int limbs = limbs_; // of dt_proj
    static constexpr int head_tiles = head_tiles_;
    static constexpr int heads = head_tiles * tile_heads;
    static constexpr int quads = quads_; // quads of channel tiles that a warp has
    static constexpr int channel_tiles = quads * quad_tiles;
    static constexpr int channels = channel_tiles * 8;
    static constexpr int block_channels =
        split_warps * channels; // of a thread block, if there are enough
    static constexpr int row_vecs = channels / vec_channels;
    static constexpr int stages = stages_;         // of a warp's ring
    static constexpr int step_tiles = step_tiles_; // tiles whose operands a thread block loads in a
                                                   // step
};

/* A stage of a warp's ring: the warp's channels of a tile of keys. */
template <typename config> struct tile_stage {
    uint4 v[tile_keys * config::row_vecs], dv[tile_keys * config::row_vecs];
};

/* The swizzled index of a vector: vectors that ldmatrix reads together are in different banks. */
template <typename config> __device__ static int vec_index(int row, int vec) {
    constexpr int line_rows = 8 / config::row_vecs;
    return row * config::row_vecs + (vec ^ row / line_rows % config::row_vecs);
}

/* A lane has rows lane / 4 and lane / 4 + 8 of a tile, and vector lane % 4 of each quad: the
 * addresses of these vectors for the split's first key. */
template <typename config> struct lane_vecs {
    typename config::element *v[config::quads], *dv[config::quads];
    bool are_there[config::quads];
};

/* The offset of a channel, counted over all heads, in a key's row of v or dv. */
__device__ static int64_t channel_offset(const gradient_params &params, int32_t channel,
                                         int64_t head_stride) {
    return channel / params.head_dim * head_stride + channel % params.head_dim;
}

/* Sets the addresses of the vectors of the channels from `first` on. */
template <typename config>
__device__ static lane_vecs<config> find_vecs(const gradient_params &params, int32_t first) {
    using element = typename config::element;
    const split_range range = find_split(params);
    const int64_t key = (int64_t)range.tile * tile_keys + threadIdx.x % 32 / 4;
    lane_vecs<config> at;
#pragma unroll
    for (int n = 0; n < config::quads; n++) {
        const int32_t c = first + (n * quad_tiles + threadIdx.x % 4) * vec_channels;
        at.v[n] = (element *)params.score.v.data + range.b * params.score.v.batch +
                  key * params.score.v.row + channel_offset(params, c, params.score.v.head);
        at.dv[n] = (element *)params.dv.data + range.b * params.dv.batch + key * params.dv.row +
                   channel_offset(params, c, params.dv.head);
        at.are_there[n] = c < params.channels;
    }
    return at;
}

/* Copies eight elements, or writes zeros if !there. */
template <typename element>
__device__ static void copy_vec(uint4 *to, const element *from, bool there, bool aligned) {
    if (aligned) {
        cp_async_16(shared_address(to), from, there ? sizeof *to : 0);
        return;
    }
    alignas(16) element raw[vec_channels] = {};
    for (int x = 0; x < vec_channels && there; x++)
        raw[x] = from[x];
    *to = *(const uint4 *)raw;
}

/* Starts copying the keys of the mask of tile n of a split, and their dv if it is wanted. */
template <typename config>
__device__ static void copy_tile(tile_stage<config> *stage, const gradient_params &params,
                                 const lane_vecs<config> &at, int32_t n, uint32_t mask) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = half * 8 + lane / 4;
        const int64_t key = n * tile_keys + half * 8;
#pragma unroll
        for (int quad = 0; quad < config::quads; quad++) {
            const bool there = at.are_there[quad] && (mask >> row & 1) != 0;
            const int range = vec_index<config>(row, quad * quad_tiles + lane % 4);
            copy_vec(&stage->v[range], there ? at.v[quad] + key * params.score.v.row : at.v[0],
                     there, params.score.is_aligned);
            if (params.dv.data != NULL)
                copy_vec(&stage->dv[range], there ? at.dv[quad] + key * params.dv.row : at.dv[0],
                         there, params.dv_aligned);
        }
    }
}

/* dt_proj as the right operand for ddt: [limb][tile of heads][tile of channels]. A lane has heads
 * lane % 4 * 2 and the next of a tile. The channels of a quad of tiles are permuted so that a
 * lane's sums are one vector: column c of tile n is channel c / 2 * 8 + n * 2 + c % 2. */
template <typename config> struct warp_weights {
    uint32_t pair[config::limbs][config::head_tiles][config::channel_tiles];
};

/* A vector of a limb of dt_proj: kv head g, from channel c on. */
__device__ static uint4 load_weight_vec(const gradient_params &params, int limb, int32_t g,
                                        int32_t c) {
    const score_params &score = params.score;
    if (g >= params.kv_heads || c >= params.channels)
        return make_uint4(0, 0, 0, 0);
    return *(const uint4 *)((const uint16_t *)score.weights + limb * score.weight_limb +
                            g * score.weight_row + c);
}

template <typename config>
__device__ static void load_weights(warp_weights<config> &weights, const gradient_params &params,
                                    int32_t g, int32_t first) {
    const int lane = threadIdx.x % 32, column = lane / 4;
    const uint32_t selector = column % 2 == 0 ? 0x5410 : 0x7632; // picks the same half of two words
    uint32_t (*const pairs)[config::channel_tiles] = weights.pair[0];
#pragma unroll
    for (int x = 0; x < config::limbs * config::head_tiles; x++)
#pragma unroll
        for (int quad = 0; quad < config::quads; quad++) {
            const int limb = x / config::head_tiles;
            const int32_t head = g + x % config::head_tiles * tile_heads + lane % 4 * 2;
            const int32_t c = first + (quad * quad_tiles + column / 2) * vec_channels;
            const uint4 low = load_weight_vec(params, limb, head, c);
            const uint4 high = load_weight_vec(params, limb, head + 1, c);
            uint32_t *const to = &pairs[x][quad * quad_tiles];
            to[0] = __byte_perm(low.x, high.x, selector);
            to[1] = __byte_perm(low.y, high.y, selector);
            to[2] = __byte_perm(low.z, high.z, selector);
            to[3] = __byte_perm(low.w, high.w, selector);
        }
}

/* Writes old + sums * unscale to dv: a lane's vector of key lane / 4 + half * 8. */
template <typename element>
__device__ static void put_vec(element *to, uint4 old, const float (&sums)[quad_tiles][4], int half,
                               float unscale, bool aligned) {
    const element *const from = (const element *)&old;
    uint4 sum;
    uint32_t *const pairs = (uint32_t *)&sum;
#pragma unroll
    for (int n = 0; n < quad_tiles; n++)
        pairs[n] = element_type<element>::pack(
            fmaf(sums[n][half * 2], unscale, to_float(from[n * 2])),
            fmaf(sums[n][half * 2 + 1], unscale, to_float(from[n * 2 + 1])));
    if (aligned)
        *(uint4 *)to = sum;
    else
        for (int x = 0; x < vec_channels; x++)
            to[x] = ((const element *)&sum)[x];
}

/* Replaces elements that are not finite by 0, for the second limb of dt_proj: inf times a second
 * limb of 0 would be NaN. */
template <typename element> __device__ static void drop_infinite(operand &x) {
    const uint32_t exponents = is_bfloat16<element>() ? 0x7f807f80 : 0x7c007c00;
#pragma unroll
    for (int n = 0; n < 4; n++)
        x.pairs[n] &= ~__vcmpeq2(x.pairs[n] & exponents, exponents);
}

/* Adds ddt times dt_proj to dv, for the keys of the mask of tile n of a split. */
template <typename config>
__device__ static void add_to_dv(const tile_stage<config> &stage,
                                 const warp_weights<config> &weights, const gradient_params &params,
                                 const typename config::operands &operands,
                                 const lane_vecs<config> &at, int32_t n, uint32_t mask) {
    using element = typename config::element;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int quad = 0; quad < config::quads; quad++) {
        float sums[quad_tiles][4] = {};
#pragma unroll
        for (int tile = 0; tile < config::head_tiles; tile++) {
            operand ddt = operands.keys[tile][lane];
#pragma unroll
            for (int limb = 0; limb < config::limbs; limb++) {
                if (limb == 1)
                    drop_infinite<element>(ddt);
#pragma unroll
                for (int x = 0; x < quad_tiles; x++) {
                    const uint32_t pair = weights.pair[limb][tile][quad * quad_tiles + x];
                    mma_m16n8k16<element>(sums[x], ddt.pairs, pair, pair);
                }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = half * 8 + lane / 4;
            const int64_t key = n * tile_keys + half * 8;
            if (at.are_there[quad] && (mask >> row & 1) != 0)
                put_vec(at.dv[quad] + key * params.dv.row,
                        stage.dv[vec_index<config>(row, quad * quad_tiles + lane % 4)], sums, half,
                        is_bfloat16<element>() ? 1 : operands.key_unscale[row], params.dv_aligned);
        }
    }
}

/* A lane's sums for ddt_proj: for head lane / 4 of a tile of heads, and for channels lane % 4 * 2
 * and the next of a tile of channels. */
template <typename config> struct warp_sums {
    float2 of[config::head_tiles][config::channel_tiles];
};

/* Adds ddt times v of a tile. The tensor cores, which truncate, make only the sums within a
 * tile. */
template <typename config>
__device__ static void add_to_sums(warp_sums<config> &sums, const tile_stage<config> &stage,
                                   const typename config::operands &operands) {
    using element = typename config::element;
    const int lane = threadIdx.x % 32;
    uint32_t v[config::channel_tiles / 2][4];
#pragma unroll
    for (int two = 0; two < config::channel_tiles / 2; two++)
        ldmatrix_x4_trans(
            v[two], shared_address(&stage.v[vec_index<config>(lane % 16, two * 2 + lane / 16)]));
#pragma unroll
    for (int tile = 0; tile < config::head_tiles; tile++) {
        const operand ddt = operands.heads[tile][lane];
        const float unscale =
            is_bfloat16<element>() ? 1 : operands.head_unscale[tile * tile_heads + lane / 4];
#pragma unroll
        for (int c = 0; c < config::channel_tiles; c++) {
            const uint32_t *const pair = &v[c / 2][c % 2 * 2];
            float product[4] = {};
            mma_m16n8k16<element>(product, ddt.pairs, pair[0], pair[1]);
            float2 &sum = sums.of[tile][c];
            sum.x = fmaf(product[0] + product[2], unscale, sum.x);
            sum.y = fmaf(product[1] + product[3], unscale, sum.y);
        }
    }
}
