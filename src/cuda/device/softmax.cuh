/* Words of the online softmax, for rows whose logits lie in the accumulators of mma.sync or wgmma:
 * of each row a quad of lanes has a quarter of the columns. Logits are exponents of 2. */
#ifndef FDMA_CUDA_DEVICE_SOFTMAX_CUH
#define FDMA_CUDA_DEVICE_SOFTMAX_CUH

#include "cuda/device/ptx.cuh"

#include <float.h>

static constexpr float log2_e = 1.44269504088896340736f;
static constexpr float ln_2 = 0.69314718055994530942f;

/* Where a maximum starts: below every number, yet -inf minus it is -inf, not NaN. */
static constexpr float least_max = -FLT_MAX;

__device__ static inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ static inline float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* tanh(x), relative error 2e-7: an odd polynomial below 0.625 (Cephes' coefficients), above it an
 * exponential. */
__device__ static inline float tanh_of(float x) {
    const float size = fabsf(x), square = x * x;
    float p = fmaf(square, -5.70498872745e-3f, 2.06390887954e-2f);
    p = fmaf(p, square, -5.37397155531e-2f);
    p = fmaf(p, square, 1.33314422036e-1f);
    p = fmaf(p, square, -3.33332819422e-1f);
    const float low = fmaf(p * square, x, x);
    const float high = 1 - __fdividef(2, 1 + ex2_approx(size * (2 * log2_e)));
    return size > 0.625f ? copysignf(high, x) : low; // NaN goes through the polynomial
}

/* What sums under the maximum `from` are multiplied by to stand under `to`, which is no less. */
__device__ static inline float growth_factor(float from, float to) {
    return from == to ? 1 : ex2_approx(from - to);
}

/* Of a whole row; -inf for an empty one. */
__device__ static inline float lse_of(float max, float sum) { return (max + log2f(sum)) * ln_2; }

#endif
