/* The results that every kernel of a case should give: those of the kernel "reference", for the
 * same inputs as rounded to the dtype of the case, in float64. */
#ifndef FDMA_TOOLS_CHECK_REFERENCE_H
#define FDMA_TOOLS_CHECK_REFERENCE_H

#include "check/problem.h"

/*! check_widen_problem() - the problem with its floating inputs in float64. */
check_problem check_widen_problem(const check_problem *problem);

/*! check_reference_forward() - the selection, z, out and lse. */
fdma_status check_reference_forward(check_problem *problem);

/*! check_reference_backward() - the results of backward, score_backward, merge and
 *  merge_backward, whose inputs are there. */
fdma_status check_reference_backward(check_problem *problem);

#endif /* FDMA_TOOLS_CHECK_REFERENCE_H */
