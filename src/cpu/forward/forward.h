/* Forward: the loop of FlashAttention over the key blocks of a tile, with queries in the lanes.
 * Sources: arXiv:2205.14135; docs/algorithm.md. */
#pragma once

#include "cpu/parallel.h"

#if defined(FDMA_POINT_AMX)
#include "cpu/forward/attend_amx.h"
#else
#include "cpu/forward/attend_vectors.h"
#endif

typedef struct forward_context {
    const fdma_problem *problem;
    snapshots snapshots;
    uint8_t *scratch; /* thread 0's; the other threads' follow at multiples of scratch_size */
    size_t scratch_size;
    int64_t lanes; /* lanes of a tile */
    int64_t tiles; /* tiles of one (b, g) */
    int64_t tasks; /* tiles of all (b, g) */
    int32_t threads;
} forward_context;

/* Memory of one thread. */
typedef struct forward_scratch {
    tile_state tile;
    key_blocks blocks;
} forward_scratch;

static forward_scratch take_forward_scratch(fdma_arena *arena, const forward_context *context) {
    forward_scratch scratch;
    scratch.tile = take_tile(arena, context->problem, context->lanes);
    scratch.blocks = take_key_blocks(arena, context->problem);
    return scratch;
}

/* Attends to one key block. */
static void attend_keys(const fdma_problem *problem, tile_step *step) {
    const key_list *const keys = step->keys;
    load_keys(problem, step->tile->k_rows, keys->k_source, keys->count);
    load_values(problem, step->tile->values, keys->v_source, keys->count);
    begin_products();
    attend_blocks(step);
    end_products();
}

static void attend_all_keys(const fdma_problem *problem, const snapshots *all,
                            const row_range *rows, const tile_state *tile, key_blocks *blocks) {
    tile_step step = first_step(problem, rows, tile);
    step.unit = logit_unit;
    start_keys(problem, all, rows, &blocks->cursor);
    start_key_blocks(problem, rows, tile, blocks);
    while (advance_keys(problem, rows, tile, blocks)) {
        for (int32_t n = 0; n < key_block; n++)
            blocks->now->bias[n] *= logit_unit;
        step.keys = blocks->now;
        step.next = blocks->next;
        attend_keys(problem, &step);
        step.begun = true;
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
    const uint32_t modes = flush_subnormals();
    fdma_arena arena = scratch_of_thread(forward->scratch, forward->scratch_size, thread);
    forward_scratch scratch = take_forward_scratch(&arena, forward);
    const row_range rows = rows_of_tile(problem, head, forward->lanes, tile_index);
    pack_rows(problem, &problem->q, &rows, scratch.tile.q, NULL, NULL);
    clear_tile(&scratch.tile, &rows, tile_dim(problem));
    find_row_codes(problem, &rows, &scratch.tile);
    attend_all_keys(problem, &forward->snapshots, &rows, &scratch.tile, &scratch.blocks);
    write_out(problem, &rows, &scratch.tile);
    if (is_present(&problem->lse))
        write_lse(problem, &rows, &scratch.tile);
    restore_modes(modes);
}

static void snapshot_head(const void *context, int64_t head, int32_t thread) {
    const forward_context *const forward = context;
    (void)thread;
    fill_snapshots(forward->problem, &forward->snapshots, head);
}

/* A rough estimate of the time on one thread; wide vectors take less. */
static int64_t forward_microseconds(const fdma_problem *problem) {
    const double flops_per_microsecond = 5e4;
    const double rows = (double)(problem->batch * problem->q_len) * (double)problem->q_heads;
    const double flops = 4 * rows * (double)problem->head_dim * (double)keys_of_query(problem);
    return (int64_t)fmin(flops / flops_per_microsecond, 1e15);
}

/* fdma_worthwhile_threads(), or all threads if the workspace must also serve smaller problems,
 * which may have more tasks. */
static int32_t threads_for(const fdma_problem *problem, int64_t tasks, int64_t microseconds) {
    const int32_t asked = problem->exec.threads;
    return problem->any_len ? fdma_thread_count(asked, INT32_MAX)
                            : fdma_worthwhile_threads(asked, tasks, microseconds);
}

/* Divides the workspace, and returns the bytes that the call needs of it. */
static size_t plan_forward(const fdma_problem *problem, forward_context *context) {
    context->problem = problem;
    context->lanes = lanes_of_tiles(problem);
    context->tiles = tiles_of(problem, context->lanes);
    context->tasks = problem->batch * problem->kv_heads * context->tiles;
    context->threads = threads_for(problem, context->tasks, forward_microseconds(problem));
    fdma_arena one = {0}, arena = fdma_arena_of(problem);
    take_forward_scratch(&one, context);
    context->snapshots = take_snapshots(&arena, problem);
    context->scratch_size = one.used;
    context->scratch = fdma_arena_take(&arena, one.used * (size_t)context->threads);
    return fdma_arena_size(&arena);
}

static size_t forward_workspace(const fdma_problem *problem) {
    forward_context context;
    return plan_forward(problem, &context);
}

static fdma_status run_forward(const fdma_problem *problem) {
    forward_context context;
    plan_forward(problem, &context);
    if (context.snapshots.count > 0)
        fdma_parallel_for(problem->exec.parallel, context.threads,
                          problem->batch * problem->kv_heads, snapshot_head, &context);
    fdma_parallel_for(problem->exec.parallel, context.threads, context.tasks, attend_tile,
                      &context);
    return FDMA_OK;
}
