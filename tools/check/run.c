/* Score, select, lists and forward: workspace query, workspace, call. See check/run.h. */
#include "check/run.h"

#include "check/call.h"

fdma_status check_run_score(const check_problem *problem, const char *kernel,
                            const fdma_tensor *outputs) {
    check_call call = call_begin(problem, kernel);
    fdma_score_args args = {
        .size = sizeof args,
        .v = call_input(&call, problem->v),
        .dt_proj = call_input(&call, problem->dt_proj),
        .a = call_input(&call, problem->a),
        .key_valid = call_input(&call, problem->key_valid),
        .score = call_output(&call, outputs[0]),
        .bias = call_output(&call, outputs[1]),
        .bias_form = problem->test->bias_form,
        .exec = call.exec,
    };
    size_t bytes = 0;
    fdma_status status = fdma_score_workspace(&args, &bytes);
    if (call_give_workspace(&call, &args.exec, status, bytes))
        status = fdma_score(&args);
    return call_end(&call, status);
}

fdma_status check_run_select(const check_problem *problem, const char *kernel,
                             fdma_selection *selection) {
    check_call call = call_begin(problem, kernel);
    fdma_selection found = *selection;
    found.expiry = call_output(&call, selection->expiry);
    found.slot = call_output(&call, selection->slot);
    fdma_select_args args = {
        .size = sizeof args,
        .score = call_input(&call, problem->score),
        .key_valid = call_input(&call, problem->key_valid),
        .selection = &found,
        .window = problem->test->window,
        .scope = check_scope(problem->test),
        .exec = call.exec,
    };
    size_t bytes = 0;
    fdma_status status = fdma_select_workspace(&args, &bytes);
    if (call_give_workspace(&call, &args.exec, status, bytes))
        status = fdma_select(&args);
    selection->window = found.window;
    selection->kv_len = found.kv_len;
    selection->scope = found.scope;
    return call_end(&call, status);
}

fdma_status check_run_lists(const check_problem *problem, const char *kernel, int64_t tile_len,
                            fdma_tensor list, fdma_tensor count) {
    check_call call = call_begin(problem, kernel);
    const fdma_selection selection = call_selection(&call);
    fdma_lists_args args = {
        .size = sizeof args,
        .selection = &selection,
        .list = call_output(&call, list),
        .count = call_output(&call, count),
        .q_len = problem->test->q_len,
        .tile_len = tile_len,
        .causal = check_is_causal(problem->test),
        .exec = call.exec,
    };
    size_t bytes = 0;
    fdma_status status = fdma_lists_workspace(&args, &bytes);
    if (call_give_workspace(&call, &args.exec, status, bytes))
        status = fdma_lists(&args);
    return call_end(&call, status);
}

fdma_status check_run_forward(const check_problem *problem, const char *kernel,
                              const fdma_tensor *outputs) {
    check_call call = call_begin(problem, kernel);
    const fdma_selection selection = call_selection(&call);
    fdma_forward_args args = {
        .size = sizeof args,
        .q = call_input(&call, problem->q),
        .k = call_input(&call, problem->k),
        .v = call_input(&call, problem->v),
        .bias = call_input(&call, problem->bias),
        .key_valid = call_input(&call, problem->key_valid),
        .out = call_output(&call, outputs[0]),
        .lse = call_output(&call, outputs[1]),
        .selection = check_is_selected(problem->test) ? &selection : NULL,
        .scale = problem->scale,
        .softcap = problem->test->softcap,
        .causal = check_is_causal(problem->test),
        .exec = call.exec,
    };
    size_t bytes = 0;
    fdma_status status = fdma_forward_workspace(&args, &bytes);
    if (call_give_workspace(&call, &args.exec, status, bytes))
        status = fdma_forward(&args);
    return call_end(&call, status);
}
