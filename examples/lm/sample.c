/* See sample.h. */
#include "sample.h"

#include "common/random.h"
#include "model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct candidate {
    double weight; /* its probability, divided by the largest */
    uint8_t byte;
} candidate;

static int likeliest_first(const void *left, const void *right) {
    const candidate *const a = left, *const b = right;
    if (a->weight != b->weight)
        return a->weight > b->weight ? -1 : 1;
    return (int)a->byte - (int)b->byte;
}

static uint8_t best_byte(const float *logits) {
    int best = 0;
    for (int byte = 1; byte < BYTE_VALUES; byte++)
        if (logits[byte] > logits[best])
            best = byte;
    return (uint8_t)best;
}

static void forbid_loops(const sampling *how, float *logits) {
    const uint8_t *const last = how->written + how->count - LOOP;
    for (const uint8_t *at = how->written; at < last; at++)
        if (memcmp(at, last, LOOP) == 0)
            logits[at[LOOP]] = -INFINITY;
}

static void append(sampling *how, uint8_t byte) {
    if (how->count == LOOP_WITHIN)
        memmove(how->written, how->written + 1, (size_t)--how->count);
    how->written[how->count++] = byte;
}

static uint8_t draw_byte(const float *logits, sampling *how) {
    const uint8_t best = best_byte(logits);
    candidate sorted[BYTE_VALUES];
    double all = 0;
    for (int byte = 0; byte < BYTE_VALUES; byte++) {
        const double below = (double)logits[best] - (double)logits[byte];
        sorted[byte] = (candidate){exp(-below / how->temperature), (uint8_t)byte};
        all += sorted[byte].weight;
    }
    qsort(sorted, BYTE_VALUES, sizeof sorted[0], likeliest_first);
    int count = 0;
    double sum = 0; // sum of the weights of the first `count` bytes, from which one is drawn
    while (count < BYTE_VALUES &&
           (count == 0 || (sum < how->top_p * all && sorted[count].weight >= how->min_p)))
        sum += sorted[count++].weight;
    double drawn = (double)(random_bits(&how->random) >> 11) * 0x1p-53 * sum;
    int at = 0;
    while (at < count - 1 && drawn >= sorted[at].weight)
        drawn -= sorted[at++].weight;
    return sorted[at].byte;
}

uint8_t choose_byte(const float *logits, sampling *how) {
    if (how->temperature == 0)
        return best_byte(logits);
    float allowed[BYTE_VALUES];
    memcpy(allowed, logits, sizeof allowed);
    if (how->count > LOOP)
        forbid_loops(how, allowed);
    const uint8_t byte = draw_byte(allowed, how);
    append(how, byte);
    return byte;
}
