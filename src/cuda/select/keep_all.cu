/* The selection with at least as many slots as keys, on any device from compute capability 8.0.
 * Every key is kept as long as there are queries, in the slot of its own number, whatever its
 * score. In a fused call it also writes the records and the list of forward's plan, as
 * plan/lists.cu does. */
extern "C" {
#include "core/streams.h"
}
#include "cuda/plan/host.cuh"
#include "cuda/select/rules.cuh"

static constexpr int keep_threads = 256;

/* A thread takes one key of a (b, g). */
static __global__ void __launch_bounds__(keep_threads)
    keep_all(const number_view<int32_t> expiry, const number_view<int32_t> slot,
             const number_view<const float> bias, const forward_plan plan, const int32_t kv_heads,
             const int32_t kv_len, const int64_t heads) {
    const int64_t head = head_of_block(), b = head / kv_heads, g = head % kv_heads;
    const int32_t j = (int32_t)blockIdx.x * keep_threads + (int32_t)threadIdx.x;
    griddepcontrol_wait(); // for the scores
    griddepcontrol_launch_dependents();
    if (j >= kv_len || head >= heads)
        return;
    expiry.at(b, g)[j] = kv_len;
    if (slot.data != NULL)
        slot.at(b, g)[j] = j;
    if (plan.records != NULL)
        plan.records[head * kv_len + j] = {INT32_MAX,
                                           bias.data == NULL ? 0 : log2_e * bias.at(b, g)[j]};
    if (plan.list != NULL)
        plan.list[head * plan.list_head + j] = j;
}

/* ---- the kernel of the table ---- */

static const char *refuses(const fdma_problem *problem) {
    const char *const refused = refuses_scores(problem, fdma_refuses_before_sm80(problem));
    if (refused != NULL)
        return refused;
    if (problem->slots < problem->kv_len)
        return "fewer slots than keys";
    if (is_present(&problem->key_valid) || problem->gap > 0)
        return "key_valid or a gap, by which keys are left out";
    if (is_present(&problem->starts) || is_present(&problem->kv_used))
        return "packed sequences or kv_used";
    return has_table(problem) || problem->carried_len > 0 ? "tables or carried keys" : NULL;
}

/* The plan of the forward call that follows, which uses the same layout. */
static forward_plan lay_out(const fdma_problem *problem, fdma_arena *arena) {
    return problem->fused.forward == NULL ? forward_plan{}
                                          : fdma_cuda_plan_forward(problem->fused.forward, arena);
}

static fdma_status run(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const forward_plan plan = lay_out(problem, &arena);
    const int64_t heads = problem->batch * problem->kv_heads;
    const fdma_problem *const forward = problem->fused.forward;
    if (heads == 0 || problem->kv_len == 0)
        return FDMA_OK;
    return launch(
        "select", keep_all,
        {grid_of(divide_up(problem->kv_len, keep_threads), heads), dim3(keep_threads), 0,
         start_early},
        problem, numbers_of<int32_t>(&problem->expiry), numbers_of<int32_t>(&problem->slot),
        forward == NULL ? number_view<const float>{} : numbers_of<const float>(&forward->bias),
        plan, (int32_t)problem->kv_heads, (int32_t)problem->kv_len, heads);
}

FDMA_CUDA_TABLE(fdma_cuda_sm80_keep_all,
                {"cuda/sm80/keep_all", operation_select, fdma_missing_sm80, refuses,
                 workspace_of<lay_out>, run, true, trait_writes_plan});
