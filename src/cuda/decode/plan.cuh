/* How decode splits the keys of a (b, g), and the partial results that its two kernels hand
 * over. */
#ifndef FDMA_CUDA_DECODE_PLAN_CUH
#define FDMA_CUDA_DECODE_PLAN_CUH

#include "cuda/mma/keys.cuh"

#ifndef FDMA_HEAD_DIM
#define FDMA_HEAD_DIM 128 // an editor that opens this file alone
#endif

static constexpr int64_t most_queries = 16;                              // of a decode call
static constexpr int64_t least_keys = 256;                               // of a split
static constexpr int64_t usual_splits = FDMA_HEAD_DIM <= 128 ? 128 : 64; // measured on an H200
static constexpr int64_t usual_keys = 131072 / usual_splits; // of a split of a longer sequence
static constexpr int64_t most_splits = 512; // enough for one kv head to fill a device

/* Splits depend on kv_len, or on the size of a list, alone. out and sum of a partial result are
 * relative to its row_max. */
struct split_plan {
    int32_t count;
    int32_t keys;  // of a split
    float *out;    // [batch * kv_heads][q_len * group][count][head_dim]
    float2 *stats; // [batch * kv_heads][q_len * group][count]: row_max, row_sum
};

#endif
