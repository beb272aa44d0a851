/* The kernels that are compiled in two precisions, as entries of a table. */
#pragma once

#include "reference/reference.h"

#include "reference/backward.h"
#include "reference/decode.h"
#include "reference/forward.h"
#include "reference/merge.h"
#include "reference/probabilities.h"
#include "reference/score.h"
#include "reference/score_backward.h"

static const char *nothing_missing(void) { return NULL; }

static const char *refuses(const fdma_problem *problem) {
    return sizeof(real) == sizeof(float) && problem->dtype == FDMA_FLOAT64 ? "float64 tensors"
                                                                           : NULL;
}

static size_t no_workspace(const fdma_problem *problem) {
    (void)problem;
    return 0;
}

#define KERNEL(OPERATION, WORKSPACE, RUN)                                                          \
    {REFERENCE_NAME, operation_##OPERATION, nothing_missing, refuses, WORKSPACE, RUN, false, 0}

#define REAL_KERNELS                                                                               \
    KERNEL(score, no_workspace, run_score), KERNEL(forward, forward_workspace, run_forward),       \
        KERNEL(backward, backward_workspace, run_backward),                                        \
        KERNEL(decode, decode_workspace, run_decode),                                              \
        KERNEL(score_backward, score_backward_workspace, run_score_backward),                      \
        KERNEL(merge, no_workspace, run_merge),                                                    \
        KERNEL(merge_backward, no_workspace, run_merge_backward),                                  \
        KERNEL(probabilities, forward_workspace, run_probabilities)
