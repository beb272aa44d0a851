/* check_gradients.c - what gradients and merging are given in a case, and what the reference makes
 * of it in float64. Out and lse are the oracle's, rounded as a caller has them: every row is judged
 * by the same inputs, whichever kernel went forward. */
#include "check/check.h"
#include "common/arrays.h"
#include "common/random.h"

#include <math.h>

/* An output that holds the oracle's numbers in `dtype`. */
static fdma_tensor rounded(const check_result *result, fdma_tensor to) {
    for (int64_t i = 0; i < result->count; i++) {
        check_store(to, i, result->oracle[i]);
    }
    return to;
}

static fdma_tensor random_lse(const check_problem *problem, uint64_t *random, double deviation) {
    const check_case *test = problem->test;
    const int64_t shape[3] = {test->batch, test->q_heads, test->q_len};
    const fdma_tensor lse = check_tensor(FDMA_FLOAT32, 3, shape);
    check_fill_normal(lse, random, deviation);
    return lse;
}

static void give_backward(check_problem *problem, uint64_t *random) {
    const check_case *test = problem->test;
    problem->given_out =
        rounded(&problem->out, check_layout_tensor(problem->dtype, test->layout, problem->q.shape));
    problem->given_lse = rounded(&problem->lse, random_lse(problem, random, 0));
    problem->dout = check_layout_tensor(problem->dtype, test->layout, problem->q.shape);
    check_fill_normal(problem->dout, random, 1);
    if (random_bits(random) % 2 == 0) {
        problem->dlse = random_lse(problem, random, 1);
    }
}

/* A key that no query keeps has no gradient, nor has any other key in some of the heads; v is not
 * read where no head has one. */
static void give_score_backward(check_problem *problem, uint64_t *random) {
    const check_case *test = problem->test;
    const int64_t kv_len = test->kv_len, heads = test->kv_heads, dim = test->head_dim;
    const double *v = check_widen(problem->v);
    problem->given_dbias = check_tensor(FDMA_FLOAT32, 3, problem->score.shape);
    problem->scored_v = check_layout_tensor(problem->dtype, test->layout, problem->v.shape);
    problem->held_dv = check_layout_tensor(problem->dtype, test->layout, problem->v.shape);
    check_fill_normal(problem->given_dbias, random, 1);
    check_fill_normal(problem->held_dv, random, 1);
    for (int64_t key = 0; key < test->batch * kv_len; key++) {
        const int64_t b = key / kv_len, j = key % kv_len;
        const int unread = j % 4 == 1, valid = check_key_is_valid(test, b, j);
        for (int64_t g = 0; g < heads; g++) {
            if (unread || !valid || (j + g) % 3 == 2) {
                check_store(problem->given_dbias, (b * heads + g) * kv_len + j,
                            valid ? 0 : (double)NAN);
            }
        }
        for (int64_t i = key * heads * dim; i < (key + 1) * heads * dim; i++) {
            check_store(problem->scored_v, i, unread ? (double)NAN : v[i]);
        }
    }
}

/* Where part `n` of a row is empty. Some rows have two empty parts. */
static int is_empty_part(int64_t row, int n) { return row % (n ? 5 : 3) == 1; }

/* An empty part's out is not read. */
static void give_parts(check_problem *problem, uint64_t *random) {
    const check_case *test = problem->test;
    const int64_t q_len = test->q_len, heads = test->q_heads, dim = test->head_dim;
    for (int n = 0; n < 2; n++) {
        problem->part_out[n] = check_layout_tensor(problem->dtype, test->layout, problem->q.shape);
        problem->part_lse[n] = random_lse(problem, random, 3);
        check_fill_normal(problem->part_out[n], random, 1);
        for (int64_t row = 0; row < test->batch * heads * q_len; row++) {
            const int64_t i = row % q_len, h = row / q_len % heads, b = row / q_len / heads;
            if (!is_empty_part(row, n)) {
                continue;
            }
            check_store(problem->part_lse[n], row, -(double)INFINITY);
            for (int64_t d = 0; d < dim; d++) {
                check_store(problem->part_out[n], ((b * q_len + i) * heads + h) * dim + d,
                            (double)NAN);
            }
        }
    }
    if (test->scores == SCORES_SPECIAL && q_len > 2) {
        check_store(problem->part_lse[0], 2, (double)NAN); /* a NaN makes its row NaN */
    }
}

static check_problem widen_given(const check_problem *problem) {
    check_problem wide = check_widen_problem(problem);
    wide.given_out = check_wide_tensor(problem->given_out);
    wide.given_lse = check_wide_tensor(problem->given_lse);
    wide.dout = check_wide_tensor(problem->dout);
    wide.dlse = check_wide_tensor(problem->dlse);
    wide.given_dbias = check_wide_tensor(problem->given_dbias);
    wide.scored_v = check_wide_tensor(problem->scored_v);
    for (int n = 0; n < 2; n++) {
        wide.part_out[n] = check_wide_tensor(problem->part_out[n]);
        wide.part_lse[n] = check_wide_tensor(problem->part_lse[n]);
    }
    return wide;
}

static fdma_tensor wide_like(fdma_tensor tensor) {
    return tensor.rank > 0 ? check_tensor(FDMA_FLOAT64, tensor.rank, tensor.shape) : tensor;
}

static fdma_status run_backward_oracles(check_problem *problem, const check_problem *wide) {
    const check_backward_outputs keys = {wide_like(problem->q), wide_like(problem->k),
                                         wide_like(problem->v), wide_like(problem->bias)};
    const check_score_outputs weights = {check_wide_tensor(problem->held_dv),
                                         wide_like(problem->dt_proj), wide_like(problem->a)};
    fdma_status status = check_run_backward(wide, "reference", 0, &keys);
    if (status == FDMA_OK && problem->test->bias_form != FDMA_BIAS_NONE) {
        status = check_run_score_backward(wide, "reference", &weights);
    }
    problem->dq = check_result_of(keys.dq);
    problem->dk = check_result_of(keys.dk);
    problem->dv = check_result_of(keys.dv);
    problem->dbias = check_result_of(keys.dbias);
    problem->added_dv = check_result_of(weights.dv);
    problem->ddt_proj = check_result_of(weights.ddt_proj);
    problem->da = check_result_of(weights.da);
    return status;
}

static fdma_status run_merge_oracles(check_problem *problem, const check_problem *wide) {
    const fdma_tensor out = wide_like(problem->q), lse = wide_like(problem->given_lse);
    check_part_outputs parts;
    for (int n = 0; n < 2; n++) {
        parts.dout[n] = wide_like(problem->q);
        parts.dlse[n] = wide_like(problem->given_lse);
    }
    fdma_status status = check_run_merge(wide, "reference", out, lse);
    if (status == FDMA_OK) {
        status = check_run_merge_backward(wide, "reference", &parts);
    }
    problem->merged_out = check_result_of(out);
    problem->merged_lse = check_result_of(lse);
    for (int n = 0; n < 2; n++) {
        problem->part_dout[n] = check_result_of(parts.dout[n]);
        problem->part_dlse[n] = check_result_of(parts.dlse[n]);
    }
    return status;
}

fdma_status check_gradients_make(check_problem *problem) {
    uint64_t random = check_seed(problem->test->name) + 1;
    give_backward(problem, &random);
    give_score_backward(problem, &random);
    give_parts(problem, &random);
    const check_problem wide = widen_given(problem);
    const fdma_status status = run_backward_oracles(problem, &wide);
    return status == FDMA_OK ? run_merge_oracles(problem, &wide) : status;
}
