/* Forward: logits of a block of lanes and a group of keys become weights. */
#pragma once

#include "cpu/common/pairs.h"
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
    weigh(s, 0, tile->max + block * block_lanes, step->weights + first / terms * block_lanes,
          total);
    add_vectors(tile->block_sum, total, 0, tile_vectors);
}

INLINE void weigh_lanes(const tile_step *step, const key_group *group, int block, int from) {
    const tile_state *const tile = step->tile;
    const int32_t first = group->first;
    vf total[tile_vectors];
    product_block s;
    find_group_logits(s, from, step, group, block);
    weigh(s, from, tile->max + block * block_lanes, step->weights + first / terms * block_lanes,
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
            memset(step->weights + first / terms * block_lanes, 0,
                   sizeof(float) * group_keys / terms * block_lanes);
}

static void add_block_sum(const tile_state *tile, int block) {
    vf sum[tile_vectors];
    load_vectors(sum, tile->block_sum, 0, tile_vectors);
    add_vectors(tile->sum + block * block_lanes, sum, 0, tile_vectors);
}

static void clear_out(const tile_step *step, int block) {
    memset(block_out(step, block), 0, sizeof(float) * (size_t)(step->dim * block_lanes));
}

/* Prepares the weights of a block of lanes. */
static void begin_block(const tile_step *step, int block, const group_list *groups) {
    memset(step->tile->block_sum, 0, sizeof(float) * block_lanes);
    if ((int)key_step > (int)group_keys)
        clear_skipped(step, groups);
    if (step->tile->pair_bias != NULL)
        load_pair_bias(step, block, groups);
}

/* Adds up its weights, and drops some. */
static void end_block(const tile_step *step, int block, const group_list *groups) {
    add_block_sum(step->tile, block);
    if (step->threshold != 0)
        drop_weights(step, block, groups);
}
