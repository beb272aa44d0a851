/* Arrays of vectors live in registers only if every index is a constant and no function gets their
 * address: loops over them are unrolled, and what works on them is inlined. */
#ifndef FDMA_CPU_COMMON_UNROLL_H
#define FDMA_CPU_COMMON_UNROLL_H

#define INLINE static inline __attribute__((always_inline))

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#endif
