/* What the outputs of every kernel are compared with: the results of the kernel "reference" on the
 * same inputs in float64, and those of the plain evaluation, "reference/float32", on the inputs
 * that the kernel is given. The error of the plain evaluation is what the dtype itself costs; a
 * kernel may make twice that. */
#pragma once

#include "check/report.h"

/*! check_evaluate() - fills the problem's selection, the inputs of its gradients and the results
 *  that at least one of `count` kernels is compared with. check_make_inputs() has made the other
 *  inputs. */
fdma_status check_evaluate(check_problem *problem, const check_tally *tallies, int count);
