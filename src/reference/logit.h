/* The logit of a query and a key. */
#pragma once

#include "reference/real.h"

typedef struct logit {
    real value;
    real slope; /* derivative of the softcap; 1 without one */
} logit;

static inline logit logit_of(const fdma_problem *problem, int64_t b, int64_t i, int64_t h,
                             int64_t j) {
    const fdma_dtype dtype = problem->dtype;
    const int64_t g = h / problem->group;
    const real scale = (real)problem->scale, cap = (real)problem->softcap;
    const real product = dot(&problem->q, offset_of(&problem->q, b, i, h), &problem->k,
                             offset_of(&problem->k, b, j, g), problem->head_dim);
    real s = rounded(dtype, rounded(dtype, product) * scale), slope = 1;
    if (cap > 0) {
        const real capped = rounded(dtype, tanh(s / cap));
        s = rounded(dtype, cap * capped);
        slope = rounded(dtype, 1 - capped * capped);
    }
    if (is_present(&problem->bias))
        s += load(&problem->bias, offset_of(&problem->bias, b, g, j));
    return (logit){rounded(dtype, s), slope};
}
