/* fdma_merge() and its gradients, on any device from compute capability 8.0: the partial results of
 * attention over two disjoint sets of keys become one. Both kernels work element by element and run
 * at the speed of memory.
 *
 * Source: arXiv:2205.14135, section 3.1; docs/algorithm.md, backward. */
#include "cuda/device/rows.cuh"

/* [batch, heads, length] float32. */
struct lse_view {
    float *data;
    int64_t batch, head;
};

struct partial_view {
    head_view out, dout;
    lse_view lse, dlse;
};

struct merge_params {
    partial_view partial[2];
    head_view out, dout;
    lse_view lse, dlse; // data NULL: lse is not wanted, there is no dlse
    int64_t heads, all_heads;
    int32_t q_len, head_dim;
    bool aligned; // all tensors of rank 4
};

/* The lse of a merged row, and the weights of the two partial results in it. */
struct merge_weights {
    float lse;
    float of[2]; // 0: the partial result is empty, and is not read
};

__device__ static inline float *lse_at(const lse_view &view, const merge_params &params,
                                       int64_t head, int64_t i) {
    return view.data + head / params.heads * view.batch + head % params.heads * view.head + i;
}

__device__ static inline merge_weights find_weights(const merge_params &params, int64_t head,
                                                    int64_t i) {
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

/* Eight channels of the merged row, and of the partial results; those of an empty one are 0. */
template <typename element>
__device__ static inline void
merge_channels(float (&merged)[vec_channels], float (&out)[2][vec_channels],
               const merge_params &params, const merge_weights &weights, int64_t head, int64_t i,
               int32_t d) {
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

/* Merges rows. row_lanes lanes take a row. */
template <typename element>
__global__ void __launch_bounds__(row_threads) merge_rows(const merge_params params) {
    const int64_t head = head_of_block();
    const int32_t i = blockIdx.x * block_rows + threadIdx.x / row_lanes;
    const int32_t lane = threadIdx.x % row_lanes;
    if (head >= params.all_heads || i >= params.q_len)
        return;
    const merge_weights weights = find_weights(params, head, i);
    for (int32_t d = lane * vec_channels; d < params.head_dim; d += row_lanes * vec_channels) {
        float merged[vec_channels], out[2][vec_channels];
        merge_channels<element>(merged, out, params, weights, head, i, d);
        store_vec(row_of<element>(params.out, head, params.heads, i) + d, merged, params.aligned);
    }
    if (lane == 0 && params.lse.data != nullptr)
        *lse_at(params.lse, params, head, i) = weights.lse;
}

/* Writes eight channels of dout of both partial results. Adds to `sums` what these channels
 * contribute to <dout, out - merged> of each. */
template <typename element>
__device__ static inline void differentiate_channels(float (&sums)[2], const merge_params &params,
                                                     const merge_weights &weights, int64_t head,
                                                     int64_t i, int32_t d) {
    float dout[vec_channels], merged[vec_channels], out[2][vec_channels];
    load_vec(dout, row_of<const element>(params.dout, head, params.heads, i) + d, params.aligned);
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

/* The gradients of merge_rows(). */
template <typename element>
__global__ void __launch_bounds__(row_threads) differentiate_rows(const merge_params params) {
    const int64_t head = head_of_block();
    const int32_t i = blockIdx.x * block_rows + threadIdx.x / row_lanes;
    const int32_t lane = threadIdx.x % row_lanes;
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
    const float dlse = params.dlse.data != nullptr ? *lse_at(params.dlse, params, head, i) : 0;
    for (int n = 0; n < 2; n++)
        *lse_at(params.partial[n].dlse, params, head, i) =
            weights.of[n] != 0 ? weights.of[n] * (dlse + all[n]) : 0;
}

static lse_view lse_of(const fdma_tensor *tensor) {
    return {(float *)tensor->data, tensor->stride[0], tensor->stride[1]};
}

static merge_params describe(const fdma_problem *problem) {
    const fdma_partial *const partials = problem->partial;
    const bool is_backward = problem->operation == operation_merge_backward;
    merge_params params = {};
    params.out = view_of(&problem->out);
    params.dout = view_of(&problem->dout);
    params.lse = lse_of(&problem->lse);
    params.dlse = lse_of(&problem->dlse);
    params.heads = problem->q_heads;
    params.all_heads = problem->batch * problem->q_heads;
    params.q_len = (int32_t)problem->q_len;
    params.head_dim = (int32_t)problem->head_dim;
    params.aligned = is_aligned(is_backward ? params.dout : params.out);
    for (int n = 0; n < 2; n++) {
        params.partial[n] = {view_of(&partials[n].out), view_of(&partials[n].dout),
                             lse_of(&partials[n].lse), lse_of(&partials[n].dlse)};
        params.aligned = params.aligned && is_aligned(params.partial[n].out) &&
                         (!is_backward || is_aligned(params.partial[n].dout));
    }
    return params;
}

/* Whether a tensor of lse is float64. */
static bool is_double(const fdma_tensor *tensor) { return tensor->dtype == FDMA_FLOAT64; }

static const char *refuses(const fdma_problem *problem) {
    const fdma_partial *const partials = problem->partial;
    if (problem->dtype == FDMA_FLOAT64 || is_double(&problem->lse) || is_double(&problem->dlse) ||
        is_double(&partials[0].lse) || is_double(&partials[1].lse) ||
        is_double(&partials[0].dlse) || is_double(&partials[1].dlse))
        return "float64 tensors, supported: float32, float16, bfloat16, and float32 lse";
    if (problem->q_len > INT32_MAX - 1024)
        return "more than 2^31 queries";
    return fdma_refuses_before_sm80(problem);
}

static size_t workspace(const fdma_problem *) { return 0; }

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

static const fdma_kernel kernels[] = {
    {"cuda/sm80", operation_merge, fdma_missing_sm80, refuses, workspace, run, true},
    {"cuda/sm80", operation_merge_backward, fdma_missing_sm80, refuses, workspace, run, true},
};

extern "C" const kernel_table fdma_cuda_sm80_merge = {kernels, sizeof kernels / sizeof kernels[0]};
