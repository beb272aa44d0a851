/* unread.h - problems in which some keys are kept by no query, and poison for those keys. */
#ifndef UNREAD_H
#define UNREAD_H

#include "problem.h"

typedef struct unread_shape {
    int64_t batch, q_len, kv_len, q_heads, kv_heads, head_dim;
    int64_t window; /* -1: dense */
    fdma_scope scope;
    int causal;
    int padded;
} unread_shape;

static const unread_shape unread_shapes[] = {
    {2, 190, 230, 4, 2, 40, 20, FDMA_SCOPE_CAUSAL, 1, 0},
    {1, 300, 300, 2, 1, 64, 129, FDMA_SCOPE_CAUSAL, 1, 0},
    {1, 70, 400, 6, 2, 8, 33, FDMA_SCOPE_CAUSAL, 1, 1},
    {1, 130, 150, 3, 1, 128, 20, FDMA_SCOPE_GLOBAL, 1, 1},
    {2, 65, 140, 4, 1, 24, 50, FDMA_SCOPE_GLOBAL, 0, 0},
    {1, 1, 260, 8, 2, 64, 17, FDMA_SCOPE_CAUSAL, 1, 0},
    {1, 1, 131, 1, 1, 256, 9, FDMA_SCOPE_GLOBAL, 0, 1},
    {1, 5, 70, 5, 1, 72, 1, FDMA_SCOPE_CAUSAL, 1, 0},
    {1, 40, 90, 4, 2, 16, 2, FDMA_SCOPE_CAUSAL, 1, 0},
    {2, 190, 230, 4, 2, 40, -1, FDMA_SCOPE_CAUSAL, 1, 1},
    {1, 65, 120, 3, 3, 24, -1, FDMA_SCOPE_GLOBAL, 0, 1},
    {1, 1, 200, 8, 2, 128, -1, FDMA_SCOPE_CAUSAL, 1, 1},
    {1, 300, 900, 8, 2, 64, 130, FDMA_SCOPE_CAUSAL, 1, 0},
    {1, 3, 5000, 8, 2, 128, 700, FDMA_SCOPE_CAUSAL, 1, 0},
};

static inline problem unread_problem(const unread_shape *n, fdma_dtype dtype) {
    problem x = {.batch = n->batch,
                 .q_len = n->q_len,
                 .kv_len = n->kv_len,
                 .q_heads = n->q_heads,
                 .kv_heads = n->kv_heads,
                 .head_dim = n->head_dim,
                 .window = n->window,
                 .scope = n->scope,
                 .causal = n->causal,
                 .dtype = dtype};
    problem_fill(&x, 61);
    if (n->padded) {
        x.key_valid = new_tensor(FDMA_UINT8, x.batch, x.kv_len, -1, -1);
        for (int64_t i = 0; i < x.batch * x.kv_len; i++) {
            ((uint8_t *)x.key_valid.data)[i] = i % 7 < 4 && i % x.kv_len > 2;
        }
    }
    problem_select(&x);
    return x;
}

static inline int is_read(const problem *x, int64_t b, int64_t g, int64_t j) {
    for (int64_t i = 0; i < x->q_len; i++) {
        if (problem_keeps(x, b, g, i, j)) {
            return 1;
        }
    }
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
