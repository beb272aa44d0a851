/* brute_select.h - computes the selection of one (b, g) by its definition: ranks each prefix
 * anew. */
#pragma once

#include "scores.h"

typedef struct select_rules {
    int64_t window, recent, sinks;
    fdma_scope scope;
    double gap;
} select_rules;

typedef struct ranked_key {
    float score;
    int32_t j;
    int is_sink;
} ranked_key;

/* Comparison for qsort: better keys come first, NaN ranks below every number, and the later of
 * equal keys comes first. */
static inline int compare_keys(const void *left, const void *right) {
    const ranked_key x = *(const ranked_key *)left, y = *(const ranked_key *)right;
    const int x_nan = isnan(x.score), y_nan = isnan(y.score);
    if (x.is_sink != y.is_sink)
        return x.is_sink ? -1 : 1;
    if (x_nan != y_nan)
        return x_nan ? 1 : -1;
    if (!x_nan && x.score != y.score)
        return x.score > y.score ? -1 : 1;
    return x.j > y.j ? -1 : x.j < y.j;
}

/* Sets kept[j] = 1 for the `recent` newest valid keys among the first `length`, and for the best
 * `window` of the other valid keys. */
static inline void rank_prefix(const float *score, const uint8_t *valid, int64_t length,
                               const select_rules *rules, ranked_key *keys, uint8_t *kept) {
    int64_t count = 0, newest = 0;
    for (int64_t j = 0; j < length; j++) {
        kept[j] = 0;
        if (valid == NULL || valid[j]) {
            const int is_sink = count < rules->sinks;
            keys[count++] = (ranked_key){.score = score[j], .j = (int32_t)j, .is_sink = is_sink};
        }
    }
    for (; newest < rules->recent && count > 0; newest++)
        kept[keys[--count].j] = 1;
    qsort(keys, (size_t)count, sizeof *keys, compare_keys);
    for (int64_t r = 0; r < count && r < rules->window; r++)
        kept[keys[r].j] = 1;
}

static inline void brute_global(const float *score, const uint8_t *valid, int64_t n,
                                const select_rules *rules, int32_t *expiry, int32_t *slot) {
    ranked_key *keys = malloc((size_t)(n + 1) * sizeof *keys);
    uint8_t *kept = malloc((size_t)(n + 1));
    rank_prefix(score, valid, n, rules, keys, kept);
    int32_t next = 0;
    for (int64_t j = 0; j < n; j++) {
        expiry[j] = (int32_t)(kept[j] ? n : j);
        slot[j] = kept[j] ? next++ : -1;
    }
    free(kept);
    free(keys);
}

/* Ranks the prefix of each position in turn, and records which keys left and which arrived. */
static inline void brute_causal(const float *score, const uint8_t *valid, int64_t n,
                                const select_rules *rules, int32_t *expiry, int32_t *slot) {
    ranked_key *keys = malloc((size_t)(n + 1) * sizeof *keys);
    uint8_t *kept = calloc((size_t)(n + 1), 1), *before = calloc((size_t)(n + 1), 1);
    int32_t filled = 0;
    for (int64_t p = 0; p < n; p++) {
        rank_prefix(score, valid, p + 1, rules, keys, kept);
        expiry[p] = (int32_t)(kept[p] ? n : p);
        slot[p] = -1;
        int left = 0;
        for (int64_t j = 0; j < p; j++) {
            CHECK(kept[j] <= before[j]); /* an evicted key never returns */
            if (before[j] && !kept[j]) {
                left++;
                expiry[j] = (int32_t)p;
                slot[p] = slot[j];
            }
        }
        CHECK(left <= kept[p]);
        if (kept[p] && !left)
            slot[p] = filled++;
        memcpy(before, kept, (size_t)n);
    }
    free(before);
    free(kept);
    free(keys);
}

static inline double best_score(const float *score, const uint8_t *valid, int64_t length) {
    double best = -INFINITY;
    for (int64_t j = 0; j < length; j++)
        if ((valid == NULL || valid[j]) && (double)score[j] > best)
            best = (double)score[j];
    return best;
}

/* True if the gap removes key j for the query at position p: its score is too far below the best so
 * far, and it is neither a sink nor one of the newest keys. */
static inline int is_too_low(const float *score, const uint8_t *valid, int64_t j, int64_t p,
                             const select_rules *rules) {
    const double own = isnan(score[j]) ? -(double)INFINITY : (double)score[j];
    int64_t before = 0, after = 0;
    for (int64_t r = 0; r <= p; r++) {
        const int is_valid = valid == NULL || valid[r];
        before += is_valid && r < j;
        after += is_valid && r > j;
    }
    return own < best_score(score, valid, p + 1) - rules->gap && before >= rules->sinks &&
           after >= rules->recent;
}

static inline void brute_gap(const float *score, const uint8_t *valid, int64_t n,
                             const select_rules *rules, int32_t *expiry, int32_t *slot) {
    for (int64_t j = 0; j < n; j++) {
        int gone = 0;
        for (int64_t p = j; p < expiry[j]; p++) {
            const int too_low = is_too_low(score, valid, j, p, rules);
            CHECK(too_low >= gone); /* a key that is too low once stays too low */
            gone = too_low;
            if (gone)
                expiry[j] = (int32_t)p;
        }
        if (expiry[j] == j)
            slot[j] = -1;
    }
}
