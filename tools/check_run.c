/* check_run.c - calls of the library on a case's tensors: copies on the device where it is one,
 * workspace query, workspace, call. */
#include "arrays.h"
#include "check.h"
#include "device.h"

/* The tensors of a call, where it runs. */
typedef struct call_tensors {
    int32_t device;
    fdma_tensor tensor[12];
    void *workspace;
    int count;
} call_tensors;

/* The reference is of the CPU, whatever the device. */
static int32_t device_of(const check_problem *problem, const char *kernel) {
    return runs_on(kernel, 0) ? 0 : problem->device;
}

static fdma_tensor place(call_tensors *call, fdma_tensor host) {
    const fdma_tensor placed = device_copy_of(call->device, &host);
    call->tensor[call->count++] = placed;
    return placed;
}

static void give_workspace(call_tensors *call, fdma_exec *exec, size_t bytes) {
    call->workspace = call->device ? device_allocate(call->device, bytes) : NULL;
    exec->workspace = call->device ? call->workspace : check_alloc(1, bytes);
    exec->workspace_size = bytes;
}

static void leave(const call_tensors *call) {
    for (int i = 0; i < call->count; i++) {
        device_release(call->device, &call->tensor[i]);
    }
    if (call->workspace != NULL) {
        device_free(call->device, call->workspace);
    }
}

fdma_status check_run_score(const check_problem *problem, const char *kernel, fdma_tensor score,
                            fdma_tensor bias) {
    const int32_t device = device_of(problem, kernel);
    call_tensors call = {.device = device};
    fdma_score_args args = {
        .size = sizeof args,
        .v = place(&call, problem->v),
        .dt_proj = place(&call, problem->dt_proj),
        .a = place(&call, problem->a),
        .key_valid = place(&call, problem->key_valid),
        .score = place(&call, score),
        .bias = place(&call, bias),
        .bias_form = problem->test->bias_form,
        .exec = {.kernel = kernel, .device = device},
    };
    size_t bytes = 0;
    fdma_status status = fdma_score_workspace(&args, &bytes);
    if (status == FDMA_OK) {
        give_workspace(&call, &args.exec, bytes);
        status = fdma_score(&args);
    }
    device_wait(device);
    device_fetch(device, &score, &args.score);
    device_fetch(device, &bias, &args.bias);
    leave(&call);
    return status;
}

fdma_status check_run_select(const check_problem *problem, const char *kernel,
                             fdma_selection *selection) {
    const int32_t device = device_of(problem, kernel);
    call_tensors call = {.device = device};
    fdma_selection placed = *selection;
    placed.expiry = place(&call, selection->expiry);
    placed.slot = place(&call, selection->slot);
    fdma_select_args args = {
        .size = sizeof args,
        .score = place(&call, problem->score),
        .key_valid = place(&call, problem->key_valid),
        .selection = &placed,
        .window = problem->test->window,
        .scope = check_mask_scope(problem->test),
        .exec = {.kernel = kernel, .device = device},
    };
    size_t bytes = 0;
    fdma_status status = fdma_select_workspace(&args, &bytes);
    if (status == FDMA_OK) {
        give_workspace(&call, &args.exec, bytes);
        status = fdma_select(&args);
    }
    device_wait(device);
    device_fetch(device, &selection->expiry, &placed.expiry);
    device_fetch(device, &selection->slot, &placed.slot);
    selection->window = placed.window;
    selection->kv_len = placed.kv_len;
    selection->scope = placed.scope;
    leave(&call);
    return status;
}

fdma_status check_run_lists(const check_problem *problem, const char *kernel, int64_t tile_len,
                            fdma_tensor list, fdma_tensor count) {
    const int32_t device = device_of(problem, kernel);
    call_tensors call = {.device = device};
    fdma_selection selection = problem->selection;
    selection.expiry = place(&call, problem->selection.expiry);
    selection.slot = place(&call, problem->selection.slot);
    fdma_lists_args args = {
        .size = sizeof args,
        .selection = &selection,
        .list = place(&call, list),
        .count = place(&call, count),
        .q_len = problem->test->q_len,
        .tile_len = tile_len,
        .causal = check_mask_is_causal(problem->test),
        .exec = {.kernel = kernel, .device = device},
    };
    size_t bytes = 0;
    fdma_status status = fdma_lists_workspace(&args, &bytes);
    if (status == FDMA_OK) {
        give_workspace(&call, &args.exec, bytes);
        status = fdma_lists(&args);
    }
    device_wait(device);
    device_fetch(device, &list, &args.list);
    device_fetch(device, &count, &args.count);
    leave(&call);
    return status;
}

fdma_status check_run_forward(const check_problem *problem, const char *kernel, fdma_tensor out,
                              fdma_tensor lse) {
    const int selected = problem->test->window >= 0;
    const int32_t device = device_of(problem, kernel);
    call_tensors call = {.device = device};
    fdma_selection selection = problem->selection;
    selection.expiry = place(&call, problem->selection.expiry);
    selection.slot = place(&call, problem->selection.slot);
    fdma_forward_args args = {
        .size = sizeof args,
        .q = place(&call, problem->q),
        .k = place(&call, problem->k),
        .v = place(&call, problem->v),
        .bias = place(&call, problem->bias),
        .key_valid = place(&call, problem->key_valid),
        .out = place(&call, out),
        .lse = place(&call, lse),
        .selection = selected ? &selection : NULL,
        .window = selected ? problem->test->window : 0,
        .softcap = problem->test->softcap,
        .causal = check_mask_is_causal(problem->test),
        .exec = {.kernel = kernel, .device = device},
    };
    size_t bytes = 0;
    fdma_status status = fdma_forward_workspace(&args, &bytes);
    if (status == FDMA_OK) {
        give_workspace(&call, &args.exec, bytes);
        status = fdma_forward(&args);
    }
    device_wait(device);
    device_fetch(device, &out, &args.out);
    device_fetch(device, &lse, &args.lse);
    leave(&call);
    return status;
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
