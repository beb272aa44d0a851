/* Rows of a tensor into shared memory, wherever they lie, by 16-byte asynchronous copies: eight
 * lanes move one 128-byte line, a warp four rows at a time. */
#ifndef FDMA_CUDA_DEVICE_GATHER_CUH
#define FDMA_CUDA_DEVICE_GATHER_CUH

#include "cuda/device/wgmma.cuh"

static constexpr int line_lanes = line_bytes / chunk_bytes; // lanes that move a line
static constexpr int step_rows = 32 / line_lanes;           // rows that a warp moves at once

static constexpr uint32_t no_row = UINT32_MAX;

/* Begins to copy rows of `panels` panels to `block`, which has `rows` of them: this warp takes the
 * warp_rows from first_row on. Lane l says that row first_row + l % warp_rows is the source's row
 * own_row, at source + own_row * unit; no_row: it is 0. Channels from head_dim on are 0. batch:
 * shuffles at once, one of which takes as long as six copies. */
template <int rows, int panels, int warp_rows, int batch = 4>
__device__ static inline void gather_rows(uint32_t block, int first_row, const char *source,
                                          uint32_t unit, uint32_t own_row, int head_dim) {
    static_assert(warp_rows % swizzle_rows == 0, "rows of a warp begin where the swizzle does");
    constexpr int steps = warp_rows / step_rows;
    const int lane = threadIdx.x % 32, chunk = lane % line_lanes, row = lane / line_lanes;
    const uint32_t to = block + first_row * line_bytes;
    const uint32_t even = to + swizzled(row, chunk), odd = to + swizzled(row + step_rows, chunk);
    const uint64_t base = (uint64_t)(source + chunk * chunk_bytes);
    bool is_there[panels];
#pragma unroll
    for (int panel = 0; panel < panels; panel++)
        is_there[panel] = panel * panel_channels + chunk * (chunk_bytes / 2) < head_dim;
#pragma unroll
    for (int first = 0; first < steps; first += batch) {
        uint32_t n[batch];
#pragma unroll
        for (int i = 0; i < batch; i++)
            n[i] = __shfl_sync(~0u, own_row, (first + i) * step_rows + row);
#pragma unroll
        for (int i = 0; i < batch; i++) {
            const int step = first + i;
            const char *const from = (const char *)mad_wide_u32(n[i], unit, base);
            const uint32_t line =
                (step % 2 == 0 ? even : odd) + step / 2 * swizzle_rows * line_bytes;
#pragma unroll
            for (int panel = 0; panel < panels; panel++)
                cp_async_16(line + panel * rows * line_bytes, from + panel * line_bytes,
                            n[i] != no_row && is_there[panel] ? chunk_bytes : 0);
        }
    }
}

#endif
