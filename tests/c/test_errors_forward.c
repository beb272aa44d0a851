/* test_errors_forward.c - bad arguments of fdma_forward() and fdma_attention(): the status, what
 * the message names, and that nothing is written. */
#include "errors.h"

/* ---- forward ---- */

typedef struct forward_call {
    fdma_forward_args args;
    fdma_selection selection;
} forward_call;

static void make_call(forward_call *x) {
    make_selection(&x->selection);
    x->args = (fdma_forward_args){
        .size = sizeof x->args,
        .q = new_tensor(FDMA_FLOAT32, 2, 7, 4, 16),
        .k = new_tensor(FDMA_FLOAT32, 2, 10, 2, 16),
        .v = new_tensor(FDMA_FLOAT32, 2, 10, 2, 16),
        .bias = new_tensor(FDMA_FLOAT32, 2, 2, 10, -1),
        .out = new_output(FDMA_FLOAT32, 2, 7, 4, 16),
        .lse = new_output(FDMA_FLOAT32, 2, 4, 7, -1),
        .selection = &x->selection,
        .causal = 1,
    };
    exec_alloc(&x->args.exec, 8 << 20);
}

static void size_0(forward_call *x) { x->args.size = 0; }
static void no_q(forward_call *x) { x->args.q = (fdma_tensor){0}; }
static void q_null(forward_call *x) { x->args.q.data = NULL; }
static void k_null(forward_call *x) { x->args.k.data = NULL; }
static void out_null(forward_call *x) { x->args.out.data = NULL; }
static void no_out(forward_call *x) { x->args.out = (fdma_tensor){0}; }
static void lse_null(forward_call *x) { x->args.lse.data = NULL; }
static void bias_null(forward_call *x) { x->args.bias.data = NULL; }
static void q_odd(forward_call *x) { x->args.q.data = (char *)x->args.q.data + 2; }
static void out_odd(forward_call *x) { x->args.out.data = (char *)x->args.out.data + 1; }
static void expiry_odd(forward_call *x) {
    x->selection.expiry.data = (char *)x->selection.expiry.data + 1;
}
static void q_rank(forward_call *x) { x->args.q.rank = 5; }
static void q_rank_negative(forward_call *x) { x->args.q.rank = -1; }
static void k_stride(forward_call *x) { x->args.k.stride[3] = 2; }
static void v_stride(forward_call *x) { x->args.v.stride[1] = -32; }
static void q_batch(forward_call *x) { x->args.q.shape[0] = 1; }
static void k_length(forward_call *x) { x->args.k.shape[1] = 9; }
static void v_heads(forward_call *x) { x->args.v.shape[2] = 1; }
static void v_head_dim(forward_call *x) { x->args.v.shape[3] = 8; }
static void out_length(forward_call *x) { x->args.out.shape[1] = 6; }
static void lse_shape(forward_call *x) { x->args.lse.shape[1] = 3; }
static void bias_shape(forward_call *x) { x->args.bias.shape[1] = 1; }
static void valid_shape(forward_call *x) {
    x->args.key_valid = new_tensor(FDMA_UINT8, 1, 10, -1, -1);
}
static void heads_5(forward_call *x) {
    x->args.q = new_tensor(FDMA_FLOAT32, 2, 7, 5, 16);
    x->args.out = new_output(FDMA_FLOAT32, 2, 7, 5, 16);
    x->args.lse = new_output(FDMA_FLOAT32, 2, 5, 7, -1);
}
static void set_head_dim(forward_call *x, int64_t head_dim) {
    x->args.q = new_tensor(FDMA_FLOAT32, 2, 7, 4, head_dim);
    x->args.k = new_tensor(FDMA_FLOAT32, 2, 10, 2, head_dim);
    x->args.v = new_tensor(FDMA_FLOAT32, 2, 10, 2, head_dim);
    x->args.out = new_output(FDMA_FLOAT32, 2, 7, 4, head_dim);
}
static void head_dim_20(forward_call *x) { set_head_dim(x, 20); }
static void head_dim_264(forward_call *x) { set_head_dim(x, 264); }
static void k_dtype(forward_call *x) { x->args.k.dtype = FDMA_FLOAT16; }
static void out_dtype(forward_call *x) { x->args.out.dtype = FDMA_BFLOAT16; }
static void all_int32(forward_call *x) {
    x->args.q.dtype = x->args.k.dtype = x->args.v.dtype = x->args.out.dtype = FDMA_INT32;
}
static void lse_dtype(forward_call *x) { x->args.lse.dtype = FDMA_FLOAT16; }
static void dtype_unknown(forward_call *x) { x->args.q.dtype = (fdma_dtype)77; }
static void long_queries(forward_call *x) {
    x->args.q = new_tensor(FDMA_FLOAT32, 2, 11, 4, 16);
    x->args.out = new_output(FDMA_FLOAT32, 2, 11, 4, 16);
    x->args.lse = new_output(FDMA_FLOAT32, 2, 4, 11, -1);
}
static void scale_negative(forward_call *x) { x->args.scale = -0.5; }
static void scale_too_large(forward_call *x) { x->args.scale = 1e39; }
static void scale_nan(forward_call *x) { x->args.scale = (double)NAN; }
static void softcap_negative(forward_call *x) { x->args.softcap = -2; }
static void softcap_nan(forward_call *x) { x->args.softcap = (double)NAN; }
static void selection_length(forward_call *x) { x->selection.kv_len = 11; }
static void selection_window(forward_call *x) { x->selection.window = 0; }
static void selection_no_scope(forward_call *x) { x->selection.scope = FDMA_SCOPE_DEFAULT; }
static void selection_shape(forward_call *x) { x->selection.expiry.shape[2] = 9; }
static void selection_heads(forward_call *x) { x->selection.slot.shape[1] = 4; }
static void selection_size(forward_call *x) { x->selection.size = 1; }
static void selection_reserved(forward_call *x) { x->selection.reserved = 1; }
static void selection_scope(forward_call *x) { x->args.causal = 0; }
static void selection_expiry_null(forward_call *x) { x->selection.expiry.data = NULL; }
static void reserved(forward_call *x) { x->args.reserved = 1; }
static void exec_reserved(forward_call *x) { x->args.exec.reserved[0] = 1; }
static void device_negative(forward_call *x) { x->args.exec.device = -1; }
static void threads_negative(forward_call *x) { x->args.exec.threads = -4; }
static void kernel_unknown(forward_call *x) { x->args.exec.kernel = "cpu/sse9"; }
static void workspace_null(forward_call *x) { x->args.exec.workspace = NULL; }
static void batch_huge(forward_call *x) {
    const int64_t huge = INT64_C(1) << 62;
    x->args.q.shape[0] = x->args.k.shape[0] = x->args.v.shape[0] = x->args.out.shape[0] = huge;
    x->args.lse.shape[0] = x->args.bias.shape[0] = huge;
    x->selection.expiry.shape[0] = x->selection.slot.shape[0] = huge;
}
static void stride_huge(forward_call *x) { x->args.k.stride[0] = INT64_MAX / 2; }

static const struct {
    const char *name;
    void (*spoil)(forward_call *);
    expectation want;
} forward_cases[] = {
    {"size 0", size_0, {FDMA_INVALID_ARGUMENT, {"size"}, 0}},
    {"no q", no_q, {FDMA_INVALID_ARGUMENT, {"q"}, 0}},
    {"q NULL", q_null, {FDMA_INVALID_ARGUMENT, {"q"}, 1}},
    {"k NULL", k_null, {FDMA_INVALID_ARGUMENT, {"k"}, 1}},
    {"out NULL", out_null, {FDMA_INVALID_ARGUMENT, {"out"}, 1}},
    {"no out", no_out, {FDMA_INVALID_ARGUMENT, {"out"}, 0}},
    {"lse NULL", lse_null, {FDMA_INVALID_ARGUMENT, {"lse"}, 1}},
    {"bias NULL", bias_null, {FDMA_INVALID_ARGUMENT, {"bias"}, 1}},
    {"q off its alignment", q_odd, {FDMA_INVALID_ARGUMENT, {"q"}, 1}},
    {"out off its alignment", out_odd, {FDMA_INVALID_ARGUMENT, {"out"}, 1}},
    {"expiry off its alignment", expiry_odd, {FDMA_INVALID_ARGUMENT, {"expiry"}, 1}},
    {"q of rank 5", q_rank, {FDMA_INVALID_ARGUMENT, {"q", "5", "4"}, 0}},
    {"q of rank -1", q_rank_negative, {FDMA_INVALID_ARGUMENT, {"q", "-1"}, 0}},
    {"last stride of k", k_stride, {FDMA_INVALID_ARGUMENT, {"k", "2", "1"}, 0}},
    {"negative stride of v", v_stride, {FDMA_INVALID_ARGUMENT, {"v", "-32"}, 0}},
    {"batch of q", q_batch, {FDMA_INVALID_ARGUMENT, {"1", "2"}, 0}},
    {"length of k", k_length, {FDMA_INVALID_ARGUMENT, {"9", "10"}, 0}},
    {"heads of v", v_heads, {FDMA_INVALID_ARGUMENT, {"v", "1", "2"}, 0}},
    {"head_dim of v", v_head_dim, {FDMA_INVALID_ARGUMENT, {"v", "8", "16"}, 0}},
    {"length of out", out_length, {FDMA_INVALID_ARGUMENT, {"out", "6", "7"}, 0}},
    {"heads of lse", lse_shape, {FDMA_INVALID_ARGUMENT, {"lse", "3", "4"}, 0}},
    {"heads of bias", bias_shape, {FDMA_INVALID_ARGUMENT, {"bias", "1", "2"}, 0}},
    {"batch of key_valid", valid_shape, {FDMA_INVALID_ARGUMENT, {"key_valid", "1", "2"}, 0}},
    {"5 query heads", heads_5, {FDMA_INVALID_ARGUMENT, {"q_heads", "5", "2"}, 0}},
    {"head_dim 20", head_dim_20, {FDMA_UNSUPPORTED, {"head_dim", "20", "256"}, 0}},
    {"head_dim 264", head_dim_264, {FDMA_UNSUPPORTED, {"head_dim", "264", "256"}, 0}},
    {"k in float16", k_dtype, {FDMA_UNSUPPORTED, {"k"}, 0}},
    {"out in bfloat16", out_dtype, {FDMA_UNSUPPORTED, {"out"}, 0}},
    {"all in int32", all_int32, {FDMA_UNSUPPORTED, {"q"}, 0}},
    {"lse in float16", lse_dtype, {FDMA_UNSUPPORTED, {"lse"}, 0}},
    {"unknown dtype", dtype_unknown, {FDMA_INVALID_ARGUMENT, {"q", "77"}, 0}},
    {"q_len > kv_len", long_queries, {FDMA_INVALID_ARGUMENT, {"q_len", "11", "10"}, 0}},
    {"scale -0.5", scale_negative, {FDMA_INVALID_ARGUMENT, {"scale", "-0.5"}, 0}},
    {"scale 1e39", scale_too_large, {FDMA_INVALID_ARGUMENT, {"scale", "1e+39"}, 0}},
    {"scale NaN", scale_nan, {FDMA_INVALID_ARGUMENT, {"scale", "nan"}, 0}},
    {"softcap -2", softcap_negative, {FDMA_INVALID_ARGUMENT, {"softcap", "-2"}, 0}},
    {"softcap NaN", softcap_nan, {FDMA_INVALID_ARGUMENT, {"softcap", "nan"}, 0}},
    {"another length", selection_length, {FDMA_INVALID_ARGUMENT, {"selection", "11", "10"}, 0}},
    {"window of selection",
     selection_window,
     {FDMA_INVALID_ARGUMENT, {"selection", "window is 0"}, 0}},
    {"scope not recorded",
     selection_no_scope,
     {FDMA_INVALID_ARGUMENT, {"selection", "scope is 0"}, 0}},
    {"shape of expiry", selection_shape, {FDMA_INVALID_ARGUMENT, {"expiry", "9", "10"}, 0}},
    {"heads of slot", selection_heads, {FDMA_INVALID_ARGUMENT, {"slot", "4", "2"}, 0}},
    {"size of selection", selection_size, {FDMA_INVALID_ARGUMENT, {"size"}, 0}},
    {"reserved of selection", selection_reserved, {FDMA_INVALID_ARGUMENT, {"reserved"}, 0}},
    {"another scope", selection_scope, {FDMA_INVALID_ARGUMENT, {"scope"}, 0}},
    {"expiry NULL", selection_expiry_null, {FDMA_INVALID_ARGUMENT, {"expiry"}, 1}},
    {"reserved", reserved, {FDMA_INVALID_ARGUMENT, {"reserved"}, 0}},
    {"reserved of exec", exec_reserved, {FDMA_INVALID_ARGUMENT, {"reserved"}, 0}},
    {"device -1", device_negative, {FDMA_INVALID_ARGUMENT, {"device", "-1"}, 0}},
    {"-4 threads", threads_negative, {FDMA_INVALID_ARGUMENT, {"threads", "-4"}, 0}},
    {"unknown kernel", kernel_unknown, {FDMA_UNSUPPORTED, {"kernel", "cpu/sse9"}, 0}},
    {"workspace NULL", workspace_null, {FDMA_INVALID_ARGUMENT, {"workspace"}, 1}},
    {"batch 2^62", batch_huge, {FDMA_INVALID_ARGUMENT, {NULL}, 0}},
    {"stride 2^62", stride_huge, {FDMA_INVALID_ARGUMENT, {"k"}, 0}},
};

static void forward_rejects(void) {
    for (int i = 0; i < TEST_COUNT(forward_cases); i++) {
        const expectation *want = &forward_cases[i].want;
        test_context("forward: %s", forward_cases[i].name);
        forward_call call;
        make_call(&call);
        CHECK_OK(fdma_forward(&call.args));
        const call_outputs to = {{call.args.out, call.args.lse}, 2};
        fill_outputs(&to);
        forward_cases[i].spoil(&call);
        query_answers found = unanswered;
        check_status(fdma_forward(&call.args), want);
        check_query(fdma_forward_workspace(&call.args, &found.bytes), want);
        check_query(fdma_forward_kernel(&call.args, &found.name), want);
        check_answers(&found, want);
        check_outputs(&to);
        test_free_all();
    }
}

/* ---- attention: the errors of its steps, under its own names ---- */

static fdma_attention_args right_attention(fdma_selection *selection) {
    *selection =
        (fdma_selection){.size = sizeof *selection, .expiry = new_output(FDMA_INT32, 2, 2, 10, -1)};
    fdma_attention_args args = {
        .size = sizeof args,
        .q = new_tensor(FDMA_FLOAT16, 2, 10, 4, 16),
        .k = new_tensor(FDMA_FLOAT16, 2, 10, 2, 16),
        .v = new_tensor(FDMA_FLOAT16, 2, 10, 2, 16),
        .dt_proj = new_tensor(FDMA_FLOAT16, 2, 32, -1, -1),
        .a = new_tensor(FDMA_FLOAT32, 2, -1, -1, -1),
        .out = new_output(FDMA_FLOAT16, 2, 10, 4, 16),
        .lse = new_output(FDMA_FLOAT32, 2, 4, 10, -1),
        .score = new_output(FDMA_FLOAT32, 2, 2, 10, -1),
        .selection = selection,
        .window = 3,
        .causal = 1,
    };
    exec_alloc(&args.exec, 8 << 20);
    return args;
}

static void whole_size(fdma_attention_args *x) { x->size = 4; }
static void whole_no_k(fdma_attention_args *x) { x->k = (fdma_tensor){0}; }
static void whole_v_null(fdma_attention_args *x) { x->v.data = NULL; }
static void whole_no_a(fdma_attention_args *x) { x->a = (fdma_tensor){0}; }
static void whole_proj(fdma_attention_args *x) { x->dt_proj.shape[1] = 16; }
static void whole_window(fdma_attention_args *x) { x->window = -8; }
static void whole_scope(fdma_attention_args *x) {
    x->scope = FDMA_SCOPE_CAUSAL;
    x->causal = 0;
}
static void whole_scope_unknown(fdma_attention_args *x) { x->scope = (fdma_scope)3; }
static void whole_window_zero(fdma_attention_args *x) { x->window = 0; }
static void whole_q_heads(fdma_attention_args *x) {
    x->q.shape[2] = x->out.shape[2] = x->lse.shape[1] = 3;
}
static void whole_scale(fdma_attention_args *x) { x->scale = -1; }
static void whole_form(fdma_attention_args *x) { x->bias_form = (fdma_bias_form)5; }
static void whole_bias(fdma_attention_args *x) {
    x->bias_form = FDMA_BIAS_NONE;
    x->bias = new_output(FDMA_FLOAT32, 2, 2, 10, -1);
}
static void whole_no_expiry(fdma_attention_args *x) { x->selection->expiry = (fdma_tensor){0}; }
static void whole_expiry(fdma_attention_args *x) { x->selection->expiry.shape[2] = 8; }
static void whole_k_dtype(fdma_attention_args *x) { x->k.dtype = FDMA_BFLOAT16; }
static void whole_reserved(fdma_attention_args *x) { x->reserved = 2; }
static void whole_overlap(fdma_attention_args *x) { x->out.data = x->q.data; }
static void whole_score_overlap(fdma_attention_args *x) { x->score.data = x->lse.data; }
static void whole_threads(fdma_attention_args *x) { x->exec.threads = INT32_MIN; }
static void whole_kernel(fdma_attention_args *x) { x->exec.kernel = "gpu"; }
static void whole_q_len(fdma_attention_args *x) {
    x->k.shape[1] = x->v.shape[1] = x->score.shape[2] = x->selection->expiry.shape[2] = 9;
}

static const struct {
    const char *name;
    void (*spoil)(fdma_attention_args *);
    expectation want;
} attention_cases[] = {
    {"size 4", whole_size, {FDMA_INVALID_ARGUMENT, {"size", "4"}, 0}},
    {"no k", whole_no_k, {FDMA_INVALID_ARGUMENT, {"k"}, 0}},
    {"v NULL", whole_v_null, {FDMA_INVALID_ARGUMENT, {"v"}, 1}},
    {"no a", whole_no_a, {FDMA_INVALID_ARGUMENT, {"a"}, 0}},
    {"dt_proj too narrow", whole_proj, {FDMA_INVALID_ARGUMENT, {"dt_proj", "16", "32"}, 0}},
    {"window -8", whole_window, {FDMA_INVALID_ARGUMENT, {"window", "-8"}, 0}},
    {"window 0", whole_window_zero, {FDMA_INVALID_ARGUMENT, {"window", "FDMA_WINDOW_ALL"}, 0}},
    {"not causal, causal scope", whole_scope, {FDMA_INVALID_ARGUMENT, {"scope", "causal"}, 0}},
    {"scope 3", whole_scope_unknown, {FDMA_INVALID_ARGUMENT, {"scope", "3"}, 0}},
    {"selection without expiry", whole_no_expiry, {FDMA_INVALID_ARGUMENT, {"expiry"}, 0}},
    {"3 query heads", whole_q_heads, {FDMA_INVALID_ARGUMENT, {"q_heads", "3", "2"}, 0}},
    {"scale -1", whole_scale, {FDMA_INVALID_ARGUMENT, {"scale", "-1"}, 0}},
    {"bias_form 5", whole_form, {FDMA_INVALID_ARGUMENT, {"bias_form", "5"}, 0}},
    {"bias without form", whole_bias, {FDMA_INVALID_ARGUMENT, {"bias"}, 0}},
    {"expiry too short", whole_expiry, {FDMA_INVALID_ARGUMENT, {"expiry", "8", "10"}, 0}},
    {"k in bfloat16", whole_k_dtype, {FDMA_UNSUPPORTED, {"k"}, 0}},
    {"reserved", whole_reserved, {FDMA_INVALID_ARGUMENT, {"reserved", "2"}, 0}},
    {"out is q", whole_overlap, {FDMA_INVALID_ARGUMENT, {"out", "q"}, 1}},
    {"score is lse", whole_score_overlap, {FDMA_INVALID_ARGUMENT, {"score", "lse"}, 1}},
    {"-2^31 threads", whole_threads, {FDMA_INVALID_ARGUMENT, {"threads", "-2147483648"}, 0}},
    {"unknown kernel", whole_kernel, {FDMA_UNSUPPORTED, {"kernel", "gpu"}, 0}},
    {"q_len > kv_len", whole_q_len, {FDMA_INVALID_ARGUMENT, {"q_len", "10", "9"}, 0}},
};

static void attention_rejects(void) {
    for (int i = 0; i < TEST_COUNT(attention_cases); i++) {
        const expectation *want = &attention_cases[i].want;
        test_context("attention: %s", attention_cases[i].name);
        fdma_selection selection;
        fdma_attention_args args = right_attention(&selection);
        CHECK_OK(fdma_attention(&args));
        const call_outputs to = {{args.out, args.lse, args.score, selection.expiry}, 4};
        fill_outputs(&to);
        const fdma_tensor q = args.q;
        const fdma_tensor q_before = copy_tensor(q);
        attention_cases[i].spoil(&args);
        query_answers found = unanswered;
        check_status(fdma_attention(&args), want);
        check_query(fdma_attention_workspace(&args, &found.bytes), want);
        check_answers(&found, want);
        check_outputs(&to);
        CHECK(same_tensor(q, q_before));
        test_free_all();
    }
}

/* The message is that of the last call that failed, whatever has gone well since. */
static void success_keeps_the_message(void) {
    const kernel_list kernels = kernels_of("forward");
    for (int kernel = 0; kernel <= kernels.count; kernel++) {
        forward_call call;
        make_call(&call);
        call.args.scale = -3;
        CHECK_INT(fdma_forward(&call.args), FDMA_INVALID_ARGUMENT);
        char message[512];
        snprintf(message, sizeof message, "%s", fdma_last_error());
        call.args.scale = 3;
        call.args.exec.kernel = kernel < kernels.count ? kernels.name[kernel] : NULL;
        CHECK_OK(run_forward(&call.args));
        CHECK_BYTES(fdma_last_error(), message, strlen(message) + 1);
        test_free_all();
    }
}

static const test_entry tests[] = {
    TEST(success_keeps_the_message),
    TEST(forward_rejects),
    TEST(attention_rejects),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
