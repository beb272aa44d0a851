/* Decode: forward for up to 16 queries and head_dim up to FDMA_HEAD_DIM, on any device from compute
 * capability 8.0. The keys of a (b, g) are split over thread blocks (decode/split.cuh). If there
 * are several splits, their partial results are then merged in order. Splits and their order depend
 * only on kv_len, or on the size of a list, and so do the bits of a result.
 *
 * Source: arXiv:2307.08691; arXiv:2205.14135, section 3.1. */
#include "cuda/decode/split.cuh"
#include "cuda/plan/host.cuh"

/* Row tiles of a thread block if one is not enough: as many as fit in registers. */
static constexpr int most_row_tiles = FDMA_HEAD_DIM <= 128 ? 2 : 1;

static split_plan plan_splits(const forward_plan *plan, fdma_arena *arena) {
    split_plan splits = {};
    const int64_t keys = list_keys(*plan);
    int64_t wanted = min(divide_up(keys, usual_splits), usual_keys);
    wanted = max(max(wanted, divide_up(keys, most_splits)), least_keys);
    splits.keys = (int32_t)round_up(wanted, 64); // whole key blocks of four warps
    splits.count = keys > 0 ? (int32_t)divide_up(keys, splits.keys) : 1;
    if (splits.count == 1)
        return splits;
    const int64_t results = (int64_t)plan->batch * plan->q_heads * plan->q_len * splits.count;
    splits.out = take<float>(arena, results * plan->head_dim);
    splits.stats = take<float2>(arena, results);
    return splits;
}

template <typename config>
static fdma_status attend_splits(const fdma_problem *problem, const forward_plan &plan,
                                 const split_plan &splits) {
    static_assert(sizeof(decode_memory<config>) <= least_shared_bytes, "a split fits everywhere");
    const int32_t tiles = (int32_t)divide_up(plan.q_len * plan.group, config::rows);
    const int32_t blocks = plan.batch * plan.kv_heads * splits.count * tiles;
    return launch("forward", attend_split<config>,
                  {dim3(blocks), dim3(config::threads), sizeof(decode_memory<config>), start_early},
                  problem, plan, splits, tiles, is_aligned(plan));
}

template <typename element, bool pairs>
static fdma_status attend(const fdma_problem *problem, const forward_plan &plan,
                          const split_plan &splits) {
    using one_tile = decode_config<element, 1, false, pairs>;
    using more_tiles = decode_config<element, most_row_tiles, false, pairs>;
    const int32_t rows = plan.q_len * plan.group;
    FDMA_TRY(rows <= one_tile::rows ? attend_splits<one_tile>(problem, plan, splits)
                                    : attend_splits<more_tiles>(problem, plan, splits));
    if (splits.count == 1)
        return FDMA_OK;
    const launch_shape merge = {dim3(plan.batch * plan.kv_heads * rows), dim3(merge_threads), 0,
                                start_early};
    return launch("forward", merge_splits<decode_config<element, 1>>, merge, problem, plan, splits);
}

template <typename element>
static fdma_status attend_elements(const fdma_problem *problem, const forward_plan &plan,
                                   const split_plan &splits) {
    return plan.mask.data != NULL || plan.pair_bias.data != NULL
               ? attend<element, true>(problem, plan, splits)
               : attend<element, false>(problem, plan, splits);
}

static const char *refuses(const fdma_problem *problem) {
    const char *const reason = fdma_cuda_refuses_plan(problem, FDMA_HEAD_DIM);
    if (reason != NULL)
        return reason;
    if (problem->only_mask_lists || is_present(&problem->mask_lists))
        return "mask_lists";
    if (problem->dropout.threshold != 0)
        return "dropout";
    if (problem->q_len > most_queries)
        return "more than 16 queries";
    const int64_t tiles = problem->q_len * problem->group / mma_rows + 1;
    if (problem->batch * problem->kv_heads > INT32_MAX / (tiles * most_splits))
        return "more than 2^31 splits of tiles of queries";
    return fdma_refuses_before_sm80(problem);
}

struct split_task {
    forward_plan plan;
    split_plan splits;
};

static split_task lay_out(const fdma_problem *problem, fdma_arena *arena) {
    split_task task;
    fdma_problem unmasked = *problem; // the mask is read for each pair, and has no lists
    unmasked.attn_mask = fdma_tensor{};
    task.plan = fdma_cuda_plan_forward(&unmasked, arena);
    task.plan.mask = pairs_of(&problem->attn_mask, problem->q_heads);
    task.splits = plan_splits(&task.plan, arena);
    return task;
}

static fdma_status run(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const split_task task = lay_out(problem, &arena);
    FDMA_TRY(fdma_cuda_build_lists(problem, &task.plan));
    return problem->dtype == FDMA_FLOAT16
               ? attend_elements<float16>(problem, task.plan, task.splits)
               : attend_elements<__nv_bfloat16>(problem, task.plan, task.splits);
}

FDMA_CUDA_TABLE(FDMA_POINT_TABLE(fdma_cuda_sm80_decode_d, FDMA_HEAD_DIM),
                {FDMA_POINT_NAME("cuda/sm80/decode/d", FDMA_HEAD_DIM), operation_forward,
                 fdma_missing_sm80, refuses, workspace_of<lay_out>, run, true, 0});
