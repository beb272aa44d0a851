/* Copies of keys and weights to the shared memory of a score kernel. */
#pragma once

#include "cuda/score/weights.cuh"

static constexpr int mma_keys = 16, mma_heads = 8;

template <typename element_, int head_tiles_, int step_channels_, int most_warps_>
struct score_config {
    using element = element_;
    static constexpr int head_tiles = head_tiles_;       // mma tiles
    static constexpr int step_channels = step_channels_; // of a stage
    static constexpr int most_warps = most_warps_; // of a thread block: as many as fit in registers
    static constexpr int heads = head_tiles * mma_heads;
    static constexpr int row_bytes = step_channels * (int)sizeof(element);
    static constexpr int row_vecs = step_channels / vec_channels;
    static constexpr int copy_rows = 32 / row_vecs; // rows that a warp copies at once
    static constexpr int copies = mma_keys / copy_rows;
    static constexpr int stage_bytes = mma_keys * row_bytes;
};

/* True if this warp takes keys. If there are few keys, some warps only copy weights. */
__device__ static bool has_keys(const score_params &params) {
    return threadIdx.x / 32 < params.key_warps;
}

/* The keys of a warp in a round: a tile of mma_keys. A tile takes one round for each block of kv
 * heads. */
struct key_tile {
    int64_t b, j;
    bool is_there;
};

__device__ static key_tile find_tile(const score_params &params, int round) {
    const int block = round / params.head_blocks * gridDim.x + blockIdx.x;
    const int index = block * params.key_warps + threadIdx.x / 32;
    const int b = index / params.sequence_tiles;
    return {b, (int64_t)(index - b * params.sequence_tiles) * mma_keys,
            has_keys(params) && index < params.key_tiles};
}

__device__ static bool is_valid(const score_params &params, int64_t b, int64_t j) {
    return j < params.kv_len &&
           (params.key_valid == NULL || params.key_valid[b * params.valid_batch + j] != 0);
}

/* A warp's ring of stages, and the next copies of this lane: a vector of every copy_rows-th key of
 * a tile. */
template <typename config> struct key_ring {
    char *stages;
    int filled, free;                     // the stages to read next and to fill next
    const typename config::element *from; // the vector of the first key
    uint32_t valid;                       // bit i: key i exists and is valid
    int channel, d;                       // of the vector: counted over all heads, and in its head
    int round, step;
};

template <typename config>
__device__ static void advance(key_ring<config> &ring, const score_params &params, int channels) {
    ring.channel += channels;
    ring.d += channels;
    ring.from += channels;
    for (; ring.d >= params.head_dim; ring.d -= params.head_dim)
        ring.from += params.v.head - params.head_dim;
}

template <typename config>
__device__ static void enter_round(key_ring<config> &ring, const score_params &params, int round) {
    const key_tile tile = find_tile(params, round);
    const int lane = threadIdx.x % 32;
    const int64_t j = tile.j + lane / config::row_vecs;
    ring.round = round;
    ring.step = ring.channel = ring.d = 0;
    ring.valid = 0;
    ring.from = (const typename config::element *)params.v.data;
    if (!tile.is_there)
        return;
    ring.from += tile.b * params.v.batch + j * params.v.row;
#pragma unroll
    for (int i = 0; i < config::copies; i++)
        ring.valid |= (uint32_t)is_valid(params, tile.b, j + i * config::copy_rows) << i;
    advance(ring, params, lane % config::row_vecs * vec_channels);
}

/* The swizzled offset of a vector: vectors that ldmatrix reads together are in different banks. */
template <typename config> __device__ static uint32_t vec_offset(int row, int vec) {
    return row * config::row_bytes + (vec ^ row % 8) * vec_bytes;
}

/* The copies of a lane if v is not aligned: element by element. */
template <typename config>
__device__ static __noinline__ void
copy_unaligned(char *stage, const typename config::element *from, int64_t stride, uint32_t valid) {
    const int row = threadIdx.x % 32 / config::row_vecs, vec = threadIdx.x % config::row_vecs;
    for (int i = 0; i < config::copies; i++) {
        alignas(16) typename config::element elements[vec_channels] = {};
        if (valid >> i & 1)
            for (int d = 0; d < vec_channels; d++)
                elements[d] = from[i * stride + d];
        *(uint4 *)(stage + vec_offset<config>(row + i * config::copy_rows, vec)) =
            *(const uint4 *)elements;
    }
}

/* Starts a warp's copies of a step. Keys that are not valid become zeros. */
template <typename config>
__device__ static void copy_keys(key_ring<config> &ring, const score_params &params) {
    const int row = threadIdx.x % 32 / config::row_vecs, vec = threadIdx.x % config::row_vecs;
    const int64_t stride = config::copy_rows * params.v.row;
    const uint32_t valid = ring.channel < params.channels ? ring.valid : 0;
    char *const stage = ring.stages + ring.free * config::stage_bytes;
    const uint32_t to = shared_address(stage);
    const typename config::element *from = ring.from;
    if (!params.is_aligned)
        copy_unaligned<config>(stage, from, stride, valid);
    else
#pragma unroll
        for (int i = 0; i < config::copies; i++, from += stride)
            cp_async_16(to + vec_offset<config>(row + i * config::copy_rows, vec), from,
                        valid & 1u << i ? vec_bytes : 0);
    advance(ring, params, config::step_channels);
    if (++ring.step == params.panels * params.panel_steps)
        enter_round(ring, params, ring.round + 1);
}

/* Starts a thread block's copies of a panel: [limbs][panel_steps][heads] rows of the weights of the
 * kv heads from `head` on. */
template <typename config>
__device__ static void copy_panel(char *panel, const score_params &params, int head, int index) {
    const int vecs = params.panel_steps * config::heads * config::row_vecs;
    const int first = index * params.panel_steps * config::step_channels;
    const typename config::element *from =
        (const typename config::element *)params.weights + head * params.weight_row + first;
    uint32_t to = shared_address(panel);
    for (int limb = 0; limb < params.limbs; limb++) {
        for (int i = threadIdx.x; i < vecs; i += blockDim.x) {
            const int vec = i % config::row_vecs, row = i / config::row_vecs;
            const int g = row % config::heads, step = row / config::heads;
            const int channel = step * config::step_channels + vec * vec_channels;
            const bool is_there = head + g < params.kv_heads && first + channel < params.channels;
            cp_async_16(to + vec_offset<config>(row, vec), from + g * params.weight_row + channel,
                        is_there ? vec_bytes : 0);
        }
        from += params.weight_limb;
        to += vecs * vec_bytes;
    }
}
