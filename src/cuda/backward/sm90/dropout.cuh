/* Dropout in the accumulators of a consumer of sm90's backward kernel, whose rows are keys and
 * whose columns are queries. See core/dropout.h for the codes. */
#pragma once

#include "cuda/backward/sm90/tile.cuh"

/* Whether a pair is dropped, by the upper or the lower half of dropout_mix() of its codes, given
 * dropout_product(). limit: the threshold times 2^16. */
__device__ static bool drops_upper(uint32_t product, uint32_t limit) { return product < limit; }

__device__ static bool drops_lower(uint32_t product, uint32_t limit) {
    return (product ^ product << 16) < limit;
}

/* Sets the signs of the weights of dropped pairs, as weights are never negative. queries: codes of
 * the positions of the lane's columns. Two columns share one if the first is even; otherwise the
 * second column has the code after it. keys: codes of the lane's two rows. */
template <bool is_odd, int steps>
__device__ static void mark_dropped(const row_code *queries, const uint32_t (&keys)[2],
                                    uint32_t threshold, uint32_t (&weights)[steps][4]) {
    const uint32_t limit = threshold << 16;
#pragma unroll
    for (int n = 0; n < 2 * steps; n++)
#pragma unroll
        for (int row = 0; row < 2; row++) {
            uint32_t &pair = weights[n / 2][n % 2 * 2 + row];
            const uint32_t first = dropout_product(queries[4 * n], keys[row]);
            const uint32_t second = is_odd ? dropout_product(queries[4 * n + 1], keys[row]) : first;
            if (is_odd ? drops_upper(first, limit) : drops_lower(first, limit))
                pair |= 0x8000;
            if (is_odd ? drops_lower(second, limit) : drops_upper(second, limit))
                pair |= 0x80000000;
        }
}

/* The same for a step. row: the slot of a thread's first row; its second row is eight slots later.
 * query: the warpgroup's first query in the step. */
template <class config, int steps>
__device__ static void
mark_dropped(const backward_plan &plan, const backward_memory<config> &memory, int32_t stage,
             int32_t buffer, int32_t row, int32_t query, uint32_t (&weights)[steps][4]) {
    const step_header &header = memory.header[stage];
    const uint32_t *const slots = &memory.key_code[buffer][row];
    const uint32_t keys[2] = {slots[0], slots[8]}, threshold = plan.forward.dropout.threshold;
    const row_code *const queries = &memory.pair_code[stage][query / 2 + threadIdx.x % 4];
    if (header.is_odd)
        mark_dropped<true>(queries, keys, threshold, weights);
    else
        mark_dropped<false>(queries, keys, threshold, weights);
}

/* The weights that are not dropped: with dropout, 0 where the sign is set. */
template <bool drops, int steps>
__device__ static void clear_dropped(const uint32_t (&weights)[steps][4],
                                     uint32_t (&kept)[steps][4]) {
#pragma unroll
    for (int i = 0; i < 4 * steps; i++) {
        const uint32_t pair = weights[i / 4][i % 4];
        kept[i / 4][i % 4] = drops ? pair & ~prmt(pair, 0, 0xbb99) : pair;
    }
}
