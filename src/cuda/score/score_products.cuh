/* The products of score_backward on the tensor cores, of a warp's channels with a tile of keys: ddt
 * times dt_proj, for dv, and ddt times v, for ddt_proj. */
#ifndef FDMA_CUDA_SCORE_SCORE_PRODUCTS_CUH
#define FDMA_CUDA_SCORE_SCORE_PRODUCTS_CUH

#include "cuda/score/score_gradients.cuh"

static constexpr int split_threads = 128;
static constexpr int split_warps = split_threads / 32;
static constexpr int quad_tiles = 4; // of 8 channels, of which a lane has a chunk

template <typename element_, int parts_, int head_tiles_, int quads_, int stages_, int chunk_tiles_>
struct product_config {
    using element = element_;
    using operands = tile_operands<head_tiles_>;
    static constexpr int parts = parts_; // of dt_proj
    static constexpr int head_tiles = head_tiles_;
    static constexpr int heads = head_tiles * tile_heads;
    static constexpr int quads = quads_; // of a warp
    static constexpr int channel_tiles = quads * quad_tiles;
    static constexpr int channels = channel_tiles * 8;
    static constexpr int block_channels = split_warps * channels; // where there are so many
    static constexpr int row_chunks = channels / chunk_channels;
    static constexpr int stages = stages_;           // of a warp's ring
    static constexpr int chunk_tiles = chunk_tiles_; // whose operands a block copies at once
};

/* A tile's keys, a warp's channels. */
template <typename config> struct tile_slot {
    uint4 v[tile_keys * config::row_chunks], dv[tile_keys * config::row_chunks];
};

/* Where a chunk of a row lies: those that ldmatrix reads together are in different banks. */
template <typename config> __device__ static inline int place_of(int row, int chunk) {
    constexpr int line_rows = 8 / config::row_chunks;
    return row * config::row_chunks + (chunk ^ row / line_rows % config::row_chunks);
}

/* A lane has rows lane / 4 and that + 8 of a tile, and of each quad chunk lane % 4: where these
 * chunks of the split's first key are. */
template <typename config> struct lane_chunks {
    typename config::element *v[config::quads], *dv[config::quads];
    bool are_there[config::quads];
};

/* A key's offset in v or dv, of a channel of all heads. */
__device__ static inline int64_t channel_offset(const gradient_params &params, int32_t channel,
                                                int64_t head_stride) {
    return channel / params.head_dim * head_stride + channel % params.head_dim;
}

/* Of the channels from `first` on. */
template <typename config>
__device__ static inline lane_chunks<config> find_chunks(const gradient_params &params,
                                                         int32_t first) {
    using element = typename config::element;
    const split_place place = find_split(params);
    const int64_t key = (int64_t)place.tile * tile_keys + threadIdx.x % 32 / 4;
    lane_chunks<config> at;
#pragma unroll
    for (int n = 0; n < config::quads; n++) {
        const int32_t c = first + (n * quad_tiles + threadIdx.x % 4) * chunk_channels;
        at.v[n] = (element *)params.score.v + place.b * params.score.v_batch +
                  key * params.score.v_row + channel_offset(params, c, params.score.v_head);
        at.dv[n] = (element *)params.dv + place.b * params.dv_batch + key * params.dv_row +
                   channel_offset(params, c, params.dv_head);
        at.are_there[n] = c < params.channels;
    }
    return at;
}

/* Eight elements as they are; `there`: or zeros. */
template <typename element>
__device__ static inline void copy_chunk(uint4 *to, const element *from, bool there, bool aligned) {
    if (aligned) {
        cp_async_16(shared_address(to), from, there ? sizeof *to : 0);
        return;
    }
    alignas(16) element raw[chunk_channels] = {};
    for (int x = 0; x < chunk_channels && there; x++)
        raw[x] = from[x];
    *to = *(const uint4 *)raw;
}

/* Starts copying tile n of a split: the keys of its mask; dv where it is wanted. */
template <typename config>
__device__ static inline void copy_tile(tile_slot<config> *slot, const gradient_params &params,
                                        const lane_chunks<config> &at, int32_t n, uint32_t mask) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = half * 8 + lane / 4;
        const int64_t key = n * tile_keys + half * 8;
#pragma unroll
        for (int quad = 0; quad < config::quads; quad++) {
            const bool there = at.are_there[quad] && (mask >> row & 1) != 0;
            const int place = place_of<config>(row, quad * quad_tiles + lane % 4);
            copy_chunk(&slot->v[place], there ? at.v[quad] + key * params.score.v_row : at.v[0],
                       there, params.score.is_aligned);
            if (params.dv != nullptr)
                copy_chunk(&slot->dv[place], there ? at.dv[quad] + key * params.dv_row : at.dv[0],
                           there, params.dv_aligned);
        }
    }
}

/* dt_proj as ddt is multiplied with it: [part][tile of heads][tile of channels], of heads lane % 4
 * * 2 and that + 1 of a tile. The channels of a quad of tiles are such that a lane's sums are a
 * chunk: column c of tile n is channel c / 2 * 8 + n * 2 + c % 2. */
template <typename config> struct warp_weights {
    uint32_t pair[config::parts][config::head_tiles][config::channel_tiles];
};

/* A chunk of a part of dt_proj, of kv head g from channel c on. */
__device__ static inline uint4 load_weight_chunk(const gradient_params &params, int part, int32_t g,
                                                 int32_t c) {
    const score_params &score = params.score;
    if (g >= params.kv_heads || c >= params.channels)
        return make_uint4(0, 0, 0, 0);
    return *(const uint4 *)((const uint16_t *)score.weights + part * score.weight_part +
                            g * score.weight_row + c);
}

template <typename config>
__device__ static inline void load_weights(warp_weights<config> &weights,
                                           const gradient_params &params, int32_t g,
                                           int32_t first) {
    const int lane = threadIdx.x % 32, column = lane / 4;
    const uint32_t selector = column % 2 == 0 ? 0x5410 : 0x7632; // halves of two words
    uint32_t (*const pairs)[config::channel_tiles] = weights.pair[0];
#pragma unroll
    for (int x = 0; x < config::parts * config::head_tiles; x++)
#pragma unroll
        for (int quad = 0; quad < config::quads; quad++) {
            const int part = x / config::head_tiles;
            const int32_t head = g + x % config::head_tiles * tile_heads + lane % 4 * 2;
            const int32_t c = first + (quad * quad_tiles + column / 2) * chunk_channels;
            const uint4 low = load_weight_chunk(params, part, head, c);
            const uint4 high = load_weight_chunk(params, part, head + 1, c);
            uint32_t *const to = &pairs[x][quad * quad_tiles];
            to[0] = __byte_perm(low.x, high.x, selector);
            to[1] = __byte_perm(low.y, high.y, selector);
            to[2] = __byte_perm(low.z, high.z, selector);
            to[3] = __byte_perm(low.w, high.w, selector);
        }
}

/* Writes old + sums * back to dv: a lane's chunk of key lane / 4 + half * 8. */
template <typename element>
__device__ static inline void put_chunk(element *to, uint4 old, const float (&sums)[quad_tiles][4],
                                        int half, float back, bool aligned) {
    const element *const from = (const element *)&old;
    uint4 chunk;
    uint32_t *const pairs = (uint32_t *)&chunk;
#pragma unroll
    for (int n = 0; n < quad_tiles; n++)
        pairs[n] = element_type<element>::pack(
            fmaf(sums[n][half * 2], back, to_float(from[n * 2])),
            fmaf(sums[n][half * 2 + 1], back, to_float(from[n * 2 + 1])));
    if (aligned)
        *(uint4 *)to = chunk;
    else
        for (int x = 0; x < chunk_channels; x++)
            to[x] = ((const element *)&chunk)[x];
}

/* Two elements, 0 for those that are not finite. */
template <typename element> __device__ static inline uint32_t finite_pair(uint32_t pair) {
    const uint32_t exponents = is_bfloat16<element>() ? 0x7f807f80 : 0x7c007c00;
    return pair & ~__vcmpeq2(pair & exponents, exponents);
}

/* Operands of the later parts of dt_proj: inf times a later part that is 0 would be NaN. */
template <typename element> __device__ static inline uint4 finite_operand(uint4 x) {
    return make_uint4(finite_pair<element>(x.x), finite_pair<element>(x.y),
                      finite_pair<element>(x.z), finite_pair<element>(x.w));
}

/* Adds ddt times dt_proj to dv of tile n of a split, of the keys of its mask. */
template <typename config>
__device__ static inline void
add_to_dv(const tile_slot<config> &slot, const warp_weights<config> &weights,
          const gradient_params &params, const typename config::operands &operands,
          const lane_chunks<config> &at, int32_t n, uint32_t mask) {
    using element = typename config::element;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int quad = 0; quad < config::quads; quad++) {
        float sums[quad_tiles][4] = {};
#pragma unroll
        for (int tile = 0; tile < config::head_tiles; tile++) {
            uint4 ddt = operands.keys[tile][lane];
#pragma unroll
            for (int part = 0; part < config::parts; part++) {
                if (part == 1)
                    ddt = finite_operand<element>(ddt);
#pragma unroll
                for (int x = 0; x < quad_tiles; x++) {
                    const uint32_t pair = weights.pair[part][tile][quad * quad_tiles + x];
                    mma_m16n8k16(sums[x], ddt, make_uint2(pair, pair), element());
                }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = half * 8 + lane / 4;
            const int64_t key = n * tile_keys + half * 8;
            if (at.are_there[quad] && (mask >> row & 1) != 0)
                put_chunk(at.dv[quad] + key * params.dv_row,
                          slot.dv[place_of<config>(row, quad * quad_tiles + lane % 4)], sums, half,
                          is_bfloat16<element>() ? 1 : operands.back_of_key[row],
                          params.dv_aligned);
        }
    }
}

/* A lane's sums for ddt_proj: of head lane / 4 of a tile of heads, of channels lane % 4 * 2 and
 * that + 1 of a tile of channels. */
template <typename config> struct warp_sums {
    float2 of[config::head_tiles][config::channel_tiles];
};

/* Adds ddt times v of a tile. A tensor core, which truncates, adds up a tile by itself. */
template <typename config>
__device__ static inline void add_to_sums(warp_sums<config> &sums, const tile_slot<config> &slot,
                                          const typename config::operands &operands) {
    using element = typename config::element;
    const int lane = threadIdx.x % 32;
    uint32_t v[config::channel_tiles / 2][4];
#pragma unroll
    for (int two = 0; two < config::channel_tiles / 2; two++)
        ldmatrix_x4_trans(
            v[two], shared_address(&slot.v[place_of<config>(lane % 16, two * 2 + lane / 16)]));
#pragma unroll
    for (int tile = 0; tile < config::head_tiles; tile++) {
        const uint4 ddt = operands.heads[tile][lane];
        const float back =
            is_bfloat16<element>() ? 1 : operands.back_of_head[tile * tile_heads + lane / 4];
#pragma unroll
        for (int c = 0; c < config::channel_tiles; c++) {
            const uint32_t *const pair = &v[c / 2][c % 2 * 2];
            float product[4] = {};
            mma_m16n8k16(product, ddt, make_uint2(pair[0], pair[1]), element());
            float2 &sum = sums.of[tile][c];
            sum.x = fmaf(product[0] + product[2], back, sum.x);
            sum.y = fmaf(product[1] + product[3], back, sum.y);
        }
    }
}

#endif
