/* The rule `gap`: a key leaves the selection that the other rules make once its score is more than
 * `gap` below the best score so far, unless it is a sink or among the `recent` newest keys.
 *
 * The best score only rises, so the position from which on a score is too low is found by binary
 * search in the best scores of all prefixes. */
#pragma once

#include "core/gap.h"
#include "cpu/common/memory.h"

/* Fills best[] with the highest score of the valid keys up to each position, -inf before the first.
 * Returns the last one. */
static float find_best_scores(const float *score, const uint8_t *valid, int64_t kv_len,
                              float *best) {
    float highest = -INFINITY;
    for (int64_t j = 0; j < kv_len; j++) {
        const bool rises = (valid == NULL || valid[j] != 0) && score[j] > highest; // not if NaN
        best[j] = highest = rises ? score[j] : highest;
    }
    return highest;
}

/* The first position from `first` to `end` - 1 at which a score is too low, or `end`. */
static int32_t find_too_low(const float *best, int32_t first, int32_t end, float score,
                            double gap) {
    while (first < end) {
        const int32_t middle = first + (end - first) / 2;
        if (falls_below((double)score, (double)best[middle], gap))
            end = middle;
        else
            first = middle + 1;
    }
    return end;
}

/* The position of the first valid key from j on; kv_len if there is none. */
static int64_t next_valid(const uint8_t *valid, int64_t j, int64_t kv_len) {
    while (j < kv_len && valid != NULL && valid[j] == 0)
        j++;
    return j;
}

/* Applies the rule to the selection of one (b, g), whose valid keys before `sinks_end` are sinks.
 * best: [kv_len], scratch. */
static void keep_near_best(const fdma_problem *problem, int64_t head, int32_t sinks_end,
                           float *best) {
    const int64_t b = head / problem->kv_heads, g = head % problem->kv_heads;
    const int64_t kv_len = problem->kv_len;
    const uint8_t *const valid = valid_keys(problem, b);
    const float *const score = float_at(&problem->score, b, g, 0);
    int32_t *const expiry = int_at(&problem->expiry, b, g, 0);
    int32_t *const slot = is_present(&problem->slot) ? int_at(&problem->slot, b, g, 0) : NULL;
    const double highest = (double)find_best_scores(score, valid, kv_len, best);
    int64_t j = next_valid(valid, 0, kv_len), from = j; // where j is no longer among the newest
    for (int64_t n = 0; n < problem->recent && from < kv_len; n++)
        from = next_valid(valid, from + 1, kv_len);
    for (; from < kv_len; j = next_valid(valid, j + 1, kv_len)) {
        if (j >= sinks_end && expiry[j] > from &&
            falls_below((double)score[j], highest, problem->gap))
            expiry[j] = find_too_low(best, (int32_t)from, expiry[j], score[j], problem->gap);
        if (slot != NULL && expiry[j] == j)
            slot[j] = -1;
        from = next_valid(valid, from + 1, kv_len);
    }
}
