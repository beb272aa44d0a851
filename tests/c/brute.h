/* brute.h - selections and tile lists by their definitions: each prefix is ranked anew, and every
 * query is asked which keys it keeps. */
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

/* ---- lists ---- */

/* One (b, g) of a problem with a selection: its expiries and slots, and how many keys exist. */
typedef struct selected_row {
    const int32_t *expiry, *slot;
    int64_t keys;
    int causal;
    bool has_gap;
} selected_row;

static inline bool row_keeps(const selected_row *row, int64_t j, int64_t p) {
    return row->causal ? j <= p && p < row->expiry[j] : row->expiry[j] == row->keys;
}

static inline int compare_ints(const void *left, const void *right) {
    const int64_t x = *(const int64_t *)left, y = *(const int64_t *)right;
    return x < y ? -1 : x > y;
}

/* Lists the keys alive at p by their slots, which are 0, 1, ...; with a gap, -1 stands for slots
 * without a key. Returns the number of entries. */
static inline int32_t brute_alive(const selected_row *row, int64_t p, int32_t *list) {
    int64_t *const found = malloc((size_t)(row->keys + 1) * sizeof *found);
    int32_t alive = 0, used = 0;
    for (int64_t j = 0; j < row->keys; j++)
        if (row_keeps(row, j, p))
            found[alive++] = (int64_t)row->slot[j] << 32 | j;
    qsort(found, (size_t)alive, sizeof *found, compare_ints);
    for (int32_t n = 0; n < alive; n++) {
        while (row->has_gap && used < found[n] >> 32)
            list[used++] = -1;
        CHECK_INT(found[n] >> 32, used);
        list[used++] = (int32_t)(found[n] & INT32_MAX);
    }
    free(found);
    return used;
}

/* The list of the tile with positions p0 to p1: the keys that p0 keeps, then the keys that later
 * positions keep. */
static inline void brute_tile(const selected_row *row, int64_t p0, int64_t p1, int32_t *list,
                              int32_t *count) {
    count[0] = count[1] = brute_alive(row, p0, list);
    for (int64_t j = 0; j < row->keys; j++) {
        int kept = 0;
        for (int64_t p = p0 + 1; p <= p1 && !kept; p++)
            kept = row_keeps(row, j, p);
        if (kept && !row_keeps(row, j, p0))
            list[count[1]++] = (int32_t)j;
    }
}

static inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

/* Fills in the outputs of a call on the problem's selection. */
static inline void brute_lists(const problem *x, const fdma_lists_args *to) {
    const int64_t tiles = to->list.shape[2], width = to->list.shape[3];
    const int32_t *const used = x->kv_used.data;
    for (int64_t n = 0; n < x->batch * x->kv_heads * tiles; n++) {
        const int64_t at = n / tiles * x->kv_len, first = n % tiles * to->tile_len;
        const int64_t last = first + lesser(to->tile_len, x->q_len - first) - 1;
        const selected_row row = {
            .expiry = (const int32_t *)x->selection.expiry.data + at,
            .slot = (const int32_t *)x->selection.slot.data + at,
            .keys = used != NULL ? used[n / tiles / x->kv_heads] : x->kv_len,
            .causal = x->causal,
            .has_gap = x->gap > 0,
        };
        const int64_t origin = row.keys - x->q_len;
        brute_tile(&row, origin + first, origin + last, (int32_t *)to->list.data + n * width,
                   (int32_t *)to->count.data + 2 * n);
    }
}
