/* fdma_merge() and its gradients, on any device from compute capability 8.0: merges the partial
 * results of attention over two disjoint sets of keys. Memory bandwidth limits both kernels.
 *
 * Source: arXiv:2205.14135, section 3.1; docs/algorithm.md, backward. */
#include "cuda/device/grid.cuh"
#include "cuda/device/host.cuh"

struct partial_view {
    head_view out, dout;
    number_view<float> lse, dlse;
};

struct merge_params {
    partial_view partial[2];
    partial_view merged;      // lse and dlse may be absent
    int64_t heads, all_heads; // of a sequence, of all sequences
    int32_t q_len, head_dim;
    bool aligned; // rows of every out and dout can be copied 16 bytes at a time
};

/* The lse of a merged row, and the weights of the two partial results in it. */
struct merge_weights {
    float lse;
    float of[2]; // 0: the partial result is empty or negligible, and its out is not read
};

/* The lse or dlse of query i. `head` numbers the query heads of all sequences. */
__device__ static float *lse_at(const number_view<float> &view, const merge_params &params,
                                int64_t head, int64_t i) {
    return view.at(head / params.heads, head % params.heads) + i;
}

__device__ static merge_weights find_weights(const merge_params &params, int64_t head, int64_t i) {
    const float a = *lse_at(params.partial[0].lse, params, head, i);
    const float b = *lse_at(params.partial[1].lse, params, head, i);
    const float most = fmaxf(a, b);
    if (isnan(a) || isnan(b))
        return {NAN, {NAN, NAN}};
    if (most == -INFINITY)
        return {-INFINITY, {0, 0}};
    const float x = expf(a - most), y = expf(b - most), sum = x + y;
    return {most + logf(sum), {x / sum, y / sum}};
}

/* Merges eight channels of a row. out: the channels of each partial result, or 0 if its weight is
 * 0. */
template <typename element>
__device__ static void merge_channels(float (&merged)[vec_channels], float (&out)[2][vec_channels],
                                      const merge_params &params, const merge_weights &weights,
                                      int64_t head, int64_t i, int32_t d) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int x = 0; x < vec_channels; x++)
            out[n][x] = 0;
        if (weights.of[n] != 0)
            load_vec(out[n],
                     row_of<const element>(params.partial[n].out, head, params.heads, i) + d,
                     params.aligned);
    }
#pragma unroll
    for (int x = 0; x < vec_channels; x++)
        merged[x] = fmaf(weights.of[0], out[0][x], weights.of[1] * out[1][x]);
}

/* Merges all rows: row_lanes lanes work on one row. */
template <typename element>
static __global__ void __launch_bounds__(row_threads) merge_rows(const merge_params params) {
    const int64_t head = head_of_block();
    const int32_t i = blockIdx.x * block_rows + threadIdx.x / row_lanes;
    const int32_t lane = threadIdx.x % row_lanes;
    if (head >= params.all_heads || i >= params.q_len)
        return;
    const merge_weights weights = find_weights(params, head, i);
    for (int32_t d = lane * vec_channels; d < params.head_dim; d += row_lanes * vec_channels) {
        float merged[vec_channels], out[2][vec_channels];
        merge_channels<element>(merged, out, params, weights, head, i, d);
        store_vec(row_of<element>(params.merged.out, head, params.heads, i) + d, merged,
                  params.aligned);
    }
    if (lane == 0 && params.merged.lse.data != NULL)
        *lse_at(params.merged.lse, params, head, i) = weights.lse;
}

/* Writes eight channels of dout of both partial results. sums[n] += <dout, out[n] - merged> over
 * these channels. */
template <typename element>
__device__ static void differentiate_channels(float (&sums)[2], const merge_params &params,
                                              const merge_weights &weights, int64_t head, int64_t i,
                                              int32_t d) {
    float dout[vec_channels], merged[vec_channels], out[2][vec_channels];
    load_vec(dout, row_of<const element>(params.merged.dout, head, params.heads, i) + d,
             params.aligned);
    merge_channels<element>(merged, out, params, weights, head, i, d);
#pragma unroll
    for (int n = 0; n < 2; n++) {
        float to[vec_channels];
#pragma unroll
        for (int x = 0; x < vec_channels; x++) {
            sums[n] = fmaf(dout[x], out[n][x] - merged[x], sums[n]);
            to[x] = weights.of[n] != 0 ? weights.of[n] * dout[x] : 0;
        }
        store_vec(row_of<element>(params.partial[n].dout, head, params.heads, i) + d, to,
                  params.aligned);
    }
}

template <typename element>
static __global__ void __launch_bounds__(row_threads)
    differentiate_rows(const merge_params params) {
    const int64_t head = head_of_block();
    const int32_t i = blockIdx.x * block_rows + threadIdx.x / row_lanes;
    const int32_t lane = threadIdx.x % row_lanes;
    // no early return: row_sum() needs all lanes of the warp
    const bool there = head < params.all_heads && i < params.q_len;
    merge_weights weights = {};
    float sums[2] = {};
    if (there) {
        weights = find_weights(params, head, i);
        for (int32_t d = lane * vec_channels; d < params.head_dim; d += row_lanes * vec_channels)
            differentiate_channels<element>(sums, params, weights, head, i, d);
    }
    const float all[2] = {row_sum(sums[0]), row_sum(sums[1])};
    if (!there || lane != 0)
        return;
    const number_view<float> &of_merged = params.merged.dlse;
    const float dlse = of_merged.data != NULL ? *lse_at(of_merged, params, head, i) : 0;
    for (int n = 0; n < 2; n++)
        *lse_at(params.partial[n].dlse, params, head, i) =
            weights.of[n] != 0 ? weights.of[n] * (dlse + all[n]) : 0;
}

static partial_view partial_view_of(const fdma_partial &partial) {
    return {view_of(&partial.out), view_of(&partial.dout), numbers_of<float>(&partial.lse),
            numbers_of<float>(&partial.dlse)};
}

/* The merged result. An operation has either its out or its dout. */
static fdma_partial merged_of(const fdma_problem *problem) {
    return {problem->out, problem->lse, problem->dout, problem->dlse};
}

static bool is_aligned(const partial_view &view) {
    return is_aligned(view.out) && is_aligned(view.dout); // an absent tensor counts as aligned
}

static merge_params describe(const fdma_problem *problem) {
    merge_params params = {};
    for (int n = 0; n < 2; n++)
        params.partial[n] = partial_view_of(problem->partial[n]);
    params.merged = partial_view_of(merged_of(problem));
    params.heads = problem->q_heads;
    params.all_heads = problem->batch * problem->q_heads;
    params.q_len = (int32_t)problem->q_len;
    params.head_dim = (int32_t)problem->head_dim;
    params.aligned =
        is_aligned(params.partial[0]) && is_aligned(params.partial[1]) && is_aligned(params.merged);
    return params;
}

static bool has_float64(const fdma_partial &partial) {
    return partial.lse.dtype == FDMA_FLOAT64 || partial.dlse.dtype == FDMA_FLOAT64;
}

static const char *refuses(const fdma_problem *problem) {
    // so that the row numbers of the last thread block, also past the end, fit int32_t
    const int64_t most_queries = INT32_MAX - 1024;
    if (problem->dtype == FDMA_FLOAT64 || has_float64(merged_of(problem)) ||
        has_float64(problem->partial[0]) || has_float64(problem->partial[1]))
        return "float64 tensors; supported: float32, float16, bfloat16; for lse, float32";
    if (problem->q_len > most_queries)
        return "more than 2^31 - 1025 queries";
    return fdma_refuses_before_sm80(problem);
}

template <typename element> static fdma_status run_type(const fdma_problem *problem) {
    const merge_params params = describe(problem);
    const launch_shape shape = over_rows(params.q_len, params.all_heads);
    if (params.q_len == 0 || params.all_heads == 0)
        return FDMA_OK;
    if (problem->operation == operation_merge)
        return launch("merge", merge_rows<element>, shape, problem, params);
    return launch("merge_backward", differentiate_rows<element>, shape, problem, params);
}

static fdma_status run(const fdma_problem *problem) {
    if (problem->dtype == FDMA_FLOAT32)
        return run_type<float>(problem);
    return problem->dtype == FDMA_FLOAT16 ? run_type<__half>(problem)
                                          : run_type<__nv_bfloat16>(problem);
}

FDMA_CUDA_TABLE(fdma_cuda_sm80_merge,
                {"cuda/sm80", operation_merge, fdma_missing_sm80, refuses, no_workspace, run, true,
                 0},
                {"cuda/sm80", operation_merge_backward, fdma_missing_sm80, refuses, no_workspace,
                 run, true, 0});
