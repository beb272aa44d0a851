/* See check/pairs.h. */
#include "check/pairs.h"

#include "commands.h"
#include "common/random.h"
#include "common/text.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

typedef enum kept_pairs {
    KEPT_NONE,
    KEPT_HALF,
    KEPT_FEW,
    KEPT_MOST,
    KEPT_TILES,             /* of queries and keys: all of some, a half of some, none of others */
    KEPT_NONE_OF_SOME_ROWS, /* and a half of the others */
} kept_pairs;

/* The axes along which a tensor is not broadcast. */
enum {
    OVER_BATCH = 1,
    OVER_KV_HEADS = 2,
    OVER_Q_HEADS = 4,
    OVER_QUERIES = 8,
    OVER_KEYS = 16,
    OVER_PAIRS = OVER_QUERIES | OVER_KEYS,
    OVER_ALL = OVER_BATCH | OVER_Q_HEADS | OVER_PAIRS,
};

/* The tensors of a case. */
typedef struct pair_tensors {
    bool has_mask, has_bias;
    uint64_t mask_axes, bias_axes;
    kept_pairs kept;
} pair_tensors;

/* The cases whose names begin with "mask". */
static const struct {
    const char *name;
    pair_tensors tensors;
} family[] = {
    {"mask/all-axes", {true, true, OVER_ALL, OVER_ALL, KEPT_HALF}},
    {"mask/pairs", {true, false, OVER_PAIRS, 0, KEPT_TILES}},
    {"mask/kv-heads", {true, false, OVER_KV_HEADS | OVER_PAIRS, 0, KEPT_FEW}},
    {"mask/batch", {true, true, OVER_BATCH | OVER_PAIRS, OVER_KV_HEADS | OVER_PAIRS, KEPT_MOST}},
    {"mask/queries", {true, true, OVER_QUERIES, OVER_KEYS, KEPT_HALF}},
    {"mask/keys", {true, false, OVER_BATCH | OVER_KEYS, 0, KEPT_HALF}},
    {"mask/heads", {true, true, OVER_Q_HEADS, OVER_Q_HEADS, KEPT_HALF}},
    {"mask/empty-rows", {true, false, OVER_PAIRS, 0, KEPT_NONE_OF_SOME_ROWS}},
    {"mask/none", {true, false, OVER_PAIRS, 0, KEPT_NONE}},
    {"mask/selected", {true, false, OVER_ALL, 0, KEPT_TILES}},
    {"mask/rules", {true, false, OVER_KV_HEADS | OVER_PAIRS, 0, KEPT_MOST}},
    {"mask/packed", {true, true, OVER_Q_HEADS | OVER_PAIRS, OVER_PAIRS, KEPT_HALF}},
    {"mask/bias", {false, true, 0, OVER_ALL, KEPT_NONE}},
    {"mask/bias-keys", {false, true, 0, OVER_KEYS, KEPT_NONE}},
    {"mask/bias-selected", {false, true, 0, OVER_KV_HEADS | OVER_PAIRS, KEPT_NONE}},
    {"mask/one-query", {true, true, OVER_Q_HEADS | OVER_PAIRS, OVER_PAIRS, KEPT_FEW}},
    {"mask/few-queries",
     {true, true, OVER_KV_HEADS | OVER_PAIRS, OVER_Q_HEADS | OVER_KEYS, KEPT_MOST}},
    {"mask/full", {true, true, OVER_PAIRS, OVER_PAIRS, KEPT_MOST}},
};

/* A tensor that is broadcast along the axes whose bits are not set in `axes`. Two bits choose the
 * length of the axis of heads. */
static fdma_tensor make_tensor(const check_case *test, fdma_dtype dtype, uint64_t axes) {
    const int64_t heads[] = {1, test->kv_heads, test->q_heads, test->q_heads};
    const int64_t shape[4] = {axes & 1 ? test->batch : 1, heads[axes >> 1 & 3],
                              axes & 8 ? test->q_len : 1, axes & 16 ? test->kv_len : 1};
    return check_layout_tensor(dtype, test->layout, shape);
}

static bool keeps(kept_pairs kept, const int64_t index[4], uint64_t *random) {
    enum { tile_queries = 32, tile_keys = 48 };
    const uint64_t drawn = random_bits(random) >> 58; // 0 to 63
    switch (kept) {
    case KEPT_HALF:
        return drawn < 32;
    case KEPT_FEW:
        return drawn < 3;
    case KEPT_MOST:
        return drawn < 63;
    case KEPT_TILES: { // all of a tile, none of it, or a half
        const int64_t tile = index[0] + index[1] + index[2] / tile_queries + index[3] / tile_keys;
        return tile % 3 == 0 || (tile % 3 == 1 && drawn < 32);
    }
    case KEPT_NONE_OF_SOME_ROWS:
        return index[2] % 3 != 1 && drawn < 32;
    default:
        return false;
    }
}

static void fill_mask(fdma_tensor mask, kept_pairs kept, uint64_t seed) {
    const int64_t count = mask.shape[0] * mask.shape[1] * mask.shape[2] * mask.shape[3];
    uint64_t random = seed + 4;
    for (int64_t n = 0; n < count; n++) {
        int64_t index[4], rest = n;
        for (int axis = 3; axis >= 0; axis--) {
            index[axis] = rest % mask.shape[axis];
            rest /= mask.shape[axis];
        }
        check_store(mask, n, keeps(kept, index, &random));
    }
}

static bool is_shaped_alike(const fdma_tensor *x, const fdma_tensor *y) {
    for (int axis = 0; axis < 4; axis++)
        if (x->shape[axis] != y->shape[axis])
            return false;
    return true;
}

/* Puts NaN where a mask of the same shape excludes pairs. */
static void spoil_bias(fdma_tensor bias, fdma_tensor mask) {
    const double *const kept = check_widen(mask);
    const int64_t count = bias.shape[0] * bias.shape[1] * bias.shape[2] * bias.shape[3];
    for (int64_t n = 0; n < count; n++)
        if (kept[n] == 0)
            check_store(bias, n, (double)NAN);
}

/* For all cases except the family "mask". */
static pair_tensors tensors_of_seed(const check_case *test, uint64_t seed) {
    static const kept_pairs kept[] = {KEPT_HALF, KEPT_FEW, KEPT_MOST};
    const uint64_t mask_axes = seed / 128 % 32;
    return (pair_tensors){
        // a row of one key has gradients of exactly 0, which the plain evaluation may find, too
        .has_mask = seed % 3 == 0 && test->window != 1,
        .has_bias = seed % 5 < 2,
        .mask_axes = mask_axes,
        .bias_axes = seed / 64 % 4 == 0 ? mask_axes : seed / 4096 % 32,
        .kept = kept[seed / 2048 % 3],
    };
}

static pair_tensors tensors_of(const check_case *test, uint64_t seed) {
    for (size_t n = 0; n < sizeof family / sizeof family[0]; n++)
        if (strcmp(family[n].name, test->name) == 0)
            return family[n].tensors;
    if (strncmp(test->name, "mask/", strlen("mask/")) == 0) {
        print_error("fdma check: pairs.c does not name %s", test->name);
        exit(EXIT_FAILED);
    }
    return tensors_of_seed(test, seed);
}

void check_make_pairs(check_problem *problem) {
    const check_case *const test = problem->test;
    const uint64_t seed = check_seed(test) / 8;
    const pair_tensors pairs = tensors_of(test, seed);
    const fdma_dtype dtype = seed / 2 % 2 != 0 ? problem->dtype : FDMA_FLOAT32;
    uint64_t random = seed + 5;
    if (pairs.has_mask) {
        problem->attn_mask = make_tensor(test, FDMA_UINT8, pairs.mask_axes);
        fill_mask(problem->attn_mask, pairs.kept, seed);
    }
    if (!pairs.has_bias)
        return;
    problem->attn_bias = make_tensor(test, dtype, pairs.bias_axes);
    problem->dattn_bias = fdma_dense_tensor(NULL, seed / 16 % 2 != 0 ? dtype : FDMA_FLOAT32, 4,
                                            problem->attn_bias.shape);
    check_fill_normal(problem->attn_bias, &random, 1);
    if (pairs.has_mask && is_shaped_alike(&problem->attn_mask, &problem->attn_bias))
        spoil_bias(problem->attn_bias, problem->attn_mask);
}
