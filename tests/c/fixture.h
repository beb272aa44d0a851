/* fixture.h - what the C tests of the library share: lists of kernels, repeatable numbers,
 * tensors from test_alloc(), and calls that allocate their own workspace. */
#ifndef FIXTURE_H
#define FIXTURE_H

#include "fdma.h"
#include "test.h"

#include "core/error.h"

#include <stddef.h>

enum { kernel_limit = 32 };

/* Kernels of a device have tests of their own: see device.h. */
static inline int is_device_kernel(const char *name) { return strncmp(name, "cuda/", 5) == 0; }

/* The names of the kernels of one operation that run on this machine's CPU. */
typedef struct kernel_list {
    const char *name[kernel_limit];
    int count;
} kernel_list;

/* Whether a kernel that runs here takes tensors of this type, for more rows than decode takes. Only
 * forward, backward and merge are asked; the others take every type. */
static inline int operation_takes(const char *operation, const char *kernel, fdma_dtype dtype) {
    enum { q_len = 32, head_dim = 8 };
    static double row[q_len * head_dim], written[4][q_len * head_dim];
    const fdma_tensor one = fdma_tensor_4d(row, dtype, 1, q_len, 1, head_dim);
    const fdma_tensor lse = fdma_tensor_3d(row, FDMA_FLOAT32, 1, 1, q_len);
    const fdma_exec exec = {.kernel = kernel};
    fdma_tensor to[4] = {one, one, one, lse};
    for (int i = 0; i < 4; i++)
        to[i].data = written[i];
    size_t bytes;
    fdma_status status = FDMA_OK;
    if (strcmp(operation, "forward") == 0) {
        const fdma_forward_args args = {
            .size = sizeof args, .q = one, .k = one, .v = one, .out = to[0], .exec = exec};
        status = fdma_forward_workspace(&args, &bytes);
    } else if (strcmp(operation, "backward") == 0) {
        const fdma_backward_args args = {.size = sizeof args,
                                         .dout = one,
                                         .out = one,
                                         .lse = lse,
                                         .q = one,
                                         .k = one,
                                         .v = one,
                                         .dq = to[0],
                                         .dk = to[1],
                                         .dv = to[2],
                                         .exec = exec};
        status = fdma_backward_workspace(&args, &bytes);
    } else if (strcmp(operation, "merge") == 0) {
        const fdma_merge_args args = {.size = sizeof args,
                                      .out_a = one,
                                      .lse_a = lse,
                                      .out_b = one,
                                      .lse_b = lse,
                                      .out = to[0],
                                      .exec = exec};
        status = fdma_merge_workspace(&args, &bytes);
    }
    CHECK(status == FDMA_OK || status == FDMA_UNSUPPORTED);
    return status == FDMA_OK;
}

static inline int kernel_takes(const char *kernel, fdma_dtype dtype) {
    return operation_takes("forward", kernel, dtype);
}

/* The name under which tests force a kernel: of decode, which takes few rows only, that of its
 * build point, under which its tiles take the others. */
static inline const char *forced_name(const char *name) {
    static char points[kernel_limit][32];
    const char *const end = strstr(name, "/decode");
    const size_t length = end != NULL ? (size_t)(end - name) : 0;
    int n = 0;
    if (end == NULL || is_device_kernel(name))
        return name;
    while (points[n][0] != 0 && (strncmp(points[n], name, length) != 0 || points[n][length] != 0))
        n++;
    memcpy(points[n], name, length);
    return points[n];
}

/* Those for `dtype`. */
static inline kernel_list kernels_for(const char *operation, fdma_dtype dtype) {
    kernel_list list = {.count = 0};
    for (int32_t i = 0; i < fdma_kernel_count() && list.count < kernel_limit; i++) {
        fdma_kernel_info info = {.size = sizeof info};
        CHECK_INT(fdma_describe_kernel(i, &info), FDMA_OK);
        if (strcmp(info.operation, operation) != 0 || is_device_kernel(info.name) ||
            strcmp(info.name, "reference/float32") == 0) { // what tolerances are made from
            continue;
        }
        if (info.missing != NULL)
            printf("skipped %s %s: this machine lacks %s\n", info.name, operation, info.missing);
        else if (operation_takes(operation, forced_name(info.name), dtype))
            list.name[list.count++] = forced_name(info.name);
    }
    CHECK(list.count > 0);
    return list;
}

static inline kernel_list kernels_of(const char *operation) {
    return kernels_for(operation, FDMA_FLOAT32);
}

/* splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014. */
static inline uint64_t random_bits(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15U;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9U;
    z = (z ^ z >> 27) * 0x94d049bb133111ebU;
    return z ^ z >> 31;
}

static inline int64_t random_below(uint64_t *state, int64_t limit) {
    return (int64_t)(random_bits(state) % (uint64_t)limit);
}

/* In [-1, 1). */
static inline float random_float(uint64_t *state) {
    return (float)(random_bits(state) >> 40) * 0x1p-23F - 1;
}

static inline float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Every type has a number of the same sign and about the same size for each float in [-8, 8]. */
static inline void store_float(void *data, fdma_dtype dtype, int64_t at, float value) {
    const uint32_t bits = float_to_bits(value);
    if (dtype == FDMA_FLOAT64) {
        ((double *)data)[at] = (double)value;
    } else if (dtype == FDMA_FLOAT32) {
        ((float *)data)[at] = value;
    } else if (dtype == FDMA_BFLOAT16) { /* truncated */
        ((uint16_t *)data)[at] = (uint16_t)(isnan(value) ? 0x7fc0 : bits >> 16);
    } else { /* truncated; a NaN stays one, below 2^-14 is zero, from 2^16 on infinite */
        const uint32_t magnitude = bits & 0x7fffffff;
        const uint32_t half = magnitude < 0x38800000    ? 0
                              : magnitude >= 0x47800000 ? 0x7c00
                                                        : (magnitude - 0x38000000) >> 13;
        ((uint16_t *)data)[at] =
            (uint16_t)(bits >> 16 & 0x8000) | (uint16_t)(isnan(value) ? 0x7e00 : half);
    }
}

static inline double load_double(const void *data, fdma_dtype dtype, int64_t at) {
    if (dtype == FDMA_FLOAT64)
        return ((const double *)data)[at];
    if (dtype == FDMA_FLOAT32)
        return (double)((const float *)data)[at];
    const uint16_t bits = ((const uint16_t *)data)[at];
    if (dtype == FDMA_BFLOAT16)
        return (double)bits_to_float((uint32_t)bits << 16);
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const uint32_t normal = (uint32_t)(exponent + 127 - 15) << 23 | (uint32_t)fraction << 13;
    const double magnitude = exponent == 31 ? (fraction ? (double)NAN : (double)INFINITY)
                             : exponent     ? (double)bits_to_float(normal)
                                            : fraction * 0x1p-24;
    return bits >> 15 ? -magnitude : magnitude;
}

static inline const char *dtype_name(fdma_dtype dtype) {
    static const char *const names[] = {"?", "f32", "f16", "bf16", "f64", "i32", "u8"};
    return names[dtype];
}

static inline size_t dtype_size(fdma_dtype dtype) {
    static const size_t sizes[] = {0, 4, 2, 2, 8, 4, 1};
    return sizes[dtype];
}

static inline int64_t count_of(fdma_tensor tensor) {
    int64_t count = tensor.rank > 0;
    for (int axis = 0; axis < tensor.rank; axis++)
        count *= tensor.shape[axis];
    return count;
}

static inline size_t bytes_of(fdma_tensor tensor) {
    return (size_t)count_of(tensor) * dtype_size(tensor.dtype);
}

/* A contiguous tensor of zeros; axes from the first that is negative on are left out. */
static inline fdma_tensor new_tensor(fdma_dtype dtype, int64_t n0, int64_t n1, int64_t n2,
                                     int64_t n3) {
    const int64_t shape[4] = {n0, n1, n2, n3};
    int32_t rank = 0;
    while (rank < 4 && shape[rank] >= 0)
        rank++;
    fdma_tensor tensor = fdma_dense_tensor(NULL, dtype, rank, shape);
    tensor.data = test_alloc(bytes_of(tensor));
    return tensor;
}

/* An output between guard bytes, full of them. */
static inline fdma_tensor new_output(fdma_dtype dtype, int64_t n0, int64_t n1, int64_t n2,
                                     int64_t n3) {
    fdma_tensor tensor = new_tensor(dtype, n0, n1, n2, n3);
    tensor.data = test_alloc_guarded(bytes_of(tensor));
    memset(tensor.data, test_guard_byte, bytes_of(tensor));
    return tensor;
}

static inline fdma_tensor copy_tensor(fdma_tensor tensor) {
    const size_t bytes = bytes_of(tensor);
    fdma_tensor copy = tensor;
    copy.data = test_alloc(bytes);
    if (bytes > 0)
        memcpy(copy.data, tensor.data, bytes);
    return copy;
}

/* Contiguous tensors only: numbers in [-size, size). */
static inline void fill_random(fdma_tensor tensor, uint64_t *state, float size) {
    for (int64_t i = 0; i < count_of(tensor); i++)
        store_float(tensor.data, tensor.dtype, i, size * random_float(state));
}

static inline int same_tensor(fdma_tensor actual, fdma_tensor want) {
    return bytes_of(actual) == bytes_of(want) &&
           (bytes_of(want) == 0 || memcmp(actual.data, want.data, bytes_of(want)) == 0);
}

static inline void exec_alloc(fdma_exec *exec, size_t bytes) {
    exec->workspace = test_alloc_guarded(bytes);
    exec->workspace_size = bytes;
}

/* An operation, called through pointers to its argument struct. */
typedef struct operation_calls {
    fdma_status (*call)(const void *args);
    fdma_status (*workspace)(const void *args, size_t *bytes);
    size_t exec; /* offset of the field in the argument struct */
} operation_calls;

/* Runs an operation with workspace of exactly the size that it asks for. */
static inline fdma_status run_operation(const operation_calls *operation, void *args,
                                        void (*give_workspace)(fdma_exec *, size_t)) {
    size_t bytes = 0;
    FDMA_TRY(operation->workspace(args, &bytes));
    give_workspace((fdma_exec *)((char *)args + operation->exec), bytes);
    return operation->call(args);
}

/* Defines run_forward() and the like. */
#define DEFINE_OPERATION(name)                                                                     \
    static inline fdma_status untyped_##name(const void *args) { return fdma_##name(args); }       \
    static inline fdma_status untyped_##name##_workspace(const void *args, size_t *bytes) {        \
        return fdma_##name##_workspace(args, bytes);                                               \
    }                                                                                              \
    static const operation_calls name##_calls = {untyped_##name, untyped_##name##_workspace,       \
                                                 offsetof(fdma_##name##_args, exec)};              \
    static inline fdma_status run_##name(fdma_##name##_args *args) {                               \
        return run_operation(&name##_calls, args, exec_alloc);                                     \
    }

DEFINE_OPERATION(score)
DEFINE_OPERATION(select)
DEFINE_OPERATION(lists)
DEFINE_OPERATION(forward)
DEFINE_OPERATION(backward)
DEFINE_OPERATION(score_backward)
DEFINE_OPERATION(merge)
DEFINE_OPERATION(merge_backward)
DEFINE_OPERATION(attention)
DEFINE_OPERATION(attention_backward)

#define CHECK_OK(call)                                                                             \
    do {                                                                                           \
        if (!CHECK_INT(call, FDMA_OK)) {                                                           \
            printf("    %s\n", fdma_last_error());                                                 \
        }                                                                                          \
    } while (0)

#endif /* FIXTURE_H */
