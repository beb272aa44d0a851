/* vocabulary.h - the words of src/cpu/simd as functions on arrays, so that one test, compiled for
 * any CPU, can run those of every instruction set. */
#ifndef VOCABULARY_H
#define VOCABULARY_H

#include <stdbool.h>
#include <stdint.h>

enum { vocabulary_most_lanes = 64 };

/* Arrays have `width` elements, but for transpose's: width rows of width. */
typedef struct vocabulary {
    int width;
    uint32_t (*flush_subnormals)(void);
    uint32_t (*keep_subnormals)(void);
    void (*restore_modes)(uint32_t old);
    void (*set)(float *to, float x);
    void (*copy)(float *to, const float *from); /* vf_load, vf_store */
    void (*copy_first)(float *to, const float *from, int64_t count);
    void (*load_first)(float *to, const float *from, int64_t count);
    void (*load_f16)(float *to, const uint16_t *from, int64_t count);
    void (*store_f16)(uint16_t *to, const float *from, int64_t count);
    void (*load_bf16)(float *to, const uint16_t *from, int64_t count);
    void (*store_bf16)(uint16_t *to, const float *from, int64_t count);
    void (*add)(float *to, const float *a, const float *b);
    void (*sub)(float *to, const float *a, const float *b);
    void (*mul)(float *to, const float *a, const float *b);
    void (*div)(float *to, const float *a, const float *b);
    void (*max)(float *to, const float *a, const float *b);
    void (*copy_sign)(float *to, const float *size, const float *sign);
    void (*fma)(float *to, const float *a, const float *b, const float *c);
    void (*rounding_error)(float *to, const float *a, const float *b, const float *product);
    void (*abs)(float *to, const float *x);
    float (*sum)(const float *x);
    bool (*any_greater)(const float *a, const float *b);
    void (*pick_greater)(float *to, const float *a, const float *b, const float *x, const float *y);
    void (*keep)(float *to, const float *x, int32_t first, int32_t end);
    void (*transpose)(float *x);
    void (*fraction)(float *to, const float *x);
    void (*scale2)(float *to, const float *fraction, const float *x);
    void (*exp2)(float *to, const float *x); /* of src/cpu/common/math.h, as the others below */
    void (*exp)(float *to, const float *x);
    void (*log1p)(float *to, const float *x);
    void (*tanh)(float *to, const float *x);
} vocabulary;

/* Words of two bfloat16. Of dot's `word` the first one counts, for every lane. */
typedef struct pair_vocabulary {
    int width;
    void (*load_pairs)(float *to, const uint16_t *even, const uint16_t *odd, int64_t count);
    void (*join)(float *to, const float *even, const float *odd);
    void (*store_terms)(float *to, const float *x); /* width / 2 elements of to */
    void (*even)(float *to, const float *word);
    void (*odd)(float *to, const float *word);
    void (*dot)(float *to, const float *word, const float *x, const float *sum);
} pair_vocabulary;

/* One for each file beside this one; to be called only where the CPU can. */
extern const vocabulary vocabulary_scalar;
extern const vocabulary vocabulary_avx2;
extern const vocabulary vocabulary_avx512;
extern const vocabulary vocabulary_neon;
extern const pair_vocabulary vocabulary_avx512bf16;
extern const pair_vocabulary vocabulary_neonbf16;

#endif /* VOCABULARY_H */
