/* Backward, score_backward, merge and merge_backward, as run.c does the others. See check/run.h. */
#include "check/run.h"

#include "check/call.h"

fdma_status check_run_backward(const check_problem *problem, const char *kernel,
                               const fdma_tensor *outputs) {
    check_call call = call_begin(problem, kernel);
    const fdma_selection selection = call_selection(&call);
    fdma_backward_args args = {
        .size = sizeof args,
        .dout = call_input(&call, problem->dout),
        .dlse = call_input(&call, problem->dlse),
        .out = call_input(&call, problem->forward_out),
        .lse = call_input(&call, problem->forward_lse),
        .q = call_input(&call, problem->q),
        .k = call_input(&call, problem->k),
        .v = call_input(&call, problem->v),
        .bias = call_input(&call, problem->bias),
        .key_valid = call_input(&call, problem->key_valid),
        .dq = call_output(&call, outputs[0]),
        .dk = call_output(&call, outputs[1]),
        .dv = call_output(&call, outputs[2]),
        .dbias = call_output(&call, outputs[3]),
        .selection = check_is_selected(problem->test) ? &selection : NULL,
        .scale = problem->scale,
        .softcap = problem->test->softcap,
        .causal = check_is_causal(problem->test),
        .deterministic = problem->deterministic,
        .exec = call.exec,
    };
    size_t bytes = 0;
    fdma_status status = fdma_backward_workspace(&args, &bytes);
    if (call_give_workspace(&call, &args.exec, status, bytes))
        status = fdma_backward(&args);
    return call_end(&call, status);
}

fdma_status check_run_score_backward(const check_problem *problem, const char *kernel,
                                     const fdma_tensor *outputs) {
    check_call call = call_begin(problem, kernel);
    fdma_score_backward_args args = {
        .size = sizeof args,
        .dbias = call_input(&call, problem->score_dbias),
        .v = call_input(&call, problem->score_v),
        .dt_proj = call_input(&call, problem->dt_proj),
        .a = call_input(&call, problem->a),
        .key_valid = call_input(&call, problem->key_valid),
        .dv = call_output(&call, outputs[0]),
        .ddt_proj = call_output(&call, outputs[1]),
        .da = call_output(&call, outputs[2]),
        .bias_form = problem->test->bias_form,
        .exec = call.exec,
    };
    size_t bytes = 0;
    fdma_status status = fdma_score_backward_workspace(&args, &bytes);
    if (call_give_workspace(&call, &args.exec, status, bytes))
        status = fdma_score_backward(&args);
    return call_end(&call, status);
}

fdma_status check_run_merge(const check_problem *problem, const char *kernel,
                            const fdma_tensor *outputs) {
    check_call call = call_begin(problem, kernel);
    fdma_merge_args args = {
        .size = sizeof args,
        .out_a = call_input(&call, problem->partial_out[0]),
        .lse_a = call_input(&call, problem->partial_lse[0]),
        .out_b = call_input(&call, problem->partial_out[1]),
        .lse_b = call_input(&call, problem->partial_lse[1]),
        .out = call_output(&call, outputs[0]),
        .lse = call_output(&call, outputs[1]),
        .exec = call.exec,
    };
    size_t bytes = 0;
    fdma_status status = fdma_merge_workspace(&args, &bytes);
    if (call_give_workspace(&call, &args.exec, status, bytes))
        status = fdma_merge(&args);
    return call_end(&call, status);
}

fdma_status check_run_merge_backward(const check_problem *problem, const char *kernel,
                                     const fdma_tensor *outputs) {
    check_call call = call_begin(problem, kernel);
    fdma_merge_backward_args args = {
        .size = sizeof args,
        .dout = call_input(&call, problem->dout),
        .dlse = call_input(&call, problem->dlse),
        .out_a = call_input(&call, problem->partial_out[0]),
        .lse_a = call_input(&call, problem->partial_lse[0]),
        .out_b = call_input(&call, problem->partial_out[1]),
        .lse_b = call_input(&call, problem->partial_lse[1]),
        .dout_a = call_output(&call, outputs[0]),
        .dlse_a = call_output(&call, outputs[1]),
        .dout_b = call_output(&call, outputs[2]),
        .dlse_b = call_output(&call, outputs[3]),
        .exec = call.exec,
    };
    size_t bytes = 0;
    fdma_status status = fdma_merge_backward_workspace(&args, &bytes);
    if (call_give_workspace(&call, &args.exec, status, bytes))
        status = fdma_merge_backward(&args);
    return call_end(&call, status);
}
