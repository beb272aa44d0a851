/* One call of each operation with the problem's tensors, by the kernel of that name. Outputs are
 * the caller's, in host memory. When the status is not FDMA_OK, fdma_last_error() says why. */
#ifndef FDMA_TOOLS_CHECK_RUN_H
#define FDMA_TOOLS_CHECK_RUN_H

#include "check/problem.h"

typedef struct check_backward_outputs {
    fdma_tensor dq, dk, dv, dbias;
} check_backward_outputs;

typedef struct check_score_outputs {
    fdma_tensor dv, ddt_proj, da;
} check_score_outputs;

typedef struct check_merge_outputs {
    fdma_tensor dout[2], dlse[2];
} check_merge_outputs;

/*! check_backward_outputs_of(), check_score_outputs_of(), check_merge_outputs_of() - contiguous
 *  outputs in the dtypes of the problem's inputs; dv of scores holds what it is added to. */
check_backward_outputs check_backward_outputs_of(const check_problem *problem);
check_score_outputs check_score_outputs_of(const check_problem *problem);
check_merge_outputs check_merge_outputs_of(const check_problem *problem);

/* run.c */
fdma_status check_run_score(const check_problem *problem, const char *kernel, fdma_tensor score,
                            fdma_tensor bias);
fdma_status check_run_select(const check_problem *problem, const char *kernel,
                             fdma_selection *selection);
fdma_status check_run_lists(const check_problem *problem, const char *kernel, int64_t tile_len,
                            fdma_tensor list, fdma_tensor count);
fdma_status check_run_forward(const check_problem *problem, const char *kernel, fdma_tensor out,
                              fdma_tensor lse);

/* run_backward.c */
fdma_status check_run_backward(const check_problem *problem, const char *kernel, bool deterministic,
                               const check_backward_outputs *outputs);
fdma_status check_run_score_backward(const check_problem *problem, const char *kernel,
                                     const check_score_outputs *outputs);
fdma_status check_run_merge(const check_problem *problem, const char *kernel, fdma_tensor out,
                            fdma_tensor lse);
fdma_status check_run_merge_backward(const check_problem *problem, const char *kernel,
                                     const check_merge_outputs *outputs);

#endif /* FDMA_TOOLS_CHECK_RUN_H */
