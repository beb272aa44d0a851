/* Vectors `from` to `end` - 1 of a row of them, in registers. */
#ifndef FDMA_CPU_COMMON_VECTORS_H
#define FDMA_CPU_COMMON_VECTORS_H

#include "cpu/common/unroll.h"
#include "cpu/simd/simd.h"

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

/* Adds vectors to what is in memory. */
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

#endif
