/* The softmax of a consumer's rows, as accumulators of wgmma hold them: two rows a thread. */
#ifndef FDMA_CUDA_FORWARD_SM90_SOFTMAX_CUH
#define FDMA_CUDA_FORWARD_SM90_SOFTMAX_CUH

#include "cuda/device/element.cuh"
#include "cuda/device/softmax.cuh"

/* What a thread's weights of a row may sum up to in one block of keys before the row's maximum is
 * raised: sums are almost never rescaled, and no weight is more than float16 holds. */
static constexpr float most_sum = 32768;

/* Where float32 ceases to have fractions. Beyond it what rounding takes from a product may be more
 * than a weight's exponent holds: it must be rounded before a maximum is subtracted. */
static constexpr float most_maximum = 1 << 24;

/* What is subtracted from the logits of a row: -inf - -inf is NaN. */
__device__ static inline float base_of(float max) { return max == -INFINITY ? 0 : max; }

/* Two rows of a thread: the maximum that their weights stand against, and this thread's part of the
 * sum of 2^(logit - greatest). Logits are unit * scores; scores stand as wgmma and mma leave them:
 * [8 columns][row][2 of them]. NaN stays out of maxima, as it shows in the sum. */
struct row_softmax {
    float greatest[2] = {-INFINITY, -INFINITY};
    float sum[2] = {0, 0};

    /* Raises the maxima to those of the logits, where these are greater; `rescale` is what earlier
     * weights are worth then. */
    template <int held>
    __device__ inline void raise(const float (&logits)[held], float (&rescale)[2]) {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            float part[4]; // a quarter of the latency
#pragma unroll
            for (int i = 0; i < held / 2; i++) {
                const float logit = logits[i / 2 * 4 + 2 * row + i % 2];
                part[i % 4] = i < 4 ? logit : fmaxf(part[i % 4], logit);
            }
            const float most = quad_max(fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3])));
            const bool exceeds = most > greatest[row];
            rescale[row] = exceeds ? ex2_approx(greatest[row] - most) : 1;
            greatest[row] = exceeds ? most : greatest[row];
            sum[row] *= rescale[row];
        }
    }

    /* weights = 2^(logit - greatest), in pairs, added to the sum. If `checked`: false, and nothing
     * is added, where the warp has to raise its maxima first. A maximum that is too low shows in
     * the sums, so that none need be looked for. */
    template <typename element, bool checked, int held>
    __device__ inline bool weigh(const float (&scores)[held], float unit,
                                 uint32_t (&weights)[held / 8][4]) {
        const float base[2] = {base_of(greatest[0]), base_of(greatest[1])};
        float part[2][2] = {{0, 0}, {0, 0}}; // of each row two: half the latency
#pragma unroll
        for (int i = 0; i < held; i += 8) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int row = k % 2;
                const float low = ex2_approx(fmaf(scores[i + 2 * k], unit, -base[row]));
                const float high = ex2_approx(fmaf(scores[i + 2 * k + 1], unit, -base[row]));
                part[row][0] += low;
                part[row][1] += high;
                weights[i / 8][k] = element_type<element>::pack(low, high);
            }
        }
        const float both[2] = {part[0][0] + part[0][1], part[1][0] + part[1][1]};
        const bool is_low =
            fmaxf(both[0], both[1]) > most_sum ||
            !(fmaxf(fabsf(greatest[0]), fabsf(greatest[1])) < most_maximum); // nor -inf
        if (checked && __any_sync(~0u, is_low))
            return false;
        sum[0] += both[0];
        sum[1] += both[1];
        return true;
    }
};

#endif
