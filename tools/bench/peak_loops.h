/* The loops of one point, for peak.c, which includes this file once for each after defining
 *
 *   NAME(word)        the names of what is defined here
 *   TARGET            the attribute of functions that use the point's instructions, or nothing
 *   BYTES, SUMS       of a vector; how many independent sums the loop keeps
 *   MULTIPLY_ADD(sum, factor, term)   of vectors of float32: one instruction, or two
 *
 * and which this file undefines again. The sums approach 1, or grow until further terms are rounded
 * away: there are no overflows and no denormals. */

typedef float NAME(lanes) __attribute__((vector_size(BYTES)));
typedef uint64_t NAME(words) __attribute__((vector_size(BYTES), aligned(4), may_alias));

TARGET static float NAME(round)(int64_t rounds) {
    const NAME(lanes) zero = {0}, factor = zero + shrink, term = zero + shift;
    NAME(lanes) sums[SUMS], total = zero;
    UNROLL
    for (int s = 0; s < SUMS; s++)
        sums[s] = zero + (float)s;
    for (int64_t round = 0; round < rounds; round++) {
        UNROLL
        for (int s = 0; s < SUMS; s++)
            sums[s] = MULTIPLY_ADD(sums[s], factor, term);
    }
    UNROLL
    for (int s = 0; s < SUMS; s++)
        total += sums[s];
    return total[0];
}

TARGET static uint64_t NAME(read)(const void *bytes, size_t count) {
    NAME(words) sums[READ_SUMS] = {{0}}, total = {0};
    for (size_t at = 0; at + READ_STEP <= count; at += READ_STEP) {
        UNROLL
        for (size_t x = 0; x < READ_STEP / BYTES; x++)
            sums[x % READ_SUMS] ^= *(const NAME(words) *)((const char *)bytes + at + x * BYTES);
    }
    for (int s = 0; s < READ_SUMS; s++)
        total ^= sums[s];
    return total[0] ^ total[1];
}

#undef NAME
#undef TARGET
#undef BYTES
#undef SUMS
#undef MULTIPLY_ADD
