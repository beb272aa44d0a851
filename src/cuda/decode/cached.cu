/* fdma_decode() for head_dim up to FDMA_HEAD_DIM, on any device from compute capability 8.0. Splits
 * depend only on the rows of the cache, and so do the bits of a result.
 *
 * Source: docs/algorithm.md, streams; arXiv:2307.08691. */
#include "cuda/decode/cached.cuh"

/* Row tiles of a thread block if one is not enough: as many as fit in registers. */
static constexpr int most_row_tiles = FDMA_HEAD_DIM <= 128 ? 2 : 1;

struct cached_task : decode_task {
    split_plan splits;
};

static split_plan plan_splits(const fdma_problem *problem, fdma_arena *arena) {
    const int64_t least_keys = 128; // of a split, measured on an H200
    const int64_t rows = problem->carried_len;
    split_plan splits = {};
    splits.keys = (int32_t)round_up(max(divide_up(rows, most_splits - 1), least_keys), 64);
    splits.count = (int32_t)divide_up(rows, splits.keys) + 1;
    const int64_t results = problem->batch * problem->q_heads * problem->q_len * splits.count;
    splits.out = take<float>(arena, results * problem->head_dim);
    splits.stats = take<float2>(arena, results);
    return splits;
}

static cached_task lay_out(const fdma_problem *problem, fdma_arena *arena) {
    return {fdma_cuda_plan_decode(problem, arena, marks_keys), plan_splits(problem, arena)};
}

template <typename config>
static fdma_status attend_splits(const fdma_problem *problem, const cached_task &task) {
    static_assert(sizeof(decode_memory<config>) <= least_shared_bytes, "a split fits everywhere");
    const forward_plan &plan = task.plan;
    const int32_t tiles = (int32_t)divide_up(plan.q_len * plan.group, config::rows);
    const int32_t blocks = plan.batch * plan.kv_heads * task.splits.count * tiles;
    return launch("decode", attend_cache<config>,
                  {dim3(blocks), dim3(config::threads), sizeof(decode_memory<config>), start_early},
                  problem, plan, task.cached, task.splits, tiles, is_aligned(task));
}

template <typename element, int row_tiles>
static fdma_status attend_tiles(const fdma_problem *problem, const cached_task &task) {
    return has_pages(&problem->cache)
               ? attend_splits<decode_config<element, row_tiles, true>>(problem, task)
               : attend_splits<decode_config<element, row_tiles, false>>(problem, task);
}

template <typename element>
static fdma_status attend_rows(const fdma_problem *problem, const cached_task &task) {
    return task.plan.q_len * task.plan.group <= mma_rows
               ? attend_tiles<element, 1>(problem, task)
               : attend_tiles<element, most_row_tiles>(problem, task);
}

template <typename element>
static fdma_status attend(const fdma_problem *problem, const cached_task &task) {
    const forward_plan &plan = task.plan;
    const int32_t rows = plan.q_len * plan.group, blocks = max(rows, 1);
    if (rows > 0)
        FDMA_TRY(attend_rows<element>(problem, task));
    const launch_shape finish = {dim3(plan.batch * plan.kv_heads * blocks), dim3(merge_threads), 0,
                                 start_early};
    return launch("decode", finish_decode<decode_config<element, 1>>, finish, problem, plan,
                  task.cached, task.splits, blocks);
}

static const char *refuses(const fdma_problem *problem) {
    const char *const reason = fdma_cuda_refuses_decode(problem, FDMA_HEAD_DIM);
    if (reason != NULL)
        return reason;
    const int64_t tiles = problem->q_len * problem->group / mma_rows + 1;
    if (problem->batch * problem->kv_heads > INT32_MAX / (tiles * most_splits))
        return "more than 2^31 splits of tiles of queries";
    return fdma_refuses_before_sm80(problem);
}

static fdma_status run(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const cached_task task = lay_out(problem, &arena);
    if (problem->batch == 0 || problem->new_len == 0)
        return FDMA_OK;
    if (!is_present(&problem->score))
        FDMA_TRY(fdma_cuda_score_tokens(problem, task));
    FDMA_TRY(fdma_cuda_evict(problem, task.cached));
    return problem->dtype == FDMA_FLOAT16 ? attend<float16>(problem, task)
                                          : attend<__nv_bfloat16>(problem, task);
}

FDMA_CUDA_TABLE(FDMA_POINT_TABLE(fdma_cuda_sm80_cached_d, FDMA_HEAD_DIM),
                {FDMA_POINT_NAME("cuda/sm80/decode/d", FDMA_HEAD_DIM), operation_decode,
                 fdma_missing_sm80, refuses, workspace_of<lay_out>, run, true, 0});
