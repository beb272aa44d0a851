/* fdma_probabilities() on any device from compute capability 8.0. A thread block takes a few
 * queries and some keys. Each thread reads its key once for all of these queries. Products are
 * plain multiply-adds: the result is for inspection, not for fast computation.
 *
 * The records of forward's plan define which queries keep a key (plan/plan.cuh). */
#include "cuda/device/element.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/plan/host.cuh"

static constexpr int block_queries = 8;
static constexpr int block_keys = 128; // a thread for each
static constexpr int most_channels = 256;

/* Parameters that are not in a plan. */
struct probability_params {
    number_view<const float> bias, bias_carried; // may be absent
    float *probability;
    int64_t batch, head, row; // its strides
    float softcap;            // 0: off
    float scale;              // multiplies the product, inside tanh if there is a softcap
    int32_t key_blocks;
    bool aligned; // rows of q and k can be read 16 bytes at a time
};

struct query_rows {
    int32_t b, h, g, first, count;
};

__device__ static query_rows rows_of_block(const forward_plan &plan, int32_t key_blocks) {
    const int64_t head = head_of_block();
    query_rows rows;
    rows.b = (int32_t)(head / plan.q_heads);
    rows.h = (int32_t)(head % plan.q_heads);
    rows.g = rows.h / plan.group;
    rows.first = (int32_t)(blockIdx.x / key_blocks) * block_queries;
    rows.count = rows.b < plan.batch ? min(plan.q_len - rows.first, block_queries) : 0;
    return rows;
}

/* True if the query at a position keeps a key, by its record and the causal rule. */
__device__ static bool keeps(const forward_plan &plan, const key_record &record, int32_t j,
                             int32_t position) {
    return position < record.expiry && (!plan.by_position || position >= first_position(plan, j));
}

template <typename element>
__device__ static void load_rows(float (*to)[most_channels], const forward_plan &plan,
                                 const query_rows &rows, bool aligned) {
    const int vecs = plan.head_dim / vec_channels;
    for (int n = threadIdx.x; n < rows.count * vecs; n += block_keys) {
        const int64_t i = rows.first + n / vecs;
        const int d = n % vecs * vec_channels;
        const element *const q = (const element *)plan.q.data + rows.b * plan.q.batch +
                                 i * plan.q.row + rows.h * plan.q.head;
        float vec[vec_channels];
        load_vec(vec, q + d, aligned);
        for (int x = 0; x < vec_channels; x++)
            to[n / vecs][d + x] = vec[x];
    }
}

/* sums[n] = <q of query n, k> */
template <typename element>
__device__ static void multiply(float (&sums)[block_queries], const float (*q)[most_channels],
                                const element *k, int32_t head_dim, bool aligned) {
#pragma unroll
    for (int n = 0; n < block_queries; n++)
        sums[n] = 0;
    for (int d = 0; d < head_dim; d += vec_channels) {
        float key[vec_channels];
        load_vec(key, k + d, aligned);
#pragma unroll
        for (int n = 0; n < block_queries; n++) {
            float partial = 0;
#pragma unroll
            for (int x = 0; x < vec_channels; x++)
                partial = fmaf(q[n][d + x], key[x], partial);
            sums[n] += partial;
        }
    }
}

/* The logit of a product of q and k, without the bias. */
__device__ static float logit_of(const probability_params &params, float product) {
    const float x = product * params.scale;
    return params.softcap > 0 ? params.softcap * tanh_of(x) : x;
}

__device__ static float bias_of(const forward_plan &plan, const probability_params &params,
                                const query_rows &rows, int32_t j) {
    if (params.bias.data == NULL)
        return 0;
    return *number_of_key(params.bias, params.bias_carried, plan.carried_len, rows.b, rows.g, j);
}

/* A bit for each query whose pair with key j is dropped. */
__device__ static uint32_t find_dropped(const forward_plan &plan, const query_rows &rows,
                                        const row_code *codes, int32_t j) {
    const uint32_t threshold = plan.dropout.threshold;
    uint32_t dropped = 0;
    if (threshold == 0)
        return 0;
    const uint32_t key = key_code_of(plan, rows.b, rows.g, j);
    for (int n = 0; n < rows.count; n++) {
        const int32_t p = query_position(plan, rows.b, rows.first + n);
        dropped |= (uint32_t)dropout_drops(threshold, codes[n], p, key) << n;
    }
    return dropped;
}

/* Writes the probabilities that the queries of a thread block give to key j. A key that none of
 * them keeps is not read. */
template <typename element>
__device__ static void write_key(const forward_plan &plan, const probability_params &params,
                                 const query_rows &rows, const float (*q)[most_channels],
                                 const row_code *codes, int32_t j) {
    const key_record record =
        plan.records[((int64_t)rows.b * plan.kv_heads + rows.g) * plan.kv_len + j];
    const float *const lse = plan.lse.at(rows.b, rows.h) + rows.first;
    float *const to = params.probability + rows.b * params.batch + rows.h * params.head +
                      rows.first * params.row + j;
    uint32_t kept = 0; // a bit for each query
    for (int n = 0; n < rows.count; n++) {
        const int32_t p = query_position(plan, rows.b, rows.first + n);
        kept |= (uint32_t)(lse[n] != -INFINITY && keeps(plan, record, j, p) &&
                           is_unmasked(plan.mask, rows.b, rows.h, rows.first + n, j))
                << n;
    }
    kept &= ~find_dropped(plan, rows, codes, j);
    float sums[block_queries] = {}, bias = 0;
    if (kept != 0) {
        const element *const k =
            row_of_key<const element>(plan.k, plan.k_carried, plan.carried_len, rows.b, rows.g, j);
        multiply(sums, q, k, plan.head_dim, params.aligned);
        bias = bias_of(plan, params, rows, j);
    }
#pragma unroll
    for (int n = 0; n < block_queries; n++)
        if (n < rows.count)
            to[n * params.row] =
                (kept >> n & 1) == 0
                    ? 0
                    : plan.dropout_scale * expf(logit_of(params, sums[n]) + bias +
                                                pair_bias<element>(plan.pair_bias, rows.b, rows.h,
                                                                   rows.first + n, j) -
                                                lse[n]);
}

template <typename element>
static __global__ void __launch_bounds__(block_keys)
    write_probabilities(const forward_plan plan, const probability_params params) {
    __shared__ float q[block_queries][most_channels];
    __shared__ row_code codes[block_queries];
    const query_rows rows = rows_of_block(plan, params.key_blocks);
    const int64_t j = (int64_t)(blockIdx.x % params.key_blocks) * block_keys + threadIdx.x;
    load_rows<element>(q, plan, rows, params.aligned);
    if (plan.dropout.threshold != 0 && (int32_t)threadIdx.x < rows.count)
        codes[threadIdx.x] = row_code_of(plan, rows.b, rows.h,
                                         query_position(plan, rows.b, rows.first + threadIdx.x));
    __syncthreads();
    if (rows.count > 0 && j < plan.kv_len)
        write_key<element>(plan, params, rows, q, codes, (int32_t)j);
}

/* A plan with records of all keys, and without lists. */
static forward_plan lay_out(const fdma_problem *problem, fdma_arena *arena) {
    forward_plan plan = {};
    fdma_cuda_describe_problem(problem, &plan);
    plan.lists = 1;
    plan.sequences = fdma_cuda_lay_out_sequences(problem, arena, false);
    plan.records = take<key_record>(arena, problem->batch * problem->kv_heads * problem->kv_len);
    return plan;
}

static int64_t count_blocks(const fdma_problem *problem) {
    return divide_up(problem->q_len, block_queries) * divide_up(problem->kv_len, block_keys);
}

static const char *refuses(const fdma_problem *problem) {
    const char *const reason = fdma_cuda_refuses_plan(problem, most_channels);
    if (reason != NULL)
        return reason;
    if (problem->probability.dtype == FDMA_FLOAT64)
        return "float64 probability; supported: float32";
    if (count_blocks(problem) > INT32_MAX)
        return "2^41 or more probabilities of a query head";
    return fdma_refuses_before_sm80(problem);
}

static void describe_logits(const forward_plan &plan, probability_params *params) {
    params->softcap = plan.softcap;
    params->scale = plan.softcap > 0 ? scale_over_cap(plan.scale, plan.softcap) : plan.scale;
}

static probability_params describe(const fdma_problem *problem, const forward_plan &plan) {
    const fdma_tensor *const probability = &problem->probability;
    probability_params params = {};
    params.bias = numbers_of<const float>(&problem->bias);
    params.bias_carried = numbers_of<const float>(&problem->bias_carried);
    params.probability = (float *)probability->data;
    params.batch = probability->stride[0];
    params.head = probability->stride[1];
    params.row = probability->stride[2];
    describe_logits(plan, &params);
    params.key_blocks = (int32_t)divide_up(problem->kv_len, block_keys);
    params.aligned = is_aligned(plan.q) && is_aligned(plan.k) && is_aligned(plan.k_carried);
    return params;
}

static fdma_status run(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const forward_plan plan = lay_out(problem, &arena);
    const probability_params params = describe(problem, plan);
    const launch_shape shape = {grid_of(count_blocks(problem), problem->batch * problem->q_heads),
                                dim3(block_keys)};
    FDMA_TRY(fdma_cuda_build_lists(problem, &plan));
    if (problem->dtype == FDMA_FLOAT16)
        return launch("probabilities", write_probabilities<__half>, shape, problem, plan, params);
    return launch("probabilities", write_probabilities<__nv_bfloat16>, shape, problem, plan,
                  params);
}

FDMA_CUDA_TABLE(fdma_cuda_sm80_probabilities,
                {"cuda/sm80", operation_probabilities, fdma_missing_sm80, refuses,
                 workspace_of<lay_out>, run, true, 0});
