/* The total order of keys on the device: which of two keys outranks the other. It is the order of
 * cpu/common/order.h.
 *
 *   the order of a key   from the highest: sinks; scores from +inf over both zeros, which are
 *                        equal, to -inf; NaN of either sign; last, no key
 *   ties                 of keys of the same order the later position outranks the earlier one: by
 *                        a stable sort of the orders, or by the position below the order in one
 *                        integer
 *
 * An order is an integer because comparisons of floats may flush subnormals. It is unsigned where
 * keys are sorted by its digits, and signed where keys are only compared, which takes fewer
 * instructions. The functions of bits are also valid C, for a test. */
#pragma once

#include "core/integers.h"

static const uint32_t order_none = 0, order_nan = 1, order_zero = (uint32_t)1 << 31;
static const uint32_t order_sink = 0xff800001; // the order of +inf is 0xff800000
static const int32_t signed_order_none = INT32_MIN, signed_order_nan = INT32_MIN + 1;
static const uint32_t bits_of_infinity = 0x7f800000;

INTEGER_FUNCTION uint32_t order_of_score_bits(uint32_t bits) {
    const uint32_t magnitude = bits & ~order_zero;
    if (magnitude > bits_of_infinity)
        return order_nan;
    if (magnitude == 0)
        return order_zero;
    return bits >> 31 != 0 ? ~bits : bits | order_zero;
}

/* The bits of a score of this order; the bits of -inf for NaN and for no key. */
INTEGER_FUNCTION uint32_t score_bits_of_order(uint32_t order) {
    const uint32_t lowest = ~(bits_of_infinity | order_zero); // of -inf
    if (order <= lowest)
        return ~lowest;
    return order >> 31 != 0 ? order & ~order_zero : ~order;
}

/* is_nan: the score is NaN, which a comparison of floats shows. */
INTEGER_FUNCTION int32_t signed_order_of_score_bits(int32_t bits, int is_nan) {
    const int32_t magnitude = bits & INT32_MAX;
    return is_nan ? signed_order_nan : bits < 0 ? -magnitude : magnitude;
}

/* A key as its order above its position, which has position_bits bits. The greater of two keys
 * outranks the other. */
typedef uint64_t ranked_key;

INTEGER_FUNCTION ranked_key ranked_key_of(uint32_t order, uint32_t position, int position_bits) {
    return (ranked_key)order << position_bits | position;
}

typedef int64_t signed_ranked_key;

INTEGER_FUNCTION signed_ranked_key signed_ranked_key_of(int32_t order, int32_t position) {
    return (signed_ranked_key)((uint64_t)order << 32 | (uint32_t)position);
}

#if defined(__cplusplus)
__device__ static uint32_t order_of(float score) {
    return order_of_score_bits(__float_as_uint(score));
}

__device__ static int32_t signed_order_of(float score) {
    return signed_order_of_score_bits(__float_as_int(score), isnan(score));
}
#endif
