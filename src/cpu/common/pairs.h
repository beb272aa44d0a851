/* What a tile does for single pairs of a row and a key: attn_bias, which is added to their logits,
 * its gradient, and dropout. */
#pragma once

#include "cpu/common/step.h"

/* Offset of a lane's row and key 0 in a tensor shaped as attn_bias. */
static int64_t pair_offset(const tile_step *step, const fdma_tensor *tensor, int64_t lane) {
    const fdma_problem *const problem = step->problem;
    const row_range *const rows = step->rows;
    return offset_of_pair(problem, tensor, rows->b, head_of_lane(problem, rows, lane),
                          query_of_lane(problem, rows, lane), 0);
}

INLINE void load_lane_bias(const tile_step *step, const group_list *groups, const fdma_tensor *bias,
                           int64_t offset, fdma_dtype dtype, float *to) {
    const key_list *const list = step->keys;
    const fdma_tensor typed = {.data = bias->data, .dtype = dtype};
    const int64_t key_stride = bias->stride[3];
    for (int32_t n = 0; n < groups->count; n++) {
        const int32_t first = groups->group[n].first;
        const int64_t end = min(first + group_keys, list->count);
        for (int64_t key = first; key < end; key++)
            to[key * block_lanes] = (float)fdma_load(&typed, offset + list->key[key] * key_stride);
        for (int64_t key = end; key < first + group_keys; key++)
            to[key * block_lanes] = 0;
    }
}

/* Loads attn_bias of a block of lanes and the keys of some groups; lanes without a row get 0. */
NOINLINE void load_pair_bias(const tile_step *step, int block, const group_list *groups) {
    static const float zero = 0;
    const fdma_tensor none = {.data = (void *)(uintptr_t)&zero, .dtype = FDMA_FLOAT32};
    const fdma_tensor *const bias = &step->problem->attn_bias;
    for (int64_t lane = 0; lane < block_lanes; lane++) {
        const int64_t row = block * block_lanes + lane;
        float *const to = step->tile->pair_bias + lane;
        const int64_t offset = row < step->rows->count ? pair_offset(step, bias, row) : 0;
        if (row >= step->rows->count)
            load_lane_bias(step, groups, &none, 0, FDMA_FLOAT32, to);
        else if (bias->dtype == FDMA_FLOAT32)
            load_lane_bias(step, groups, bias, offset, FDMA_FLOAT32, to);
        else if (bias->dtype == FDMA_FLOAT16)
            load_lane_bias(step, groups, bias, offset, FDMA_FLOAT16, to);
        else
            load_lane_bias(step, groups, bias, offset, FDMA_BFLOAT16, to);
    }
}

NOINLINE void add_pair_gradients(const tile_step *step, int block, const group_list *groups,
                                 const float *gradients) {
    const key_list *const list = step->keys;
    const fdma_tensor *const tensor = &step->problem->dattn_bias;
    const int64_t key_stride = tensor->stride[3];
    const int64_t count = min(step->rows->count - block * block_lanes, block_lanes);
    const float scale = (float)dropout_scale(step->threshold);
    for (int64_t lane = 0; lane < count; lane++) {
        float *const to =
            (float *)tensor->data + pair_offset(step, tensor, block * block_lanes + lane);
        double sum = 0; // over all keys, if they share one element
        for (int32_t n = 0; n < groups->count; n++) {
            const int32_t first = groups->group[n].first;
            for (int32_t key = first; key < min(first + group_keys, list->count); key++) {
                const float gradient = scale * gradients[key * block_lanes + lane];
                sum += (double)gradient;
                if (key_stride != 0)
                    to[list->key[key] * key_stride] += gradient;
            }
        }
        if (key_stride == 0)
            *to = (float)((double)*to + sum);
    }
}

/* ---- dropout ---- */

/* Dropout in a tile: the codes of its rows and keys, and the weights that become 0. See
 * core/dropout.h, whose dropout_mix() is computed here for many rows at a time. */

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
            float *const at = step->weights + key / terms * block_lanes + m * vf_width;
            vu kept = undropped_lanes(step, key, lane);
            if (terms == 2) // the word of two keys
                kept =
                    (kept & 0xffffU) | (undropped_lanes(step, key + terms - 1, lane) & 0xffff0000U);
            vf_store(at, vf_of_bits(vu_of(vf_load(at)) & kept));
        }
    }
}
