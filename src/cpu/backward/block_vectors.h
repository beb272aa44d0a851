/* The backward pass over one key block, with the products in vectors. Each block of lanes is
 * finished before the next, while its P and dS are still in the L1 cache. */
#pragma once

#include "cpu/backward/block.h"

/* For one strip of channels, adds the sums over lanes of every group. */
INLINE void add_strip(float *const *sums, const group_list *groups, const float *words,
                      const float *rows, int64_t d, int vectors) {
    for (int32_t n = 0; n < groups->count; n++) {
        const int32_t first = groups->group[n].first;
        const int begin = groups->group[n].upper ? half_vectors * vf_width / terms : 0;
        add_lanes(sums + first, d, words + first * held_words, held_words, rows, vectors, begin,
                  lane_words);
    }
}

/* dv += P dout, or dk += dS q, of the keys that a block of lanes keeps. */
NOINLINE void add_block_lanes(float *const *sums, const group_list *groups, const float *words,
                              const float *rows, int64_t width) {
    for (int64_t d = 0; d < width; d += row_strip, rows += row_strip_length)
        if (width - d >= row_strip)
            add_strip(sums, groups, words, rows, d, tile_vectors);
        else if (width - d == 3 * vf_width)
            add_strip(sums, groups, words, rows, d, 3);
        else if (width - d == 2 * vf_width)
            add_strip(sums, groups, words, rows, d, 2);
        else
            add_strip(sums, groups, words, rows, d, 1);
}

/* Adds the contributions of a key block to the gradients of a tile and of its keys. */
static void add_key_block(const backward_step *step, int64_t width) {
    const backward_tile *const tile = step->tile;
    const int64_t rows = block_rows(step->logits.dim);
    group_list groups;
    for (int block = 0; block < step->logits.blocks; block++) {
        classify_groups(step->logits.keys, block, &groups);
        find_block_probabilities(step, block, &groups);
        add_block_lanes(step->dv, &groups, tile->p_words, tile->dout_rows + block * rows, width);
        find_block_ds(step, block, &groups);
        add_groups(&step->logits, block, &groups); // dq
        add_block_lanes(step->dk, &groups, tile->ds_words, tile->q_rows + block * rows, width);
    }
}
