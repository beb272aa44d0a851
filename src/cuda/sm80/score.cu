/* Score and bias of each key on any device of compute capability 8.0 and later: a block takes some
 * keys of one sequence, a warp one key at a time, all kv heads of it. */
#include "cuda/device/element.cuh"
#include "cuda/device/host.cuh"

static const char *refuses(const fdma_problem *problem) {
    if (problem->dtype == FDMA_FLOAT64 || problem->score.dtype == FDMA_FLOAT64 ||
        problem->bias.dtype == FDMA_FLOAT64)
        return "float64 tensors, supported: float32, float16, bfloat16";
    return fdma_refuses_before_sm80(problem);
}

static size_t workspace(const fdma_problem *problem) {
    (void)problem;
    return 0;
}

__global__ void score_keys(const float *v) { (void)v; }

static fdma_status run(const fdma_problem *problem) {
    return launch("score", score_keys, {dim3(1), dim3(128)}, problem,
                  (const float *)problem->v.data);
}

static const kernel_row rows[] = {
    {"cuda/sm80", operation_score, fdma_missing_sm80, refuses, workspace, run, true}};

extern "C" const kernel_table fdma_cuda_sm80_score = {rows, sizeof rows / sizeof rows[0]};
