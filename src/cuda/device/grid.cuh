/* The shape of a launch, and the head of a thread block in its grid. */
#pragma once

#include "core/integers.h"
#include "cuda/device/element.cuh"
#include "cuda/device/view.cuh"

#include <cuda_runtime.h>
#include <stdint.h>

/* The dynamic shared memory of a block on the devices with the least: 8.6, 8.9 and 12.0. */
static constexpr size_t least_shared_bytes = 99 * 1024;

/* When a kernel may start: after the previous kernel in the stream has ended, or earlier. In the
 * second case it waits for that kernel itself, by griddepcontrol_wait(). If it does not depend on
 * that kernel, a single thread block may wait, at its end, so that a kernel that waits for this one
 * has the results of both. */
enum launch_start { start_after, start_early };

struct launch_shape {
    dim3 grid, block;
    size_t shared_bytes = 0; // of dynamic shared memory
    launch_start start = start_after;
    unsigned cluster = 0; // blocks of a cluster along x; 0: no cluster
};

/* A grid of `blocks` blocks for each (b, g) or (b, h). The heads fill two axes, because one axis
 * may be too short. */
static inline dim3 grid_of(int64_t blocks, int64_t heads) {
    const int64_t most_y = 32768;
    const int64_t y = heads < most_y ? heads : most_y;
    return dim3((unsigned)blocks, (unsigned)y, (unsigned)((heads + y - 1) / y));
}

/* The head of a block in such a grid. It may be past the end. */
__device__ static int64_t head_of_block() { return blockIdx.y + (int64_t)blockIdx.z * gridDim.y; }

/* Kernels that process the rows of a tensor once: row_lanes neighbouring lanes take a row, one
 * vector each at a time. */

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
