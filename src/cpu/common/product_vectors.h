/* The products of a tile in vectors: for one block of lanes, with the sums in registers. `from` is
 * the first vector of lanes that takes part. */
#ifndef FDMA_CPU_COMMON_PRODUCT_VECTORS_H
#define FDMA_CPU_COMMON_PRODUCT_VECTORS_H

#include "cpu/common/step.h"

enum {
    short_sum = 32,    /* words */
    summed_blocks = 1, /* blocks of lanes that one call of add_lanes() sums over */
};

/* Divides the rows of the listed keys into strips, which the second product reads in order. */
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

/* s += K Q^T of a group of keys, over words w to end - 1. Meanwhile it prefetches the rows `ahead`
 * (or NULL), a cache line of each at a time. */
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

/* Starts the sums of every key at `start`, one number for each lane, or at 0 if NULL. */
INLINE void start_scores(score_block s, int from, const float *start) {
    UNROLL
    for (int key = 0; key < score_keys; key++) {
        UNROLL
        for (int m = from; m < tile_vectors; m++)
            s[key][m] = start ? vf_load(start + m * vf_width) : vf_set(0);
    }
}

/* S = K Q^T of the group that begins at `first`. */
INLINE void score_group(score_block s, int from, const tile_step *step, int32_t first, int block) {
    const float *row[score_keys];
    find_group(row, step, first);
    start_scores(s, from, NULL);
    add_scores(s, from, row, block_queries(step, block), 0, step->dim / terms,
               rows_ahead(step, first, block), step->next->word_size);
}

/* As score_group(), accumulating onto `start`, one number for each lane. Short sums are made apart
 * and then added: where a row has most of its weight on one key, start nearly cancels the sum, and
 * rounding errors in proportion to start would remain. */
INLINE void score_group_from(score_block s, int from, const tile_step *step, int32_t first,
                             int block, const float *start) {
    const int64_t words = step->dim / terms;
    const float *row[score_keys];
    find_group(row, step, first);
    start_scores(s, from, start);
    for (int64_t w = 0; w < words; w += short_sum) {
        const int64_t end = w + short_sum < words ? w + short_sum : words;
        score_block sum;
        start_scores(sum, from, NULL);
        add_scores(sum, from, row, block_queries(step, block), w, end, NULL, 0);
        UNROLL
        for (int key = 0; key < score_keys; key++) {
            UNROLL
            for (int m = from; m < tile_vectors; m++)
                s[key][m] = vf_add(s[key][m], sum[key][m]);
        }
    }
}

/* O += V P for value_channels channels, of which the first is where `values` points in its strip.
 * Each key block is summed before it is added to O, so that rounding errors grow with the number of
 * blocks and not of keys. */
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

/* O += V P for all channels of a block of lanes, over words `first` to `end` - 1. */
INLINE void add_all_values(const tile_step *step, int block, int from, int32_t first, int32_t end) {
    float *const out = block_out(step, block);
    const float *const weights = step->tile->weights + first * block_lanes;
    for (int64_t d = 0; d < step->dim; d += value_channels) {
        const float *const strip = step->tile->values + d / strip_channels * strip_length;
        add_values(out + d * block_lanes, from, strip + first * strip_channels + d % strip_channels,
                   weights, end - first);
    }
}

/* sums += words times rows, for a group of keys and some vectors of channels: the product of the
 * backward pass that sums over lanes `first` to `end` - 1, in words. The words of two keys are
 * `length` apart; rows hold as many channels as a block has lanes. */
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

#endif
