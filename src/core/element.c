/* Conversions of float16 and bfloat16 to double and back, rounding to nearest even. */
#include "core/element.h"

#include <math.h>
#include <string.h>

/* A binary floating format of 16 bits: 1 sign bit, exponent, fraction. */
typedef struct format16 {
    int fraction_bits;
    int bias;
} format16;

static const format16 binary16 = {10, 15};
static const format16 bfloat16 = {7, 127};

static double double_of(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Does no floating-point arithmetic on normal numbers, because the reference spends most of its
 * time here. */
static double decode(uint16_t bits, format16 format) {
    const int fraction = bits & ((1 << format.fraction_bits) - 1);
    const int top = (1 << (15 - format.fraction_bits)) - 1; // the exponent of inf and NaN
    const int exponent = bits >> format.fraction_bits & top;
    const double sign = bits & 0x8000 ? -1 : 1;
    if (exponent == top)
        return fraction ? (double)NAN : sign * (double)INFINITY;
    if (exponent == 0)
        return sign * ldexp(fraction, 1 - format.bias - format.fraction_bits);
    return double_of((uint64_t)(bits & 0x8000) << 48 |
                     (uint64_t)(exponent - format.bias + 1023) << 52 |
                     (uint64_t)fraction << (52 - format.fraction_bits));
}

static uint16_t encode(double value, format16 format) {
    const uint16_t sign = signbit(value) ? 0x8000 : 0;
    const int infinity = 0x7fff & ~((1 << format.fraction_bits) - 1);
    const double size = fabs(value);
    if (isnan(value))
        return (uint16_t)(sign | infinity | 1 << (format.fraction_bits - 1));
    if (size == 0)
        return sign;
    if (isinf(value))
        return (uint16_t)(sign | infinity);
    const int normal = ilogb(size) < 1 - format.bias ? 1 - format.bias : ilogb(size);
    const double steps = nearbyint(ldexp(size, format.fraction_bits - normal));
    // a mantissa that rounds up to 2 carries into the exponent by itself
    const int64_t bits =
        (int64_t)steps + ((int64_t)(normal + format.bias - 1) << format.fraction_bits);
    return (uint16_t)(sign | (bits < infinity ? (int)bits : infinity));
}

double fdma_load_short(const fdma_tensor *tensor, int64_t offset) {
    const uint16_t bits = ((const uint16_t *)tensor->data)[offset];
    return decode(bits, tensor->dtype == FDMA_FLOAT16 ? binary16 : bfloat16);
}

void fdma_store(const fdma_tensor *tensor, int64_t offset, double value) {
    switch (tensor->dtype) {
    case FDMA_FLOAT32:
        ((float *)tensor->data)[offset] = (float)value;
        return;
    case FDMA_FLOAT64:
        ((double *)tensor->data)[offset] = value;
        return;
    case FDMA_FLOAT16:
        ((uint16_t *)tensor->data)[offset] = encode(value, binary16);
        return;
    default:
        ((uint16_t *)tensor->data)[offset] = encode(value, bfloat16);
        return;
    }
}
