/* check_run.c - calls of the library on a case's tensors: workspace query, workspace, call. */
#include "arrays.h"
#include "check.h"

fdma_status check_run_score(const check_problem *problem, const char *kernel, fdma_tensor score,
                            fdma_tensor bias) {
    fdma_score_args args = {
        .size = sizeof args,
        .v = problem->v,
        .dt_proj = problem->dt_proj,
        .a = problem->a,
        .key_valid = problem->key_valid,
        .score = score,
        .bias = bias,
        .bias_form = problem->test->bias_form,
        .exec = {.kernel = kernel},
    };
    size_t bytes = 0;
    const fdma_status status = fdma_score_workspace(&args, &bytes);
    if (status != FDMA_OK) {
        return status;
    }
    args.exec.workspace = check_alloc(1, bytes);
    args.exec.workspace_size = bytes;
    return fdma_score(&args);
}

fdma_status check_run_select(const check_problem *problem, const char *kernel,
                             fdma_selection *selection) {
    fdma_select_args args = {
        .size = sizeof args,
        .score = problem->score,
        .key_valid = problem->key_valid,
        .selection = selection,
        .window = problem->test->window,
        .scope = check_mask_scope(problem->test),
        .exec = {.kernel = kernel},
    };
    size_t bytes = 0;
    const fdma_status status = fdma_select_workspace(&args, &bytes);
    if (status != FDMA_OK) {
        return status;
    }
    args.exec.workspace = check_alloc(1, bytes);
    args.exec.workspace_size = bytes;
    return fdma_select(&args);
}

fdma_status check_run_lists(const check_problem *problem, const char *kernel, int64_t tile_len,
                            fdma_tensor list, fdma_tensor count) {
    fdma_lists_args args = {
        .size = sizeof args,
        .selection = &problem->selection,
        .list = list,
        .count = count,
        .q_len = problem->test->q_len,
        .tile_len = tile_len,
        .causal = check_mask_is_causal(problem->test),
        .exec = {.kernel = kernel},
    };
    size_t bytes = 0;
    const fdma_status status = fdma_lists_workspace(&args, &bytes);
    if (status != FDMA_OK) {
        return status;
    }
    args.exec.workspace = check_alloc(1, bytes);
    args.exec.workspace_size = bytes;
    return fdma_lists(&args);
}

fdma_status check_run_forward(const check_problem *problem, const char *kernel, fdma_tensor out,
                              fdma_tensor lse) {
    const int selected = problem->test->window >= 0;
    fdma_forward_args args = {
        .size = sizeof args,
        .q = problem->q,
        .k = problem->k,
        .v = problem->v,
        .bias = problem->bias,
        .key_valid = problem->key_valid,
        .out = out,
        .lse = lse,
        .selection = selected ? &problem->selection : NULL,
        .window = selected ? problem->test->window : 0,
        .softcap = problem->test->softcap,
        .causal = check_mask_is_causal(problem->test),
        .exec = {.kernel = kernel},
    };
    size_t bytes = 0;
    const fdma_status status = fdma_forward_workspace(&args, &bytes);
    if (status != FDMA_OK) {
        return status;
    }
    args.exec.workspace = check_alloc(1, bytes);
    args.exec.workspace_size = bytes;
    return fdma_forward(&args);
}

static check_result result_of(fdma_tensor oracle) {
    const int64_t count = element_count(&oracle);
    return (check_result){
        .count = count,
        .oracle = oracle.data,
        .plain = check_alloc(count, sizeof(double)),
    };
}

/* The reference in float64, on the inputs as they are after rounding to the case's dtype. */
fdma_status check_run_oracle(check_problem *problem) {
    const check_case *test = problem->test;
    const int64_t lse_shape[3] = {test->batch, test->q_heads, test->q_len};
    const fdma_tensor z = check_tensor(FDMA_FLOAT64, 3, problem->score.shape);
    const fdma_tensor out = check_tensor(FDMA_FLOAT64, 4, problem->q.shape);
    const fdma_tensor lse = check_tensor(FDMA_FLOAT64, 3, lse_shape);

    fdma_status status = FDMA_OK;
    if (test->window >= 0) {
        status = check_run_select(problem, "reference", &problem->selection);
    }
    check_problem wide = *problem;
    wide.q = check_wide_tensor(problem->q);
    wide.k = check_wide_tensor(problem->k);
    wide.v = check_wide_tensor(problem->v);
    wide.dt_proj = check_wide_tensor(problem->dt_proj);
    wide.a = check_wide_tensor(problem->a);
    wide.bias = check_wide_tensor(problem->bias);
    if (status == FDMA_OK) {
        status = check_run_score(&wide, "reference", z, (fdma_tensor){0});
    }
    if (status == FDMA_OK) {
        status = check_run_forward(&wide, "reference", out, lse);
    }
    problem->z = result_of(z);
    problem->out = result_of(out);
    problem->lse = result_of(lse);
    return status;
}
