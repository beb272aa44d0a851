/* See check/pairs.h. */
#include "check/pairs.h"

#include "common/random.h"

#include <math.h>

/* A tensor that is broadcast along the axes whose bits are not set in `axes`. Two bits choose the
 * length of the axis of heads. */
static fdma_tensor make_tensor(const check_case *test, fdma_dtype dtype, uint64_t axes) {
    const int64_t heads[] = {1, test->kv_heads, test->q_heads, test->q_heads};
    const int64_t shape[4] = {axes & 1 ? test->batch : 1, heads[axes >> 1 & 3],
                              axes & 8 ? test->q_len : 1, axes & 16 ? test->kv_len : 1};
    return check_layout_tensor(dtype, test->layout, shape);
}

/* Masks keep a half of the pairs, few of them, or almost all. */
static void fill_mask(fdma_tensor mask, uint64_t seed) {
    static const uint64_t kept[] = {32, 3, 63}; // of 64
    const int64_t count = mask.shape[0] * mask.shape[1] * mask.shape[2] * mask.shape[3];
    uint64_t random = seed + 4;
    for (int64_t n = 0; n < count; n++)
        check_store(mask, n, random_bits(&random) >> 58 < kept[seed / 2048 % 3]);
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

void check_make_pairs(check_problem *problem) {
    const check_case *const test = problem->test;
    const uint64_t seed = check_seed(test) / 8;
    // a row of one key has gradients of exactly 0, and the plain evaluation may find exactly that
    const bool has_mask = seed % 3 == 0 && test->window != 1, has_bias = seed % 5 < 2,
               alike = seed / 64 % 4 == 0;
    const fdma_dtype dtype = seed / 2 % 2 != 0 ? problem->dtype : FDMA_FLOAT32;
    const uint64_t mask_axes = seed / 128 % 32;
    uint64_t random = seed + 5;
    if (has_mask) {
        problem->attn_mask = make_tensor(test, FDMA_UINT8, mask_axes);
        fill_mask(problem->attn_mask, seed);
    }
    if (!has_bias)
        return;
    problem->attn_bias = make_tensor(test, dtype, alike ? mask_axes : seed / 4096 % 32);
    problem->dattn_bias = fdma_dense_tensor(NULL, seed / 16 % 2 != 0 ? dtype : FDMA_FLOAT32, 4,
                                            problem->attn_bias.shape);
    check_fill_normal(problem->attn_bias, &random, 1);
    if (has_mask && is_shaped_alike(&problem->attn_mask, &problem->attn_bias))
        spoil_bias(problem->attn_bias, problem->attn_mask);
}
