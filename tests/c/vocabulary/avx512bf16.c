/* The words of pairs in bf16_pairs.h, for test_vocabulary.c. */
#include "cpu/simd/avx512.h"
#include "cpu/simd/bf16_pairs.h"

#include "vocabulary.h"

static void word_load_pairs(float *to, const uint16_t *even, const uint16_t *odd, int64_t count) {
    vf_store(to, vf_load_pairs(even, odd, 0, count));
}

static void word_join(float *to, const float *even, const float *odd) {
    vf_store(to, vf_join(vf_load(even), vf_load(odd)));
}

static void word_even(float *to, const float *word) { vf_store(to, vf_even(vf_load(word))); }

static void word_odd(float *to, const float *word) { vf_store(to, vf_odd(vf_load(word))); }

static void word_dot(float *to, const float *a, const float *b, const float *sum) {
    vf_store(to, vf_dot(vf_load(a), vf_load(b), vf_load(sum)));
}

const pair_vocabulary vocabulary_avx512bf16 = {
    .width = vf_width,
    .load_pairs = word_load_pairs,
    .join = word_join,
    .even = word_even,
    .odd = word_odd,
    .dot = word_dot,
};
