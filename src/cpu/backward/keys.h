/* Sums of keys in a sweep over the tiles of one (b, g). A key has a row of sums from the tile of
 * its first query to the tile of its last one; then another key takes the row, as with slots, so
 * that the sums of a window stay in the cache. */
#pragma once

#include "cpu/backward/tile.h"

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
