/* dattn_bias in 16 bits. Each of its elements is a sum in float32 that is rounded once. */
#pragma once

#include "core/problem.h"

/* True if dattn_bias has 16-bit elements. */
static inline bool has_short_pairs(const fdma_problem *problem) {
    return is_present(&problem->dattn_bias) && fdma_dtype_size(problem->dattn_bias.dtype) == 2;
}

/* Elements of a tensor of rank 4; 0 if it is absent. */
static inline int64_t count_elements(const fdma_tensor *tensor) {
    const int64_t *const shape = tensor->shape;
    return is_present(tensor) ? shape[0] * shape[1] * shape[2] * shape[3] : 0;
}

/* A contiguous tensor of dattn_bias's shape, broadcast along the same axes. */
static inline fdma_tensor dense_pairs(const fdma_tensor *dattn_bias, void *data, fdma_dtype dtype) {
    fdma_tensor dense = *dattn_bias;
    dense.data = data;
    dense.dtype = dtype;
    for (int64_t axis = 3, stride = 1; axis >= 0; stride *= dense.shape[axis--])
        dense.stride[axis] = dattn_bias->stride[axis] == 0 ? 0 : stride;
    return dense;
}
