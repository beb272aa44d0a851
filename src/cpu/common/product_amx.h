/* The products of a tile on AMX, which multiplies tiles of 16 rows by 16 words of two bfloat16.
 * Tile registers 0 to 3 hold the sums of 2 x 2 tiles, whose rows are keys or channels and whose
 * columns are lanes. */
#pragma once

#include "cpu/common/step.h"

enum {
    amx_rows = 16,
    amx_words = 16,
    amx_lanes = 16,
    amx_bytes = 64,                  /* bytes of a row */
    lane_bytes = 4 * block_lanes,    /* from one row of a block of lanes to the next */
    summed_blocks = backward_blocks, /* blocks of lanes that one call of add_lanes() sums over */
};

_Static_assert((int)terms == 2 && (int)vf_width == (int)amx_lanes, "AMX multiplies pairs");
_Static_assert((int)key_step == (int)terms * (int)amx_words, "a step of keys is one row of words");

typedef struct amx_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} amx_config;

/* The configuration is static: for a local variable, gcc assumes that only the first bytes are read
 * and does not write the others. */
static inline void begin_products(void) {
    enum { r = amx_rows, b = amx_bytes };
    static const amx_config config = {
        .palette = 1,
        .row_bytes = {b, b, b, b, b, b, b, b},
        .rows = {r, r, r, r, r, r, r, r},
    };
    _tile_loadconfig(&config);
}

static inline void end_products(void) { _tile_release(); }

/* Arranges the rows of the listed keys as the left operand of the second product: in each strip,
 * for each step of keys, one row of words for every channel. */
static void load_values(const fdma_problem *problem, float *values, const void *const *sources,
                        int32_t count) {
    for (int32_t n = 0; n < whole_steps(count); n += key_step)
        for (int64_t d = 0; d < tile_dim(problem); d += vf_width) {
            const int64_t some = channels_at(d, problem->head_dim);
            float *const to =
                values + d / strip_channels * strip_length + n / terms * strip_channels;
            vf words[amx_words];
            UNROLL
            for (int w = 0; w < amx_words; w++)
                words[w] = vf_load_pairs(sources[n + 2 * w], sources[n + 2 * w + 1], d, some);
            vf_transpose(words);
            UNROLL
            for (int channel = 0; channel < amx_rows; channel++)
                vf_store(to + channel * amx_words, words[channel]);
        }
}

static inline void clear_sums(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

static inline void store_sums(float *to) {
    float *const lower = to + amx_rows * block_lanes;
    _tile_stored(0, to, lane_bytes);
    _tile_stored(1, to + amx_lanes, lane_bytes);
    _tile_stored(2, lower, lane_bytes);
    _tile_stored(3, lower + amx_lanes, lane_bytes);
}

static inline void load_sums(const float *from) {
    const float *const lower = from + amx_rows * block_lanes;
    _tile_loadd(0, from, lane_bytes);
    _tile_loadd(1, from + amx_lanes, lane_bytes);
    _tile_loadd(2, lower, lane_bytes);
    _tile_loadd(3, lower + amx_lanes, lane_bytes);
}

/* Adds the products of two tiles of words, whose rows are `length` floats apart, with two tiles of
 * lanes. */
static inline void multiply_tiles(const float *upper, const float *lower, int64_t length,
                                  const float *lanes) {
    _tile_loadd(4, upper, length * 4);
    _tile_loadd(5, lower, length * 4);
    _tile_loadd(6, lanes, lane_bytes);
    _tile_loadd(7, lanes + amx_lanes, lane_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

/* S = K Q^T of a step of keys and two vectors of lanes. */
static inline void multiply_key_tiles(float *products, const float *k, const float *q,
                                      int64_t dim) {
    const int64_t row = padded_row(dim);
    clear_sums();
    for (int64_t w = 0; w < dim / terms; w += amx_words)
        multiply_tiles(k + w, k + amx_rows * row + w, row, q + w * block_lanes);
    store_sums(products);
}

/* Writes the products of the step of keys that holds a group to memory, for one block of lanes,
 * unless that step ends at `multiplied` or before. Returns the end of the last step that was
 * multiplied. */
static inline int32_t multiply_ahead(const tile_step *step, const key_group *group, int block,
                                     int32_t multiplied) {
    const int32_t first = group->first / key_step * key_step;
    const float *const k = step->tile->k_rows + first * padded_row(step->dim);
    const float *const q = block_queries(step, block);
    if (group->first < multiplied)
        return multiplied;
    for (int lane = 0; lane < block_lanes; lane += 2 * amx_lanes)
        multiply_key_tiles(step->products + lane, k, q + lane, step->dim);
    return first + key_step;
}

/* Loads the products of the group that begins at `first`, which multiply_ahead() has written. */
INLINE void multiply_group(product_block s, int from, const tile_step *step, int32_t first,
                           int block) {
    const float *const products = step->products + first % key_step * block_lanes;
    const void *const *const ahead = rows_ahead(step, first, block);
    for (int64_t byte = 0; ahead != NULL && byte < step->dim / terms * step->next->word_size;
         byte += 64)
        prefetch_rows(ahead, group_keys, byte);
    load_group(s, from, products, block_lanes);
}

/* multiply_group() plus `start`, one float for each lane. */
INLINE void multiply_group_from(product_block s, int from, const tile_step *step, int32_t first,
                                int block, const float *start) {
    multiply_group(s, from, step, first, block);
    UNROLL
    for (int key = 0; key < group_keys; key++) {
        UNROLL
        for (int m = from; m < tile_vectors; m++)
            s[key][m] = vf_add(s[key][m], vf_load(start + m * vf_width));
    }
}

/* O += V P for two strips of channels and two vectors of lanes. */
static inline void add_tiles(float *out, const float *values, const float *weights, int32_t words) {
    load_sums(out);
    for (int32_t w = 0; w < words; w += amx_words) {
        const float *const upper = values + w * strip_channels;
        multiply_tiles(upper, upper + strip_length, amx_words, weights + w * block_lanes);
    }
    store_sums(out);
}

/* O += V P for all channels of a block of lanes, over all steps that have a listed group. The
 * weights of the other groups in these steps are 0. */
NOINLINE void add_groups(const tile_step *step, int block, const group_list *groups) {
    const tile_state *const tile = step->tile;
    const int32_t end = groups->count > 0 ? groups->group[groups->count - 1].first + group_keys : 0;
    float *const out = block_out(step, block);
    for (int64_t d = 0; d < step->dim; d += 2 * amx_rows)
        for (int lane = 0; lane < block_lanes; lane += 2 * amx_lanes)
            add_tiles(out + d * block_lanes + lane,
                      tile->values + d / strip_channels * strip_length, step->weights + lane,
                      end / terms);
}

/* sums += words times rows, for a step of keys and some pairs of vectors of channels: the product
 * of the backward pass that sums over lanes. It takes all blocks of a tile at once, because adding
 * the result to memory is expensive next to the product over one block. The words of two keys are
 * `length` apart, the rows of two blocks `block_length`; blocks that keep none of the keys are left
 * out. */
static inline void add_lanes(float *const *sums, int64_t d, const float *words, int64_t length,
                             const float *rows, int64_t block_length, int vectors, int blocks,
                             const bool *keeps) {
    float stored[key_step * block_lanes];
    for (int m = 0; m < vectors; m += 2) {
        clear_sums();
        for (int w = 0; w < blocks * (block_lanes / terms); w += amx_words) {
            const int block = w / (block_lanes / terms), line = w % (block_lanes / terms);
            if (keeps[block])
                multiply_tiles(words + w, words + amx_rows * length + w, length,
                               rows + block * block_length + line * block_lanes + m * amx_lanes);
        }
        store_sums(stored);
        for (int key = 0; key < key_step; key++) {
            vf more[2];
            load_vectors(more, stored + key * block_lanes, 0, 2);
            add_vectors(sums[key] + d + m * amx_lanes, more, 0, 2);
        }
    }
}
