/* Clearing the weights of pairs that are not kept, which are pairs of 16-bit elements by then. */
#pragma once

#include "cuda/backward/sm90/tile.cuh"

/* The positions x <= p < y at which the key of a slot is kept. */
template <class config>
__device__ static int2 kept_positions(const backward_plan &plan, const slot_record &slot) {
    const bool arrives = config::is_diagonal || !plan.is_rolling;
    const int32_t from = plan.forward.causal ? slot.key : slot.from;
    return make_int2(arrives ? from : INT32_MIN, slot.expiry);
}

/* Which of the 32 positions from `begin` on are in a range, as bits. */
__device__ static uint32_t bits_of_range(const int2 &range, int32_t begin) {
    return low_bits((uint32_t)max(range.y, begin) - begin) &
           ~low_bits((uint32_t)max(range.x, begin) - begin);
}

/* Clears what is not kept of row `row` of a lane in 32 columns, the k-th ones. bits: of these, from
 * the lane's first column on. Its columns are 8n and 8n + 1 after that: the two lowest bits of byte
 * n. Shifted to the sign of the byte, each becomes half a pair. */
template <int steps>
__device__ static void mask_columns(uint32_t bits, int k, int row, uint32_t (&packed)[steps][4]) {
#pragma unroll
    for (int n = 0; n < 4; n++)
        packed[2 * k + n / 2][n % 2 * 2 + row] &= prmt(bits << 7, bits << 6, 0xcc88 + n * 0x1111);
}

/* Clears the pairs of queries that do not keep their key by its positions. first: position of the
 * lane's first column. */
template <int steps>
__device__ static void mask_pairs(int32_t first, const int2 (&kept)[2],
                                  uint32_t (&packed)[steps][4]) {
#pragma unroll
    for (int k = 0; k < steps / 2; k++)
#pragma unroll
        for (int row = 0; row < 2; row++)
            mask_columns(bits_of_range(kept[row], first + 32 * k), k, row, packed);
}

/* The same by attn_mask. words: bits of 32 columns of each row, from the lane's first column on. */
template <int steps>
__device__ static void mask_pairs(const uint32_t (&words)[steps / 2][2],
                                  uint32_t (&packed)[steps][4]) {
#pragma unroll
    for (int k = 0; k < steps / 2; k++)
#pragma unroll
        for (int row = 0; row < 2; row++)
            mask_columns(words[k][row], k, row, packed);
}
