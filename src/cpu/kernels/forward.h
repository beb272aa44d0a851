/* Forward: FlashAttention's loop over the keys that a tile visits, with queries in the lanes.
 * Sources: arXiv:2205.14135; docs/algorithm.md. */
#ifndef FDMA_CPU_KERNELS_FORWARD_H
#define FDMA_CPU_KERNELS_FORWARD_H

#include "cpu/kernels/softmax.h"
#include "cpu/parallel.h"

typedef struct forward_context {
    const fdma_problem *problem;
    snapshots snapshots;
    uint8_t *scratch; /* of thread 0; the others' follow at scratch_size */
    size_t scratch_size;
    int64_t tiles; /* of one (b, g) */
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
} tile_work;

/* Scores, logits, weights of a group of keys for one block of lanes, in registers. */
typedef vf score_block[score_keys][tile_vectors];

/* The group of keys before, whose logits wait to become weights, where they are. */
typedef struct pending_group {
    float *logits;    /* [score_keys][block_lanes] */
    const float *max; /* [block_lanes] */
    float *total;     /* [block_lanes], of the weights */
    uint32_t next;    /* vector */
} pending_group;

enum { group_vectors = score_keys * tile_vectors };

/* P = e^(S - max) for the vectors of a group up to `end`. */
INLINE void weigh_vectors(pending_group *group, uint32_t end) {
    for (; group->next < end && group->next < group_vectors; group->next++) {
        float *const at = group->logits + group->next * vf_width;
        const uint32_t lane = group->next % tile_vectors * vf_width;
        const vf below = vf_sub(vf_load(at), vf_load(group->max + lane));
        const vf weight = exp2_of(vf_mul(below, vf_set(log2e)));
        vf_store(group->total + lane, vf_add(vf_load(group->total + lane), weight));
        vf_store(at, weight);
    }
}

/* S^T = K Q^T for score_keys keys and one block of lanes. On the way, every 8 channels, it turns
 * some logits of the group before into weights, which fills the pauses that either leaves alone,
 * and asks for rows of the next list, a cache line of each at a time, to be in the L2 cache when
 * needed. */
INLINE void score_tile(score_block s, const float *k, const float *q, int64_t dim,
                       pending_group *before, const void *const *ahead, int64_t channel_size) {
    const uint32_t step = (uint32_t)((group_vectors * 8 + dim - 1) / dim);
    pending_group group = *before; // a copy of its own can live in registers
    const float *row[score_keys];
    UNROLL
    for (int key = 0; key < score_keys; key++) {
        row[key] = k + key * padded_row(dim);
        UNROLL
        for (int m = 0; m < tile_vectors; m++)
            s[key][m] = vf_set(0);
    }
    for (int64_t d = 0; d < dim;) {
        prefetch_rows(ahead, channel_size, d);
        if (weigh_in_product)
            weigh_vectors(&group, group.next + step);
        for (const int64_t end = d + 8; d < end; d++, q += block_lanes) {
            vf lanes[tile_vectors];
            UNROLL
            for (int m = 0; m < tile_vectors; m++)
                lanes[m] = vf_load(q + m * vf_width);
            UNROLL
            for (int key = 0; key < score_keys; key++) {
                const vf channel = vf_set(row[key][d]);
                UNROLL
                for (int m = 0; m < tile_vectors; m++)
                    s[key][m] = vf_fma(channel, lanes[m], s[key][m]);
            }
        }
    }
    *before = group;
}

INLINE void store_scores(float *to, score_block s) {
    UNROLL
    for (int key = 0; key < score_keys; key++) {
        UNROLL
        for (int m = 0; m < tile_vectors; m++)
            vf_store(to + key * block_lanes + m * vf_width, s[key][m]);
    }
}

INLINE void load_scores(score_block s, const float *from) {
    UNROLL
    for (int key = 0; key < score_keys; key++) {
        UNROLL
        for (int m = 0; m < tile_vectors; m++)
            s[key][m] = vf_load(from + key * block_lanes + m * vf_width);
    }
}

/* Softcap, on scores in memory: rare enough to stay out of the registers. */
static __attribute__((noinline)) void cap_scores(float *scores, float scale, float cap) {
    for (int64_t x = 0; x < score_keys * block_lanes; x += vf_width) {
        const vf share = vf_mul(vf_load(scores + x), vf_set(scale / cap));
        vf_store(scores + x, vf_mul(vf_set(cap), tanh_of(share)));
    }
}

/* scale * s + bias: q is not scaled beforehand, which would round every channel once more. */
INLINE void scale_and_bias(score_block s, float scale, const float *bias) {
    UNROLL
    for (int key = 0; key < score_keys; key++) {
        const vf b = vf_set(bias[key]);
        UNROLL
        for (int m = 0; m < tile_vectors; m++)
            s[key][m] = vf_fma(s[key][m], vf_set(scale), b);
    }
}

/* -inf where a row does not keep the key; lane: the block's first. */
INLINE void cut_lanes(score_block s, const int32_t *first_lane, const int32_t *end_lane,
                      int32_t lane) {
    UNROLL
    for (int key = 0; key < score_keys; key++) {
        UNROLL
        for (int m = 0; m < tile_vectors; m++)
            s[key][m] = vf_keep(s[key][m], first_lane[key] - lane - m * vf_width,
                                end_lane[key] - lane - m * vf_width);
    }
}

/* The logits of the group of keys that begins at `first`, left where the weights go. */
static void find_logits(const tile_work *work, int32_t first, int block, pending_group *before) {
    const key_list *const list = work->list;
    const key_list *const next = work->next;
    const void *const *const ahead = block == 0 ? next->k_source : next->v_source;
    float *const logits = work->tile->weights + first * block_lanes;
    score_block s;
    score_tile(s, work->tile->k_rows + first * padded_row(work->dim),
               work->tile->q + block * work->dim * block_lanes, work->dim, before, ahead + first,
               next->channel_size);
    if (work->cap > 0) {
        store_scores(logits, s);
        cap_scores(logits, work->scale, work->cap);
        load_scores(s, logits);
    }
    scale_and_bias(s, work->cap > 0 ? 1 : work->scale, list->bias + first);
    if (list->cut[first / score_keys])
        cut_lanes(s, list->first_lane + first, list->end_lane + first, block * block_lanes);
    store_scores(logits, s);
}

static pending_group begin_group(const tile_work *work, int32_t first, int block, float *total) {
    memset(total, 0, sizeof(float) * block_lanes);
    return (pending_group){
        .logits = work->tile->weights + first * block_lanes,
        .max = work->tile->max + block * block_lanes,
        .total = total,
    };
}

static bool has_outgrown(const float *total) {
    bool outgrown = false;
    for (int m = 0; m < tile_vectors; m++)
        outgrown |= vf_any_greater(vf_load(total + m * vf_width), vf_set(most_weight));
    return outgrown;
}

/* Weighs a group again whose logits have outgrown the maximum, under a new one. */
static __attribute__((noinline)) void raise_group(const tile_work *work, int32_t first, int block,
                                                  float *total) {
    vf top[tile_vectors];
    pending_group none = {.next = group_vectors};
    find_logits(work, first, block, &none);
    pending_group group = begin_group(work, first, block, total);
    for (int m = 0; m < tile_vectors; m++)
        top[m] = vf_load(group.logits + m * vf_width);
    for (int n = tile_vectors; n < group_vectors; n++)
        top[n % tile_vectors] = vf_max(top[n % tile_vectors], vf_load(group.logits + n * vf_width));
    raise_max(work->tile, work->dim, block, top, first);
    weigh_vectors(&group, group_vectors);
}

/* Completes the group that begins at `first`: the rest of its weights, and their sum. That the
 * maximum has been outgrown shows in the sum, so that the usual case looks for no maximum. */
static void finish_group(const tile_work *work, int32_t first, int block, pending_group *group) {
    float *const sum = work->tile->sum + block * block_lanes;
    weigh_vectors(group, group_vectors);
    if (has_outgrown(group->total))
        raise_group(work, first, block, group->total);
    for (int m = 0; m < block_lanes; m += vf_width)
        vf_store(sum + m, vf_add(vf_load(sum + m), vf_load(group->total + m)));
}

/* O^T += V^T P^T for a strip of channels and one block of lanes. */
static void add_values(float *out, const float *values, const float *weights, int32_t count) {
    vf o[value_channels][tile_vectors];
    UNROLL
    for (int c = 0; c < value_channels; c++) {
        UNROLL
        for (int m = 0; m < tile_vectors; m++)
            o[c][m] = vf_load(out + c * block_lanes + m * vf_width);
    }
    for (int32_t n = 0; n < count; n += 2) {
        UNROLL
        for (int key = 0; key < 2; key++) {
            vf lanes[tile_vectors];
            UNROLL
            for (int m = 0; m < tile_vectors; m++)
                lanes[m] = vf_load(weights + m * vf_width);
            UNROLL
            for (int c = 0; c < value_channels; c++) {
                const vf channel = vf_set(values[c]);
                UNROLL
                for (int m = 0; m < tile_vectors; m++)
                    o[c][m] = vf_fma(channel, lanes[m], o[c][m]);
            }
            values += value_channels;
            weights += block_lanes;
        }
    }
    UNROLL
    for (int c = 0; c < value_channels; c++) {
        UNROLL
        for (int m = 0; m < tile_vectors; m++)
            vf_store(out + c * block_lanes + m * vf_width, o[c][m]);
    }
}

/* Whether any row of a block keeps any key of a group. */
static bool is_seen(const key_list *list, int32_t first, int block) {
    const int32_t lane = block * block_lanes;
    if (!list->cut[first / score_keys])
        return true;
    for (int32_t n = first; n < first + score_keys; n++)
        if (list->first_lane[n] < lane + block_lanes && list->end_lane[n] > lane &&
            list->first_lane[n] < list->end_lane[n])
            return true;
    return false;
}

/* The weights of a block's lanes for all listed keys; returns how many keys may have any. */
static int32_t weigh_block(const tile_work *work, int block) {
    float total[block_lanes];
    int32_t weighed = 0, waiting = -1; /* the group that waits, by its first key */
    pending_group group = {.next = group_vectors};
    for (int32_t first = 0; first < work->list->count; first += score_keys) {
        if (!is_seen(work->list, first, block)) {
            memset(work->tile->weights + first * block_lanes, 0,
                   sizeof(float) * score_keys * block_lanes);
            continue;
        }
        find_logits(work, first, block, &group);
        if (waiting >= 0)
            finish_group(work, waiting, block, &group);
        group = begin_group(work, first, block, total);
        waiting = first;
        weighed = first + score_keys;
    }
    if (waiting >= 0)
        finish_group(work, waiting, block, &group);
    return weighed;
}

static void attend_keys(const tile_work *work) {
    for (int block = 0; block < work->blocks; block++) {
        float *out = work->tile->out + block * work->dim * block_lanes;
        const float *values = work->tile->values;
        const int32_t count = weigh_block(work, block);
        for (int64_t d = 0; d < work->dim; d += value_channels) {
            add_values(out, values, work->tile->weights, count);
            out += value_channels * block_lanes;
            values += strip_length;
        }
    }
}

static void attend_all_keys(const fdma_problem *problem, const snapshots *all,
                            const tile_place *place, const tile_state *tile, fdma_arena *arena) {
    key_list *list = fdma_arena_take(arena, sizeof *list);
    key_list *next = fdma_arena_take(arena, sizeof *next);
    key_walk walk = start_walk(problem, all, place);
    tile_work work = {
        .tile = tile,
        .dim = problem->head_dim,
        .scale = (float)problem->scale,
        .cap = (float)problem->softcap,
        .blocks = (int)(used_lanes(place) / block_lanes),
    };
    list_keys(problem, place, &walk, tile, list);
    while (list->count > 0) {
        list_keys(problem, place, &walk, tile, next);
        load_keys(problem, tile, list);
        load_values(problem, tile, list);
        work.list = list;
        work.next = next;
        attend_keys(&work);
        key_list *const done = list;
        list = next;
        next = done;
    }
}

/* Tiles of the last queries come first: under causality they see the most keys. */
static void attend_tile(const void *context, int64_t index, int32_t thread) {
    const forward_context *const forward = context;
    const fdma_problem *const problem = forward->problem;
    const int64_t heads = problem->batch * problem->kv_heads, head = index % heads;
    const int64_t tile_index = forward->tiles - 1 - index / heads;
    const uint32_t rounding = flush_subnormals();
    fdma_arena arena = {.base = forward->scratch + (size_t)thread * forward->scratch_size};
    tile_state tile = take_tile(&arena, problem);
    const tile_place place =
        place_tile(problem, head / problem->kv_heads, head % problem->kv_heads, tile_index);
    pack_queries(problem, &place, &tile);
    clear_tile(&tile, &place, problem->head_dim);
    if (problem->kv_len > 0)
        attend_all_keys(problem, &forward->snapshots, &place, &tile, &arena);
    write_out(problem, &place, &tile);
    if (is_present(&problem->lse))
        write_lse(problem, &place, &tile);
    restore_rounding(rounding);
}

static void snapshot_head(const void *context, int64_t head, int32_t thread) {
    const forward_context *const forward = context;
    (void)thread;
    fill_snapshots(forward->problem, &forward->snapshots, head);
}

static int64_t forward_tasks(const fdma_problem *problem) {
    return problem->batch * problem->kv_heads * tiles_of(problem);
}

/* Carves the workspace; the arena's size is what it takes. */
static fdma_arena lay_out_forward(const fdma_problem *problem, forward_context *context) {
    const int32_t threads = fdma_thread_count(problem->exec.threads, forward_tasks(problem));
    fdma_arena one = {0};
    take_tile(&one, problem);
    fdma_arena_take(&one, sizeof(key_list));
    fdma_arena_take(&one, sizeof(key_list));
    fdma_arena arena = fdma_arena_of(problem);
    context->problem = problem;
    context->tiles = tiles_of(problem);
    context->snapshots = take_snapshots(&arena, problem);
    context->scratch_size = one.used;
    context->scratch = fdma_arena_take(&arena, one.used * (size_t)threads);
    return arena;
}

static size_t forward_workspace(const fdma_problem *problem) {
    forward_context context;
    const fdma_arena arena = lay_out_forward(problem, &context);
    return fdma_arena_size(&arena);
}

static fdma_status run_forward(const fdma_problem *problem) {
    forward_context context;
    const int64_t tasks = forward_tasks(problem);
    const int32_t threads = fdma_thread_count(problem->exec.threads, tasks);
    lay_out_forward(problem, &context);
    if (context.snapshots.count > 0)
        fdma_parallel_for(threads, problem->batch * problem->kv_heads, snapshot_head, &context);
    fdma_parallel_for(threads, tasks, attend_tile, &context);
    return FDMA_OK;
}

#endif
