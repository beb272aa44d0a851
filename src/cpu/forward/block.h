/* One block of a tile's lanes attends to one key block: weights, then O += V P. */
#ifndef FDMA_CPU_FORWARD_BLOCK_H
#define FDMA_CPU_FORWARD_BLOCK_H

#include "cpu/common/softmax.h"

/* Raises the maximum of the lanes to that of a group, and weighs the group under it. */
static __attribute__((noinline)) void raise_group(const tile_step *step, const key_group *group,
                                                  int block) {
    const tile_state *const tile = step->tile;
    const int32_t first = group->first;
    vf top[tile_vectors], total[tile_vectors];
    score_block s;
    find_logits(s, 0, step, first, block);
    if (group->masked)
        mask_lanes(s, 0, step->keys, first, block);
    for (int m = 0; m < tile_vectors; m++) {
        top[m] = s[0][m];
        for (int key = 1; key < score_keys; key++)
            top[m] = vf_max(top[m], s[key][m]);
    }
    raise_max(step, block, top, first);
    weigh(s, 0, tile->max + block * block_lanes, tile->weights + first / terms * block_lanes,
          total);
    add_total(tile->block_sum, 0, total);
}

INLINE void weigh_lanes(const tile_step *step, const key_group *group, int block, int from) {
    const tile_state *const tile = step->tile;
    const int32_t first = group->first;
    vf total[tile_vectors];
    score_block s;
    find_logits(s, from, step, first, block);
    if (group->masked)
        mask_lanes(s, from, step->keys, first, block);
    weigh(s, from, tile->max + block * block_lanes, tile->weights + first / terms * block_lanes,
          total);
    if (has_outgrown(total, from))
        raise_group(step, group, block);
    else
        add_total(tile->block_sum, from, total);
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

#if defined(FDMA_POINT_AMX)

/* Sets the weights of the groups that no lane keeps to 0: the products on AMX take whole steps. */
static void clear_skipped(const tile_step *step, const group_list *groups) {
    const key_group *group = groups->group, *const end = group + groups->count;
    for (int32_t first = 0; first < whole_steps(step->keys->count); first += score_keys)
        if (group < end && group->first == first)
            group++;
        else
            memset(step->tile->weights + first / terms * block_lanes, 0,
                   sizeof(float) * score_keys / terms * block_lanes);
}

/* Computes the scores of the step of keys that a group is in, unless it ends at `scored` or before.
 * Returns the end of the last step that has scores. */
static inline int32_t score_keys_of(const tile_step *step, const key_group *group, int block,
                                    int32_t scored) {
    const int32_t first = group->first / key_step * key_step;
    if (group->first < scored)
        return scored;
    score_key_step(step, first, block);
    return first + key_step;
}

/* P of all groups that a block of lanes keeps. Scores are computed for a step of keys at a time. */
static __attribute__((noinline)) void weigh_groups(const tile_step *step, int block,
                                                   const group_list *groups) {
    int32_t scored = 0; // the keys before it have scores
    clear_skipped(step, groups);
    for (int32_t n = 0; n < groups->count; n++) {
        scored = score_keys_of(step, &groups->group[n], block, scored);
        weigh_group(step, &groups->group[n], block, !step->begun && n == 0);
    }
}

/* O += V P. */
static __attribute__((noinline)) void add_groups(const tile_step *step, int block,
                                                 const group_list *groups) {
    if (groups->count > 0)
        add_all_values(step, block, (groups->group[groups->count - 1].first + score_keys) / terms);
}

#else

/* P of all groups that a block of lanes keeps. Scores stay in registers until they are weights. */
static __attribute__((noinline)) void weigh_groups(const tile_step *step, int block,
                                                   const group_list *groups) {
    for (int32_t n = 0; n < groups->count; n++)
        weigh_group(step, &groups->group[n], block, !step->begun && n == 0);
}

/* O += V P, a run of groups at a time. */
static __attribute__((noinline)) void add_groups(const tile_step *step, int block,
                                                 const group_list *groups) {
    for (int32_t n = 0; n < groups->count;) {
        const key_run run = next_run(groups, &n);
        const int32_t first = run.first / terms, end = run.end / terms;
        if (run.upper)
            add_all_values(step, block, half_vectors, first, end);
        else if (end - first == key_block / terms) // a constant number of iterations is 3 % faster
            add_all_values(step, block, 0, 0, key_block / terms);
        else
            add_all_values(step, block, 0, first, end);
    }
}

#endif

static void add_block_sum(const tile_state *tile, int block) {
    vf sum[tile_vectors];
    for (int m = 0; m < tile_vectors; m++)
        sum[m] = vf_load(tile->block_sum + m * vf_width);
    add_total(tile->sum + block * block_lanes, 0, sum);
}

static void clear_out(const tile_step *step, int block) {
    memset(block_out(step, block), 0, sizeof(float) * (size_t)(step->dim * block_lanes));
}

/* A key block: scores and weights of the groups that are kept, then O += V P. */
static void attend_block(const tile_step *step, int block) {
    const tile_state *const tile = step->tile;
    group_list groups;
    classify_groups(step->keys, block, &groups);
    memset(tile->block_sum, 0, sizeof(float) * block_lanes);
    weigh_groups(step, block, &groups);
    add_block_sum(tile, block);
    if (!step->begun)
        clear_out(step, block); // only now, so that it is in the cache when it is added to
    add_groups(step, block, &groups);
}

#endif
