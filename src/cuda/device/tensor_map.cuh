/* Tensor maps, with which the Tensor Memory Accelerator of compute capability 9.0 copies boxes of
 * rows of q or dout to shared memory, in the layout of wgmma.cuh. */
#pragma once

#include "cuda/device/wgmma.cuh"

#include <cuda.h>

/* A tensor [batch, length, heads, head_dim] of 16-bit elements, copied in boxes of `rows` rows of
 * one head and panel_channels channels. Rows and channels past the end are 0. */
struct row_map {
    CUtensorMap map;
    bool has_batches, has_heads; // false: there is one, or it is repeated
};

/* Copies the box that begins with row `row` and channel `channel` of a head. */
__device__ static void copy_box(uint32_t shared, const row_map &rows, int32_t b, int32_t row,
                                int32_t head, int32_t channel, uint64_t *barrier) {
    cp_async_bulk_tensor(shared, &rows.map, channel, row, rows.has_heads ? head : 0,
                         rows.has_batches ? b : 0, barrier);
}
