/* The inputs of score, select, lists and forward; see check/problem.h. */
#include "check/problem.h"

#include "common/arrays.h"
#include "common/random.h"

#include <math.h>

/* Scores that are NaN, infinite, zero or denormal. Most rows still have finite results: the early
 * NaN are evicted by every later key, and only the rows after the one late +inf become NaN. */
static float special_score(const check_case *test, int64_t j, float ordinary) {
    const int64_t quarter = test->kv_len / 4;
    const bool early_nan = check_is_selected(test) && j < quarter;
    if (j % 9 == 4 && (early_nan || j > 3 * quarter))
        return NAN;
    if (j == 7 * test->kv_len / 8 && check_is_causal(test))
        return INFINITY;
    switch (j % 8) {
    case 1:
        return -INFINITY;
    case 3:
        return j % 3 != 0 ? 0.0F : -0.0F;
    case 5:
        return j % 3 != 0 ? 1e-41F : -1e-41F;
    default:
        return ordinary;
    }
}

static float score_of(const check_case *test, int64_t j, uint64_t *random) {
    const float relative = (float)j / (float)test->kv_len;
    const float ordinary = (float)(1.5 * random_normal(random));
    switch (test->scores) {
    case SCORES_TIED:
        return 0.25F;
    case SCORES_RISING:
        return 4 * relative - 2;
    case SCORES_FALLING:
        return 2 - 4 * relative;
    case SCORES_CLIMB:
        return 3 * (float)j;
    case SCORES_DIVE:
        return -3 * (float)j;
    case SCORES_SAW:
        return (float)(j % 23) / 8;
    case SCORES_STEPS:
        return (float)(random_bits(random) >> 62) / 2;
    case SCORES_CROWN:
        return j == 0 ? 3 : (float)(j % 2);
    case SCORES_SPECIAL:
        return special_score(test, j, ordinary);
    default:
        return ordinary;
    }
}

static void fill_scores(check_problem *problem, uint64_t *random) {
    const check_case *test = problem->test;
    for (int64_t at = 0; at < test->batch * test->kv_heads * test->kv_len; at++) {
        const int64_t j = at % test->kv_len, b = at / test->kv_len / test->kv_heads;
        const float ranked = score_of(test, j, random);
        const float score = check_key_is_valid(test, b, j) ? ranked : NAN;
        const float bias = test->bias_form == FDMA_BIAS_EXP ? expf(score) : score;
        check_store(problem->score, at, (double)score);
        if (problem->bias.rank > 0)
            check_store(problem->bias, at, (double)bias);
    }
}

/* Writes key_valid, and NaN to the k and v of keys that are not valid, which nobody may read. */
static void spoil_invalid_keys(check_problem *problem) {
    const check_case *test = problem->test;
    const int64_t width = test->kv_heads * test->head_dim;
    for (int64_t key = 0; key < test->batch * test->kv_len; key++) {
        const bool valid = check_key_is_valid(test, key / test->kv_len, key % test->kv_len);
        ((uint8_t *)problem->key_valid.data)[key] = valid;
        for (int64_t i = 0; i < width && !valid; i++) {
            check_store(problem->k, key * width + i, (double)NAN);
            check_store(problem->v, key * width + i, (double)NAN);
        }
    }
}

static void allocate_inputs(check_problem *problem) {
    const check_case *test = problem->test;
    const int64_t q_shape[4] = {test->batch, test->q_len, test->q_heads, test->head_dim};
    const int64_t kv_shape[4] = {test->batch, test->kv_len, test->kv_heads, test->head_dim};
    const int64_t proj_shape[2] = {test->kv_heads, test->kv_heads * test->head_dim};
    const int64_t score_shape[3] = {test->batch, test->kv_heads, test->kv_len};
    const int64_t valid_shape[2] = {test->batch, test->kv_len};
    const int64_t lse_shape[3] = {test->batch, test->q_heads, test->q_len};
    const fdma_dtype dtype = problem->dtype;

    problem->q = check_layout_tensor(dtype, test->layout, q_shape);
    problem->k = check_layout_tensor(dtype, test->layout, kv_shape);
    problem->v = check_layout_tensor(dtype, test->layout, kv_shape);
    problem->dt_proj = check_tensor(dtype, 2, proj_shape);
    problem->a = check_tensor(dtype, 1, &test->kv_heads);
    problem->score = check_tensor(FDMA_FLOAT32, 3, score_shape);
    problem->forward_lse = check_tensor(FDMA_FLOAT32, 3, lse_shape);
    if (test->bias_form != FDMA_BIAS_NONE)
        problem->bias = check_tensor(FDMA_FLOAT32, 3, score_shape);
    if (test->padding != PADDING_NONE)
        problem->key_valid = check_tensor(FDMA_UINT8, 2, valid_shape);
    if (check_is_selected(test)) {
        problem->selection.size = sizeof problem->selection;
        problem->selection.expiry = check_tensor(FDMA_INT32, 3, score_shape);
        problem->selection.slot = check_tensor(FDMA_INT32, 3, score_shape);
    }
}

void check_make_inputs(check_problem *problem, const check_case *test, fdma_dtype dtype,
                       int32_t device) {
    const double width = (double)(test->kv_heads * test->head_dim);
    uint64_t random = check_seed(test);
    *problem = (check_problem){.test = test, .dtype = dtype, .device = device};
    allocate_inputs(problem);
    check_fill_normal(problem->q, &random, 1);
    check_fill_normal(problem->k, &random, 1);
    check_fill_normal(problem->v, &random, 1);
    check_fill_normal(problem->dt_proj, &random, 1 / sqrt(width));
    check_fill_normal(problem->a, &random, 1);
    fill_scores(problem, &random);
    if (problem->key_valid.rank > 0)
        spoil_invalid_keys(problem);
}
