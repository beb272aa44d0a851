/* The inputs of backward, score_backward, merge and merge_backward; see check/problem.h. */
#include "check/problem.h"

#include "common/random.h"

#include <math.h>

/* Stores the reference's result in `to`, rounded to its dtype, as a caller would hold it. */
static fdma_tensor rounded(const check_result *result, fdma_tensor to) {
    for (int64_t i = 0; i < result->count; i++)
        check_store(to, i, result->reference[i]);
    return to;
}

static fdma_tensor tensor_like(const check_problem *problem, const fdma_tensor *like) {
    return check_layout_tensor(problem->dtype, problem->test->layout, like->shape);
}

static fdma_tensor random_lse(const check_problem *problem, uint64_t *random, double deviation) {
    const fdma_tensor lse = check_tensor_like(problem->forward_lse);
    check_fill_normal(lse, random, deviation);
    return lse;
}

static void make_backward_inputs(check_problem *problem, uint64_t *random) {
    const check_result *const forward = problem->results[CHECK_FORWARD];
    problem->forward_out = rounded(&forward[0], tensor_like(problem, &problem->q));
    problem->forward_lse = rounded(&forward[1], random_lse(problem, random, 0));
    problem->dout = tensor_like(problem, &problem->q);
    check_fill_normal(problem->dout, random, 1);
    if (random_bits(random) % 2 == 0)
        problem->dlse = random_lse(problem, random, 1);
}

/* dbias is 0 for some keys in all heads, whose v may then not be read, and for others in some
 * heads: queries did not keep them. */
static void make_score_backward_inputs(check_problem *problem, uint64_t *random) {
    const check_case *test = problem->test;
    const int64_t kv_len = test->kv_len, heads = test->kv_heads, dim = test->head_dim;
    const double *v = check_widen(problem->v);
    problem->score_dbias = check_tensor(FDMA_FLOAT32, 3, problem->score.shape);
    problem->score_v = tensor_like(problem, &problem->v);
    problem->prior_dv = tensor_like(problem, &problem->v);
    check_fill_normal(problem->score_dbias, random, 1);
    check_fill_normal(problem->prior_dv, random, 1);
    for (int64_t key = 0; key < test->batch * kv_len; key++) {
        const int64_t b = key / kv_len, j = key % kv_len;
        const bool unread = j % 4 == 1, valid = check_key_is_valid(test, b, j);
        for (int64_t g = 0; g < heads; g++)
            if (unread || !valid || (j + g) % 3 == 2)
                check_store(problem->score_dbias, (b * heads + g) * kv_len + j,
                            valid ? 0 : (double)NAN);
        for (int64_t i = key * heads * dim; i < (key + 1) * heads * dim; i++)
            check_store(problem->score_v, i, unread ? (double)NAN : v[i]);
    }
}

/* Whether partial result `n` of a row is empty. Some rows have two empty ones. */
static bool is_empty_partial(int64_t row, int n) { return row % (n == 0 ? 3 : 5) == 1; }

static void empty_partial(check_problem *problem, int64_t row, int n) {
    const check_case *test = problem->test;
    const int64_t q_len = test->q_len, heads = test->q_heads, dim = test->head_dim;
    const int64_t i = row % q_len, h = row / q_len % heads, b = row / q_len / heads;
    check_store(problem->partial_lse[n], row, -(double)INFINITY);
    for (int64_t d = 0; d < dim; d++) // out of an empty partial result may not be read
        check_store(problem->partial_out[n], ((b * q_len + i) * heads + h) * dim + d, (double)NAN);
}

static void make_merge_inputs(check_problem *problem, uint64_t *random) {
    const check_case *test = problem->test;
    for (int n = 0; n < 2; n++) {
        problem->partial_out[n] = tensor_like(problem, &problem->q);
        problem->partial_lse[n] = random_lse(problem, random, 3);
        check_fill_normal(problem->partial_out[n], random, 1);
        for (int64_t row = 0; row < test->batch * test->q_heads * test->q_len; row++)
            if (is_empty_partial(row, n))
                empty_partial(problem, row, n);
    }
    if (test->scores == SCORES_SPECIAL && test->q_len > 2)
        check_store(problem->partial_lse[0], 2, (double)NAN); // makes the whole row NaN
}

void check_make_gradient_inputs(check_problem *problem) {
    uint64_t random = check_seed(problem->test) + 1;
    make_backward_inputs(problem, &random);
    make_score_backward_inputs(problem, &random);
    make_merge_inputs(problem, &random);
}
