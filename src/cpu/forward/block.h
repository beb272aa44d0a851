/* One block of a tile's lanes attends to one key block: weights, then O += V P. */
#pragma once

#include "cpu/common/dropout.h"
#include "cpu/common/pair_bias.h"
#include "cpu/common/softmax.h"

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

/* P of all groups that a block of lanes keeps. */
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
