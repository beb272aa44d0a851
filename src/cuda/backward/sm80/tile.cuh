/* What both passes of the backward share: 64 rows that stay (queries, or keys) against blocks of
 * columns that stream past (keys, or queries), and how gradients are written.
 *
 * Source: arXiv:2205.14135, algorithm 4. */
#ifndef FDMA_CUDA_BACKWARD_SM80_TILE_CUH
#define FDMA_CUDA_BACKWARD_SM80_TILE_CUH

#include "cuda/forward/sm80/walk.cuh"
#include "cuda/plan/backward.cuh"

/* A warp has 16 rows. Where dk and dv of 16 keys do not fit its registers, warps share rows: each
 * computes their weights and sums a part of the channels. */
template <typename type, int of_shares> struct gradient_config {
    using element = type;
    static constexpr int head_dim = FDMA_HEAD_DIM;
    static constexpr int row_tiles = 1;
    static constexpr int row_warps = 4;
    static constexpr int rows = row_warps * mma_rows;
    static constexpr int keys = head_dim <= 64 ? 64 : head_dim <= 192 ? 32 : 16; // columns
    static constexpr int shares = of_shares;
    static constexpr int share_columns = head_dim / chunk_channels / shares;
    static constexpr int threads = shares * row_warps * warp_lanes;
    static constexpr int blocks = head_dim <= 128 ? 2 : 1; // of a multiprocessor
};

template <typename type> using query_config = gradient_config<type, 1>;
template <typename type> using key_config = gradient_config<type, (FDMA_HEAD_DIM > 128 ? 2 : 1)>;

template <typename element> struct gradient_row {
    element *data;
    bool aligned; // to 4 bytes and more
    bool add;     // to what is there
};

/* Two neighbouring channels of a gradient. */
template <typename element>
__device__ static inline void put_pair(const gradient_row<element> &row, int channel, float x,
                                       float y) {
    using type = element_type<element>;
    element *const at = row.data + channel;
    if (!row.aligned) {
        at[0] = from_float<element>(row.add ? to_float(at[0]) + x : x);
        at[1] = from_float<element>(row.add ? to_float(at[1]) + y : y);
        return;
    }
    if (row.add) {
        const uint32_t old = *(const uint32_t *)at;
        x += to_float(((const element *)&old)[0]);
        y += to_float(((const element *)&old)[1]);
    }
    *(uint32_t *)at = type::pack(x, y);
}

/* The channels of a warp's column tiles, where every `shares`th pair of tiles is its: of tile d,
 * counted from its first one; and of a lane's pair. */
template <int shares> __device__ static inline constexpr int tile_channel(int d) {
    return (d / 2 * 2 * shares + d % 2) * 8;
}

template <int shares> __device__ static inline int channel_of(int d, int share) {
    return tile_channel<shares>(d) + share * 16 + opaque(threadIdx.x) % 4 * 2;
}

template <int columns> __device__ static inline void clear_sums(float (&sums)[1][columns][4]) {
#pragma unroll
    for (int d = 0; d < columns; d++)
        sums[0][d][0] = sums[0][d][1] = sums[0][d][2] = sums[0][d][3] = 0;
}

#endif
