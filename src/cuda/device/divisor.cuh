/* Division by a number that the host knows, as a multiplication: a division of integers takes about
 * 20 instructions. Source: T. Granlund and P. Montgomery, Division by Invariant Integers using
 * Multiplication. */
#pragma once

#include <stdint.h>

/* Divides numbers from 0 to 2^31 - 1. With 2^(s - 1) < value <= 2^s, shift is 31 + s, and factor is
 * 2^shift / value, rounded up. So n * factor / 2^shift is too large by less than n / 2^shift, which
 * is less than 1 / value: the quotient never reaches the next integer. */
struct divisor {
    int32_t value;
    uint32_t factor, shift;

    __device__ int32_t divide(int32_t n) const {
        return (int32_t)((uint64_t)(uint32_t)n * factor >> shift);
    }

    __device__ int32_t remainder(int32_t n) const { return n - divide(n) * value; }
};

/* value: above 0. */
static inline divisor divisor_of(int32_t value) {
    const uint32_t bits = 31;
    uint32_t shift = bits;
    while (shift < 2 * bits && (int64_t)1 << (shift - bits) < value)
        shift++;
    const uint64_t factor = (((uint64_t)1 << shift) + (uint32_t)value - 1) / (uint32_t)value;
    return {value, (uint32_t)factor, shift};
}
