/* The parameters of the kernels of score and score_backward. Their weights are dt_proj in v's type,
 * aligned to 16 bytes: dt_proj itself if it is that already, otherwise a copy in the workspace. A
 * float32 weight becomes a sum of limbs, which are numbers of v's type. */
#pragma once

#include "core/integers.h"
#include "cuda/device/element.cuh"
#include "cuda/device/host.cuh"

struct score_params {
    head_view v;
    const void *dt_proj, *a; // a NULL: scores are dt
    const void *dt_bias;     // NULL: 0
    int64_t dt_row;
    const uint8_t *key_valid;
    int64_t valid_batch;
    number_view<float> score, bias;
    const void *weights; // [limbs][kv_heads][channels] in v's type: dt_proj, or a copy in the
                         // workspace
    int64_t weight_row, weight_limb;
    float *scales; // divisors of the weights of each kv head; NULL: 1
    int64_t batch, kv_len;
    int32_t kv_heads, head_dim, channels, limbs;
    int32_t key_tiles, sequence_tiles; // tiles of keys: of the call, of a sequence
    int32_t key_warps;                 // warps of a thread block that take keys
    int32_t head_blocks;               // blocks of kv heads; each takes a round of a tile
    int32_t panels, panel_steps;       // panels of the weights, and steps of a panel
    int32_t stages;                    // of a warp's ring
    bool is_resident;                  // one panel stays in shared memory; otherwise two alternate
    bool is_split;                     // score_keys() makes `weights` itself
    fdma_bias_form bias_form;
    bool wide_dt_proj, wide_a, wide_dt_bias; // are float32; otherwise of v's type
    bool is_aligned;                         // v may be loaded 16 bytes at a time
};

/* The number of kv head g, in float32 or in v's type. */
template <typename T> __device__ static float load_of_head(const void *from, bool is_wide, int g) {
    return is_wide ? ((const float *)from)[g] : to_float(((const T *)from)[g]);
}

/* A float32 weight is a sum of limbs. A limb has the upper bits of the remainder after the limbs
 * before it, which it is taken from. */
static constexpr int weight_limbs = 3;

template <typename T> __device__ static float take_limb(float &remainder) {
    const float limb = to_float(from_float_toward_zero<T>(remainder));
    remainder -= limb;
    return limb;
}

/* The power of two that divides the weights of a kv head in float16, so that the largest, `most`,
 * is near 2^14 and few limbs are subnormal. bfloat16, with the exponents of float32, needs none. */
__device__ static float weight_scale(float most) {
    const bool is_scaled = most > 0 && most < INFINITY;
    return is_scaled ? exp2f(fmaxf(floorf(log2f(most)) - 14, -126)) : 1;
}

/* The dot product of a row of v and the float32 weights of a kv head, channel by channel: with
 * limbs, inf * weight is NaN if a limb of the weight is 0. `head`: the distance of two heads in the
 * row. */
template <typename T>
__device__ static __noinline__ float dot_sequentially(const T *row, int64_t head, int32_t kv_heads,
                                                      int32_t head_dim, const float *weights) {
    float sum = 0;
    for (int32_t other = 0; other < kv_heads; other++)
        for (int32_t d = 0; d < head_dim; d++)
            sum += to_float(row[other * head + d]) * weights[other * head_dim + d];
    return sum;
}

__device__ static float softplus(float x) {
    return isnan(x) ? x : fmaxf(x, 0) + log1pf(expf(-fabsf(x)));
}

/* Plans fdma_score() for fdma_cuda_run_products(). */
score_params fdma_cuda_plan_score(const fdma_problem *problem, fdma_arena *arena);

/* Plans and runs dt alone, for score_backward. The result is params.score,
 * [batch][kv_heads][kv_len] in the arena. It and params.weights remain valid afterwards. */
score_params fdma_cuda_plan_products(const fdma_problem *problem, fdma_arena *arena);
fdma_status fdma_cuda_run_products(const fdma_problem *problem, const score_params &params);
