/* Rows of a tensor into shared memory, wherever they lie, by 16-byte asynchronous copies: eight
 * lanes move one 128-byte line, a warp four rows at a time. */
#ifndef FDMA_CUDA_DEVICE_GATHER_CUH
#define FDMA_CUDA_DEVICE_GATHER_CUH

#include "cuda/device/wgmma.cuh"

static constexpr int line_lanes = line_bytes / chunk_bytes; // lanes that move a line
static constexpr int step_rows = 32 / line_lanes;           // rows that a warp moves at once

/* Where rows are: row n at base + n * unit bytes. */
struct row_source {
    const char *base;
    uint32_t unit;
};

static constexpr uint32_t no_row = UINT32_MAX;

/* Begins to copy rows of `panels` panels to `block`, which has `rows` of them: this warp takes the
 * warp_rows from first_row on. Lane l says which row of the source first_row + l % warp_rows is;
 * no_row: it is 0. Channels from head_dim on are 0. */
template <int rows, int panels, int warp_rows>
__device__ static inline void gather_rows(uint32_t block, int first_row, const row_source &source,
                                          uint32_t own_row, int head_dim) {
    static_assert(warp_rows % swizzle_rows == 0, "rows of a warp begin where the swizzle does");
    const int lane = threadIdx.x % 32, chunk = lane % line_lanes, row = lane / line_lanes;
    const uint32_t to = block + first_row * line_bytes;
    const uint32_t even = to + swizzled(row, chunk), odd = to + swizzled(row + step_rows, chunk);
    const char *const base = source.base + chunk * chunk_bytes;
    const bool is_whole = __all_sync(~0u, own_row != no_row) && head_dim == panels * panel_channels;
#pragma unroll
    for (int step = 0; step < warp_rows / step_rows; step++) {
        const uint32_t n = __shfl_sync(~0u, own_row, step * step_rows + row);
        const uint32_t line = (step % 2 == 0 ? even : odd) + step / 2 * swizzle_rows * line_bytes;
        const char *const from = base + (uint64_t)n * source.unit;
        if (is_whole) {
#pragma unroll
            for (int panel = 0; panel < panels; panel++)
                cp_async_16(line + panel * rows * line_bytes, from + panel * line_bytes);
            continue;
        }
#pragma unroll
        for (int panel = 0; panel < panels; panel++) {
            const bool is_there =
                n != no_row && panel * panel_channels + chunk * (chunk_bytes / 2) < head_dim;
            cp_async_16(line + panel * rows * line_bytes,
                        is_there ? from + panel * line_bytes : source.base,
                        is_there ? chunk_bytes : 0);
        }
    }
}

#endif
