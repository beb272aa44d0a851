/* See check/reference.h. */
#include "check/reference.h"

#include "check/run.h"
#include "common/arrays.h"

static check_result result_of(fdma_tensor reference) {
    const int64_t count = element_count(&reference);
    return (check_result){.count = count, .reference = reference.data};
}

check_problem check_widen_problem(const check_problem *problem) {
    check_problem wide = *problem;
    fdma_tensor *const tensors[] = {
        &wide.q,
        &wide.k,
        &wide.v,
        &wide.dt_proj,
        &wide.a,
        &wide.bias,
        &wide.forward_out,
        &wide.forward_lse,
        &wide.dout,
        &wide.dlse,
        &wide.score_dbias,
        &wide.score_v,
        &wide.prior_dv,
        &wide.partial_out[0],
        &wide.partial_out[1],
        &wide.partial_lse[0],
        &wide.partial_lse[1],
    };
    for (size_t t = 0; t < sizeof tensors / sizeof tensors[0]; t++)
        *tensors[t] = check_wide_tensor(*tensors[t]);
    return wide;
}

static fdma_tensor wide_like(fdma_tensor tensor) {
    return tensor.rank > 0 ? check_tensor(FDMA_FLOAT64, tensor.rank, tensor.shape) : tensor;
}

fdma_status check_reference_forward(check_problem *problem) {
    const check_case *test = problem->test;
    const int64_t lse_shape[3] = {test->batch, test->q_heads, test->q_len};
    const fdma_tensor z = wide_like(problem->score), out = wide_like(problem->q);
    const fdma_tensor lse = check_tensor(FDMA_FLOAT64, 3, lse_shape);
    fdma_status status = FDMA_OK;
    if (check_is_selected(test))
        status = check_run_select(problem, "reference", &problem->selection);
    const check_problem wide = check_widen_problem(problem);
    if (status == FDMA_OK)
        status = check_run_score(&wide, "reference", z, (fdma_tensor){0});
    if (status == FDMA_OK)
        status = check_run_forward(&wide, "reference", out, lse);
    problem->z = result_of(z);
    problem->out = result_of(out);
    problem->lse = result_of(lse);
    return status;
}

static fdma_status run_backward(check_problem *problem, const check_problem *wide) {
    const check_backward_outputs outputs = check_backward_outputs_of(wide);
    const fdma_status status = check_run_backward(wide, "reference", false, &outputs);
    problem->dq = result_of(outputs.dq);
    problem->dk = result_of(outputs.dk);
    problem->dv = result_of(outputs.dv);
    problem->dbias = result_of(outputs.dbias);
    return status;
}

static fdma_status run_score_backward(check_problem *problem, const check_problem *wide) {
    const check_score_outputs outputs = check_score_outputs_of(wide);
    fdma_status status = FDMA_OK;
    if (problem->test->bias_form != FDMA_BIAS_NONE) // FDMA_BIAS_NONE has no gradient
        status = check_run_score_backward(wide, "reference", &outputs);
    problem->score_dv = result_of(outputs.dv);
    problem->ddt_proj = result_of(outputs.ddt_proj);
    problem->da = result_of(outputs.da);
    return status;
}

static fdma_status run_merge(check_problem *problem, const check_problem *wide) {
    const fdma_tensor out = check_tensor_like(wide->q), lse = check_tensor_like(wide->forward_lse);
    const check_merge_outputs outputs = check_merge_outputs_of(wide);
    fdma_status status = check_run_merge(wide, "reference", out, lse);
    if (status == FDMA_OK)
        status = check_run_merge_backward(wide, "reference", &outputs);
    problem->merged_out = result_of(out);
    problem->merged_lse = result_of(lse);
    for (int n = 0; n < 2; n++) {
        problem->partial_dout[n] = result_of(outputs.dout[n]);
        problem->partial_dlse[n] = result_of(outputs.dlse[n]);
    }
    return status;
}

fdma_status check_reference_backward(check_problem *problem) {
    const check_problem wide = check_widen_problem(problem);
    fdma_status status = run_backward(problem, &wide);
    if (status == FDMA_OK)
        status = run_score_backward(problem, &wide);
    if (status == FDMA_OK)
        status = run_merge(problem, &wide);
    return status;
}
