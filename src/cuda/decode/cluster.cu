/* fdma_decode() for head_dim up to FDMA_HEAD_DIM on devices of compute capability 9.0 and later.
 * How the keys are partitioned depends on the rows of the cache alone, and so do the bits of a
 * result.
 *
 * Source: docs/algorithm.md, streams; arXiv:2307.08691. */
#include "cuda/decode/cluster.cuh"

struct cluster_task {
    decode_plan cached;
    forward_plan plan; // its keys are the new tokens
    score_params scores;
};

static cluster_task lay_out(const fdma_problem *problem, fdma_arena *arena) {
    cluster_task task = {};
    task.cached = fdma_cuda_plan_decode(problem, arena);
    fdma_cuda_describe_problem(problem, &task.plan);
    task.plan.kv_len = task.cached.new_len;
    if (!is_present(&problem->score)) {
        const fdma_problem tokens = fdma_cuda_token_problem(problem, task.cached);
        task.scores = fdma_cuda_plan_score(&tokens, arena);
    }
    return task;
}

/* Whether place_tokens() computes the scores; else fdma_score()'s kernels do. */
static bool scores_tokens(const fdma_problem *problem) {
    const fdma_tensor *const v = &problem->v, *const dt_proj = &problem->dt_proj;
    const bool is_flat = problem->kv_heads == 1 || v->stride[2] == problem->head_dim;
    const bool is_even = ((uintptr_t)v->data | (uintptr_t)dt_proj->data) % 4 == 0 &&
                         (v->stride[0] | v->stride[1] | dt_proj->stride[0]) % 2 == 0;
    return dt_proj->dtype == problem->dtype && is_flat && is_even &&
           problem->kv_heads * problem->head_dim <= (int64_t)most_sums * sum_channels;
}

template <typename element>
static fdma_status launch_tokens(const fdma_problem *problem, const cluster_task &task) {
    token_scores from = {};
    if (!is_present(&problem->score) && scores_tokens(problem))
        from = {problem->dt_proj.data,
                problem->a.data,
                problem->dt_bias.data,
                problem->dt_proj.stride[0],
                task.plan.kv_heads * task.plan.head_dim,
                problem->a.dtype == FDMA_FLOAT32,
                problem->dt_bias.dtype == FDMA_FLOAT32};
    else if (!is_present(&problem->score)) {
        const fdma_problem tokens = fdma_cuda_token_problem(problem, task.cached);
        FDMA_TRY(fdma_cuda_run_products(&tokens, task.scores));
    }
    const dim3 heads((unsigned)(problem->batch * problem->kv_heads));
    return launch("decode", place_tokens<element>, {heads, dim3(token_threads), 0, start_early},
                  problem, task.cached, task.plan.v, from);
}

template <typename config>
static fdma_status launch_cluster(const fdma_problem *problem, const cluster_task &task) {
    const bool aligned =
        is_aligned(task.plan) && is_aligned(task.cached.k) && is_aligned(task.cached.v);
    const dim3 blocks((unsigned)(problem->batch * problem->kv_heads * cluster_ranks));
    return launch(
        "decode", attend_cluster<config>,
        {blocks, dim3(config::threads), sizeof(cluster_memory<config>), start_early, cluster_ranks},
        problem, task.plan, task.cached, aligned);
}

template <typename element> static fdma_status run_type(const fdma_problem *problem) {
    using one_tile = cluster_config<element, 1>;
    using more_tiles = cluster_config<element, FDMA_HEAD_DIM <= 128 ? 2 : 1>;
    fdma_arena arena = fdma_arena_of(problem);
    const cluster_task task = lay_out(problem, &arena);
    FDMA_TRY(launch_tokens<element>(problem, task));
    return problem->q_len * problem->group <= one_tile::rows
               ? launch_cluster<one_tile>(problem, task)
               : launch_cluster<more_tiles>(problem, task);
}

static fdma_status run(const fdma_problem *problem) {
    if (problem->batch == 0 || problem->new_len == 0)
        return FDMA_OK;
    return problem->dtype == FDMA_FLOAT16 ? run_type<__half>(problem)
                                          : run_type<__nv_bfloat16>(problem);
}

static const char *refuses(const fdma_problem *problem) {
    fdma_problem dense = *problem; // has no selection that a plan would want
    dense.selected = false;
    const char *const reason = fdma_cuda_refuses_plan(&dense, FDMA_HEAD_DIM);
    if (reason != NULL)
        return reason;
    if (problem->carried_len > most_cluster_rows)
        return "more than 4096 rows of a cache";
    if (problem->batch * problem->kv_heads > INT32_MAX / cluster_ranks)
        return "more than 2^28 heads";
    return fdma_refuses_before_sm90(problem);
}

FDMA_CUDA_TABLE(FDMA_POINT_TABLE(fdma_cuda_sm90_cached_d, FDMA_HEAD_DIM),
                {FDMA_POINT_NAME("cuda/sm90/decode/d", FDMA_HEAD_DIM), operation_decode,
                 fdma_missing_sm90, refuses, workspace_of<lay_out>, run, true, false});
