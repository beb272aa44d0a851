/* vocabulary.h - the words of src/cpu/simd as functions on arrays, so that one test, compiled for
 * any CPU, can run the words of every instruction set. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum { vocabulary_most_lanes = 64 };

/* The words: WORD(return type, name, parameters). Arrays have `width` elements, except in transpose
 * and sum_each, which take width rows of width, and load_even_odd_bf16, which reads 2 * width. */
#define VOCABULARY_WORDS(WORD)                                                                     \
    WORD(uint32_t, flush_subnormals, (void))                                                       \
    WORD(uint32_t, keep_subnormals, (void))                                                        \
    WORD(void, restore_modes, (uint32_t old))                                                      \
    WORD(void, set, (float *to, float x))                                                          \
    WORD(void, copy, (float *to, const float *from)) /* vf_load, vf_store */                       \
    WORD(void, copy_first, (float *to, const float *from, int64_t count))                          \
    WORD(void, load_first, (float *to, const float *from, int64_t count))                          \
    WORD(void, load_f16, (float *to, const uint16_t *from, int64_t count))                         \
    WORD(void, store_f16, (uint16_t *to, const float *from, int64_t count))                        \
    WORD(void, load_bf16, (float *to, const uint16_t *from, int64_t count))                        \
    WORD(void, store_bf16, (uint16_t *to, const float *from, int64_t count))                       \
    WORD(void, load_even_odd_bf16, (float *even, float *odd, const uint16_t *from))                \
    WORD(void, add, (float *to, const float *a, const float *b))                                   \
    WORD(void, sub, (float *to, const float *a, const float *b))                                   \
    WORD(void, mul, (float *to, const float *a, const float *b))                                   \
    WORD(void, div, (float *to, const float *a, const float *b))                                   \
    WORD(void, max, (float *to, const float *a, const float *b))                                   \
    WORD(void, copy_sign, (float *to, const float *size, const float *sign))                       \
    WORD(void, fma, (float *to, const float *a, const float *b, const float *c))                   \
    WORD(void, rounding_error, (float *to, const float *a, const float *b, const float *product))  \
    WORD(void, abs, (float *to, const float *x))                                                   \
    WORD(float, sum, (const float *x))                                                             \
    WORD(void, sum_each, (float *to, const float *x)) /* width rows of width */                    \
    WORD(bool, any_greater, (const float *a, const float *b))                                      \
    WORD(void, pick_greater,                                                                       \
         (float *to, const float *a, const float *b, const float *x, const float *y))              \
    WORD(void, keep, (float *to, const float *x, int32_t first, int32_t end))                      \
    WORD(void, keep_bits, (float *to, const float *x, uint32_t bits))                              \
    WORD(uint64_t, nonzero_bytes, (const uint8_t *p))                                              \
    WORD(void, transpose, (float *x))                                                              \
    WORD(void, fraction, (float *to, const float *x))                                              \
    WORD(void, scale2, (float *to, const float *fraction, const float *x))                         \
    WORD(void, exp2, (float *to, const float *x)) /* from here: src/cpu/common/math.h */           \
    WORD(void, exp, (float *to, const float *x))                                                   \
    WORD(void, log1p, (float *to, const float *x))                                                 \
    WORD(void, tanh, (float *to, const float *x))

#define VOCABULARY_FIELD(type, name, parameters) type(*name) parameters;

typedef struct vocabulary {
    int width;
    VOCABULARY_WORDS(VOCABULARY_FIELD)
} vocabulary;

/* Words of two bfloat16. dot uses the first `word` for every lane. */
typedef struct pair_vocabulary {
    int width;
    void (*load_pairs)(float *to, const uint16_t *even, const uint16_t *odd, int64_t count);
    void (*load_even_odd_pairs)(float *even, float *odd, const uint16_t *first,
                                const uint16_t *second);
    void (*join)(float *to, const float *even, const float *odd);
    void (*join_weights)(float *to, const float *even, const float *odd);
    void (*store_terms)(float *to, const float *x); /* writes width / 2 elements */
    void (*even)(float *to, const float *word);
    void (*odd)(float *to, const float *word);
    void (*dot)(float *to, const float *word, const float *x, const float *sum);
    void (*dot_lanes)(float *to, const float *a, const float *b, const float *sum);
} pair_vocabulary;

/* One for each file beside this one. Use it only if the CPU supports it. */
extern const vocabulary vocabulary_scalar;
extern const vocabulary vocabulary_avx2;
extern const vocabulary vocabulary_avx512;
extern const vocabulary vocabulary_neon;
extern const pair_vocabulary vocabulary_avx512bf16;
extern const pair_vocabulary vocabulary_neonbf16;
