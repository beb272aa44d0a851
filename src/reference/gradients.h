/* The reference's gradients and merging, as rows of its table. */
#ifndef FDMA_REFERENCE_GRADIENTS_H
#define FDMA_REFERENCE_GRADIENTS_H

#include "core/problem.h"

size_t fdma_reference_backward_workspace(const fdma_problem *problem);
fdma_status fdma_reference_backward(const fdma_problem *problem);
size_t fdma_reference_score_backward_workspace(const fdma_problem *problem);
fdma_status fdma_reference_score_backward(const fdma_problem *problem);
fdma_status fdma_reference_merge(const fdma_problem *problem);
fdma_status fdma_reference_merge_backward(const fdma_problem *problem);

#endif
