/* The table of the reference's kernels. */
#include "reference/reference.h"

static const char *nothing_missing(void) { return NULL; }

static const char *refuses_nothing(const fdma_problem *problem) {
    (void)problem;
    return NULL;
}

static size_t no_workspace(const fdma_problem *problem) {
    (void)problem;
    return 0;
}

#define KERNEL(operation, workspace)                                                               \
    {"reference",                                                                                  \
     operation_##operation,                                                                        \
     nothing_missing,                                                                              \
     refuses_nothing,                                                                              \
     workspace,                                                                                    \
     fdma_reference_##operation,                                                                   \
     false}

static const fdma_kernel kernels[] = {
    KERNEL(score, no_workspace),
    KERNEL(select, fdma_reference_select_workspace),
    KERNEL(lists, no_workspace),
    KERNEL(forward, fdma_reference_forward_workspace),
    KERNEL(backward, fdma_reference_backward_workspace),
    KERNEL(score_backward, fdma_reference_score_backward_workspace),
    KERNEL(merge, no_workspace),
    KERNEL(merge_backward, no_workspace),
};

static const kernel_table table = {kernels, sizeof kernels / sizeof kernels[0]};
const kernel_table *const fdma_reference_tables[] = {&table, NULL};
