/* Attention over two disjoint sets of keys as one, and the gradients of that, on any device from
 * compute capability 8.0: element by element, at the speed of memory.
 *
 * Source: arXiv:2205.14135, section 3.1; docs/algorithm.md, backward. */
#include "cuda/device/chunk.cuh"

/* [batch, heads, length] float32. */
struct lse_view {
    float *data;
    int64_t batch, head;
};

struct merge_part {
    head_view out, dout;
    lse_view lse, dlse;
};

struct merge_params {
    merge_part part[2];
    head_view out, dout;
    lse_view lse, dlse; // data NULL: not wanted, none
    int64_t heads, all_heads;
    int32_t q_len, head_dim;
    bool aligned; // all tensors of rows
};

/* Shares of the parts in their sum. */
struct merge_shares {
    float lse;
    float of[2]; // 0: the part is empty, and not read
};

__device__ static inline float *lse_at(const lse_view &view, const merge_params &params,
                                       int64_t head, int64_t i) {
    return view.data + head / params.heads * view.batch + head % params.heads * view.head + i;
}

__device__ static inline merge_shares find_shares(const merge_params &params, int64_t head,
                                                  int64_t i) {
    const float a = *lse_at(params.part[0].lse, params, head, i);
    const float b = *lse_at(params.part[1].lse, params, head, i);
    const float most = fmaxf(a, b);
    if (isnan(a) || isnan(b))
        return {NAN, {NAN, NAN}};
    if (most == -INFINITY)
        return {-INFINITY, {0, 0}};
    const float x = expf(a - most), y = expf(b - most), sum = x + y;
    return {most + logf(sum), {x / sum, y / sum}};
}

/* Eight channels of the merged row; those of an empty part are 0. */
template <typename element>
__device__ static inline void merge_chunk(float (&merged)[chunk], float (&out)[2][chunk],
                                          const merge_params &params, const merge_shares &shares,
                                          int64_t head, int64_t i, int32_t d) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int x = 0; x < chunk; x++)
            out[n][x] = 0;
        if (shares.of[n] != 0)
            load_chunk(out[n], row_of<const element>(params.part[n].out, head, params.heads, i) + d,
                       params.aligned);
    }
#pragma unroll
    for (int x = 0; x < chunk; x++)
        merged[x] = fmaf(shares.of[0], out[0][x], shares.of[1] * out[1][x]);
}

template <typename element>
__global__ void __launch_bounds__(row_threads) merge_rows(const merge_params params) {
    const int64_t head = head_of_block();
    const int32_t i = blockIdx.x * block_rows + threadIdx.x / row_lanes;
    const int32_t lane = threadIdx.x % row_lanes;
    if (head >= params.all_heads || i >= params.q_len)
        return;
    const merge_shares shares = find_shares(params, head, i);
    for (int32_t d = lane * chunk; d < params.head_dim; d += row_lanes * chunk) {
        float merged[chunk], out[2][chunk];
        merge_chunk<element>(merged, out, params, shares, head, i, d);
        store_chunk(row_of<element>(params.out, head, params.heads, i) + d, merged, params.aligned);
    }
    if (lane == 0 && params.lse.data != nullptr)
        *lse_at(params.lse, params, head, i) = shares.lse;
}

/* Eight channels of both parts' dout; adds to <dout, out of the part - merged>. */
template <typename element>
__device__ static inline void split_chunk(float (&sums)[2], const merge_params &params,
                                          const merge_shares &shares, int64_t head, int64_t i,
                                          int32_t d) {
    float dout[chunk], merged[chunk], out[2][chunk];
    load_chunk(dout, row_of<const element>(params.dout, head, params.heads, i) + d, params.aligned);
    merge_chunk<element>(merged, out, params, shares, head, i, d);
#pragma unroll
    for (int n = 0; n < 2; n++) {
        float to[chunk];
#pragma unroll
        for (int x = 0; x < chunk; x++) {
            sums[n] = fmaf(dout[x], out[n][x] - merged[x], sums[n]);
            to[x] = shares.of[n] != 0 ? shares.of[n] * dout[x] : 0;
        }
        store_chunk(row_of<element>(params.part[n].dout, head, params.heads, i) + d, to,
                    params.aligned);
    }
}

template <typename element>
__global__ void __launch_bounds__(row_threads) split_rows(const merge_params params) {
    const int64_t head = head_of_block();
    const int32_t i = blockIdx.x * block_rows + threadIdx.x / row_lanes;
    const int32_t lane = threadIdx.x % row_lanes;
    const bool there = head < params.all_heads && i < params.q_len;
    merge_shares shares = {};
    float sums[2] = {};
    if (there) {
        shares = find_shares(params, head, i);
        for (int32_t d = lane * chunk; d < params.head_dim; d += row_lanes * chunk)
            split_chunk<element>(sums, params, shares, head, i, d);
    }
    const float all[2] = {row_sum(sums[0]), row_sum(sums[1])};
    if (!there || lane != 0)
        return;
    const float dlse = params.dlse.data != nullptr ? *lse_at(params.dlse, params, head, i) : 0;
    for (int n = 0; n < 2; n++)
        *lse_at(params.part[n].dlse, params, head, i) =
            shares.of[n] != 0 ? shares.of[n] * (dlse + all[n]) : 0;
}

static lse_view lse_of(const fdma_tensor *tensor) {
    return {(float *)tensor->data, tensor->stride[0], tensor->stride[1]};
}

static merge_params describe(const fdma_problem *problem) {
    const fdma_partial *const parts = problem->part;
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
        params.part[n] = {view_of(&parts[n].out), view_of(&parts[n].dout), lse_of(&parts[n].lse),
                          lse_of(&parts[n].dlse)};
        params.aligned = params.aligned && is_aligned(params.part[n].out) &&
                         (!is_backward || is_aligned(params.part[n].dout));
    }
    return params;
}

/* Whether a tensor of lse is float64. */
static bool is_double(const fdma_tensor *tensor) { return tensor->dtype == FDMA_FLOAT64; }

static const char *refuses(const fdma_problem *problem) {
    const fdma_partial *const parts = problem->part;
    if (problem->dtype == FDMA_FLOAT64 || is_double(&problem->lse) || is_double(&problem->dlse) ||
        is_double(&parts[0].lse) || is_double(&parts[1].lse) || is_double(&parts[0].dlse) ||
        is_double(&parts[1].dlse))
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
    return launch("merge_backward", split_rows<element>, shape, problem, params);
}

static fdma_status run(const fdma_problem *problem) {
    if (problem->dtype == FDMA_FLOAT32)
        return run_type<float>(problem);
    return problem->dtype == FDMA_FLOAT16 ? run_type<__half>(problem)
                                          : run_type<__nv_bfloat16>(problem);
}

static const fdma_kernel rows[] = {
    {"cuda/sm80", operation_merge, fdma_missing_sm80, refuses, workspace, run, true},
    {"cuda/sm80", operation_merge_backward, fdma_missing_sm80, refuses, workspace, run, true},
};

extern "C" const kernel_table fdma_cuda_sm80_merge = {rows, sizeof rows / sizeof rows[0]};
