/* Kernels of the CPU add to float32 sums in the workspace in place of a 16-bit dattn_bias. */
#include "core/pair_sums.h"

#include "core/adapter.h"
#include "core/element.h"
#include "core/error.h"

static bool applies(const fdma_kernel *kernel, const fdma_problem *problem) {
    (void)kernel;
    return has_short_pairs(problem);
}

/* Replaces dattn_bias by sums from the arena. */
static fdma_problem sum_problem(const fdma_problem *problem, fdma_arena *arena) {
    const size_t count = (size_t)count_elements(&problem->dattn_bias);
    float *const sums = fdma_arena_take(arena, count * sizeof *sums);
    fdma_problem summed = *problem;
    summed.dattn_bias = dense_pairs(&problem->dattn_bias, sums, FDMA_FLOAT32);
    fdma_set_aside(&summed.exec, arena);
    return summed;
}

static void round_sums(const float *from, const fdma_tensor *to) {
    for (int64_t x0 = 0; x0 < to->shape[0] && !is_empty(to); x0++)
        for (int64_t x1 = 0; x1 < to->shape[1]; x1++)
            for (int64_t x2 = 0; x2 < to->shape[2]; x2++, from += to->shape[3])
                fdma_store_row(to, offset_of(to, x0, x1, x2), from, to->shape[3]);
}

static size_t workspace(const adapted_kernel *inner, const fdma_problem *problem,
                        check_depth depth) {
    fdma_arena arena = {0};
    const fdma_problem summed = sum_problem(problem, &arena);
    return fdma_arena_size(&arena) + fdma_adapted_workspace(inner, &summed, depth);
}

static fdma_status run(const adapted_kernel *inner, const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const fdma_problem summed = sum_problem(problem, &arena);
    FDMA_TRY(fdma_run_adapted(inner, &summed));
    round_sums(summed.dattn_bias.data, &problem->dattn_bias);
    return FDMA_OK;
}

const kernel_adapter fdma_pair_sums_adapter = {applies, workspace, run};
