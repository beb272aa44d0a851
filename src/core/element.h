/* Single elements of any floating-point dtype as doubles, correctly rounded. For code that need not
 * be fast: kernels have conversions of their own. */
#pragma once

#include "core/tensor.h"

#include <string.h>

/* A zero, denormal, infinity or NaN of float16 or bfloat16. */
double fdma_load_unusual(uint16_t bits, fdma_dtype dtype);

/* An element of float16 or bfloat16. A normal number needs neither floating-point arithmetic nor a
 * branch on its sign, which no processor predicts: the sign moves from bit 15 to 63, exponent and
 * fraction move so that the exponent ends at bit 52, and the biases differ by 1008 or 896. */
static inline double fdma_load_short(uint16_t bits, fdma_dtype dtype) {
    const int fraction_bits = dtype == FDMA_FLOAT16 ? 10 : 7;
    const uint64_t more_bias = dtype == FDMA_FLOAT16 ? 1023 - 15 : 1023 - 127;
    const uint32_t size = bits & 0x7fff, one = 1U << fraction_bits;
    if (size - one >= 0x8000 - 2 * one) // the least exponent or the largest; wraps if below `one`
        return fdma_load_unusual(bits, dtype);
    const uint64_t wide = (uint64_t)(bits & 0x8000) << 48 |
                          (((uint64_t)size << (52 - fraction_bits)) + (more_bias << 52));
    double value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* Inline, because the reference calls it in its innermost loops. */
static inline double fdma_load(const fdma_tensor *tensor, int64_t offset) {
    if (tensor->dtype == FDMA_FLOAT64)
        return ((const double *)tensor->data)[offset];
    if (tensor->dtype == FDMA_FLOAT32)
        return (double)((const float *)tensor->data)[offset];
    return fdma_load_short(((const uint16_t *)tensor->data)[offset], tensor->dtype);
}

void fdma_store(const fdma_tensor *tensor, int64_t offset, double value);

/* Stores successive elements of a tensor of float16 or bfloat16, as fdma_store() does. Integers
 * alone and no branches, so that compilers vectorize it. */
void fdma_store_row(const fdma_tensor *tensor, int64_t offset, const float *from, int64_t count);

static inline int64_t offset_of(const fdma_tensor *tensor, int64_t x0, int64_t x1, int64_t x2) {
    return x0 * tensor->stride[0] + x1 * tensor->stride[1] + x2 * tensor->stride[2];
}

/* An element of a tensor of int32. */
static inline int32_t *int_at(const fdma_tensor *tensor, int64_t x0, int64_t x1, int64_t x2) {
    return (int32_t *)tensor->data + offset_of(tensor, x0, x1, x2);
}
