/* Dropout in a tile: the codes of its rows and keys, and the weights that become 0. See
 * core/dropout.h, whose dropout_mix() is computed here for many rows at a time. */
#pragma once

#include "cpu/common/step.h"

static void find_row_codes(const fdma_problem *problem, const row_range *rows,
                           const tile_state *tile) {
    for (int64_t lane = 0; lane < used_lanes(rows) && problem->dropout.threshold != 0; lane++) {
        const int64_t row = rows->first + min(lane, rows->count - 1);
        const int64_t h = rows->g * problem->group + row % problem->group;
        const int64_t p = query_position(problem, row / problem->group);
        const row_code code = row_code_of(problem, rows->b, h, p);
        tile->flips[lane] = code.flips;
        tile->adds[lane] = code.adds;
        tile->shift[lane] = (problem->first_position + p) % 2 != 0 ? 16 : 0;
    }
}

/* All bits set in the lanes, from `lane` on, that do not drop a listed key. */
INLINE vu undropped_lanes(const tile_step *step, int32_t key, int64_t lane) {
    const tile_state *const tile = step->tile;
    const vu flips = vu_load(tile->flips + lane), adds = vu_load(tile->adds + lane);
    vu x = (flips ^ step->keys->code[key]) * 0x7feb352dU + adds;
    x = (x ^ x >> 15) * 0x846ca68bU;
    x = (x ^ x >> 16) >> vu_load(tile->shift + lane) & 0xffffU;
    return (vu)(x >= step->threshold);
}

/* Clears the weights of dropped pairs, in the groups that a block of lanes keeps. */
NOINLINE void drop_weights(const tile_step *step, int block, const group_list *groups) {
    for (int32_t n = 0; n < groups->count * group_keys; n += terms) {
        const int32_t key = groups->group[n / group_keys].first + n % group_keys;
        for (int m = 0; m < tile_vectors; m++) {
            const int64_t lane = block * block_lanes + m * vf_width;
            float *const at = step->tile->weights + key / terms * block_lanes + m * vf_width;
            vu kept = undropped_lanes(step, key, lane);
            if (terms == 2) // the word of two keys
                kept =
                    (kept & 0xffffU) | (undropped_lanes(step, key + terms - 1, lane) & 0xffff0000U);
            vf_store(at, vf_of_bits(vu_of(vf_load(at)) & kept));
        }
    }
}
