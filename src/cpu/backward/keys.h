/* The keys that a sweep over the tiles of one (b, g) keeps sums for. A key has a row of sums from
 * the tile that its first query is in to the one that its last query is in; rows pass from key to
 * key as slots do, so that the sums of a window stay in the cache. */
#ifndef FDMA_CPU_BACKWARD_KEYS_H
#define FDMA_CPU_BACKWARD_KEYS_H

#include "cpu/backward/tile.h"

typedef struct key_table {
    int64_t count;    /* of rows; one more is for keys that find none, of unsound selections */
    int64_t width;    /* head_dim, up to whole vectors */
    int64_t row_size; /* floats: dk, not yet scaled, dv, and the lanes of dbias */
    float *sums;      /* [count + 1][row_size] */
    int32_t *row_of;  /* [kv_len]: of keys that have one */
    int32_t *spare;   /* [count]: rows without a key */
    int32_t *live;    /* [count]: keys with a row, in ascending order */
    int64_t spare_count, live_count;
    int64_t next;      /* the first key that has not been looked at */
    int64_t first_key; /* keys before it have gradients from before the sweep: their rows stay */
} key_table;

/* Rows of a table: keys of one window, of as many again that were there before a sweep, and of the
 * positions of a tile, which are no more than `lanes` + 1. */
static int64_t table_rows(const fdma_problem *problem, int64_t lanes, bool is_stretch) {
    if (!problem->selected || problem->window > problem->kv_len)
        return problem->kv_len; // a window may be of any size
    const int64_t most = (is_stretch ? 2 : 1) * problem->window + lanes + 1;
    return most > problem->kv_len ? problem->kv_len : most;
}

static int64_t table_width(const fdma_problem *problem) {
    return (tile_dim(problem) + vf_width - 1) / vf_width * vf_width;
}

static size_t sums_bytes(const fdma_problem *problem, int64_t rows) {
    const int64_t row_size = 2 * table_width(problem) + vf_width;
    return (size_t)((rows + 1) * row_size) * sizeof(float);
}

/* All but its sums. */
static key_table take_key_table(fdma_arena *arena, const fdma_problem *problem, int64_t rows) {
    key_table table = {.count = rows, .width = table_width(problem)};
    table.row_size = 2 * table.width + vf_width;
    table.row_of = fdma_arena_take(arena, (size_t)problem->kv_len * sizeof(int32_t));
    table.spare = fdma_arena_take(arena, (size_t)rows * sizeof(int32_t));
    table.live = fdma_arena_take(arena, (size_t)rows * sizeof(int32_t));
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

/* Writes one key's row of dk or dv, or adds it to what is there. */
static void put_key_row(const fdma_problem *problem, const fdma_tensor *tensor,
                        const tile_place *place, int64_t j, const float *sums, float factor) {
    const int64_t dim = problem->head_dim;
    void *const to = head_row(tensor, place->b, j, place->g);
    for (int64_t d = 0; d < dim; d += vf_width) {
        const int64_t count = channels_at(d, dim);
        vf x = vf_mul(vf_load(sums + d), vf_set(factor));
        if (problem->accumulate)
            x = vf_add(load_channels(to, problem->dtype, d, count), x);
        store_channels(to, problem->dtype, d, x, count);
    }
}

static void put_dbias(const fdma_problem *problem, const tile_place *place, int64_t j, float sum) {
    const fdma_tensor *const dbias = &problem->dbias;
    if (is_present(dbias))
        ((float *)dbias->data)[place->b * dbias->stride[0] + place->g * dbias->stride[1] + j] = sum;
}

/* The gradients of a key that no later query keeps. */
static void put_sums(const fdma_problem *problem, const tile_place *place, const key_table *table,
                     int64_t j, const float *sums) {
    put_key_row(problem, &problem->dk, place, j, sums, (float)problem->scale);
    put_key_row(problem, &problem->dv, place, j, sums + table->width, 1);
    put_dbias(problem, place, j, vf_sum(vf_load(sums + 2 * table->width)));
}

static void put_key(const fdma_problem *problem, const tile_place *place, const key_table *table,
                    int64_t j) {
    if (j >= table->first_key)
        put_sums(problem, place, table, j, sums_of(table, table->row_of[j]));
}

/* Those of a key that no query keeps. */
static void put_no_key(const fdma_problem *problem, const tile_place *place, int64_t j) {
    const fdma_tensor *const tensors[] = {&problem->dk, &problem->dv};
    const size_t bytes = (size_t)problem->head_dim * fdma_dtype_size(problem->dtype);
    put_dbias(problem, place, j, 0);
    for (int n = 0; n < 2 && !problem->accumulate; n++)
        memset(head_row(tensors[n], place->b, j, place->g), 0, bytes);
}

/* Ends the keys that no query at `position` or later keeps. */
static void retire_keys(const fdma_problem *problem, const tile_place *place, const int32_t *expiry,
                        int32_t position, key_table *table) {
    int64_t left = 0;
    for (int64_t n = 0; n < table->live_count; n++) {
        const int32_t j = table->live[n];
        if (!expiry || expiry[j] > position) {
            table->live[left++] = j;
            continue;
        }
        put_key(problem, place, table, j);
        if (j >= table->first_key)
            table->spare[table->spare_count++] = table->row_of[j];
    }
    table->live_count = left;
}

/* Gives rows to the keys up to `last` that a query at `first_position` or later keeps. */
static void admit_keys(const fdma_problem *problem, const tile_place *place, const int32_t *expiry,
                       const uint8_t *valid, int64_t last, key_table *table) {
    for (; table->next <= last; table->next++) {
        const int32_t j = (int32_t)table->next;
        const bool kept = outlives(expiry, valid, place->first_position, j);
        table->row_of[j] = (int32_t)table->count;
        if (!kept || table->spare_count == 0) {
            if (j >= table->first_key)
                put_no_key(problem, place, j);
            continue;
        }
        table->row_of[j] = table->spare[--table->spare_count];
        table->live[table->live_count++] = j;
        clear_sums_of(table, table->row_of[j]);
    }
}

/* Makes the table that of a tile, and starts the walk over the tile's keys. */
static key_walk turn_table(const fdma_problem *problem, const tile_place *place, key_table *table,
                           int32_t *dying) {
    const snapshots none = {.step = 1};
    key_walk walk = start_walk(problem, &none, place, dying);
    retire_keys(problem, place, walk.expiry, place->first_position, table);
    admit_keys(problem, place, walk.expiry, walk.valid, place->first_position, table);
    walk.live = table->live;
    walk.live_count = table->live_count;
    while (walk.live_count > 0 && table->live[walk.live_count - 1] > place->first_position)
        walk.live_count--; // it came within the tile before
    walk.next = place->first_position + 1;
    admit_keys(problem, place, walk.expiry, walk.valid, place->last_position, table);
    return walk;
}

/* Writes what is left at the end of the last tile. */
static void end_table(const fdma_problem *problem, const tile_place *place, key_table *table) {
    for (int64_t n = 0; n < table->live_count; n++)
        put_key(problem, place, table, table->live[n]);
    for (; table->next < problem->kv_len; table->next++)
        put_no_key(problem, place, table->next);
}

#endif
