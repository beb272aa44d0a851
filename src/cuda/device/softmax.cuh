/* The online softmax of rows that a warp holds as accumulators of wgmma or mma: two rows a thread,
 * each row shared by the four lanes of a quad. Exponents are of 2. */
#ifndef FDMA_CUDA_DEVICE_SOFTMAX_CUH
#define FDMA_CUDA_DEVICE_SOFTMAX_CUH

#include "cuda/device/ptx.cuh"

static constexpr float log2_e = 1.44269504088896340736f;
static constexpr float ln_2 = 0.69314718055994530942f;

/* A row's maximum is raised when a logit exceeds it by this much: weights stay below 2^8, and
 * what was summed is seldom rescaled. */
static constexpr float most_excess = 8;

__device__ static inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ static inline float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* c * tanh(x / c). */
__device__ static inline float soften(float x, float c) {
    const float e = ex2_approx(x * (2 * log2_e / c));
    return c - 2 * c * rcp_approx(e + 1);
}

/* Two rows of a thread: the maximum so far (within most_excess of it), and this thread's part of
 * the sum of 2^(logit - greatest). */
struct row_softmax {
    float greatest[2] = {-INFINITY, -INFINITY};
    float sum[2] = {0, 0};

    /* Takes in the logits unit * scores; `rescale` is what earlier weights are worth now. True
     * where that is not 1 for some row of the warp. NaN stays out of the maximum, as it shows in
     * the sum. */
    template <int accumulators>
    __device__ inline bool raise(const float (&scores)[accumulators], float unit,
                                 float (&rescale)[2]) {
        bool raised = false;
#pragma unroll
        for (int row = 0; row < 2; row++) {
            float most = scores[2 * row];
#pragma unroll
            for (int i = 0; i < accumulators; i += 4)
                most = fmaxf(most, fmaxf(scores[i + 2 * row], scores[i + 2 * row + 1]));
            most = quad_max(most) * unit;
            const bool exceeds = most > greatest[row] + most_excess;
            rescale[row] = exceeds ? ex2_approx(greatest[row] - most) : 1;
            greatest[row] = exceeds ? most : greatest[row];
            sum[row] *= rescale[row];
            raised |= exceeds;
        }
        return __any_sync(~0u, raised);
    }

    /* scores = 2^(unit * scores - greatest), added to the sum. */
    template <int accumulators>
    __device__ inline void weigh(float (&scores)[accumulators], float unit) {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const float base = greatest[row] == -INFINITY ? 0 : greatest[row]; // -inf - -inf is NaN
            float part[2] = {0, 0}; // two sums: half the latency
#pragma unroll
            for (int i = 0; i < accumulators; i += 4) {
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    float &score = scores[i + 2 * row + c];
                    score = ex2_approx(fmaf(score, unit, -base));
                    part[c] += score;
                }
            }
            sum[row] += part[0] + part[1];
        }
    }
};

#endif
