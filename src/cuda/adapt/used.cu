/* Scores, selections and gradients of scores if only the first kv_used keys of each sequence exist,
 * by kernels that support only padding: keys that do not exist become padding. On any device from
 * compute capability 8.0. Scores have no positions, so padding is enough. A selection of kv_used
 * keys followed by padding is the selection of the keys that exist, except for the expiry of keys
 * that are kept to the end. */
extern "C" {
#include "core/operations.h"
}
#include "core/integers.h"
#include "cuda/device/head_view.cuh"
#include "cuda/device/host.cuh"
#include "cuda/device/used.cuh"

static constexpr int used_threads = 256;

/* The plan of the kernels. valid: in the workspace, [batch][kv_len]. */
struct used_plan {
    const int32_t *kv_used;
    const uint8_t *key_valid; // NULL: all keys that exist are valid
    int64_t valid_batch;
    uint8_t *valid;
    number_view<int32_t> expiry; // data NULL: no selection
    int32_t kv_heads, kv_len;
};

/* Each thread writes 1 if a key exists and is valid, otherwise 0. */
static __global__ void __launch_bounds__(used_threads)
    find_valid(const used_plan plan, const int64_t batch) {
    const int64_t b = head_of_block();
    const int64_t j = (int64_t)blockIdx.x * used_threads + threadIdx.x;
    if (b >= batch || j >= plan.kv_len)
        return;
    const bool exists = j < count_used(plan.kv_used, b, plan.kv_len);
    plan.valid[b * plan.kv_len + j] =
        exists && (plan.key_valid == NULL || plan.key_valid[b * plan.valid_batch + j] != 0);
}

/* Each thread corrects one expiry. A key that is kept to the end of kv_len keys is kept to the end
 * of the keys that exist. */
static __global__ void __launch_bounds__(used_threads)
    end_with_used(const used_plan plan, const int64_t heads) {
    const int64_t head = head_of_block(), b = head / plan.kv_heads;
    const int64_t j = (int64_t)blockIdx.x * used_threads + threadIdx.x;
    if (head >= heads || j >= plan.kv_len)
        return;
    int32_t *const expiry = plan.expiry.at(b, head % plan.kv_heads) + j;
    if (*expiry == plan.kv_len)
        *expiry = count_used(plan.kv_used, b, plan.kv_len);
}

static used_plan plan_used(const fdma_problem *problem, fdma_arena *arena) {
    used_plan plan = {};
    plan.kv_used = (const int32_t *)problem->kv_used.data;
    plan.key_valid = (const uint8_t *)problem->key_valid.data;
    plan.valid_batch = problem->key_valid.stride[0];
    plan.valid = take<uint8_t>(arena, problem->batch * problem->kv_len);
    plan.expiry = numbers_of<int32_t>(&problem->expiry);
    plan.kv_heads = (int32_t)problem->kv_heads;
    plan.kv_len = (int32_t)problem->kv_len;
    return plan;
}

static fdma_problem padded_problem(const fdma_problem *problem, const used_plan &plan) {
    fdma_problem one = *problem;
    one.kv_used = {};
    one.key_valid = fdma_tensor_2d(plan.valid, FDMA_UINT8, problem->batch, problem->kv_len);
    return one;
}

static bool applies(const fdma_kernel *, const fdma_problem *problem) {
    const bool is_score =
        problem->operation == operation_score || problem->operation == operation_score_backward;
    const bool is_select =
        problem->operation == operation_select && !is_present(&problem->fused.last_keys.list);
    return is_present(&problem->kv_used) && (is_score || is_select);
}

static size_t workspace(const adapted_kernel *inner, const fdma_problem *problem,
                        check_depth depth) {
    fdma_arena arena = {};
    const used_plan plan = plan_used(problem, &arena);
    const fdma_problem one = padded_problem(problem, plan);
    return fdma_arena_size(&arena) + fdma_adapted_workspace(inner, &one, depth);
}

static fdma_status run(const adapted_kernel *inner, const fdma_problem *problem) {
    const char *const what = fdma_operation_name(problem->operation);
    fdma_arena arena = fdma_arena_of(problem);
    const used_plan plan = plan_used(problem, &arena);
    fdma_problem one = padded_problem(problem, plan);
    const int64_t batch = problem->batch, heads = batch * problem->kv_heads;
    const unsigned blocks = (unsigned)divide_up(problem->kv_len, (int64_t)used_threads);
    fdma_set_aside(&one.exec, &arena);
    if (batch == 0 || problem->kv_len == 0)
        return fdma_run_adapted(inner, &one);
    FDMA_TRY(launch(what, find_valid, {grid_of(blocks, batch), dim3(used_threads)}, problem, plan,
                    batch));
    FDMA_TRY(fdma_run_adapted(inner, &one));
    if (plan.expiry.data == NULL)
        return FDMA_OK;
    return launch(what, end_with_used, {grid_of(blocks, heads), dim3(used_threads)}, problem, plan,
                  heads);
}

const kernel_adapter fdma_cuda_used_adapter = {applies, workspace, run};
