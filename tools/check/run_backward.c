/* Backward, score_backward, merge and merge_backward, as run.c does the others. See check/run.h. */
#include "check/run.h"

#include "check/call.h"
#include "common/arrays.h"

check_backward_outputs check_backward_outputs_of(const check_problem *problem) {
    return (check_backward_outputs){check_tensor_like(problem->q), check_tensor_like(problem->k),
                                    check_tensor_like(problem->v),
                                    check_tensor_like(problem->bias)};
}

check_score_outputs check_score_outputs_of(const check_problem *problem) {
    const check_score_outputs outputs = {check_tensor_like(problem->prior_dv),
                                         check_tensor_like(problem->dt_proj),
                                         check_tensor_like(problem->a)};
    const double *prior = check_widen(problem->prior_dv);
    for (int64_t i = 0; i < element_count(&outputs.dv); i++)
        check_store(outputs.dv, i, prior[i]);
    return outputs;
}

check_merge_outputs check_merge_outputs_of(const check_problem *problem) {
    check_merge_outputs outputs;
    for (int n = 0; n < 2; n++) {
        outputs.dout[n] = check_tensor_like(problem->q);
        outputs.dlse[n] = check_tensor_like(problem->forward_lse);
    }
    return outputs;
}

fdma_status check_run_backward(const check_problem *problem, const char *kernel, bool deterministic,
                               const check_backward_outputs *outputs) {
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
        .dq = call_output(&call, outputs->dq),
        .dk = call_output(&call, outputs->dk),
        .dv = call_output(&call, outputs->dv),
        .dbias = call_output(&call, outputs->dbias),
        .selection = check_is_selected(problem->test) ? &selection : NULL,
        .scale = problem->scale,
        .softcap = problem->test->softcap,
        .causal = check_is_causal(problem->test),
        .deterministic = deterministic,
        .exec = call.exec,
    };
    size_t bytes = 0;
    fdma_status status = fdma_backward_workspace(&args, &bytes);
    if (status == FDMA_OK) {
        call_give_workspace(&call, &args.exec, bytes);
        status = fdma_backward(&args);
    }
    call_end(&call);
    return status;
}

fdma_status check_run_score_backward(const check_problem *problem, const char *kernel,
                                     const check_score_outputs *outputs) {
    check_call call = call_begin(problem, kernel);
    fdma_score_backward_args args = {
        .size = sizeof args,
        .dbias = call_input(&call, problem->score_dbias),
        .v = call_input(&call, problem->score_v),
        .dt_proj = call_input(&call, problem->dt_proj),
        .a = call_input(&call, problem->a),
        .key_valid = call_input(&call, problem->key_valid),
        .dv = call_output(&call, outputs->dv),
        .ddt_proj = call_output(&call, outputs->ddt_proj),
        .da = call_output(&call, outputs->da),
        .bias_form = problem->test->bias_form,
        .exec = call.exec,
    };
    size_t bytes = 0;
    fdma_status status = fdma_score_backward_workspace(&args, &bytes);
    if (status == FDMA_OK) {
        call_give_workspace(&call, &args.exec, bytes);
        status = fdma_score_backward(&args);
    }
    call_end(&call);
    return status;
}

fdma_status check_run_merge(const check_problem *problem, const char *kernel, fdma_tensor out,
                            fdma_tensor lse) {
    check_call call = call_begin(problem, kernel);
    fdma_merge_args args = {
        .size = sizeof args,
        .out_a = call_input(&call, problem->partial_out[0]),
        .lse_a = call_input(&call, problem->partial_lse[0]),
        .out_b = call_input(&call, problem->partial_out[1]),
        .lse_b = call_input(&call, problem->partial_lse[1]),
        .out = call_output(&call, out),
        .lse = call_output(&call, lse),
        .exec = call.exec,
    };
    size_t bytes = 0;
    fdma_status status = fdma_merge_workspace(&args, &bytes);
    if (status == FDMA_OK) {
        call_give_workspace(&call, &args.exec, bytes);
        status = fdma_merge(&args);
    }
    call_end(&call);
    return status;
}

fdma_status check_run_merge_backward(const check_problem *problem, const char *kernel,
                                     const check_merge_outputs *outputs) {
    check_call call = call_begin(problem, kernel);
    fdma_merge_backward_args args = {
        .size = sizeof args,
        .dout = call_input(&call, problem->dout),
        .dlse = call_input(&call, problem->dlse),
        .out_a = call_input(&call, problem->partial_out[0]),
        .lse_a = call_input(&call, problem->partial_lse[0]),
        .out_b = call_input(&call, problem->partial_out[1]),
        .lse_b = call_input(&call, problem->partial_lse[1]),
        .dout_a = call_output(&call, outputs->dout[0]),
        .dlse_a = call_output(&call, outputs->dlse[0]),
        .dout_b = call_output(&call, outputs->dout[1]),
        .dlse_b = call_output(&call, outputs->dlse[1]),
        .exec = call.exec,
    };
    size_t bytes = 0;
    fdma_status status = fdma_merge_backward_workspace(&args, &bytes);
    if (status == FDMA_OK) {
        call_give_workspace(&call, &args.exec, bytes);
        status = fdma_merge_backward(&args);
    }
    call_end(&call);
    return status;
}
