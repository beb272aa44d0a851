/* Products of float32: a word is one channel, or one key. */
#pragma once

#include "cpu/simd/simd.h"

enum { terms = 1 };

/* A word that every lane is multiplied by. */
typedef vf vf_word;

static inline vf_word vf_load_word(const float *p) { return vf_set(*p); }

/* sum + word * lanes, over the terms of the words */
static inline vf vf_dot(vf_word word, vf lanes, vf sum) { return vf_fma(word, lanes, sum); }

/* sum + a * b, lane by lane, over the terms of the words */
static inline vf vf_dot_lanes(vf a, vf b, vf sum) { return vf_fma(a, b, sum); }

/* Words of pairs, which single terms do not need. */
static inline vf vf_load_pairs(const uint16_t *even, const uint16_t *odd, int64_t d,
                               int64_t count) {
    (void)odd;
    return vf_load_first_bf16(even + d, count);
}

static inline void vf_load_even_odd_pairs(const uint16_t *first, const uint16_t *second, vf *even,
                                          vf *odd) {
    (void)second;
    vf_load_even_odd_bf16(first, even, odd);
}

static inline vf vf_join(vf even, vf odd) {
    (void)odd;
    return even;
}

static inline vf vf_join_weights(vf even, vf odd) { return vf_join(even, odd); }

/* Stores vf_width terms side by side: words of lanes. */
static inline void vf_store_terms(float *p, vf x) { vf_store(p, x); }

static inline vf vf_even(vf word) { return word; }

static inline vf vf_odd(vf word) { return word; }
