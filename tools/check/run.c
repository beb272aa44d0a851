/* See check/run.h. */
#include "check/run.h"

#include "core/signatures.h"

#include "commands.h"
#include "common/calls.h"
#include "common/device.h"
#include "common/text.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* One call: its arguments, and the tensors that it is given. */
typedef struct check_call {
    any_args args;
    fdma_selection selection;
    int32_t device;
    int count;
    fdma_tensor *fields[most_tensors]; /* fields of the structs: tensors on the call's device */
    fdma_tensor hosts[most_tensors];   /* the same in host memory */
    bool is_output[most_tensors];
} check_call;

DEFINE_CALL(score)
DEFINE_CALL(select)
DEFINE_CALL(forward)
DEFINE_CALL(backward)
DEFINE_CALL(score_backward)
DEFINE_CALL(merge)
DEFINE_CALL(merge_backward)
DEFINE_CALL(decode)
DEFINE_CALL(cache_store)
DEFINE_CALL(cache_copy)
DEFINE_CALL(probabilities)
DEFINE_CALL(rotary_table)
DEFINE_CALL(rotate)
DEFINE_CALL(rotate_backward)

_Static_assert((int)CHECK_ROTATE_BACKWARD == (int)operation_rotate_backward, "the same order");

static const library_call calls[check_operation_count] = {
    [CHECK_SCORE] = CALL_OF(score),
    [CHECK_SELECT] = CALL_OF(select),
    [CHECK_FORWARD] = CALL_OF(forward),
    [CHECK_BACKWARD] = CALL_OF(backward),
    [CHECK_SCORE_BACKWARD] = CALL_OF(score_backward),
    [CHECK_MERGE] = CALL_OF(merge),
    [CHECK_MERGE_BACKWARD] = CALL_OF(merge_backward),
    [CHECK_DECODE] = CALL_OF(decode),
    [CHECK_CACHE_STORE] = CALL_OF(cache_store),
    [CHECK_CACHE_COPY] = CALL_OF(cache_copy),
    [CHECK_PROBABILITIES] = CALL_OF(probabilities),
    [CHECK_ROTARY_TABLE] = CALL_OF(rotary_table),
    [CHECK_ROTATE] = CALL_OF(rotate),
    [CHECK_ROTATE_BACKWARD] = CALL_OF(rotate_backward),
};

/* The problem with the tensors that an operation takes in place of others. */
static check_problem given_to(const check_problem *problem, check_operation_id id) {
    check_problem given = *problem;
    if (id == CHECK_SCORE_BACKWARD)
        given.v = problem->score_v;
    if (id == CHECK_DECODE) {
        given.q = problem->new_q;
        given.k = problem->new_k;
        given.v = problem->new_v;
        given.score = problem->new_score;
        given.dt_proj = given.a = given.dt_bias = (fdma_tensor){0}; // the score is given
    }
    if (id == CHECK_ROTARY_TABLE)
        given.rotation.positions = problem->rotation.row_positions;
    if (id == CHECK_ROTATE || id == CHECK_ROTATE_BACKWARD)
        given.k = problem->rotation.k;
    return given;
}

static fdma_tensor input_named(const check_problem *problem, check_operation_id id,
                               const char *name) {
    const check_problem given = given_to(problem, id);
    const struct {
        const char *name;
        fdma_tensor tensor;
    } inputs[] = {
        {"q", given.q},
        {"k", given.k},
        {"v", given.v},
        {"dt_proj", given.dt_proj},
        {"a", given.a},
        {"dt_bias", given.dt_bias},
        {"key_valid", problem->key_valid},
        {"starts", problem->starts},
        {"kv_used", {0}},
        {"sink_logit", problem->sink_logit},
        {"rng_state", problem->rng_state},
        {"attn_mask", problem->attn_mask},
        {"mask_lists", {0}},
        {"attn_bias", problem->attn_bias},
        {"score", given.score},
        {"bias", problem->bias},
        {"expiry", problem->selection.expiry},
        {"slot", problem->selection.slot},
        {"out", problem->forward_out},
        {"lse", problem->forward_lse},
        {"dout", problem->dout},
        {"dlse", problem->dlse},
        {"dbias", problem->score_dbias},
        {"out_a", problem->partial_out[0]},
        {"lse_a", problem->partial_lse[0]},
        {"out_b", problem->partial_out[1]},
        {"lse_b", problem->partial_lse[1]},
        {"index", {0}},
        {"n_tokens", {0}},
        {"commit", problem->commit},
        {"from", problem->from},
        {"to", problem->to},
        {"x", problem->q},
        {"weight", problem->rotation.weight},
        {"dk_out", problem->rotation.dk_out},
        {"k_weight", problem->rotation.k_weight},
        {"rotary", problem->rotation.rotary},
        {"positions", given.rotation.positions},
        {"inv_freq", problem->rotation.inv_freq},
        {"cache.page_table", problem->cache.page_table},
        {"cache.k", problem->cache.k},
        {"cache.v", problem->cache.v},
        {"cache.bias", problem->cache.bias},
        {"cache.table.score", problem->cache.table.score},
        {"cache.table.position", problem->cache.table.position},
        {"cache.table.seen", problem->cache.table.seen},
    };
    for (size_t i = 0; i < sizeof inputs / sizeof inputs[0]; i++)
        if (strcmp(inputs[i].name, name) == 0)
            return inputs[i].tensor;
    print_error("fdma check: no tensor is named %s", name);
    exit(EXIT_FAILED);
}

/* ---- one call ---- */

/* Sets the fields that are no tensors, in a call with a cache. */
static void set_cache_options(check_call *call, const check_problem *problem, check_operation_id id,
                              const fdma_selection *selection) {
    const check_case *const test = problem->test;
    fdma_cache cache = problem->cache;
    cache.device = call->device;
    switch (id) {
    case CHECK_DECODE:
        call->args.decode = (fdma_decode_args){.cache = cache,
                                               .scale = problem->scale,
                                               .softcap = test->softcap,
                                               .bias_form = test->bias_form};
        break;
    case CHECK_CACHE_STORE:
        call->args.cache_store = (fdma_cache_store_args){
            .cache = cache, .selection = selection, .bias_form = test->bias_form};
        break;
    case CHECK_CACHE_COPY:
        call->args.cache_copy.cache = cache;
        break;
    default:
        break;
    }
}

/* Fields that both calls of a rotation have. */
#define ROTATION_FIELDS(options)                                                                   \
    {.eps = (options)->eps,                                                                        \
     .first = (options)->first,                                                                    \
     .offset = (options)->offset,                                                                  \
     .nope_heads = (options)->nope_heads,                                                          \
     .k_nope_heads = (options)->k_nope_heads,                                                      \
     .interleaved = (options)->interleaved}

/* The same in a call of a rotation or of its table. */
static void set_rotary_options(check_call *call, const check_rotary *options,
                               check_operation_id id) {
    switch (id) {
    case CHECK_ROTARY_TABLE:
        call->args.rotary_table =
            (fdma_rotary_table_args){.base = options->base, .first = options->first};
        break;
    case CHECK_ROTATE:
        call->args.rotate = (fdma_rotate_args)ROTATION_FIELDS(options);
        break;
    case CHECK_ROTATE_BACKWARD:
        call->args.rotate_backward = (fdma_rotate_backward_args)ROTATION_FIELDS(options);
        break;
    default:
        break;
    }
}

static void set_options(check_call *call, const check_problem *problem, check_operation_id id) {
    const check_case *const test = problem->test;
    const int32_t causal = check_is_causal(test);
    const fdma_selection *const selection = check_is_selected(test) ? &call->selection : NULL;
    call->selection = problem->selection;
    set_cache_options(call, problem, id, selection);
    set_rotary_options(call, &problem->rotation, id);
    switch (id) {
    case CHECK_SCORE:
        call->args.score.bias_form = test->bias_form;
        break;
    case CHECK_SELECT:
        call->args.select = (fdma_select_args){.selection = &call->selection,
                                               .window = test->window,
                                               .recent = test->recent,
                                               .sinks = test->sinks,
                                               .scope = check_scope(test),
                                               .gap = check_gap(test)};
        break;
    case CHECK_FORWARD:
        call->args.forward = (fdma_forward_args){.selection = selection,
                                                 .scale = problem->scale,
                                                 .softcap = test->softcap,
                                                 .causal = causal,
                                                 .dropout = check_dropout(test),
                                                 .seed = check_seed(test)};
        break;
    case CHECK_BACKWARD:
        call->args.backward = (fdma_backward_args){.selection = selection,
                                                   .scale = problem->scale,
                                                   .softcap = test->softcap,
                                                   .causal = causal,
                                                   .deterministic = problem->deterministic,
                                                   .dropout = check_dropout(test),
                                                   .seed = check_seed(test)};
        break;
    case CHECK_SCORE_BACKWARD:
        call->args.score_backward.bias_form = test->bias_form;
        break;
    case CHECK_PROBABILITIES:
        call->args.probabilities = (fdma_probabilities_args){.selection = selection,
                                                             .scale = problem->scale,
                                                             .softcap = test->softcap,
                                                             .causal = causal,
                                                             .dropout = check_dropout(test),
                                                             .seed = check_seed(test)};
        break;
    default:
        break;
    }
    *(size_t *)&call->args = calls[id].size; // the first field of each
}

/* True for carried keys and tables, which no case has: test_streams.c checks them. */
static bool belongs_to_stream(const tensor_entry *entry) {
    return strstr(entry->name, "_carried") != NULL || strstr(entry->name, "table_") != NULL;
}

/* True for the cache of a decode call. It is an output, but the decode calls of a check commit no
 * token to it. */
static bool is_cache_of_decode(check_operation_id id, const tensor_entry *entry) {
    return id == CHECK_DECODE && strncmp(entry->name, "cache.", strlen("cache.")) == 0;
}

static void set_tensors(check_call *call, const check_problem *problem, check_operation_id id,
                        const fdma_tensor *outputs) {
    const tensor_table table = fdma_tensors[id]; // the ids of the library
    for (const tensor_entry *entry = table.entries; entry < table.entries + table.count; entry++) {
        if (belongs_to_stream(entry))
            continue;
        const bool is_output =
            (entry->role == role_output || entry->role == role_optional_output) &&
            !is_cache_of_decode(id, entry);
        const fdma_tensor host = is_output ? *outputs++ : input_named(problem, id, entry->name);
        void *const base = entry->in_selection ? (void *)&call->selection : (void *)&call->args;
        fdma_tensor *const field = (fdma_tensor *)((char *)base + entry->offset);
        *field = host;
        call->fields[call->count] = field;
        call->hosts[call->count] = host;
        call->is_output[call->count++] = is_output;
    }
}

/* Fills in a call whose tensors are still in host memory, and asks for its workspace. */
static fdma_status prepare(check_call *call, const check_problem *problem, check_operation_id id,
                           const char *kernel, const fdma_tensor *outputs, size_t *bytes) {
    *call = (check_call){.device = runs_on(kernel, 0) ? 0 : problem->device};
    set_options(call, problem, id);
    set_tensors(call, problem, id, outputs);
    *exec_of(&calls[id], &call->args) = (fdma_exec){.kernel = kernel, .device = call->device};
    return calls[id].workspace(&call->args, bytes);
}

bool check_takes(const check_problem *problem, check_operation_id id, const char *kernel,
                 const fdma_tensor *outputs) {
    check_call call;
    size_t bytes = 0;
    return prepare(&call, problem, id, kernel, outputs, &bytes) != FDMA_UNSUPPORTED;
}

fdma_status check_run(const check_problem *problem, check_operation_id id, const char *kernel,
                      const fdma_tensor *outputs) {
    check_call call;
    size_t bytes = 0;
    fdma_status status = prepare(&call, problem, id, kernel, outputs, &bytes);
    if (status != FDMA_OK)
        return status;
    const int32_t device = call.device;
    fdma_exec *const exec = exec_of(&calls[id], &call.args);
    for (int i = 0; i < call.count; i++)
        *call.fields[i] = device_copy_of(device, &call.hosts[i]);
    exec->workspace = device > 0 ? device_allocate(device, bytes) : check_alloc(1, bytes);
    exec->workspace_size = bytes;
    status = calls[id].run(&call.args);
    device_wait(device);
    for (int i = 0; i < call.count; i++) {
        if (call.is_output[i])
            device_fetch(device, &call.hosts[i], call.fields[i]);
        device_release(device, call.fields[i]);
    }
    if (device > 0)
        device_free(device, exec->workspace);
    return status;
}
