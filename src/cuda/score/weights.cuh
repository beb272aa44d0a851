/* Makes the weights of score kernels from dt_proj. If dt_proj is not of v's type or not aligned to
 * 16 bytes, arrange_weights() writes it to the workspace, with three limbs for a float32 weight. */
#pragma once

#include "cuda/device/element.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/score/score.cuh"

static constexpr int arrange_threads = 256;

template <typename T>
__device__ static float load_weight(const score_params &params, int g, int channel) {
    const int64_t at = g * params.dt_row + channel;
    return params.wide_dt_proj ? ((const float *)params.dt_proj)[at]
                               : to_float(((const T *)params.dt_proj)[at]);
}

/* Thread block g finds the power of two that divides the weights of kv head g, so that the largest
 * is near 2^14 and few limbs are subnormal in float16. bfloat16, with the exponents of float32,
 * needs no scale. */
template <typename T>
static __global__ void __launch_bounds__(arrange_threads) find_scales(const score_params params) {
    __shared__ float most_of_warp[arrange_threads / 32];
    const int g = blockIdx.x;
    float most = 0;
    for (int channel = threadIdx.x; channel < params.channels; channel += arrange_threads)
        most = fmaxf(most, fabsf(load_weight<T>(params, g, channel)));
    for (int lane = 16; lane > 0; lane /= 2)
        most = fmaxf(most, __shfl_xor_sync(~0u, most, lane));
    if (threadIdx.x % 32 == 0)
        most_of_warp[threadIdx.x / 32] = most;
    __syncthreads();
    if (threadIdx.x > 0)
        return;
    for (int warp = 0; warp < arrange_threads / 32; warp++)
        most = fmaxf(most, most_of_warp[warp]);
    const bool is_scaled = most > 0 && most < INFINITY;
    params.scales[g] = is_scaled ? exp2f(fmaxf(floorf(log2f(most)) - 14, -126)) : 1;
}

/* A limb of x. Each limb takes the upper bits of the remainder after the limbs before it. */
template <typename T> __device__ static T limb_of(float x, int limb) {
    for (int before = 0; before < limb; before++)
        x -= to_float(from_float_toward_zero<T>(x));
    return from_float_toward_zero<T>(x);
}

/* Each thread writes a vector of the weights of kv head blockIdx.x, all limbs of it. */
template <typename T>
static __global__ void __launch_bounds__(arrange_threads)
    arrange_weights(const score_params params) {
    const int g = blockIdx.x;
    const int channel = (blockIdx.y * arrange_threads + threadIdx.x) * vec_channels;
    griddepcontrol_wait(); // for find_scales()
    griddepcontrol_launch_dependents();
    if (channel >= params.channels)
        return;
    const float scale = params.scales != NULL ? params.scales[g] : 1;
    for (int limb = 0; limb < params.limbs; limb++) {
        alignas(16) T elements[vec_channels];
        for (int i = 0; i < vec_channels; i++)
            elements[i] = limb_of<T>(load_weight<T>(params, g, channel + i) / scale, limb);
        T *const to = (T *)params.weights + limb * params.weight_limb + g * params.weight_row;
        *(uint4 *)(to + channel) = *(const uint4 *)elements;
    }
}

template <typename T>
static fdma_status launch_arrange(const fdma_problem *problem, const score_params &params) {
    const unsigned heads = (unsigned)params.kv_heads;
    const int64_t blocks = divide_up(params.channels / vec_channels, arrange_threads);
    if (params.scales != NULL)
        FDMA_TRY(
            launch("score", find_scales<T>, {dim3(heads), dim3(arrange_threads)}, problem, params));
    return launch("score", arrange_weights<T>,
                  {dim3(heads, (unsigned)blocks), dim3(arrange_threads), 0,
                   params.scales != NULL ? start_early : start_after},
                  problem, params);
}
