/* test_pairs.c - the words of bfloat16 pairs against plain C. */
#include "vocabulary/each.h"

#if defined(FDMA_HAVE_AVX512BF16)

/* To the nearest even; subnormal numbers, before or after, are 0. */
static uint32_t rounded(float x) {
    const uint32_t bits = float_to_bits(x), sign = bits & 0x80000000;
    if (isnan(x)) {
        return bits >> 16 | 0x40;
    }
    if (fabsf(x) < FLT_MIN) {
        return sign >> 16;
    }
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static void check_bits(const char *word, int lane, float actual, uint32_t want) {
    if (!CHECK(float_to_bits(actual) == want)) {
        printf("    %s, lane %d: is %08x, want %08x\n", word, lane, float_to_bits(actual), want);
    }
}

static void halves_are_rounded_and_told_apart(void) {
    const pair_vocabulary *x = &vocabulary_avx512bf16;
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

static void rows_are_paired(void) {
    const pair_vocabulary *x = &vocabulary_avx512bf16;
    uint64_t state = 6;
    for (int64_t count = 0; count <= x->width; count += 8) {
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

/* Products of bfloat16 are exact in double precision; the two additions round. */
static void dots_are_sums_of_products(void) {
    const pair_vocabulary *x = &vocabulary_avx512bf16;
    uint64_t state = 7;
    for (int round = 0; round < rounds; round++) {
        float part[4][lanes], a[lanes], b[lanes], sum[lanes], to[lanes];
        for (int i = 0; i < lanes; i++) {
            for (int p = 0; p < 4; p++) {
                part[p][i] = bits_to_float(rounded(8 * random_float(&state)) << 16);
            }
            sum[i] = 100 * random_float(&state);
        }
        x->join(a, part[0], part[1]);
        x->join(b, part[2], part[3]);
        x->dot(to, a, b, sum);
        for (int i = 0; i < x->width; i++) {
            const double even = (double)part[0][i] * (double)part[2][i];
            const double odd = (double)part[1][i] * (double)part[3][i];
            const double size = fabs(even) + fabs(odd) + fabs((double)sum[i]);
            CHECK_NEAR((double)to[i], (double)sum[i] + even + odd, 2 * (double)FLT_EPSILON * size);
        }
    }
}

static const test_entry tests[] = {
    TEST(halves_are_rounded_and_told_apart),
    TEST(rows_are_paired),
    TEST(dots_are_sums_of_products),
};

int main(void) {
    if (fdma_missing_avx512bf16() != NULL) {
        printf("skipped: this machine lacks %s\n", fdma_missing_avx512bf16());
        return 0;
    }
    return test_run(tests, TEST_COUNT(tests));
}

#else

int main(void) {
    printf("skipped: this build has no kernels of bfloat16 pairs\n");
    return 0;
}

#endif
