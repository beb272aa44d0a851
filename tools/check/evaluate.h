/* Every kernel is compared with two results: the kernel "reference" on the same inputs in float64,
 * and the plain evaluation, "reference/float32", on the kernel's own inputs. The error of the plain
 * evaluation is the cost of the dtype itself; a kernel may make twice that error. */
#pragma once

#include "check/report.h"

/*! check_evaluate() - fills the problem's selection, the inputs of its gradients and the results
 *  that at least one of `count` kernels is compared with. check_make_inputs() has made the other
 *  inputs. */
fdma_status check_evaluate(check_problem *problem, const check_tally *tallies, int count);
