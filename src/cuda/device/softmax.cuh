/* Functions of the online softmax for rows whose logits are in the accumulators of mma.sync or
 * wgmma, where each lane of a quad holds a quarter of a row's columns. Logits are base-2
 * exponents. */
#pragma once

#include "cuda/device/ptx.cuh"

#include <float.h>

static constexpr float log2_e = 1.44269504088896340736f;
static constexpr float ln_2 = 0.69314718055994530942f;

/* The initial row_max: no finite number is less, and -inf minus it is -inf, not NaN. */
static constexpr float least_max = -FLT_MAX;

__device__ static float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ static float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* tanh(x) with relative error 2e-7: an odd polynomial up to 0.625 (Cephes' coefficients), an
 * exponential above. */
__device__ static float tanh_of(float x) {
    const float size = fabsf(x), square = x * x;
    float p = fmaf(square, -5.70498872745e-3f, 2.06390887954e-2f);
    p = fmaf(p, square, -5.37397155531e-2f);
    p = fmaf(p, square, 1.33314422036e-1f);
    p = fmaf(p, square, -3.33332819422e-1f);
    const float low = fmaf(p * square, x, x);
    const float high = 1 - __fdividef(2, 1 + ex2_approx(size * (2 * log2_e)));
    return size > 0.625f ? copysignf(high, x) : low; // NaN takes the polynomial
}

/* The factor that turns sums of weights relative to the maximum `from` into sums relative to `to`.
 * to >= from. */
__device__ static float growth_factor(float from, float to) {
    return from == to ? 1 : ex2_approx(from - to);
}

/* The epilogue of a row: out is multiplied by `scale`, or set to 0 if `scale` is 0, because out of
 * an empty row is undefined. lse is in nats. */
struct row_result {
    float scale, lse;
};

/* The result of a row whose weights 2^(logit - row_max) have the sum row_sum. A sink logit adds one
 * more weight; it is an exponent of 2, and -inf if there is none. */
__device__ static row_result result_of(float row_max, float row_sum, float sink) {
    if (row_sum == 0)
        return {isnan(sink) ? sink : 0, sink * ln_2};
    const float top = fmaxf(row_max, sink); // row_max if the sink is NaN
    const float sum = row_sum * growth_factor(row_max, top) + ex2_approx(sink - top);
    return {1 / (row_sum + ex2_approx(sink - row_max)), (top + log2f(sum)) * ln_2};
}
