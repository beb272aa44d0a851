/* Arithmetic of sizes and indices, for hosts and devices. */
#pragma once

#include <math.h>
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

/* The rule `gap` of a selection, for hosts and devices: a key leaves once its score is more than
 * `gap` below the best score so far. */

/* True if a score is more than `gap` below the best one. In double precision a float32 minus the
 * gap is rounded once, so that every kernel decides alike. NaN counts as -inf, and no finite gap
 * excludes -inf while the best score is -inf. */
INTEGER_FUNCTION int falls_below(double score, double best, double gap) {
    return (isnan(score) ? -INFINITY : score) < best - gap;
}
