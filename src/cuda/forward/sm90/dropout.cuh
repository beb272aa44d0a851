/* Dropout in the accumulators of a consumer of sm90's forward kernel. See core/dropout.h for the
 * codes. */
#pragma once

#include "cuda/forward/sm90/tile.cuh"

/* The code of a row past the last one is that of any row. */
__device__ static drop_code drop_code_of(const forward_plan &plan, const row_tile &tile,
                                         int32_t row) {
    const int32_t position = query_position(plan, tile.b, row / plan.group);
    const int32_t head = tile.g * plan.group + row % plan.group;
    return {row_code_of(plan, tile.b, head, position), position % 2 != 0 ? 0 : 1u << 16};
}

/* Clears the weights of dropped pairs. rows: codes of this thread's two rows. keys: of the keys of
 * a block, in the order of mask_index(). threshold: as in dropout_params. */
template <int steps>
__device__ static void drop_pairs(const drop_code (&rows)[2], const uint32_t *keys,
                                  uint32_t threshold, uint32_t (&weights)[steps][4]) {
    const uint32_t limit = threshold << 16;
#pragma unroll
    for (int i = 0; i < steps; i++) {
        const uint4 four = ((const uint4 *)keys)[i * 4 + threadIdx.x % 4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const drop_code &row = rows[k % 2];
            const uint32_t low = dropout_product(row.code, k < 2 ? four.x : four.z);
            const uint32_t high = dropout_product(row.code, k < 2 ? four.y : four.w);
            if ((low ^ low * row.fold) < limit)
                weights[i][k] &= 0xffff0000;
            if ((high ^ high * row.fold) < limit)
                weights[i][k] &= 0xffff;
        }
    }
}
