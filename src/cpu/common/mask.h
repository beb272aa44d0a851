/* The mask of a tile, 64 keys at a time: the keys that any row keeps, and for each of these one bit
 * per lane. A mask row is read once for all the lanes that share it. */
#pragma once

#include "cpu/common/tile.h"

enum {
    word_bits = 64,
    kept_words = (most_lanes + 63) / 64, /* words of the lanes of a tile */
    padded_lanes = kept_words * word_bits,
    /* Words of keys that are read of one row before the next row: several cache lines, which memory
     * delivers at once. Rows that are a power of 2 apart would not stay in the cache until the tile
     * comes back to them. */
    scanned_words = 8,
    scanned_keys = scanned_words * word_bits,
};

typedef struct mask_scan {
    const uint8_t **row; /* [most_lanes]: the mask of the lane's row, from key 0 on */
    int32_t *position;   /* [most_lanes]: of the lane's row */
    uint64_t *lanes;     /* [scanned_words][padded_lanes]: bit c of lanes[w][n] is set if lane n
                            keeps key first + 64 w + c, whatever the key's expiry is */
    uint64_t any[scanned_words]; /* each the union of all lanes */
    int64_t first, end;          /* the keys that were scanned last */
    int64_t lane_words;          /* words of lanes in the tile */

    uint64_t *columns;    /* [kept_words][word_bits]: bit n of columns[w][c] is set if lane 64 w + n
                             keeps key first_column + c */
    int64_t first_column; /* the keys that are being listed */
    uint64_t pending;     /* bit c: some lane keeps key first_column + c, which is not yet listed */
} mask_scan;

static bool has_mask(const fdma_problem *problem) { return is_present(&problem->attn_mask); }

static mask_scan take_mask_scan(fdma_arena *arena, const fdma_problem *problem) {
    mask_scan scan = {0};
    if (!has_mask(problem))
        return scan;
    scan.row = fdma_arena_take(arena, most_lanes * sizeof *scan.row);
    scan.position = take_ints(arena, most_lanes);
    scan.lanes = fdma_arena_take(arena, scanned_words * padded_lanes * sizeof *scan.lanes);
    scan.columns = fdma_arena_take(arena, padded_lanes * sizeof *scan.columns);
    return scan;
}

static inline int64_t query_of_lane(const fdma_problem *problem, const row_range *rows,
                                    int64_t lane) {
    return (rows->first + lane) / problem->group;
}

static inline int64_t head_of_lane(const fdma_problem *problem, const row_range *rows,
                                   int64_t lane) {
    return rows->g * problem->group + (rows->first + lane) % problem->group;
}

static void start_mask(const fdma_problem *problem, const row_range *rows, mask_scan *scan) {
    const fdma_tensor *const mask = &problem->attn_mask;
    scan->pending = 0;
    scan->first = scan->end = scan->first_column = 0;
    scan->lane_words = divide_up(rows->count, word_bits);
    for (int64_t lane = 0; lane < rows->count; lane++) {
        const int64_t h = head_of_lane(problem, rows, lane);
        const int64_t i = query_of_lane(problem, rows, lane);
        scan->row[lane] =
            (const uint8_t *)mask->data + offset_of_pair(problem, mask, rows->b, h, i, 0);
        scan->position[lane] = row_position(problem, rows->first + lane);
    }
}

/* Bit n is set if byte n of `count`, at most 64, is not 0. */
static inline uint64_t nonzero_bytes(const uint8_t *bytes, int64_t count) {
    uint8_t padded[word_bits] = {0};
    if (count == word_bits)
        return vf_nonzero_bytes(bytes);
    memcpy(padded, bytes, (size_t)count);
    return vf_nonzero_bytes(padded);
}

static inline uint64_t lowest_bits(int64_t count) {
    return count >= 64 ? ~UINT64_C(0) : count <= 0 ? 0 : (UINT64_C(1) << count) - 1;
}

/* Bits of the 64 keys from `first` on that a lane's row keeps, by its mask and its position. */
static uint64_t scan_word(const fdma_problem *problem, const mask_scan *scan, int64_t lane,
                          int64_t first) {
    const int64_t count = min(scan->end - first, word_bits);
    const uint64_t visible = lowest_bits(min(scan->position[lane] - first + 1, count));
    const uint8_t *const row = scan->row[lane];
    if (visible == 0)
        return 0;
    if (problem->attn_mask.stride[3] == 0)
        return *row != 0 ? visible : 0;
    return nonzero_bytes(row + first, count) & visible;
}

/* True if a lane has the same mask and position as the one before it. */
static inline bool repeats_lane(const mask_scan *scan, int64_t lane) {
    return lane > 0 && scan->row[lane] == scan->row[lane - 1] &&
           scan->position[lane] == scan->position[lane - 1];
}

/* Scans the keys `first` to `end` - 1, at most scanned_keys. Lanes without a row keep none. */
static void scan_mask(const fdma_problem *problem, const row_range *rows, mask_scan *scan,
                      int64_t first, int64_t end) {
    scan->first = first;
    scan->end = end;
    memset(scan->any, 0, sizeof scan->any);
    for (int64_t lane = 0; lane < scan->lane_words * word_bits; lane++) {
        const bool has_row = lane < rows->count, repeats = has_row && repeats_lane(scan, lane);
        for (int word = 0; word < scanned_words; word++) {
            uint64_t *const bits = scan->lanes + word * padded_lanes + lane;
            const int64_t j = first + word * word_bits;
            *bits = repeats ? bits[-1] : has_row ? scan_word(problem, scan, lane, j) : 0;
            scan->any[word] |= *bits;
        }
    }
}

/* Transposes 64 x 64 bits: bit c of x[r] changes places with bit r of x[c]. Each round exchanges
 * the quarters off the diagonal of all squares of 2 * size bits. */
static void transpose_bits(uint64_t x[word_bits]) {
    uint64_t mask = 0x00000000ffffffff;
    for (int size = 32; size > 0; size /= 2, mask ^= mask << size)
        for (int r = 0; r < word_bits; r = ((r | size) + 1) & ~size) {
            const uint64_t differ = ((x[r] >> size) ^ x[r | size]) & mask;
            x[r] ^= differ << size;
            x[r | size] ^= differ;
        }
}

/* Opens 64 scanned keys from `first` on. Only keys of `candidates` may be kept. */
static void open_columns(mask_scan *scan, int64_t first, uint64_t candidates) {
    const int64_t scanned = (first - scan->first) / word_bits;
    scan->first_column = first;
    scan->pending = scan->any[scanned] & candidates;
    for (int64_t word = 0; word < scan->lane_words && scan->pending != 0; word++) {
        uint64_t *const columns = scan->columns + word * word_bits;
        memcpy(columns, scan->lanes + scanned * padded_lanes + word * word_bits,
               word_bits * sizeof *columns);
        transpose_bits(columns);
    }
}

/* Copies to `kept` the bits of the lanes before `end_lane` that keep key j, whose column is open.
 * Returns true if there is one. */
static bool take_column(const mask_scan *scan, int64_t j, int64_t end_lane, uint64_t *kept) {
    uint64_t any = 0;
    for (int64_t word = 0; word < kept_words; word++) {
        const uint64_t column =
            word < scan->lane_words ? scan->columns[word * word_bits + j - scan->first_column] : 0;
        kept[word] = column & lowest_bits(end_lane - word * word_bits);
        any |= kept[word];
    }
    return any != 0;
}
