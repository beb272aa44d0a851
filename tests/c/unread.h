/* unread.h - problems in which some keys are kept by no query, and poison for those keys. */
#ifndef UNREAD_H
#define UNREAD_H

#include "cases.h"

static const char *const unread_cases[] = {
    "later/steps", "long/rising",    "head-dim/8",      "global/causal",  "global/full",
    "row/group-8", "row/left",       "row/window-1",    "window/1",       "padding/holes",
    "row/holes",   "dense/pad-left", "dense/pad-holes", "global/padding", "row/long",
};

static inline problem unread_problem(const char *name, fdma_dtype dtype) {
    return case_problem(find_case(name), dtype);
}

static inline int is_read(const problem *x, int64_t b, int64_t g, int64_t j) {
    for (int64_t i = 0; i < x->q_len; i++)
        if (problem_keeps(x, b, g, i, j))
            return 1;
    return 0;
}

/* Writes `poison` into the keys that are not read; returns how many there are. */
static inline int64_t poison_unread(problem *x, float poison) {
    int64_t unread = 0;
    for (int64_t key = 0; key < x->batch * x->kv_heads * x->kv_len; key++) {
        const int64_t j = key % x->kv_len, g = key / x->kv_len % x->kv_heads;
        const int64_t b = key / x->kv_len / x->kv_heads;
        if (!is_read(x, b, g, j)) {
            spoil_key(x->k, b, j, g, poison);
            spoil_key(x->v, b, j, g, poison);
            ((float *)x->bias.data)[key] = poison;
            unread++;
        }
    }
    return unread;
}

#endif /* UNREAD_H */
