/* Rows of k or v in two pieces, carried keys and keys of the call (fdma.h, "Streams"), as sources
 * of gather_rows(). The index of a row counts units from a base. If the pieces are near each other
 * they have the same base, so that the copies cost the same as with one piece. Otherwise the
 * highest bit of an index selects one of two bases. */
#pragma once

#include "cuda/device/gather.cuh"
#include "cuda/device/head_view.cuh"

/* The strides of rows. The rows of keys below carried_len are in the first piece, from its row 0
 * on; the rows of the other keys are in the second one, from its row 0 on. */
struct row_strides {
    uint32_t carried_len;  // 0: there is one piece, the unit is its stride, and a key is its index
    uint32_t unit;         // bytes
    uint32_t shift;        // the logarithm of the unit, if there are two pieces
    uint32_t carried, own; // units between two rows of a piece
    bool is_far;           // the pieces have bases of their own
};

/* The rows of one (b, g). Indices are modulo 2^32. */
struct piece_rows {
    const char *base;
    uint32_t carried, own; // the index of key 0 if it were in either piece
};

/* The rows of one (b, g) in pieces with bases of their own. */
struct far_rows {
    const char *carried, *own;
    uint32_t unit;

    static constexpr uint32_t of_own = 1u << 31; // marks the index of a row of the second piece

    __device__ const char *at(uint32_t n) const {
        return (const char *)mad_wide_u32(n & ~of_own, unit,
                                          (uint64_t)((n & of_own) != 0 ? own : carried));
    }

    __device__ far_rows operator+(int bytes) const { return {carried + bytes, own + bytes, unit}; }
};

static inline row_strides strides_of(const head_view &own) {
    return {0, (uint32_t)(2 * own.row), 0, 0, 0, false};
}

/* The unit of two pieces is the largest power of 2, up to 64 KB, that divides the distance of any
 * two rows, or of any two rows of a piece if the pieces are far from each other. It is at least 16
 * bytes if rows are aligned to that. */
static inline row_strides strides_of(const head_view &carried, const head_view &own,
                                     int64_t carried_len, bool is_far) {
    const uint64_t most_unit = 1 << 16;
    const uint64_t between = is_far ? 0 : (uint64_t)own.data - (uint64_t)carried.data;
    const uint64_t strides =
        (uint64_t)(carried.batch | carried.row | carried.head | own.batch | own.row | own.head);
    const uint64_t all = between | 2 * strides | most_unit;
    const uint32_t shift = (uint32_t)__builtin_ctzll(all);
    return {(uint32_t)carried_len,
            1u << shift,
            shift,
            (uint32_t)((uint64_t)carried.row * 2 >> shift),
            (uint32_t)((uint64_t)own.row * 2 >> shift),
            is_far};
}

__device__ static piece_rows rows_of(const row_strides &strides, const head_view &carried,
                                     const head_view &own, int32_t b, int32_t g) {
    const char *const second = rows_of(own, b, g);
    if (strides.carried_len == 0)
        return {second, 0, 0};
    const char *const first = rows_of(carried, b, g), *const base = first < second ? first : second;
    return {base, (uint32_t)((uint64_t)(first - base) >> strides.shift),
            (uint32_t)((uint64_t)(second - base) >> strides.shift) -
                strides.carried_len * strides.own};
}

/* The index of a key's row; no_row stays no_row. */
__device__ static uint32_t index_of(const row_strides &strides, const piece_rows &rows,
                                    uint32_t key) {
    if (strides.carried_len == 0 || key == no_row)
        return key;
    return key < strides.carried_len ? rows.carried + key * strides.carried
                                     : rows.own + key * strides.own;
}

__device__ static uint32_t far_index_of(const row_strides &strides, uint32_t key) {
    if (key == no_row)
        return key;
    return key < strides.carried_len ? key * strides.carried
                                     : far_rows::of_own + (key - strides.carried_len) * strides.own;
}
