/* The two products of a tile: scores of a group of keys, and values of a few channels, both for one
 * block of lanes with its sums in registers. `from` is the first vector of lanes that takes part.
 */
#ifndef FDMA_CPU_COMMON_PRODUCT_H
#define FDMA_CPU_COMMON_PRODUCT_H

#include "cpu/common/keys.h"

/* Scores, logits, weights of a group of keys, in registers. */
typedef vf score_block[score_keys][tile_vectors];

enum { short_sum = 32 }; /* words */

/* Around the products of a tile. */
static inline void begin_products(void) {}

static inline void end_products(void) {}

/* Rows of the listed keys, cut into strips that the second product reads straight through. */
static void load_values(const fdma_problem *problem, float *values, const void *const *sources,
                        int32_t count) {
    const int64_t dim = problem->head_dim;
    for (int32_t n = 0; n < whole_steps(count); n += terms)
        for (int64_t d = 0; d < dim; d += vf_width) {
            float *const strip = values + d / strip_channels * strip_length;
            const int64_t some = channels_at(d, dim);
            const void *const row = sources[n];
            const vf word = terms == 2 ? vf_load_pairs(row, sources[n + terms - 1], d, some)
                                       : load_channels(row, problem->dtype, d, some);
            vf_store(strip + n / terms * strip_channels + d % strip_channels, word);
        }
}

/* Registers hold the scores of a group until they are weights. */
INLINE void score_step(const tile_state *tile, int64_t dim, int32_t first, int block) {
    (void)tile, (void)dim, (void)first, (void)block;
}

/* s += K Q^T of a group of keys, over words `w` to `end`. On the way it asks for the rows `ahead`
 * (or NULL), a cache line of each at a time, to be in the L2 cache when needed. */
INLINE void add_scores(score_block s, int from, const float *const *row, const float *q, int64_t w,
                       int64_t end, const void *const *ahead, int64_t word_size) {
    for (q += w * block_lanes; w < end;) {
        if (ahead)
            prefetch_rows(ahead, score_keys, w * word_size);
        for (const int64_t stop = w + 4; w < stop; w++, q += block_lanes) {
            vf lanes[tile_vectors];
            UNROLL
            for (int m = from; m < tile_vectors; m++)
                lanes[m] = vf_load(q + m * vf_width);
            UNROLL
            for (int key = 0; key < score_keys; key++) {
                const vf_word word = vf_load_word(row[key] + w);
                UNROLL
                for (int m = from; m < tile_vectors; m++)
                    s[key][m] = vf_dot(word, lanes[m], s[key][m]);
            }
        }
    }
}

/* Every key of a group begins with `start`, a number a lane, or 0 if NULL. */
INLINE void start_scores(score_block s, int from, const float *start) {
    UNROLL
    for (int key = 0; key < score_keys; key++) {
        UNROLL
        for (int m = from; m < tile_vectors; m++)
            s[key][m] = start ? vf_load(start + m * vf_width) : vf_set(0);
    }
}

INLINE void find_group(const float **row, const tile_state *tile, int64_t dim, int32_t first) {
    UNROLL
    for (int key = 0; key < score_keys; key++)
        row[key] = tile->k_rows + (first + key) * padded_row(dim);
}

/* S^T = K Q^T of the group that begins at `first`. */
INLINE void score_group(score_block s, int from, const tile_state *tile, int64_t dim, int32_t first,
                        int block, const void *const *ahead, int64_t word_size) {
    const float *row[score_keys];
    find_group(row, tile, dim, first);
    start_scores(s, from, NULL);
    add_scores(s, from, row, tile->q + block * (dim / terms) * block_lanes, 0, dim / terms, ahead,
               word_size);
}

/* The same upon what lanes start with. Short sums are added to that, as rounding errors are those
 * of the larger: what is left is small where a row has most of its weight on one key. */
INLINE void score_group_from(score_block s, int from, const tile_state *tile, int64_t dim,
                             int32_t first, int block, const float *start) {
    const float *row[score_keys];
    find_group(row, tile, dim, first);
    start_scores(s, from, start);
    for (int64_t w = 0; w < dim / terms; w += short_sum) {
        const int64_t end = w + short_sum < dim / terms ? w + short_sum : dim / terms;
        score_block part;
        start_scores(part, from, NULL);
        add_scores(part, from, row, tile->q + block * (dim / terms) * block_lanes, w, end, NULL, 0);
        UNROLL
        for (int key = 0; key < score_keys; key++) {
            UNROLL
            for (int m = from; m < tile_vectors; m++)
                s[key][m] = vf_add(s[key][m], part[key][m]);
        }
    }
}

/* O^T += V^T P^T for value_channels channels, `values` a strip from the first of them. Each block
 * of keys is summed by itself, so that rounding errors grow with the number of blocks. */
INLINE void add_values(float *out, int from, const float *values, const float *weights,
                       int32_t words) {
    vf o[value_channels][tile_vectors];
    UNROLL
    for (int c = 0; c < value_channels; c++) {
        UNROLL
        for (int m = from; m < tile_vectors; m++)
            o[c][m] = vf_set(0);
    }
    for (int32_t n = 0; n < words; n++) {
        vf lanes[tile_vectors];
        UNROLL
        for (int m = from; m < tile_vectors; m++)
            lanes[m] = vf_load(weights + m * vf_width);
        UNROLL
        for (int c = 0; c < value_channels; c++) {
            const vf_word word = vf_load_word(values + c);
            UNROLL
            for (int m = from; m < tile_vectors; m++)
                o[c][m] = vf_dot(word, lanes[m], o[c][m]);
        }
        values += strip_channels;
        weights += block_lanes;
    }
    UNROLL
    for (int c = 0; c < value_channels; c++) {
        UNROLL
        for (int m = from; m < tile_vectors; m++) {
            float *const at = out + c * block_lanes + m * vf_width;
            vf_store(at, vf_add(vf_load(at), o[c][m]));
        }
    }
}

/* The same for all channels of a block of lanes, over words `first` to `end`. */
INLINE void add_all_values(const tile_state *tile, int64_t dim, int block, int from, int32_t first,
                           int32_t end) {
    float *const out = tile->out + block * dim * block_lanes;
    const float *const weights = tile->weights + first * block_lanes;
    for (int64_t d = 0; d < dim; d += value_channels) {
        const float *const strip = tile->values + d / strip_channels * strip_length;
        add_values(out + d * block_lanes, from, strip + first * strip_channels + d % strip_channels,
                   weights, end - first);
    }
}

enum { lane_keys = score_keys }; /* keys that add_lanes takes at a time */

/* sums += words of lanes times rows, for a group of keys and some vectors of channels: the third
 * product, of the backward pass. The words of a key lie `length` after another's; rows hold as many
 * channels as a block has lanes. */
INLINE void add_lanes(float *const *sums, int64_t d, const float *words, int64_t length,
                      const float *rows, int vectors, int first, int end) {
    vf o[score_keys][tile_vectors];
    UNROLL
    for (int key = 0; key < score_keys; key++) {
        UNROLL
        for (int m = 0; m < vectors; m++)
            o[key][m] = vf_set(0);
    }
    for (int n = first; n < end; n++) {
        vf channels[tile_vectors];
        UNROLL
        for (int m = 0; m < vectors; m++)
            channels[m] = vf_load(rows + n * block_lanes + m * vf_width);
        UNROLL
        for (int key = 0; key < score_keys; key++) {
            const vf_word word = vf_load_word(words + key * length + n);
            UNROLL
            for (int m = 0; m < vectors; m++)
                o[key][m] = vf_dot(word, channels[m], o[key][m]);
        }
    }
    UNROLL
    for (int key = 0; key < score_keys; key++) {
        UNROLL
        for (int m = 0; m < vectors; m++) {
            float *const at = sums[key] + d + m * vf_width;
            vf_store(at, vf_add(vf_load(at), o[key][m]));
        }
    }
}

/* Sums over the lanes of one block are added at once. */
static inline void add_tile_lanes(float *const *sums, int64_t d, const float *words, int64_t length,
                                  const float *rows, int64_t block_length, int vectors, int blocks,
                                  const uint8_t *is_used) {
    (void)sums, (void)d, (void)words, (void)length, (void)rows, (void)block_length;
    (void)vectors, (void)blocks, (void)is_used;
}

#endif
