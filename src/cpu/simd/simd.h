/* The vocabulary, the products and the tile shape of the compiled point of the build matrix. Each
 * file of src/cpu/isa names its point before it includes anything; a kernel header on its own is
 * compiled in the scalar vocabulary. */
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(FDMA_POINT_AMX) || defined(FDMA_POINT_AVX512BF16)
#include "cpu/simd/avx512.h"
#include "cpu/simd/avx512_shape.h"
#include "cpu/simd/bf16_pairs.h"
#elif defined(FDMA_POINT_AVX512)
#include "cpu/simd/avx512.h"
#include "cpu/simd/avx512_shape.h"
#include "cpu/simd/singles.h"
#elif defined(FDMA_POINT_AVX2)
#include "cpu/simd/avx2.h"
#include "cpu/simd/singles.h"
#elif defined(FDMA_POINT_NEONBF16)
#include "cpu/simd/neon.h"
#include "cpu/simd/neon_bf16_pairs.h"
#elif defined(FDMA_POINT_NEON)
#include "cpu/simd/neon.h"
#include "cpu/simd/singles.h"
#else
#include "cpu/simd/scalar.h"
#include "cpu/simd/singles.h"
#endif

#if !defined(FDMA_POINT_AMX) && !defined(FDMA_POINT_AVX512BF16) && !defined(FDMA_POINT_AVX512)
/* Loads and stores of the first `count` lanes, 1 to vf_width; on AVX-512 the others load as 0. Rows
 * are multiples of 8 channels, so that in shorter vectors `count` is always the whole width. */
static inline vf vf_load_first(const float *p, int64_t count) {
    (void)count;
    return vf_load(p);
}

static inline void vf_store_first(float *p, vf x, int64_t count) {
    (void)count;
    vf_store(p, x);
}
#endif

/* A vector of vf_width integers of 32 bits, to which compilers apply C's operators, lane by lane. A
 * comparison sets all bits of a lane, or none. */
typedef uint32_t vu __attribute__((vector_size(sizeof(vf))));

static inline vu vu_load(const uint32_t *p) {
    vu x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* The bits of a vector of floats, and back. */
static inline vu vu_of(vf x) {
    vu bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline vf vf_of_bits(vu bits) {
    vf x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The same in every vocabulary, because compilers apply C's operators to each lane of a vector. */
static inline vf vf_add(vf a, vf b) { return a + b; }

static inline vf vf_sub(vf a, vf b) { return a - b; }

static inline vf vf_mul(vf a, vf b) { return a * b; }

static inline vf vf_div(vf a, vf b) { return a / b; }
