/* Gathers rows of a tensor into swizzled panels (wgmma.cuh) by 16-byte asynchronous copies: eight
 * lanes copy one 128-byte line, a warp four rows at a time. */
#pragma once

#include "cuda/device/ptx.cuh"
#include "cuda/device/wgmma.cuh"

static constexpr int line_lanes = line_bytes / vec_bytes; // lanes that copy a line
static constexpr int copy_rows = 32 / line_lanes;         // rows that a warp copies at once

static constexpr uint32_t no_row = UINT32_MAX;

/* Row n begins at base + n * unit bytes. */
struct unit_rows {
    const char *base;
    uint32_t unit;

    __device__ const char *at(uint32_t n) const {
        return (const char *)mad_wide_u32(n, unit, (uint64_t)base);
    }

    __device__ unit_rows operator+(int bytes) const { return {base + bytes, unit}; }
};

/* gather_rows() for a head_dim that fills the panels (is_whole), or for any. */
template <int rows, int panels, int warp_rows, int batch, bool is_whole, class source_rows>
__device__ static void gather_panels(uint32_t to, const source_rows &source, uint32_t own_row,
                                     int head_dim) {
    constexpr int copies = warp_rows / copy_rows;
    const int lane = threadIdx.x % 32, vec = lane % line_lanes, row = lane / line_lanes;
    const uint32_t even = to + swizzled(row, vec), odd = to + swizzled(row + copy_rows, vec);
#pragma unroll
    for (int first = 0; first < copies; first += batch) {
        uint32_t n[batch];
#pragma unroll
        for (int i = 0; i < batch; i++)
            n[i] = __shfl_sync(~0u, own_row, (first + i) * copy_rows + row);
#pragma unroll
        for (int i = 0; i < batch; i++) {
            const int copy = first + i;
            const char *const from = source.at(n[i]);
            const uint32_t line =
                (copy % 2 == 0 ? even : odd) + copy / 2 * swizzle_rows * line_bytes;
#pragma unroll
            for (int panel = 0; panel < panels; panel++) {
                const bool is_there =
                    is_whole || panel * panel_channels + vec * vec_channels < head_dim;
                cp_async_16(line + panel * rows * line_bytes, from + panel * line_bytes,
                            n[i] != no_row && is_there ? vec_bytes : 0);
            }
        }
    }
}

/* Starts to copy rows into a block of `rows` rows and `panels` panels. This warp copies warp_rows
 * rows from first_row on. Lane l passes in own_row the index of the source row for row first_row +
 * l % warp_rows: that row begins at source.at(own_row), or is zero for no_row. Channels from
 * head_dim on are zero. batch: shuffles that are in flight together, because one shuffle takes as
 * long as six copies. */
template <int rows, int panels, int warp_rows, int batch = 4, class source_rows>
__device__ static void gather_rows(uint32_t block, int first_row, const source_rows &source,
                                   uint32_t own_row, int head_dim) {
    static_assert(warp_rows % swizzle_rows == 0, "rows of a warp begin where the swizzle does");
    const uint32_t to = block + first_row * line_bytes;
    const source_rows from = source + threadIdx.x % line_lanes * vec_bytes;
    if (head_dim == panels * panel_channels)
        gather_panels<rows, panels, warp_rows, batch, true>(to, from, own_row, head_dim);
    else
        gather_panels<rows, panels, warp_rows, batch, false>(to, from, own_row, head_dim);
}

/* ---- a pipeline of stages in shared memory ---- */

/* Waits until the phase of this parity is over. The first phase of a barrier has parity 0; the
 * phase before it, of parity 1, counts as over. A debug build traps after some seconds. */
__device__ static void wait(uint64_t *barrier, uint32_t parity) {
#ifdef NDEBUG
    while (!mbarrier_try_wait(barrier, parity)) {
    }
#else
    const uint32_t most_tries = 20000000; // each takes 0.1 us or more
    for (uint32_t tries = 0; !mbarrier_try_wait(barrier, parity); tries++)
        if (tries == most_tries)
            __trap();
#endif
}

/* Arrives once for each warp, after the reads of all its lanes. */
__device__ static void release(uint64_t *barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        mbarrier_arrive(barrier);
}

/* The state of a producer or a consumer in a pipeline: its stage, and the parity of that stage's
 * current phase. */
template <int stages> struct pipeline_state {
    int32_t stage = 0;
    uint32_t parity = 0;

    __device__ void advance(void) {
        stage++;
        if (stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
};
