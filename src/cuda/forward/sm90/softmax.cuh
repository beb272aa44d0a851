/* The online softmax of a consumer's rows, which are held as accumulators of wgmma: two rows per
 * thread. */
#pragma once

#include "cuda/device/element.cuh"
#include "cuda/device/softmax.cuh"

/* The most that a thread's weights of a row may sum to in one key block before row_max is raised:
 * large enough that sums are almost never rescaled, and small enough for every weight to fit
 * float16. */
static constexpr float most_sum = 32768;

/* From here on float32 has no fractions, and the rounding error of a product may exceed the
 * exponents of weights. The product must then be rounded before row_max is subtracted, so that the
 * two errors cancel; a fused multiply-add would not round it. */
static constexpr float most_row_max = 1 << 24;

/* What is subtracted from the logits of a row: not -inf, because -inf - -inf is NaN. */
__device__ static float base_of(float row_max) { return row_max == -INFINITY ? 0 : row_max; }

/* The state of a thread's two rows: row_max, and this thread's share of row_sum, the sum of
 * 2^(logit - row_max). Logits are unit * products. Both are in the order of accumulators: [8
 * columns][row][2 columns]. NaN never becomes a maximum; it shows in the sum. */
struct row_softmax {
    float row_max[2] = {-INFINITY, -INFINITY};
    float row_sum[2] = {0, 0};

    /* Raises row_max to the maximum of the logits, if that is greater. rescale: the factor for all
     * earlier weights. */
    template <int registers>
    __device__ void raise(const float (&logits)[registers], float (&rescale)[2]) {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            float most[4]; // four independent maxima, to cut the latency to a quarter
#pragma unroll
            for (int i = 0; i < registers / 2; i++) {
                const float logit = logits[i / 2 * 4 + 2 * row + i % 2];
                most[i % 4] = i < 4 ? logit : fmaxf(most[i % 4], logit);
            }
            const float maximum = quad_max(fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])));
            const bool exceeds = maximum > row_max[row];
            rescale[row] = exceeds ? ex2_approx(row_max[row] - maximum) : 1;
            row_max[row] = exceeds ? maximum : row_max[row];
            row_sum[row] *= rescale[row];
        }
    }

    /* weights = 2^(logit - row_max), in pairs, and adds them to row_sum. If `checked`: returns
     * false and adds nothing if the warp must raise row_max first. It need not look for the maximum
     * of the logits, since a row_max that is too low shows in the sum of the weights. */
    template <typename element, bool checked, int registers>
    __device__ bool weigh(const float (&products)[registers], float unit,
                          uint32_t (&weights)[registers / 8][4]) {
        const float base[2] = {base_of(row_max[0]), base_of(row_max[1])};
        float partial[2][2] = {{0, 0}, {0, 0}}; // two sums per row, to halve the latency
#pragma unroll
        for (int i = 0; i < registers; i += 8) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int row = k % 2;
                const float low = ex2_approx(fmaf(products[i + 2 * k], unit, -base[row]));
                const float high = ex2_approx(fmaf(products[i + 2 * k + 1], unit, -base[row]));
                partial[row][0] += low;
                partial[row][1] += high;
                weights[i / 8][k] = element_type<element>::pack(low, high);
            }
        }
        const float sum[2] = {partial[0][0] + partial[0][1], partial[1][0] + partial[1][1]};
        const bool is_low =
            fmaxf(sum[0], sum[1]) > most_sum ||
            !(fmaxf(fabsf(row_max[0]), fabsf(row_max[1])) < most_row_max); // true for -inf too
        if (checked && __any_sync(~0u, is_low))
            return false;
        row_sum[0] += sum[0];
        row_sum[1] += sum[1];
        return true;
    }
};
