/* brute.h - selections by their definition: each prefix is ranked anew. */
#pragma once

#include "problem.h"

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

/* The selection of one (b, g). */
typedef struct brute_row {
    const problem *x; /* its rules */
    const float *score;
    const uint8_t *valid; /* NULL: all keys are */
    int64_t n;
    int32_t *expiry, *slot;
    ranked_key *keys; /* scratch */
} brute_row;

static inline bool row_has_key(const brute_row *row, int64_t j) {
    return row->valid == NULL || row->valid[j] != 0;
}

/* Sets kept[j] = 1 for the `recent` newest valid keys among the first `length`, and for the best
 * `window` of the other valid keys. */
static inline void rank_prefix(const brute_row *row, int64_t length, uint8_t *kept) {
    int64_t count = 0;
    for (int64_t j = 0; j < length; j++) {
        kept[j] = 0;
        if (row_has_key(row, j)) {
            const int is_sink = count < row->x->sinks;
            row->keys[count++] =
                (ranked_key){.score = row->score[j], .j = (int32_t)j, .is_sink = is_sink};
        }
    }
    for (int64_t newest = 0; newest < row->x->recent && count > 0; newest++)
        kept[row->keys[--count].j] = 1;
    qsort(row->keys, (size_t)count, sizeof *row->keys, compare_keys);
    for (int64_t r = 0; r < count && r < row->x->window; r++)
        kept[row->keys[r].j] = 1;
}

static inline void brute_global(const brute_row *row) {
    uint8_t *const kept = malloc((size_t)(row->n + 1));
    int32_t next = 0;
    rank_prefix(row, row->n, kept);
    for (int64_t j = 0; j < row->n; j++) {
        row->expiry[j] = (int32_t)(kept[j] ? row->n : j);
        row->slot[j] = kept[j] ? next++ : -1;
    }
    free(kept);
}

/* Ranks the prefix of each position in turn, and records which keys left and which arrived. */
static inline void brute_causal(const brute_row *row) {
    const int64_t n = row->n;
    uint8_t *const kept = calloc((size_t)(n + 1), 1), *const before = calloc((size_t)(n + 1), 1);
    int32_t filled = 0;
    for (int64_t p = 0; p < n; p++) {
        rank_prefix(row, p + 1, kept);
        row->expiry[p] = (int32_t)(kept[p] ? n : p);
        row->slot[p] = -1;
        int left = 0;
        for (int64_t j = 0; j < p; j++) {
            CHECK(kept[j] <= before[j]); /* an evicted key never returns */
            if (before[j] && !kept[j]) {
                left++;
                row->expiry[j] = (int32_t)p;
                row->slot[p] = row->slot[j];
            }
        }
        CHECK(left <= kept[p]);
        if (kept[p] && !left)
            row->slot[p] = filled++;
        memcpy(before, kept, (size_t)n);
    }
    free(before);
    free(kept);
}

/* True if the gap removes key j for the query at position p: its score is too far below the best so
 * far, and it is neither a sink nor one of the newest keys. */
static inline int is_too_low(const brute_row *row, int64_t j, int64_t p) {
    const double own = isnan(row->score[j]) ? -(double)INFINITY : (double)row->score[j];
    double best = -(double)INFINITY;
    int64_t before = 0, after = 0;
    for (int64_t r = 0; r <= p; r++) {
        const int is_valid = row_has_key(row, r);
        if (is_valid && (double)row->score[r] > best)
            best = (double)row->score[r];
        before += is_valid && r < j;
        after += is_valid && r > j;
    }
    return own < best - row->x->gap && before >= row->x->sinks && after >= row->x->recent;
}

static inline void brute_gap(const brute_row *row) {
    for (int64_t j = 0; j < row->n; j++) {
        int gone = 0;
        for (int64_t p = j; p < row->expiry[j]; p++) {
            const int too_low = is_too_low(row, j, p);
            CHECK(too_low >= gone); /* a key that is too low once stays too low */
            gone = too_low;
            if (gone)
                row->expiry[j] = (int32_t)p;
        }
        if (row->expiry[j] == j)
            row->slot[j] = -1;
    }
}

static inline fdma_selection brute_selection(const problem *x) {
    const fdma_selection want = selection_for(x->score);
    ranked_key *const keys = malloc((size_t)(x->kv_len + 1) * sizeof *keys);
    for (int64_t segment = 0; segment < x->batch * x->kv_heads; segment++) {
        const int64_t b = segment / x->kv_heads, at = segment * x->kv_len;
        const uint8_t *const valid = x->key_valid.data;
        const brute_row row = {.x = x,
                               .score = (const float *)x->score.data + at,
                               .valid = valid != NULL ? valid + b * x->kv_len : NULL,
                               .n = x->kv_len,
                               .expiry = (int32_t *)want.expiry.data + at,
                               .slot = (int32_t *)want.slot.data + at,
                               .keys = keys};
        (x->scope == FDMA_SCOPE_GLOBAL ? brute_global : brute_causal)(&row);
        if (x->gap > 0)
            brute_gap(&row);
    }
    free(keys);
    return want;
}
