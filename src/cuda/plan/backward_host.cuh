/* The plan of a backward call on the host. */
#pragma once

#include "cuda/plan/backward.cuh"
#include "cuda/plan/host.cuh"

/* The axes on which the length of dattn_bias differs from its pairs: shorter, or 1 in place of
 * 0. */
struct short_axes {
    bool any, not_heads;
};

static inline short_axes short_axes_of(const fdma_problem *problem) {
    const int64_t lengths[] = {problem->batch, problem->q_heads, problem->q_len, problem->kv_len};
    short_axes axes = {};
    for (int axis = 0; axis < problem->dattn_bias.rank; axis++)
        if (problem->dattn_bias.shape[axis] != lengths[axis]) {
            axes.any = true;
            axes.not_heads = axes.not_heads || axis != 1;
        }
    return axes;
}

/* fdma_cuda_refuses_plan() for backward. */
const char *fdma_cuda_refuses_backward(const fdma_problem *problem, int64_t most_head_dim);

/* Returns the plan, laid out in the arena. With base NULL the arena only counts bytes. */
backward_plan fdma_cuda_plan_backward(const fdma_problem *problem, fdma_arena *arena,
                                      const backward_shape &shape);

/* Sets how dattn_bias is written. Takes its float32 sums from the arena if kernels add to a
 * dattn_bias of 16 bits. */
void fdma_cuda_plan_pairs(const fdma_problem *problem, pair_writing writing, fdma_arena *arena,
                          backward_plan *plan);

/* Fills in lists, records, row_lse and row_delta. Clears dk and dv (unless they accumulate), dbias,
 * plan->cleared, and dattn_bias or its sums. */
fdma_status fdma_cuda_begin_backward(const fdma_problem *problem, const backward_plan *plan);

void fdma_cuda_take_key_sums(const fdma_problem *problem, int32_t channels, fdma_arena *arena,
                             backward_plan *plan);

/* Adds the boundary sums to dk, dv and dbias, or key_sums to dk and dv. Rounds the sums of
 * dattn_bias. */
fdma_status fdma_cuda_end_backward(const fdma_problem *problem, const backward_plan *plan);
