/* check_tensor.c - tensors of any dtype and layout for `fdma check`: made, filled and read by the
 * flat index of their elements (last axis fastest, whatever the strides). */
#include "check/check.h"
#include "commands.h"
#include "common/arrays.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct arena_block {
    struct arena_block *next;
    max_align_t data[];
} arena_block;

static arena_block *arena;

void *check_alloc(int64_t count, size_t size) {
    arena_block *block = calloc(1, sizeof *block + (size_t)count * size);
    if (block == NULL) {
        fprintf(stderr, "fdma check: out of memory\n");
        exit(EXIT_FAILED);
    }
    block->next = arena;
    arena = block;
    return block->data;
}

void check_free_all(void) {
    while (arena != NULL) {
        arena_block *block = arena;
        arena = block->next;
        free(block);
    }
}

fdma_tensor check_tensor(fdma_dtype dtype, int32_t rank, const int64_t *shape) {
    fdma_tensor tensor = fdma_dense_tensor(NULL, dtype, rank, shape);
    tensor.data = check_alloc(element_count(&tensor), dtype_bytes(dtype));
    return tensor;
}

/* A [batch, len, heads, head_dim] tensor in one of the layouts that models have. */
fdma_tensor check_layout_tensor(fdma_dtype dtype, check_layout layout, const int64_t *shape) {
    const int64_t batch = shape[0], length = shape[1], heads = shape[2], head_dim = shape[3];
    if (layout == LAYOUT_PLAIN) {
        return check_tensor(dtype, 4, shape);
    }
    /* PACK: the heads of this tensor stand between one head before and two after it. */
    const int64_t swapped[4] = {batch, heads, length, head_dim};
    const int64_t packed[4] = {batch, length, heads + 3, head_dim};
    const int swap = layout == LAYOUT_SWAP;
    fdma_tensor tensor = check_tensor(dtype, 4, swap ? swapped : packed);
    const int64_t stride[4] = {tensor.stride[0], tensor.stride[swap ? 2 : 1],
                               tensor.stride[swap ? 1 : 2], 1};
    memcpy(tensor.shape, shape, sizeof tensor.shape);
    memcpy(tensor.stride, stride, sizeof tensor.stride);
    if (!swap) {
        tensor.data = (char *)tensor.data + (size_t)head_dim * dtype_bytes(dtype);
    }
    return tensor;
}

static int64_t element_offset(const fdma_tensor *tensor, int64_t index) {
    int64_t offset = 0;
    for (int axis = tensor->rank - 1; axis >= 0; axis--) {
        offset += index % tensor->shape[axis] * tensor->stride[axis];
        index /= tensor->shape[axis];
    }
    return offset;
}

static double load(const fdma_tensor *tensor, int64_t at) {
    switch (tensor->dtype) {
    case FDMA_INT32:
        return ((const int32_t *)tensor->data)[at];
    case FDMA_UINT8:
        return ((const uint8_t *)tensor->data)[at];
    default:
        return load_element(tensor->data, tensor->dtype, at);
    }
}

void check_store(fdma_tensor tensor, int64_t index, double value) {
    store_element(tensor.data, tensor.dtype, element_offset(&tensor, index), value);
}

void check_fill(fdma_tensor tensor, double value) {
    const int64_t count = element_count(&tensor);
    const int64_t row = count > 0 ? tensor.shape[tensor.rank - 1] : 1;
    for (int64_t i = 0; i < count; i += row) {
        const int64_t at = element_offset(&tensor, i);
        for (int64_t d = 0; d < row; d++) {
            store_element(tensor.data, tensor.dtype, at + d, value);
        }
    }
}

double *check_widen(fdma_tensor tensor) {
    const int64_t count = element_count(&tensor);
    const int64_t row = count > 0 ? tensor.shape[tensor.rank - 1] : 1; /* lies together */
    double *wide = check_alloc(count, sizeof *wide);
    for (int64_t i = 0; i < count; i += row) {
        const int64_t at = element_offset(&tensor, i);
        for (int64_t d = 0; d < row; d++) {
            wide[i + d] = load(&tensor, at + d);
        }
    }
    return wide;
}

fdma_tensor check_wide_tensor(fdma_tensor tensor) {
    if (tensor.rank == 0) {
        return tensor;
    }
    return fdma_dense_tensor(check_widen(tensor), FDMA_FLOAT64, tensor.rank, tensor.shape);
}

float check_round(fdma_dtype dtype, float value) {
    if (dtype == FDMA_FLOAT32) {
        return value;
    }
    uint16_t bits;
    store_element(&bits, dtype, 0, (double)value);
    return (float)load_element(&bits, dtype, 0);
}

double check_step(fdma_dtype dtype, double magnitude) {
    const int digits = dtype == FDMA_FLOAT16 ? 11 : dtype == FDMA_BFLOAT16 ? 8 : FLT_MANT_DIG;
    const int lowest = dtype == FDMA_FLOAT16 ? -13 : FLT_MIN_EXP;
    int exponent = lowest;
    frexp(magnitude, &exponent);
    return ldexp(1, (magnitude > 0 && exponent > lowest ? exponent : lowest) - digits);
}
