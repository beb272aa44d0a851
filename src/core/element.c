/* Conversions of float16 and bfloat16 to double and back, rounding to nearest even. */
#include "core/element.h"

#include <math.h>

/* A binary floating format of 16 bits: 1 sign bit, exponent, fraction. */
typedef struct format16 {
    int fraction_bits;
    int bias;
} format16;

static const format16 binary16 = {10, 15};
static const format16 bfloat16 = {7, 127};

double fdma_load_unusual(uint16_t bits, fdma_dtype dtype) {
    const format16 format = dtype == FDMA_FLOAT16 ? binary16 : bfloat16;
    const int fraction = bits & ((1 << format.fraction_bits) - 1);
    const double sign = bits & 0x8000 ? -1 : 1;
    if ((bits & 0x7fff) >> format.fraction_bits == 0)
        return sign * ldexp(fraction, 1 - format.bias - format.fraction_bits);
    return fraction ? (double)NAN : sign * (double)INFINITY;
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

/* The bits of a float32 without its sign, rounded to bfloat16. */
static uint32_t shorten_bfloat16(uint32_t size) {
    const uint32_t infinity = 0x7f800000, quiet_nan = 0x7fc0;
    return size > infinity ? quiet_nan : (size + 0x7fff + (size >> 16 & 1)) >> 16;
}

/* The same for float16. The exponent biases differ by 112. Below the least normal number, 2^-14,
 * the mantissa is shifted until its unit is 2^-24. */
static uint32_t shorten_float16(uint32_t size) {
    const uint32_t infinity = 0x7f800000, quiet_nan = 0x7e00, short_infinity = 0x7c00;
    const uint32_t exponent = size >> 23, mantissa = (size & 0x7fffff) | 0x800000;
    const uint32_t shift = exponent < 126 - 31 ? 31 : exponent > 112 ? 14 : 126 - exponent;
    const uint32_t subnormal =
        (mantissa + (1U << (shift - 1)) - 1 + (mantissa >> shift & 1)) >> shift;
    const uint32_t normal = (size - (112U << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    const uint32_t finite = exponent > 112 ? normal : subnormal;
    const uint32_t any = exponent >= 127 + 16 ? short_infinity : finite;
    return size > infinity ? quiet_nan : any;
}

void fdma_store_row(const fdma_tensor *tensor, int64_t offset, const float *from, int64_t count) {
    uint16_t *const to = (uint16_t *)tensor->data + offset;
    const bool is_half = tensor->dtype == FDMA_FLOAT16;
    for (int64_t n = 0; n < count; n++) {
        uint32_t bits;
        memcpy(&bits, from + n, sizeof bits);
        const uint32_t size = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
        to[n] = (uint16_t)(sign | (is_half ? shorten_float16(size) : shorten_bfloat16(size)));
    }
}
