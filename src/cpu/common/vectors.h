/* Arrays of vectors that stay in registers. Compilers keep them there only if every index is a
 * constant after unrolling and no function that is called takes their address: hence INLINE and
 * UNROLL. The functions work on vectors `from` to `end` - 1. */
#pragma once

#include "cpu/simd/simd.h"

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

INLINE void clear_vectors(vf *x, int from, int end) {
    UNROLL
    for (int m = from; m < end; m++)
        x[m] = vf_set(0);
}

INLINE void load_vectors(vf *x, const float *p, int from, int end) {
    UNROLL
    for (int m = from; m < end; m++)
        x[m] = vf_load(p + m * vf_width);
}

INLINE void store_vectors(float *p, const vf *x, int from, int end) {
    UNROLL
    for (int m = from; m < end; m++)
        vf_store(p + m * vf_width, x[m]);
}

INLINE void add_vectors(float *p, const vf *x, int from, int end) {
    UNROLL
    for (int m = from; m < end; m++)
        vf_store(p + m * vf_width, vf_add(vf_load(p + m * vf_width), x[m]));
}

/* sums += word * lanes */
INLINE void add_product(vf *sums, const float *word, const vf *lanes, int from, int end) {
    const vf_word factor = vf_load_word(word);
    UNROLL
    for (int m = from; m < end; m++)
        sums[m] = vf_dot(factor, lanes[m], sums[m]);
}
