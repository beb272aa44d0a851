/* gradient_shapes.h - shapes at which backward kernels go wrong, as problems. */
#ifndef GRADIENT_SHAPES_H
#define GRADIENT_SHAPES_H

#include "gradient.h"

typedef enum gradient_order {
    ORDER_IID,
    ORDER_TIED,    /* a sliding window */
    ORDER_RISING,  /* the same, by rank */
    ORDER_FALLING, /* the first keys stay, all others never come in */
    ORDER_SAW,     /* keys arrive and leave within a few positions */
    ORDER_CROWNED, /* key 0 outranks all: it lives throughout, the others pass */
} gradient_order;

typedef struct gradient_shape {
    const char *name;
    int64_t batch, q_len, kv_len, q_heads, kv_heads, head_dim;
    int64_t window; /* -1: dense */
    fdma_scope scope;
    int causal;
    double softcap;
    gradient_order order;
    int padded;
} gradient_shape;

#define PREFIX FDMA_SCOPE_CAUSAL, 1
#define RANKED FDMA_SCOPE_GLOBAL, 1
#define OPEN FDMA_SCOPE_GLOBAL, 0

static const gradient_shape gradient_shapes[] = {
    {"ties", 1, 150, 150, 4, 2, 64, 40, PREFIX, 0, ORDER_TIED, 0},
    {"rising", 1, 210, 210, 2, 1, 64, 30, PREFIX, 0, ORDER_RISING, 0},
    {"falling", 1, 150, 150, 2, 1, 64, 30, PREFIX, 0, ORDER_FALLING, 0},
    {"arrive and leave in a tile", 1, 200, 200, 4, 2, 64, 3, PREFIX, 0, ORDER_SAW, 0},
    {"one key throughout", 1, 260, 260, 2, 1, 64, 2, PREFIX, 0, ORDER_CROWNED, 0},
    {"one key throughout, wide", 1, 200, 330, 4, 1, 128, 70, PREFIX, 0, ORDER_CROWNED, 0},
    {"window 1", 1, 140, 140, 4, 2, 64, 1, PREFIX, 0, ORDER_IID, 0},
    {"window 1, ties", 1, 70, 70, 2, 1, 128, 1, PREFIX, 0, ORDER_TIED, 0},
    {"window kv_len - 1", 1, 131, 131, 4, 2, 64, 130, PREFIX, 0, ORDER_IID, 0},
    {"window kv_len", 1, 131, 131, 4, 2, 64, 131, PREFIX, 0, ORDER_IID, 0},
    {"later", 2, 60, 300, 4, 2, 64, 50, PREFIX, 0, ORDER_IID, 0},
    {"one query", 2, 1, 200, 8, 2, 128, 50, PREFIX, 0, ORDER_IID, 0},
    {"one query, dense", 1, 1, 133, 4, 4, 64, -1, PREFIX, 0, ORDER_IID, 0},
    {"empty rows", 1, 97, 41, 2, 1, 64, -1, PREFIX, 0, ORDER_IID, 0},
    {"empty rows by padding", 2, 90, 90, 4, 2, 64, 20, PREFIX, 0, ORDER_IID, 1},
    {"dense, padded", 2, 70, 90, 4, 2, 96, -1, PREFIX, 0, ORDER_IID, 1},
    {"dense, full", 1, 65, 140, 3, 1, 40, -1, OPEN, 0, ORDER_IID, 0},
    {"more queries, full", 1, 140, 51, 2, 2, 64, 17, OPEN, 0, ORDER_IID, 1},
    {"global, causal", 1, 130, 150, 4, 2, 64, 33, RANKED, 0, ORDER_IID, 0},
    {"softcap", 1, 100, 100, 4, 2, 64, 24, PREFIX, 2, ORDER_IID, 0},
    {"softcap, dense", 1, 60, 60, 2, 1, 128, -1, PREFIX, 0.7, ORDER_IID, 0},
    {"group 1", 1, 83, 83, 2, 2, 64, 24, PREFIX, 0, ORDER_IID, 0},
    {"group 2", 1, 83, 83, 4, 2, 64, 24, PREFIX, 0, ORDER_IID, 0},
    {"group 3", 1, 83, 83, 3, 1, 64, 24, PREFIX, 0, ORDER_SAW, 0},
    {"group 4", 1, 83, 83, 4, 1, 64, 24, PREFIX, 0, ORDER_RISING, 0},
    {"group 5", 1, 83, 83, 5, 1, 64, 24, PREFIX, 0, ORDER_IID, 0},
    {"group 6", 1, 83, 83, 6, 1, 64, 24, PREFIX, 0, ORDER_IID, 0},
    {"group 7", 1, 83, 83, 7, 1, 64, 24, PREFIX, 0, ORDER_TIED, 0},
    {"group 8", 1, 83, 83, 8, 1, 64, 24, PREFIX, 0, ORDER_IID, 0},
    {"group 11", 1, 83, 83, 11, 1, 64, 24, PREFIX, 0, ORDER_IID, 0},
    {"group 16", 1, 83, 83, 16, 1, 64, 24, PREFIX, 0, ORDER_IID, 0},
    {"head_dim 8", 1, 60, 90, 2, 1, 8, 31, PREFIX, 0, ORDER_IID, 0},
    {"head_dim 192", 1, 90, 150, 2, 1, 192, 31, PREFIX, 0, ORDER_IID, 0},
    {"head_dim 256", 1, 90, 150, 2, 1, 256, 31, PREFIX, 0, ORDER_RISING, 0},
    {"no queries", 1, 0, 70, 2, 1, 64, 20, PREFIX, 0, ORDER_IID, 0},
    {"no keys", 1, 9, 0, 2, 1, 64, -1, OPEN, 0, ORDER_IID, 0},
};

#undef PREFIX
#undef RANKED
#undef OPEN

static inline float ordered_score(gradient_order order, int64_t j, float random) {
    switch (order) {
    case ORDER_TIED:
        return 0.5F;
    case ORDER_RISING:
        return (float)j / 64;
    case ORDER_FALLING:
        return -(float)j / 64;
    case ORDER_SAW:
        return (float)(j * 5 % 7) / 4;
    case ORDER_CROWNED:
        return j == 0 ? 3 : (float)(j % 2);
    default:
        return random;
    }
}

/* Every third key or so is not valid, and the first of the second sequence are not: its first rows
 * keep nothing. */
static inline void pad_problem(problem *x) {
    x->key_valid = new_tensor(FDMA_UINT8, x->batch, x->kv_len, -1, -1);
    for (int64_t i = 0; i < x->batch * x->kv_len; i++) {
        const int64_t b = i / x->kv_len, j = i % x->kv_len;
        ((uint8_t *)x->key_valid.data)[i] = j % 7 < 4 && j >= 9 * b;
    }
}

static inline problem gradient_shape_problem(const gradient_shape *n, fdma_dtype dtype) {
    problem x = {.batch = n->batch,
                 .q_len = n->q_len,
                 .kv_len = n->kv_len,
                 .q_heads = n->q_heads,
                 .kv_heads = n->kv_heads,
                 .head_dim = n->head_dim,
                 .window = n->window,
                 .scope = n->scope,
                 .causal = n->causal,
                 .softcap = n->softcap,
                 .dtype = dtype};
    problem_fill(&x, 91);
    float *const score = x.score.data, *const bias = x.bias.data;
    for (int64_t i = 0; i < count_of(x.score); i++) {
        bias[i] = score[i] = ordered_score(n->order, i % n->kv_len, score[i]);
    }
    if (n->padded) {
        pad_problem(&x);
    }
    problem_select(&x);
    return x;
}

#endif /* GRADIENT_SHAPES_H */
