/* The words of the vocabulary that set how x86 rounds. See scalar.h for what each means. */
#ifndef FDMA_CPU_SIMD_X86_MODES_H
#define FDMA_CPU_SIMD_X86_MODES_H

#include <immintrin.h>
#include <stdint.h>

static inline uint32_t flush_subnormals(void) {
    const uint32_t old = _mm_getcsr();
    _mm_setcsr(_MM_MASK_MASK | _MM_FLUSH_ZERO_ON | 0x40 /* denormals are zero */);
    return old;
}

static inline uint32_t keep_subnormals(void) {
    const uint32_t old = _mm_getcsr();
    _mm_setcsr(_MM_MASK_MASK);
    return old;
}

static inline void restore_rounding(uint32_t old) { _mm_setcsr(old); }

#endif
