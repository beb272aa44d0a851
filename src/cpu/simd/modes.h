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

#if defined(_WIN32)
/* expf() and others of its C library compute in x87, whose modes are the upper half of ours. Its
 * threads begin with another precision than the first one. */
enum { x87_modes = 0x37F /* round to nearest, no traps, all digits */ };

static inline uint32_t set_x87_modes(uint32_t modes) {
    uint16_t old, wanted = (uint16_t)(modes >> 16);
    __asm__ volatile("fnstcw %0" : "=m"(old));
    if (wanted == 0)
        wanted = x87_modes;
    if (old != wanted)
        __asm__ volatile("fldcw %0" : : "m"(wanted));
    return (uint32_t)old << 16;
}
#else
static inline uint32_t set_x87_modes(uint32_t modes) { return modes & 0; }
#endif

static inline uint32_t set_modes(uint32_t modes) {
    const uint32_t old = _mm_getcsr(), wanted = modes & 0xFFFF;
    if (((old ^ wanted) & ~(uint32_t)_MM_EXCEPT_MASK) != 0) // writing takes longer than reading
        _mm_setcsr(wanted);
    return old | set_x87_modes(modes);
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
