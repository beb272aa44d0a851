/* A tile of the backward pass. It has buffers for dout as forward has for q, and both a second time
 * row by row, for the sums over lanes that give dk and dv. */
#pragma once

#include "cpu/common/product.h"

enum {
    lane_words = block_lanes / terms,
    /* Channels that a sum over lanes holds in registers; rows are cut into strips of this many. */
    row_strip = block_lanes,
    row_strip_length = lane_words * row_strip,
    /* Words of lanes that are held of a key: as many as one call of add_lanes() sums over. */
    held_words = summed_blocks * lane_words,
};

typedef struct backward_tile {
    tile_state logits; /* of q and k. Its out is dq, its weights are dS, in words of keys */
    tile_state dp;     /* the same buffers, except that q and k_rows hold dout and v */
    float *q_rows;     /* [blocks][strips][lane_words][row_strip]: words of lanes */
    float *dout_rows;
    float *p;           /* [key_block][block_lanes]: probabilities; of dropped pairs, minus them */
    float *p_words;     /* [key_block][held_words]: in words of lanes, 0 for dropped pairs; p where
                           terms is 1 and there is no dropout */
    float *ds_words;    /* [key_block][held_words]: dS; logits.weights where terms is 1 */
    float *slope;       /* [key_block][block_lanes]: of the softcap */
    float *pair_ds;     /* [key_block][block_lanes]: dS before the softcap; NULL: not wanted */
    float *lse;         /* [lanes]; inf in lanes that are left out */
    float *minus_delta; /* [lanes]: (dlse - <dout, out>) / dropout_scale() */
    uint8_t *left_out;  /* [lanes]: the lane has no row, or an empty one */
} backward_tile;

/* Floats of one block of lanes in q_rows. */
static int64_t block_rows(int64_t dim) { return divide_up(dim, row_strip) * row_strip_length; }

/* The words of a key for a block of lanes, in p_words or ds_words. */
INLINE float *words_at(float *words, int32_t key, int block) {
    return words + key * held_words + block % summed_blocks * lane_words;
}

static backward_tile take_backward_tile(fdma_arena *arena, const fdma_problem *problem,
                                        int64_t lanes) {
    const int64_t dim = tile_dim(problem);
    const int64_t rows = lanes / block_lanes * block_rows(dim);
    const int64_t products = key_block * block_lanes, words = key_block * held_words;
    const bool drops = problem->dropout.threshold != 0;
    backward_tile tile;
    tile.logits = take_tile(arena, problem, lanes);
    tile.dp = tile.logits;
    tile.dp.q = take_floats(arena, dim * lanes / terms);
    tile.dp.k_rows = take_floats(arena, key_block * padded_row(dim));
    tile.q_rows = take_floats(arena, rows);
    tile.dout_rows = take_floats(arena, rows);
    tile.p = take_floats(arena, products);
    tile.p_words = terms == 1 && !drops ? tile.p : take_floats(arena, words);
    tile.ds_words = terms == 1 ? tile.logits.weights : take_floats(arena, words);
    tile.slope = take_floats(arena, problem->softcap > 0 ? products : 0);
    tile.pair_ds = NULL;
    if (is_present(&problem->dattn_bias))
        tile.pair_ds = take_floats(arena, products);
    tile.lse = take_floats(arena, lanes);
    tile.minus_delta = take_floats(arena, lanes);
    tile.left_out = fdma_arena_take(arena, (size_t)lanes);
    return tile;
}

static double dlse_of_row(const fdma_problem *problem, int64_t b, int64_t i, int64_t h) {
    return is_present(&problem->dlse) ? (double)*float_at(&problem->dlse, b, h, i) : 0;
}

/* delta = <dout, out> - dlse of a row, in double precision: if a row has all its weight on one key,
 * dP - delta cancels to the last bits. */
static double delta_of_row(const fdma_problem *problem, int64_t b, int64_t i, int64_t h) {
    const double product =
        product_of_rows(head_row(&problem->dout, b, i, h), head_row(&problem->out, b, i, h),
                        problem->dtype, problem->head_dim);
    return product - dlse_of_row(problem, b, i, h);
}

/* True if a row attends to no key, so that its lse is the sink logit. Checks only rows with values
 * that are not finite, because 0 times these is NaN; in other rows a P of 0 makes every product
 * 0. */
static bool is_empty_beside_sink(const fdma_problem *problem, const row_range *rows, int64_t lane,
                                 float lse, double delta) {
    const int64_t row = rows->first + lane, h = rows->g * problem->group + row % problem->group;
    const void *const q = row_of_lane(problem, &problem->q, rows, lane);
    if (lse != sink_of_row(problem, rows->g, row))
        return false;
    if (isfinite(delta) && isfinite(product_of_rows(q, q, problem->dtype, problem->head_dim)))
        return false;
    return is_empty_row(problem, rows->b, h, row / problem->group);
}

/* Loads lse and delta of every row, except empty ones. Delta is divided by dropout_scale(), because
 * gradients are multiplied by it at the end. */
static void load_lse_and_delta(const fdma_problem *problem, const row_range *rows,
                               const backward_tile *tile) {
    const double scale = dropout_scale(problem->dropout.threshold);
    for (int64_t lane = 0; lane < used_lanes(rows); lane++) {
        const float lse =
            lane < rows->count ? *float_of_lane(problem, &problem->lse, rows, lane) : -INFINITY;
        tile->left_out[lane] = true;
        tile->lse[lane] = INFINITY;
        tile->minus_delta[lane] = 0;
        if (lse == -INFINITY)
            continue;
        const int64_t row = rows->first + lane, h = rows->g * problem->group + row % problem->group;
        const double delta = delta_of_row(problem, rows->b, row / problem->group, h);
        if (is_empty_beside_sink(problem, rows, lane, lse, delta))
            continue;
        tile->left_out[lane] = false;
        tile->lse[lane] = lse;
        tile->minus_delta[lane] = (float)(-delta / scale);
    }
}

/* Arranges the rows of a tensor of q's shape in words of lanes, divided into strips of channels. */
static void load_lane_rows(const fdma_problem *problem, const fdma_tensor *tensor,
                           const row_range *rows, const backward_tile *tile, float *to) {
    const int64_t dim = problem->head_dim, length = block_rows(tile_dim(problem));
    for (int64_t lane = 0; lane < used_lanes(rows); lane += terms) {
        const void *row[terms];
        float *const line =
            to + lane / block_lanes * length + lane % block_lanes / terms * row_strip;
        for (int64_t n = 0; n < terms; n++)
            row[n] = tile->left_out[lane + n] ? tile->logits.zeros
                                              : row_of_lane(problem, tensor, rows, lane + n);
        for (int64_t d = 0; d < tile_dim(problem); d += vf_width) {
            const int64_t count = channels_at(d, dim);
            const vf word = terms == 2 ? vf_load_pairs(row[0], row[terms - 1], d, count)
                                       : load_channels(row[0], problem->dtype, d, count);
            vf_store(line + d / row_strip * row_strip_length + d % row_strip, word);
        }
    }
}

static void load_backward_tile(const fdma_problem *problem, const row_range *rows,
                               const backward_tile *tile) {
    const uint8_t *const left_out = tile->left_out;
    const float *const zeros = tile->logits.zeros;
    load_lse_and_delta(problem, rows, tile);
    pack_rows(problem, &problem->q, rows, tile->logits.q, left_out, zeros);
    pack_rows(problem, &problem->dout, rows, tile->dp.q, left_out, zeros);
    load_lane_rows(problem, &problem->q, rows, tile, tile->q_rows);
    load_lane_rows(problem, &problem->dout, rows, tile, tile->dout_rows);
}

static void write_dq(const fdma_problem *problem, const row_range *rows,
                     const backward_tile *tile) {
    const vf scale = vf_set((float)(problem->scale * dropout_scale(problem->dropout.threshold)));
    for (int64_t first = 0; first < rows->count; first += vf_width)
        write_lanes(problem, &problem->dq, rows, tile->logits.out, first, scale,
                    problem->accumulate);
}

/* Sums of keys in a sweep over the tiles of one (b, g). A key has a row of sums from the tile of
 * its first query to the tile of its last one; then another key takes the row, as with slots, so
 * that the sums of a window stay in the cache. */

typedef struct key_table {
    int64_t count;    /* rows; one more, row `count`, is for keys of unsound selections */
    int64_t width;    /* head_dim, rounded up to whole vectors */
    int64_t row_size; /* floats: dk, not yet scaled; dv; and the lanes of dbias */
    float *sums;      /* [count + 1][row_size] */
    int32_t *row_of;  /* [kv_len]: the row of each key before `next`; `count` if it has none */
    int32_t *spare;   /* [count]: rows without a key */
    int32_t *live;    /* [count]: keys with a row, in ascending order */
    int64_t spare_count, live_count;
    int64_t next;      /* the first key that has not been looked at */
    int64_t first_key; /* the first that arrives in the sweep; earlier keys hold rows to its end */
} key_table;

/* Rows of a table: one per slot; in a partition one more per slot, for keys that were live before
 * its sweep; and lanes + 1 for the positions of a tile. */
static int64_t table_rows(const fdma_problem *problem, int64_t lanes, bool is_partition) {
    if (!problem->selected || problem->slots > problem->kv_len)
        return problem->kv_len; // slots up to INT64_MAX would overflow below
    return min((is_partition ? 2 : 1) * problem->slots + lanes + 1, problem->kv_len);
}

/* The most keys of (b, g) that one position keeps. leaving: [kv_len], scratch. */
static int32_t most_live(const fdma_problem *problem, int64_t b, int64_t g, int32_t *leaving) {
    const int32_t *const expiry = expiry_of_head(problem, b, g);
    const uint8_t *const valid = valid_keys(problem, b);
    const int32_t kv_len = (int32_t)problem->kv_len;
    int32_t live = 0, most = 0;
    memset(leaving, 0, (size_t)problem->kv_len * sizeof *leaving);
    for (int32_t j = 0; j < kv_len; j++) {
        live -= leaving[j];
        if (!outlives(expiry, valid, j, j))
            continue;
        most = ++live > most ? live : most;
        if (expiry[j] < kv_len)
            leaving[expiry[j]]++;
    }
    return most;
}

static int64_t table_width(const fdma_problem *problem) {
    return round_up(tile_dim(problem), vf_width);
}

static int64_t table_floats(const fdma_problem *problem, int64_t rows) {
    return (rows + 1) * (2 * table_width(problem) + vf_width);
}

/* A table without its sums. */
static key_table take_key_table(fdma_arena *arena, const fdma_problem *problem, int64_t rows) {
    key_table table = {.count = rows, .width = table_width(problem)};
    table.row_size = 2 * table.width + vf_width;
    table.row_of = take_ints(arena, problem->kv_len);
    table.spare = take_ints(arena, rows);
    table.live = take_ints(arena, rows);
    return table;
}

static float *sums_of(const key_table *table, int64_t row) {
    return table->sums + row * table->row_size;
}

static void clear_sums_of(const key_table *table, int64_t row) {
    memset(sums_of(table, row), 0, (size_t)table->row_size * sizeof(float));
}

static void begin_table(key_table *table) {
    table->spare_count = table->count;
    for (int64_t n = 0; n < table->count; n++)
        table->spare[n] = (int32_t)(table->count - 1 - n);
    table->live_count = table->next = table->first_key = 0;
    clear_sums_of(table, table->count);
}

static void write_dbias(const fdma_problem *problem, const row_range *rows, int64_t j, float sum) {
    if (!is_present(&problem->dbias))
        return;
    float *const to =
        key_float(problem, &problem->dbias, &problem->dbias_carried, rows->b, rows->g, j);
    *to = adds_dbias(problem, j) ? *to + sum : sum;
}

static void *dk_row(const fdma_problem *problem, const row_range *rows, int64_t j) {
    return key_row(problem, &problem->dk, &problem->dk_carried, rows->b, j, rows->g);
}

static void *dv_row(const fdma_problem *problem, const row_range *rows, int64_t j) {
    return key_row(problem, &problem->dv, &problem->dv_carried, rows->b, j, rows->g);
}

/* Writes the gradients of a key that no later query keeps. */
static void write_sums(const fdma_problem *problem, const row_range *rows, const key_table *table,
                       int64_t j, const float *sums) {
    void *const dk = dk_row(problem, rows, j), *const dv = dv_row(problem, rows, j);
    const bool add = problem->accumulate;
    const float scale = (float)dropout_scale(problem->dropout.threshold);
    write_row(problem, dk, sums, (float)problem->scale * scale, add);
    write_row(problem, dv, sums + table->width, scale, add);
    write_dbias(problem, rows, j, scale * vf_sum(vf_load(sums + 2 * table->width)));
}

static void write_key(const fdma_problem *problem, const row_range *rows, const key_table *table,
                      int64_t j) {
    if (j >= table->first_key)
        write_sums(problem, rows, table, j, sums_of(table, table->row_of[j]));
}

/* Writes zero gradients for a key that no query keeps. */
static void write_zeros(const fdma_problem *problem, const row_range *rows, int64_t j) {
    const size_t bytes = (size_t)problem->head_dim * fdma_dtype_size(problem->dtype);
    write_dbias(problem, rows, j, 0);
    if (problem->accumulate)
        return;
    memset(dk_row(problem, rows, j), 0, bytes);
    memset(dv_row(problem, rows, j), 0, bytes);
}

/* Writes the gradients of the keys that no query at `position` or later keeps, and frees their
 * rows. */
static void retire_keys(const fdma_problem *problem, const row_range *rows, int32_t position,
                        key_table *table) {
    const int32_t *const expiry = expiry_of_head(problem, rows->b, rows->g);
    int64_t left = 0;
    for (int64_t n = 0; n < table->live_count; n++) {
        const int32_t j = table->live[n];
        if (expiry == NULL || expiry[j] > position) {
            table->live[left++] = j;
            continue;
        }
        write_key(problem, rows, table, j);
        if (j >= table->first_key)
            table->spare[table->spare_count++] = table->row_of[j];
    }
    table->live_count = left;
}

/* Gives rows to the keys up to `last` that a query at `first_position` or later keeps. */
static void admit_keys(const fdma_problem *problem, const row_range *rows, int64_t last,
                       key_table *table) {
    const int32_t *const expiry = expiry_of_head(problem, rows->b, rows->g);
    const uint8_t *const valid = valid_keys(problem, rows->b);
    for (; table->next <= last; table->next++) {
        const int32_t j = (int32_t)table->next;
        const bool kept = outlives(expiry, valid, rows->first_position, j);
        table->row_of[j] = (int32_t)table->count;
        if (!kept || table->spare_count == 0) {
            if (j >= table->first_key)
                write_zeros(problem, rows, j);
            continue;
        }
        table->row_of[j] = table->spare[--table->spare_count];
        table->live[table->live_count++] = j;
        clear_sums_of(table, table->row_of[j]);
    }
}

/* Advances the table to a tile, and sets the cursor to the first key that the tile visits. */
static void advance_table(const fdma_problem *problem, const row_range *rows, key_table *table,
                          key_cursor *cursor) {
    const snapshots none = {.step = 1};
    start_keys(problem, &none, rows, cursor);
    retire_keys(problem, rows, rows->first_position, table);
    admit_keys(problem, rows, rows->first_position, table);
    cursor->live = table->live;
    cursor->live_count = table->live_count;
    cursor->next = rows->first_position + 1;
    admit_keys(problem, rows, rows->last_position, table);
}

/* Writes the gradients of all keys that are left after the last tile. */
static void end_table(const fdma_problem *problem, const row_range *rows, key_table *table) {
    for (int64_t n = 0; n < table->live_count; n++)
        write_key(problem, rows, table, table->live[n]);
    for (; table->next < problem->kv_len; table->next++)
        write_zeros(problem, rows, table->next);
}
