/* The query rows of a tile: (query, head of the group) pairs of one kv head, the heads of a query
 * side by side. Their coordinates, and loading q into shared memory. */
#pragma once

#include "cuda/mma/tile.cuh"
#include "cuda/plan/plan.cuh"

/* The rows of (b, g) from `first` on. Row r is head r % group of query r / group. */
struct row_range {
    int32_t b, g;
    int32_t first;
    int32_t total; // rows of (b, g); a tile's last rows may be past the end
};

__device__ static row_range row_range_of(const forward_plan &plan, int32_t head, int32_t first) {
    return {head / plan.kv_heads, head % plan.kv_heads, first, plan.q_len * plan.group};
}

/* The position of a row in a sequence of kv_len keys; past the end, the position of the last
 * row. */
__device__ static int32_t row_position(const forward_plan &plan, const row_range &range,
                                       int32_t kv_len, int32_t row) {
    return min(row, range.total - 1) / plan.group + kv_len - plan.q_len;
}

/* Maps row r of the warp's tiles to a row of the warp in the order of the range. Rows are permuted
 * so that a lane's accumulators belong to neighbours, mostly heads of one query. */
template <typename shape> __device__ static int row_order(int r) {
    return r % 8 * (2 * shape::row_tiles) + r / 8;
}

/* The offset of a row in a tensor of q's shape, in elements. */
__device__ static int64_t row_offset(const head_view &view, const forward_plan &plan,
                                     const row_range &range, int32_t row) {
    const int32_t i = row / plan.group, h = range.g * plan.group + row % plan.group;
    return range.b * view.batch + i * view.row + h * view.head;
}

/* The sink logit of a row, which may be past the end, as an exponent of 2. */
__device__ static float sink_of_row(const forward_plan &plan, const row_range &range, int32_t row) {
    return sink_exponent(plan, range.g * plan.group + row % plan.group);
}

/* The address of the lse of a row, if it is wanted. */
__device__ static float *lse_at(const forward_plan &plan, const row_range &range, int32_t row) {
    return plan.lse.at(range.b, range.g * plan.group + row % plan.group) + row / plan.group;
}

template <int rows>
__device__ static void write_positions(int32_t *position, const forward_plan &plan,
                                       const row_range &range, int32_t kv_len) {
    for (int r = threadIdx.x; r < rows; r += blockDim.x)
        position[r] = row_position(plan, range, kv_len, range.first + r);
}

/* Starts copying the rows of `warps` warps, of q or of another tensor of its shape, with `threads`
 * threads. Rows past the end become zeros. */
template <typename shape, int warps, int threads>
__device__ static void load_queries(char *to, const head_view &view, const forward_plan &plan,
                                    const row_range &range, bool aligned) {
    using layout = row_layout<shape::head_dim>;
    constexpr int warp_size = shape::row_tiles * mma_rows;
#pragma unroll 1
    for (int r = threadIdx.x / layout::copiers; r < warps * warp_size;
         r += threads / layout::copiers) {
        const int32_t row =
            range.first + r / warp_size * warp_size + row_order<shape>(r % warp_size);
        const bool there = row < range.total;
        const int64_t offset = there ? row_offset(view, plan, range, row) : 0;
        const char *const from = (const char *)view.data + 2 * offset;
        copy_row<shape::head_dim>(to, r, from, plan.head_dim / vec_channels, there, aligned);
    }
}
