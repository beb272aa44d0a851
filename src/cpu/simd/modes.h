/* The floating-point modes of a thread: rounding, traps and subnormal numbers. */
#pragma once

#include <stdint.h>

/* Modes are the bits of MXCSR on x86 and of FPCR on AArch64. On other CPUs they are the rounding
 * direction alone. */
#if defined(__x86_64__)
#include <immintrin.h>

enum {
    default_modes = _MM_MASK_MASK, /* round to nearest, no traps, keep subnormal numbers */
    flush_to_zero = _MM_FLUSH_ZERO_ON | 0x40 /* of results, and of operands (DAZ) */,
};

static inline uint32_t set_modes(uint32_t modes) {
    const uint32_t old = _mm_getcsr();
    if (((old ^ modes) & ~(uint32_t)_MM_EXCEPT_MASK) != 0) // writing takes longer than reading
        _mm_setcsr(modes);
    return old;
}

#elif defined(__aarch64__)

/* FZ flushes operands and results of float32; conversions from and to float16 keep subnormal
 * numbers of float16. */
enum { default_modes = 0, flush_to_zero = 1 << 24 };

static inline uint32_t set_modes(uint32_t modes) {
    uint64_t old;
    __asm__ volatile("mrs %0, fpcr" : "=r"(old)::"memory");
    __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)modes) : "memory");
    return (uint32_t)old;
}

#else
#include <fenv.h>

enum { default_modes = FE_TONEAREST, flush_to_zero = 0 };

static inline uint32_t set_modes(uint32_t modes) {
    const int old = fegetround();
    fesetround((int)modes);
    return (uint32_t)old;
}

#endif

/* Makes this thread round to nearest, without traps, and keep subnormal numbers. Returns its
 * previous modes, for restore_modes(). */
static inline uint32_t keep_subnormals(void) { return set_modes(default_modes); }

static inline void restore_modes(uint32_t old) { set_modes(old); }
