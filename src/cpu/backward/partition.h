/* With few heads, the tiles of each head are divided into partitions, which threads work on
 * independently. A key that is kept on both sides of a boundary has partial sums in every partition
 * that keeps it; they are added up at the end, in the order of positions. Partitions depend on the
 * problem's shape but not on its batch size, so that results depend neither on the threads nor on
 * the batch. */
#pragma once

#include "cpu/backward/keys.h"

enum {
    wanted_tasks = 8,           /* tasks of one sequence */
    min_partition = 4,          /* tiles */
    free_table_bytes = 1 << 24, /* always allowed for the tables of one (b, g) */
};

/* Result of the sweep over a partition. Keys are in ascending order. */
typedef struct backward_partition {
    float *sums;            /* rows of the key table; row n belongs to inherited[n] */
    int32_t *inherited;     /* keys also kept by queries before the partition */
    int32_t *outliving;     /* keys also kept by queries after the partition */
    int32_t *outliving_row; /* the row of `sums` of each outliving key */
    struct {
        int64_t inherited, outliving;
    } *count;
} backward_partition;

static backward_partition take_partition(fdma_arena *arena, const fdma_problem *problem,
                                         int64_t rows) {
    backward_partition one;
    one.sums = take_floats(arena, table_floats(problem, rows));
    one.inherited = take_ints(arena, rows);
    one.outliving = take_ints(arena, rows);
    one.outliving_row = take_ints(arena, rows);
    one.count = fdma_arena_take(arena, sizeof *one.count);
    return one;
}

/* The most tables of one kv head: together they take no more than the sum of free_table_bytes, 30 %
 * of the bytes of k and v, and 4 bytes for each element of dq. */
static double most_tables(const fdma_problem *problem, int64_t lanes) {
    const double dim = (double)problem->head_dim;
    const double keys = 2 * (double)problem->kv_len * dim * (double)fdma_dtype_size(problem->dtype);
    const double rows = (double)(problem->q_len * problem->group) * dim;
    const double table = 4 * (double)table_floats(problem, table_rows(problem, lanes, true));
    return (free_table_bytes + 0.3 * keys + 4 * rows) / table;
}

/* True if kv heads add to the same elements of dattn_bias, so that they take turns. */
static bool joins_heads(const fdma_problem *problem) {
    return is_present(&problem->dattn_bias) && problem->dattn_bias.shape[1] == 1;
}

/* True if partitions of a kv head add to the same elements of dattn_bias: all rows share them, or
 * the rows of one query do, which may be in two partitions. */
static bool joins_rows(const fdma_problem *problem, int64_t lanes) {
    const fdma_tensor *const pairs = &problem->dattn_bias;
    const bool splits_queries = lanes % problem->group != 0;
    return is_present(pairs) &&
           (pairs->shape[2] == 1 || (pairs->shape[1] != problem->q_heads && splits_queries));
}

static int64_t heads_at_once(const fdma_problem *problem) {
    return joins_heads(problem) ? 1 : problem->kv_heads;
}

static int64_t count_partitions(const fdma_problem *problem, int64_t lanes) {
    const double most = most_tables(problem, lanes);
    int64_t count = 1;
    if (joins_rows(problem, lanes))
        return count;
    while (2 * count * heads_at_once(problem) <= wanted_tasks && 2 * (double)count <= most &&
           2 * count * min_partition <= tiles_of(problem, lanes))
        count *= 2;
    return count;
}

/* This many partitions of the problem take at least as much memory as all partitions of a sequence
 * with fewer keys. A shorter sequence may have more partitions, but with smaller tables. */
static int64_t most_partitions(const fdma_problem *problem, int64_t lanes) {
    const int64_t heads = heads_at_once(problem), turns = problem->kv_heads / heads;
    const double tables = (double)heads * most_tables(problem, lanes);
    if (2 * heads > wanted_tasks)
        return 0;
    return turns * (tables < wanted_tasks ? min((int64_t)tables + 2, wanted_tasks) : wanted_tasks);
}

/* Gives rows to the keys that arrived before the first tile of a partition. */
static void begin_partition(const fdma_problem *problem, const row_range *first, key_table *table,
                            backward_partition *one) {
    const int32_t before = first->first > 0 ? row_position(problem, first->first - 1) : -1;
    table->first_key = before + 1;
    if (before >= 0)
        admit_keys(problem, first, before, table);
    one->count->inherited = table->live_count;
    memcpy(one->inherited, table->live, (size_t)table->live_count * sizeof *one->inherited);
}

/* Records the keys that are still live at the first position after the partition. */
static void end_partition(const fdma_problem *problem, const row_range *next, key_table *table,
                          backward_partition *one) {
    retire_keys(problem, next, next->first_position, table);
    one->count->outliving = table->live_count;
    for (int64_t n = 0; n < table->live_count; n++) {
        one->outliving[n] = table->live[n];
        one->outliving_row[n] = table->row_of[table->live[n]];
    }
}

static void add_row(float *to, const float *from, int64_t count) {
    for (int64_t x = 0; x < count; x += vf_width)
        vf_store(to + x, vf_add(vf_load(from + x), vf_load(to + x)));
}

/* Adds one partition's sums of the keys that the next partition inherits. In a sound selection
 * every key that outlives `from` is inherited by `to`. */
static void add_inherited(const fdma_problem *problem, const row_range *rows,
                          const key_table *table, const backward_partition *from,
                          const backward_partition *to) {
    int64_t m = 0;
    for (int64_t n = 0; n < from->count->outliving; n++) {
        const float *const sums = from->sums + from->outliving_row[n] * table->row_size;
        while (m < to->count->inherited && to->inherited[m] < from->outliving[n])
            m++;
        if (m < to->count->inherited && to->inherited[m] == from->outliving[n])
            add_row(to->sums + m * table->row_size, sums, table->row_size);
        else
            write_sums(problem, rows, table, from->outliving[n], sums);
    }
}

/* Writes the gradients of the inherited keys that no query after the partition keeps. */
static void write_inherited(const fdma_problem *problem, const row_range *rows,
                            const key_table *table, const backward_partition *one) {
    int64_t m = 0;
    for (int64_t n = 0; n < one->count->inherited; n++) {
        while (m < one->count->outliving && one->outliving[m] < one->inherited[n])
            m++;
        if (m == one->count->outliving || one->outliving[m] != one->inherited[n])
            write_sums(problem, rows, table, one->inherited[n], one->sums + n * table->row_size);
    }
}
