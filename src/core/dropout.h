/* Dropout's choice of pairs (query, key). It depends only on the call's seed and offset and on the
 * pair, so that all kernels, on hosts and devices, drop the same pairs. Each row and each key has a
 * code from a counter-based generator; 16 random bits of a pair are mixed from the two codes.
 * docs/algorithm.md, dropout.
 *
 * Sources: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011 (Philox4x32-10);
 * Wellons, hash-prospector, 2018 (the multipliers and shifts of lowbias32). */
#pragma once

#include "core/integers.h"

#include <stdbool.h>

/* Dropout of a call. A pair is dropped with probability threshold / 65536. */
typedef struct dropout_params {
    uint64_t seed, offset;
    uint32_t threshold; /* 0: off; at most 65535 */
} dropout_params;

enum { dropout_range = 65536 }; /* range of a pair's bits: 0 to 65535 */

/* The factor of kept probabilities. */
INTEGER_FUNCTION double dropout_scale(uint32_t threshold) {
    return (double)dropout_range / (double)(dropout_range - threshold);
}

/* The code of two neighbouring positions of a query head, an even one and the next. */
typedef struct row_code {
    uint32_t flips, adds;
} row_code;

/* Two of the four words of Philox4x32-10. Its key is the seed, its counter index, head and the two
 * words of offset. */
INTEGER_FUNCTION row_code dropout_philox(uint64_t seed, uint64_t offset, uint32_t index,
                                         uint32_t head) {
    const uint64_t multipliers[2] = {0xd2511f53, 0xcd9e8d57};
    const uint32_t key_steps[2] = {0x9e3779b9, 0xbb67ae85};
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t x[4] = {index, head, (uint32_t)offset, (uint32_t)(offset >> 32)};
    for (int round = 0; round < 10; round++) {
        const uint64_t first = multipliers[0] * x[0], second = multipliers[1] * x[2];
        x[0] = (uint32_t)(second >> 32) ^ x[1] ^ key[0];
        x[1] = (uint32_t)second;
        x[2] = (uint32_t)(first >> 32) ^ x[3] ^ key[1];
        x[3] = (uint32_t)first;
        key[0] += key_steps[0];
        key[1] += key_steps[1];
    }
    const row_code code = {x[0], x[1]};
    return code;
}

/* Code of the query at `position`; `head` is b * q_heads + h. */
INTEGER_FUNCTION row_code dropout_row(const dropout_params *dropout, int64_t head,
                                      int64_t position) {
    return dropout_philox(dropout->seed, dropout->offset, (uint32_t)((uint64_t)position >> 1),
                          2 * (uint32_t)head);
}

/* Code of the key at `position`; `head` is b * kv_heads + g. */
INTEGER_FUNCTION uint32_t dropout_key(const dropout_params *dropout, int64_t head,
                                      int64_t position) {
    const row_code code =
        dropout_philox(dropout->seed, dropout->offset, (uint32_t)position, 2 * (uint32_t)head + 1);
    return code.flips;
}

/* dropout_mix() without its last step, which changes the lower half only. The first xor and shift
 * of lowbias32 are left out, because they would only permute random codes. */
INTEGER_FUNCTION uint32_t dropout_product(row_code row, uint32_t key) {
    const uint32_t x = (row.flips ^ key) * 0x7feb352d + row.adds;
    return (x ^ x >> 15) * 0x846ca68b;
}

/* Random bits of two pairs. The lower half belongs to the query at the even position, the upper
 * half to the next query. */
INTEGER_FUNCTION uint32_t dropout_mix(row_code row, uint32_t key) {
    const uint32_t product = dropout_product(row, key);
    return product ^ product >> 16;
}

INTEGER_FUNCTION bool dropout_drops(uint32_t threshold, row_code row, int64_t position,
                                    uint32_t key) {
    const uint32_t mixed = dropout_mix(row, key);
    return (position % 2 != 0 ? mixed >> 16 : mixed & 0xffff) < threshold;
}
