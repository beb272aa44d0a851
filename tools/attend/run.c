/* The computation of `fdma attend`: scores, bias, selection, then attention dense and selected. */
#include "attend/attend.h"
#include "commands.h"
#include "common/arrays.h"
#include "common/device.h"
#include "common/timing.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct attend_calls {
    fdma_score_args score;
    fdma_select_args select;
    fdma_forward_args selected;
    fdma_forward_args dense;
} attend_calls;

static int complain(const attend_options *options) {
    fprintf(stderr, "fdma attend: %s: %s\n", options->file, fdma_last_error());
    return EXIT_USAGE;
}

static fdma_exec exec_of(const attend_options *options) {
    return (fdma_exec){
        .kernel = options->kernel,
        .device = options->device,
        .threads = (int32_t)options->threads,
    };
}

static void describe_calls(const attend_options *options, const attend_inputs *inputs,
                           attend_results *results, attend_calls *calls) {
    const fdma_exec exec = exec_of(options);
    calls->score = (fdma_score_args){
        .size = sizeof calls->score,
        .v = inputs->v,
        .dt_proj = inputs->dt_proj,
        .a = inputs->a,
        .score = results->score,
        .bias = results->bias,
        .bias_form = (fdma_bias_form)options->bias,
        .exec = exec,
    };
    calls->select = (fdma_select_args){
        .size = sizeof calls->select,
        .score = results->score,
        .selection = &results->selection,
        .window = options->window,
        .scope = (fdma_scope)options->scope,
        .exec = exec,
    };
    calls->dense = (fdma_forward_args){
        .size = sizeof calls->dense,
        .q = inputs->q,
        .k = inputs->k,
        .v = inputs->v,
        .bias = results->bias,
        .out = results->dense_out,
        .lse = results->dense_lse,
        .scale = options->scale,
        .softcap = options->softcap,
        .causal = options->causal,
        .exec = exec,
    };
    calls->selected = calls->dense;
    calls->selected.out = results->out;
    calls->selected.lse = results->lse;
    calls->selected.selection = &results->selection;
}

/* Shapes only: what the calls refuse is refused before memory is taken. */
static void shape_results(const attend_options *options, const attend_inputs *inputs,
                          attend_results *results) {
    const int64_t *q = inputs->q.shape;
    const int64_t *k = inputs->k.shape;
    const int64_t keys[] = {k[0], k[2], k[1]};
    const int64_t rows[] = {q[0], q[2], q[1]};
    results->score = fdma_dense_tensor(NULL, FDMA_FLOAT32, 3, keys);
    if (options->bias != FDMA_BIAS_NONE)
        results->bias = results->score;
    results->out = results->dense_out = fdma_dense_tensor(NULL, inputs->q.dtype, 4, q);
    results->lse = results->dense_lse = fdma_dense_tensor(NULL, FDMA_FLOAT32, 3, rows);
    results->selection = (fdma_selection){
        .size = sizeof results->selection,
        .expiry = fdma_dense_tensor(NULL, FDMA_INT32, 3, keys),
        .window = options->window,
        .kv_len = k[1],
        .scope = (fdma_scope)options->scope,
    };
    if (options->device) // kernels there want it
        results->selection.slot = results->selection.expiry;
}

static void allocate_results(attend_results *results) {
    fdma_tensor *const owned[] = {
        &results->score,
        &results->bias,
        &results->out,
        &results->lse,
        &results->dense_out,
        &results->dense_lse,
        &results->selection.expiry,
        &results->selection.slot,
    };
    for (size_t t = 0; t < sizeof owned / sizeof owned[0]; t++) {
        if (owned[t]->rank > 0)
            *owned[t] = allocate_array(owned[t]->dtype, owned[t]->rank, owned[t]->shape);
    }
}

/* Asks every call for its workspace, which checks all arguments; *bytes is the largest. */
static int check_calls(const attend_options *options, const attend_calls *calls, size_t *bytes) {
    size_t want[4] = {0};
    const int scores = calls->score.dt_proj.rank > 0;
    if ((scores && fdma_score_workspace(&calls->score, &want[0])) ||
        fdma_select_workspace(&calls->select, &want[1]) ||
        fdma_forward_workspace(&calls->selected, &want[2]) ||
        fdma_forward_workspace(&calls->dense, &want[3]))
        return complain(options);
    for (int call = 0; call < 4; call++)
        *bytes = want[call] > *bytes ? want[call] : *bytes;
    return 0;
}

/* The bias of scores that the file brings. */
static void fill_bias(const attend_options *options, const attend_results *results) {
    if (results->bias.rank == 0)
        return;
    const float *score = results->score.data;
    float *bias = results->bias.data;
    const int64_t count = element_count(&results->score);
    for (int64_t key = 0; key < count; key++)
        bias[key] = options->bias == FDMA_BIAS_EXP ? expf(score[key]) : score[key];
}

static fdma_status call_score(const attend_calls *calls) { return fdma_score(&calls->score); }
static fdma_status call_select(const attend_calls *calls) { return fdma_select(&calls->select); }
static fdma_status call_selected(const attend_calls *calls) {
    return fdma_forward(&calls->selected);
}
static fdma_status call_dense(const attend_calls *calls) { return fdma_forward(&calls->dense); }

/* Runs a call until 25 samples or a second have passed; its median time, NaN where it failed. */
static double time_call(fdma_status (*call)(const attend_calls *), const attend_calls *calls) {
    enum { RUNS = 25, ENOUGH_MS = 1000 };
    const int32_t device = calls->select.exec.device;
    samples times = {.count = 0};
    const double start = now_ms();
    do {
        start_clock(device);
        if (call(calls) != FDMA_OK)
            return (double)NAN;
        add_sample(&times, stop_clock(device));
    } while (times.count < RUNS && now_ms() - start < ENOUGH_MS);
    return median(&times);
}

static int run_calls(const attend_options *options, const attend_inputs *inputs,
                     const attend_calls *calls, attend_results *results) {
    results->score_ms = (double)NAN;
    if (inputs->score.rank == 0 && isnan(results->score_ms = time_call(call_score, calls)))
        return complain(options);
    results->select_ms = time_call(call_select, calls);
    results->selected_ms = results->select_ms + time_call(call_selected, calls);
    results->dense_ms = time_call(call_dense, calls);
    if (isnan(results->selected_ms) || isnan(results->dense_ms) ||
        fdma_forward_kernel(&calls->selected, &results->kernel))
        return complain(options);
    return 0;
}

static int call_with_workspace(const attend_options *options, const attend_inputs *inputs,
                               size_t bytes, attend_calls *calls, attend_results *results) {
    void *workspace = device_allocate(options->device, bytes);
    fdma_exec *const execs[] = {&calls->score.exec, &calls->select.exec, &calls->selected.exec,
                                &calls->dense.exec};
    for (int call = 0; call < 4; call++) {
        execs[call]->workspace = workspace;
        execs[call]->workspace_size = bytes;
    }
    const int code = run_calls(options, inputs, calls, results);
    device_free(options->device, workspace);
    return code;
}

enum { INPUTS = 5, RESULTS = 8 };

/* Runs the calls where the tensors are: on a device on copies, whose results come back. */
static int run_there(const attend_options *options, const attend_inputs *inputs, size_t bytes,
                     attend_results *results) {
    const int32_t device = options->device;
    attend_calls calls;
    attend_inputs there = *inputs;
    attend_results found = *results;
    fdma_tensor *const given[INPUTS] = {&there.q, &there.k, &there.v, &there.dt_proj, &there.a};
    fdma_tensor *const copies[RESULTS] = {&found.score,
                                          &found.bias,
                                          &found.out,
                                          &found.lse,
                                          &found.dense_out,
                                          &found.dense_lse,
                                          &found.selection.expiry,
                                          &found.selection.slot};
    fdma_tensor *const owned[RESULTS] = {&results->score,
                                         &results->bias,
                                         &results->out,
                                         &results->lse,
                                         &results->dense_out,
                                         &results->dense_lse,
                                         &results->selection.expiry,
                                         &results->selection.slot};
    for (int t = 0; t < INPUTS; t++)
        *given[t] = device_copy_of(device, given[t]);
    for (int t = 0; t < RESULTS; t++)
        *copies[t] = device_copy_of(device, owned[t]);
    describe_calls(options, &there, &found, &calls);
    const int code = call_with_workspace(options, &there, bytes, &calls, &found);
    for (int t = 0; t < INPUTS; t++)
        device_release(device, given[t]);
    for (int t = 0; t < RESULTS; t++) {
        device_fetch(device, owned[t], copies[t]);
        device_release(device, copies[t]);
        *copies[t] = *owned[t];
    }
    *results = found;
    return code;
}

int run_attention(const attend_options *options, const attend_inputs *inputs,
                  attend_results *results) {
    attend_calls calls;
    size_t bytes = 0;
    shape_results(options, inputs, results);
    describe_calls(options, inputs, results, &calls);
    const int code = check_calls(options, &calls, &bytes);
    if (code)
        return code;
    allocate_results(results);
    if (inputs->score.rank > 0) {
        memcpy(results->score.data, inputs->score.data,
               (size_t)element_count(&inputs->score) * sizeof(float));
        fill_bias(options, results);
    }
    return run_there(options, inputs, bytes, results);
}
