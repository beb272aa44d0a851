/* The first kernel of fdma_decode(): a thread block decides for one (b, g) which row each new token
 * takes. */
#include "cuda/decode/evict.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/plan/host.cuh"

static constexpr int evict_threads = 512;
static constexpr int most_rows_anywhere = 4096; // that fit in shared memory on any device

/* Records in the workspace when each key of a (b, g) is evicted. */
struct workspace_marks {
    key_record *records;
    int32_t *list;
    const float *new_score;
    int32_t rows, first_token; // first_token: the token of the first query
    fdma_bias_form bias_form;

    /* No query sees a key that the token of the first query, or an earlier one, evicts. */
    __device__ void evict(int32_t key, int32_t token) const {
        records[key].expiry = token;
        if (token <= first_token)
            list[key] = -1;
    }
    __device__ void evict_row(int32_t row, int32_t token) const { evict(row, token); }
    __device__ void evict_token(int32_t token, int32_t by) const { evict(rows + token, by); }
    __device__ void add_token(int32_t token, bool is_kept) const {
        const float bias = bias_of(bias_form, new_score[token]);
        records[rows + token] = {is_kept ? INT32_MAX : -1, bias * log2_e};
        list[rows + token] = is_kept ? token : -1;
    }
};

/* Writes the rows as they are before any token arrives. */
__device__ static void write_rows(const decode_plan &plan, const int32_t *position,
                                  const float *bias, const workspace_marks &marks) {
#pragma unroll 4
    for (int32_t row = threadIdx.x; row < plan.rows; row += evict_threads) {
        const bool is_there = position[row] >= 0;
        marks.records[row] = {is_there ? INT32_MAX : -1, bias != NULL ? bias[row] * log2_e : 0};
        marks.list[row] = is_there ? row : -1;
    }
}

/* Places the tokens of one (b, g). `rows` are the rows of its stream's sequence, not yet loaded. */
template <typename keys>
__device__ static void evict_head(const decode_plan &plan, const decode_stream &stream, int32_t b,
                                  int32_t g, const keys &rows) {
    __shared__ evict_memory<evict_threads> shared;
    const int64_t head = (int64_t)b * plan.kv_heads + g;
    const int32_t sequence = stream.sequence, thread = threadIdx.x;
    const float *const new_score = plan.new_score.at(b, g);
    const int32_t *const position = plan.position.at(sequence, g);
    const workspace_marks marks = {plan.records + head * plan.keys,
                                   plan.list + head * plan.keys,
                                   new_score,
                                   plan.rows,
                                   plan.new_len - plan.q_len,
                                   plan.bias_form};
    evict_state<keys> state = {rows};
    state.rows.load(plan.score.at(sequence, g), position, plan.rows);
    state.rows.rank(plan.rows);
    write_rows(plan, position, plan.bias.data != NULL ? plan.bias.at(sequence, g) : NULL, marks);
    if (thread >= stream.tokens && thread < plan.new_len)
        marks.add_token(thread, false);
    if (thread < plan.new_len)
        shared.order[thread] = signed_order_of(new_score[thread]);
    add_tokens(shared, state, plan, stream, marks);
    if (thread < stream.tokens)
        plan.slot[head * plan.new_len + thread] = shared.slot[thread];
}

static __global__ void __launch_bounds__(evict_threads, 1)
    evict_keys(const __grid_constant__ decode_plan plan) {
    const int32_t b = blockIdx.x / plan.kv_heads, g = blockIdx.x % plan.kv_heads;
    griddepcontrol_wait(); // for the scores
    griddepcontrol_launch_dependents();
    const decode_stream stream = stream_of(plan, b);
    if (threadIdx.x == 0)
        plan.streams[blockIdx.x] = stream;
    if (stream.tokens == 0)
        return;
    extern __shared__ __align__(128) char bytes[];
    if (plan.row_keys == NULL)
        evict_head(plan, stream, b, g, staged_rows<evict_threads>(plan, bytes));
    else
        evict_head(plan, stream, b, g, listed_rows<evict_threads>(plan, bytes));
}

const char *fdma_cuda_refuses_decode(const fdma_problem *problem, int64_t head_dim) {
    fdma_problem dense = *problem; // decode needs no selection in the plan
    dense.selected = false;
    return fdma_cuda_refuses_plan(&dense, head_dim);
}

static decode_plan describe_call(const fdma_problem *problem) {
    const fdma_cache *const cache = &problem->cache;
    decode_plan plan = {};
    plan.k = view_of(&cache->k);
    plan.v = view_of(&cache->v);
    plan.pages = pages_of(cache);
    if (problem->bias_form != FDMA_BIAS_NONE)
        plan.bias = numbers_of<float>(&cache->bias);
    plan.score = numbers_of<float>(&cache->table.score);
    plan.position = numbers_of<int32_t>(&cache->table.position);
    plan.new_score = numbers_of<float>(&problem->score);
    plan.seen = (int32_t *)cache->table.seen.data;
    plan.index = (const int32_t *)problem->index.data;
    plan.n_tokens = (const int32_t *)problem->n_tokens.data;
    plan.commit = (const int32_t *)problem->commit.data;
    plan.sequences = (int32_t)cache->sequences;
    plan.kv_heads = (int32_t)problem->kv_heads;
    plan.rows = (int32_t)problem->carried_len;
    plan.new_len = (int32_t)problem->new_len;
    plan.q_len = (int32_t)problem->q_len;
    plan.sinks = (int32_t)problem->sinks;
    plan.recent = (int32_t)problem->recent;
    plan.bias_form = problem->bias_form;
    plan.keys = problem->carried_len + problem->new_len;
    return plan;
}

static fdma_problem token_problem(const fdma_problem *problem, const decode_plan &plan) {
    fdma_problem tokens = *problem;
    tokens.operation = operation_score;
    tokens.kv_len = problem->new_len;
    tokens.score = fdma_tensor_3d(plan.new_score.data, FDMA_FLOAT32, problem->batch,
                                  problem->kv_heads, problem->new_len);
    return tokens;
}

decode_task fdma_cuda_plan_decode(const fdma_problem *problem, fdma_arena *arena,
                                  decode_form form) {
    const int64_t heads = problem->batch * problem->kv_heads, new_len = problem->new_len;
    decode_task task = {};
    fdma_cuda_describe_problem(problem, &task.plan);
    task.plan.kv_len = (int32_t)new_len;
    decode_plan &plan = task.cached = describe_call(problem);
    plan.streams = take<decode_stream>(arena, heads);
    plan.slot = take<int32_t>(arena, heads * new_len);
    if (form == marks_keys) {
        plan.records = take<key_record>(arena, heads * plan.keys);
        plan.list = take<int32_t>(arena, heads * plan.keys);
    } else {
        plan.expiry = take<int32_t>(arena, heads * new_len);
    }
    if (plan.rows > (form == marks_keys ? most_rows_anywhere : most_staged_rows))
        plan.row_keys = take<int64_t>(arena, heads * plan.rows);
    if (!is_present(&problem->score)) {
        plan.new_score = {take<float>(arena, heads * new_len), problem->kv_heads * new_len,
                          new_len};
        const fdma_problem tokens = token_problem(problem, plan);
        task.scores = fdma_cuda_plan_score(&tokens, arena);
    }
    return task;
}

fdma_status fdma_cuda_score_tokens(const fdma_problem *problem, const decode_task &task) {
    const fdma_problem tokens = token_problem(problem, task.cached);
    return fdma_cuda_run_products(&tokens, task.scores);
}

fdma_status fdma_cuda_evict(const fdma_problem *problem, const decode_plan &plan) {
    const dim3 heads((unsigned)(problem->batch * problem->kv_heads));
    return launch(
        "decode", evict_keys,
        {heads, dim3(evict_threads), plan.row_keys == NULL ? staged_bytes(plan) : 0, start_early},
        problem, plan);
}
