/* Splits a fused call: fdma_attention() into score, select and forward; fdma_attention_backward()
 * into score (unless the bias is given), backward and score_backward, or, with FDMA_BIAS_NONE,
 * backward alone. Splits fdma_decode() without a given score into score and decode, unless the
 * kernels of decode compute the scores themselves. */
#include "core/steps.h"

#include "core/adapter.h"
#include "core/checks.h"
#include "core/error.h"
#include "core/integers.h"
#include "core/signatures.h"

/* A [batch, kv_heads, len] tensor in the workspace. */
static fdma_tensor take_key_tensor(fdma_arena *arena, const fdma_problem *whole, int64_t len,
                                   fdma_dtype dtype) {
    const int64_t count = whole->batch * whole->kv_heads * len;
    void *const data = fdma_arena_take(arena, (size_t)count * fdma_dtype_size(dtype));
    return fdma_tensor_3d(data, dtype, whole->batch, whole->kv_heads, len);
}

fdma_tensor fdma_take_key_floats(fdma_arena *arena, const fdma_problem *whole) {
    const bool wide = whole->dtype == FDMA_FLOAT64;
    return take_key_tensor(arena, whole, whole->new_len, wide ? FDMA_FLOAT64 : FDMA_FLOAT32);
}

fdma_tensor fdma_take_key_ints(fdma_arena *arena, const fdma_problem *whole) {
    return take_key_tensor(arena, whole, whole->kv_len, FDMA_INT32);
}

/* Adds last_keys. A record has 8 bytes, as expiry and slot of a key have together. The records take
 * the memory of expiry and slot, because a call needs either the one or the other. */
static void add_last_keys(fdma_arena *arena, fdma_problem *whole) {
    const int64_t b = whole->batch, g = whole->kv_heads, n = whole->kv_len;
    const int64_t most = whole->slots < n ? whole->slots + whole->q_len - 1 : n;
    int32_t *const numbers = fdma_arena_take(arena, (size_t)(b * g * n) * 2 * sizeof(int32_t));
    int32_t *const slots = numbers == NULL ? NULL : numbers + b * g * n;
    whole->expiry = fdma_tensor_3d(numbers, FDMA_INT32, b, g, n);
    whole->slot = fdma_tensor_3d(slots, FDMA_INT32, b, g, n);
    whole->fused.last_keys.record = fdma_tensor_4d(numbers, FDMA_INT32, b, g, n, 2);
    whole->fused.last_keys.list = take_key_tensor(arena, whole, round_up(most, 4), FDMA_INT32);
    whole->fused.last_keys.count = take_key_tensor(arena, whole, 2, FDMA_INT32);
}

/* Adds the tensors between the steps that the caller did not give. */
static void add_scratch(const kernel_backend *backend, fdma_arena *arena, fdma_problem *whole) {
    const bool forward = whole->operation == operation_attention;
    const bool has_bias = whole->bias_form != FDMA_BIAS_NONE;
    if (forward && !is_present(&whole->score))
        whole->score = fdma_take_key_floats(arena, whole);
    if (has_bias && !is_present(&whole->bias))
        whole->bias = fdma_take_key_floats(arena, whole);
    if (!forward && has_bias)
        whole->dbias = fdma_take_key_floats(arena, whole);
    if (whole->fused.last_positions > 0 && backend->writes_last_keys)
        add_last_keys(arena, whole);
    if (forward && !is_present(&whole->expiry))
        whole->expiry = fdma_take_key_ints(arena, whole);
    if (forward && !is_present(&whole->slot))
        whole->slot = fdma_take_key_ints(arena, whole);
}

/* Number of last positions at which a call reads its selection; 0: all. A call needs the whole
 * selection if the caller asks for it, or if there are tables of carried keys. */
static int64_t last_positions_of(const fdma_problem *whole) {
    enum { most_queries = 16 }; // as many as kernels for few queries take
    const bool is_scratch = !is_present(&whole->expiry) && !is_present(&whole->slot);
    const bool is_causal = whole->causal && whole->scope == FDMA_SCOPE_CAUSAL;
    const bool is_few = whole->operation == operation_attention && whole->q_len <= most_queries;
    const bool is_whole = !has_table(whole) && whole->carried_len == 0;
    return is_scratch && is_causal && is_few && is_whole && whole->kv_len > 0 ? whole->q_len : 0;
}

fdma_status fdma_add_step(call_steps *steps, const fdma_problem *whole, fdma_operation operation) {
    fdma_problem *const step = &steps->split[steps->count++];
    const tensor_table table = fdma_tensors[operation];
    *step = (fdma_problem){
        .operation = operation,
        .window = whole->window,
        .recent = whole->recent,
        .sinks = whole->sinks,
        .gap = whole->gap,
        .fused = whole->fused,
        .slots = whole->slots,
        .scale = whole->scale,
        .softcap = whole->softcap,
        .dropout = whole->dropout,
        .scope = whole->scope,
        .bias_form = whole->bias_form,
        .causal = whole->causal,
        .selected = true,
        .deterministic = whole->deterministic,
        .accumulate = whole->accumulate,
        .add_dsinks = whole->add_dsinks,
        .add_dbias_carried = whole->add_dbias_carried,
        .made = whole->made,
        .cache = whole->cache,
        .exec = whole->exec,
    };
    for (size_t t = 0; t < table.count; t++)
        *problem_tensor(step, &table.entries[t]) = *tensor_at(whole, table.entries[t].member);
    if (is_attending(operation) && is_present(&whole->k_carried))
        step->key_valid = (fdma_tensor){0}; // the selection excludes the keys that are not valid
    if (operation == operation_select && is_present(&whole->fused.last_keys.list))
        step->bias = whole->bias;
    return fdma_settle_problem(step, check_shapes);
}

static fdma_status split_fused(const kernel_backend *backend, call_steps *steps) {
    fdma_problem *const whole = &steps->whole;
    fdma_arena arena = fdma_arena_of(whole);
    const bool has_bias = whole->bias_form != FDMA_BIAS_NONE;
    const bool needs_score = has_bias && !is_present(&whole->bias);
    whole->fused.last_positions = last_positions_of(whole);
    add_scratch(backend, &arena, whole);
    fdma_set_aside(&whole->exec, &arena);
    steps->scratch = fdma_arena_size(&arena);
    steps->problems = steps->split;
    steps->count = 0;
    if (whole->operation == operation_attention) {
        FDMA_TRY(fdma_add_step(steps, whole, operation_score));
        FDMA_TRY(fdma_add_step(steps, whole, operation_select));
        FDMA_TRY(fdma_add_step(steps, whole, operation_forward));
        steps->problems[1].fused.forward = &steps->problems[2];
        return FDMA_OK;
    }
    if (needs_score)
        FDMA_TRY(fdma_add_step(steps, whole, operation_score));
    FDMA_TRY(fdma_add_step(steps, whole, operation_backward));
    return has_bias ? fdma_add_step(steps, whole, operation_score_backward) : FDMA_OK;
}

/* The steps of fdma_decode() without a given score, for kernels that do not compute it. */
static fdma_status split_decode(call_steps *steps) {
    fdma_problem *const whole = &steps->whole;
    fdma_arena arena = fdma_arena_of(whole);
    whole->score = fdma_take_key_floats(&arena, whole);
    fdma_set_aside(&whole->exec, &arena);
    steps->scratch = fdma_arena_size(&arena);
    steps->problems = steps->split;
    steps->count = 0;
    FDMA_TRY(fdma_add_step(steps, whole, operation_score));
    whole->dt_proj = whole->a = whole->dt_bias = (fdma_tensor){0}; // already in the score
    return fdma_add_step(steps, whole, operation_decode);
}

fdma_status fdma_split_call(const kernel_backend *backend, call_steps *steps) {
    const fdma_operation operation = steps->whole.operation;
    steps->problems = &steps->whole;
    steps->count = 1;
    steps->lent = steps->whole.exec.workspace_size;
    steps->scratch = 0;
    if (operation == operation_decode && !is_present(&steps->whole.score) &&
        !backend->scores_tokens)
        return split_decode(steps);
    return is_fused(operation) ? split_fused(backend, steps) : FDMA_OK;
}

void fdma_link_select(const fdma_kernel *select, call_steps *steps) {
    for (int i = 0; i < steps->count; i++) {
        fdma_problem *const step = &steps->problems[i];
        if (!has_trait(select, trait_writes_last_keys))
            step->fused.last_keys = (fdma_last_keys){0};
        step->fused.plan_is_made =
            step->operation == operation_forward && has_trait(select, trait_writes_plan);
    }
}
