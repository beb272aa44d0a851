/* Splits a fused backward call into score, backward and score_backward. */
#include "core/attention.h"
#include "core/checks.h"
#include "core/error.h"

static void fill_score_steps(const fdma_attention_backward_args *args, backward_steps *steps) {
    steps->score = (fdma_score_args){
        .size = sizeof steps->score,
        .v = args->v,
        .dt_proj = args->dt_proj,
        .a = args->a,
        .key_valid = args->key_valid,
        .bias = steps->needs_score ? steps->bias : (fdma_tensor){0},
        .bias_form = args->bias_form,
    };
    steps->score_backward = (fdma_score_backward_args){
        .size = sizeof steps->score_backward,
        .dbias = steps->dbias,
        .v = args->v,
        .dt_proj = args->dt_proj,
        .a = args->a,
        .key_valid = args->key_valid,
        .dv = args->dv,
        .ddt_proj = args->ddt_proj,
        .da = args->da,
        .bias_form = args->bias_form,
        .accumulate = args->accumulate,
    };
}

static void fill_backward_step(const fdma_attention_backward_args *args, backward_steps *steps) {
    steps->backward = (fdma_backward_args){
        .size = sizeof steps->backward,
        .dout = args->dout,
        .dlse = args->dlse,
        .out = args->out,
        .lse = args->lse,
        .q = args->q,
        .k = args->k,
        .v = args->v,
        .bias = steps->bias,
        .key_valid = args->key_valid,
        .dq = args->dq,
        .dk = args->dk,
        .dv = args->dv,
        .dbias = steps->dbias,
        .selection = args->selection,
        .scale = args->scale,
        .softcap = args->softcap,
        .causal = args->causal,
        .deterministic = args->deterministic,
        .accumulate = args->accumulate,
    };
}

static fdma_status check_form_fields(const fdma_attention_backward_args *args) {
    FDMA_REQUIRE(args->selection != NULL, FDMA_INVALID_ARGUMENT,
                 "selection: is NULL, want fdma_attention()'s");
    FDMA_REQUIRE((unsigned)args->bias_form <= FDMA_BIAS_NONE, FDMA_INVALID_ARGUMENT,
                 "bias_form: is %d, want one of fdma_bias_form", (int)args->bias_form);
    const bool none = args->bias_form == FDMA_BIAS_NONE;
    FDMA_REQUIRE(
        !none || !(is_present(&args->ddt_proj) || is_present(&args->da) || is_present(&args->bias)),
        FDMA_INVALID_ARGUMENT,
        "bias_form: is FDMA_BIAS_NONE, want neither bias nor ddt_proj nor da");
    return FDMA_OK;
}

fdma_status fdma_split_attention_backward(const fdma_attention_backward_args *caller,
                                          backward_steps *steps) {
    fdma_attention_backward_args args;
    FDMA_TRY(FDMA_COPY_ARGS(fdma_attention_backward_args, caller, &args));
    FDMA_TRY(fdma_check_form("v", &args.v, 4, takes_floats));
    FDMA_TRY(check_form_fields(&args));
    const bool learns = args.bias_form != FDMA_BIAS_NONE;
    *steps = (backward_steps){
        .learns = learns,
        .needs_score = learns && !is_present(&args.bias),
        .bias = args.bias,
    };
    fdma_arena arena = fdma_arena_of(&(fdma_problem){.exec = args.exec});
    if (steps->needs_score)
        steps->bias = fdma_take_key_floats(&arena, &args.v);
    if (learns)
        steps->dbias = fdma_take_key_floats(&arena, &args.v);
    fill_score_steps(&args, steps);
    fill_backward_step(&args, steps);
    fdma_exec exec = args.exec;
    steps->scratch = fdma_set_aside(&exec, &arena);
    steps->score.exec = steps->backward.exec = steps->score_backward.exec = exec;
    return FDMA_OK;
}

fdma_status fdma_check_attention_backward_overlaps(const fdma_attention_backward_args *args) {
    static const char *const without_bias[] = {"dt_proj", "a", NULL};
    const bool learns = args->bias_form != FDMA_BIAS_NONE;
    return fdma_check_fused(operation_attention_backward, args, args->selection, &args->exec,
                            learns ? without_bias + 2 : without_bias);
}
