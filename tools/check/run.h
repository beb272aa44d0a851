/* One call of each operation with the problem's tensors, by the kernel of that name. Outputs are
 * the caller's, in host memory, in the order of check_operations[]. When the status is not FDMA_OK,
 * fdma_last_error() says why. */
#ifndef FDMA_TOOLS_CHECK_RUN_H
#define FDMA_TOOLS_CHECK_RUN_H

#include "check/problem.h"

typedef fdma_status check_run(const check_problem *problem, const char *kernel,
                              const fdma_tensor *outputs);

/* run.c */
check_run check_run_score, check_run_forward;
fdma_status check_run_select(const check_problem *problem, const char *kernel,
                             fdma_selection *selection);
fdma_status check_run_lists(const check_problem *problem, const char *kernel, int64_t tile_len,
                            fdma_tensor list, fdma_tensor count);

/* run_backward.c */
check_run check_run_backward, check_run_score_backward, check_run_merge, check_run_merge_backward;

#endif /* FDMA_TOOLS_CHECK_RUN_H */
