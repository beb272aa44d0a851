/* test_errors_gradients.c - bad arguments of fdma_score_backward() and fdma_attention_backward():
 * the status, what the message names, and that nothing is written. */
#include "errors.h"

/* ---- score_backward ---- */

static fdma_score_backward_args right_score_backward(void) {
    fdma_score_backward_args args = {
        .size = sizeof args,
        .dbias = new_tensor(FDMA_FLOAT32, 2, 2, 10, -1),
        .v = new_tensor(FDMA_FLOAT16, 2, 10, 2, 16),
        .dt_proj = new_tensor(FDMA_FLOAT16, 2, 32, -1, -1),
        .a = new_tensor(FDMA_FLOAT32, 2, -1, -1, -1),
        .dv = new_output(FDMA_FLOAT16, 2, 10, 2, 16),
        .ddt_proj = new_output(FDMA_FLOAT16, 2, 32, -1, -1),
        .da = new_output(FDMA_FLOAT32, 2, -1, -1, -1),
    };
    exec_alloc(&args.exec, 8 << 20);
    return args;
}

static void score_size(fdma_score_backward_args *x) { x->size = 12; }
static void score_no_dbias(fdma_score_backward_args *x) { x->dbias = (fdma_tensor){0}; }
static void score_no_v(fdma_score_backward_args *x) { x->v = (fdma_tensor){0}; }
static void score_no_dt_proj(fdma_score_backward_args *x) { x->dt_proj = (fdma_tensor){0}; }
static void score_no_a(fdma_score_backward_args *x) { x->a = (fdma_tensor){0}; }
static void score_no_ddt_proj(fdma_score_backward_args *x) { x->ddt_proj = (fdma_tensor){0}; }
static void score_no_da(fdma_score_backward_args *x) { x->da = (fdma_tensor){0}; }
static void score_dbias_null(fdma_score_backward_args *x) { x->dbias.data = NULL; }
static void score_v_null(fdma_score_backward_args *x) { x->v.data = NULL; }
static void score_dt_proj_null(fdma_score_backward_args *x) { x->dt_proj.data = NULL; }
static void score_a_null(fdma_score_backward_args *x) { x->a.data = NULL; }
static void score_dv_null(fdma_score_backward_args *x) { x->dv.data = NULL; }
static void score_ddt_proj_null(fdma_score_backward_args *x) { x->ddt_proj.data = NULL; }
static void score_da_null(fdma_score_backward_args *x) { x->da.data = NULL; }
static void score_dbias_shape(fdma_score_backward_args *x) { x->dbias.shape[1] = 4; }
static void score_dv_shape(fdma_score_backward_args *x) { x->dv.shape[1] = 9; }
static void score_proj(fdma_score_backward_args *x) { x->dt_proj.shape[1] = 16; }
static void score_dproj(fdma_score_backward_args *x) { x->ddt_proj.shape[0] = 1; }
static void score_da_shape(fdma_score_backward_args *x) { x->da.shape[0] = 3; }
static void score_a_rank(fdma_score_backward_args *x) { x->a.rank = 2; }
static void score_dv_stride(fdma_score_backward_args *x) { x->dv.stride[3] = 3; }
static void score_dbias_dtype(fdma_score_backward_args *x) { x->dbias.dtype = FDMA_FLOAT16; }
static void score_dv_dtype(fdma_score_backward_args *x) { x->dv.dtype = FDMA_FLOAT32; }
static void score_ddt_proj_dtype(fdma_score_backward_args *x) { x->ddt_proj.dtype = FDMA_FLOAT32; }
static void score_da_dtype(fdma_score_backward_args *x) { x->da.dtype = FDMA_FLOAT16; }
static void score_form_none(fdma_score_backward_args *x) { x->bias_form = FDMA_BIAS_NONE; }
static void score_form(fdma_score_backward_args *x) { x->bias_form = (fdma_bias_form)9; }
static void score_dim(fdma_score_backward_args *x) {
    x->v = x->dv = new_output(FDMA_FLOAT16, 2, 10, 2, 12);
}
static void score_dv_is_v(fdma_score_backward_args *x) { x->dv.data = x->v.data; }
static void score_ddt_proj_is_dt_proj(fdma_score_backward_args *x) {
    x->ddt_proj.data = x->dt_proj.data;
}
static void score_da_is_a(fdma_score_backward_args *x) { x->da.data = x->a.data; }
static void score_da_is_dbias(fdma_score_backward_args *x) { x->da.data = x->dbias.data; }
static void score_valid(fdma_score_backward_args *x) {
    x->key_valid = new_tensor(FDMA_UINT8, 2, 9, -1, -1);
}
static void score_threads(fdma_score_backward_args *x) { x->exec.threads = -1; }
static void score_kernel(fdma_score_backward_args *x) { x->exec.kernel = "gpu"; }
static void score_workspace(fdma_score_backward_args *x) { x->exec.workspace = NULL; }

static const struct {
    const char *name;
    void (*spoil)(fdma_score_backward_args *);
    expectation want;
} score_backward_cases[] = {
    {"size 12", score_size, {FDMA_INVALID_ARGUMENT, {"size", "12"}, 0}},
    {"no dbias", score_no_dbias, {FDMA_INVALID_ARGUMENT, {"dbias"}, 0}},
    {"no v", score_no_v, {FDMA_INVALID_ARGUMENT, {"v"}, 0}},
    {"no dt_proj", score_no_dt_proj, {FDMA_INVALID_ARGUMENT, {"dt_proj"}, 0}},
    {"no a", score_no_a, {FDMA_INVALID_ARGUMENT, {"a"}, 0}},
    {"no ddt_proj", score_no_ddt_proj, {FDMA_INVALID_ARGUMENT, {"ddt_proj"}, 0}},
    {"no da", score_no_da, {FDMA_INVALID_ARGUMENT, {"da"}, 0}},
    {"dbias NULL", score_dbias_null, {FDMA_INVALID_ARGUMENT, {"dbias"}, 1}},
    {"v NULL", score_v_null, {FDMA_INVALID_ARGUMENT, {"v"}, 1}},
    {"dt_proj NULL", score_dt_proj_null, {FDMA_INVALID_ARGUMENT, {"dt_proj"}, 1}},
    {"a NULL", score_a_null, {FDMA_INVALID_ARGUMENT, {"a"}, 1}},
    {"dv NULL", score_dv_null, {FDMA_INVALID_ARGUMENT, {"dv"}, 1}},
    {"ddt_proj NULL", score_ddt_proj_null, {FDMA_INVALID_ARGUMENT, {"ddt_proj"}, 1}},
    {"da NULL", score_da_null, {FDMA_INVALID_ARGUMENT, {"da"}, 1}},
    {"heads of dbias", score_dbias_shape, {FDMA_INVALID_ARGUMENT, {"dbias", "4", "2"}, 0}},
    {"length of dv", score_dv_shape, {FDMA_INVALID_ARGUMENT, {"dv", "9", "10"}, 0}},
    {"dt_proj too narrow", score_proj, {FDMA_INVALID_ARGUMENT, {"dt_proj", "16", "32"}, 0}},
    {"ddt_proj of one head", score_dproj, {FDMA_INVALID_ARGUMENT, {"ddt_proj", "1", "2"}, 0}},
    {"da of three heads", score_da_shape, {FDMA_INVALID_ARGUMENT, {"da", "3", "2"}, 0}},
    {"a of rank 2", score_a_rank, {FDMA_INVALID_ARGUMENT, {"a", "2", "1"}, 0}},
    {"last stride of dv", score_dv_stride, {FDMA_INVALID_ARGUMENT, {"dv", "3", "1"}, 0}},
    {"dbias in float16", score_dbias_dtype, {FDMA_UNSUPPORTED, {"dbias"}, 0}},
    {"dv in float32", score_dv_dtype, {FDMA_UNSUPPORTED, {"dv"}, 0}},
    {"ddt_proj in float32", score_ddt_proj_dtype, {FDMA_UNSUPPORTED, {"ddt_proj"}, 0}},
    {"da in float16", score_da_dtype, {FDMA_UNSUPPORTED, {"da"}, 0}},
    {"FDMA_BIAS_NONE", score_form_none, {FDMA_INVALID_ARGUMENT, {"bias_form"}, 0}},
    {"bias_form 9", score_form, {FDMA_INVALID_ARGUMENT, {"bias_form", "9"}, 0}},
    {"head_dim 12", score_dim, {FDMA_UNSUPPORTED, {"head_dim", "12", "256"}, 0}},
    {"dv is v", score_dv_is_v, {FDMA_INVALID_ARGUMENT, {"dv", "v"}, 1}},
    {"ddt_proj is dt_proj",
     score_ddt_proj_is_dt_proj,
     {FDMA_INVALID_ARGUMENT, {"ddt_proj", "dt_proj"}, 1}},
    {"da is a", score_da_is_a, {FDMA_INVALID_ARGUMENT, {"da", "a"}, 1}},
    {"da is dbias", score_da_is_dbias, {FDMA_INVALID_ARGUMENT, {"da", "dbias"}, 1}},
    {"length of key_valid", score_valid, {FDMA_INVALID_ARGUMENT, {"key_valid", "9", "10"}, 0}},
    {"-1 threads", score_threads, {FDMA_INVALID_ARGUMENT, {"threads", "-1"}, 0}},
    {"unknown kernel", score_kernel, {FDMA_UNSUPPORTED, {"kernel", "gpu"}, 0}},
    {"workspace NULL", score_workspace, {FDMA_INVALID_ARGUMENT, {"workspace"}, 1}},
};

static void score_backward_rejects(void) {
    for (int i = 0; i < TEST_COUNT(score_backward_cases); i++) {
        const expectation *want = &score_backward_cases[i].want;
        test_context("score_backward: %s", score_backward_cases[i].name);
        fdma_score_backward_args args = right_score_backward();
        CHECK_OK(fdma_score_backward(&args));
        const call_outputs to = {{args.dv, args.ddt_proj, args.da}, 3};
        fill_outputs(&to);
        score_backward_cases[i].spoil(&args);
        query_answers found = unanswered;
        check_status(fdma_score_backward(&args), want);
        check_query(fdma_score_backward_workspace(&args, &found.bytes), want);
        check_query(fdma_score_backward_kernel(&args, &found.name), want);
        check_answers(&found, want);
        check_outputs(&to);
        test_free_all();
    }
}

/* ---- attention_backward ---- */

static fdma_attention_backward_args right_attention_backward(fdma_selection *selection) {
    make_selection(selection);
    selection->slot = (fdma_tensor){0};
    fdma_attention_backward_args args = {
        .size = sizeof args,
        .dout = new_tensor(FDMA_FLOAT16, 2, 10, 4, 16),
        .out = new_tensor(FDMA_FLOAT16, 2, 10, 4, 16),
        .lse = new_tensor(FDMA_FLOAT32, 2, 4, 10, -1),
        .q = new_tensor(FDMA_FLOAT16, 2, 10, 4, 16),
        .k = new_tensor(FDMA_FLOAT16, 2, 10, 2, 16),
        .v = new_tensor(FDMA_FLOAT16, 2, 10, 2, 16),
        .dt_proj = new_tensor(FDMA_FLOAT16, 2, 32, -1, -1),
        .a = new_tensor(FDMA_FLOAT32, 2, -1, -1, -1),
        .dq = new_output(FDMA_FLOAT16, 2, 10, 4, 16),
        .dk = new_output(FDMA_FLOAT16, 2, 10, 2, 16),
        .dv = new_output(FDMA_FLOAT16, 2, 10, 2, 16),
        .ddt_proj = new_output(FDMA_FLOAT16, 2, 32, -1, -1),
        .da = new_output(FDMA_FLOAT32, 2, -1, -1, -1),
        .selection = selection,
        .causal = 1,
    };
    exec_alloc(&args.exec, 8 << 20);
    return args;
}

static void whole_size(fdma_attention_backward_args *x) { x->size = 4; }
static void whole_no_selection(fdma_attention_backward_args *x) { x->selection = NULL; }
static void whole_no_dout(fdma_attention_backward_args *x) { x->dout = (fdma_tensor){0}; }
static void whole_no_out(fdma_attention_backward_args *x) { x->out = (fdma_tensor){0}; }
static void whole_no_lse(fdma_attention_backward_args *x) { x->lse = (fdma_tensor){0}; }
static void whole_no_q(fdma_attention_backward_args *x) { x->q = (fdma_tensor){0}; }
static void whole_no_k(fdma_attention_backward_args *x) { x->k = (fdma_tensor){0}; }
static void whole_no_v(fdma_attention_backward_args *x) { x->v = (fdma_tensor){0}; }
static void whole_no_dt_proj(fdma_attention_backward_args *x) { x->dt_proj = (fdma_tensor){0}; }
static void whole_no_a(fdma_attention_backward_args *x) { x->a = (fdma_tensor){0}; }
static void whole_no_dq(fdma_attention_backward_args *x) { x->dq = (fdma_tensor){0}; }
static void whole_no_dk(fdma_attention_backward_args *x) { x->dk = (fdma_tensor){0}; }
static void whole_no_dv(fdma_attention_backward_args *x) { x->dv = (fdma_tensor){0}; }
static void whole_no_ddt_proj(fdma_attention_backward_args *x) { x->ddt_proj = (fdma_tensor){0}; }
static void whole_no_da(fdma_attention_backward_args *x) { x->da = (fdma_tensor){0}; }
static void whole_dout_null(fdma_attention_backward_args *x) { x->dout.data = NULL; }
static void whole_lse_null(fdma_attention_backward_args *x) { x->lse.data = NULL; }
static void whole_q_null(fdma_attention_backward_args *x) { x->q.data = NULL; }
static void whole_v_null(fdma_attention_backward_args *x) { x->v.data = NULL; }
static void whole_dq_null(fdma_attention_backward_args *x) { x->dq.data = NULL; }
static void whole_dv_null(fdma_attention_backward_args *x) { x->dv.data = NULL; }
static void whole_ddt_proj_null(fdma_attention_backward_args *x) { x->ddt_proj.data = NULL; }
static void whole_da_null(fdma_attention_backward_args *x) { x->da.data = NULL; }
static void whole_out_shape(fdma_attention_backward_args *x) { x->out.shape[1] = 9; }
static void whole_lse_shape(fdma_attention_backward_args *x) { x->lse.shape[1] = 2; }
static void whole_scope(fdma_attention_backward_args *x) { x->causal = 0; }
static void whole_scale(fdma_attention_backward_args *x) { x->scale = -1; }
static void whole_softcap(fdma_attention_backward_args *x) { x->softcap = (double)INFINITY; }
static void whole_form(fdma_attention_backward_args *x) { x->bias_form = (fdma_bias_form)5; }
static void whole_form_none(fdma_attention_backward_args *x) { x->bias_form = FDMA_BIAS_NONE; }
static void whole_form_bias(fdma_attention_backward_args *x) {
    x->bias_form = FDMA_BIAS_NONE;
    x->ddt_proj = x->da = (fdma_tensor){0};
    x->bias = new_tensor(FDMA_FLOAT32, 2, 2, 10, -1);
}
static void whole_bias_shape(fdma_attention_backward_args *x) {
    x->bias = new_tensor(FDMA_FLOAT32, 2, 4, 10, -1);
}
static void whole_heads(fdma_attention_backward_args *x) { x->q.shape[2] = 3; }
static void whole_dk_dtype(fdma_attention_backward_args *x) { x->dk.dtype = FDMA_BFLOAT16; }
static void whole_dq_is_q(fdma_attention_backward_args *x) { x->dq.data = x->q.data; }
static void whole_dv_is_v(fdma_attention_backward_args *x) { x->dv.data = x->v.data; }
static void whole_dk_is_dv(fdma_attention_backward_args *x) { x->dk.data = x->dv.data; }
static void whole_da_is_a(fdma_attention_backward_args *x) { x->da.data = x->a.data; }
static void whole_da_is_dq(fdma_attention_backward_args *x) { x->da.data = x->dq.data; }
static void whole_ddt_proj_is_k(fdma_attention_backward_args *x) { x->ddt_proj.data = x->k.data; }
static void whole_ddt_proj_is_dt_proj(fdma_attention_backward_args *x) {
    x->ddt_proj.data = x->dt_proj.data;
}
static void whole_kernel(fdma_attention_backward_args *x) { x->exec.kernel = "gpu"; }
static void whole_threads(fdma_attention_backward_args *x) { x->exec.threads = INT32_MIN; }
static void whole_workspace(fdma_attention_backward_args *x) { x->exec.workspace = NULL; }

static const struct {
    const char *name;
    void (*spoil)(fdma_attention_backward_args *);
    expectation want;
} attention_backward_cases[] = {
    {"size 4", whole_size, {FDMA_INVALID_ARGUMENT, {"size", "4"}, 0}},
    {"no selection", whole_no_selection, {FDMA_INVALID_ARGUMENT, {"selection"}, 0}},
    {"no dout", whole_no_dout, {FDMA_INVALID_ARGUMENT, {"dout"}, 0}},
    {"no out", whole_no_out, {FDMA_INVALID_ARGUMENT, {"out"}, 0}},
    {"no lse", whole_no_lse, {FDMA_INVALID_ARGUMENT, {"lse"}, 0}},
    {"no q", whole_no_q, {FDMA_INVALID_ARGUMENT, {"q"}, 0}},
    {"no k", whole_no_k, {FDMA_INVALID_ARGUMENT, {"k"}, 0}},
    {"no v", whole_no_v, {FDMA_INVALID_ARGUMENT, {"v"}, 0}},
    {"no dt_proj", whole_no_dt_proj, {FDMA_INVALID_ARGUMENT, {"dt_proj"}, 0}},
    {"no a", whole_no_a, {FDMA_INVALID_ARGUMENT, {"a"}, 0}},
    {"no dq", whole_no_dq, {FDMA_INVALID_ARGUMENT, {"dq"}, 0}},
    {"no dk", whole_no_dk, {FDMA_INVALID_ARGUMENT, {"dk"}, 0}},
    {"no dv", whole_no_dv, {FDMA_INVALID_ARGUMENT, {"dv"}, 0}},
    {"no ddt_proj", whole_no_ddt_proj, {FDMA_INVALID_ARGUMENT, {"ddt_proj"}, 0}},
    {"no da", whole_no_da, {FDMA_INVALID_ARGUMENT, {"da"}, 0}},
    {"dout NULL", whole_dout_null, {FDMA_INVALID_ARGUMENT, {"dout"}, 1}},
    {"lse NULL", whole_lse_null, {FDMA_INVALID_ARGUMENT, {"lse"}, 1}},
    {"q NULL", whole_q_null, {FDMA_INVALID_ARGUMENT, {"q"}, 1}},
    {"v NULL", whole_v_null, {FDMA_INVALID_ARGUMENT, {"v"}, 1}},
    {"dq NULL", whole_dq_null, {FDMA_INVALID_ARGUMENT, {"dq"}, 1}},
    {"dv NULL", whole_dv_null, {FDMA_INVALID_ARGUMENT, {"dv"}, 1}},
    {"ddt_proj NULL", whole_ddt_proj_null, {FDMA_INVALID_ARGUMENT, {"ddt_proj"}, 1}},
    {"da NULL", whole_da_null, {FDMA_INVALID_ARGUMENT, {"da"}, 1}},
    {"length of out", whole_out_shape, {FDMA_INVALID_ARGUMENT, {"out", "9", "10"}, 0}},
    {"heads of lse", whole_lse_shape, {FDMA_INVALID_ARGUMENT, {"lse", "2", "4"}, 0}},
    {"not causal, causal scope", whole_scope, {FDMA_INVALID_ARGUMENT, {"scope"}, 0}},
    {"scale -1", whole_scale, {FDMA_INVALID_ARGUMENT, {"scale", "-1"}, 0}},
    {"softcap inf", whole_softcap, {FDMA_INVALID_ARGUMENT, {"softcap", "inf"}, 0}},
    {"bias_form 5", whole_form, {FDMA_INVALID_ARGUMENT, {"bias_form", "5"}, 0}},
    {"gradients of scores that only rank",
     whole_form_none,
     {FDMA_INVALID_ARGUMENT, {"bias_form", "ddt_proj"}, 0}},
    {"bias without form", whole_form_bias, {FDMA_INVALID_ARGUMENT, {"bias_form", "bias"}, 0}},
    {"bias for each query head", whole_bias_shape, {FDMA_INVALID_ARGUMENT, {"bias", "4", "2"}, 0}},
    {"3 query heads", whole_heads, {FDMA_INVALID_ARGUMENT, {"q_heads", "3", "2"}, 0}},
    {"dk in bfloat16", whole_dk_dtype, {FDMA_UNSUPPORTED, {"dk"}, 0}},
    {"dq is q", whole_dq_is_q, {FDMA_INVALID_ARGUMENT, {"dq", "q"}, 1}},
    {"dv is v", whole_dv_is_v, {FDMA_INVALID_ARGUMENT, {"dv", "v"}, 1}},
    {"dk is dv", whole_dk_is_dv, {FDMA_INVALID_ARGUMENT, {"dk", "dv"}, 1}},
    {"da is a", whole_da_is_a, {FDMA_INVALID_ARGUMENT, {"da", "a"}, 1}},
    {"da is dq", whole_da_is_dq, {FDMA_INVALID_ARGUMENT, {"da", "dq"}, 1}},
    {"ddt_proj is k", whole_ddt_proj_is_k, {FDMA_INVALID_ARGUMENT, {"ddt_proj", "k"}, 1}},
    {"ddt_proj is dt_proj",
     whole_ddt_proj_is_dt_proj,
     {FDMA_INVALID_ARGUMENT, {"ddt_proj", "dt_proj"}, 1}},
    {"unknown kernel", whole_kernel, {FDMA_UNSUPPORTED, {"kernel", "gpu"}, 0}},
    {"-2^31 threads", whole_threads, {FDMA_INVALID_ARGUMENT, {"threads", "-2147483648"}, 0}},
    {"workspace NULL", whole_workspace, {FDMA_INVALID_ARGUMENT, {"workspace"}, 1}},
};

static void attention_backward_rejects(void) {
    for (int i = 0; i < TEST_COUNT(attention_backward_cases); i++) {
        const expectation *want = &attention_backward_cases[i].want;
        test_context("attention_backward: %s", attention_backward_cases[i].name);
        fdma_selection selection;
        fdma_attention_backward_args args = right_attention_backward(&selection);
        CHECK_OK(fdma_attention_backward(&args));
        const call_outputs to = {{args.dq, args.dk, args.dv, args.ddt_proj, args.da}, 5};
        fill_outputs(&to);
        attention_backward_cases[i].spoil(&args);
        query_answers found = unanswered;
        check_status(fdma_attention_backward(&args), want);
        check_query(fdma_attention_backward_workspace(&args, &found.bytes), want);
        check_answers(&found, want);
        check_outputs(&to);
        test_free_all();
    }
}

static void attend_without_bias(fdma_attention_backward_args *args) {
    args->bias_form = FDMA_BIAS_NONE;
    args->ddt_proj = args->da = (fdma_tensor){0};
    CHECK_OK(fdma_attention_backward(args));
}

/* With FDMA_BIAS_NONE nobody looks at dt_proj and a, whatever they hold. */
static void weights_that_nobody_looks_at(void) {
    fdma_selection selection;
    fdma_attention_backward_args args = right_attention_backward(&selection);
    args.dt_proj.data = args.dq.data;
    args.a.data = args.dk.data;
    attend_without_bias(&args);
    args.dt_proj.rank = INT32_MAX;
    args.a.rank = -1;
    args.a.dtype = (fdma_dtype)99;
    attend_without_bias(&args);
}

/* The fused call's own part of the workspace may not overlap its tensors either. */
static void workspace_on_tensors(void) {
    fdma_selection selection;
    fdma_attention_backward_args args = right_attention_backward(&selection);
    CHECK_OK(fdma_attention_backward(&args));
    args.exec.workspace = args.dout.data;
    CHECK_INT(fdma_attention_backward(&args), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), "exec.workspace");
    CHECK_WORD(fdma_last_error(), "dout");
}

/* One byte less than is asked for. */
static void calls_want_their_workspace(void) {
    size_t bytes = 0;
    fdma_selection selection;
    fdma_attention_backward_args whole = right_attention_backward(&selection);
    CHECK_OK(fdma_attention_backward_workspace(&whole, &bytes));
    CHECK(bytes > 0);
    const call_outputs to = {{whole.dq, whole.dk, whole.dv, whole.ddt_proj, whole.da}, 5};
    fill_outputs(&to);
    whole.exec.workspace_size = bytes - 1;
    CHECK_INT(fdma_attention_backward(&whole), FDMA_WORKSPACE_TOO_SMALL);
    check_outputs(&to);
    whole.exec.workspace_size = bytes;
    CHECK_OK(fdma_attention_backward(&whole));

    fdma_score_backward_args score = right_score_backward();
    CHECK_OK(fdma_score_backward_workspace(&score, &bytes));
    const call_outputs of_score = {{score.dv, score.ddt_proj, score.da}, 3};
    fill_outputs(&of_score);
    if (bytes > 0) {
        score.exec.workspace_size = bytes - 1;
        CHECK_INT(fdma_score_backward(&score), FDMA_WORKSPACE_TOO_SMALL);
    }
    check_outputs(&of_score);
}

static const test_entry tests[] = {
    TEST(score_backward_rejects),     TEST(attention_backward_rejects),
    TEST(calls_want_their_workspace), TEST(weights_that_nobody_looks_at),
    TEST(workspace_on_tensors),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
