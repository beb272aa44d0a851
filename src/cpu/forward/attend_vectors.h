/* The blocks of lanes of a tile attend to one key block, in turn: products in vectors. */
#pragma once

#include "cpu/forward/weigh.h"

NOINLINE void weigh_groups(const tile_step *step, int block, const group_list *groups) {
    for (int32_t n = 0; n < groups->count; n++)
        weigh_group(step, &groups->group[n], block, !step->begun && n == 0);
}

static void attend_block(const tile_step *step, int block) {
    group_list groups;
    classify_groups(step->keys, block, &groups);
    begin_block(step, block, &groups);
    weigh_groups(step, block, &groups);
    end_block(step, block, &groups);
    if (!step->begun)
        clear_out(step, block); // only now, so that it is in the cache for the sums
    add_groups(step, block, &groups);
}

static void attend_blocks(tile_step *step) {
    for (int block = 0; block < step->blocks; block++)
        attend_block(step, block);
}
