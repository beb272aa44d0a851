/* INLINE and UNROLL keep arrays of vectors in registers: the compiler does that only where every
 * index is a constant after unrolling and no function that is called takes their address. */
#ifndef FDMA_CPU_COMMON_UNROLL_H
#define FDMA_CPU_COMMON_UNROLL_H

#define INLINE static inline __attribute__((always_inline))

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#endif
