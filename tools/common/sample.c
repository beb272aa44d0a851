/* See common/sample.h. */
#include "common/sample.h"

#include "common/arrays.h"
#include "common/random.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

typedef struct candidate {
    double weight; /* its probability, divided by the largest */
    int32_t token;
} candidate;

static int likeliest_first(const void *left, const void *right) {
    const candidate *const a = left, *const b = right;
    if (a->weight != b->weight)
        return a->weight > b->weight ? -1 : 1;
    return (a->token > b->token) - (a->token < b->token);
}

static int32_t likeliest(const float *logits, int64_t count) {
    int32_t best = 0;
    for (int32_t token = 1; token < count; token++)
        if (logits[token] > logits[best])
            best = token;
    return best;
}

/* Puts `one` into a heap, whose root is the least likely, at the place `at` or below it. */
static void settle(candidate *heap, int64_t count, int64_t at, candidate one) {
    for (int64_t below; (below = 2 * at + 1) < count; at = below) {
        if (below + 1 < count && likeliest_first(&heap[below + 1], &heap[below]) > 0)
            below++;
        if (likeliest_first(&heap[below], &one) <= 0)
            break;
        heap[at] = heap[below];
    }
    heap[at] = one;
}

/* Keeps the likeliest `most` candidates, in any order; all if it is 0. Returns their number. */
static int64_t keep_likeliest(candidate *all, int64_t count, int64_t most) {
    if (most == 0 || most >= count)
        return count;
    for (int64_t root = most / 2; root-- > 0;)
        settle(all, most, root, all[root]);
    for (int64_t n = most; n < count; n++)
        if (likeliest_first(&all[n], &all[0]) < 0)
            settle(all, most, 0, all[n]);
    return most;
}

/* Keeps what has at least this weight. */
static int64_t keep_above(candidate *all, int64_t count, double weight) {
    int64_t kept = 0;
    for (int64_t n = 0; n < count; n++)
        if (all[n].weight >= weight)
            all[kept++] = all[n];
    return kept;
}

static double sum_of(const candidate *all, int64_t count) {
    double sum = 0;
    for (int64_t n = 0; n < count; n++)
        sum += all[n].weight;
    return sum;
}

/* Keeps the likeliest that reach this part of the sum, the likeliest first. */
static int64_t keep_part(candidate *all, int64_t count, double part) {
    const double sum = sum_of(all, count);
    /* those below this weight have together less than the rest, so they need not be sorted */
    count = keep_above(all, count, (1 - part) * sum / (double)count);
    qsort(all, (size_t)count, sizeof *all, likeliest_first);
    int64_t kept = 0;
    for (double reached = 0; kept < count && (kept == 0 || reached < part * sum); kept++)
        reached += all[kept].weight;
    return kept;
}

int32_t choose_token(const float *logits, int64_t count, sampling *how) {
    const int32_t best = likeliest(logits, count);
    if (how->temperature == 0)
        return best;
    candidate *const all = allocate((size_t)count * sizeof *all);
    for (int32_t token = 0; token < count; token++) {
        const double below = (double)logits[best] - (double)logits[token];
        all[token] = (candidate){exp(-below / how->temperature), token};
    }
    int64_t kept = keep_likeliest(all, count, how->top_k);
    if (how->top_p < 1)
        kept = keep_part(all, kept, how->top_p);
    kept = keep_above(all, kept, how->min_p);
    const double drawn = (double)(random_bits(&how->random) >> 11) * 0x1p-53 * sum_of(all, kept);
    int64_t at = 0;
    for (double left = drawn; at < kept - 1 && left >= all[at].weight; at++)
        left -= all[at].weight;
    const int32_t token = all[at].token;
    free(all);
    return token;
}
