/* test_errors_backward.c - bad arguments of fdma_backward(): the status, what the message names,
 * and that nothing is written. */
#include "errors.h"

typedef struct backward_call {
    fdma_backward_args args;
    fdma_selection selection;
} backward_call;

static void make_call(backward_call *x) {
    make_selection(&x->selection);
    x->args = (fdma_backward_args){
        .size = sizeof x->args,
        .dout = new_tensor(FDMA_FLOAT32, 2, 7, 4, 16),
        .dlse = new_tensor(FDMA_FLOAT32, 2, 4, 7, -1),
        .out = new_tensor(FDMA_FLOAT32, 2, 7, 4, 16),
        .lse = new_tensor(FDMA_FLOAT32, 2, 4, 7, -1),
        .q = new_tensor(FDMA_FLOAT32, 2, 7, 4, 16),
        .k = new_tensor(FDMA_FLOAT32, 2, 10, 2, 16),
        .v = new_tensor(FDMA_FLOAT32, 2, 10, 2, 16),
        .bias = new_tensor(FDMA_FLOAT32, 2, 2, 10, -1),
        .dq = new_output(FDMA_FLOAT32, 2, 7, 4, 16),
        .dk = new_output(FDMA_FLOAT32, 2, 10, 2, 16),
        .dv = new_output(FDMA_FLOAT32, 2, 10, 2, 16),
        .dbias = new_output(FDMA_FLOAT32, 2, 2, 10, -1),
        .selection = &x->selection,
        .causal = 1,
    };
    exec_alloc(&x->args.exec, 8 << 20);
}

static void size_0(backward_call *x) { x->args.size = 0; }
static void no_dout(backward_call *x) { x->args.dout = (fdma_tensor){0}; }
static void no_out(backward_call *x) { x->args.out = (fdma_tensor){0}; }
static void no_lse(backward_call *x) { x->args.lse = (fdma_tensor){0}; }
static void no_q(backward_call *x) { x->args.q = (fdma_tensor){0}; }
static void no_k(backward_call *x) { x->args.k = (fdma_tensor){0}; }
static void no_v(backward_call *x) { x->args.v = (fdma_tensor){0}; }
static void no_dq(backward_call *x) { x->args.dq = (fdma_tensor){0}; }
static void no_dk(backward_call *x) { x->args.dk = (fdma_tensor){0}; }
static void no_dv(backward_call *x) { x->args.dv = (fdma_tensor){0}; }
static void dout_null(backward_call *x) { x->args.dout.data = NULL; }
static void dlse_null(backward_call *x) { x->args.dlse.data = NULL; }
static void out_null(backward_call *x) { x->args.out.data = NULL; }
static void lse_null(backward_call *x) { x->args.lse.data = NULL; }
static void q_null(backward_call *x) { x->args.q.data = NULL; }
static void k_null(backward_call *x) { x->args.k.data = NULL; }
static void v_null(backward_call *x) { x->args.v.data = NULL; }
static void bias_null(backward_call *x) { x->args.bias.data = NULL; }
static void dq_null(backward_call *x) { x->args.dq.data = NULL; }
static void dk_null(backward_call *x) { x->args.dk.data = NULL; }
static void dv_null(backward_call *x) { x->args.dv.data = NULL; }
static void dbias_null(backward_call *x) { x->args.dbias.data = NULL; }
static void dout_odd(backward_call *x) { x->args.dout.data = (char *)x->args.dout.data + 1; }
static void lse_odd(backward_call *x) { x->args.lse.data = (char *)x->args.lse.data + 1; }
static void dq_odd(backward_call *x) { x->args.dq.data = (char *)x->args.dq.data + 1; }
static void dbias_odd(backward_call *x) { x->args.dbias.data = (char *)x->args.dbias.data + 1; }
static void expiry_odd(backward_call *x) {
    x->selection.expiry.data = (char *)x->selection.expiry.data + 2;
}
static void dq_rank(backward_call *x) { x->args.dq.rank = 3; }
static void lse_rank(backward_call *x) { x->args.lse.rank = 4; }
static void dk_stride(backward_call *x) { x->args.dk.stride[3] = 2; }
static void dout_stride(backward_call *x) { x->args.dout.stride[1] = -64; }
static void dv_repeats(backward_call *x) { x->args.dv.stride[1] = 0; }
static void out_length(backward_call *x) { x->args.out.shape[1] = 6; }
static void out_heads(backward_call *x) { x->args.out.shape[2] = 2; }
static void out_dim(backward_call *x) { x->args.out.shape[3] = 8; }
static void out_batch(backward_call *x) { x->args.out.shape[0] = 1; }
static void lse_swapped(backward_call *x) { x->args.lse = new_tensor(FDMA_FLOAT32, 2, 7, 4, -1); }
static void lse_length(backward_call *x) { x->args.lse.shape[2] = 10; }
static void dlse_heads(backward_call *x) { x->args.dlse.shape[1] = 2; }
static void dout_length(backward_call *x) { x->args.dout.shape[1] = 8; }
static void k_length(backward_call *x) { x->args.k.shape[1] = 9; }
static void dq_heads(backward_call *x) { x->args.dq.shape[2] = 2; }
static void dk_length(backward_call *x) { x->args.dk.shape[1] = 7; }
static void dv_heads(backward_call *x) { x->args.dv.shape[2] = 4; }
static void dbias_heads(backward_call *x) { x->args.dbias.shape[1] = 4; }
static void dbias_length(backward_call *x) { x->args.dbias.shape[2] = 7; }
static void dq_dtype(backward_call *x) { x->args.dq.dtype = FDMA_FLOAT16; }
static void dk_dtype(backward_call *x) { x->args.dk.dtype = FDMA_BFLOAT16; }
static void dout_dtype(backward_call *x) { x->args.dout.dtype = FDMA_FLOAT16; }
static void out_dtype(backward_call *x) { x->args.out.dtype = FDMA_BFLOAT16; }
static void lse_dtype(backward_call *x) { x->args.lse.dtype = FDMA_FLOAT16; }
static void dlse_dtype(backward_call *x) { x->args.dlse.dtype = FDMA_INT32; }
static void dbias_dtype(backward_call *x) { x->args.dbias.dtype = FDMA_FLOAT16; }
static void dtype_unknown(backward_call *x) { x->args.dv.dtype = (fdma_dtype)77; }
static void head_dim_20(backward_call *x) {
    const fdma_tensor q = new_output(FDMA_FLOAT32, 2, 7, 4, 20);
    const fdma_tensor k = new_output(FDMA_FLOAT32, 2, 10, 2, 20);
    x->args.q = x->args.out = x->args.dout = x->args.dq = q;
    x->args.k = x->args.v = x->args.dk = x->args.dv = k;
}
static void heads_5(backward_call *x) {
    const fdma_tensor q = new_output(FDMA_FLOAT32, 2, 7, 5, 16);
    x->args.q = x->args.out = x->args.dout = x->args.dq = q;
}
static void scale_negative(backward_call *x) { x->args.scale = -0.5; }
static void scale_too_large(backward_call *x) { x->args.scale = 1e39; }
static void scale_nan(backward_call *x) { x->args.scale = (double)NAN; }
static void softcap_negative(backward_call *x) { x->args.softcap = -2; }
static void softcap_nan(backward_call *x) { x->args.softcap = (double)NAN; }
static void selection_length(backward_call *x) { x->selection.kv_len = 11; }
static void selection_window(backward_call *x) { x->selection.window = 0; }
static void selection_no_scope(backward_call *x) { x->selection.scope = FDMA_SCOPE_DEFAULT; }
static void selection_shape(backward_call *x) { x->selection.expiry.shape[2] = 9; }
static void selection_heads(backward_call *x) { x->selection.slot.shape[1] = 4; }
static void selection_size(backward_call *x) { x->selection.size = 1; }
static void selection_reserved(backward_call *x) { x->selection.reserved = 1; }
static void selection_scope(backward_call *x) { x->args.causal = 0; }
static void selection_expiry_null(backward_call *x) { x->selection.expiry.data = NULL; }
static void selection_no_expiry(backward_call *x) { x->selection.expiry = (fdma_tensor){0}; }
static void dq_is_q(backward_call *x) { x->args.dq.data = x->args.q.data; }
static void dk_is_v(backward_call *x) { x->args.dk.data = x->args.v.data; }
static void dv_is_dk(backward_call *x) { x->args.dv.data = x->args.dk.data; }
static void dq_is_dout(backward_call *x) { x->args.dq.data = x->args.dout.data; }
static void dq_is_out(backward_call *x) { x->args.dq.data = x->args.out.data; }
static void dbias_is_bias(backward_call *x) { x->args.dbias.data = x->args.bias.data; }
static void dbias_is_lse(backward_call *x) { x->args.dbias.data = x->args.lse.data; }
static void dbias_is_expiry(backward_call *x) { x->args.dbias.data = x->selection.expiry.data; }
static void reserved(backward_call *x) { x->args.reserved = 1; }
static void exec_reserved(backward_call *x) { x->args.exec.reserved[1] = 1; }
static void device_negative(backward_call *x) { x->args.exec.device = -1; }
static void threads_negative(backward_call *x) { x->args.exec.threads = -4; }
static void kernel_unknown(backward_call *x) { x->args.exec.kernel = "cpu/sse9"; }
static void workspace_null(backward_call *x) { x->args.exec.workspace = NULL; }
static void stride_huge(backward_call *x) { x->args.k.stride[0] = INT64_MAX / 2; }
static void batch_huge(backward_call *x) {
    const int64_t huge = INT64_C(1) << 62;
    fdma_tensor *const tensors[] = {
        &x->args.dout, &x->args.dlse,  &x->args.out,         &x->args.lse,      &x->args.q,
        &x->args.k,    &x->args.v,     &x->args.bias,        &x->args.dq,       &x->args.dk,
        &x->args.dv,   &x->args.dbias, &x->selection.expiry, &x->selection.slot};
    for (int i = 0; i < TEST_COUNT(tensors); i++) {
        tensors[i]->shape[0] = huge;
    }
}

static const struct {
    const char *name;
    void (*spoil)(backward_call *);
    expectation want;
} backward_cases[] = {
    {"size 0", size_0, {FDMA_INVALID_ARGUMENT, {"size"}, 0}},
    {"no dout", no_dout, {FDMA_INVALID_ARGUMENT, {"dout"}, 0}},
    {"no out", no_out, {FDMA_INVALID_ARGUMENT, {"out"}, 0}},
    {"no lse", no_lse, {FDMA_INVALID_ARGUMENT, {"lse"}, 0}},
    {"no q", no_q, {FDMA_INVALID_ARGUMENT, {"q"}, 0}},
    {"no k", no_k, {FDMA_INVALID_ARGUMENT, {"k"}, 0}},
    {"no v", no_v, {FDMA_INVALID_ARGUMENT, {"v"}, 0}},
    {"no dq", no_dq, {FDMA_INVALID_ARGUMENT, {"dq"}, 0}},
    {"no dk", no_dk, {FDMA_INVALID_ARGUMENT, {"dk"}, 0}},
    {"no dv", no_dv, {FDMA_INVALID_ARGUMENT, {"dv"}, 0}},
    {"dout NULL", dout_null, {FDMA_INVALID_ARGUMENT, {"dout"}, 1}},
    {"dlse NULL", dlse_null, {FDMA_INVALID_ARGUMENT, {"dlse"}, 1}},
    {"out NULL", out_null, {FDMA_INVALID_ARGUMENT, {"out"}, 1}},
    {"lse NULL", lse_null, {FDMA_INVALID_ARGUMENT, {"lse"}, 1}},
    {"q NULL", q_null, {FDMA_INVALID_ARGUMENT, {"q"}, 1}},
    {"k NULL", k_null, {FDMA_INVALID_ARGUMENT, {"k"}, 1}},
    {"v NULL", v_null, {FDMA_INVALID_ARGUMENT, {"v"}, 1}},
    {"bias NULL", bias_null, {FDMA_INVALID_ARGUMENT, {"bias"}, 1}},
    {"dq NULL", dq_null, {FDMA_INVALID_ARGUMENT, {"dq"}, 1}},
    {"dk NULL", dk_null, {FDMA_INVALID_ARGUMENT, {"dk"}, 1}},
    {"dv NULL", dv_null, {FDMA_INVALID_ARGUMENT, {"dv"}, 1}},
    {"dbias NULL", dbias_null, {FDMA_INVALID_ARGUMENT, {"dbias"}, 1}},
    {"dout off its alignment", dout_odd, {FDMA_INVALID_ARGUMENT, {"dout"}, 1}},
    {"lse off its alignment", lse_odd, {FDMA_INVALID_ARGUMENT, {"lse"}, 1}},
    {"dq off its alignment", dq_odd, {FDMA_INVALID_ARGUMENT, {"dq"}, 1}},
    {"dbias off its alignment", dbias_odd, {FDMA_INVALID_ARGUMENT, {"dbias"}, 1}},
    {"expiry off its alignment", expiry_odd, {FDMA_INVALID_ARGUMENT, {"expiry"}, 1}},
    {"dq of rank 3", dq_rank, {FDMA_INVALID_ARGUMENT, {"dq", "3", "4"}, 0}},
    {"lse of rank 4", lse_rank, {FDMA_INVALID_ARGUMENT, {"lse", "4", "3"}, 0}},
    {"last stride of dk", dk_stride, {FDMA_INVALID_ARGUMENT, {"dk", "2", "1"}, 0}},
    {"negative stride of dout", dout_stride, {FDMA_INVALID_ARGUMENT, {"dout", "-64"}, 0}},
    {"dv repeats its elements", dv_repeats, {FDMA_INVALID_ARGUMENT, {"dv"}, 0}},
    {"another length of out", out_length, {FDMA_INVALID_ARGUMENT, {"out", "6", "7"}, 0}},
    {"another number of heads of out", out_heads, {FDMA_INVALID_ARGUMENT, {"out", "2", "4"}, 0}},
    {"another head_dim of out", out_dim, {FDMA_INVALID_ARGUMENT, {"out", "8", "16"}, 0}},
    {"another batch of out", out_batch, {FDMA_INVALID_ARGUMENT, {"out", "1", "2"}, 0}},
    {"lse as [batch, q_len, q_heads]", lse_swapped, {FDMA_INVALID_ARGUMENT, {"lse", "7", "4"}, 0}},
    {"another length of lse", lse_length, {FDMA_INVALID_ARGUMENT, {"lse", "10", "7"}, 0}},
    {"another number of heads of dlse", dlse_heads, {FDMA_INVALID_ARGUMENT, {"dlse", "2", "4"}, 0}},
    {"another length of dout", dout_length, {FDMA_INVALID_ARGUMENT, {"dout", "8", "7"}, 0}},
    {"another length of k", k_length, {FDMA_INVALID_ARGUMENT, {"9", "10"}, 0}},
    {"dq shaped as k", dq_heads, {FDMA_INVALID_ARGUMENT, {"dq", "2", "4"}, 0}},
    {"dk shaped as q", dk_length, {FDMA_INVALID_ARGUMENT, {"dk", "7", "10"}, 0}},
    {"dv for each query head", dv_heads, {FDMA_INVALID_ARGUMENT, {"dv", "4", "2"}, 0}},
    {"dbias for each query head", dbias_heads, {FDMA_INVALID_ARGUMENT, {"dbias", "4", "2"}, 0}},
    {"another length of dbias", dbias_length, {FDMA_INVALID_ARGUMENT, {"dbias", "7", "10"}, 0}},
    {"dq in float16", dq_dtype, {FDMA_UNSUPPORTED, {"dq"}, 0}},
    {"dk in bfloat16", dk_dtype, {FDMA_UNSUPPORTED, {"dk"}, 0}},
    {"dout in float16", dout_dtype, {FDMA_UNSUPPORTED, {"dout"}, 0}},
    {"out in bfloat16", out_dtype, {FDMA_UNSUPPORTED, {"out"}, 0}},
    {"lse in float16", lse_dtype, {FDMA_UNSUPPORTED, {"lse"}, 0}},
    {"dlse in int32", dlse_dtype, {FDMA_UNSUPPORTED, {"dlse"}, 0}},
    {"dbias in float16", dbias_dtype, {FDMA_UNSUPPORTED, {"dbias"}, 0}},
    {"dv of an unknown type", dtype_unknown, {FDMA_INVALID_ARGUMENT, {"dv", "77"}, 0}},
    {"head_dim 20", head_dim_20, {FDMA_UNSUPPORTED, {"head_dim", "20", "256"}, 0}},
    {"5 query heads", heads_5, {FDMA_INVALID_ARGUMENT, {"q_heads", "5", "2"}, 0}},
    {"scale -0.5", scale_negative, {FDMA_INVALID_ARGUMENT, {"scale", "-0.5"}, 0}},
    {"scale 1e39", scale_too_large, {FDMA_INVALID_ARGUMENT, {"scale", "1e+39"}, 0}},
    {"scale NaN", scale_nan, {FDMA_INVALID_ARGUMENT, {"scale", "nan"}, 0}},
    {"softcap -2", softcap_negative, {FDMA_INVALID_ARGUMENT, {"softcap", "-2"}, 0}},
    {"softcap NaN", softcap_nan, {FDMA_INVALID_ARGUMENT, {"softcap", "nan"}, 0}},
    {"a selection for another length",
     selection_length,
     {FDMA_INVALID_ARGUMENT, {"selection", "11", "10"}, 0}},
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
    {"a selection of causal scope, not causal",
     selection_scope,
     {FDMA_INVALID_ARGUMENT, {"scope"}, 0}},
    {"expiry NULL", selection_expiry_null, {FDMA_INVALID_ARGUMENT, {"expiry"}, 1}},
    {"no expiry", selection_no_expiry, {FDMA_INVALID_ARGUMENT, {"expiry"}, 0}},
    {"dq is q", dq_is_q, {FDMA_INVALID_ARGUMENT, {"dq", "q"}, 1}},
    {"dk is v", dk_is_v, {FDMA_INVALID_ARGUMENT, {"dk", "v"}, 1}},
    {"dv is dk", dv_is_dk, {FDMA_INVALID_ARGUMENT, {"dv", "dk"}, 1}},
    {"dq is dout", dq_is_dout, {FDMA_INVALID_ARGUMENT, {"dq", "dout"}, 1}},
    {"dq is out", dq_is_out, {FDMA_INVALID_ARGUMENT, {"dq", "out"}, 1}},
    {"dbias is bias", dbias_is_bias, {FDMA_INVALID_ARGUMENT, {"dbias", "bias"}, 1}},
    {"dbias is lse", dbias_is_lse, {FDMA_INVALID_ARGUMENT, {"dbias", "lse"}, 1}},
    {"dbias is expiry", dbias_is_expiry, {FDMA_INVALID_ARGUMENT, {"dbias", "expiry"}, 1}},
    {"reserved", reserved, {FDMA_INVALID_ARGUMENT, {"reserved"}, 0}},
    {"reserved of exec", exec_reserved, {FDMA_INVALID_ARGUMENT, {"reserved"}, 0}},
    {"device -1", device_negative, {FDMA_INVALID_ARGUMENT, {"device", "-1"}, 0}},
    {"-4 threads", threads_negative, {FDMA_INVALID_ARGUMENT, {"threads", "-4"}, 0}},
    {"unknown kernel", kernel_unknown, {FDMA_UNSUPPORTED, {"kernel", "cpu/sse9"}, 0}},
    {"workspace NULL", workspace_null, {FDMA_INVALID_ARGUMENT, {"workspace"}, 1}},
    {"stride 2^62", stride_huge, {FDMA_INVALID_ARGUMENT, {"k"}, 0}},
    {"batch 2^62", batch_huge, {FDMA_INVALID_ARGUMENT, {NULL}, 0}},
};

static void backward_rejects(void) {
    for (int i = 0; i < TEST_COUNT(backward_cases); i++) {
        const expectation *want = &backward_cases[i].want;
        test_context("backward: %s", backward_cases[i].name);
        backward_call call;
        make_call(&call);
        CHECK_OK(fdma_backward(&call.args));
        const call_outputs to = {{call.args.dq, call.args.dk, call.args.dv, call.args.dbias}, 4};
        fill_outputs(&to);
        backward_cases[i].spoil(&call);
        query_answers found = unanswered;
        check_status(fdma_backward(&call.args), want);
        check_query(fdma_backward_workspace(&call.args, &found.bytes), want);
        check_query(fdma_backward_kernel(&call.args, &found.name), want);
        check_answers(&found, want);
        check_outputs(&to);
        test_free_all();
    }
}

/* One byte less than what every kernel asks for. */
static void backward_wants_its_workspace(void) {
    const kernel_list kernels = kernels_of("backward");
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        test_context("%s", kernels.name[kernel]);
        backward_call call;
        make_call(&call);
        call.args.exec.kernel = kernels.name[kernel];
        const call_outputs to = {{call.args.dq, call.args.dk, call.args.dv, call.args.dbias}, 4};
        fill_outputs(&to);
        size_t bytes = 0;
        CHECK_OK(fdma_backward_workspace(&call.args, &bytes));
        if (bytes > 0) {
            call.args.exec.workspace_size = bytes - 1;
            CHECK_INT(fdma_backward(&call.args), FDMA_WORKSPACE_TOO_SMALL);
            char digits[32];
            snprintf(digits, sizeof digits, "%zu", bytes);
            CHECK_WORD(fdma_last_error(), digits);
            check_outputs(&to);
        }
        call.args.exec.workspace_size = bytes;
        CHECK_OK(fdma_backward(&call.args));
        test_free_all();
    }
}

static void no_arguments(void) {
    size_t bytes = 99;
    const char *name = NULL;
    CHECK_INT(fdma_backward(NULL), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_backward_workspace(NULL, &bytes), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_backward_kernel(NULL, &name), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_score_backward(NULL), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_score_backward_workspace(NULL, &bytes), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_score_backward_kernel(NULL, &name), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_attention_backward(NULL), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_attention_backward_workspace(NULL, &bytes), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_merge(NULL), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_merge_workspace(NULL, &bytes), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_merge_kernel(NULL, &name), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_merge_backward(NULL), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_merge_backward_workspace(NULL, &bytes), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_merge_backward_kernel(NULL, &name), FDMA_INVALID_ARGUMENT);
    CHECK(bytes == 99 && name == NULL);
}

static const test_entry tests[] = {
    TEST(no_arguments),
    TEST(backward_rejects),
    TEST(backward_wants_its_workspace),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
