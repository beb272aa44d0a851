/* Forward: FlashAttention's loop over the keys that a tile visits, with queries in the lanes. Needs
 * product.h or product_tiles.h before it. Sources: arXiv:2205.14135; docs/algorithm.md. */
#ifndef FDMA_CPU_FORWARD_FORWARD_H
#define FDMA_CPU_FORWARD_FORWARD_H

#include "cpu/common/softmax.h"
#include "cpu/decode/decode.h"
#include "cpu/parallel.h"

typedef struct forward_context {
    const fdma_problem *problem;
    snapshots snapshots;
    uint8_t *scratch; /* of thread 0; the others' follow at scratch_size */
    size_t scratch_size;
    int64_t lanes; /* of a tile */
    int64_t tiles; /* of one (b, g) */
    int32_t threads;
} forward_context;

/* A tile at work on a block of keys. */
typedef struct tile_work {
    const tile_state *tile;
    const key_list *list;
    const key_list *next; /* its rows are asked for on the way */
    int64_t dim;
    float scale;
    float cap;  /* 0: no softcap */
    int blocks; /* of lanes, that have rows */
    bool begun; /* whether any list has been worked on */
} tile_work;

/* Rows of the next list to ask for at work on this block, or NULL. */
INLINE const void *const *rows_ahead(const tile_work *work, int32_t first, int block) {
    return block == 0   ? work->next->k_source + first
           : block == 1 ? work->next->v_source + first
                        : NULL;
}

/* Which lanes of a block keep keys of a group: none any of them, all of them all, or else some. */
typedef enum coverage { covers_none, covers_some, covers_all } coverage;

static coverage cover_block(const key_list *list, int32_t first, int block) {
    const int32_t lane = block * block_lanes, end = lane + block_lanes;
    bool any = false, all = true;
    if (!list->cut[first / score_keys])
        return covers_all;
    for (int32_t n = first; n < first + score_keys; n++) {
        const int32_t from = list->first_lane[n], to = list->end_lane[n];
        any |= from < end && to > lane && from < to;
        all &= from <= lane && to >= end;
    }
    return all ? covers_all : any ? covers_some : covers_none;
}

/* The logits of the group of keys that begins at `first`. */
INLINE void find_logits(score_block s, int from, const tile_work *work, int32_t first, int block,
                        coverage covered) {
    const tile_state *const tile = work->tile;
    const key_list *const list = work->list;
    score_group(s, from, tile, work->dim, first, block, rows_ahead(work, first, block),
                work->next->word_size);
    if (work->cap > 0)
        cap_scores(s, from, tile->capped, work->scale, work->cap);
    scale_and_bias(s, from, work->cap > 0 ? 1 : work->scale, list->bias + first);
    if (covered != covers_all)
        cut_lanes(s, from, list->first_lane + first, list->end_lane + first, block * block_lanes);
}

/* Weighs a group again whose logits have outgrown the maximum, under a new one. */
static __attribute__((noinline)) void raise_group(const tile_work *work, int32_t first, int block,
                                                  coverage covered) {
    const tile_state *const tile = work->tile;
    vf top[tile_vectors], total[tile_vectors];
    score_block s;
    find_logits(s, 0, work, first, block, covered);
    for (int m = 0; m < tile_vectors; m++) {
        top[m] = s[0][m];
        for (int key = 1; key < score_keys; key++)
            top[m] = vf_max(top[m], s[key][m]);
    }
    raise_max(tile, work->begun ? work->dim : 0, block, top, first); // out is 0 before
    weigh(s, 0, tile->max + block * block_lanes, tile->weights + first / terms * block_lanes,
          total);
    add_total(tile->part, 0, total);
}

INLINE void weigh_group(const tile_work *work, int32_t first, int block, coverage covered,
                        int from) {
    const tile_state *const tile = work->tile;
    vf total[tile_vectors];
    score_block s;
    find_logits(s, from, work, first, block, covered);
    weigh(s, from, tile->max + block * block_lanes, tile->weights + first / terms * block_lanes,
          total);
    if (has_outgrown(total, from))
        raise_group(work, first, block, covered);
    else
        add_total(tile->part, from, total);
}

/* Listed keys, side by side, that a block of lanes has weights for: all of its lanes, or only the
 * upper half where the keys came too late for the others. */
typedef struct key_run {
    int32_t first, end;
    bool is_late;
} key_run;

typedef struct key_runs {
    key_run run[key_groups];
    int32_t count;
} key_runs;

/* Whether the products take more keys at a time than are weighed. */
enum { by_steps = (int)key_step > (int)score_keys };

static void add_group(key_runs *runs, int32_t first, bool is_late) {
    key_run *const last = runs->run + runs->count - 1;
    if (runs->count > 0 && last->is_late == is_late && (by_steps || last->end == first))
        last->end = first + score_keys;
    else
        runs->run[runs->count++] = (key_run){by_steps ? 0 : first, first + score_keys, is_late};
}

/* Products that take steps of keys take groups without weights along. */
static void skip_group(const tile_work *work, int32_t first) {
    if (by_steps)
        memset(work->tile->weights + first / terms * block_lanes, 0,
               sizeof(float) * score_keys / terms * block_lanes);
}

static __attribute__((noinline)) void weigh_block(const tile_work *work, int block,
                                                  key_runs *runs) {
    const key_list *const list = work->list;
    const int32_t middle = block * block_lanes + half_vectors * vf_width;
    int32_t scored = 0; /* keys that have scores, where steps of them get these at once */
    runs->count = 0;
    memset(work->tile->part, 0, sizeof(float) * block_lanes);
    for (int32_t first = 0; first < whole_steps(list->count); first += score_keys) {
        const bool is_late = half_vectors > 0 && list->first_lane[first] >= middle;
        const coverage covered = cover_block(list, first, block);
        if (covered == covers_none) {
            skip_group(work, first);
            continue;
        }
        if (first >= scored) {
            scored = first / key_step * key_step + key_step;
            score_step(work->tile, work->dim, scored - key_step, block);
        }
        if (!work->begun && runs->count == 0)
            raise_group(work, first, block, covered); // there is no maximum yet
        else if (is_late)
            weigh_group(work, first, block, covered, half_vectors);
        else
            weigh_group(work, first, block, covered, 0);
        add_group(runs, first, is_late);
    }
}

static __attribute__((noinline)) void add_runs(const tile_work *work, int block,
                                               const key_runs *runs) {
    for (const key_run *run = runs->run; run < runs->run + runs->count; run++) {
        const int32_t first = run->first / terms, end = run->end / terms;
        if (run->is_late)
            add_all_values(work->tile, work->dim, block, half_vectors, first, end);
        else if (end - first == key_block / terms) // a constant number of turns is 3 % faster
            add_all_values(work->tile, work->dim, block, 0, 0, key_block / terms);
        else
            add_all_values(work->tile, work->dim, block, 0, first, end);
    }
}

static void add_part(const tile_state *tile, int block) {
    vf part[tile_vectors];
    for (int m = 0; m < tile_vectors; m++)
        part[m] = vf_load(tile->part + m * vf_width);
    add_total(tile->sum + block * block_lanes, 0, part);
}

static void clear_out(const tile_work *work, int block) {
    const int64_t entries = work->dim * block_lanes;
    memset(work->tile->out + block * entries, 0, sizeof(float) * (size_t)entries);
}

static void attend_keys(const tile_work *work) {
    key_runs runs;
    for (int block = 0; block < work->blocks; block++) {
        weigh_block(work, block, &runs);
        add_part(work->tile, block);
        if (!work->begun)
            clear_out(work, block); // just before it is needed in the cache
        add_runs(work, block, &runs);
    }
}

static void attend_all_keys(const fdma_problem *problem, const snapshots *all,
                            const tile_place *place, const tile_state *tile, fdma_arena *arena) {
    key_list *list = fdma_arena_take(arena, sizeof *list);
    key_list *next = fdma_arena_take(arena, sizeof *next);
    int32_t *const dying = fdma_arena_take(arena, sizeof *dying * most_lanes);
    key_walk walk = start_walk(problem, all, place, dying);
    tile_work work = {
        .tile = tile,
        .dim = tile_dim(problem),
        .scale = (float)problem->scale,
        .cap = softcap_of(problem),
        .blocks = (int)(used_lanes(place) / block_lanes),
    };
    list->count = 0;
    if (problem->kv_len > 0)
        list_keys(problem, place, &walk, tile, list);
    while (list->count > 0) {
        list_keys(problem, place, &walk, tile, next);
        load_keys(problem, tile->k_rows, list->k_source, list->count);
        load_values(problem, tile->values, list->v_source, list->count);
        work.list = list;
        work.next = next;
        attend_keys(&work);
        work.begun = true;
        key_list *const done = list;
        list = next;
        next = done;
    }
    for (int block = 0; block < work.blocks && !work.begun; block++)
        clear_out(&work, block); // there was no key
}

/* Tiles of the last queries come first: under causality they see the most keys. */
static void attend_tile(const void *context, int64_t index, int32_t thread) {
    const forward_context *const forward = context;
    const fdma_problem *const problem = forward->problem;
    const int64_t heads = problem->batch * problem->kv_heads, head = index % heads;
    const int64_t tile_index = forward->tiles - 1 - index / heads;
    const uint32_t rounding = flush_subnormals();
    fdma_arena arena = {.base = forward->scratch + (size_t)thread * forward->scratch_size};
    tile_state tile = take_tile(&arena, problem, forward->lanes);
    const tile_place place = place_tile(problem, head / problem->kv_heads, head % problem->kv_heads,
                                        forward->lanes, tile_index);
    begin_products();
    pack_queries(problem, &place, &tile);
    clear_tile(&tile, &place, tile_dim(problem));
    attend_all_keys(problem, &forward->snapshots, &place, &tile, &arena);
    write_out(problem, &place, &tile);
    if (is_present(&problem->lse))
        write_lse(problem, &place, &tile);
    end_products();
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

/* On one thread, about; a kernel of wide vectors takes less. */
static int64_t forward_microseconds(const fdma_problem *problem) {
    const double flops_a_microsecond = 5e4;
    const bool narrow = problem->selected && problem->window < problem->kv_len;
    const int64_t keys = narrow ? problem->window : problem->kv_len;
    const double rows = (double)(problem->batch * problem->q_len) * (double)problem->q_heads;
    const double flops = 4 * rows * (double)problem->head_dim * (double)keys;
    return (int64_t)fmin(flops / flops_a_microsecond, 1e15);
}

/* Carves the workspace; the arena's size is what it takes. */
static fdma_arena lay_out_forward(const fdma_problem *problem, forward_context *context) {
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
    if (is_few_rows(problem))
        return rows_workspace(problem);
    const fdma_arena arena = lay_out_forward(problem, &context);
    return fdma_arena_size(&arena);
}

static fdma_status run_forward(const fdma_problem *problem) {
    forward_context context;
    if (is_few_rows(problem))
        return run_rows(problem);
    lay_out_forward(problem, &context);
    if (context.snapshots.count > 0)
        fdma_parallel_for(context.threads, problem->batch * problem->kv_heads, snapshot_head,
                          &context);
    fdma_parallel_for(context.threads, forward_tasks(&context), attend_tile, &context);
    return FDMA_OK;
}

#endif
