/* test_errors_merge.c - bad arguments of fdma_merge() and fdma_merge_backward(): the status, what
 * the message names, and that nothing is written. */
#include "errors.h"

/* ---- merge ---- */

static fdma_merge_args right_merge(void) {
    fdma_merge_args args = {
        .size = sizeof args,
        .out_a = new_tensor(FDMA_FLOAT16, 2, 5, 4, 16),
        .lse_a = new_tensor(FDMA_FLOAT32, 2, 4, 5, -1),
        .out_b = new_tensor(FDMA_FLOAT16, 2, 5, 4, 16),
        .lse_b = new_tensor(FDMA_FLOAT32, 2, 4, 5, -1),
        .out = new_output(FDMA_FLOAT16, 2, 5, 4, 16),
        .lse = new_output(FDMA_FLOAT32, 2, 4, 5, -1),
    };
    exec_alloc(&args.exec, 1 << 16);
    return args;
}

static void merge_size(fdma_merge_args *x) { x->size = 8; }
static void merge_no_out_a(fdma_merge_args *x) { x->out_a = (fdma_tensor){0}; }
static void merge_no_lse_a(fdma_merge_args *x) { x->lse_a = (fdma_tensor){0}; }
static void merge_no_out_b(fdma_merge_args *x) { x->out_b = (fdma_tensor){0}; }
static void merge_no_lse_b(fdma_merge_args *x) { x->lse_b = (fdma_tensor){0}; }
static void merge_no_out(fdma_merge_args *x) { x->out = (fdma_tensor){0}; }
static void merge_out_a_null(fdma_merge_args *x) { x->out_a.data = NULL; }
static void merge_lse_b_null(fdma_merge_args *x) { x->lse_b.data = NULL; }
static void merge_out_null(fdma_merge_args *x) { x->out.data = NULL; }
static void merge_lse_null(fdma_merge_args *x) { x->lse.data = NULL; }
static void merge_out_b_shape(fdma_merge_args *x) { x->out_b.shape[1] = 4; }
static void merge_lse_a_shape(fdma_merge_args *x) { x->lse_a.shape[1] = 2; }
static void merge_lse_shape(fdma_merge_args *x) { x->lse.shape[2] = 4; }
static void merge_out_a_dtype(fdma_merge_args *x) { x->out_a.dtype = FDMA_BFLOAT16; }
static void merge_lse_dtype(fdma_merge_args *x) { x->lse.dtype = FDMA_FLOAT16; }
static void merge_out_stride(fdma_merge_args *x) { x->out.stride[3] = 2; }
static void merge_out_is_out_a(fdma_merge_args *x) { x->out.data = x->out_a.data; }
static void merge_lse_is_lse_b(fdma_merge_args *x) { x->lse.data = x->lse_b.data; }
static void merge_dim(fdma_merge_args *x) {
    x->out_a = x->out_b = x->out = new_output(FDMA_FLOAT16, 2, 5, 4, 12);
}
static void merge_kernel(fdma_merge_args *x) { x->exec.kernel = "gpu"; }
static void merge_threads(fdma_merge_args *x) { x->exec.threads = -3; }

static const struct {
    const char *name;
    void (*spoil)(fdma_merge_args *);
    expectation want;
} merge_cases[] = {
    {"size 8", merge_size, {FDMA_INVALID_ARGUMENT, {"size", "8"}, 0}},
    {"no out_a", merge_no_out_a, {FDMA_INVALID_ARGUMENT, {"out_a"}, 0}},
    {"no lse_a", merge_no_lse_a, {FDMA_INVALID_ARGUMENT, {"lse_a"}, 0}},
    {"no out_b", merge_no_out_b, {FDMA_INVALID_ARGUMENT, {"out_b"}, 0}},
    {"no lse_b", merge_no_lse_b, {FDMA_INVALID_ARGUMENT, {"lse_b"}, 0}},
    {"no out", merge_no_out, {FDMA_INVALID_ARGUMENT, {"out"}, 0}},
    {"out_a NULL", merge_out_a_null, {FDMA_INVALID_ARGUMENT, {"out_a"}, 1}},
    {"lse_b NULL", merge_lse_b_null, {FDMA_INVALID_ARGUMENT, {"lse_b"}, 1}},
    {"out NULL", merge_out_null, {FDMA_INVALID_ARGUMENT, {"out"}, 1}},
    {"lse NULL", merge_lse_null, {FDMA_INVALID_ARGUMENT, {"lse"}, 1}},
    {"length of out_b", merge_out_b_shape, {FDMA_INVALID_ARGUMENT, {"out_b", "4", "5"}, 0}},
    {"heads of lse_a", merge_lse_a_shape, {FDMA_INVALID_ARGUMENT, {"lse_a", "2", "4"}, 0}},
    {"length of lse", merge_lse_shape, {FDMA_INVALID_ARGUMENT, {"lse", "4", "5"}, 0}},
    {"out_a in bfloat16", merge_out_a_dtype, {FDMA_UNSUPPORTED, {"out_a"}, 0}},
    {"lse in float16", merge_lse_dtype, {FDMA_UNSUPPORTED, {"lse"}, 0}},
    {"last stride of out", merge_out_stride, {FDMA_INVALID_ARGUMENT, {"out", "2", "1"}, 0}},
    {"out is out_a", merge_out_is_out_a, {FDMA_INVALID_ARGUMENT, {"out", "out_a"}, 1}},
    {"lse is lse_b", merge_lse_is_lse_b, {FDMA_INVALID_ARGUMENT, {"lse", "lse_b"}, 1}},
    {"head_dim 12", merge_dim, {FDMA_UNSUPPORTED, {"head_dim", "12"}, 0}},
    {"unknown kernel", merge_kernel, {FDMA_UNSUPPORTED, {"kernel", "gpu"}, 0}},
    {"-3 threads", merge_threads, {FDMA_INVALID_ARGUMENT, {"threads", "-3"}, 0}},
};

static void merge_rejects(void) {
    for (int i = 0; i < TEST_COUNT(merge_cases); i++) {
        const expectation *want = &merge_cases[i].want;
        test_context("merge: %s", merge_cases[i].name);
        fdma_merge_args args = right_merge();
        CHECK_OK(fdma_merge(&args));
        const call_outputs to = {{args.out, args.lse}, 2};
        fill_outputs(&to);
        merge_cases[i].spoil(&args);
        query_answers found = unanswered;
        check_status(fdma_merge(&args), want);
        check_query(fdma_merge_workspace(&args, &found.bytes), want);
        check_query(fdma_merge_kernel(&args, &found.name), want);
        check_answers(&found, want);
        check_outputs(&to);
        test_free_all();
    }
}

/* ---- merge_backward ---- */

static fdma_merge_backward_args right_merge_backward(void) {
    const fdma_merge_args parts = right_merge(), gradients = right_merge();
    fdma_merge_backward_args args = {
        .size = sizeof args,
        .dout = new_tensor(FDMA_FLOAT16, 2, 5, 4, 16),
        .out_a = parts.out_a,
        .lse_a = parts.lse_a,
        .out_b = parts.out_b,
        .lse_b = parts.lse_b,
        .dout_a = gradients.out,
        .dlse_a = gradients.lse,
        .dout_b = parts.out,
        .dlse_b = parts.lse,
        .exec = parts.exec,
    };
    return args;
}

static void split_size(fdma_merge_backward_args *x) { x->size = 8; }
static void split_no_dout(fdma_merge_backward_args *x) { x->dout = (fdma_tensor){0}; }
static void split_no_out_a(fdma_merge_backward_args *x) { x->out_a = (fdma_tensor){0}; }
static void split_no_lse_a(fdma_merge_backward_args *x) { x->lse_a = (fdma_tensor){0}; }
static void split_no_out_b(fdma_merge_backward_args *x) { x->out_b = (fdma_tensor){0}; }
static void split_no_lse_b(fdma_merge_backward_args *x) { x->lse_b = (fdma_tensor){0}; }
static void split_no_dout_a(fdma_merge_backward_args *x) { x->dout_a = (fdma_tensor){0}; }
static void split_no_dlse_a(fdma_merge_backward_args *x) { x->dlse_a = (fdma_tensor){0}; }
static void split_no_dout_b(fdma_merge_backward_args *x) { x->dout_b = (fdma_tensor){0}; }
static void split_no_dlse_b(fdma_merge_backward_args *x) { x->dlse_b = (fdma_tensor){0}; }
static void split_dout_null(fdma_merge_backward_args *x) { x->dout.data = NULL; }
static void split_lse_a_null(fdma_merge_backward_args *x) { x->lse_a.data = NULL; }
static void split_out_b_null(fdma_merge_backward_args *x) { x->out_b.data = NULL; }
static void split_dout_a_null(fdma_merge_backward_args *x) { x->dout_a.data = NULL; }
static void split_dlse_b_null(fdma_merge_backward_args *x) { x->dlse_b.data = NULL; }
static void split_dlse_shape(fdma_merge_backward_args *x) {
    x->dlse = new_tensor(FDMA_FLOAT32, 2, 5, 4, -1);
}
static void split_dlse_a_shape(fdma_merge_backward_args *x) { x->dlse_a.shape[1] = 2; }
static void split_dout_b_shape(fdma_merge_backward_args *x) { x->dout_b.shape[1] = 4; }
static void split_dout_a_dtype(fdma_merge_backward_args *x) { x->dout_a.dtype = FDMA_FLOAT32; }
static void split_dout_a_is_dout(fdma_merge_backward_args *x) { x->dout_a.data = x->dout.data; }
static void split_dout_b_is_dout_a(fdma_merge_backward_args *x) { x->dout_b.data = x->dout_a.data; }
static void split_dlse_b_is_lse_b(fdma_merge_backward_args *x) { x->dlse_b.data = x->lse_b.data; }
static void split_kernel(fdma_merge_backward_args *x) { x->exec.kernel = "gpu"; }
static void split_device(fdma_merge_backward_args *x) { x->exec.device = -7; }

static const struct {
    const char *name;
    void (*spoil)(fdma_merge_backward_args *);
    expectation want;
} merge_backward_cases[] = {
    {"size 8", split_size, {FDMA_INVALID_ARGUMENT, {"size", "8"}, 0}},
    {"no dout", split_no_dout, {FDMA_INVALID_ARGUMENT, {"dout"}, 0}},
    {"no out_a", split_no_out_a, {FDMA_INVALID_ARGUMENT, {"out_a"}, 0}},
    {"no lse_a", split_no_lse_a, {FDMA_INVALID_ARGUMENT, {"lse_a"}, 0}},
    {"no out_b", split_no_out_b, {FDMA_INVALID_ARGUMENT, {"out_b"}, 0}},
    {"no lse_b", split_no_lse_b, {FDMA_INVALID_ARGUMENT, {"lse_b"}, 0}},
    {"no dout_a", split_no_dout_a, {FDMA_INVALID_ARGUMENT, {"dout_a"}, 0}},
    {"no dlse_a", split_no_dlse_a, {FDMA_INVALID_ARGUMENT, {"dlse_a"}, 0}},
    {"no dout_b", split_no_dout_b, {FDMA_INVALID_ARGUMENT, {"dout_b"}, 0}},
    {"no dlse_b", split_no_dlse_b, {FDMA_INVALID_ARGUMENT, {"dlse_b"}, 0}},
    {"dout NULL", split_dout_null, {FDMA_INVALID_ARGUMENT, {"dout"}, 1}},
    {"lse_a NULL", split_lse_a_null, {FDMA_INVALID_ARGUMENT, {"lse_a"}, 1}},
    {"out_b NULL", split_out_b_null, {FDMA_INVALID_ARGUMENT, {"out_b"}, 1}},
    {"dout_a NULL", split_dout_a_null, {FDMA_INVALID_ARGUMENT, {"dout_a"}, 1}},
    {"dlse_b NULL", split_dlse_b_null, {FDMA_INVALID_ARGUMENT, {"dlse_b"}, 1}},
    {"dlse as [batch, q_len, q_heads]",
     split_dlse_shape,
     {FDMA_INVALID_ARGUMENT, {"dlse", "5", "4"}, 0}},
    {"heads of dlse_a", split_dlse_a_shape, {FDMA_INVALID_ARGUMENT, {"dlse_a", "2", "4"}, 0}},
    {"length of dout_b", split_dout_b_shape, {FDMA_INVALID_ARGUMENT, {"dout_b", "4", "5"}, 0}},
    {"dout_a in float32", split_dout_a_dtype, {FDMA_UNSUPPORTED, {"dout_a"}, 0}},
    {"dout_a is dout", split_dout_a_is_dout, {FDMA_INVALID_ARGUMENT, {"dout_a", "dout"}, 1}},
    {"dout_b is dout_a", split_dout_b_is_dout_a, {FDMA_INVALID_ARGUMENT, {"dout_b", "dout_a"}, 1}},
    {"dlse_b is lse_b", split_dlse_b_is_lse_b, {FDMA_INVALID_ARGUMENT, {"dlse_b", "lse_b"}, 1}},
    {"unknown kernel", split_kernel, {FDMA_UNSUPPORTED, {"kernel", "gpu"}, 0}},
    {"device -7", split_device, {FDMA_INVALID_ARGUMENT, {"device", "-7"}, 0}},
};

static void merge_backward_rejects(void) {
    for (int i = 0; i < TEST_COUNT(merge_backward_cases); i++) {
        const expectation *want = &merge_backward_cases[i].want;
        test_context("merge_backward: %s", merge_backward_cases[i].name);
        fdma_merge_backward_args args = right_merge_backward();
        CHECK_OK(fdma_merge_backward(&args));
        const call_outputs to = {{args.dout_a, args.dlse_a, args.dout_b, args.dlse_b}, 4};
        fill_outputs(&to);
        merge_backward_cases[i].spoil(&args);
        query_answers found = unanswered;
        check_status(fdma_merge_backward(&args), want);
        check_query(fdma_merge_backward_workspace(&args, &found.bytes), want);
        check_query(fdma_merge_backward_kernel(&args, &found.name), want);
        check_answers(&found, want);
        check_outputs(&to);
        test_free_all();
    }
}

static const test_entry tests[] = {
    TEST(merge_rejects),
    TEST(merge_backward_rejects),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
