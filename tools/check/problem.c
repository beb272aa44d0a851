/* check_problem.c - makes the tensors of a case, repeatably: the same numbers on every machine. */
#include "check/check.h"
#include "common/arrays.h"
#include "common/random.h"

#include <math.h>

uint64_t check_seed(const char *name) {
    uint64_t seed = 0xcbf29ce484222325U; /* FNV-1a */
    for (; *name != '\0'; name++) {
        seed = (seed ^ (unsigned char)*name) * 0x100000001b3U;
    }
    return seed;
}

void check_fill_normal(fdma_tensor tensor, uint64_t *random, double deviation) {
    const int64_t count = element_count(&tensor);
    for (int64_t i = 0; i < count; i++) {
        check_store(tensor, i, deviation * random_normal(random));
    }
}

int check_mask_is_causal(const check_case *test) { return test->mask != MASK_FULL; }

fdma_scope check_mask_scope(const check_case *test) {
    return test->mask == MASK_CAUSAL ? FDMA_SCOPE_CAUSAL : FDMA_SCOPE_GLOBAL;
}

int check_key_is_valid(const check_case *test, int64_t b, int64_t j) {
    const int64_t padding = test->kv_len * (b + 1) / (test->batch + 2);
    switch (test->padding) {
    case PADDING_LEFT:
        return j >= padding;
    case PADDING_RIGHT:
        return j < test->kv_len - padding;
    case PADDING_HOLES:
        return (j * 7 + b) % 5 > 1;
    case PADDING_ALL:
        return b > 0 && j >= padding;
    default:
        return 1;
    }
}

/* NaN, infinities, zeros and denormals, so placed that many rows still have finite results: early
 * NaN are evicted by everything that follows, one late +inf makes the rows after it NaN. */
static float special_score(const check_case *test, int64_t j, float ordinary) {
    const int64_t quarter = test->kv_len / 4;
    const int early_nan = test->window >= 0 && j < quarter;
    if (j % 9 == 4 && (early_nan || j > 3 * quarter)) {
        return NAN;
    }
    if (j == 7 * test->kv_len / 8 && test->mask != MASK_FULL) {
        return INFINITY;
    }
    switch (j % 8) {
    case 1:
        return -INFINITY;
    case 3:
        return j % 3 ? 0.0F : -0.0F;
    case 5:
        return j % 3 ? 1e-41F : -1e-41F;
    default:
        return ordinary;
    }
}

static float score_of(const check_case *test, int64_t j, uint64_t *random) {
    const float place = (float)j / (float)test->kv_len,
                ordinary = (float)(1.5 * random_normal(random));
    switch (test->scores) {
    case SCORES_TIED:
        return 0.25F;
    case SCORES_RISING:
        return 4 * place - 2;
    case SCORES_FALLING:
        return 2 - 4 * place;
    case SCORES_CLIMB:
        return 3 * (float)j;
    case SCORES_DIVE:
        return -3 * (float)j;
    case SCORES_SAW:
        return (float)(j % 23) / 8;
    case SCORES_STEPS:
        return (float)(random_bits(random) >> 62) / 2;
    case SCORES_SPECIAL:
        return special_score(test, j, ordinary);
    default:
        return ordinary;
    }
}

static float bias_of(fdma_bias_form form, float score) {
    return form == FDMA_BIAS_EXP ? expf(score) : score;
}

static void fill_scores(check_problem *problem, uint64_t *random) {
    const check_case *test = problem->test;
    int64_t at = 0;
    for (int64_t b = 0; b < test->batch; b++) {
        for (int64_t g = 0; g < test->kv_heads; g++) {
            for (int64_t j = 0; j < test->kv_len; j++, at++) {
                const float ranked = score_of(test, j, random);
                const float score = check_key_is_valid(test, b, j) ? ranked : NAN;
                check_store(problem->score, at, (double)score);
                if (problem->bias.rank > 0) {
                    check_store(problem->bias, at, (double)bias_of(test->bias_form, score));
                }
            }
        }
    }
}

/* Keys that are not valid are never read: NaN there must not be seen. */
static void spoil_invalid_keys(check_problem *problem) {
    const check_case *test = problem->test;
    const int64_t row = test->kv_heads * test->head_dim;
    for (int64_t key = 0; key < test->batch * test->kv_len; key++) {
        const int valid = check_key_is_valid(test, key / test->kv_len, key % test->kv_len);
        ((uint8_t *)problem->key_valid.data)[key] = (uint8_t)valid;
        for (int64_t i = 0; i < row && !valid; i++) {
            check_store(problem->k, key * row + i, (double)NAN);
            check_store(problem->v, key * row + i, (double)NAN);
        }
    }
}

static void make_inputs(check_problem *problem) {
    const check_case *test = problem->test;
    const int64_t q_shape[4] = {test->batch, test->q_len, test->q_heads, test->head_dim};
    const int64_t kv_shape[4] = {test->batch, test->kv_len, test->kv_heads, test->head_dim};
    const int64_t proj_shape[2] = {test->kv_heads, test->kv_heads * test->head_dim};
    const int64_t score_shape[3] = {test->batch, test->kv_heads, test->kv_len};
    const int64_t valid_shape[2] = {test->batch, test->kv_len};
    const fdma_dtype dtype = problem->dtype;

    problem->q = check_layout_tensor(dtype, test->layout, q_shape);
    problem->k = check_layout_tensor(dtype, test->layout, kv_shape);
    problem->v = check_layout_tensor(dtype, test->layout, kv_shape);
    problem->dt_proj = check_tensor(dtype, 2, proj_shape);
    problem->a = check_tensor(dtype, 1, &test->kv_heads);
    problem->score = check_tensor(FDMA_FLOAT32, 3, score_shape);
    if (test->bias_form != FDMA_BIAS_NONE) {
        problem->bias = check_tensor(FDMA_FLOAT32, 3, score_shape);
    }
    if (test->padding != PADDING_NONE) {
        problem->key_valid = check_tensor(FDMA_UINT8, 2, valid_shape);
    }
    if (test->window >= 0) {
        problem->selection.size = sizeof problem->selection;
        problem->selection.expiry = check_tensor(FDMA_INT32, 3, score_shape);
        problem->selection.slot = check_tensor(FDMA_INT32, 3, score_shape);
    }
}

fdma_status check_problem_make(check_problem *problem, const check_case *test, fdma_dtype dtype,
                               int32_t device) {
    *problem = (check_problem){.test = test, .dtype = dtype, .device = device};
    make_inputs(problem);

    uint64_t random = check_seed(test->name);
    check_fill_normal(problem->q, &random, 1);
    check_fill_normal(problem->k, &random, 1);
    check_fill_normal(problem->v, &random, 1);
    check_fill_normal(problem->dt_proj, &random,
                      1 / sqrt((double)(test->kv_heads * test->head_dim)));
    check_fill_normal(problem->a, &random, 1);
    fill_scores(problem, &random);
    if (problem->key_valid.rank > 0) {
        spoil_invalid_keys(problem);
    }

    fdma_status status = check_run_oracle(problem);
    if (status == FDMA_OK) {
        status = check_gradients_make(problem);
    }
    if (status == FDMA_OK) {
        check_plain_score(problem);
        check_plain_forward(problem);
        check_plain_backward(problem);
        check_plain_score_backward(problem);
        check_plain_merge(problem);
    }
    return status;
}
