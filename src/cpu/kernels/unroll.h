/* Loops over registers: their arrays live in registers only if every index is a constant. */
#ifndef FDMA_CPU_KERNELS_UNROLL_H
#define FDMA_CPU_KERNELS_UNROLL_H

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#endif
