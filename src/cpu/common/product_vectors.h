/* The products of a tile in vectors: for one block of lanes, with the sums in registers. `from` is
 * the first vector of lanes that takes part. */
#pragma once

#include "cpu/common/step.h"

enum {
    short_sum = 32,    /* words */
    summed_blocks = 1, /* blocks of lanes that one call of add_lanes() sums over */
    /* sums that one call of add_products() holds */
    summed_rows = (int)group_keys > (int)value_channels ? (int)group_keys : (int)value_channels,
};

static inline void begin_products(void) {}

static inline void end_products(void) {}

/* Vectors need nothing ahead: multiply_group() computes the products of a group on demand. AMX
 * computes the products of a whole step of keys here. */
INLINE int32_t multiply_ahead(const tile_step *step, const key_group *group, int block,
                              int32_t multiplied) {
    (void)step, (void)group, (void)block;
    return multiplied;
}

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
INLINE void add_group_products(product_block s, int from, const float *const *row, const float *q,
                               int64_t w, int64_t end, const void *const *ahead,
                               int64_t word_size) {
    for (q += w * block_lanes; w < end;) {
        if (ahead)
            prefetch_rows(ahead, group_keys, w * word_size);
        for (const int64_t stop = w + 4; w < stop; w++, q += block_lanes) {
            vf lanes[tile_vectors];
            load_vectors(lanes, q, from, tile_vectors);
            UNROLL
            for (int key = 0; key < group_keys; key++)
                add_product(s[key], row[key] + w, lanes, from, tile_vectors);
        }
    }
}

/* k of the group that begins at `first`, a row for each key. */
INLINE void find_group(const float **row, const tile_step *step, int32_t first) {
    UNROLL
    for (int key = 0; key < group_keys; key++)
        row[key] = step->tile->k_rows + (first + key) * padded_row(step->dim);
}

INLINE void clear_group(product_block s, int from) {
    UNROLL
    for (int key = 0; key < group_keys; key++)
        clear_vectors(s[key], from, tile_vectors);
}

/* S = K Q^T of the group that begins at `first`. */
INLINE void multiply_group(product_block s, int from, const tile_step *step, int32_t first,
                           int block) {
    const float *row[group_keys];
    find_group(row, step, first);
    clear_group(s, from);
    add_group_products(s, from, row, block_queries(step, block), 0, step->dim / terms,
                       rows_ahead(step, first, block), step->next->word_size);
}

/* multiply_group() accumulated onto `start`, one float for each lane. Short sums are made apart and
 * then added: if a row has most of its weight on one key, start nearly cancels it, and rounding
 * errors in proportion to start would remain. */
INLINE void multiply_group_from(product_block s, int from, const tile_step *step, int32_t first,
                                int block, const float *start) {
    const int64_t words = step->dim / terms;
    const float *row[group_keys];
    find_group(row, step, first);
    load_group(s, from, start, 0);
    for (int64_t w = 0; w < words; w += short_sum) {
        const int64_t end = w + short_sum < words ? w + short_sum : words;
        product_block sum;
        clear_group(sum, from);
        add_group_products(sum, from, row, block_queries(step, block), w, end, NULL, 0);
        UNROLL
        for (int key = 0; key < group_keys; key++) {
            UNROLL
            for (int m = from; m < tile_vectors; m++)
                s[key][m] = vf_add(s[key][m], sum[key][m]);
        }
    }
}

/* sums += words times rows, over words `first` to `end` - 1 of each sum and as many rows of a block
 * of lanes. The words of two sums are `sum_length` apart, two words of a sum `word_length`. All
 * products are summed before they are added to memory, so that rounding errors grow with the number
 * of blocks and not of words. */
INLINE void add_products(float *const *sums, int count, const float *words, int64_t sum_length,
                         int64_t word_length, const float *rows, int32_t first, int32_t end,
                         int from, int vectors) {
    vf o[summed_rows][tile_vectors];
    UNROLL
    for (int n = 0; n < count; n++)
        clear_vectors(o[n], from, vectors);
    words += first * word_length;
    rows += first * block_lanes;
    for (int32_t w = first; w < end; w++, words += word_length, rows += block_lanes) {
        vf lanes[tile_vectors];
        load_vectors(lanes, rows, from, vectors);
        UNROLL
        for (int n = 0; n < count; n++)
            add_product(o[n], words + n * sum_length, lanes, from, vectors);
    }
    UNROLL
    for (int n = 0; n < count; n++)
        add_vectors(sums[n], o[n], from, vectors);
}

/* O += V P for all channels of a block of lanes, over words `first` to `end` - 1. */
INLINE void add_all_values(const tile_step *step, int block, int from, int32_t first, int32_t end) {
    float *const out = block_out(step, block);
    for (int64_t d = 0; d < step->dim; d += value_channels) {
        const float *const strip = step->tile->values + d / strip_channels * strip_length;
        float *channels[value_channels];
        UNROLL
        for (int c = 0; c < value_channels; c++)
            channels[c] = out + (d + c) * block_lanes;
        add_products(channels, value_channels, strip + d % strip_channels, 1, strip_channels,
                     step->weights, first, end, from, tile_vectors);
    }
}

/* O += V P, a run of groups at a time. */
NOINLINE void add_groups(const tile_step *step, int block, const group_list *groups) {
    for (int32_t n = 0; n < groups->count;) {
        const key_run run = next_run(groups, &n);
        const int32_t first = run.first / terms, end = run.end / terms;
        if (run.upper)
            add_all_values(step, block, half_vectors, first, end);
        else if (end - first == key_block / terms) // a constant number of iterations is 3 % faster
            add_all_values(step, block, 0, 0, key_block / terms);
        else
            add_all_values(step, block, 0, first, end);
    }
}

/* sums += words times rows, for a group of keys and some vectors of channels: the product of the
 * backward pass that sums over lanes `first` to `end` - 1, in words. The words of two keys are
 * `length` apart; rows hold as many channels as a block has lanes. */
INLINE void add_lanes(float *const *sums, int64_t d, const float *words, int64_t length,
                      const float *rows, int vectors, int first, int end) {
    float *channels[group_keys];
    UNROLL
    for (int key = 0; key < group_keys; key++)
        channels[key] = sums[key] + d;
    add_products(channels, group_keys, words, length, 1, rows, first, end, 0, vectors);
}
