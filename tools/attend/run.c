/* The computation of `fdma attend`: scores, bias, selection, then attention over all keys and over
 * the kept ones. */
#include "attend/attend.h"

#include "commands.h"
#include "common/arrays.h"
#include "common/device.h"
#include "common/machine.h"
#include "common/text.h"

#include <math.h>
#include <string.h>

typedef struct attend_calls {
    fdma_score_args score;
    fdma_select_args select;
    fdma_forward_args selected;
    fdma_forward_args dense;
} attend_calls;

static int refuse(const attend_options *options) {
    print_error("fdma attend: %s: %s", options->file, fdma_last_error());
    return EXIT_USAGE;
}

static void describe_calls(const attend_options *options, const attend_inputs *inputs,
                           attend_results *results, attend_calls *calls) {
    const fdma_exec exec = {
        .kernel = options->kernel,
        .device = options->device,
        .threads = (int32_t)options->threads,
    };
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
        .recent = options->recent,
        .sinks = options->sinks,
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

/* Sets shapes only, so that a call that would be refused is refused before memory is allocated. */
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
        .recent = options->recent,
        .kv_len = k[1],
        .scope = (fdma_scope)options->scope,
    };
    if (options->device > 0) // where forward needs slots
        results->selection.slot = results->selection.expiry;
}

enum { INPUTS = 5, RESULTS = 8 };

typedef struct result_tensors {
    fdma_tensor *tensors[RESULTS];
} result_tensors;

static result_tensors tensors_of(attend_results *results) {
    return (result_tensors){{&results->score, &results->bias, &results->out, &results->lse,
                             &results->dense_out, &results->dense_lse, &results->selection.expiry,
                             &results->selection.slot}};
}

static void allocate_results(attend_results *results) {
    const result_tensors owned = tensors_of(results);
    for (int t = 0; t < RESULTS; t++) {
        fdma_tensor *tensor = owned.tensors[t];
        if (tensor->rank > 0)
            *tensor = allocate_array(tensor->dtype, tensor->rank, tensor->shape);
    }
}

/* Asks every call for its workspace, which checks all arguments; *bytes is the largest. */
static int check_calls(const attend_options *options, const attend_calls *calls, size_t *bytes) {
    size_t want[4] = {0};
    const bool scores = calls->score.dt_proj.rank > 0;
    if ((scores && fdma_score_workspace(&calls->score, &want[0]) != FDMA_OK) ||
        fdma_select_workspace(&calls->select, &want[1]) != FDMA_OK ||
        fdma_forward_workspace(&calls->selected, &want[2]) != FDMA_OK ||
        fdma_forward_workspace(&calls->dense, &want[3]) != FDMA_OK)
        return refuse(options);
    for (int call = 0; call < 4; call++)
        *bytes = want[call] > *bytes ? want[call] : *bytes;
    return EXIT_DONE;
}

/* Fills in the scores of the file, and their bias. */
static void fill_scores(const attend_options *options, const attend_inputs *inputs,
                        const attend_results *results) {
    const int64_t count = element_count(&inputs->score);
    const float *given = inputs->score.data;
    float *score = results->score.data, *bias = results->bias.data;
    for (int64_t key = 0; key < count; key++) {
        score[key] = given[key];
        if (bias != NULL)
            bias[key] = options->bias == FDMA_BIAS_EXP ? expf(given[key]) : given[key];
    }
}

/* One round: the whole selected attention, then the dense one, so that a disturbance of the machine
 * affects both. */
static fdma_status time_round(const attend_calls *calls, bool scores, double ms[4]) {
    const int32_t device = calls->select.exec.device;
    fdma_status status = FDMA_OK;
    start_clock(device);
    if (scores)
        status = fdma_score(&calls->score);
    ms[0] = stop_clock(device);
    start_clock(device);
    if (status == FDMA_OK)
        status = fdma_select(&calls->select);
    ms[1] = stop_clock(device);
    start_clock(device);
    if (status == FDMA_OK)
        status = fdma_forward(&calls->selected);
    ms[2] = stop_clock(device);
    start_clock(device);
    if (status == FDMA_OK)
        status = fdma_forward(&calls->dense);
    ms[3] = stop_clock(device);
    return status;
}

/* Repeats rounds until there are 25 or time is up. The first one warms the machine up, and counts
 * only if it is the only one. */
static fdma_status time_rounds(const attend_calls *calls, bool scores, attend_times *times) {
    enum { ROUNDS = 25, FEW_ROUNDS = 3, ENOUGH_MS = 1500, MOST_MS = 6000 };
    const double start = now_ms();
    double elapsed = 0;
    for (int round = 0; round <= ROUNDS; round++) {
        const double limit = round <= FEW_ROUNDS ? MOST_MS : ENOUGH_MS;
        if (round > 0 && elapsed >= limit)
            break;
        double ms[4];
        const fdma_status status = time_round(calls, scores, ms);
        if (status != FDMA_OK)
            return status;
        if (round == 1)
            *times = (attend_times){.score = {.count = 0}};
        if (scores)
            add_sample(&times->score, ms[0]);
        add_sample(&times->select, ms[1]);
        add_sample(&times->selected, ms[1] + ms[2]);
        add_sample(&times->dense, ms[3]);
        elapsed = now_ms() - start;
    }
    return FDMA_OK;
}

static int run_calls(const attend_options *options, const attend_inputs *inputs, size_t bytes,
                     attend_calls *calls, attend_results *results) {
    void *workspace = device_allocate(options->device, bytes);
    fdma_exec *const execs[] = {&calls->score.exec, &calls->select.exec, &calls->selected.exec,
                                &calls->dense.exec};
    for (int call = 0; call < 4; call++) {
        execs[call]->workspace = workspace;
        execs[call]->workspace_size = bytes;
    }
    const int64_t before = count_threads(); // the library keeps the threads that it starts
    fdma_status status = time_rounds(calls, inputs->score.rank == 0, &results->times);
    if (before > 0 && options->device == 0)
        results->threads = count_threads() - before + 1;
    if (status == FDMA_OK)
        status = fdma_forward_kernel(&calls->selected, &results->kernel);
    const int code = status == FDMA_OK ? EXIT_DONE : refuse(options);
    device_free(options->device, workspace);
    return code;
}

/* Runs the calls on the device, on copies of the tensors, and copies the results back. */
static int run_on_device(const attend_options *options, const attend_inputs *inputs, size_t bytes,
                         attend_results *results) {
    const int32_t device = options->device;
    attend_calls calls;
    attend_inputs inputs_there = *inputs;
    attend_results results_there = *results;
    fdma_tensor *const given[INPUTS] = {&inputs_there.q, &inputs_there.k, &inputs_there.v,
                                        &inputs_there.dt_proj, &inputs_there.a};
    const result_tensors copies = tensors_of(&results_there), owned = tensors_of(results);
    for (int t = 0; t < INPUTS; t++)
        *given[t] = device_copy_of(device, given[t]);
    for (int t = 0; t < RESULTS; t++)
        *copies.tensors[t] = device_copy_of(device, owned.tensors[t]);
    describe_calls(options, &inputs_there, &results_there, &calls);
    const int code = run_calls(options, &inputs_there, bytes, &calls, &results_there);
    for (int t = 0; t < INPUTS; t++)
        device_release(device, given[t]);
    for (int t = 0; t < RESULTS; t++) {
        device_fetch(device, owned.tensors[t], copies.tensors[t]);
        device_release(device, copies.tensors[t]);
        *copies.tensors[t] = *owned.tensors[t];
    }
    *results = results_there;
    return code;
}

int run_attention(const attend_options *options, const attend_inputs *inputs,
                  attend_results *results) {
    attend_calls calls;
    size_t bytes = 0;
    shape_results(options, inputs, results);
    describe_calls(options, inputs, results, &calls);
    const int code = check_calls(options, &calls, &bytes);
    if (code != EXIT_DONE)
        return code;
    allocate_results(results);
    if (inputs->score.rank > 0)
        fill_scores(options, inputs, results);
    return run_on_device(options, inputs, bytes, results);
}
