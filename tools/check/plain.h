/* The plain evaluations: each operation as one would first write it, in the dtype of the case.
 *
 * Their error against the reference is what the dtype itself costs; a kernel may make twice that.
 * For 16-bit types they follow a framework that has one kernel for each tensor operation: products
 * are summed in float32, and every intermediate tensor (logits, probabilities, their gradients) is
 * rounded to the dtype. Each function fills the `plain` side of its operation's results. */
#ifndef FDMA_TOOLS_CHECK_PLAIN_H
#define FDMA_TOOLS_CHECK_PLAIN_H

#include "check/problem.h"

/* plain_forward.c */
void check_plain_score(check_problem *problem);
void check_plain_forward(check_problem *problem);

/* plain_backward.c */
void check_plain_backward(check_problem *problem);
void check_plain_score_backward(check_problem *problem);
void check_plain_merge(check_problem *problem);

#endif /* FDMA_TOOLS_CHECK_PLAIN_H */
