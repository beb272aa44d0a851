/* What score kernels work from. dt_proj becomes their weights: in v's type, aligned to 16 bytes, in
 * the workspace where it is not that itself. */
#ifndef FDMA_CUDA_SCORE_SCORE_CUH
#define FDMA_CUDA_SCORE_SCORE_CUH

#include "cuda/device/host.cuh"

static constexpr int chunk_channels = 8; // of 16 bytes

struct score_params {
    const void *v, *dt_proj, *a;            // a NULL: the scores are the products themselves
    int64_t v_batch, v_row, v_head, dt_row; // strides in elements
    const uint8_t *key_valid;
    int64_t valid_batch;
    float *score, *bias;
    int64_t score_batch, score_head, bias_batch, bias_head;
    const void *weights; // [parts][kv_heads][channels] in v's type: dt_proj or in the workspace
    int64_t weight_row, weight_part;
    float *scales; // what the weights of each kv head were divided by; NULL: 1
    int64_t batch, kv_len;
    int32_t kv_heads, head_dim, channels, parts;
    int32_t key_tiles, sequence_tiles; // tiles of keys: all, of a sequence
    int32_t key_warps;                 // warps of a block that take keys
    int32_t head_blocks;               // blocks of kv heads, which a tile goes through in turn
    int32_t panels, panel_steps;       // the weights in shared memory: one panel, or two at a time
    int32_t stages;                    // slots of a warp's ring
    bool is_resident;                  // the only panel holds all weights
    fdma_bias_form bias_form;
    bool wide_dt_proj, wide_a; // float32, beside v's type
    bool is_aligned;           // v may be loaded 16 bytes at a time
};

__device__ static inline float softplus(float x) {
    return isnan(x) ? x : fmaxf(x, 0) + log1pf(expf(-fabsf(x)));
}

/* The products of v and dt_proj alone: params.score is [batch][kv_heads][kv_len] in the arena; it
 * and params.weights may be used after this. */
score_params fdma_cuda_plan_products(const fdma_problem *problem, fdma_arena *arena);
fdma_status fdma_cuda_run_products(const fdma_problem *problem, const score_params &params);

#endif
