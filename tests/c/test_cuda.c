/* test_cuda.c - tests that only a CUDA device needs: hundreds of runs of long problems give the
 * same bits, and biases of any size count. (tests/CMakeLists.txt also runs some CPU programs with
 * the argument "cuda", which test the kernels of a device in the same way.) */
#include "cases.h"
#include "device.h"
#include "gradient.h"

static void every_operation_has_kernels(void) {
    for (int operation = 0; operation < operation_count; operation++)
        if (!is_fused((fdma_operation)operation))
            CHECK(kernels_of(operations[operation].name).count > 0);
}

static void packed_calls_have_kernels(void) {
    static const call_sizes n = {
        .batch = 1, .q_len = 300, .kv_len = 300, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
    int packed = 0;
    for (int operation = 0; operation < operation_decode; operation++) {
        call x = {.operation = operation};
        size_t bytes = 0;
        if (operation == operation_forward)
            x.args.forward.causal = 1;
        if (operation == operation_backward)
            x.args.backward.causal = 1;
        if (operation == operation_select)
            x.args.select = (fdma_select_args){.window = 20};
        call_make(&x, &n, FDMA_BFLOAT16, true);
        call_describe_selection(&x, 20, FDMA_SCOPE_CAUSAL);
        fdma_tensor *const starts = call_tensor_named(&x, "starts");
        if (starts == NULL)
            continue;
        *starts = fdma_tensor_1d(NULL, FDMA_INT32, 9);
        call_exec(&x)->device = device_number;
        test_context("packed %s", operations[operation].name);
        CHECK_OK(operations[operation].workspace(&x.args, &bytes));
        packed++;
    }
    CHECK_INT(packed, 3); // select, forward and backward
}

/* Before each run the outputs hold the contents of the host's outputs. */
static void check_runs(const call *host, int runs) {
    call first, again, there;
    call_copy(&first, host);
    call_own_outputs(&first);
    call_copy(&again, &first);
    call_own_outputs(&again);
    device_copy_call(&there, host);
    CHECK_OK(device_run_call(&there));
    device_read_outputs(&first, &there);
    for (int run = 1; run < runs; run++) {
        call before;
        call_copy(&before, host);
        device_write_outputs(&there, &before);
        CHECK_OK(operations[there.operation].call(&there.args));
        device_read_outputs(&again, &there);
        check_same_outputs(&again, &first);
    }
    device_free_all();
}

/* ---- attention ---- */

#define LONG(n_batch, n_q, n_kv, n_q_heads, n_kv_heads, n_dim, n_window, mask)                     \
    SHAPE("long", n_batch, n_q, n_kv, n_q_heads, n_kv_heads, n_dim, n_window, mask, NONE, 0, IID,  \
          PLAIN, NONE)

static const shape_case forward_cases[] = {
    LONG(1, 1200, 1200, 8, 2, 128, 200, CAUSAL), LONG(2, 700, 1500, 4, 4, 64, -1, CAUSAL),
    LONG(3, 1, 9000, 8, 2, 128, -1, CAUSAL),     LONG(2, 7, 20000, 8, 2, 64, 3000, CAUSAL),
    LONG(2, 300, 2000, 2, 1, 256, 333, FULL),
};

/* The seed is odd, so all keys are valid and key_valid is not needed. */
static problem unpadded(const shape_case *n, uint64_t seed, fdma_dtype dtype) {
    problem x = shape_problem(n, seed, dtype);
    x.key_valid = (fdma_tensor){0};
    return x;
}

static void check_alone(const problem *x, const char *kernel) {
    const problem last = last_problem(x);
    const attended all = problem_attend(x, kernel, 1);
    const attended want = {last_of(all.out), last_of(all.lse)};
    check_same_results(problem_attend(&last, kernel, 1), want);
}

static void results_repeat(const char *kernel, fdma_dtype dtype) {
    for (int shape = 0; shape < TEST_COUNT(forward_cases); shape++) {
        const problem x = unpadded(&forward_cases[shape], 7, dtype);
        const fdma_forward_args args = problem_args(&x, kernel);
        call host;
        test_context("%s, shape %d, %s", kernel, shape, dtype_name(dtype));
        if (problem_is_taken(&x, kernel)) {
            call_of(&host, operation_forward, &args);
            check_runs(&host, 200);
            check_alone(&x, kernel);
        }
        test_free_all();
    }
}

static const shape_case backward_cases[] = {
    SHAPE("iid", 1, 1200, 1200, 8, 2, 128, 200, CAUSAL, LINEAR, 0, IID, PLAIN, NONE),
    SHAPE("rising", 2, 700, 1500, 4, 4, 64, 100, CAUSAL, LINEAR, 0, RISING, PLAIN, NONE),
    SHAPE("dense", 1, 900, 900, 4, 1, 128, -1, CAUSAL, LINEAR, 0, IID, PLAIN, NONE),
    SHAPE("full", 2, 300, 1000, 2, 1, 256, 333, FULL, LINEAR, 0, IID, PLAIN, HOLES),
    SHAPE("crown", 1, 1500, 1500, 2, 1, 96, 3, CAUSAL, LINEAR, 0, CROWN, PLAIN, NONE),
    SHAPE("saw", 1, 1100, 1100, 16, 1, 192, 70, CAUSAL, LINEAR, 2, SAW, PLAIN, NONE),
};

static void gradients_repeat(void) {
    const kernel_list kernels = kernels_of("backward");
    for (int s = 0; s < TEST_COUNT(backward_cases); s++) {
        const problem x = shape_problem(&backward_cases[s], 91, test_dtypes[1 + s % 2]);
        gradient_problem p = gradient_of(&x, 1);
        p.deterministic = 1;
        for (int kernel = 0; kernel < kernels.count; kernel++) {
            const fdma_backward_args args = gradient_args(&p, kernels.name[kernel]);
            call host;
            test_context("%s, %s", kernels.name[kernel], backward_cases[s].name);
            call_of(&host, operation_backward, &args);
            if (call_takes(operation_backward, &host.args))
                check_runs(&host, 200);
        }
        test_free_all();
    }
}

/* Every seventh key has a bias of either sign that dwarfs the products. */
static void fill_large_biases(const problem *x) {
    float *const bias = x->bias.data;
    for (int64_t at = 0; at < count_of(x->bias); at += 7)
        bias[at] = (at % 2 == 0 ? 1e30F : -1e30F) * (1 + (float)(at % x->kv_len) / 1000);
}

/* For any scale: bias / scale need not be a float32. */
static void biases_of_any_size_count(void) {
    static const shape_case shapes[] = {LONG(1, 200, 300, 4, 2, 64, 90, CAUSAL),
                                        LONG(1, 200, 300, 4, 2, 128, 90, CAUSAL),
                                        LONG(1, 200, 300, 4, 2, 256, 90, CAUSAL)};
    static const double scales[] = {0, 1e-39, 3};
    for (int i = 0; i < TEST_COUNT(shapes) * TEST_COUNT(scales) * 4; i++) {
        const fdma_dtype dtype = test_dtypes[1 + i / 2 % 2];
        const bool large = i % 2;
        problem x = unpadded(&shapes[i / 4 / TEST_COUNT(scales)], 3, dtype);
        x.scale = scales[i / 4 % TEST_COUNT(scales)];
        if (large)
            fill_large_biases(&x);
        fdma_forward_args args = problem_args(&x, NULL);
        test_context("head_dim %d, %s, scale %g, large %d", (int)x.head_dim, dtype_name(dtype),
                     x.scale, large);
        CHECK_OK(device_run(operation_forward, &args));
        check_close_results(&x, (attended){args.out, args.lse}, problem_attend(&x, "reference", 1));
        test_free_all();
    }
}

/* ---- scores ---- */

static const call_sizes score_sizes[] = {
    {.batch = 1, .kv_len = 1, .kv_heads = 1, .head_dim = 8},
    {.batch = 2, .kv_len = 1000, .kv_heads = 2, .head_dim = 64},
    {.batch = 3, .kv_len = 777, .kv_heads = 5, .head_dim = 40},
    {.batch = 2, .kv_len = 500, .kv_heads = 32, .head_dim = 128},
    {.batch = 2, .kv_len = 300, .kv_heads = 8, .head_dim = 256},
};

static void check_score_alone(const call *host) {
    call all, last;
    call_copy(&all, host);
    CHECK_OK(call_run(&all));
    call_copy(&last, host);
    fdma_score_args *const args = &last.args.score;
    args->v = last_of(args->v);
    args->key_valid = last_of(args->key_valid);
    args->score = copy_tensor(last_of(args->score));
    args->bias = (fdma_tensor){0};
    CHECK_OK(call_run(&last));
    CHECK(same_tensor(args->score, last_of(all.args.score.score)));
}

static void scores_repeat(const char *kernel, fdma_dtype dtype) {
    for (int n = 0; n < TEST_COUNT(score_sizes); n++) {
        call x = {.operation = operation_score};
        uint64_t state = 3;
        test_context("%s %s, shape %d", kernel, dtype_name(dtype), n);
        call_make(&x, &score_sizes[n], dtype, true);
        call_alloc(&x, &state);
        call_exec(&x)->kernel = kernel;
        check_runs(&x, 20);
        check_score_alone(&x);
        test_free_all();
    }
}

/* The call adds to dv, so dv starts from the same values each time. */
static void gradients_of_scores_repeat(const char *kernel, fdma_dtype dtype) {
    static const call_sizes n = {.batch = 2, .kv_len = 1500, .kv_heads = 4, .head_dim = 64};
    call x = {.operation = operation_score_backward};
    uint64_t state = 23;
    call_make(&x, &n, dtype, true);
    call_alloc(&x, &state);
    x.args.score_backward.dv = copy_tensor(x.args.score_backward.v);
    call_exec(&x)->kernel = kernel;
    check_runs(&x, 200);
}

static const test_entry tests[] = {
    TEST(every_operation_has_kernels),
    TEST(packed_calls_have_kernels),
    EACH_KERNEL("forward", results_repeat),
    TEST(gradients_repeat),
    TEST(biases_of_any_size_count),
    EACH_KERNEL("score", scores_repeat),
    EACH_KERNEL("score_backward", gradients_of_scores_repeat),
};

int main(void) { return device_test_run(tests, TEST_COUNT(tests)); }
