/* Backward for head_dim up to FDMA_HEAD_DIM, on any device from compute capability 8.0, with
 * mma.sync. One pass makes dq (dq.cuh), in the way forward makes out. The others make dk, dv and
 * dbias (dkv.cuh), first for the keys that arrive inside a query block, then slot by slot. Each
 * pass computes the weights again, and none reduces through memory, so results are bit-equal from
 * run to run. With attn_mask a single pass makes all gradients, unless the call is to be
 * deterministic. Source: arXiv:2205.14135, algorithm 4. */
#include "cuda/backward/sm80/dkv.cuh"
#include "cuda/backward/sm80/dq.cuh"
#include "cuda/plan/backward_host.cuh"

static constexpr int32_t block_slots = 64; // of a slot block
static constexpr int32_t most_partitions = 16;

template <typename config>
static fdma_status sum_for_keys(const fdma_problem *problem, const backward_plan &plan,
                                bool aligned) {
    static_assert(sizeof(key_memory<config>) <= least_shared_bytes,
                  "a block of keys fits everywhere");
    static_assert(config::rows == block_slots, "the rows of a thread block are a slot block");
    const int64_t heads = (int64_t)plan.forward.batch * plan.forward.kv_heads;
    const int64_t blocks = (int64_t)plan.slots / config::rows * plan.partitions;
    launch_shape shape = {dim3(), dim3(config::threads), sizeof(key_memory<config>)};
    if (plan.is_rolling) {
        shape.grid = grid_of((int64_t)plan.forward.lists * (list_queries / config::rows), heads);
        FDMA_TRY(
            launch("backward", sum_keys<config>, shape, problem, plan, pass_diagonal, aligned));
    }
    if (blocks == 0)
        return FDMA_OK;
    shape.grid = grid_of(blocks, heads);
    return launch("backward", sum_keys<config>, shape, problem, plan, pass_slots, aligned);
}

template <typename config>
static fdma_status sum_for_queries(const fdma_problem *problem, const backward_plan &plan,
                                   bool aligned) {
    static_assert(sizeof(query_memory<config>) <= least_shared_bytes,
                  "a tile of queries fits everywhere");
    const int32_t rows = plan.forward.q_len * plan.forward.group;
    const int32_t tiles = (int32_t)divide_up(rows, config::rows);
    const int32_t heads = plan.forward.batch * plan.forward.kv_heads;
    return launch("backward", sum_queries<config>,
                  {dim3(heads * tiles), dim3(config::threads), sizeof(query_memory<config>)},
                  problem, plan, tiles, aligned);
}

/* True if one pass makes all gradients. For larger head dimensions its tiles would not fit in
 * shared memory. */
static bool is_listed_pass(const fdma_problem *problem) {
    return FDMA_HEAD_DIM <= 128 && is_present(&problem->attn_mask) && !problem->deterministic;
}

#if FDMA_HEAD_DIM <= 128
template <typename element, bool drops>
static fdma_status sum_listed_keys(const fdma_problem *problem, const backward_plan &plan,
                                   bool aligned) {
    using config = listed_config<element, drops>;
    static_assert(sizeof(listed_memory<config>) <= least_shared_bytes,
                  "a tile of queries fits everywhere");
    const int64_t rows = (int64_t)plan.forward.q_len * plan.forward.group;
    const int32_t tiles = (int32_t)divide_up(rows, (int64_t)config::rows);
    const int32_t heads = plan.forward.batch * plan.forward.kv_heads;
    if (heads == 0)
        return FDMA_OK;
    return launch("backward", sum_listed<config>,
                  {dim3(heads * tiles), dim3(config::threads), sizeof(listed_memory<config>)},
                  problem, plan, tiles, aligned);
}
#endif

template <typename element, bool pairs, bool drops>
static fdma_status sum_gradients(const fdma_problem *problem, const backward_plan &plan) {
    const forward_plan &forward = plan.forward;
    const bool aligned = is_aligned(forward.q) && is_aligned(forward.k) && is_aligned(forward.v) &&
                         is_aligned(forward.k_carried) && is_aligned(forward.v_carried) &&
                         is_aligned(plan.dout) && is_aligned(plan.dq) && has_aligned_sums(plan);
    if (forward.batch == 0 || forward.q_len == 0)
        return FDMA_OK;
#if FDMA_HEAD_DIM <= 128
    if (is_listed_pass(problem))
        return sum_listed_keys<element, drops>(problem, plan, aligned);
#endif
    FDMA_TRY((sum_for_queries<query_config<element, pairs, drops>>(problem, plan, aligned)));
    return sum_for_keys<key_config<element, pairs, drops>>(problem, plan, aligned);
}

template <typename element>
static fdma_status sum_elements(const fdma_problem *problem, const backward_plan &plan) {
    const bool drops = problem->dropout.threshold != 0;
    if (plan.forward.mask.data != NULL || plan.forward.pair_bias.data != NULL)
        return drops ? sum_gradients<element, true, true>(problem, plan)
                     : sum_gradients<element, true, false>(problem, plan);
    return drops ? sum_gradients<element, false, true>(problem, plan)
                 : sum_gradients<element, false, false>(problem, plan);
}

/* In the listed pass a lane has all heads that share an element if `sharing_rows` counts them all.
 * In the other passes a lane has one row. */
static pair_writing writing_of(const fdma_problem *problem, const backward_plan &plan) {
    const short_axes axes = short_axes_of(problem);
    if (!is_listed_pass(problem))
        return axes.any ? pairs_added : pairs_stored;
    return axes.not_heads || plan.dpairs.sharing != plan.sharing_rows ? pairs_added : rows_stored;
}

static backward_plan lay_out(const fdma_problem *problem, fdma_arena *arena) {
    backward_plan plan = fdma_cuda_plan_backward(
        problem, arena, {block_slots, most_partitions, list_queries, false});
    plan.sharing_rows = rows_sharing_pairs(plan.dpairs.sharing, problem->group);
    fdma_cuda_plan_pairs(problem, writing_of(problem, plan), arena, &plan);
    if (is_listed_pass(problem))
        fdma_cuda_take_key_sums(problem, FDMA_HEAD_DIM, arena, &plan);
    return plan;
}

static const char *refuses(const fdma_problem *problem) {
    const char *const reason = fdma_cuda_refuses_backward(problem, FDMA_HEAD_DIM);
    return reason != NULL ? reason : fdma_refuses_before_sm80(problem);
}

static fdma_status run(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const backward_plan plan = lay_out(problem, &arena);
    FDMA_TRY(fdma_cuda_begin_backward(problem, &plan));
    FDMA_TRY(problem->dtype == FDMA_FLOAT16 ? sum_elements<float16>(problem, plan)
                                            : sum_elements<__nv_bfloat16>(problem, plan));
    return fdma_cuda_end_backward(problem, &plan);
}

FDMA_CUDA_TABLE(FDMA_POINT_TABLE(fdma_cuda_sm80_backward_d, FDMA_HEAD_DIM),
                {FDMA_POINT_NAME("cuda/sm80/d", FDMA_HEAD_DIM), operation_backward,
                 fdma_missing_sm80, refuses, workspace_of<lay_out>, run, true, 0});
