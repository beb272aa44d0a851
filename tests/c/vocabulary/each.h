/* each.h - the vocabularies of this build, and test numbers for test_vocabulary.c. */
#pragma once

#include "../fixture.h"

#include "cpu/isa/isa.h"
#include "vocabulary.h"

#include <float.h>

enum { lanes = vocabulary_most_lanes, rounds = 4000 };

static const struct {
    const char *name;
    const vocabulary *words;
    const char *(*missing)(void);
} vocabularies[] = {
    {"scalar", &vocabulary_scalar, fdma_missing_scalar},
#if defined(FDMA_HAVE_AVX2)
    {"avx2", &vocabulary_avx2, fdma_missing_avx2},
#endif
#if defined(FDMA_HAVE_AVX512)
    {"avx512", &vocabulary_avx512, fdma_missing_avx512},
#endif
#if defined(FDMA_HAVE_NEON)
    {"neon", &vocabulary_neon, fdma_missing_neon},
#endif
};

static inline void on_each_vocabulary(const test_entry *test) {
    for (int i = 0; i < TEST_COUNT(vocabularies); i++) {
        if (vocabularies[i].missing() == NULL) {
            test_context("%s", vocabularies[i].name);
            test->each_vocabulary(vocabularies[i].words);
            test_free_all();
        }
    }
}

/* An entry of a table of tests: a property of every vocabulary that this machine can run. */
#define EACH_VOCABULARY(property)                                                                  \
    {.name = #property, .run_each = on_each_vocabulary, .each_vocabulary = property}

static const float special[] = {
    0.0F,          -0.0F,     1,         -1,          2,           0.5F,
    NAN,           INFINITY,  -INFINITY, FLT_MAX,     -FLT_MAX,    FLT_MIN,
    -FLT_MIN,      0x1p-127F, 0x1p-149F, -0x1p-149F,  0x1.8p-148F, 1 + FLT_EPSILON,
    1 - 0x1p-24F,  0x1p24F,   -0x1p31F,  65504,       65520,       -65519.99F,
    0x1p-14F,      0x1p-24F,  0x1p-25F,  0x1.8p-25F,  0x1.fep127F, 0x1.ffp127F,
    -0x1.004p-14F, 1e-30F,    1e30F,     0x1.002p+0F, 0x1.01p+0F,
};

/* Rounded like numbers they would become infinite, and overflow into the sign. */
static const uint32_t nans[] = {0x7f800001, 0xff800001, 0x7fffffff, 0xffffffff};

static inline float any_float(uint64_t *state) {
    switch (random_below(state, 5)) {
    case 0:
        return special[random_below(state, TEST_COUNT(special))];
    case 1:
        return bits_to_float(nans[random_below(state, TEST_COUNT(nans))]);
    case 2:
        return bits_to_float((uint32_t)random_bits(state));
    case 3:
        return (float)random_below(state, 7) - 3; /* often equal */
    default:
        return random_float(state);
    }
}

static inline void fill_any(float *to, uint64_t *state) {
    for (int i = 0; i < lanes; i++)
        to[i] = any_float(state);
}

/* Compares bits; all NaNs are equal. */
static inline int is_same(float actual, float want) {
    return isnan(want) ? isnan(actual) : float_to_bits(actual) == float_to_bits(want);
}

static inline void check_lane(const char *word, int lane, float actual, float want) {
    if (!CHECK(is_same(actual, want)))
        printf("    %s, lane %d: is %a, want %a\n", word, lane, (double)actual, (double)want);
}
