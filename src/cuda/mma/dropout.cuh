/* Dropout in accumulators of mma.sync. Shared memory holds the codes, to save registers; see
 * core/dropout.h for their definition. */
#pragma once

#include "cuda/mma/queries.cuh"

/* The codes of a tile's rows and of the keys of two blocks. */
template <typename shape> struct tile_codes {
    row_code row[shape::rows];
    alignas(8) uint32_t key[2][shape::keys];
    bool is_paired; // rows 2 n and 2 n + 1 share a code: a query at an even position, and the next
};

struct no_codes {};

template <typename shape, bool drops> struct codes_of {
    using type = no_codes;
};
template <typename shape> struct codes_of<shape, true> {
    using type = tile_codes<shape>;
};

template <typename shape>
__device__ static void write_row_codes(tile_codes<shape> &codes, const forward_plan &plan,
                                       const row_range &range, int32_t kv_len) {
    for (int r = threadIdx.x; r < shape::rows; r += shape::threads) {
        const int32_t row = min(range.first + r, range.total - 1);
        const int32_t position = row_position(plan, range, kv_len, row);
        codes.row[r] =
            row_code_of(plan, range.b, range.g * plan.group + row % plan.group, position);
    }
    if (threadIdx.x == 0)
        codes.is_paired = plan.group == 1 && (kv_len - plan.q_len) % 2 == 0;
}

template <typename shape>
__device__ static void write_key_codes(tile_codes<shape> &codes, const forward_plan &plan,
                                       const row_range &range, const int32_t *entries, int32_t n) {
    const uint32_t column = opaque(threadIdx.x);
    if (column < shape::keys)
        codes.key[n % 2][column] = key_code_of(plan, range.b, range.g, entries[column]);
}

/* True if a pair is dropped, at an even position or at an odd one. */
__device__ static bool drops(uint32_t mixed, bool is_odd, uint32_t threshold) {
    return (is_odd ? mixed >> 16 : mixed & 0xffff) < threshold;
}

/* Clears the elements of dropped pairs, and multiplies the others by `factor`. `codes` and
 * `position` are of the warp's rows: a lane has `rows` consecutive ones. */
template <typename shape, bool is_paired>
__device__ static void drop_elements(float (&x)[shape::row_tiles][shape::keys / 8][4],
                                     const row_code *codes, const int32_t *position,
                                     const uint32_t *key_codes, uint32_t threshold, float factor) {
    constexpr int rows = 2 * shape::row_tiles;
    const int lane = threadIdx.x % warp_lanes;
#pragma unroll
    for (int n = 0; n < shape::keys / 8; n++) {
        const uint2 keys = ((const uint2 *)key_codes)[n * 4 + lane % 4];
        uint32_t mixed[2];
#pragma unroll
        for (int r = 0; r < rows; r++) {
            const bool is_odd = is_paired ? r % 2 != 0 : position[lane / 4 * rows + r] % 2 != 0;
            if (!is_paired || r % 2 == 0) {
                const row_code code = codes[lane / 4 * rows + r];
                mixed[0] = dropout_mix(code, keys.x);
                mixed[1] = dropout_mix(code, keys.y);
            }
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float &one = x[r / 2][n][r % 2 * 2 + c];
                one = drops(mixed[c], is_odd, threshold) ? 0 : one * factor;
            }
        }
    }
}

/* drop_elements() for block n, whose rows may share codes. `first` is the warp's first row. */
template <typename shape>
__device__ static void drop_elements(float (&x)[shape::row_tiles][shape::keys / 8][4],
                                     const tile_codes<shape> &codes, const int32_t *position,
                                     int first, int32_t n, uint32_t threshold, float factor) {
    const row_code *const rows = codes.row + first;
    if (codes.is_paired)
        drop_elements<shape, true>(x, rows, position + first, codes.key[n % 2], threshold, factor);
    else
        drop_elements<shape, false>(x, rows, position + first, codes.key[n % 2], threshold, factor);
}
