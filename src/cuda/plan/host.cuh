/* The plan of a forward call on the host: which problems it supports, its layout, and the calls
 * that fill it in. */
#pragma once

#include "cuda/device/host.cuh"
#include "cuda/plan/plan.cuh"

/* True if each query block has a list of its own. Otherwise all share one. */
static inline bool rolls_lists(const fdma_problem *problem) {
    return problem->selected && problem->slots < problem->kv_len &&
           problem->scope != FDMA_SCOPE_GLOBAL;
}

static_assert(pair_view::float32 == FDMA_FLOAT32 && pair_view::float16 == FDMA_FLOAT16 &&
                  pair_view::bfloat16 == FDMA_BFLOAT16,
              "the dtype of pairs is an fdma_dtype");

static inline pair_view pairs_of(const fdma_tensor *tensor, int64_t q_heads) {
    const int64_t heads = tensor->shape[1]; // 0 if it is absent
    const int64_t *const stride = tensor->stride;
    return {tensor->data,
            stride[0],
            stride[1],
            stride[2],
            stride[3],
            (int32_t)(heads > 0 && heads < q_heads ? q_heads / heads : 1),
            (int32_t)tensor->dtype};
}

/* The reason why no plan supports this problem, or no kernel with head_dim up to most_head_dim;
 * NULL if one does. Every kernel's refuses() asks it first. */
const char *fdma_cuda_refuses_plan(const fdma_problem *problem, int64_t most_head_dim);

void fdma_cuda_describe_problem(const fdma_problem *problem, forward_plan *plan);

/* Returns the plan, with its lists and records taken from the arena. With base NULL the arena only
 * counts bytes. */
forward_plan fdma_cuda_plan_forward(const fdma_problem *problem, fdma_arena *arena);

/* fdma_cuda_plan_forward() with query blocks of another length, for backward kernels only. */
forward_plan fdma_cuda_plan_lists(const fdma_problem *problem, fdma_arena *arena,
                                  int32_t block_queries);

/* fdma_cuda_plan_lists() with one list for all query blocks, of the keys that any query keeps. Only
 * for selections whose lists would roll. */
forward_plan fdma_cuda_plan_kept(const fdma_problem *problem, fdma_arena *arena);

/* Fills in the lists and records, on the problem's stream. */
fdma_status fdma_cuda_build_lists(const fdma_problem *problem, const forward_plan *plan);

/* Fills in plan->kept from the records. */
fdma_status fdma_cuda_list_kept_keys(const fdma_problem *problem, const forward_plan *plan);

struct selection_view;

selection_view fdma_cuda_describe_selection(const fdma_problem *problem, const forward_plan *plan);
