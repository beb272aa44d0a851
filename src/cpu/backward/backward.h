/* Backward sweeps over tiles as forward does, with queries in the lanes, in the order of their
 * positions. dq of a tile is complete once its keys have been visited; the sums of the keys are
 * held in a table that moves along with the tiles. So every sum has one order for any number of
 * threads. Sources: arXiv:2205.14135, algorithm 4; docs/algorithm.md, backward. */
#pragma once

#include "core/error.h"
#include "cpu/backward/block.h"
#include "cpu/parallel.h"

/* ---- the gradient of the sink logits: a sum over rows, which reads no key ---- */

/* Minus the sum of the sink's probability times delta, over all rows of query head h. */
static void find_dsink(const void *context, int64_t h, int32_t thread) {
    const fdma_problem *const problem = context;
    const uint32_t modes = flush_subnormals();
    const double sink = (double)*float_at(&problem->sink_logit, h, 0, 0);
    double sum = 0;
    (void)thread;
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t i = 0; i < problem->q_len; i++) {
            const double lse = (double)*float_at(&problem->lse, b, h, i);
            double delta = delta_of_row(problem, b, i, h);
            if (lse == sink && !isfinite(delta) && is_empty_row(problem, b, h, i))
                delta = -dlse_of_row(problem, b, i, h); // <dout, out> is 0 for every dout
            if (sink != -INFINITY && lse != -INFINITY)
                sum -= exp(sink - lse) * delta;
        }
    float *const to = float_at(&problem->dsink_logit, h, 0, 0);
    *to = (float)(problem->add_dsinks ? (double)*to + sum : sum);
    restore_modes(modes);
}

/* With few heads, the tiles of each head are divided into partitions, which threads work on
 * independently. A key that is kept on both sides of a boundary has partial sums in every partition
 * that keeps it; they are added up at the end, in the order of positions. Partitions depend on the
 * problem's shape but not on its batch size, so that results depend neither on the threads nor on
 * the batch. */

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

/* ---- the loop over tiles ---- */

typedef struct backward_context {
    const fdma_problem *problem;
    uint8_t *partitions; /* [batch * kv_heads][count], each of partition_size bytes */
    size_t partition_size;
    int64_t count;    /* partitions of one (b, g) */
    uint8_t *scratch; /* thread 0's; the other threads' follow at multiples of scratch_size */
    size_t scratch_size;
    int64_t lanes; /* lanes of a tile */
    int64_t tiles; /* tiles of one (b, g) */
    int64_t tasks; /* partitions of all (b, g) */
    int32_t threads;
    int64_t batch, kv_heads; /* the (b, g) that are swept at a time */
    int64_t first_b, first_g;
    int32_t *most_live; /* [batch * kv_heads]: see most_live() */
} backward_context;

/* Memory of one thread. */
typedef struct backward_scratch {
    backward_tile tile;
    key_table table;
    key_blocks blocks;
} backward_scratch;

static int64_t rows_of_key_table(const backward_context *context) {
    const bool is_partition = context->count > 1 || context->problem->any_len;
    return table_rows(context->problem, context->lanes, is_partition);
}

static backward_scratch take_backward_scratch(fdma_arena *arena, const backward_context *context) {
    const fdma_problem *const problem = context->problem;
    const int64_t rows = rows_of_key_table(context);
    backward_scratch scratch;
    scratch.tile = take_backward_tile(arena, problem, context->lanes);
    scratch.table = take_key_table(arena, problem, rows);
    if (context->count == 1 || problem->any_len)
        scratch.table.sums = take_floats(arena, table_floats(problem, rows));
    scratch.blocks = take_key_blocks(arena, problem);
    return scratch;
}

static void find_sums(const key_table *table, const key_list *list, backward_step *step) {
    for (int32_t n = 0; n < key_block; n++) {
        const int64_t row = n < list->count ? table->row_of[list->key[n]] : table->count;
        step->dk[n] = sums_of(table, row);
        step->dv[n] = step->dk[n] + table->width;
        step->dbias[n] = step->dv[n] + table->width;
    }
}

static void visit_keys(const fdma_problem *problem, const row_range *rows,
                       backward_scratch *scratch, backward_step *step) {
    const backward_tile *const tile = &scratch->tile;
    key_blocks *const blocks = &scratch->blocks;
    advance_table(problem, rows, &scratch->table, &blocks->cursor);
    start_key_blocks(problem, rows, &tile->logits, blocks);
    while (advance_keys(problem, rows, &tile->logits, blocks)) {
        const key_list *const keys = blocks->now;
        load_keys(problem, tile->logits.k_rows, keys->k_source, keys->count);
        load_keys(problem, tile->dp.k_rows, keys->v_source, keys->count);
        load_values(problem, tile->logits.values, keys->k_source, keys->count);
        find_sums(&scratch->table, keys, step);
        step->logits.keys = keys;
        step->logits.next = blocks->next;
        add_key_block(step, scratch->table.width);
    }
}

static void sweep_tile(const fdma_problem *problem, const row_range *rows,
                       backward_scratch *scratch) {
    backward_tile *const tile = &scratch->tile;
    backward_step step = {
        .logits = first_step(problem, rows, &tile->logits),
        .dp = {.tile = &tile->dp, .products = tile->dp.products, .dim = tile_dim(problem)},
        .tile = tile,
        .has_dbias = is_present(&problem->dbias),
    };
    load_backward_tile(problem, rows, tile);
    find_row_codes(problem, rows, &tile->logits);
    for (int block = 0; block < step.logits.blocks; block++)
        clear_out(&step.logits, block);
    if (problem->kv_len > 0)
        visit_keys(problem, rows, scratch, &step);
    write_dq(problem, rows, tile);
}

/* Sweeps over the tiles of one partition of a (b, g), in the order of positions. `head` is b *
 * kv_heads + g. `left` receives the partial sums of the partition; it is NULL if the partition is
 * the whole (b, g). */
static void sweep_tiles(const backward_context *backward, backward_scratch *scratch, int64_t head,
                        int64_t index, backward_partition *left) {
    const fdma_problem *const problem = backward->problem;
    const int64_t tiles = backward->tiles, lanes = backward->lanes;
    const int64_t begin = tiles * index / backward->count;
    const int64_t end = tiles * (index + 1) / backward->count;
    row_range rows = rows_of_head(problem, head);
    clear_tile(&scratch->tile.logits, &rows, tile_dim(problem));
    begin_table(&scratch->table);
    for (int64_t n = begin; n < end; n++) {
        rows = rows_of_tile(problem, head, lanes, n);
        if (left != NULL && n == begin)
            begin_partition(problem, &rows, &scratch->table, left);
        sweep_tile(problem, &rows, scratch);
    }
    if (end < tiles) {
        rows = rows_of_tile(problem, head, lanes, end);
        end_partition(problem, &rows, &scratch->table, left);
        return;
    }
    end_table(problem, &rows, &scratch->table);
    if (left != NULL)
        left->count->outliving = 0;
}

static backward_partition partition_at(const backward_context *backward, int64_t head,
                                       int64_t index) {
    const size_t before = (size_t)(head * backward->count + index);
    fdma_arena arena = {.base = backward->partitions + before * backward->partition_size};
    return take_partition(&arena, backward->problem, rows_of_key_table(backward));
}

/* Tasks begin with the last partition of each (b, g), because in dense causal attention it visits
 * the most keys. */
static void sweep_partition(const void *context, int64_t task, int32_t thread) {
    const backward_context *const backward = context;
    const fdma_problem *const problem = backward->problem;
    const int64_t heads = backward->batch * backward->kv_heads, count = backward->count;
    const int64_t n = task % heads, index = count - 1 - task / heads;
    const int64_t b = backward->first_b + n / backward->kv_heads;
    const int64_t head = b * problem->kv_heads + backward->first_g + n % backward->kv_heads;
    const uint32_t modes = flush_subnormals();
    fdma_arena arena = scratch_of_thread(backward->scratch, backward->scratch_size, thread);
    backward_scratch scratch = take_backward_scratch(&arena, backward);
    backward_partition own = {0};
    if (count > 1) {
        own = partition_at(backward, head, index);
        scratch.table.sums = own.sums;
    }
    sweep_tiles(backward, &scratch, head, index, count > 1 ? &own : NULL);
    restore_modes(modes);
}

/* Sweeps over all (b, g). The (b, g) that add to the same elements of dattn_bias take turns, so
 * that the order of its sums does not depend on the threads. */
static void sweep_all(backward_context *backward) {
    const fdma_problem *const problem = backward->problem;
    const fdma_tensor *const pairs = &problem->dattn_bias;
    const bool joins_batch = is_present(pairs) && pairs->shape[0] == 1;
    backward->batch = joins_batch ? 1 : problem->batch;
    backward->kv_heads = heads_at_once(problem);
    for (int64_t b = 0; b < problem->batch; b += max(backward->batch, 1))
        for (int64_t g = 0; g < problem->kv_heads; g += backward->kv_heads) {
            backward->first_b = b;
            backward->first_g = g;
            fdma_parallel_for(backward->problem->exec.parallel, backward->threads,
                              backward->batch * backward->kv_heads * backward->count,
                              sweep_partition, backward);
        }
}

static void join_partitions(const void *context, int64_t head, int32_t thread) {
    const backward_context *const backward = context;
    const fdma_problem *const problem = backward->problem;
    const uint32_t modes = flush_subnormals();
    fdma_arena none = {0};
    const row_range rows = rows_of_head(problem, head);
    const key_table table = take_key_table(&none, problem, rows_of_key_table(backward));
    (void)thread;
    for (int64_t n = 1; n < backward->count; n++) {
        const backward_partition from = partition_at(backward, head, n - 1),
                                 to = partition_at(backward, head, n);
        add_inherited(problem, &rows, &table, &from, &to);
        write_inherited(problem, &rows, &table, &to);
    }
    restore_modes(modes);
}

/* Divides the workspace, and returns the bytes that the call needs of it. */
static size_t plan_backward(const fdma_problem *problem, backward_context *context) {
    context->problem = problem;
    context->lanes = min(lanes_of_tiles(problem), backward_blocks * block_lanes);
    context->tiles = tiles_of(problem, context->lanes);
    context->count = count_partitions(problem, context->lanes);
    context->tasks = problem->batch * problem->kv_heads * context->count;
    context->threads = threads_for(problem, context->tasks, 2 * forward_microseconds(problem));
    fdma_arena thread_scratch = {0}, left_behind = {0}, arena = fdma_arena_of(problem);
    take_backward_scratch(&thread_scratch, context);
    take_partition(&left_behind, problem, rows_of_key_table(context));
    const int64_t most = problem->batch * most_partitions(problem, context->lanes);
    const int64_t partitions = problem->any_len ? most : context->count > 1 ? context->tasks : 0;
    context->partition_size = left_behind.used;
    context->partitions = fdma_arena_take(&arena, left_behind.used * (size_t)partitions);
    context->scratch_size = thread_scratch.used;
    context->scratch = fdma_arena_take(&arena, thread_scratch.used * (size_t)context->threads);
    context->most_live = take_ints(&arena, problem->batch * problem->kv_heads);
    return fdma_arena_size(&arena);
}

static void find_most_live(const void *context, int64_t head, int32_t thread) {
    const backward_context *const backward = context;
    const fdma_problem *const problem = backward->problem;
    fdma_arena arena = scratch_of_thread(backward->scratch, backward->scratch_size, thread);
    const backward_scratch scratch = take_backward_scratch(&arena, backward);
    backward->most_live[head] = most_live(problem, head / problem->kv_heads,
                                          head % problem->kv_heads, scratch.table.row_of);
}

/* Refuses selections that keep more keys than window + recent: the key table has no rows for
 * them. */
static fdma_status check_selection(const backward_context *backward) {
    const fdma_problem *const problem = backward->problem;
    const int64_t heads = problem->batch * problem->kv_heads;
    if (!problem->selected || rows_of_key_table(backward) >= problem->kv_len)
        return FDMA_OK;
    fdma_parallel_for(backward->problem->exec.parallel, backward->threads, heads, find_most_live,
                      backward);
    for (int64_t head = 0; head < heads; head++)
        FDMA_REQUIRE(backward->most_live[head] <= problem->slots, FDMA_INVALID_ARGUMENT,
                     "selection: keeps %d keys at some position, want at most window + recent, "
                     "%lld, as it says",
                     backward->most_live[head], (long long)problem->slots);
    return FDMA_OK;
}

static size_t backward_workspace(const fdma_problem *problem) {
    backward_context context;
    return plan_backward(problem, &context);
}

static fdma_status run_backward(const fdma_problem *problem) {
    backward_context context;
    plan_backward(problem, &context);
    if (problem->only_checks)
        return check_selection(&context);
    if (is_present(&problem->dattn_bias) && !problem->add_dattn_bias)
        fdma_clear_tensor(&problem->dattn_bias);
    sweep_all(&context);
    if (context.count > 1)
        fdma_parallel_for(problem->exec.parallel, context.threads,
                          problem->batch * problem->kv_heads, join_partitions, &context);
    if (is_present(&problem->dsink_logit))
        fdma_parallel_for(problem->exec.parallel, context.threads, problem->q_heads, find_dsink,
                          problem);
    return FDMA_OK;
}
