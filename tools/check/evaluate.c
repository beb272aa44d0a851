/* See check/evaluate.h.
 *
 * dbias, da and ddt_bias are sums whose terms have errors of both signs, and one order of summation
 * may be accurate by chance. Their terms are therefore split into groups, and the scatter of a
 * result is the sum of the magnitudes of its groups' errors: the plain error of the worst order. */
#include "check/evaluate.h"

#include "check/operations.h"
#include "common/arrays.h"

#include <math.h>

enum { error_groups = 8 };

/* The problem with its floating inputs in float64. */
static check_problem widen(const check_problem *problem) {
    check_problem wide = *problem;
    fdma_tensor *const tensors[] = {
        &wide.q,
        &wide.k,
        &wide.v,
        &wide.dt_proj,
        &wide.a,
        &wide.dt_bias,
        &wide.score,
        &wide.bias,
        &wide.forward_out,
        &wide.forward_lse,
        &wide.dout,
        &wide.dlse,
        &wide.score_dbias,
        &wide.score_v,
        &wide.prior_dv,
        &wide.cache.k,
        &wide.cache.v,
        &wide.cache.bias,
        &wide.cache.table.score,
        &wide.new_q,
        &wide.new_k,
        &wide.new_v,
        &wide.new_score,
        &wide.new_lse,
        &wide.partial_out[0],
        &wide.partial_out[1],
        &wide.partial_lse[0],
        &wide.partial_lse[1],
    };
    for (size_t t = 0; t < sizeof tensors / sizeof tensors[0]; t++)
        *tensors[t] = check_wide_tensor(*tensors[t]);
    wide.cache.dtype = FDMA_FLOAT64;
    return wide;
}

/* Runs one operation: by the reference in float64; or plainly, with the default scale computed in
 * float32, too. */
static fdma_status run(const check_problem *problem, check_operation_id id, bool plainly,
                       fdma_tensor outputs[check_output_limit]) {
    check_problem given = plainly ? *problem : widen(problem);
    if (plainly)
        given.scale = (double)(1 / sqrtf((float)problem->test->head_dim));
    check_make_outputs(&given, &check_operations[id], false, outputs);
    return check_run(&given, id, plainly ? "reference/float32" : "reference", outputs);
}

static fdma_status evaluate(check_problem *problem, check_operation_id id, bool plainly) {
    const check_operation *const operation = &check_operations[id];
    if (operation->outputs[0] == NULL || !operation->applies(problem))
        return FDMA_OK;
    fdma_tensor outputs[check_output_limit];
    const fdma_status status = run(problem, id, plainly, outputs);
    for (int n = 0; n < check_output_limit && operation->outputs[n] != NULL; n++) {
        check_result *const result = &problem->results[id][n];
        result->count = element_count(&outputs[n]);
        *(plainly ? &result->plain : &result->reference) = check_widen(outputs[n]);
    }
    return status;
}

/* Adds the errors of output n for a problem in which only one group's terms are not 0. */
static fdma_status add_scatter(check_result *result, const check_problem *group,
                               check_operation_id id, int n) {
    fdma_tensor exact[check_output_limit], plain[check_output_limit];
    fdma_status status = run(group, id, false, exact);
    if (status == FDMA_OK)
        status = run(group, id, true, plain);
    if (status != FDMA_OK)
        return status;
    const double *x = check_widen(plain[n]), *y = check_widen(exact[n]);
    if (result->scatter == NULL)
        result->scatter = check_alloc(result->count, sizeof *result->scatter);
    for (int64_t i = 0; i < result->count; i++)
        result->scatter[i] += isfinite(x[i]) && isfinite(y[i]) ? fabs(x[i] - y[i]) : 0;
    return FDMA_OK;
}

/* The terms of dbias are those of rows. The rows of the other groups are made empty. */
static fdma_status scatter_dbias(check_problem *problem, int group) {
    check_problem some = *problem;
    some.forward_lse = check_tensor_like(problem->forward_lse);
    const double *lse = check_widen(problem->forward_lse);
    for (int64_t row = 0; row < element_count(&some.forward_lse); row++)
        check_store(some.forward_lse, row,
                    row % error_groups == group ? lse[row] : -(double)INFINITY);
    return add_scatter(&problem->results[CHECK_BACKWARD][3], &some, CHECK_BACKWARD, 3);
}

/* The terms of da and ddt_bias are those of keys. The gradients of the other groups' keys are made
 * 0. */
static fdma_status scatter_heads(check_problem *problem, int group) {
    check_problem some = *problem;
    some.score_dbias = check_tensor_like(problem->score_dbias);
    const double *dbias = check_widen(problem->score_dbias);
    for (int64_t i = 0; i < element_count(&some.score_dbias); i++)
        check_store(some.score_dbias, i,
                    i % problem->test->kv_len % error_groups == group ? dbias[i] : 0);
    fdma_status status = FDMA_OK;
    for (int n = 2; n < 4 && status == FDMA_OK; n++)
        status =
            add_scatter(&problem->results[CHECK_SCORE_BACKWARD][n], &some, CHECK_SCORE_BACKWARD, n);
    return status;
}

fdma_status check_evaluate(check_problem *problem) {
    fdma_status status = FDMA_OK;
    const fdma_tensor selection[] = {problem->selection.expiry, problem->selection.slot};
    if (check_is_selected(problem->test))
        status = check_run(problem, CHECK_SELECT, "reference", selection);
    for (int id = 0; id < check_operation_count && status == FDMA_OK; id++) {
        if (id == CHECK_BACKWARD)
            check_make_gradient_inputs(problem);
        status = evaluate(problem, (check_operation_id)id, false);
    }
    for (int id = 0; id < check_operation_count && status == FDMA_OK; id++)
        status = evaluate(problem, (check_operation_id)id, true);
    for (int group = 0; group < error_groups && problem->bias.rank > 0; group++) {
        if (status == FDMA_OK)
            status = scatter_dbias(problem, group);
        if (status == FDMA_OK)
            status = scatter_heads(problem, group);
    }
    return status;
}
