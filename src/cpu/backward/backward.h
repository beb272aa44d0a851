/* Backward: the tiles of forward, with queries in the lanes, in the order of their positions. dq of
 * a tile is complete once its keys have been visited; the sums of the keys are held in a table that
 * moves along with the tiles. So every sum has one order, whatever the number of threads. Sources:
 * arXiv:2205.14135, algorithm 4; docs/algorithm.md, backward. */
#ifndef FDMA_CPU_BACKWARD_BACKWARD_H
#define FDMA_CPU_BACKWARD_BACKWARD_H

#include "cpu/backward/partition.h"
#if defined(FDMA_POINT_AMX)
#include "cpu/backward/block_amx.h"
#else
#include "cpu/backward/block_vectors.h"
#endif
#include "cpu/forward/forward.h"

typedef struct backward_context {
    const fdma_problem *problem;
    uint8_t *partitions; /* [batch * kv_heads][count], each of partition_size bytes */
    size_t partition_size;
    int64_t count;    /* of the partitions of one (b, g) */
    uint8_t *scratch; /* of thread 0; the other threads' follow at multiples of scratch_size */
    size_t scratch_size;
    int64_t lanes; /* of a tile */
    int64_t tiles; /* of one (b, g) */
    int32_t threads;
} backward_context;

/* What each thread has of its own. */
typedef struct backward_scratch {
    backward_tile tile;
    key_table table;
    key_list *list, *next;
    int32_t *expiring;
} backward_scratch;

static int64_t context_rows(const backward_context *context) {
    return table_rows(context->problem, context->lanes, context->count > 1);
}

static backward_scratch take_backward_scratch(fdma_arena *arena, const backward_context *context) {
    const fdma_problem *const problem = context->problem;
    const int64_t rows = context_rows(context);
    backward_scratch scratch;
    scratch.tile = take_backward_tile(arena, problem, context->lanes);
    scratch.table = take_key_table(arena, problem, rows);
    if (context->count == 1)
        scratch.table.sums = fdma_arena_take(arena, sums_bytes(problem, rows));
    scratch.list = fdma_arena_take(arena, sizeof *scratch.list);
    scratch.next = fdma_arena_take(arena, sizeof *scratch.next);
    scratch.expiring = fdma_arena_take(arena, sizeof *scratch.expiring * most_lanes);
    return scratch;
}

/* Finds the sums of the listed keys in the table. */
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
    key_cursor cursor = advance_table(problem, rows, &scratch->table, scratch->expiring);
    key_list *list = scratch->list, *next = scratch->next;
    list_keys(problem, rows, &cursor, &tile->logits, list);
    while (list->count > 0) {
        list_keys(problem, rows, &cursor, &tile->logits, next);
        load_keys(problem, tile->logits.k_rows, list->k_source, list->count);
        load_keys(problem, tile->dp.k_rows, list->v_source, list->count);
        load_values(problem, tile->logits.values, list->k_source, list->count);
        find_sums(&scratch->table, list, step);
        step->logits.keys = list;
        step->logits.next = next;
        add_key_block(step, scratch->table.width);
        key_list *const done = list;
        list = next;
        next = done;
    }
}

static void sweep_tile(const fdma_problem *problem, const row_range *rows,
                       backward_scratch *scratch) {
    backward_tile *const tile = &scratch->tile;
    const int64_t dim = tile_dim(problem);
    backward_step step = {
        .logits =
            {
                .tile = &tile->logits,
                .dim = dim,
                .scale = (float)problem->scale,
                .cap = softcap_of(problem),
                .blocks = (int)(used_lanes(rows) / block_lanes),
            },
        .dp = {.tile = &tile->dp, .dim = dim},
        .tile = tile,
        .has_dbias = is_present(&problem->dbias),
    };
    load_backward_tile(problem, rows, tile);
    for (int block = 0; block < step.logits.blocks; block++)
        clear_out(&step.logits, block);
    if (problem->kv_len > 0)
        visit_keys(problem, rows, scratch, &step);
    write_dq(problem, rows, tile);
}

/* Sweeps over the tiles of one partition, in the order of positions. `one` is what it leaves
 * behind; NULL: the partition is the whole (b, g). */
static void sweep_tiles(const backward_context *backward, backward_scratch *scratch,
                        const row_range *head, int64_t index, partition *one) {
    const fdma_problem *const problem = backward->problem;
    const int64_t tiles = backward->tiles, lanes = backward->lanes;
    const int64_t begin = first_tile(tiles, backward->count, index);
    const int64_t end = first_tile(tiles, backward->count, index + 1);
    row_range rows = *head;
    clear_tile(&scratch->tile.logits, head, tile_dim(problem));
    begin_table(&scratch->table);
    for (int64_t n = begin; n < end; n++) {
        rows = rows_of_tile(problem, head->b, head->g, lanes, n);
        if (one != NULL && n == begin)
            begin_partition(problem, &rows, &scratch->table, one);
        sweep_tile(problem, &rows, scratch);
    }
    if (end < tiles) {
        rows = rows_of_tile(problem, head->b, head->g, lanes, end);
        end_partition(problem, &rows, &scratch->table, one);
        return;
    }
    end_table(problem, &rows, &scratch->table);
    if (one != NULL)
        one->count->outliving = 0;
}

static row_range rows_of_head(const fdma_problem *problem, int64_t head) {
    return (row_range){.b = head / problem->kv_heads, .g = head % problem->kv_heads};
}

static partition partition_at(const backward_context *backward, int64_t head, int64_t index) {
    const size_t before = (size_t)(head * backward->count + index) * backward->partition_size;
    fdma_arena arena = {.base = backward->partitions + before};
    return take_partition(&arena, backward->problem, context_rows(backward));
}

/* Sweeps over one partition of one (b, g). The last ones, which visit the most keys, come first. */
static void sweep_partition(const void *context, int64_t task, int32_t thread) {
    const backward_context *const backward = context;
    const fdma_problem *const problem = backward->problem;
    const int64_t heads = problem->batch * problem->kv_heads, count = backward->count;
    const int64_t head = task % heads, index = count - 1 - task / heads;
    const uint32_t rounding = flush_subnormals();
    fdma_arena arena = {.base = backward->scratch + (size_t)thread * backward->scratch_size};
    backward_scratch scratch = take_backward_scratch(&arena, backward);
    const row_range rows = rows_of_head(problem, head);
    partition own = {0};
    if (count > 1) {
        own = partition_at(backward, head, index);
        scratch.table.sums = own.sums;
    }
    sweep_tiles(backward, &scratch, &rows, index, count > 1 ? &own : NULL);
    restore_modes(rounding);
}

/* Adds up what the partitions of one (b, g) have left behind. */
static void join_partitions(const void *context, int64_t head, int32_t thread) {
    const backward_context *const backward = context;
    const fdma_problem *const problem = backward->problem;
    const uint32_t rounding = flush_subnormals();
    fdma_arena none = {0};
    const row_range rows = rows_of_head(problem, head);
    const key_table table = take_key_table(&none, problem, context_rows(backward));
    (void)thread;
    for (int64_t n = 1; n < backward->count; n++) {
        const partition from = partition_at(backward, head, n - 1),
                        to = partition_at(backward, head, n);
        add_inherited(problem, &rows, &table, &from, &to);
        write_inherited(problem, &rows, &table, &to);
    }
    restore_modes(rounding);
}

static int64_t backward_lanes(const fdma_problem *problem) {
    const int64_t most = backward_blocks * block_lanes, lanes = lanes_of_tiles(problem);
    return lanes < most ? lanes : most;
}

static int64_t backward_tasks(const backward_context *context) {
    return context->problem->batch * context->problem->kv_heads * context->count;
}

static void take_partitions(fdma_arena *arena, backward_context *context) {
    const int64_t count = context->count > 1 ? backward_tasks(context) : 0;
    fdma_arena one = {0};
    take_partition(&one, context->problem, context_rows(context));
    context->partition_size = one.used;
    context->partitions = fdma_arena_take(arena, (size_t)count * one.used);
}

static fdma_arena plan_backward(const fdma_problem *problem, backward_context *context) {
    fdma_arena one = {0};
    context->problem = problem;
    context->lanes = backward_lanes(problem);
    context->tiles = tiles_of(problem, context->lanes);
    context->count = count_partitions(problem, context->lanes);
    context->threads = fdma_worthwhile_threads(problem->exec.threads, backward_tasks(context),
                                               2 * forward_microseconds(problem));
    take_backward_scratch(&one, context);
    fdma_arena arena = fdma_arena_of(problem);
    take_partitions(&arena, context);
    context->scratch_size = one.used;
    context->scratch = fdma_arena_take(&arena, one.used * (size_t)context->threads);
    return arena;
}

static size_t backward_workspace(const fdma_problem *problem) {
    backward_context context;
    const fdma_arena arena = plan_backward(problem, &context);
    return fdma_arena_size(&arena);
}

static fdma_status run_backward(const fdma_problem *problem) {
    backward_context context;
    plan_backward(problem, &context);
    fdma_parallel_for(context.threads, backward_tasks(&context), sweep_partition, &context);
    if (context.count > 1)
        fdma_parallel_for(context.threads, problem->batch * problem->kv_heads, join_partitions,
                          &context);
    return FDMA_OK;
}

#endif
