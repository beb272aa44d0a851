/* Checks of single tensors: rank, dtype, shape, strides, size, alignment. */
#include "core/tensor.h"

#include "core/error.h"

#include <stdio.h>
#include <string.h>

static const char *const dtype_names[] = {
    [FDMA_FLOAT32] = "float32", [FDMA_FLOAT16] = "float16", [FDMA_BFLOAT16] = "bfloat16",
    [FDMA_FLOAT64] = "float64", [FDMA_INT32] = "int32",     [FDMA_UINT8] = "uint8",
    [FDMA_INT64] = "int64",
};
enum { dtype_count = sizeof dtype_names / sizeof dtype_names[0] };

const char *fdma_dtype_name(fdma_dtype dtype) {
    return fdma_dtype_size(dtype) > 0 ? dtype_names[dtype] : "unknown";
}

fdma_tensor fdma_dense_tensor(void *data, fdma_dtype dtype, int32_t rank, const int64_t *shape) {
    fdma_tensor tensor = {.data = data, .dtype = dtype, .rank = rank};
    const int32_t axes = rank < 0 ? 0 : rank > max_rank ? max_rank : rank;
    int64_t stride = 1;
    for (int32_t axis = axes - 1; axis >= 0; axis--) {
        tensor.shape[axis] = shape[axis];
        tensor.stride[axis] = stride;
        // a product that overflows is refused when the tensor is checked
        if (__builtin_mul_overflow(stride, shape[axis], &stride))
            stride = INT64_MAX;
    }
    return tensor;
}

fdma_tensor fdma_tensor_1d(void *data, fdma_dtype dtype, int64_t n0) {
    return fdma_dense_tensor(data, dtype, 1, (const int64_t[]){n0});
}

fdma_tensor fdma_tensor_2d(void *data, fdma_dtype dtype, int64_t n0, int64_t n1) {
    return fdma_dense_tensor(data, dtype, 2, (const int64_t[]){n0, n1});
}

fdma_tensor fdma_tensor_3d(void *data, fdma_dtype dtype, int64_t n0, int64_t n1, int64_t n2) {
    return fdma_dense_tensor(data, dtype, 3, (const int64_t[]){n0, n1, n2});
}

fdma_tensor fdma_tensor_4d(void *data, fdma_dtype dtype, int64_t n0, int64_t n1, int64_t n2,
                           int64_t n3) {
    return fdma_dense_tensor(data, dtype, 4, (const int64_t[]){n0, n1, n2, n3});
}

/* "float32, float16 or bfloat16" */
static const char *list_dtypes(unsigned dtypes, char *text, size_t size) {
    size_t used = 0;
    int left = __builtin_popcount(dtypes);
    text[0] = '\0';
    for (int dtype = 1; dtype < dtype_count; dtype++) {
        if (!(dtypes & 1u << dtype))
            continue;
        left--;
        const char *const join = left > 1 ? ", " : left == 1 ? " or " : "";
        const int wrote = snprintf(text + used, size - used, "%s%s", dtype_names[dtype], join);
        used += (size_t)wrote;
    }
    return text;
}

fdma_status fdma_check_reserved(const char *name, const int32_t *reserved, size_t bytes) {
    for (size_t n = 0; n < bytes / sizeof *reserved; n++)
        FDMA_REQUIRE(reserved[n] == 0, FDMA_INVALID_ARGUMENT,
                     "%s.reserved: is not zero, want 0: a struct begins as {0}", name);
    return FDMA_OK;
}

fdma_status fdma_check_form(const char *name, const fdma_tensor *tensor, int32_t rank,
                            unsigned dtypes) {
    char list[96];
    FDMA_REQUIRE(is_present(tensor), FDMA_INVALID_ARGUMENT,
                 "%s: is absent, want a tensor of rank %d", name, rank);
    FDMA_REQUIRE(tensor->rank == rank, FDMA_INVALID_ARGUMENT, "%s: rank is %d, want %d", name,
                 tensor->rank, rank);
    FDMA_TRY(fdma_check_reserved(name, tensor->reserved, sizeof tensor->reserved));
    FDMA_REQUIRE(fdma_dtype_size(tensor->dtype) > 0, FDMA_INVALID_ARGUMENT,
                 "%s: dtype is %d, want %s", name, (int)tensor->dtype,
                 list_dtypes(dtypes, list, sizeof list));
    FDMA_REQUIRE(dtypes & 1u << tensor->dtype, FDMA_UNSUPPORTED, "%s: dtype is %s, supported: %s",
                 name, fdma_dtype_name(tensor->dtype), list_dtypes(dtypes, list, sizeof list));
    for (int axis = 0; axis < rank; axis++)
        FDMA_REQUIRE(tensor->shape[axis] >= 0, FDMA_INVALID_ARGUMENT,
                     "%s: axis %d has %lld elements, want 0 or more", name, axis,
                     (long long)tensor->shape[axis]);
    return FDMA_OK;
}

static const int64_t most_bytes = INT64_C(1) << 48; // more than any memory holds

/* Checks the strides, and that byte offsets and the number of elements fit int64. */
static fdma_status check_strides(const char *name, const fdma_tensor *tensor) {
    const int last = tensor->rank - 1;
    int64_t elements = 1;
    int64_t extent = 1;
    bool overflow = false;
    FDMA_REQUIRE(tensor->shape[last] <= 1 || tensor->stride[last] == 1, FDMA_INVALID_ARGUMENT,
                 "%s: the last stride is %lld, want 1", name, (long long)tensor->stride[last]);
    for (int axis = 0; axis <= last; axis++) {
        const int64_t length = tensor->shape[axis];
        int64_t reach = 0;
        FDMA_REQUIRE(length <= 1 || tensor->stride[axis] >= 0, FDMA_INVALID_ARGUMENT,
                     "%s: stride %d is %lld, want 0 or more", name, axis,
                     (long long)tensor->stride[axis]);
        overflow |= __builtin_mul_overflow(elements, length > 1 ? length : 1, &elements);
        if (length <= 1)
            continue;
        overflow |= __builtin_mul_overflow(length - 1, tensor->stride[axis], &reach);
        overflow |= __builtin_add_overflow(extent, reach, &extent);
    }
    const int64_t size = (int64_t)fdma_dtype_size(tensor->dtype);
    overflow |= __builtin_mul_overflow(elements, size, &elements);
    overflow |= __builtin_mul_overflow(extent, size, &extent);
    overflow |= extent > INT64_MAX - (int64_t)((uintptr_t)tensor->data & INT64_MAX);
    overflow |= elements > most_bytes; // so that sums of sizes stay far below 2^63
    FDMA_REQUIRE(!overflow, FDMA_INVALID_ARGUMENT,
                 "%s: is too large for int64 sums, want at most 2^48 bytes", name);
    return FDMA_OK;
}

/* True if each axis steps past everything that the axes of smaller stride reach. */
static bool has_distinct_elements(const fdma_tensor *tensor) {
    if (is_empty(tensor))
        return true;
    bool used[max_rank] = {false};
    int64_t reach = 0; // the largest offset that the axes so far reach
    for (int round = 0; round < tensor->rank; round++) {
        int smallest = -1;
        for (int axis = 0; axis < tensor->rank; axis++)
            if (!used[axis] && (smallest < 0 || tensor->stride[axis] < tensor->stride[smallest]))
                smallest = axis;
        used[smallest] = true;
        if (tensor->shape[smallest] == 1)
            continue;
        if (tensor->stride[smallest] <= reach)
            return false;
        reach += (tensor->shape[smallest] - 1) * tensor->stride[smallest];
    }
    return true;
}

fdma_status fdma_check_layout(const char *name, const fdma_tensor *tensor, bool output,
                              bool data_needed) {
    FDMA_TRY(check_strides(name, tensor));
    FDMA_REQUIRE(!output || has_distinct_elements(tensor), FDMA_INVALID_ARGUMENT,
                 "%s: its strides make elements overlap, want distinct elements", name);
    if (!data_needed || is_empty(tensor))
        return FDMA_OK;
    FDMA_REQUIRE(tensor->data != NULL, FDMA_INVALID_ARGUMENT, "%s: data is NULL, want its elements",
                 name);
    FDMA_REQUIRE((uintptr_t)tensor->data % fdma_dtype_size(tensor->dtype) == 0,
                 FDMA_INVALID_ARGUMENT, "%s: data is %p, want it aligned to its %zu-byte elements",
                 name, tensor->data, fdma_dtype_size(tensor->dtype));
    return FDMA_OK;
}

void fdma_clear_tensor(const fdma_tensor *tensor) {
    const int64_t *const stride = tensor->stride, *const shape = tensor->shape;
    const size_t size = fdma_dtype_size(tensor->dtype);
    for (int64_t x0 = 0; x0 < shape[0] && !is_empty(tensor); x0++)
        for (int64_t x1 = 0; x1 < shape[1]; x1++)
            for (int64_t x2 = 0; x2 < shape[2]; x2++) {
                const int64_t row = x0 * stride[0] + x1 * stride[1] + x2 * stride[2];
                memset((uint8_t *)tensor->data + (size_t)row * size, 0, (size_t)shape[3] * size);
            }
}
