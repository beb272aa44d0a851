/* Common code of the passes of backward: 64 rows (queries or keys) that stay in a thread block
 * while blocks of columns (keys or queries) are streamed past them, and writing gradients. */
#pragma once

#include "cuda/device/grid.cuh"
#include "cuda/mma/pairs.cuh"
#include "cuda/plan/backward.cuh"

/* A warp has 16 rows. If dk and dv of 16 keys do not fit in its registers, column_warps warps have
 * the same rows: each computes their weights, and sums some of the channels. pairs: with attn_mask
 * or attn_bias. */
template <typename type, int column_warps_, bool pairs, bool drops_> struct gradient_config {
    using element = type;
    static constexpr bool has_pairs = pairs;
    static constexpr bool drops = drops_; // with dropout
    static constexpr int head_dim = FDMA_HEAD_DIM;
    static constexpr int row_tiles = 1;
    static constexpr int row_warps = 4;
    static constexpr int rows = row_warps * mma_rows;
    static constexpr int keys = head_dim <= 64 ? 64 : head_dim <= 192 ? 32 : 16; // columns
    static constexpr int column_warps = column_warps_;
    static constexpr int warp_columns = head_dim / vec_channels / column_warps; // tiles of 8
    static constexpr int threads = column_warps * row_warps * warp_lanes;
    static constexpr int blocks = head_dim <= 128 ? 2 : 1; // on a multiprocessor
};

template <typename type, bool pairs, bool drops>
using query_config = gradient_config<type, 1, pairs, drops>;
template <typename type, bool pairs, bool drops>
using key_config = gradient_config<type, (FDMA_HEAD_DIM > 128 ? 2 : 1), pairs, drops>;

template <typename element> struct gradient_row {
    element *data;
    bool aligned; // to 4 bytes or more
    bool add;     // adds to the contents
};

template <typename element>
__device__ static void put_pair(const gradient_row<element> &row, int channel, float x, float y) {
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

/* The first channel of a warp's column tile d, relative to the warp's first channel. Pairs of
 * column tiles are assigned to the column warps in turn. */
template <int column_warps> __device__ static constexpr int tile_channel(int d) {
    return (d / 2 * 2 * column_warps + d % 2) * 8;
}

/* The first of this lane's two channels in column tile d of a column warp. */
template <int column_warps> __device__ static int channel_of(int d, int column_warp) {
    return tile_channel<column_warps>(d) + column_warp * 16 + opaque(threadIdx.x) % 4 * 2;
}
