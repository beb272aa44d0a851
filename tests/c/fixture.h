/* fixture.h - shared by the C tests of the library: repeatable random numbers, and tensors of any
 * dtype with memory from test_alloc(). */
#pragma once

#include "fdma.h"
#include "test.h"

#include "core/error.h"

#include <stddef.h>

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
    } else { /* truncated; a NaN stays NaN, numbers below 2^-14 become 0, from 2^16 on infinite */
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
    static const char *const names[] = {"?", "f32", "f16", "bf16", "f64", "i32", "u8", "i64"};
    return names[dtype];
}

static inline size_t dtype_size(fdma_dtype dtype) {
    static const size_t sizes[] = {0, 4, 2, 2, 8, 4, 1, 8};
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

/* A contiguous tensor of zeros. The rank ends at the first negative length. */
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

/* An output between guard bytes, filled with guard bytes. */
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

/* Positions `first` to `end` - 1 of a tensor along `axis`; an absent tensor stays absent. */
static inline fdma_tensor positions_of(fdma_tensor tensor, int axis, int64_t first, int64_t end) {
    if (tensor.rank > 0) {
        const size_t before = (size_t)(first * tensor.stride[axis]);
        tensor.data = (char *)tensor.data + before * dtype_size(tensor.dtype);
        tensor.shape[axis] = end - first;
    }
    return tensor;
}

/* A copy of a contiguous tensor in float64; an absent tensor stays absent. */
static inline fdma_tensor widened(fdma_tensor tensor) {
    fdma_tensor wide = tensor;
    wide.dtype = tensor.rank > 0 ? FDMA_FLOAT64 : tensor.dtype;
    wide.data = test_alloc(bytes_of(wide));
    for (int64_t i = 0; i < count_of(tensor); i++)
        ((double *)wide.data)[i] = load_double(tensor.data, tensor.dtype, i);
    return tensor.rank > 0 ? wide : tensor;
}

/* Fills a contiguous tensor with numbers in [-size, size). */
static inline void fill_random(fdma_tensor tensor, uint64_t *state, float size) {
    for (int64_t i = 0; i < count_of(tensor); i++)
        store_float(tensor.data, tensor.dtype, i, size * random_float(state));
}

/* The address of an element, or of a row. */
static inline char *address(fdma_tensor tensor, int64_t x0, int64_t x1, int64_t x2) {
    const int64_t at = x0 * tensor.stride[0] + x1 * tensor.stride[1] + x2 * tensor.stride[2];
    return (char *)tensor.data + (size_t)at * dtype_size(tensor.dtype);
}

/* Fills a contiguous tensor with a number. It is converted once, because conversions to 16 bits are
 * slow. */
static inline void fill_tensor_with(fdma_tensor tensor, double value) {
    const size_t size = dtype_size(tensor.dtype);
    char *const data = tensor.data;
    if (count_of(tensor) == 0)
        return;
    if (tensor.dtype == FDMA_INT32)
        *(int32_t *)tensor.data = (int32_t)value;
    else if (tensor.dtype == FDMA_FLOAT64)
        *(double *)tensor.data = value;
    else
        store_float(tensor.data, tensor.dtype, 0, (float)value);
    for (int64_t i = 1; i < count_of(tensor); i++)
        memcpy(data + (size_t)i * size, data, size);
}

static inline fdma_tensor new_list(const int32_t *numbers, int64_t count) {
    const fdma_tensor list = new_tensor(FDMA_INT32, count, -1, -1, -1);
    if (count > 0)
        memcpy(list.data, numbers, bytes_of(list));
    return list;
}

static inline int same_tensor(fdma_tensor actual, fdma_tensor want) {
    return bytes_of(actual) == bytes_of(want) &&
           (bytes_of(want) == 0 || memcmp(actual.data, want.data, bytes_of(want)) == 0);
}

/* Contents of a corrupt selection. */
typedef enum corruption {
    any_bits,
    near_keys, /* in and just outside of the sequence */
    all_kept,  /* far more keys than the window says */
    all_lowest,
    all_highest,
    all_zero,
    corruption_count,
} corruption;

static inline void corrupt(fdma_tensor tensor, corruption how, uint64_t *state) {
    int32_t *const data = tensor.data;
    const int64_t len = tensor.shape[2];
    for (int64_t i = 0; i < count_of(tensor); i++) {
        const int32_t values[corruption_count] = {
            (int32_t)(uint32_t)random_bits(state),
            (int32_t)random_below(state, len + 20) - 10,
            (int32_t)len,
            INT32_MIN,
            INT32_MAX,
            0,
        };
        data[i] = values[how];
    }
}

/* ---- strides ---- */

/* Copies between tensors of one shape and dtype, with any strides. */
static inline void copy_elements(fdma_tensor to, fdma_tensor from) {
    const size_t size = dtype_size(from.dtype);
    for (int64_t index = 0; index < count_of(from); index++) {
        int64_t rest = index, to_at = 0, from_at = 0;
        for (int axis = from.rank - 1; axis >= 0; axis--) {
            to_at += rest % from.shape[axis] * to.stride[axis];
            from_at += rest % from.shape[axis] * from.stride[axis];
            rest /= from.shape[axis];
        }
        memcpy((char *)to.data + (size_t)to_at * size, (char *)from.data + (size_t)from_at * size,
               size);
    }
}

static inline fdma_tensor gathered(fdma_tensor tensor) {
    fdma_tensor dense = fdma_dense_tensor(NULL, tensor.dtype, tensor.rank, tensor.shape);
    dense.data = test_alloc(bytes_of(tensor));
    copy_elements(dense, tensor);
    return dense;
}

/* The values of `like` at `data`, with these strides. */
static inline fdma_tensor placed(fdma_tensor like, void *data, const int64_t stride[4]) {
    fdma_tensor tensor = like;
    tensor.data = data;
    memcpy(tensor.stride, stride, sizeof tensor.stride);
    copy_elements(tensor, like);
    return tensor;
}

/* The values of `like` as [batch, heads, len, head_dim] in memory. */
static inline fdma_tensor heads_first(fdma_tensor like) {
    const int64_t length = like.shape[1], heads = like.shape[2], head_dim = like.shape[3];
    const int64_t stride[4] = {length * heads * head_dim, head_dim, length * head_dim, 1};
    return placed(like, test_alloc_guarded(bytes_of(like)), stride);
}

/* The values of `like` with `gap` elements of guard bytes after each row of the last axis. */
static inline fdma_tensor with_gaps(fdma_tensor like, int64_t gap) {
    const int last = like.rank - 1;
    int64_t stride[4] = {0}, count = gap;
    if (like.rank == 0)
        return like;
    stride[last] = 1;
    count += like.shape[last];
    for (int axis = last - 1; axis >= 0; axis--) {
        stride[axis] = count;
        count *= like.shape[axis];
    }
    const size_t bytes = (size_t)count * dtype_size(like.dtype);
    void *const data = test_alloc_guarded(bytes);
    memset(data, test_guard_byte, bytes);
    return placed(like, data, stride);
}

/* Checks that the values are equal and that the gaps still hold guard bytes. */
static inline void check_gapped(fdma_tensor actual, fdma_tensor want, int64_t gap) {
    const int64_t size = (int64_t)dtype_size(want.dtype);
    const int64_t length = want.rank > 0 ? want.shape[want.rank - 1] : 0;
    CHECK_BYTES(gathered(actual).data, want.data, bytes_of(want));
    for (int64_t at = 0; length > 0 && at < count_of(want) / length * (length + gap) * size; at++)
        if (at / size % (length + gap) >= length)
            CHECK(((const unsigned char *)actual.data)[at] == test_guard_byte);
}

#define CHECK_OK(call)                                                                             \
    do {                                                                                           \
        if (!CHECK_INT(call, FDMA_OK)) {                                                           \
            printf("    %s\n", fdma_last_error());                                                 \
        }                                                                                          \
    } while (0)
