/* Backward: forward's tiles of queries in the lanes, in the order of time. A tile's dq is complete
 * when its keys have been visited once; what keys get is summed in a table that moves along. So
 * every sum has one order, whatever the number of threads. Sources: arXiv:2205.14135, algorithm 4;
 * docs/algorithm.md, backward. */
#ifndef FDMA_CPU_BACKWARD_BACKWARD_H
#define FDMA_CPU_BACKWARD_BACKWARD_H

#include "cpu/backward/block.h"
#include "cpu/backward/stretch.h"

typedef struct backward_context {
    const fdma_problem *problem;
    uint8_t *stretches; /* [batch * kv_heads][count], each of stretch_size bytes */
    size_t stretch_size;
    int64_t count;    /* of one (b, g) */
    uint8_t *scratch; /* of thread 0; the others' follow at scratch_size */
    size_t scratch_size;
    int64_t lanes; /* of a tile */
    int64_t tiles; /* of one (b, g) */
    int32_t threads;
} backward_context;

/* A thread's own. */
typedef struct backward_scratch {
    backward_tile tile;
    key_table table;
    key_list *list, *next;
    int32_t *dying;
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
    scratch.dying = fdma_arena_take(arena, sizeof *scratch.dying * most_lanes);
    return scratch;
}

static void find_sums(const key_table *table, const key_list *list, backward_work *work) {
    for (int32_t n = 0; n < key_block; n++) {
        const int64_t row = n < list->count ? table->row_of[list->key[n]] : table->count;
        work->dk[n] = sums_of(table, row);
        work->dv[n] = work->dk[n] + table->width;
        work->dbias[n] = work->dv[n] + table->width;
    }
}

static void visit_keys(const fdma_problem *problem, const tile_place *place,
                       backward_scratch *scratch, backward_work *work) {
    const backward_tile *const tile = &scratch->tile;
    key_walk walk = turn_table(problem, place, &scratch->table, scratch->dying);
    key_list *list = scratch->list, *next = scratch->next;
    list_keys(problem, place, &walk, &tile->logits, list);
    while (list->count > 0) {
        list_keys(problem, place, &walk, &tile->logits, next);
        load_keys(problem, tile->logits.k_rows, list->k_source, list->count);
        load_keys(problem, tile->shares.k_rows, list->v_source, list->count);
        load_values(problem, tile->logits.values, list->k_source, list->count);
        find_sums(&scratch->table, list, work);
        work->logits.list = list;
        work->logits.next = next;
        work_on_keys(work, scratch->table.width);
        key_list *const done = list;
        list = next;
        next = done;
    }
}

static void work_on_tile(const fdma_problem *problem, const tile_place *place,
                         backward_scratch *scratch) {
    backward_tile *const tile = &scratch->tile;
    uint8_t is_used[key_block / key_step * backward_blocks];
    backward_work work = {
        .is_used = is_used,
        .logits =
            {
                .tile = &tile->logits,
                .dim = tile_dim(problem),
                .scale = (float)problem->scale,
                .cap = softcap_of(problem),
                .blocks = (int)(used_lanes(place) / block_lanes),
            },
        .tile = tile,
        .has_dbias = is_present(&problem->dbias),
    };
    load_backward_tile(problem, place, tile);
    for (int block = 0; block < work.logits.blocks; block++)
        clear_out(&work.logits, block);
    if (problem->kv_len > 0)
        visit_keys(problem, place, scratch, &work);
    write_dq(problem, place, tile);
}

/* The tiles of one stretch, in the order of time; `one`: what it leaves, NULL where it is all. */
static void sweep_tiles(const backward_context *backward, backward_scratch *scratch,
                        const tile_place *head, int64_t index, stretch *one) {
    const fdma_problem *const problem = backward->problem;
    const int64_t tiles = backward->tiles, lanes = backward->lanes;
    const int64_t begin = first_tile(tiles, backward->count, index);
    const int64_t end = first_tile(tiles, backward->count, index + 1);
    tile_place place = *head;
    clear_tile(&scratch->tile.logits, head, tile_dim(problem));
    begin_table(&scratch->table);
    for (int64_t n = begin; n < end; n++) {
        place = place_tile(problem, head->b, head->g, lanes, n);
        if (one && n == begin)
            begin_stretch(problem, &place, &scratch->table, one);
        work_on_tile(problem, &place, scratch);
    }
    if (end < tiles) {
        place = place_tile(problem, head->b, head->g, lanes, end);
        end_stretch(problem, &place, &scratch->table, one);
        return;
    }
    end_table(problem, &place, &scratch->table);
    if (one)
        one->counts[1] = 0;
}

static tile_place place_of_head(const fdma_problem *problem, int64_t head) {
    return (tile_place){.b = head / problem->kv_heads, .g = head % problem->kv_heads};
}

static stretch stretch_at(const backward_context *backward, int64_t head, int64_t index) {
    const size_t before = (size_t)(head * backward->count + index) * backward->stretch_size;
    fdma_arena arena = {.base = backward->stretches + before};
    return take_stretch(&arena, backward->problem, context_rows(backward));
}

/* One stretch of one (b, g). The last ones, which see the most keys, come first. */
static void sweep_stretch(const void *context, int64_t task, int32_t thread) {
    const backward_context *const backward = context;
    const fdma_problem *const problem = backward->problem;
    const int64_t heads = problem->batch * problem->kv_heads, count = backward->count;
    const int64_t head = task % heads, index = count - 1 - task / heads;
    const uint32_t rounding = flush_subnormals();
    fdma_arena arena = {.base = backward->scratch + (size_t)thread * backward->scratch_size};
    backward_scratch scratch = take_backward_scratch(&arena, backward);
    const tile_place place = place_of_head(problem, head);
    stretch own = {0};
    if (count > 1) {
        own = stretch_at(backward, head, index);
        scratch.table.sums = own.sums;
    }
    begin_products();
    sweep_tiles(backward, &scratch, &place, index, count > 1 ? &own : NULL);
    end_products();
    restore_modes(rounding);
}

/* Adds up what the stretches of one (b, g) have left. */
static void join_stretches(const void *context, int64_t head, int32_t thread) {
    const backward_context *const backward = context;
    const fdma_problem *const problem = backward->problem;
    const uint32_t rounding = flush_subnormals();
    fdma_arena none = {0};
    const tile_place place = place_of_head(problem, head);
    const key_table table = take_key_table(&none, problem, context_rows(backward));
    (void)thread;
    for (int64_t n = 1; n < backward->count; n++) {
        const stretch from = stretch_at(backward, head, n - 1), to = stretch_at(backward, head, n);
        carry_sums(problem, &place, &table, &from, &to);
        put_carried(problem, &place, &table, &to);
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

/* Tables of all stretches. */
static void take_stretches(fdma_arena *arena, backward_context *context) {
    const int64_t count = context->count > 1 ? backward_tasks(context) : 0;
    fdma_arena one = {0};
    take_stretch(&one, context->problem, context_rows(context));
    context->stretch_size = one.used;
    context->stretches = fdma_arena_take(arena, (size_t)count * one.used);
}

static fdma_arena lay_out_backward(const fdma_problem *problem, backward_context *context) {
    fdma_arena one = {0};
    context->problem = problem;
    context->lanes = backward_lanes(problem);
    context->tiles = tiles_of(problem, context->lanes);
    context->count = count_stretches(problem, context->lanes);
    context->threads = fdma_worthwhile_threads(problem->exec.threads, backward_tasks(context),
                                               2 * forward_microseconds(problem));
    take_backward_scratch(&one, context);
    fdma_arena arena = fdma_arena_of(problem);
    take_stretches(&arena, context);
    context->scratch_size = one.used;
    context->scratch = fdma_arena_take(&arena, one.used * (size_t)context->threads);
    return arena;
}

static size_t backward_workspace(const fdma_problem *problem) {
    backward_context context;
    const fdma_arena arena = lay_out_backward(problem, &context);
    return fdma_arena_size(&arena);
}

static fdma_status run_backward(const fdma_problem *problem) {
    backward_context context;
    lay_out_backward(problem, &context);
    fdma_parallel_for(context.threads, backward_tasks(&context), sweep_stretch, &context);
    if (context.count > 1)
        fdma_parallel_for(context.threads, problem->batch * problem->kv_heads, join_stretches,
                          &context);
    return FDMA_OK;
}

#endif
