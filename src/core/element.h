/* Single elements of any floating-point dtype as doubles, correctly rounded. For code that need not
 * be fast: kernels have conversions of their own. */
#pragma once

#include "core/tensor.h"

/* An element of float16 or bfloat16. */
double fdma_load_short(const fdma_tensor *tensor, int64_t offset);

/* Inline, because the reference calls it in its innermost loops. */
static inline double fdma_load(const fdma_tensor *tensor, int64_t offset) {
    if (tensor->dtype == FDMA_FLOAT64)
        return ((const double *)tensor->data)[offset];
    if (tensor->dtype == FDMA_FLOAT32)
        return (double)((const float *)tensor->data)[offset];
    return fdma_load_short(tensor, offset);
}

void fdma_store(const fdma_tensor *tensor, int64_t offset, double value);

static inline int64_t offset_of(const fdma_tensor *tensor, int64_t x0, int64_t x1, int64_t x2) {
    return x0 * tensor->stride[0] + x1 * tensor->stride[1] + x2 * tensor->stride[2];
}
