/* test_pairs.c - the words of bfloat16 pairs against plain C. */
#include "vocabulary/each.h"

/* The pair vocabularies of this build's architecture. */
#if defined(FDMA_HAVE_AVX512BF16)
static const pair_vocabulary *const pairs = &vocabulary_avx512bf16;
static const char *missing_pairs(void) { return fdma_missing_avx512bf16(); }
#elif defined(FDMA_HAVE_NEONBF16)
static const pair_vocabulary *const pairs = &vocabulary_neonbf16;
static const char *missing_pairs(void) { return fdma_missing_neonbf16(); }
#else
static const pair_vocabulary *const pairs = NULL;
static const char *missing_pairs(void) { return "a build with kernels of bfloat16 pairs"; }
#endif

/* Rounds to the nearest even; subnormal numbers, before or after, become 0. */
static uint32_t rounded(float x) {
    const uint32_t bits = float_to_bits(x), sign = bits & 0x80000000;
    if (isnan(x))
        return bits >> 16 | 0x40;
    if (fabsf(x) < FLT_MIN)
        return sign >> 16;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static void check_bits(const char *word, int lane, float actual, uint32_t want) {
    if (!CHECK(float_to_bits(actual) == want))
        printf("    %s, lane %d: is %08x, want %08x\n", word, lane, float_to_bits(actual), want);
}

static void halves_are_rounded_and_told_apart(void) {
    const pair_vocabulary *x = pairs;
    uint64_t state = 5;
    for (int round = 0; round < rounds; round++) {
        float even[lanes], odd[lanes], word[lanes], low[lanes], high[lanes];
        fill_any(even, &state);
        fill_any(odd, &state);
        x->join(word, even, odd);
        x->even(low, word);
        x->odd(high, word);
        for (int i = 0; i < x->width; i++) {
            check_bits("vf_join", i, word[i], rounded(odd[i]) << 16 | rounded(even[i]));
            check_bits("vf_even", i, low[i], rounded(even[i]) << 16);
            check_bits("vf_odd", i, high[i], rounded(odd[i]) << 16);
        }
    }
}

/* The words convert adjacent numbers, and write nothing beyond them. */
static void terms_are_rounded(void) {
    const pair_vocabulary *x = pairs;
    uint64_t state = 8;
    for (int round = 0; round < rounds; round++) {
        float from[lanes], words[lanes];
        fill_any(from, &state);
        for (int i = 0; i < lanes; i++)
            words[i] = 1;
        x->store_terms(words, from);
        for (int i = 0; i < x->width / 2; i++) {
            check_bits("vf_store_terms", i, words[i],
                       rounded(from[2 * i + 1]) << 16 | rounded(from[2 * i]));
        }
        CHECK(words[x->width / 2] == 1);
    }
}

/* Rows are multiples of 8 channels: a longer vector may end with fewer, or lie past the end. */
static void rows_are_paired(void) {
    const pair_vocabulary *x = pairs;
    uint64_t state = 6;
    for (int64_t count = x->width < 8 ? x->width : 0; count <= x->width; count += 8) {
        uint16_t *even = test_alloc((size_t)count * 2), *odd = test_alloc((size_t)count * 2);
        float word[lanes];
        for (int64_t i = 0; i < count; i++) {
            even[i] = (uint16_t)random_bits(&state);
            odd[i] = (uint16_t)random_bits(&state);
        }
        x->load_pairs(word, even, odd, count);
        for (int i = 0; i < x->width; i++) {
            check_bits("vf_load_pairs", i, word[i],
                       i < count ? (uint32_t)odd[i] << 16 | even[i] : 0);
        }
        test_free_all();
    }
}

static void channels_of_two_rows_are_paired(void) {
    const pair_vocabulary *x = pairs;
    uint64_t state = 9;
    for (int round = 0; round < rounds; round++) {
        uint16_t first[2 * lanes], second[2 * lanes];
        float even[lanes], odd[lanes];
        for (int i = 0; i < 2 * lanes; i++) {
            first[i] = (uint16_t)random_bits(&state);
            second[i] = (uint16_t)random_bits(&state);
        }
        x->load_even_odd_pairs(even, odd, first, second);
        for (int i = 0; i < x->width; i++) {
            check_bits("even", i, even[i], (uint32_t)second[2 * i] << 16 | first[2 * i]);
            check_bits("odd", i, odd[i], (uint32_t)second[2 * i + 1] << 16 | first[2 * i + 1]);
        }
    }
}

/* Products of bfloat16 are exact in double precision. Each of the two additions is off by less than
 * a unit in the last place of its sum, with any rounding direction. */
static void dots_are_sums_of_products(void) {
    const pair_vocabulary *x = pairs;
    uint64_t state = 7;
    for (int round = 0; round < rounds; round++) {
        float term[4][lanes], a[lanes], b[lanes], sum[lanes], to[lanes];
        for (int i = 0; i < lanes; i++) {
            for (int p = 0; p < 4; p++)
                term[p][i] = bits_to_float(rounded(8 * random_float(&state)) << 16);
            sum[i] = 100 * random_float(&state);
        }
        x->join(a, term[0], term[1]);
        x->join(b, term[2], term[3]);
        x->dot(to, a, b, sum); /* the first word of a, every word of b */
        for (int i = 0; i < x->width; i++) {
            const double even = (double)term[0][0] * (double)term[2][i];
            const double odd = (double)term[1][0] * (double)term[3][i];
            const double size = fabs(even) + fabs(odd) + fabs((double)sum[i]);
            const double step = (double)FLT_EPSILON;
            CHECK_NEAR((double)to[i], (double)sum[i] + even + odd, (2 + step) * step * size);
        }
        x->dot_lanes(to, a, b, sum); /* every word of both */
        for (int i = 0; i < x->width; i++) {
            const double even = (double)term[0][i] * (double)term[2][i];
            const double odd = (double)term[1][i] * (double)term[3][i];
            const double size = fabs(even) + fabs(odd) + fabs((double)sum[i]);
            const double step = (double)FLT_EPSILON;
            CHECK_NEAR((double)to[i], (double)sum[i] + even + odd, (2 + step) * step * size);
        }
    }
}

static void dots_of_special_numbers(void) {
    static const struct {
        float even, odd, sum, want; /* of even * 1 + odd * 2^20 + sum */
    } cases[] = {
        {0x1p-130F, 0x1p-130F, 0x1p-130F, 0}, /* subnormal numbers count as 0 */
        {0x1p-126F, 0, -0x1p-127F, 0x1p-126F},
        {INFINITY, 1, 1, INFINITY},
        {1, -INFINITY, 1, -INFINITY},
        {INFINITY, -INFINITY, 1, NAN},
        {1, 1, -INFINITY, -INFINITY},
        {INFINITY, 1, -INFINITY, NAN},
        {1, NAN, 1, NAN},
        {1, 1, NAN, NAN},
        {0, 0x1p127F, 0, INFINITY},        /* an infinite product */
        {0x1p127F, 0, 0x1p127F, INFINITY}, /* an infinite sum */
    };
    const pair_vocabulary *x = pairs;
    float one[lanes], factor[lanes], b[lanes];
    for (int i = 0; i < lanes; i++) {
        one[i] = 1;
        factor[i] = 0x1p20F;
    }
    x->join(b, one, factor);
    for (int c = 0; c < TEST_COUNT(cases); c++) {
        float a[lanes], sum[lanes], to[lanes];
        for (int i = 0; i < lanes; i++) { /* as words: conversion loses subnormal numbers */
            a[i] = bits_to_float((float_to_bits(cases[c].odd) & 0xffff0000) |
                                 float_to_bits(cases[c].even) >> 16);
            sum[i] = cases[c].sum;
        }
        x->dot(to, a, b, sum);
        for (int i = 0; i < x->width; i++)
            check_lane("vf_dot", i, to[i], cases[c].want);
    }
}

static const test_entry tests[] = {
    TEST(halves_are_rounded_and_told_apart),
    TEST(terms_are_rounded),
    TEST(rows_are_paired),
    TEST(dots_are_sums_of_products),
    TEST(dots_of_special_numbers),
    TEST(channels_of_two_rows_are_paired),
};

int main(void) {
    if (missing_pairs() != NULL) {
        printf("skipped: this machine lacks %s\n", missing_pairs());
        return 0;
    }
    return test_run(tests, TEST_COUNT(tests));
}
