/* See check/tensor.h. */
#include "check/tensor.h"

#include "commands.h"
#include "common/arrays.h"
#include "common/random.h"
#include "common/text.h"

#include <stdbool.h>
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
        print_error("fdma check: not enough memory");
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

fdma_tensor check_tensor_like(fdma_tensor tensor) {
    return tensor.rank > 0 ? check_tensor(tensor.dtype, tensor.rank, tensor.shape) : tensor;
}

fdma_tensor check_layout_tensor(fdma_dtype dtype, check_layout layout, const int64_t *shape) {
    const int64_t batch = shape[0], length = shape[1], heads = shape[2], head_dim = shape[3];
    if (layout == LAYOUT_PLAIN)
        return check_tensor(dtype, 4, shape);
    // packed: one foreign head lies before the heads of this tensor and two lie after them
    const int64_t swapped[4] = {batch, heads, length, head_dim};
    const int64_t packed[4] = {batch, length, heads + 3, head_dim};
    const bool swap = layout == LAYOUT_SWAP;
    fdma_tensor tensor = check_tensor(dtype, 4, swap ? swapped : packed);
    const int64_t stride[4] = {tensor.stride[0], tensor.stride[swap ? 2 : 1],
                               tensor.stride[swap ? 1 : 2], 1};
    memcpy(tensor.shape, shape, sizeof tensor.shape);
    memcpy(tensor.stride, stride, sizeof tensor.stride);
    if (!swap)
        tensor.data = (char *)tensor.data + (size_t)head_dim * dtype_bytes(dtype);
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

/* The elements of the last axis are adjacent in memory. */
static int64_t run_length(const fdma_tensor *tensor, int64_t count) {
    return count > 0 ? tensor->shape[tensor->rank - 1] : 1;
}

void check_store(fdma_tensor tensor, int64_t index, double value) {
    store_element(tensor.data, tensor.dtype, element_offset(&tensor, index), value);
}

void check_store_all(fdma_tensor tensor, const double *values) {
    const int64_t count = element_count(&tensor), run = run_length(&tensor, count);
    for (int64_t i = 0; i < count; i += run) {
        const int64_t at = element_offset(&tensor, i);
        for (int64_t d = 0; d < run; d++)
            store_element(tensor.data, tensor.dtype, at + d, values[i + d]);
    }
}

void check_fill(fdma_tensor tensor, double value) {
    const int64_t count = element_count(&tensor), run = run_length(&tensor, count);
    const size_t bytes = dtype_bytes(tensor.dtype);
    if (count == 0) // or absent, without a dtype
        return;
    char *const filled = check_alloc(run, bytes); // elements of the last axis
    for (int64_t d = 0; d < run; d++)
        store_element(filled, tensor.dtype, d, value);
    for (int64_t i = 0; i < count; i += run)
        memcpy((char *)tensor.data + (size_t)element_offset(&tensor, i) * bytes, filled,
               (size_t)run * bytes);
}

void check_fill_normal(fdma_tensor tensor, uint64_t *random, double deviation) {
    const int64_t count = element_count(&tensor);
    for (int64_t i = 0; i < count; i++)
        check_store(tensor, i, deviation * random_normal(random));
}

double *check_widen(fdma_tensor tensor) {
    const int64_t count = element_count(&tensor), run = run_length(&tensor, count);
    double *wide = check_alloc(count, sizeof *wide);
    for (int64_t i = 0; i < count; i += run) {
        const int64_t at = element_offset(&tensor, i);
        if (tensor.dtype == FDMA_FLOAT64)
            memcpy(wide + i, (double *)tensor.data + at, (size_t)run * sizeof *wide);
        else
            for (int64_t d = 0; d < run; d++)
                wide[i + d] = load_element(tensor.data, tensor.dtype, at + d);
    }
    return wide;
}

fdma_tensor check_wide_tensor(fdma_tensor tensor) {
    if (tensor.rank == 0)
        return tensor;
    return fdma_dense_tensor(check_widen(tensor), FDMA_FLOAT64, tensor.rank, tensor.shape);
}
