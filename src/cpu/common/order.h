/* The total order of keys: the rank of a key by its score, and the ties between scores. */
#pragma once

#include <stdint.h>
#include <string.h>

/* The bits of a score as an integer that is ordered like it; NaN is lowest, and both zeros are
 * equal. Integers are compared because subnormal scores must keep their order, even on CPUs that
 * flush them. */
static inline int32_t order_of_bits(int32_t bits) {
    const int32_t size = bits & INT32_MAX, infinity = 0x7f800000;
    const int32_t order = bits < 0 ? -size : size;
    return size > infinity ? INT32_MIN : order;
}

static inline int32_t score_order(float score) {
    int32_t bits;
    memcpy(&bits, &score, sizeof bits);
    return order_of_bits(bits);
}

/* The order of a key as an integer, the greater the better. The upper half is the order of its
 * score, the lower half the key, so that a tie goes to the later key. */
static inline int64_t key_order(float score, int32_t key) {
    return (int64_t)score_order(score) * ((int64_t)1 << 32) + key;
}

/* The order of a key that outranks all others. */
static inline int64_t sink_order(int32_t key) {
    return (int64_t)INT32_MAX * ((int64_t)1 << 32) + key;
}

static inline int32_t key_of(int64_t order) { return (int32_t)order; }

static inline int32_t score_order_of(int64_t order) { return (int32_t)(order >> 32); }
