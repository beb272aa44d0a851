/* Tensors as arguments, and their checks. */
#pragma once

#include "fdma.h"

#include <stdbool.h>

/* Every file that computes includes this one. */
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error                                                                                             \
    "build without -ffast-math, -Ofast and -ffinite-math-only: results depend on NaN and infinity"
#endif
#if SIZE_MAX < UINT64_MAX || UINTPTR_MAX < UINT64_MAX
#error "size_t and pointers need 64 bits: workspace sizes would overflow"
#endif

enum { max_rank = 4 };

/* Sets of dtypes, as bits. */
enum {
    takes_float32 = 1 << FDMA_FLOAT32,
    takes_float16 = 1 << FDMA_FLOAT16,
    takes_bfloat16 = 1 << FDMA_BFLOAT16,
    takes_float64 = 1 << FDMA_FLOAT64,
    takes_int32 = 1 << FDMA_INT32,
    takes_uint8 = 1 << FDMA_UINT8,
    takes_int64 = 1 << FDMA_INT64,
    takes_floats = takes_float32 | takes_float16 | takes_bfloat16 | takes_float64,
    takes_wide_floats = takes_float32 | takes_float64,
};

/* Bytes of an element; 0 if there is no such dtype. */
static inline size_t fdma_dtype_size(fdma_dtype dtype) {
    static const uint8_t sizes[] = {0, 4, 2, 2, 8, 4, 1, 8}; // in the order of fdma_dtype
    return (size_t)dtype < sizeof sizes ? sizes[dtype] : 0;
}

const char *fdma_dtype_name(fdma_dtype dtype);

static inline bool is_present(const fdma_tensor *tensor) { return tensor->rank != 0; }

/* Cuts a tensor to `count` elements of an axis, unless it is absent. */
static inline void cut_axis(fdma_tensor *tensor, int axis, int64_t first, int64_t count) {
    const size_t before = (size_t)(first * tensor->stride[axis]);
    if (!is_present(tensor))
        return;
    if (tensor->data != NULL)
        tensor->data = (uint8_t *)tensor->data + before * fdma_dtype_size(tensor->dtype);
    tensor->shape[axis] = count;
}

static inline bool is_empty(const fdma_tensor *tensor) {
    for (int axis = 0; axis < tensor->rank; axis++)
        if (tensor->shape[axis] == 0)
            return true;
    return false;
}

/* Checks that the reserved words of a struct, which the message names, are 0. */
fdma_status fdma_check_reserved(const char *name, const int32_t *reserved, size_t bytes);

/* Checks rank, dtype and that no axis is negative, so that the shape can be used. */
fdma_status fdma_check_form(const char *name, const fdma_tensor *tensor, int32_t rank,
                            unsigned dtypes);

/* Checks everything else about one tensor: its strides, its size and, if `data_needed`, its data
 * pointer, which may be NULL where only the workspace size is asked for. No two elements of an
 * output may share memory. */
fdma_status fdma_check_layout(const char *name, const fdma_tensor *tensor, bool output,
                              bool data_needed);

/* Writes 0 to all elements of a tensor of rank 4. */
void fdma_clear_tensor(const fdma_tensor *tensor);
