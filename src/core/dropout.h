/* Which pairs of a query and a key dropout drops: a function of the call's seed and offset and of
 * the pair alone, so that every kernel, for hosts and devices, drops the same ones. Each row and
 * each key has a code, which takes a counter-based generator; 16 random bits of a pair are mixed
 * from the codes of its row and its key. docs/algorithm.md, dropout.
 *
 * Sources: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011 (Philox4x32-10);
 * Wellons, hash-prospector, 2018 (the multipliers and shifts of lowbias32). */
#pragma once

#include "core/integers.h"

#include <stdbool.h>

/* Of a call. The probability that a pair is dropped is threshold / 65536. */
typedef struct dropout_params {
    uint64_t seed, offset;
    uint32_t threshold; /* 0: off; at most 65535 */
} dropout_params;

enum { dropout_range = 65536 }; /* of the bits of a pair: 0 to 65535 */

/* What kept probabilities are multiplied by. */
INTEGER_FUNCTION double dropout_scale(uint32_t threshold) {
    return (double)dropout_range / (double)(dropout_range - threshold);
}

/* The code of two neighbouring positions, an even one and the next, of a query head. */
typedef struct row_code {
    uint32_t flips, adds;
} row_code;

/* Two of the words that Philox4x32-10 makes of a key, the seed, and a counter, whose four words are
 * index, head, and the two of offset. */
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

/* Of the query at `position`, of query head `head`: b * q_heads + h. */
INTEGER_FUNCTION row_code dropout_row(const dropout_params *dropout, int64_t head,
                                      int64_t position) {
    return dropout_philox(dropout->seed, dropout->offset, (uint32_t)((uint64_t)position >> 1),
                          2 * (uint32_t)head);
}

/* Of the key at `position`, of kv head `head`: b * kv_heads + g. */
INTEGER_FUNCTION uint32_t dropout_key(const dropout_params *dropout, int64_t head,
                                      int64_t position) {
    const row_code code =
        dropout_philox(dropout->seed, dropout->offset, (uint32_t)position, 2 * (uint32_t)head + 1);
    return code.flips;
}

/* dropout_mix() before its last step, which changes the lower half alone. lowbias32 begins with one
 * more xor and shift. It is left out, because all that it does to random codes is to permute
 * them. */
INTEGER_FUNCTION uint32_t dropout_product(row_code row, uint32_t key) {
    const uint32_t x = (row.flips ^ key) * 0x7feb352d + row.adds;
    return (x ^ x >> 15) * 0x846ca68b;
}

/* The bits of two pairs: in the lower half of the query at the even position, in the upper half of
 * the next. */
INTEGER_FUNCTION uint32_t dropout_mix(row_code row, uint32_t key) {
    const uint32_t product = dropout_product(row, key);
    return product ^ product >> 16;
}

/* Whether the pair of the query at `position` is dropped. */
INTEGER_FUNCTION bool dropout_drops(uint32_t threshold, row_code row, int64_t position,
                                    uint32_t key) {
    const uint32_t mixed = dropout_mix(row, key);
    return (position % 2 != 0 ? mixed >> 16 : mixed & 0xffff) < threshold;
}
