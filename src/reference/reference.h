/* The reference backend: the specification, in plain loops and double precision. Every other kernel
 * is checked against it, and it alone takes float64. */
#ifndef FDMA_REFERENCE_REFERENCE_H
#define FDMA_REFERENCE_REFERENCE_H

#include "core/element.h"
#include "core/kernel.h"

extern const kernel_table *const fdma_reference_tables[];

fdma_status fdma_reference_score(const fdma_problem *problem);
size_t fdma_reference_score_backward_workspace(const fdma_problem *problem);
fdma_status fdma_reference_score_backward(const fdma_problem *problem);
size_t fdma_reference_select_workspace(const fdma_problem *problem);
fdma_status fdma_reference_select(const fdma_problem *problem);
fdma_status fdma_reference_lists(const fdma_problem *problem);
size_t fdma_reference_forward_workspace(const fdma_problem *problem);
fdma_status fdma_reference_forward(const fdma_problem *problem);
size_t fdma_reference_backward_workspace(const fdma_problem *problem);
fdma_status fdma_reference_backward(const fdma_problem *problem);
fdma_status fdma_reference_merge(const fdma_problem *problem);
fdma_status fdma_reference_merge_backward(const fdma_problem *problem);

/* The logit s of query i, head h and key j. `slope` is NULL, or receives the derivative of the
 * softcap, 1 without one. */
double fdma_reference_logit(const fdma_problem *problem, int64_t b, int64_t i, int64_t h, int64_t j,
                            double *slope);

static inline double dot(const fdma_tensor *x, int64_t at_x, const fdma_tensor *y, int64_t at_y,
                         int64_t count) {
    double sum = 0;
    for (int64_t d = 0; d < count; d++)
        sum += fdma_load(x, at_x + d) * fdma_load(y, at_y + d);
    return sum;
}

/* Writes a gradient, or adds it to what is there. */
static inline void store_gradient(const fdma_tensor *tensor, int64_t at, double value, bool add) {
    fdma_store(tensor, at, add ? fdma_load(tensor, at) + value : value);
}

#endif
