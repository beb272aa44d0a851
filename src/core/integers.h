/* Arithmetic of sizes and indices, for hosts and devices. */
#pragma once

#include <stdint.h>

#if defined(__CUDACC__) // CUDA has min() and max() of every type
#define INTEGER_FUNCTION static __host__ __device__ inline
#else
#define INTEGER_FUNCTION static inline

INTEGER_FUNCTION int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

INTEGER_FUNCTION int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
#endif

/* a / b, rounded up, for a >= 0 and b > 0. */
INTEGER_FUNCTION int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* The least multiple of `step` that is not below x, for x >= 0. */
INTEGER_FUNCTION int64_t round_up(int64_t x, int64_t step) { return divide_up(x, step) * step; }
