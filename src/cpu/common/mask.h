/* The mask of a tile, 64 keys at a time: which of them any row keeps, and for each of these keys
 * one bit for every lane. A mask row is read once for all the lanes that share it. */
#pragma once

#include "cpu/common/tile.h"

enum {
    scanned_keys = 64,                   /* bits of a word */
    kept_words = (most_lanes + 63) / 64, /* words of the lanes of a tile */
    padded_lanes = kept_words * scanned_keys,
};

typedef struct mask_scan {
    const uint8_t **row; /* [most_lanes]: the mask of the lane's row; NULL: lanes without a row */
    int32_t *position;   /* [most_lanes]: of the lane's row */
    uint64_t *columns;   /* [kept_words][scanned_keys]: bit n of columns[w][c] is set if lane
                            64 w + n keeps key first + c, whatever the key's expiry is */
    uint64_t *lanes;     /* [padded_lanes]: the same, a word of keys for each lane */
    int64_t first;       /* the first of the keys that were scanned last */
    uint64_t pending;    /* bit c: some lane keeps key first + c, which is not listed yet */
    int64_t words;       /* of the lanes of the tile */
} mask_scan;

static bool has_mask(const fdma_problem *problem) { return is_present(&problem->attn_mask); }

static mask_scan take_mask_scan(fdma_arena *arena, const fdma_problem *problem) {
    mask_scan scan = {0};
    if (!has_mask(problem))
        return scan;
    scan.row = fdma_arena_take(arena, most_lanes * sizeof *scan.row);
    scan.position = take_ints(arena, most_lanes);
    scan.columns = fdma_arena_take(arena, padded_lanes * sizeof *scan.columns);
    scan.lanes = fdma_arena_take(arena, padded_lanes * sizeof *scan.lanes);
    return scan;
}

/* The query and the query head of a lane that has a row. */
static inline int64_t query_of_lane(const fdma_problem *problem, const row_range *rows,
                                    int64_t lane) {
    return (rows->first + lane) / problem->group;
}

static inline int64_t head_of_lane(const fdma_problem *problem, const row_range *rows,
                                   int64_t lane) {
    return rows->g * problem->group + (rows->first + lane) % problem->group;
}

/* Finds the rows of the mask that a tile needs. */
static void start_mask(const fdma_problem *problem, const row_range *rows, mask_scan *scan) {
    const fdma_tensor *const mask = &problem->attn_mask;
    scan->pending = 0;
    scan->first = -scanned_keys;
    scan->words = divide_up(rows->count, scanned_keys);
    for (int64_t lane = 0; lane < rows->count; lane++) {
        const int64_t h = head_of_lane(problem, rows, lane);
        const int64_t i = query_of_lane(problem, rows, lane);
        scan->row[lane] =
            (const uint8_t *)mask->data + offset_of_pair(problem, mask, rows->b, h, i, 0);
        scan->position[lane] = row_position(problem, rows->first + lane);
    }
}

/* Bit n: whether byte n of 8 is not 0, on a CPU that stores the lowest byte first. The sum carries
 * into bit 7 of each byte that is not 0; the product moves bit 0 of byte n to bit 56 + n. */
static inline uint64_t nonzero_bytes(const uint8_t *bytes) {
    const uint64_t low = 0x7f7f7f7f7f7f7f7f, ones = 0x0101010101010101;
    uint64_t x;
    memcpy(&x, bytes, sizeof x);
    return (((((x & low) + low) | x) >> 7) & ones) * 0x0102040810204080 >> 56;
}

/* Bit n: whether byte n of `count`, at most 64, is not 0. */
static uint64_t nonzero_bits(const uint8_t *bytes, int64_t count) {
    uint8_t padded[scanned_keys] = {0};
    uint64_t bits = 0;
    if (count < scanned_keys) {
        memcpy(padded, bytes, (size_t)count);
        bytes = padded;
    }
    for (int n = 0; n < scanned_keys; n += 8)
        bits |= nonzero_bytes(bytes + n) << n;
    return bits;
}

/* The lowest bits of a word, at most 64. */
static inline uint64_t lowest_bits(int64_t count) {
    return count >= 64 ? ~UINT64_C(0) : count <= 0 ? 0 : (UINT64_C(1) << count) - 1;
}

/* Which of `count` keys from `first` on a lane's row keeps, by its mask and its position. */
static uint64_t scan_row(const fdma_problem *problem, const mask_scan *scan, int64_t lane,
                         int64_t first, int64_t count) {
    const uint64_t visible = lowest_bits(min(scan->position[lane] - first + 1, count));
    const uint8_t *const row = scan->row[lane];
    if (visible == 0)
        return 0;
    if (problem->attn_mask.stride[3] == 0)
        return *row != 0 ? visible : 0;
    return nonzero_bits(row + first, count) & visible;
}

/* Rows become columns: bit c of x[r] changes places with bit r of x[c]. Each round exchanges the
 * quarters off the diagonal of all squares of 2 * size bits. */
static void transpose_bits(uint64_t x[scanned_keys]) {
    uint64_t mask = 0x00000000ffffffff;
    for (int size = 32; size > 0; size /= 2, mask ^= mask << size)
        for (int r = 0; r < scanned_keys; r = ((r | size) + 1) & ~size) {
            const uint64_t differ = ((x[r] >> size) ^ x[r | size]) & mask;
            x[r] ^= differ << size;
            x[r | size] ^= differ;
        }
}

/* Scans `count` keys from `first` on, of which those of `candidates` may be kept. */
static void scan_mask(const fdma_problem *problem, const row_range *rows, mask_scan *scan,
                      int64_t first, int64_t count, uint64_t candidates) {
    const int64_t end = scan->words * scanned_keys;
    uint64_t any = 0, bits = 0;
    scan->first = first;
    for (int64_t lane = 0; lane < end && candidates != 0; lane++) {
        const bool same = lane > 0 && lane < rows->count &&
                          scan->row[lane] == scan->row[lane - 1] &&
                          scan->position[lane] == scan->position[lane - 1];
        if (!same)
            bits = lane < rows->count ? scan_row(problem, scan, lane, first, count) : 0;
        scan->lanes[lane] = bits;
        any |= bits;
    }
    scan->pending = any & candidates;
    for (int64_t word = 0; word < scan->words && scan->pending != 0; word++) {
        uint64_t *const columns = scan->columns + word * scanned_keys;
        memcpy(columns, scan->lanes + word * scanned_keys, scanned_keys * sizeof *columns);
        transpose_bits(columns);
    }
}

/* Copies to `kept` the bits of the lanes before `end_lane` that keep a key which was scanned.
 * Returns whether there is any. */
static bool take_column(const mask_scan *scan, int64_t j, int64_t end_lane, uint64_t *kept) {
    uint64_t any = 0;
    for (int64_t word = 0; word < kept_words; word++) {
        const uint64_t column =
            word < scan->words ? scan->columns[word * scanned_keys + j - scan->first] : 0;
        kept[word] = column & lowest_bits(end_lane - word * scanned_keys);
        any |= kept[word];
    }
    return any != 0;
}
