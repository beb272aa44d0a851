/* Where there are few heads, the tiles of each are cut into stretches of time, which threads work
 * on side by side. A key that is kept across a border gets sums in each of its stretches; they are
 * added up at the end, in the order of time. Stretches depend on the problem's shape without its
 * batch, so that results depend on nothing else. */
#ifndef FDMA_CPU_BACKWARD_STRETCH_H
#define FDMA_CPU_BACKWARD_STRETCH_H

#include "cpu/backward/keys.h"

enum {
    wanted_tasks = 8,           /* of one sequence */
    least_stretch = 4,          /* tiles */
    free_table_bytes = 1 << 24, /* that tables of one (b, g) may take beside a share of its data */
};

/* What a sweep over one stretch leaves. Keys are in ascending order. */
typedef struct stretch {
    float *sums;       /* of its key table: row n is that of carried[n] */
    int32_t *carried;  /* keys that earlier queries keep, too */
    int32_t *kept;     /* keys that later queries keep, too */
    int32_t *kept_row; /* where their sums are */
    int64_t *counts;   /* [2]: of carried, of kept */
} stretch;

static stretch take_stretch(fdma_arena *arena, const fdma_problem *problem, int64_t rows) {
    stretch one;
    one.sums = fdma_arena_take(arena, sums_bytes(problem, rows));
    one.carried = fdma_arena_take(arena, (size_t)rows * sizeof(int32_t));
    one.kept = fdma_arena_take(arena, (size_t)rows * sizeof(int32_t));
    one.kept_row = fdma_arena_take(arena, (size_t)rows * sizeof(int32_t));
    one.counts = fdma_arena_take(arena, 2 * sizeof(int64_t));
    return one;
}

/* All tables together take no more than 30 % of k and v's bytes, 4 bytes an element of dq, and what
 * is free. */
static int64_t count_stretches(const fdma_problem *problem, int64_t lanes) {
    const double dim = (double)problem->head_dim;
    const double keys = 2 * (double)problem->kv_len * dim * (double)fdma_dtype_size(problem->dtype);
    const double rows = (double)(problem->q_len * problem->group) * dim;
    const double table = (double)sums_bytes(problem, table_rows(problem, lanes, true));
    const double most = (free_table_bytes + 0.3 * keys + 4 * rows) / table;
    int64_t count = 1;
    while (2 * count * problem->kv_heads <= wanted_tasks && 2 * (double)count <= most &&
           2 * count * least_stretch <= tiles_of(problem, lanes))
        count *= 2;
    return count;
}

static int64_t first_tile(int64_t tiles, int64_t count, int64_t index) {
    return tiles * index / count;
}

/* Gives rows to the keys that were there before the first tile of a stretch. */
static void begin_stretch(const fdma_problem *problem, const tile_place *first, key_table *table,
                          stretch *one) {
    const int32_t before = first->first_row > 0 ? row_position(problem, first->first_row - 1) : -1;
    const fdma_tensor *const valid = &problem->key_valid;
    table->first_key = before + 1;
    if (before >= 0)
        admit_keys(problem, first, expiry_row(problem, first->b, first->g),
                   is_present(valid) ? (const uint8_t *)valid->data + first->b * valid->stride[0]
                                     : NULL,
                   before, table);
    one->counts[0] = table->live_count;
    memcpy(one->carried, table->live, (size_t)table->live_count * sizeof *one->carried);
}

/* Notes the keys that live on at the tile after the last one. */
static void end_stretch(const fdma_problem *problem, const tile_place *next, key_table *table,
                        stretch *one) {
    retire_keys(problem, next, expiry_row(problem, next->b, next->g), next->first_position, table);
    one->counts[1] = table->live_count;
    for (int64_t n = 0; n < table->live_count; n++) {
        one->kept[n] = table->live[n];
        one->kept_row[n] = table->row_of[table->live[n]];
    }
}

static void add_row(float *to, const float *from, int64_t count) {
    for (int64_t x = 0; x < count; x += vf_width)
        vf_store(to + x, vf_add(vf_load(from + x), vf_load(to + x)));
}

/* Adds what earlier stretches have summed for the keys of the next one. A key that both do not know
 * comes from an unsound selection. */
static void carry_sums(const fdma_problem *problem, const tile_place *place, const key_table *table,
                       const stretch *from, const stretch *to) {
    int64_t m = 0;
    for (int64_t n = 0; n < from->counts[1]; n++) {
        const float *const sums = from->sums + from->kept_row[n] * table->row_size;
        while (m < to->counts[0] && to->carried[m] < from->kept[n])
            m++;
        if (m < to->counts[0] && to->carried[m] == from->kept[n])
            add_row(to->sums + m * table->row_size, sums, table->row_size);
        else
            put_sums(problem, place, table, from->kept[n], sums);
    }
}

/* Writes the carried keys that no query after the stretch keeps. */
static void put_carried(const fdma_problem *problem, const tile_place *place,
                        const key_table *table, const stretch *one) {
    int64_t m = 0;
    for (int64_t n = 0; n < one->counts[0]; n++) {
        while (m < one->counts[1] && one->kept[m] < one->carried[n])
            m++;
        if (m == one->counts[1] || one->kept[m] != one->carried[n])
            put_sums(problem, place, table, one->carried[n], one->sums + n * table->row_size);
    }
}

#endif
