/* The products of score_backward on the tensor cores, of a warp's channels with a tile of listed
 * keys: ddt times dt_proj, for dv, and ddt times v, for ddt_proj.
 *
 * ddt takes part as the sum of two numbers of v's type, so that a product over 8 kv heads is one
 * over 16 of the tensor cores, and a product for 8 kv heads one of 16 rows. */
#ifndef FDMA_CUDA_SM80_SCORE_PRODUCTS_CUH
#define FDMA_CUDA_SM80_SCORE_PRODUCTS_CUH

#include "cuda/sm80/score_gradients.cuh"

static constexpr int quad_tiles = 4; // of 8 channels, of which a lane has a chunk of dv together

template <typename element_, int parts_, int head_tiles_, int channels_, int stages_>
struct product_config {
    using element = element_;
    static constexpr int parts = parts_; // of dt_proj
    static constexpr int head_tiles = head_tiles_;
    static constexpr int heads = head_tiles * tile_heads;
    static constexpr int channels = channels_; // of a warp
    static constexpr int channel_tiles = channels / 8;
    static constexpr int quads = channel_tiles / quad_tiles;
    static constexpr int row_chunks = channels / chunk_channels;
    static constexpr int copy_rows = 32 / row_chunks; // that a warp copies at once
    static constexpr int stages = stages_;            // of a warp's ring
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

/* A warp's channels, and its lane's. */
struct warp_channels {
    int32_t first;  // of the warp
    int64_t v, dv;  // offsets of the chunk that the lane copies
    bool is_there;  // that chunk
    int64_t put[2]; // offsets of the chunks of dv that it writes
    bool is_put[2];
};

/* A key's offset in v or dv, of a channel of all heads. */
__device__ static inline int64_t channel_offset(const gradient_params &params, int32_t channel,
                                                int64_t head_stride) {
    return channel / params.head_dim * head_stride + channel % params.head_dim;
}

template <typename config>
__device__ static inline warp_channels find_channels(const gradient_params &params, int32_t b,
                                                     int32_t first) {
    const int32_t lane = threadIdx.x % 32,
                  mine = first + lane % config::row_chunks * chunk_channels;
    const int64_t v = b * params.score.v_batch, dv = b * params.dv_batch;
    warp_channels at = {first, v + channel_offset(params, mine, params.score.v_head),
                        dv + channel_offset(params, mine, params.dv_head), mine < params.channels};
#pragma unroll
    for (int n = 0; n < config::quads; n++) {
        const int32_t put = first + (n * quad_tiles + lane % 4) * chunk_channels;
        at.put[n] = dv + channel_offset(params, put, params.dv_head);
        at.is_put[n] = put < params.channels;
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

/* Starts copying tile n of the listed keys; dv where it is wanted. */
template <typename config>
__device__ static inline void copy_tile(tile_slot<config> *slot, const gradient_params &params,
                                        const key_list<config::heads> &list,
                                        const warp_channels &at, int32_t n) {
    using element = typename config::element;
    const element *const v = (const element *)params.score.v, *const dv =
                                                                  (const element *)params.dv;
    const int lane = threadIdx.x % 32, chunk = lane % config::row_chunks;
#pragma unroll
    for (int t = lane / config::row_chunks; t < tile_keys; t += config::copy_rows) {
        const bool there = n * tile_keys + t < list.count && at.is_there;
        const int64_t key = there ? list.key[n * tile_keys + t] : 0;
        const int place = place_of<config>(t, chunk);
        copy_chunk(&slot->v[place], there ? v + at.v + key * params.score.v_row : v, there,
                   params.score.is_aligned);
        if (dv != nullptr)
            copy_chunk(&slot->dv[place], there ? dv + at.dv + key * params.dv_row : dv, there,
                       params.dv_aligned);
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

/* The power of two that brings `most` to where float16 is densest, and the one back. */
struct power {
    float there, back;
};

template <typename element> __device__ static inline power find_power(float most) {
    const int exponent = __float_as_int(most) >> 23;
    if (is_bfloat16<element>() || exponent == 255) // which can do without
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

/* The largest of what some lanes of a quad, or all, have. */
__device__ static inline float most_of_quad(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

/* ddt of tile n with keys as rows, and what the sums of keys lane / 4 and that + 8 are to be
 * multiplied with. */
template <typename config>
__device__ static inline void load_keys(uint4 (&ddt)[config::head_tiles], float (&back)[2],
                                        const key_list<config::heads> &list, const float *scales,
                                        int32_t n) {
    using element = typename config::element;
    const int lane = threadIdx.x % 32;
    uint32_t *const parts = (uint32_t *)ddt;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float *const row = list.ddt[n * tile_keys + half * 8 + lane / 4];
        float2 pair[config::head_tiles];
        float most = 0;
#pragma unroll
        for (int tile = 0; tile < config::head_tiles; tile++) {
            const int head = tile * tile_heads + lane % 4 * 2;
            pair[tile] = *(const float2 *)&row[head];
            if (!is_bfloat16<element>()) {
                pair[tile].x *= scales[head];
                pair[tile].y *= scales[head + 1];
            }
            most = fmaxf(most, fmaxf(fabsf(pair[tile].x), fabsf(pair[tile].y)));
        }
        const power factor = find_power<element>(is_bfloat16<element>() ? 0 : most_of_quad(most));
        back[half] = factor.back;
#pragma unroll
        for (int tile = 0; tile < config::head_tiles; tile++)
            split_pair<element>(parts[tile * 4 + half], parts[tile * 4 + 2 + half],
                                pair[tile].x * factor.there, pair[tile].y * factor.there);
    }
}

/* The same with heads as rows: the upper parts, then the lower ones. */
template <typename config>
__device__ static inline void load_heads(uint4 (&ddt)[config::head_tiles],
                                         float (&back)[config::head_tiles],
                                         const key_list<config::heads> &list, int32_t n) {
    using element = typename config::element;
    const int lane = threadIdx.x % 32;
    uint32_t *const parts = (uint32_t *)ddt;
#pragma unroll
    for (int tile = 0; tile < config::head_tiles; tile++) {
        float x[4], most = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int32_t at = n * tile_keys + lane % 4 * 2 + i / 2 * 8 + i % 2;
            x[i] = list.ddt[at][tile * tile_heads + lane / 4];
            most = fmaxf(most, fabsf(x[i]));
        }
        const power factor = find_power<element>(is_bfloat16<element>() ? 0 : most_of_quad(most));
        back[tile] = factor.back;
#pragma unroll
        for (int half = 0; half < 2; half++)
            split_pair<element>(parts[tile * 4 + half * 2], parts[tile * 4 + half * 2 + 1],
                                x[half * 2] * factor.there, x[half * 2 + 1] * factor.there);
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

/* Adds ddt times dt_proj to dv of tile n. */
template <typename config>
__device__ static inline void
add_to_dv(const tile_slot<config> &slot, const warp_weights<config> &weights,
          const gradient_params &params, const key_list<config::heads> &list, const float *scales,
          const warp_channels &at, int32_t n) {
    using element = typename config::element;
    const int lane = threadIdx.x % 32;
    uint4 ddt[config::head_tiles];
    float back[2];
    load_keys<config>(ddt, back, list, scales, n);
#pragma unroll
    for (int quad = 0; quad < config::quads; quad++) {
        float sums[quad_tiles][4] = {};
#pragma unroll
        for (int part = 0; part < config::parts; part++)
#pragma unroll
            for (int tile = 0; tile < config::head_tiles; tile++)
#pragma unroll
                for (int x = 0; x < quad_tiles; x++) {
                    const uint32_t pair = weights.pair[part][tile][quad * quad_tiles + x];
                    mma_m16n8k16(sums[x], ddt[tile], make_uint2(pair, pair), element());
                }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = half * 8 + lane / 4, entry = n * tile_keys + row;
            if (entry < list.count && at.is_put[quad])
                put_chunk((element *)params.dv + at.put[quad] + list.key[entry] * params.dv_row,
                          slot.dv[place_of<config>(row, quad * quad_tiles + lane % 4)], sums, half,
                          back[half], params.dv_aligned);
        }
    }
}

/* A lane's sums for ddt_proj: of head lane / 4 of a tile of heads, of channels lane % 4 * 2 and
 * that + 1 of a tile of channels. */
template <typename config> struct warp_sums {
    float2 of[config::head_tiles][config::channel_tiles];
};

/* Adds ddt times v of tile n. A tensor core, which truncates, adds up a tile by itself. */
template <typename config>
__device__ static inline void add_to_sums(warp_sums<config> &sums, const tile_slot<config> &slot,
                                          const key_list<config::heads> &list, int32_t n) {
    const int lane = threadIdx.x % 32;
    uint4 ddt[config::head_tiles];
    float back[config::head_tiles];
    load_heads<config>(ddt, back, list, n);
#pragma unroll
    for (int two = 0; two < config::channel_tiles; two += 2) {
        uint32_t v[4];
        ldmatrix_x4_trans(v, shared_address(&slot.v[place_of<config>(lane % 16, two + lane / 16)]));
#pragma unroll
        for (int tile = 0; tile < config::head_tiles; tile++)
#pragma unroll
            for (int x = 0; x < 2; x++) {
                float product[4] = {};
                mma_m16n8k16(product, ddt[tile], make_uint2(v[x * 2], v[x * 2 + 1]),
                             typename config::element());
                float2 &sum = sums.of[tile][two + x];
                sum.x = fmaf(product[0] + product[2], back[tile], sum.x);
                sum.y = fmaf(product[1] + product[3], back[tile], sum.y);
            }
    }
}

#endif
