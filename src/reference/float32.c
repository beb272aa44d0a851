/* The kernels "reference/float32": the plain evaluation; see reference/real.h. */
#define FDMA_REFERENCE_FLOAT32
#include "reference/reference.h"

#include "reference/backward.h"
#include "reference/forward.h"
#include "reference/merge.h"
#include "reference/score.h"
#include "reference/score_backward.h"

static const char *refuses(const fdma_problem *problem) {
    return problem->dtype == FDMA_FLOAT64 ? "float64 tensors" : NULL;
}

#define KERNEL(operation, workspace, run)                                                          \
    {"reference/float32", operation, nothing_missing, refuses, workspace, run, false}

static const fdma_kernel kernels[] = {
    KERNEL(operation_score, no_workspace, run_score),
    KERNEL(operation_forward, forward_workspace, run_forward),
    KERNEL(operation_backward, backward_workspace, run_backward),
    KERNEL(operation_score_backward, score_backward_workspace, run_score_backward),
    KERNEL(operation_merge, no_workspace, run_merge),
    KERNEL(operation_merge_backward, no_workspace, run_merge_backward),
};

const kernel_table fdma_reference_float32 = {kernels, sizeof kernels / sizeof kernels[0]};
