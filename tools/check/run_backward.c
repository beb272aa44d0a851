/* check_run_backward.c - backward, score_backward, merge and merge_backward on a case's tensors. */
#include "check/call.h"
#include "check/check.h"
#include "common/device.h"

fdma_status check_run_backward(const check_problem *problem, const char *kernel, int deterministic,
                               const check_backward_outputs *to) {
    const int selected = problem->test->window >= 0;
    const int32_t device = call_device(problem, kernel);
    call_tensors call = {.device = device};
    const fdma_selection selection = call_selection(&call, problem);
    fdma_backward_args args = {
        .size = sizeof args,
        .dout = call_place(&call, problem->dout),
        .dlse = call_place(&call, problem->dlse),
        .out = call_place(&call, problem->given_out),
        .lse = call_place(&call, problem->given_lse),
        .q = call_place(&call, problem->q),
        .k = call_place(&call, problem->k),
        .v = call_place(&call, problem->v),
        .bias = call_place(&call, problem->bias),
        .key_valid = call_place(&call, problem->key_valid),
        .dq = call_place(&call, to->dq),
        .dk = call_place(&call, to->dk),
        .dv = call_place(&call, to->dv),
        .dbias = call_place(&call, to->dbias),
        .selection = selected ? &selection : NULL,
        .softcap = problem->test->softcap,
        .causal = check_mask_is_causal(problem->test),
        .deterministic = deterministic,
        .exec = {.kernel = kernel, .device = device},
    };
    size_t bytes = 0;
    fdma_status status = fdma_backward_workspace(&args, &bytes);
    if (status == FDMA_OK) {
        call_workspace(&call, &args.exec, bytes);
        status = fdma_backward(&args);
    }
    device_wait(device);
    device_fetch(device, &to->dq, &args.dq);
    device_fetch(device, &to->dk, &args.dk);
    device_fetch(device, &to->dv, &args.dv);
    device_fetch(device, &to->dbias, &args.dbias);
    call_leave(&call);
    return status;
}

fdma_status check_run_score_backward(const check_problem *problem, const char *kernel,
                                     const check_score_outputs *to) {
    const int32_t device = call_device(problem, kernel);
    call_tensors call = {.device = device};
    fdma_score_backward_args args = {
        .size = sizeof args,
        .dbias = call_place(&call, problem->given_dbias),
        .v = call_place(&call, problem->scored_v),
        .dt_proj = call_place(&call, problem->dt_proj),
        .a = call_place(&call, problem->a),
        .key_valid = call_place(&call, problem->key_valid),
        .dv = call_place(&call, to->dv),
        .ddt_proj = call_place(&call, to->ddt_proj),
        .da = call_place(&call, to->da),
        .bias_form = problem->test->bias_form,
        .exec = {.kernel = kernel, .device = device},
    };
    size_t bytes = 0;
    fdma_status status = fdma_score_backward_workspace(&args, &bytes);
    if (status == FDMA_OK) {
        call_workspace(&call, &args.exec, bytes);
        status = fdma_score_backward(&args);
    }
    device_wait(device);
    device_fetch(device, &to->dv, &args.dv);
    device_fetch(device, &to->ddt_proj, &args.ddt_proj);
    device_fetch(device, &to->da, &args.da);
    call_leave(&call);
    return status;
}

fdma_status check_run_merge(const check_problem *problem, const char *kernel, fdma_tensor out,
                            fdma_tensor lse) {
    const int32_t device = call_device(problem, kernel);
    call_tensors call = {.device = device};
    fdma_merge_args args = {
        .size = sizeof args,
        .out_a = call_place(&call, problem->part_out[0]),
        .lse_a = call_place(&call, problem->part_lse[0]),
        .out_b = call_place(&call, problem->part_out[1]),
        .lse_b = call_place(&call, problem->part_lse[1]),
        .out = call_place(&call, out),
        .lse = call_place(&call, lse),
        .exec = {.kernel = kernel, .device = device},
    };
    size_t bytes = 0;
    fdma_status status = fdma_merge_workspace(&args, &bytes);
    if (status == FDMA_OK) {
        call_workspace(&call, &args.exec, bytes);
        status = fdma_merge(&args);
    }
    device_wait(device);
    device_fetch(device, &out, &args.out);
    device_fetch(device, &lse, &args.lse);
    call_leave(&call);
    return status;
}

fdma_status check_run_merge_backward(const check_problem *problem, const char *kernel,
                                     const check_part_outputs *to) {
    const int32_t device = call_device(problem, kernel);
    call_tensors call = {.device = device};
    fdma_merge_backward_args args = {
        .size = sizeof args,
        .dout = call_place(&call, problem->dout),
        .dlse = call_place(&call, problem->dlse),
        .out_a = call_place(&call, problem->part_out[0]),
        .lse_a = call_place(&call, problem->part_lse[0]),
        .out_b = call_place(&call, problem->part_out[1]),
        .lse_b = call_place(&call, problem->part_lse[1]),
        .dout_a = call_place(&call, to->dout[0]),
        .dlse_a = call_place(&call, to->dlse[0]),
        .dout_b = call_place(&call, to->dout[1]),
        .dlse_b = call_place(&call, to->dlse[1]),
        .exec = {.kernel = kernel, .device = device},
    };
    size_t bytes = 0;
    fdma_status status = fdma_merge_backward_workspace(&args, &bytes);
    if (status == FDMA_OK) {
        call_workspace(&call, &args.exec, bytes);
        status = fdma_merge_backward(&args);
    }
    device_wait(device);
    device_fetch(device, &to->dout[0], &args.dout_a);
    device_fetch(device, &to->dlse[0], &args.dlse_a);
    device_fetch(device, &to->dout[1], &args.dout_b);
    device_fetch(device, &to->dlse[1], &args.dlse_b);
    call_leave(&call);
    return status;
}
