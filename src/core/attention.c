/* Splits a fused call into score, select and forward. */
#include "core/attention.h"

#include "core/checks.h"
#include "core/error.h"

/* A [batch, kv_heads, kv_len] tensor in the workspace. */
static fdma_tensor take_key_tensor(fdma_arena *arena, const fdma_tensor *v, fdma_dtype dtype) {
    const int64_t shape[] = {v->shape[0], v->shape[2], v->shape[1]};
    fdma_tensor tensor = fdma_dense_tensor(NULL, dtype, 3, shape);
    size_t bytes = fdma_dtype_size(dtype);
    for (int axis = 0; axis < 3; axis++)
        // sizes that overflow are refused when v is checked, before the bytes are used
        if (__builtin_mul_overflow(bytes, (size_t)shape[axis], &bytes))
            return tensor;
    tensor.data = fdma_arena_take(arena, bytes);
    return tensor;
}

fdma_tensor fdma_take_key_floats(fdma_arena *arena, const fdma_tensor *v) {
    return take_key_tensor(arena, v, v->dtype == FDMA_FLOAT64 ? FDMA_FLOAT64 : FDMA_FLOAT32);
}

static void take_tensors(const fdma_attention_args *args, fdma_arena *arena,
                         attention_steps *steps) {
    steps->score.score =
        is_present(&args->score) ? args->score : fdma_take_key_floats(arena, &args->v);
    steps->score.bias = args->bias;
    if (args->bias_form != FDMA_BIAS_NONE && !is_present(&args->bias))
        steps->score.bias = fdma_take_key_floats(arena, &args->v);
    if (args->selection == NULL) // a selection that is given has an expiry of its own
        steps->selection.expiry = take_key_tensor(arena, &args->v, FDMA_INT32);
    if (!is_present(&steps->selection.slot))
        steps->selection.slot = take_key_tensor(arena, &args->v, FDMA_INT32);
}

static void fill_steps(const fdma_attention_args *args, fdma_scope scope, attention_steps *steps) {
    steps->score.size = sizeof steps->score;
    steps->score.v = args->v;
    steps->score.dt_proj = args->dt_proj;
    steps->score.a = args->a;
    steps->score.key_valid = args->key_valid;
    steps->score.bias_form = args->bias_form;
    steps->select.size = sizeof steps->select;
    steps->select.score = steps->score.score;
    steps->select.key_valid = args->key_valid;
    steps->select.selection = &steps->selection;
    steps->select.window = args->window;
    steps->select.scope = scope;
    steps->forward = (fdma_forward_args){
        .size = sizeof steps->forward,
        .q = args->q,
        .k = args->k,
        .v = args->v,
        .bias = steps->score.bias,
        .key_valid = args->key_valid,
        .out = args->out,
        .lse = args->lse,
        .selection = &steps->selection,
        .scale = args->scale,
        .softcap = args->softcap,
        .causal = args->causal,
    };
    steps->selection.window = args->window;
    steps->selection.scope = scope;
    steps->selection.kv_len = args->v.shape[1];
}

size_t fdma_set_aside(fdma_exec *exec, const fdma_arena *arena) {
    if (arena->base != NULL && arena->used > 0) {
        const uintptr_t rest = (uintptr_t)arena->base + arena->used; // see fdma_arena_take()
        const size_t taken = (size_t)(rest - (uintptr_t)exec->workspace);
        exec->workspace = (void *)rest;
        exec->workspace_size = exec->workspace_size > taken ? exec->workspace_size - taken : 0;
    }
    return fdma_arena_size(arena);
}

fdma_status fdma_split_attention(const fdma_attention_args *caller, attention_steps *steps) {
    fdma_attention_args args;
    fdma_scope scope;
    FDMA_TRY(FDMA_COPY_ARGS(fdma_attention_args, caller, &args));
    FDMA_TRY(fdma_check_form("v", &args.v, 4, takes_floats));
    FDMA_TRY(fdma_check_reserved("reserved", args.reserved));
    FDMA_TRY(fdma_settle_scope(args.scope, args.causal != 0, &scope));
    FDMA_REQUIRE(args.causal || scope == FDMA_SCOPE_GLOBAL, FDMA_INVALID_ARGUMENT,
                 "scope: is FDMA_SCOPE_CAUSAL, want FDMA_SCOPE_GLOBAL where causal is 0");
    *steps = (attention_steps){.given = args.selection};
    steps->selection.size = sizeof steps->selection;
    if (args.selection != NULL)
        FDMA_TRY(fdma_copy_selection(args.selection, &steps->selection));
    fdma_arena arena = fdma_arena_of(&(fdma_problem){.exec = args.exec});
    take_tensors(&args, &arena, steps);
    fill_steps(&args, scope, steps);
    fdma_exec exec = args.exec;
    steps->scratch = fdma_set_aside(&exec, &arena);
    steps->score.exec = steps->select.exec = steps->forward.exec = exec;
    return FDMA_OK;
}

fdma_status fdma_check_attention_overlaps(const fdma_attention_args *args) {
    static const char *const unread[] = {NULL};
    return fdma_check_fused(operation_attention, args, args->selection, &args->exec, unread);
}
