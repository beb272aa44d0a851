/* Makes a problem of an operation's argument struct: options, selection and exec. checks.c checks
 * the tensors. */
#include "core/operations.h"

#include "core/adapter.h"
#include "core/checks.h"
#include "core/error.h"
#include "core/signatures.h"

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

static fdma_status check_absent(const char *name, const fdma_tensor *tensor) {
    FDMA_REQUIRE(!is_present(tensor), FDMA_INVALID_ARGUMENT,
                 "%s: is given, want none with FDMA_BIAS_NONE", name);
    return FDMA_OK;
}

static fdma_status take_bias_form(fdma_bias_form form, fdma_problem *problem) {
    FDMA_REQUIRE((unsigned)form <= FDMA_BIAS_NONE, FDMA_INVALID_ARGUMENT,
                 "bias_form: is %d, want one of fdma_bias_form", (int)form);
    problem->bias_form = form;
    return form == FDMA_BIAS_NONE ? check_absent("bias", &problem->bias) : FDMA_OK;
}

static void set_rules(fdma_problem *problem, int64_t window, int64_t recent, int64_t sinks,
                      fdma_scope scope) {
    problem->window = window;
    problem->recent = recent;
    problem->sinks = sinks;
    problem->slots = window <= INT64_MAX - recent ? window + recent : INT64_MAX;
    problem->scope = scope;
}

static fdma_status check_rules(int64_t recent, int64_t sinks, fdma_scope scope, int64_t window) {
    FDMA_REQUIRE(recent >= 0, FDMA_INVALID_ARGUMENT, "recent: is %lld, want 0 or more",
                 (long long)recent);
    FDMA_REQUIRE(recent == 0 || scope == FDMA_SCOPE_CAUSAL, FDMA_INVALID_ARGUMENT,
                 "recent: is %lld, want 0 with global scope", (long long)recent);
    FDMA_REQUIRE(sinks >= 0 && sinks <= window, FDMA_INVALID_ARGUMENT,
                 "sinks: is %lld, want 0 to window, %lld", (long long)sinks, (long long)window);
    return FDMA_OK;
}

static fdma_status take_rules(int64_t window, int64_t recent, int64_t sinks, fdma_scope scope,
                              bool causal, fdma_problem *problem) {
    FDMA_REQUIRE(window >= 1, FDMA_INVALID_ARGUMENT,
                 "window: is %lld, want 1 or more, or FDMA_WINDOW_ALL for all keys",
                 (long long)window);
    FDMA_REQUIRE((unsigned)scope <= FDMA_SCOPE_GLOBAL, FDMA_INVALID_ARGUMENT,
                 "scope: is %d, want one of fdma_scope", (int)scope);
    FDMA_REQUIRE(causal || scope != FDMA_SCOPE_CAUSAL, FDMA_INVALID_ARGUMENT,
                 "scope: is FDMA_SCOPE_CAUSAL, want FDMA_SCOPE_GLOBAL if causal is 0");
    scope = causal && scope != FDMA_SCOPE_GLOBAL ? FDMA_SCOPE_CAUSAL : FDMA_SCOPE_GLOBAL;
    FDMA_TRY(check_rules(recent, sinks, scope, window));
    set_rules(problem, window, recent, sinks, scope);
    return FDMA_OK;
}

/* Called after take_rules(), which sets the scope. A gap excludes tables, so that carried keys have
 * none. */
static fdma_status take_gap(double gap, fdma_problem *problem) {
    FDMA_REQUIRE(gap >= 0 && gap < INFINITY, FDMA_INVALID_ARGUMENT,
                 "gap: is %g, want a finite number, 0 or more", gap);
    FDMA_REQUIRE(gap == 0 || problem->scope == FDMA_SCOPE_CAUSAL, FDMA_INVALID_ARGUMENT,
                 "gap: is %g, want 0 with global scope", gap);
    FDMA_REQUIRE(gap == 0 || !has_table(problem), FDMA_INVALID_ARGUMENT,
                 "gap: is %g, want 0 with table_in or table_out", gap);
    problem->gap = gap;
    return FDMA_OK;
}

/* A softcap below this makes all logits 0, as this one does, but kernels could take it for 0, which
 * means none: they compute in float32, and some flush subnormal numbers. */
static const double least_softcap = 1e-30;

static fdma_status take_logit_options(double scale, double softcap, int32_t causal,
                                      fdma_problem *problem) {
    FDMA_REQUIRE(scale >= 0 && scale < INFINITY, FDMA_INVALID_ARGUMENT,
                 "scale: is %g, want a finite number, 0 or more", scale);
    FDMA_REQUIRE(scale <= FLT_MAX, FDMA_INVALID_ARGUMENT,
                 "scale: is %g, want at most %g, the largest float32", scale, (double)FLT_MAX);
    FDMA_REQUIRE(softcap >= 0 && softcap < INFINITY, FDMA_INVALID_ARGUMENT,
                 "softcap: is %g, want a finite number, 0 or more", softcap);
    problem->scale = scale;
    problem->softcap = softcap > 0 && softcap < least_softcap ? least_softcap : softcap;
    problem->causal = causal != 0;
    return FDMA_OK;
}

static fdma_status take_dropout(double dropout, uint64_t seed, uint64_t offset,
                                fdma_problem *problem) {
    const double half_step = 0.5 / dropout_range; // p is rounded to steps of 2^-16
    FDMA_REQUIRE(dropout >= 0 && dropout < 1 - half_step, FDMA_INVALID_ARGUMENT,
                 "dropout: is %.8g, want 0 or more and less than 1 - 2^-17", dropout);
    problem->dropout.threshold = (uint32_t)((dropout + half_step) * dropout_range);
    problem->dropout.seed = seed;
    problem->dropout.offset = offset;
    return FDMA_OK;
}

static fdma_status take_score(const any_args *args, fdma_problem *problem) {
    return take_bias_form(args->score.bias_form, problem);
}

/* The reserved words of an absent table do not matter, as in an absent tensor. */
static fdma_status check_table_form(const char *name, const fdma_table *table) {
    return is_present(&table->score)
               ? fdma_check_reserved(name, table->reserved, sizeof table->reserved)
               : FDMA_OK;
}

static fdma_status check_table_forms(const fdma_table *in, const fdma_table *out) {
    FDMA_TRY(check_table_form("table_in", in));
    return check_table_form("table_out", out);
}

static fdma_status take_select(const any_args *args, fdma_problem *problem) {
    const fdma_select_args *const call = &args->select;
    FDMA_TRY(check_table_forms(&call->table_in, &call->table_out));
    FDMA_TRY(take_rules(call->window, call->recent, call->sinks, call->scope, true, problem));
    return take_gap(call->gap, problem);
}

static fdma_status take_forward(const any_args *args, fdma_problem *problem) {
    const fdma_forward_args *const forward = &args->forward;
    FDMA_TRY(take_dropout(forward->dropout, forward->seed, forward->offset, problem));
    return take_logit_options(forward->scale, forward->softcap, forward->causal, problem);
}

static fdma_status check_dsink_logit(const fdma_problem *problem) {
    FDMA_REQUIRE(!is_present(&problem->dsink_logit) || is_present(&problem->sink_logit),
                 FDMA_INVALID_ARGUMENT, "dsink_logit: is given, want none without sink_logit");
    return FDMA_OK;
}

static fdma_status take_backward(const any_args *args, fdma_problem *problem) {
    const fdma_backward_args *const backward = &args->backward;
    problem->deterministic = backward->deterministic != 0;
    problem->accumulate = problem->add_dsinks = backward->accumulate != 0;
    FDMA_TRY(take_dropout(backward->dropout, backward->seed, backward->offset, problem));
    FDMA_TRY(check_dsink_logit(problem));
    FDMA_REQUIRE(!is_present(&problem->dattn_bias) || is_present(&problem->attn_bias),
                 FDMA_INVALID_ARGUMENT, "dattn_bias: is given, want none without attn_bias");
    return take_logit_options(backward->scale, backward->softcap, backward->causal, problem);
}

static fdma_status check_ddt_bias(const fdma_problem *problem) {
    FDMA_REQUIRE(!is_present(&problem->ddt_bias) || is_present(&problem->dt_bias),
                 FDMA_INVALID_ARGUMENT, "ddt_bias: is given, want none without dt_bias");
    return FDMA_OK;
}

static fdma_status take_score_backward(const any_args *args, fdma_problem *problem) {
    const fdma_bias_form form = args->score_backward.bias_form;
    FDMA_REQUIRE((unsigned)form < FDMA_BIAS_NONE, FDMA_INVALID_ARGUMENT,
                 "bias_form: is %d, want FDMA_BIAS_EXP or FDMA_BIAS_LINEAR", (int)form);
    problem->bias_form = form;
    problem->accumulate = args->score_backward.accumulate != 0;
    return check_ddt_bias(problem);
}

static fdma_status take_nothing(const any_args *args, fdma_problem *problem) {
    (void)args;
    (void)problem;
    return FDMA_OK;
}

static fdma_status take_cache(const fdma_cache *cache, fdma_bias_form form, double scale,
                              double softcap, fdma_problem *problem) {
    FDMA_TRY(take_bias_form(form, problem));
    problem->cache = *cache;
    FDMA_TRY(
        take_rules(cache->window, cache->recent, cache->sinks, FDMA_SCOPE_CAUSAL, true, problem));
    return take_logit_options(scale, softcap, true, problem);
}

static fdma_status take_decode(const any_args *args, fdma_problem *problem) {
    const fdma_decode_args *const call = &args->decode;
    problem->batch_invariant = call->batch_invariant != 0;
    return take_cache(&call->cache, call->bias_form, call->scale, call->softcap, problem);
}

static fdma_status take_prefill(const any_args *args, fdma_problem *problem) {
    const fdma_prefill_args *const call = &args->prefill;
    problem->prefill.starts = call->starts;
    problem->prefill.index = call->index;
    problem->prefill.count = call->requests;
    return take_cache(&call->cache, call->bias_form, call->scale, call->softcap, problem);
}

static fdma_status take_cache_store(const any_args *args, fdma_problem *problem) {
    const fdma_cache_store_args *const call = &args->cache_store;
    problem->cache = call->cache;
    problem->causal = true;
    return take_bias_form(call->bias_form, problem);
}

static fdma_status take_cache_copy(const any_args *args, fdma_problem *problem) {
    problem->cache = args->cache_copy.cache;
    return FDMA_OK;
}

static fdma_status take_probabilities(const any_args *args, fdma_problem *problem) {
    const fdma_probabilities_args *const call = &args->probabilities;
    FDMA_TRY(take_dropout(call->dropout, call->seed, call->offset, problem));
    return take_logit_options(call->scale, call->softcap, call->causal, problem);
}

static fdma_status take_rotary_table(const any_args *args, fdma_problem *problem) {
    const fdma_rotary_table_args *const call = &args->rotary_table;
    FDMA_REQUIRE(is_present(&call->inv_freq) || (call->base >= 1 && call->base < INFINITY),
                 FDMA_INVALID_ARGUMENT,
                 "base: is %g, want a finite number, 1 or more, or else inv_freq", call->base);
    FDMA_REQUIRE(call->factor >= 0 && call->factor < INFINITY, FDMA_INVALID_ARGUMENT,
                 "factor: is %g, want a finite number, 0 or more", call->factor);
    problem->rotation.base = call->base;
    problem->rotation.factor = call->factor == 0 ? 1 : call->factor;
    problem->rotation.first = call->first;
    return FDMA_OK;
}

/* The options of fdma_rotate_args or fdma_rotate_backward_args. */
#define ROTARY_OPTIONS(call)                                                                       \
    {.first = (call)->first,                                                                       \
     .offset = (call)->offset,                                                                     \
     .nope_heads = (call)->nope_heads,                                                             \
     .k_nope_heads = (call)->k_nope_heads,                                                         \
     .eps = (call)->eps,                                                                           \
     .interleaved = (call)->interleaved != 0}

/* Checks that a tensor of a rotation is given with another one, and not without it. */
static fdma_status check_both(const char *name, const fdma_tensor *tensor, const char *with,
                              const fdma_tensor *other) {
    FDMA_REQUIRE(!is_present(tensor) || is_present(other), FDMA_INVALID_ARGUMENT,
                 "%s: is given, want none without %s", name, with);
    FDMA_REQUIRE(is_present(tensor) || !is_present(other), FDMA_INVALID_ARGUMENT,
                 "%s: is absent, want it with %s", name, with);
    return FDMA_OK;
}

static fdma_status take_rotation(const rotary_options *options, fdma_problem *problem) {
    FDMA_REQUIRE(options->eps >= 0 && options->eps < INFINITY, FDMA_INVALID_ARGUMENT,
                 "eps: is %g, want a finite number, 0 or more", options->eps);
    FDMA_REQUIRE(options->eps == 0 || is_present(&problem->weight), FDMA_INVALID_ARGUMENT,
                 "eps: is %g, want 0 without weight", options->eps);
    FDMA_REQUIRE(options->offset >= 0 && options->offset <= INT32_MAX, FDMA_INVALID_ARGUMENT,
                 "offset: is %lld, want 0 to %d", (long long)options->offset, INT32_MAX);
    problem->rotation = *options;
    return FDMA_OK;
}

/* Of two tensors both are normalized, or none is. `rows` is the name of k's rows. */
static fdma_status check_k_weight(const fdma_problem *problem, const char *rows) {
    FDMA_REQUIRE(rotates_k(problem) || !is_present(&problem->k_weight), FDMA_INVALID_ARGUMENT,
                 "k_weight: is given, want none without %s", rows);
    if (!rotates_k(problem))
        return FDMA_OK;
    return check_both("k_weight", &problem->k_weight, "weight", &problem->weight);
}

static fdma_status take_rotate(const any_args *args, fdma_problem *problem) {
    const rotary_options options = ROTARY_OPTIONS(&args->rotate);
    FDMA_TRY(take_rotation(&options, problem));
    FDMA_TRY(check_both("k_out", &problem->k_out, "k", &problem->k));
    return check_k_weight(problem, "k");
}

static fdma_status take_rotate_backward(const any_args *args, fdma_problem *problem) {
    const rotary_options options = ROTARY_OPTIONS(&args->rotate_backward);
    FDMA_REQUIRE(is_present(&problem->x) || !is_present(&problem->weight), FDMA_INVALID_ARGUMENT,
                 "x: is absent, want it with weight");
    FDMA_REQUIRE(!is_present(&problem->dweight) || is_present(&problem->weight),
                 FDMA_INVALID_ARGUMENT, "dweight: is given, want none without weight");
    FDMA_TRY(take_rotation(&options, problem));
    FDMA_TRY(check_both("dk", &problem->dk, "dk_out", &problem->dk_out));
    FDMA_TRY(check_k_weight(problem, "dk_out"));
    FDMA_REQUIRE(is_present(&problem->k) || !is_present(&problem->k_weight), FDMA_INVALID_ARGUMENT,
                 "k: is absent, want it with k_weight");
    FDMA_REQUIRE(!is_present(&problem->dk_weight) || is_present(&problem->k_weight),
                 FDMA_INVALID_ARGUMENT, "dk_weight: is given, want none without k_weight");
    return FDMA_OK;
}

static fdma_status take_attention(const any_args *args, fdma_problem *problem) {
    const fdma_attention_args *const call = &args->attention;
    FDMA_TRY(check_table_forms(&call->table_in, &call->table_out));
    FDMA_TRY(take_bias_form(call->bias_form, problem));
    FDMA_TRY(take_rules(call->window, call->recent, call->sinks, call->scope, call->causal != 0,
                        problem));
    FDMA_TRY(take_gap(call->gap, problem));
    FDMA_TRY(take_dropout(call->dropout, call->seed, call->offset, problem));
    return take_logit_options(call->scale, call->softcap, call->causal, problem);
}

static fdma_status take_attention_backward(const any_args *args, fdma_problem *problem) {
    const fdma_attention_backward_args *const call = &args->attention_backward;
    FDMA_TRY(take_bias_form(call->bias_form, problem));
    if (call->bias_form == FDMA_BIAS_NONE) {
        FDMA_TRY(check_absent("ddt_proj", &call->ddt_proj));
        FDMA_TRY(check_absent("da", &call->da));
        FDMA_TRY(check_absent("ddt_bias", &call->ddt_bias));
        // ignored, whatever they hold
        problem->dt_proj = problem->a = problem->dt_bias = (fdma_tensor){0};
    }
    FDMA_TRY(check_ddt_bias(problem));
    FDMA_TRY(check_dsink_logit(problem));
    problem->deterministic = call->deterministic != 0;
    problem->accumulate = problem->add_dsinks = call->accumulate != 0;
    problem->add_dbias_carried = problem->accumulate;
    FDMA_TRY(take_dropout(call->dropout, call->seed, call->offset, problem));
    return take_logit_options(call->scale, call->softcap, call->causal, problem);
}

typedef struct operation_entry {
    const char *name, *args_name;
    size_t size;                      /* size of the argument struct */
    size_t exec, reserved, selection; /* their offsets in it; 0: no such field */
    bool needs_selection;             /* it may not be NULL */
    fdma_status (*take_options)(const any_args *args, fdma_problem *problem);
} operation_entry;

#define OF(operation, field) offsetof(fdma_##operation##_args, field)
#define OPERATION(name, reserved, selection, needs_selection, take_options)                        \
    [operation_##name] = {#name,                                                                   \
                          "fdma_" #name "_args",                                                   \
                          sizeof(fdma_##name##_args),                                              \
                          OF(name, exec),                                                          \
                          reserved,                                                                \
                          selection,                                                               \
                          needs_selection,                                                         \
                          take_options}

/* clang-format off: a table */
static const operation_entry operations[] = {
    OPERATION(score, OF(score, reserved), 0, false, take_score),
    OPERATION(select, OF(select, reserved), OF(select, selection), true, take_select),
    OPERATION(forward, OF(forward, reserved), OF(forward, selection), false, take_forward),
    OPERATION(backward, OF(backward, reserved), OF(backward, selection), false, take_backward),
    OPERATION(score_backward, 0, 0, false, take_score_backward),
    OPERATION(merge, 0, 0, false, take_nothing),
    OPERATION(merge_backward, 0, 0, false, take_nothing),
    OPERATION(decode, 0, 0, false, take_decode),
    OPERATION(cache_store, OF(cache_store, reserved), OF(cache_store, selection), true,
              take_cache_store),
    OPERATION(cache_copy, OF(cache_copy, reserved), 0, false, take_cache_copy),
    OPERATION(probabilities, OF(probabilities, reserved), OF(probabilities, selection), false,
              take_probabilities),
    OPERATION(rotary_table, 0, 0, false, take_rotary_table),
    OPERATION(rotate, OF(rotate, reserved), 0, false, take_rotate),
    OPERATION(rotate_backward, OF(rotate_backward, reserved), 0, false, take_rotate_backward),
    OPERATION(attention, OF(attention, reserved), OF(attention, selection), false, take_attention),
    OPERATION(attention_backward, 0, OF(attention_backward, selection), true,
              take_attention_backward),
    OPERATION(prefill, OF(prefill, reserved), 0, false, take_prefill),
};
/* clang-format on */

const char *fdma_operation_name(fdma_operation operation) { return operations[operation].name; }

fdma_status fdma_copy_struct(const char *name, const void *caller, size_t first_size, void *known,
                             size_t known_size) {
    FDMA_REQUIRE(caller != NULL, FDMA_INVALID_ARGUMENT, "%s: is NULL, want a struct", name);
    size_t size;
    memcpy(&size, caller, sizeof size);
    FDMA_REQUIRE(size >= first_size, FDMA_INVALID_ARGUMENT,
                 "%s: size is %zu, want sizeof the struct, %zu", name, size, known_size);
    FDMA_REQUIRE(size < 8192, FDMA_INVALID_ARGUMENT,
                 "%s: size is %zu, want at most %zu: the program was compiled with a later fdma.h "
                 "than this library, %s",
                 name, size, known_size, fdma_version());
    const uint8_t *const bytes = caller;
    for (size_t i = known_size; i < size; i++)
        FDMA_REQUIRE(bytes[i] == 0, FDMA_UNSUPPORTED,
                     "%s: size is %zu, want at most %zu, or zeros after these bytes: the program "
                     "was compiled with a later fdma.h than this library, %s",
                     name, size, known_size, fdma_version());
    const size_t copied = size < known_size ? size : known_size;
    memcpy(known, caller, copied);
    memset((char *)known + copied, 0, known_size - copied);
    return FDMA_OK;
}

static fdma_status check_reserved(const char *name, int32_t reserved) {
    FDMA_REQUIRE(reserved == 0, FDMA_INVALID_ARGUMENT, "%s: is %d, want 0", name, reserved);
    return FDMA_OK;
}

static fdma_status check_parallel(const fdma_parallel *given) {
    fdma_parallel parallel;
    if (given == NULL)
        return FDMA_OK;
    FDMA_TRY(fdma_copy_struct("exec.parallel", given, sizeof parallel, &parallel, sizeof parallel));
    FDMA_REQUIRE(parallel.run != NULL, FDMA_INVALID_ARGUMENT,
                 "exec.parallel: its run is NULL, want a function");
    return FDMA_OK;
}

static fdma_status check_exec(const fdma_exec *exec, check_depth depth) {
    FDMA_REQUIRE(exec->threads >= 0, FDMA_INVALID_ARGUMENT, "exec.threads: is %d, want 0 or more",
                 exec->threads);
    FDMA_REQUIRE(exec->device >= 0, FDMA_INVALID_ARGUMENT,
                 "exec.device: is %d, want FDMA_CPU or FDMA_CUDA(n)", exec->device);
    FDMA_TRY(check_reserved("exec.reserved", exec->reserved));
    FDMA_TRY(check_parallel(exec->parallel));
    FDMA_REQUIRE(depth == check_shapes || exec->workspace_size == 0 || exec->workspace != NULL,
                 FDMA_INVALID_ARGUMENT,
                 "exec.workspace: is NULL, want %zu bytes as exec.workspace_size says",
                 exec->workspace_size);
    return FDMA_OK;
}

static void take_tensors(fdma_problem *problem, const void *base, bool in_selection) {
    const tensor_table table = fdma_tensors[problem->operation];
    for (size_t t = 0; t < table.count; t++)
        if (table.entries[t].in_selection == in_selection)
            *problem_tensor(problem, &table.entries[t]) = *tensor_at(base, table.entries[t].offset);
}

/* Takes the tensors of a selection and, if it is an input, what it was made for. */
static fdma_status take_selection(fdma_selection *given, fdma_selection *selection,
                                  fdma_problem *problem) {
    FDMA_TRY(fdma_copy_struct("selection", given, offsetof(fdma_selection, gap), selection,
                              sizeof *selection));
    FDMA_TRY(check_reserved("selection.reserved", selection->reserved));
    take_tensors(problem, selection, true);
    problem->selected = true;
    if (problem->operation == operation_select || problem->operation == operation_attention) {
        FDMA_REQUIRE(problem->gap == 0 || has_gap_field(given), FDMA_INVALID_ARGUMENT,
                     "selection: size is %zu, want sizeof the struct, %zu, for a gap of %g",
                     given->size, sizeof *given, problem->gap);
        problem->made = given;
        return FDMA_OK;
    }
    FDMA_REQUIRE(selection->window >= 1, FDMA_INVALID_ARGUMENT,
                 "selection: its window is %lld, want 1 or more", (long long)selection->window);
    FDMA_REQUIRE(selection->scope == FDMA_SCOPE_CAUSAL || selection->scope == FDMA_SCOPE_GLOBAL,
                 FDMA_INVALID_ARGUMENT,
                 "selection: its scope is %d, want FDMA_SCOPE_CAUSAL or FDMA_SCOPE_GLOBAL",
                 (int)selection->scope);
    FDMA_REQUIRE(problem->causal || selection->scope == FDMA_SCOPE_GLOBAL, FDMA_INVALID_ARGUMENT,
                 "selection: its scope is causal, want global if causal is 0");
    FDMA_REQUIRE(selection->recent >= 0, FDMA_INVALID_ARGUMENT,
                 "selection: its recent is %lld, want 0 or more", (long long)selection->recent);
    set_rules(problem, selection->window, selection->recent, selection->sinks, selection->scope);
    FDMA_REQUIRE(selection->gap >= 0 && selection->gap < INFINITY, FDMA_INVALID_ARGUMENT,
                 "selection: its gap is %g, want a finite number, 0 or more", selection->gap);
    problem->gap = selection->gap;
    return FDMA_OK;
}

fdma_status fdma_check_call(fdma_operation operation, const void *caller, check_depth depth,
                            fdma_problem *problem) {
    const operation_entry *const entry = &operations[operation];
    any_args args;
    int32_t reserved = 0;
    fdma_selection *given = NULL, selection;
    FDMA_TRY(fdma_copy_struct(entry->args_name, caller, entry->exec + sizeof(fdma_exec), &args,
                              entry->size));
    *problem = (fdma_problem){.operation = operation};
    memcpy(&problem->exec, (const char *)&args + entry->exec, sizeof problem->exec);
    FDMA_TRY(check_exec(&problem->exec, depth));
    take_tensors(problem, &args, false);
    FDMA_TRY(entry->take_options(&args, problem));
    if (entry->reserved != 0)
        memcpy(&reserved, (const char *)&args + entry->reserved, sizeof reserved);
    FDMA_TRY(check_reserved("reserved", reserved));
    if (entry->selection != 0)
        memcpy(&given, (const char *)&args + entry->selection, sizeof given);
    if (given != NULL || entry->needs_selection)
        FDMA_TRY(take_selection(given, &selection, problem));
    FDMA_TRY(fdma_settle_problem(problem, depth));
    FDMA_REQUIRE(given == NULL || problem->made != NULL || selection.kv_len == problem->kv_len,
                 FDMA_INVALID_ARGUMENT, "selection: was made for kv_len %lld, want %lld",
                 (long long)selection.kv_len, (long long)problem->kv_len);
    return FDMA_OK;
}
