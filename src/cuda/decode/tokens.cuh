/* The first of the two kernels of fdma_decode() on 9.0: a thread block computes the scores of the
 * new tokens of one (b, g), and decides which rows they take. It adds in the order of
 * score/score.cu, so the bits are the same. */
#pragma once

#include "cuda/decode/evict.cuh"
#include "cuda/score/score.cuh"

enum { most_cluster_rows = 4096 }; // of a cache

static constexpr int token_warps = 8, token_threads = 32 * token_warps;
static constexpr int mma_tokens = 16, mma_channels = 16;
static constexpr int sum_channels = 64; // summed by a tensor core, as in score.cu
static constexpr int most_sums = 128;   // of a dot product

/* The inputs of the scores. The channels of all heads are adjacent in a row of v. dt_proj has v's
 * type, and two channels of either can be loaded at once. */
struct token_scores {
    const void *dt_proj, *a, *dt_bias; // dt_proj NULL: the scores are given
    int64_t dt_row;
    int32_t channels;
    bool wide_a, wide_dt_bias; // are float32; otherwise of v's type
};

/* The products of sum_channels channels from `channel` on, for the tokens from `first` on. They are
 * column 0 of the result. */
template <typename element>
__device__ static void multiply_channels(float (&sums)[4], const char *tokens, int64_t stride,
                                         int32_t count, const char *weights, int32_t channel,
                                         int32_t channels) {
    constexpr int steps = sum_channels / mma_channels;
    const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
    uint32_t left[steps][4], right[steps][2];
#pragma unroll
    for (int step = 0; step < steps; step++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int32_t c = channel + step * mma_channels + half * 8 + column;
            const bool there = c < channels;
            right[step][half] = there && row == 0 ? *(const uint32_t *)(weights + 2 * c) : 0;
#pragma unroll
            for (int down = 0; down < 2; down++) {
                const int32_t token = row + down * 8;
                left[step][half * 2 + down] =
                    there && token < count ? *(const uint32_t *)(tokens + 2 * (token * stride + c))
                                           : 0;
            }
        }
#pragma unroll
    for (int step = 0; step < steps; step++)
        mma_m16n8k16<element>(sums, left[step], right[step][0], right[step][1]);
}

struct token_memory {
    float sums[most_sums][mma_tokens];
    int32_t expiry[most_new_tokens];
    evict_memory<token_threads> evict;
};

template <typename element>
__device__ static void score_tokens(token_memory &shared, const head_view &v,
                                    const token_scores &from, float *score, int32_t new_len,
                                    int32_t b, int32_t g) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const char *const weights = (const char *)from.dt_proj + 2 * g * from.dt_row;
    const float a = load_of_head<element>(from.a, from.wide_a, g);
    const float dt_bias =
        from.dt_bias != NULL ? load_of_head<element>(from.dt_bias, from.wide_dt_bias, g) : 0;
    const int32_t count = (from.channels + sum_channels - 1) / sum_channels;
    for (int32_t first = 0; first < new_len; first += mma_tokens) {
        for (int32_t n = warp; n < count; n += token_warps) {
            float products[4] = {};
            multiply_channels<element>(products, rows_of(v, b, 0) + 2 * first * v.row, v.row,
                                       new_len - first, weights, n * sum_channels, from.channels);
            if (lane % 4 == 0) {
                shared.sums[n][lane / 4] = products[0];
                shared.sums[n][lane / 4 + 8] = products[2];
            }
        }
        __syncthreads();
        const int32_t token = first + threadIdx.x;
        if (threadIdx.x < mma_tokens && token < new_len) {
            float dot = 0;
            for (int32_t n = 0; n < count; n++)
                dot += shared.sums[n][threadIdx.x];
            score[token] = a * softplus(dot + dt_bias);
        }
        __syncthreads();
    }
}

/* Records when each token is evicted. The result for the rows follows from the tokens' slots. */
struct token_marks {
    int32_t *expiry;

    __device__ void evict_row(int32_t, int32_t) const {}
    __device__ void evict_token(int32_t token, int32_t by) const { expiry[token] = by; }
    __device__ void add_token(int32_t token, bool is_kept) const {
        expiry[token] = is_kept ? INT32_MAX : -1;
    }
};

template <typename element>
static __global__ void __launch_bounds__(token_threads)
    place_tokens(const __grid_constant__ decode_plan plan, const __grid_constant__ head_view v,
                 const __grid_constant__ token_scores from) {
    __shared__ token_memory shared;
    const int32_t b = blockIdx.x / plan.kv_heads, g = blockIdx.x % plan.kv_heads;
    evict_state<held_rows<token_threads, most_cluster_rows / token_threads>> state;
    griddepcontrol_wait(); // for the output of the caller's kernels
    griddepcontrol_launch_dependents();
    const decode_stream stream = stream_of(plan, b);
    float *const score = plan.new_score.at(b, g);
    if (threadIdx.x == 0)
        plan.streams[blockIdx.x] = stream;
    if (stream.tokens == 0)
        return;
    state.rows.load(plan.score.at(stream.sequence, g), plan.position.at(stream.sequence, g),
                    plan.rows);
    if (from.dt_proj != NULL)
        score_tokens<element>(shared, v, from, score, plan.new_len, b, g);
    state.rows.rank(plan.rows);
    add_tokens(shared.evict, state, plan, stream, score, token_marks{shared.expiry});
    const int64_t token = threadIdx.x, at = (int64_t)blockIdx.x * plan.new_len + token;
    if (token < stream.tokens) {
        plan.slot[at] = shared.evict.slot[token];
        plan.expiry[at] = shared.expiry[token];
    }
}
