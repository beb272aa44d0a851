/* check_run.c - score, select, lists and forward on a case's tensors: workspace query, workspace,
 * call. */
#include "check/call.h"
#include "check/check.h"
#include "common/arrays.h"
#include "common/device.h"

fdma_status check_run_score(const check_problem *problem, const char *kernel, fdma_tensor score,
                            fdma_tensor bias) {
    const int32_t device = call_device(problem, kernel);
    call_tensors call = {.device = device};
    fdma_score_args args = {
        .size = sizeof args,
        .v = call_place(&call, problem->v),
        .dt_proj = call_place(&call, problem->dt_proj),
        .a = call_place(&call, problem->a),
        .key_valid = call_place(&call, problem->key_valid),
        .score = call_place(&call, score),
        .bias = call_place(&call, bias),
        .bias_form = problem->test->bias_form,
        .exec = {.kernel = kernel, .device = device},
    };
    size_t bytes = 0;
    fdma_status status = fdma_score_workspace(&args, &bytes);
    if (status == FDMA_OK) {
        call_workspace(&call, &args.exec, bytes);
        status = fdma_score(&args);
    }
    device_wait(device);
    device_fetch(device, &score, &args.score);
    device_fetch(device, &bias, &args.bias);
    call_leave(&call);
    return status;
}

fdma_status check_run_select(const check_problem *problem, const char *kernel,
                             fdma_selection *selection) {
    const int32_t device = call_device(problem, kernel);
    call_tensors call = {.device = device};
    fdma_selection placed = *selection;
    placed.expiry = call_place(&call, selection->expiry);
    placed.slot = call_place(&call, selection->slot);
    fdma_select_args args = {
        .size = sizeof args,
        .score = call_place(&call, problem->score),
        .key_valid = call_place(&call, problem->key_valid),
        .selection = &placed,
        .window = problem->test->window,
        .scope = check_mask_scope(problem->test),
        .exec = {.kernel = kernel, .device = device},
    };
    size_t bytes = 0;
    fdma_status status = fdma_select_workspace(&args, &bytes);
    if (status == FDMA_OK) {
        call_workspace(&call, &args.exec, bytes);
        status = fdma_select(&args);
    }
    device_wait(device);
    device_fetch(device, &selection->expiry, &placed.expiry);
    device_fetch(device, &selection->slot, &placed.slot);
    selection->window = placed.window;
    selection->kv_len = placed.kv_len;
    selection->scope = placed.scope;
    call_leave(&call);
    return status;
}

fdma_status check_run_lists(const check_problem *problem, const char *kernel, int64_t tile_len,
                            fdma_tensor list, fdma_tensor count) {
    const int32_t device = call_device(problem, kernel);
    call_tensors call = {.device = device};
    const fdma_selection selection = call_selection(&call, problem);
    fdma_lists_args args = {
        .size = sizeof args,
        .selection = &selection,
        .list = call_place(&call, list),
        .count = call_place(&call, count),
        .q_len = problem->test->q_len,
        .tile_len = tile_len,
        .causal = check_mask_is_causal(problem->test),
        .exec = {.kernel = kernel, .device = device},
    };
    size_t bytes = 0;
    fdma_status status = fdma_lists_workspace(&args, &bytes);
    if (status == FDMA_OK) {
        call_workspace(&call, &args.exec, bytes);
        status = fdma_lists(&args);
    }
    device_wait(device);
    device_fetch(device, &list, &args.list);
    device_fetch(device, &count, &args.count);
    call_leave(&call);
    return status;
}

fdma_status check_run_forward(const check_problem *problem, const char *kernel, fdma_tensor out,
                              fdma_tensor lse) {
    const int selected = problem->test->window >= 0;
    const int32_t device = call_device(problem, kernel);
    call_tensors call = {.device = device};
    const fdma_selection selection = call_selection(&call, problem);
    fdma_forward_args args = {
        .size = sizeof args,
        .q = call_place(&call, problem->q),
        .k = call_place(&call, problem->k),
        .v = call_place(&call, problem->v),
        .bias = call_place(&call, problem->bias),
        .key_valid = call_place(&call, problem->key_valid),
        .out = call_place(&call, out),
        .lse = call_place(&call, lse),
        .selection = selected ? &selection : NULL,
        .softcap = problem->test->softcap,
        .causal = check_mask_is_causal(problem->test),
        .exec = {.kernel = kernel, .device = device},
    };
    size_t bytes = 0;
    fdma_status status = fdma_forward_workspace(&args, &bytes);
    if (status == FDMA_OK) {
        call_workspace(&call, &args.exec, bytes);
        status = fdma_forward(&args);
    }
    device_wait(device);
    device_fetch(device, &out, &args.out);
    device_fetch(device, &lse, &args.lse);
    call_leave(&call);
    return status;
}

check_result check_result_of(fdma_tensor oracle) {
    const int64_t count = element_count(&oracle);
    return (check_result){
        .count = count,
        .oracle = oracle.data,
        .plain = check_alloc(count, sizeof(double)),
    };
}

/* The inputs as they are after rounding to the case's dtype, in float64. */
check_problem check_widen_problem(const check_problem *problem) {
    check_problem wide = *problem;
    wide.q = check_wide_tensor(problem->q);
    wide.k = check_wide_tensor(problem->k);
    wide.v = check_wide_tensor(problem->v);
    wide.dt_proj = check_wide_tensor(problem->dt_proj);
    wide.a = check_wide_tensor(problem->a);
    wide.bias = check_wide_tensor(problem->bias);
    return wide;
}

/* The reference in float64. */
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
    const check_problem wide = check_widen_problem(problem);
    if (status == FDMA_OK) {
        status = check_run_score(&wide, "reference", z, (fdma_tensor){0});
    }
    if (status == FDMA_OK) {
        status = check_run_forward(&wide, "reference", out, lse);
    }
    problem->z = check_result_of(z);
    problem->out = check_result_of(out);
    problem->lse = check_result_of(lse);
    return status;
}
