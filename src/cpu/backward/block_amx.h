/* The backward pass over one key block, with the products on AMX: dk and dv are summed over all
 * blocks of lanes at once. */
#pragma once

#include "cpu/backward/block.h"

/* Clears the words of the groups that no lane of a block keeps: the products take whole steps. */
static void clear_skipped_words(const backward_step *step, int block, const group_list *groups) {
    const key_group *group = groups->group, *const end = group + groups->count;
    clear_skipped(&step->logits, groups);
    for (int32_t first = 0; first < whole_steps(step->logits.keys->count); first += group_keys) {
        if (group < end && group->first == first) {
            group++;
            continue;
        }
        for (int32_t key = first; key < first + group_keys; key++) {
            memset(words_at(step->tile->p_words, key, block), 0, sizeof(float) * lane_words);
            memset(words_at(step->tile->ds_words, key, block), 0, sizeof(float) * lane_words);
        }
    }
}

/* dv += P dout, or dk += dS q, of all listed keys. */
NOINLINE void add_all_lanes(const backward_step *step, float *const *sums, const float *words,
                            const float *rows, int64_t width, bool keeps[][backward_blocks]) {
    const int64_t block_length = block_rows(step->logits.dim);
    for (int64_t d = 0; d < width; d += row_strip, rows += row_strip_length) {
        const int vectors = (int)min((width - d) / vf_width, tile_vectors);
        for (int32_t first = 0; first < whole_steps(step->logits.keys->count); first += key_step)
            add_lanes(sums + first, d, words + first * held_words, held_words, rows, block_length,
                      vectors, step->logits.blocks, keeps[first / key_step]);
    }
}

/* Adds the contributions of a key block to the gradients of a tile and of its keys. */
static void add_key_block(const backward_step *step, int64_t width) {
    const backward_tile *const tile = step->tile;
    bool keeps[key_block / key_step][backward_blocks] = {{false}}; // a block keeps a key of a step
    group_list groups;
    begin_products();
    for (int block = 0; block < step->logits.blocks; block++) {
        classify_groups(step->logits.keys, block, &groups);
        for (int32_t n = 0; n < groups.count; n++)
            keeps[groups.group[n].first / key_step][block] = true;
        clear_skipped_words(step, block, &groups);
        find_block_probabilities(step, block, &groups);
        find_block_ds(step, block, &groups);
        add_groups(&step->logits, block, &groups); // dq
    }
    add_all_lanes(step, step->dv, tile->p_words, tile->dout_rows, width, keeps);
    add_all_lanes(step, step->dk, tile->ds_words, tile->q_rows, width, keeps);
    end_products();
}
