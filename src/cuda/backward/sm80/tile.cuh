/* Common code of the passes of backward: 64 rows (queries or keys) that stay in a thread block
 * while blocks of columns (keys or queries) are streamed past them, and writing gradients. */
#pragma once

#include "cuda/device/grid.cuh"
#include "cuda/mma/attention.cuh"
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

/* ---- dattn_bias ---- */

/* Writes dattn_bias. The rows of a lane may be heads that share its elements: then their gradients
 * are summed in registers. The sums go to memory in one of the ways of pair_writing. */

/* Rows of a tile that are neighbours and belong to one lane. The first is a multiple of this. */
static constexpr int consecutive_rows = 4;

/* The number of consecutive rows that share the elements of dattn_bias: 1, 2 or all. `sharing` is
 * the number of query heads that do. */
static inline int32_t rows_sharing_pairs(int64_t sharing, int64_t group) {
    if (sharing == 1 || group % 2 != 0)
        return 1;
    return group % consecutive_rows == 0 ? consecutive_rows : 2;
}

/* Stores the gradient of a pair that shares its element with no other pair, at an offset. */
template <typename element>
__device__ static void store_pair(const pair_view &pairs, int64_t offset, float ds) {
    if (pairs.dtype == pair_view::float32)
        ((float *)pairs.data)[offset] = ds;
    else
        ((element *)pairs.data)[offset] = from_float<element>(ds);
}

template <typename element>
__device__ static void put_pair_gradient(const backward_plan &plan, int64_t offset, float ds) {
    if (plan.dpair_writing == pairs_added)
        atomicAdd((float *)plan.dpairs.data + offset, ds);
    else
        store_pair<element>(plan.dpairs, offset, ds);
}

/* Sums the gradients of a lane's rows for one key. The first of the rows that share an element gets
 * their sum. Each row has a bit in `kept`, set if it keeps the key, and a bit in the result, set if
 * its element has a gradient. Gradients of rows that do not keep the key are 0. */
__device__ static uint32_t sum_sharing_rows(float (&ds)[consecutive_rows], uint32_t kept,
                                            int sharing) {
    if (sharing == 1)
        return kept;
    ds[0] += ds[1];
    ds[2] += ds[3];
    kept = (kept | kept >> 1) & 5;
    if (sharing == 2)
        return kept;
    ds[0] += ds[2];
    return kept != 0;
}

/* The rows of dattn_bias that a tile owns: offset[r] is their first element, for every row r of the
 * tile that is a multiple of `sharing` and below `rows`. aligned: whole vectors may be written. */
struct owned_pairs {
    const int64_t *offset;
    int32_t rows, sharing;
    bool aligned;
};

/* Clears the keys from `from` to `end` - 1 of the rows that a tile owns. If they are written as
 * vectors, it clears the vectors that begin in this range: ranges follow one another, from key 0 to
 * the last one. row_threads threads take a row. */
template <typename element, int threads>
__device__ static void clear_pairs(const pair_view &pairs, const owned_pairs &owned, int32_t from,
                                   int32_t end) {
    constexpr int row_threads = 8;
    const int size = pairs.dtype == pair_view::float32 ? sizeof(float) : sizeof(element);
    const int step = owned.aligned ? (int)sizeof(uint4) / size : 1;
    const int32_t first = (from + step - 1) / step, last = (end + step - 1) / step;
    for (int r = threadIdx.x / row_threads * owned.sharing; r < owned.rows;
         r += threads / row_threads * owned.sharing) {
        char *const row = (char *)pairs.data + owned.offset[r] * size;
        for (int32_t n = first + threadIdx.x % row_threads; n < last; n += row_threads)
            if (owned.aligned)
                *(uint4 *)(row + (int64_t)n * sizeof(uint4)) = make_uint4(0, 0, 0, 0);
            else
                store_pair<element>(pairs, owned.offset[r] + n * pairs.key, 0);
    }
}
