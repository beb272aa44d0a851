/* The plain evaluation of a problem: the kernels "reference/float32" on the same tensors as the
 * kernel that is judged. Their error against the reference is what the dtype itself costs; a kernel
 * may make twice that. */
#ifndef FDMA_TOOLS_CHECK_PLAIN_H
#define FDMA_TOOLS_CHECK_PLAIN_H

#include "check/problem.h"

/*! check_evaluate_plainly() - fills `plain` and `scatter` of the problem's results. */
fdma_status check_evaluate_plainly(check_problem *problem);

#endif /* FDMA_TOOLS_CHECK_PLAIN_H */
