/* Forward: the loop of FlashAttention over the key blocks of a tile, with queries in the lanes.
 * Sources: arXiv:2205.14135; docs/algorithm.md. */
#pragma once

#include "cpu/common/pairs.h"
#include "cpu/common/softmax.h"
#include "cpu/parallel.h"

/* One block of a tile's lanes attends to one key block: weights, then O += V P. */

/* The logits of a group, -inf in lanes that do not keep the key. */
INLINE void find_group_logits(product_block s, int from, const tile_step *step,
                              const key_group *group, int block) {
    find_logits(s, from, step, group->first, block);
    if (group->masked)
        mask_lanes(s, from, step->keys, group->first, block);
}

/* Raises the maximum of the lanes to the maximum of a group, and weighs the group under it. */
NOINLINE void raise_group(const tile_step *step, const key_group *group, int block) {
    const tile_state *const tile = step->tile;
    const int32_t first = group->first;
    vf top[tile_vectors], total[tile_vectors];
    product_block s;
    find_group_logits(s, 0, step, group, block);
    for (int m = 0; m < tile_vectors; m++) {
        top[m] = s[0][m];
        for (int key = 1; key < group_keys; key++)
            top[m] = vf_max(top[m], s[key][m]);
    }
    raise_max(step, block, top, first);
    weigh(s, 0, tile->max + block * block_lanes, tile->weights + first / terms * block_lanes,
          total);
    add_vectors(tile->block_sum, total, 0, tile_vectors);
}

INLINE void weigh_lanes(const tile_step *step, const key_group *group, int block, int from) {
    const tile_state *const tile = step->tile;
    const int32_t first = group->first;
    vf total[tile_vectors];
    product_block s;
    find_group_logits(s, from, step, group, block);
    weigh(s, from, tile->max + block * block_lanes, tile->weights + first / terms * block_lanes,
          total);
    if (has_outgrown(total, from))
        raise_group(step, group, block);
    else
        add_vectors(tile->block_sum, total, from, tile_vectors);
}

/* P = e^(S - max) of a group. The first group that a block of lanes keeps sets its maximum. */
INLINE void weigh_group(const tile_step *step, const key_group *group, int block, bool is_first) {
    if (is_first)
        raise_group(step, group, block);
    else if (group->upper)
        weigh_lanes(step, group, block, half_vectors);
    else
        weigh_lanes(step, group, block, 0);
}

/* Clears the weights of the groups that no lane keeps, for products that take whole steps. */
static void clear_skipped(const tile_step *step, const group_list *groups) {
    const key_group *group = groups->group, *const end = group + groups->count;
    for (int32_t first = 0; first < whole_steps(step->keys->count); first += group_keys)
        if (group < end && group->first == first)
            group++;
        else
            memset(step->tile->weights + first / terms * block_lanes, 0,
                   sizeof(float) * group_keys / terms * block_lanes);
}

NOINLINE void weigh_groups(const tile_step *step, int block, const group_list *groups) {
    int32_t multiplied = 0; // the products of the keys before it are in memory
    if ((int)key_step > (int)group_keys)
        clear_skipped(step, groups);
    for (int32_t n = 0; n < groups->count; n++) {
        multiplied = multiply_ahead(step, &groups->group[n], block, multiplied);
        weigh_group(step, &groups->group[n], block, !step->begun && n == 0);
    }
}

static void add_block_sum(const tile_state *tile, int block) {
    vf sum[tile_vectors];
    load_vectors(sum, tile->block_sum, 0, tile_vectors);
    add_vectors(tile->sum + block * block_lanes, sum, 0, tile_vectors);
}

static void clear_out(const tile_step *step, int block) {
    memset(block_out(step, block), 0, sizeof(float) * (size_t)(step->dim * block_lanes));
}

/* Attends to a key block: logits and weights of the kept groups, then O += V P. */
static void attend_block(const tile_step *step, int block) {
    const tile_state *const tile = step->tile;
    group_list groups;
    classify_groups(step->keys, block, &groups);
    memset(tile->block_sum, 0, sizeof(float) * block_lanes);
    if (tile->pair_bias != NULL)
        load_pair_bias(step, block, &groups);
    weigh_groups(step, block, &groups);
    add_block_sum(tile, block);
    if (step->threshold != 0)
        drop_weights(step, block, &groups);
    if (!step->begun)
        clear_out(step, block); // only now, so that it is in the cache for the sums
    add_groups(step, block, &groups);
}

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

/* Attends to one key block, a block of lanes at a time. */
static void attend_keys(const fdma_problem *problem, const tile_step *step) {
    const key_list *const keys = step->keys;
    load_keys(problem, step->tile->k_rows, keys->k_source, keys->count);
    load_values(problem, step->tile->values, keys->v_source, keys->count);
    begin_products();
    for (int block = 0; block < step->blocks; block++)
        attend_block(step, block);
    end_products();
}

static void attend_all_keys(const fdma_problem *problem, const snapshots *all,
                            const row_range *rows, const tile_state *tile, key_blocks *blocks) {
    tile_step step = first_step(problem, rows, tile);
    start_keys(problem, all, rows, &blocks->cursor);
    start_key_blocks(problem, rows, tile, blocks);
    while (advance_keys(problem, rows, tile, blocks)) {
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
        fdma_parallel_for(context.threads, problem->batch * problem->kv_heads, snapshot_head,
                          &context);
    fdma_parallel_for(context.threads, context.tasks, attend_tile, &context);
    return FDMA_OK;
}
