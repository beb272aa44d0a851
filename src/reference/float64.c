/* The kernels "reference": docs/algorithm.md in plain loops and double precision. Every other
 * kernel is checked against them. They alone take float64. */
#include "reference/reference.h"

#include "reference/backward.h"
#include "reference/forward.h"
#include "reference/merge.h"
#include "reference/score.h"
#include "reference/score_backward.h"

static const char *refuses(const fdma_problem *problem) {
    (void)problem;
    return NULL;
}

#define KERNEL(operation, workspace, run)                                                          \
    {"reference", operation, nothing_missing, refuses, workspace, run, false}

static const fdma_kernel kernels[] = {
    KERNEL(operation_score, no_workspace, run_score),
    KERNEL(operation_select, fdma_reference_select_workspace, fdma_reference_select),
    KERNEL(operation_lists, no_workspace, fdma_reference_lists),
    KERNEL(operation_forward, forward_workspace, run_forward),
    KERNEL(operation_backward, backward_workspace, run_backward),
    KERNEL(operation_score_backward, score_backward_workspace, run_score_backward),
    KERNEL(operation_merge, no_workspace, run_merge),
    KERNEL(operation_merge_backward, no_workspace, run_merge_backward),
};

static const kernel_table table = {kernels, sizeof kernels / sizeof kernels[0]};
const kernel_table *const fdma_reference_tables[] = {&table, &fdma_reference_float32, NULL};
