/* See check/plain.h.
 *
 * dbias and da are sums whose terms have errors of both signs, and one order of summation may be
 * accurate by chance. Their terms are therefore split into groups, and the scatter of a result is
 * the sum of the magnitudes of its groups' errors: the plain error of the worst order. */
#include "check/plain.h"

#include "check/reference.h"
#include "check/run.h"

#include <math.h>

static const char plain_kernel[] = "reference/float32";

enum { error_groups = 8 };

/* The problem as the plain kernel is given it: the default scale is computed in float32, too. */
static check_problem plain_problem(const check_problem *problem) {
    check_problem plain = *problem;
    plain.scale = (double)(1 / sqrtf((float)problem->test->head_dim));
    return plain;
}

static fdma_status plain_score(check_problem *problem) {
    const fdma_tensor z = check_tensor(FDMA_FLOAT32, 3, problem->score.shape);
    const fdma_status status = check_run_score(problem, plain_kernel, z, (fdma_tensor){0});
    problem->z.plain = check_widen(z);
    return status;
}

static fdma_status plain_forward(check_problem *problem) {
    const fdma_tensor out = check_tensor_like(problem->q),
                      lse = check_tensor_like(problem->forward_lse);
    const check_problem given = plain_problem(problem);
    const fdma_status status = check_run_forward(&given, plain_kernel, out, lse);
    problem->out.plain = check_widen(out);
    problem->lse.plain = check_widen(lse);
    return status;
}

/* Adds the error of a group's terms: the plain sum of them alone, against the exact one. */
static void add_error(check_result *result, fdma_tensor plain, fdma_tensor exact) {
    const double *x = check_widen(plain), *y = check_widen(exact);
    if (result->scatter == NULL)
        result->scatter = check_alloc(result->count, sizeof *result->scatter);
    for (int64_t i = 0; i < result->count; i++)
        result->scatter[i] += isfinite(x[i]) && isfinite(y[i]) ? fabs(x[i] - y[i]) : 0;
}

/* The terms of dbias are those of rows. The rows of the other groups are made empty. */
static fdma_status scatter_dbias(check_problem *problem, int group) {
    check_problem some = *problem;
    some.forward_lse = check_tensor_like(problem->forward_lse);
    const double *lse = check_widen(problem->forward_lse);
    for (int64_t row = 0; row < problem->lse.count; row++)
        check_store(some.forward_lse, row,
                    row % error_groups == group ? lse[row] : -(double)INFINITY);
    const check_problem wide = check_widen_problem(&some);
    const check_backward_outputs plain = check_backward_outputs_of(&some);
    const check_backward_outputs exact = check_backward_outputs_of(&wide);
    const check_problem given = plain_problem(&some);
    fdma_status status = check_run_backward(&given, plain_kernel, false, &plain);
    if (status == FDMA_OK)
        status = check_run_backward(&wide, "reference", false, &exact);
    add_error(&problem->dbias, plain.dbias, exact.dbias);
    return status;
}

static fdma_status plain_backward(check_problem *problem) {
    const check_backward_outputs outputs = check_backward_outputs_of(problem);
    const check_problem given = plain_problem(problem);
    fdma_status status = check_run_backward(&given, plain_kernel, false, &outputs);
    problem->dq.plain = check_widen(outputs.dq);
    problem->dk.plain = check_widen(outputs.dk);
    problem->dv.plain = check_widen(outputs.dv);
    problem->dbias.plain = check_widen(outputs.dbias);
    for (int group = 0; group < error_groups && problem->dbias.count > 0; group++)
        if (status == FDMA_OK)
            status = scatter_dbias(problem, group);
    return status;
}

/* The terms of da are those of keys. The gradients of the other groups' keys are made 0. */
static fdma_status scatter_da(check_problem *problem, int group) {
    check_problem some = *problem;
    some.score_dbias = check_tensor_like(problem->score_dbias);
    const double *dbias = check_widen(problem->score_dbias);
    for (int64_t i = 0; i < problem->z.count; i++)
        check_store(some.score_dbias, i,
                    i % problem->test->kv_len % error_groups == group ? dbias[i] : 0);
    const check_problem wide = check_widen_problem(&some);
    const check_score_outputs plain = check_score_outputs_of(&some);
    const check_score_outputs exact = check_score_outputs_of(&wide);
    fdma_status status = check_run_score_backward(&some, plain_kernel, &plain);
    if (status == FDMA_OK)
        status = check_run_score_backward(&wide, "reference", &exact);
    add_error(&problem->da, plain.da, exact.da);
    return status;
}

static fdma_status plain_score_backward(check_problem *problem) {
    if (problem->test->bias_form == FDMA_BIAS_NONE)
        return FDMA_OK;
    const check_score_outputs outputs = check_score_outputs_of(problem);
    fdma_status status = check_run_score_backward(problem, plain_kernel, &outputs);
    problem->score_dv.plain = check_widen(outputs.dv);
    problem->ddt_proj.plain = check_widen(outputs.ddt_proj);
    problem->da.plain = check_widen(outputs.da);
    for (int group = 0; group < error_groups && status == FDMA_OK; group++)
        status = scatter_da(problem, group);
    return status;
}

static fdma_status plain_merge(check_problem *problem) {
    const fdma_tensor out = check_tensor_like(problem->q),
                      lse = check_tensor_like(problem->forward_lse);
    const check_merge_outputs outputs = check_merge_outputs_of(problem);
    fdma_status status = check_run_merge(problem, plain_kernel, out, lse);
    if (status == FDMA_OK)
        status = check_run_merge_backward(problem, plain_kernel, &outputs);
    problem->merged_out.plain = check_widen(out);
    problem->merged_lse.plain = check_widen(lse);
    for (int n = 0; n < 2; n++) {
        problem->partial_dout[n].plain = check_widen(outputs.dout[n]);
        problem->partial_dlse[n].plain = check_widen(outputs.dlse[n]);
    }
    return status;
}

fdma_status check_evaluate_plainly(check_problem *problem) {
    static fdma_status (*const steps[])(check_problem *) = {
        plain_score, plain_forward, plain_backward, plain_score_backward, plain_merge};
    fdma_status status = FDMA_OK;
    for (size_t s = 0; s < sizeof steps / sizeof steps[0] && status == FDMA_OK; s++)
        status = steps[s](problem);
    return status;
}
