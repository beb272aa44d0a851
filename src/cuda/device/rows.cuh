/* Kernels that process the rows of a tensor once: row_lanes neighbouring lanes take a row, one
 * vector each at a time. */
#pragma once

#include "core/integers.h"
#include "cuda/device/grid.cuh"
#include "cuda/device/head_view.cuh"
#include "cuda/device/vec.cuh"

static constexpr int row_threads = 256; // of a thread block
static constexpr int row_lanes = 8;
static constexpr int block_rows = row_threads / row_lanes;

/* The first element of a row of head `head`, which counts the heads of all sequences. */
template <typename element>
__device__ static element *row_of(const head_view &view, int64_t head, int64_t heads, int64_t row) {
    return (element *)view.data + head / heads * view.batch + row * view.row +
           head % heads * view.head;
}

__device__ static float row_sum(float x) {
    for (int step = row_lanes / 2; step > 0; step /= 2)
        x += __shfl_xor_sync(~0u, x, step);
    return x;
}

static inline launch_shape over_rows(int64_t rows, int64_t heads) {
    return {grid_of(divide_up(rows, block_rows), heads), dim3(row_threads)};
}
