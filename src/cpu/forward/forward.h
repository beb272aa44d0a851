/* Forward: the loop of FlashAttention over the key blocks that a tile visits, with queries in the
 * lanes. Sources: arXiv:2205.14135; docs/algorithm.md. */
#ifndef FDMA_CPU_FORWARD_FORWARD_H
#define FDMA_CPU_FORWARD_FORWARD_H

#include "cpu/forward/block.h"
#include "cpu/parallel.h"

typedef struct forward_context {
    const fdma_problem *problem;
    snapshots snapshots;
    uint8_t *scratch; /* of thread 0; the other threads' follow at multiples of scratch_size */
    size_t scratch_size;
    int64_t lanes; /* of a tile */
    int64_t tiles; /* of one (b, g) */
    int32_t threads;
} forward_context;

/* Attends to one key block, a block of lanes at a time. */
static void attend_keys(const tile_step *step) {
#if defined(FDMA_POINT_AMX)
    begin_products();
#endif
    for (int block = 0; block < step->blocks; block++)
        attend_block(step, block);
#if defined(FDMA_POINT_AMX)
    end_products();
#endif
}

/* Attends to all keys that a tile visits. The next key block is listed before this one is worked
 * on, so that its rows can be prefetched. */
static void attend_all_keys(const fdma_problem *problem, const snapshots *all,
                            const row_range *rows, const tile_state *tile, fdma_arena *arena) {
    key_list *list = fdma_arena_take(arena, sizeof *list);
    key_list *next = fdma_arena_take(arena, sizeof *next);
    int32_t *const expiring = fdma_arena_take(arena, sizeof *expiring * most_lanes);
    key_cursor cursor = start_keys(problem, all, rows, expiring);
    tile_step step = {
        .tile = tile,
        .dim = tile_dim(problem),
        .scale = (float)problem->scale,
        .cap = softcap_of(problem),
        .blocks = (int)(used_lanes(rows) / block_lanes),
    };
    list->count = 0;
    if (problem->kv_len > 0)
        list_keys(problem, rows, &cursor, tile, list);
    while (list->count > 0) {
        list_keys(problem, rows, &cursor, tile, next);
        load_keys(problem, tile->k_rows, list->k_source, list->count);
        load_values(problem, tile->values, list->v_source, list->count);
        step.keys = list;
        step.next = next;
        attend_keys(&step);
        step.begun = true;
        key_list *const done = list;
        list = next;
        next = done;
    }
    for (int block = 0; block < step.blocks && !step.begun; block++)
        clear_out(&step, block); // the tile visits no key
}

/* Tiles of the last queries come first: under a causal mask they visit the most keys. */
static void attend_tile(const void *context, int64_t index, int32_t thread) {
    const forward_context *const forward = context;
    const fdma_problem *const problem = forward->problem;
    const int64_t heads = problem->batch * problem->kv_heads, head = index % heads;
    const int64_t tile_index = forward->tiles - 1 - index / heads;
    const uint32_t rounding = flush_subnormals();
    fdma_arena arena = {.base = forward->scratch + (size_t)thread * forward->scratch_size};
    tile_state tile = take_tile(&arena, problem, forward->lanes);
    const row_range rows = rows_of_tile(problem, head / problem->kv_heads, head % problem->kv_heads,
                                        forward->lanes, tile_index);
    pack_queries(problem, &rows, &tile);
    clear_tile(&tile, &rows, tile_dim(problem));
    attend_all_keys(problem, &forward->snapshots, &rows, &tile, &arena);
    write_out(problem, &rows, &tile);
    if (is_present(&problem->lse))
        write_lse(problem, &rows, &tile);
    restore_modes(rounding);
}

static void snapshot_head(const void *context, int64_t head, int32_t thread) {
    const forward_context *const forward = context;
    (void)thread;
    fill_snapshots(forward->problem, &forward->snapshots, head);
}

static int64_t forward_tasks(const forward_context *context) {
    return context->problem->batch * context->problem->kv_heads * context->tiles;
}

/* A rough estimate of the time on one thread; wide vectors take less. */
static int64_t forward_microseconds(const fdma_problem *problem) {
    const double flops_a_microsecond = 5e4;
    const int64_t keys =
        problem->selected ? min(problem->window, problem->kv_len) : problem->kv_len;
    const double rows = (double)(problem->batch * problem->q_len) * (double)problem->q_heads;
    const double flops = 4 * rows * (double)problem->head_dim * (double)keys;
    return (int64_t)fmin(flops / flops_a_microsecond, 1e15);
}

/* Divides the workspace; the size of the arena is what the call needs. */
static fdma_arena plan_forward(const fdma_problem *problem, forward_context *context) {
    context->problem = problem;
    context->lanes = lanes_of_tiles(problem);
    context->tiles = tiles_of(problem, context->lanes);
    context->threads = fdma_worthwhile_threads(problem->exec.threads, forward_tasks(context),
                                               forward_microseconds(problem));
    fdma_arena one = {0};
    take_tile(&one, problem, context->lanes);
    fdma_arena_take(&one, sizeof(key_list));
    fdma_arena_take(&one, sizeof(key_list));
    fdma_arena_take(&one, sizeof(int32_t) * most_lanes);
    fdma_arena arena = fdma_arena_of(problem);
    context->snapshots = take_snapshots(&arena, problem);
    context->scratch_size = one.used;
    context->scratch = fdma_arena_take(&arena, one.used * (size_t)context->threads);
    return arena;
}

static size_t forward_workspace(const fdma_problem *problem) {
    forward_context context;
    const fdma_arena arena = plan_forward(problem, &context);
    return fdma_arena_size(&arena);
}

static fdma_status run_forward(const fdma_problem *problem) {
    forward_context context;
    plan_forward(problem, &context);
    if (context.snapshots.count > 0)
        fdma_parallel_for(context.threads, problem->batch * problem->kv_heads, snapshot_head,
                          &context);
    fdma_parallel_for(context.threads, forward_tasks(&context), attend_tile, &context);
    return FDMA_OK;
}

#endif
