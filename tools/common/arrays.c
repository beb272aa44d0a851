/* See common/arrays.h. */
#include "common/arrays.h"

#include "commands.h"
#include "common/text.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    fdma_dtype dtype;
    size_t bytes;
} dtypes[] = {
    {"f32", FDMA_FLOAT32, 4}, {"f16", FDMA_FLOAT16, 2}, {"bf16", FDMA_BFLOAT16, 2},
    {"f64", FDMA_FLOAT64, 8}, {"i32", FDMA_INT32, 4},   {"u8", FDMA_UINT8, 1},
    {"i64", FDMA_INT64, 8},
};

const char *dtype_name(fdma_dtype dtype) {
    for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++)
        if (dtypes[d].dtype == dtype)
            return dtypes[d].name;
    return "?";
}

size_t dtype_bytes(fdma_dtype dtype) {
    for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++)
        if (dtypes[d].dtype == dtype)
            return dtypes[d].bytes;
    return 0;
}

int64_t element_count(const fdma_tensor *tensor) {
    int64_t count = tensor->rank > 0;
    for (int axis = 0; axis < tensor->rank; axis++)
        count *= tensor->shape[axis];
    return count;
}

void *allocate(size_t bytes) {
    enum { ALIGNMENT = 64 };
    const size_t rounded = (bytes + ALIGNMENT) / ALIGNMENT * ALIGNMENT;
    void *memory = rounded > bytes ? aligned_alloc(ALIGNMENT, rounded) : NULL;
    if (memory == NULL) {
        print_error("fdma: not enough memory for %zu bytes", bytes);
        exit(EXIT_FAILED);
    }
    return memset(memory, 0, rounded);
}

fdma_tensor allocate_array(fdma_dtype dtype, int32_t rank, const int64_t *shape) {
    fdma_tensor tensor = fdma_dense_tensor(NULL, dtype, rank, shape);
    tensor.data = allocate((size_t)element_count(&tensor) * dtype_bytes(dtype));
    return tensor;
}

static double float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return (double)value;
}

/* Assembles the bits, because ldexp() takes ten times as long. */
static double from_half(uint16_t half) {
    const uint32_t exponent = half >> 10 & 31, fraction = half & 1023;
    double magnitude;
    if (exponent == 31)
        magnitude = fraction != 0 ? (double)NAN : (double)INFINITY;
    else if (exponent == 0)
        magnitude = fraction * 0x1p-24;
    else
        magnitude = float_of((exponent + 112) << 23 | fraction << 13);
    return half >> 15 != 0 ? -magnitude : magnitude;
}

/* rint() rounds to nearest, ties to even. A fraction that rounds up to 1 carries into the exponent,
 * which is then right. */
static uint16_t to_half(double value) {
    const uint16_t sign = signbit(value) != 0 ? 0x8000 : 0;
    const double magnitude = fabs(value);
    if (isnan(value))
        return sign | 0x7e00;
    if (magnitude >= 65520) // halfway between the largest finite value and 2^16
        return sign | 0x7c00;
    if (magnitude < 0x1p-14)
        return (uint16_t)(sign | (int)rint(magnitude * 0x1p24));
    int exponent;
    const double fraction = frexp(magnitude, &exponent); // in [0.5, 1)
    return (uint16_t)(sign | ((exponent + 13) * 1024 + (int)rint(fraction * 2048)));
}

static double from_bfloat(uint16_t upper) { return float_of((uint32_t)upper << 16); }

/* Rounds to float32 by rounding to odd first, so that the second rounding gives the result of a
 * single one. */
static uint16_t to_bfloat(double value) {
    float single = (float)value;
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    if (isnan(value))
        return (uint16_t)(bits >> 16 | 0x40);
    if (isfinite(single) && (double)single != value) {
        if (fabs((double)single) > fabs(value))
            bits--;
        bits |= 1;
    }
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

double load_element(const void *data, fdma_dtype dtype, int64_t index) {
    switch (dtype) {
    case FDMA_FLOAT64:
        return ((const double *)data)[index];
    case FDMA_FLOAT32:
        return (double)((const float *)data)[index];
    case FDMA_FLOAT16:
        return from_half(((const uint16_t *)data)[index]);
    case FDMA_INT32:
        return ((const int32_t *)data)[index];
    case FDMA_UINT8:
        return ((const uint8_t *)data)[index];
    case FDMA_INT64:
        return (double)((const int64_t *)data)[index];
    default:
        return from_bfloat(((const uint16_t *)data)[index]);
    }
}

void store_element(void *data, fdma_dtype dtype, int64_t index, double value) {
    switch (dtype) {
    case FDMA_FLOAT64:
        ((double *)data)[index] = value;
        break;
    case FDMA_FLOAT32:
        ((float *)data)[index] = (float)value;
        break;
    case FDMA_FLOAT16:
        ((uint16_t *)data)[index] = to_half(value);
        break;
    case FDMA_UINT8:
        ((uint8_t *)data)[index] = (uint8_t)value;
        break;
    default:
        ((uint16_t *)data)[index] = to_bfloat(value);
    }
}

fdma_tensor convert_array(const fdma_tensor *source, fdma_dtype dtype) {
    const fdma_tensor copy = allocate_array(dtype, source->rank, source->shape);
    const int64_t count = element_count(source);
    if (dtype == source->dtype) {
        memcpy(copy.data, source->data, (size_t)count * dtype_bytes(dtype));
        return copy;
    }
    for (int64_t index = 0; index < count; index++)
        store_element(copy.data, dtype, index, load_element(source->data, source->dtype, index));
    return copy;
}

fdma_tensor swap_axes(const fdma_tensor *source) {
    const int64_t *const from = source->shape;
    const int64_t shape[4] = {from[0], from[2], from[1], from[3]};
    const fdma_tensor copy = allocate_array(source->dtype, 4, shape);
    const size_t row = (size_t)from[3] * dtype_bytes(source->dtype);
    for (int64_t i = 0; i < from[0] * from[1] * from[2]; i++) {
        const int64_t b = i / (from[1] * from[2]), x = i / from[2] % from[1], y = i % from[2];
        const int64_t to = (b * from[2] + y) * from[1] + x;
        memcpy((char *)copy.data + (size_t)to * row, (const char *)source->data + (size_t)i * row,
               row);
    }
    return copy;
}

fdma_tensor axis_slice(fdma_tensor tensor, int axis, int64_t first, int64_t length) {
    if (tensor.rank == 0)
        return tensor;
    tensor.data =
        (char *)tensor.data + (size_t)(first * tensor.stride[axis]) * dtype_bytes(tensor.dtype);
    tensor.shape[axis] = length;
    return tensor;
}

int64_t count_nans(const fdma_tensor *tensor) {
    int64_t nans = 0;
    for (int64_t index = element_count(tensor) - 1; index >= 0; index--)
        nans += isnan(load_element(tensor->data, tensor->dtype, index)) != 0;
    return nans;
}

double rounding_step(fdma_dtype dtype, double magnitude) {
    const int digits = dtype == FDMA_FLOAT16 ? 11 : dtype == FDMA_BFLOAT16 ? 8 : FLT_MANT_DIG;
    const int lowest = dtype == FDMA_FLOAT16 ? -13 : FLT_MIN_EXP; // of normal numbers
    int exponent = lowest;
    frexp(magnitude, &exponent);
    return ldexp(1, (magnitude > 0 && exponent > lowest ? exponent : lowest) - digits);
}
