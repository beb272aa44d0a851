/* pairs.h - the bfloat16 pair words of the vocabulary included before, as functions on arrays.
 * Subnormal numbers are flushed as in the kernels, because not every CPU's conversions flush
 * them. */
#pragma once

#include "vocabulary.h"

static void word_load_pairs(float *to, const uint16_t *even, const uint16_t *odd, int64_t count) {
    vf_store(to, vf_load_pairs(even, odd, 0, count));
}

static void word_load_even_odd_pairs(float *even, float *odd, const uint16_t *first,
                                     const uint16_t *second) {
    vf x[2];
    vf_load_even_odd_pairs(first, second, &x[0], &x[1]);
    vf_store(even, x[0]);
    vf_store(odd, x[1]);
}

static void word_join(float *to, const float *even, const float *odd) {
    const uint32_t old = flush_subnormals();
    vf_store(to, vf_join(vf_load(even), vf_load(odd)));
    restore_modes(old);
}

static void word_join_weights(float *to, const float *even, const float *odd) {
    const uint32_t old = flush_subnormals();
    vf_store(to, vf_join_weights(vf_load(even), vf_load(odd)));
    restore_modes(old);
}

static void word_store_terms(float *to, const float *x) {
    const uint32_t old = flush_subnormals();
    vf_store_terms(to, vf_load(x));
    restore_modes(old);
}

static void word_even(float *to, const float *word) { vf_store(to, vf_even(vf_load(word))); }

static void word_odd(float *to, const float *word) { vf_store(to, vf_odd(vf_load(word))); }

static void word_dot(float *to, const float *word, const float *x, const float *sum) {
    const uint32_t old = flush_subnormals();
    vf_store(to, vf_dot(vf_load_word(word), vf_load(x), vf_load(sum)));
    restore_modes(old);
}

static void word_dot_lanes(float *to, const float *a, const float *b, const float *sum) {
    const uint32_t old = flush_subnormals();
    vf_store(to, vf_dot_lanes(vf_load(a), vf_load(b), vf_load(sum)));
    restore_modes(old);
}

#define VOCABULARY_PAIRS                                                                           \
    {                                                                                              \
        .width = vf_width,                                                                         \
        .load_pairs = word_load_pairs,                                                             \
        .load_even_odd_pairs = word_load_even_odd_pairs,                                           \
        .join = word_join,                                                                         \
        .join_weights = word_join_weights,                                                         \
        .store_terms = word_store_terms,                                                           \
        .even = word_even,                                                                         \
        .odd = word_odd,                                                                           \
        .dot = word_dot,                                                                           \
        .dot_lanes = word_dot_lanes,                                                               \
    }
