/* See check/evaluate.h.
 *
 * dbias, dsink_logit, dattn_bias, da and ddt_bias are sums whose terms have errors of both signs,
 * and one order of summation may be accurate by chance. Their terms are therefore split into
 * groups. The scatter of a result is the sum of the magnitudes of its groups' errors: the plain
 * error of the worst order. */
#include "check/evaluate.h"

#include "check/operations.h"
#include "common/arrays.h"

#include <math.h>
#include <string.h>

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
        &wide.sink_logit,
        &wide.attn_bias,
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
        &wide.rotation.rotary,
        &wide.rotation.weight,
        &wide.rotation.k,
        &wide.rotation.dk_out,
        &wide.rotation.k_weight,
    };
    for (size_t t = 0; t < sizeof tensors / sizeof tensors[0]; t++)
        *tensors[t] = check_wide_tensor(*tensors[t]);
    wide.cache.dtype = FDMA_FLOAT64;
    wide.probability.dtype = wide.dattn_bias.dtype = wide.rotation.dweight.dtype = FDMA_FLOAT64;
    wide.rotation.dk_weight.dtype = FDMA_FLOAT64;
    return wide;
}

/* The problem for the plain evaluation: the default scale is computed in float32, too, and the
 * gradient of attn_bias is not rounded to 16 bits, because the tolerance counts that separately. */
static check_problem plain(const check_problem *problem) {
    check_problem given = *problem;
    given.scale = (double)(1 / sqrtf((float)problem->test->head_dim));
    given.dattn_bias.dtype =
        problem->dattn_bias.dtype == FDMA_FLOAT64 ? FDMA_FLOAT64 : FDMA_FLOAT32;
    return given;
}

/* True if one of the kernels takes the problem. On a device, in float32 there may be none. */
static bool is_taken(const check_problem *problem, const check_tally *tallies, int count,
                     check_operation_id id) {
    const check_operation *const operation = &check_operations[id];
    fdma_tensor outputs[check_output_limit];
    if (operation->outputs[0] == NULL || !operation->applies(problem))
        return false;
    check_make_outputs(problem, operation, true, outputs);
    for (int i = 0; i < count; i++)
        if (tallies[i].info.missing == NULL &&
            strcmp(tallies[i].info.operation, operation->name) == 0 &&
            check_takes(problem, id, tallies[i].info.name, outputs))
            return true;
    return false;
}

/* Runs one operation on a wide or plain problem. */
static fdma_status run(const check_problem *given, check_operation_id id, bool plainly,
                       fdma_tensor outputs[check_output_limit]) {
    check_make_outputs(given, &check_operations[id], false, outputs);
    return check_run(given, id, plainly ? "reference/float32" : "reference", outputs);
}

/* Evaluates one operation on `given`, which is the problem made wide or plain. */
static fdma_status evaluate(check_problem *problem, const check_problem *given,
                            check_operation_id id, bool plainly) {
    const check_operation *const operation = &check_operations[id];
    fdma_tensor outputs[check_output_limit];
    const fdma_status status = run(given, id, plainly, outputs);
    for (int n = 0; n < check_output_limit && operation->outputs[n] != NULL; n++) {
        check_result *const result = &problem->results[id][n];
        result->count = element_count(&outputs[n]);
        *(plainly ? &result->plain : &result->reference) = check_widen(outputs[n]);
    }
    return status;
}

/* Adds the errors of outputs `first` to `end` - 1 for a problem, wide and plain, in which only one
 * group's terms are not 0. */
static fdma_status add_scatter(check_result *results, const check_problem *wide,
                               const check_problem *given, check_operation_id id, int first,
                               int end) {
    fdma_tensor exact[check_output_limit], rough[check_output_limit];
    fdma_status status = run(wide, id, false, exact);
    if (status == FDMA_OK)
        status = run(given, id, true, rough);
    for (int n = first; n < end && status == FDMA_OK; n++) {
        const double *x = check_widen(rough[n]), *y = check_widen(exact[n]);
        check_result *const result = &results[n];
        if (result->scatter == NULL)
            result->scatter = check_alloc(result->count, sizeof *result->scatter);
        for (int64_t i = 0; i < result->count; i++)
            result->scatter[i] += isfinite(x[i]) && isfinite(y[i]) ? fabs(x[i] - y[i]) : 0;
    }
    return status;
}

/* The terms of dbias, dsink_logit and dattn_bias belong to rows. The rows of the other groups are
 * made empty. */
static fdma_status scatter_rows(check_problem *problem, const check_problem *wide, int group) {
    check_problem some = plain(problem), some_wide = *wide;
    some.forward_lse = check_tensor_like(problem->forward_lse);
    const double *lse = check_widen(problem->forward_lse);
    for (int64_t row = 0; row < element_count(&some.forward_lse); row++)
        check_store(some.forward_lse, row,
                    row % error_groups == group ? lse[row] : -(double)INFINITY);
    some_wide.forward_lse = check_wide_tensor(some.forward_lse);
    return add_scatter(problem->results[CHECK_BACKWARD], &some_wide, &some, CHECK_BACKWARD, 3, 6);
}

/* The terms of da and ddt_bias belong to keys. The gradients of the other groups' keys are made
 * 0. */
static fdma_status scatter_heads(check_problem *problem, const check_problem *wide, int group) {
    check_problem some = plain(problem), some_wide = *wide;
    some.score_dbias = check_tensor_like(problem->score_dbias);
    const double *dbias = check_widen(problem->score_dbias);
    for (int64_t i = 0; i < element_count(&some.score_dbias); i++)
        check_store(some.score_dbias, i,
                    i % problem->test->kv_len % error_groups == group ? dbias[i] : 0);
    some_wide.score_dbias = check_wide_tensor(some.score_dbias);
    return add_scatter(problem->results[CHECK_SCORE_BACKWARD], &some_wide, &some,
                       CHECK_SCORE_BACKWARD, 2, 4);
}

/* The scatter of the sums, for the gradients that kernels are compared with. */
static fdma_status scatter(check_problem *problem, const check_problem *wide,
                           const bool taken[check_operation_count]) {
    const bool has_bias = problem->bias.rank > 0;
    const bool of_rows = taken[CHECK_BACKWARD] &&
                         (has_bias || problem->sink_logit.rank > 0 || problem->attn_bias.rank > 0);
    fdma_status status = FDMA_OK;
    for (int group = 0; group < error_groups; group++) {
        if (status == FDMA_OK && of_rows)
            status = scatter_rows(problem, wide, group);
        if (status == FDMA_OK && has_bias && taken[CHECK_SCORE_BACKWARD])
            status = scatter_heads(problem, wide, group);
    }
    return status;
}

fdma_status check_evaluate(check_problem *problem, const check_tally *tallies, int count) {
    fdma_status status = FDMA_OK;
    bool taken[check_operation_count] = {false};
    const fdma_tensor selection[] = {problem->selection.expiry, problem->selection.slot};
    if (check_is_selected(problem->test))
        status = check_run(problem, CHECK_SELECT, "reference", selection);
    check_problem wide = widen(problem);
    for (int id = 0; id < check_operation_count && status == FDMA_OK; id++) {
        if (id == CHECK_BACKWARD) {
            check_make_gradient_inputs(problem);
            wide = widen(problem);
        }
        taken[id] = is_taken(problem, tallies, count, (check_operation_id)id);
        if (taken[id] || id == CHECK_FORWARD) // its results are inputs of backward
            status = evaluate(problem, &wide, (check_operation_id)id, false);
    }
    const check_problem given = plain(problem);
    for (int id = 0; id < check_operation_count && status == FDMA_OK; id++)
        if (taken[id])
            status = evaluate(problem, &given, (check_operation_id)id, true);
    return status == FDMA_OK ? scatter(problem, &wide, taken) : status;
}
