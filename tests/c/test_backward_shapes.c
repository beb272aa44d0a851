/* test_backward_shapes.c - every backward kernel of the CPU, in every dtype that it takes, on the
 * cases where such kernels go wrong: its gradients are right, and their bits do not depend on what
 * must not matter. */
#include "gradient_properties.h"

static fdma_status run_here(fdma_backward_args *args) {
    size_t bytes = 0;
    FDMA_TRY(fdma_backward_workspace(args, &bytes));
    exec_alloc(&args->exec, bytes);
    memset(args->exec.workspace, gradient_backend.fill, bytes);
    return fdma_backward(args);
}

static fdma_status ask_here(fdma_backward_args *args, size_t *bytes) {
    return fdma_backward_workspace(args, bytes);
}

typedef void (*property)(const gradient_problem *p, const char *kernel);

/* The reference is slow, and computes in double whatever the dtype: it is tested in one of them. */
static kernel_list backward_kernels(fdma_dtype dtype) {
    kernel_list all = kernels_for("backward", dtype), some = {.count = 0};
    for (int i = 0; i < all.count; i++)
        if (dtype == FDMA_FLOAT32 || strcmp(all.name[i], "reference") != 0)
            some.name[some.count++] = all.name[i];
    return some;
}

static void for_each_kernel(void (*run)(const char *kernel, fdma_dtype dtype)) {
    for (int type = 0; type < problem_dtype_count; type++) {
        const kernel_list kernels = backward_kernels(problem_dtypes[type]);
        for (int kernel = 0; kernel < kernels.count; kernel++) {
            test_context("%s %s", kernels.name[kernel], dtype_name(problem_dtypes[type]));
            run(kernels.name[kernel], problem_dtypes[type]);
            test_free_all();
        }
    }
}

/* Every stride-th case: some properties are slow to test and depend on little of the shape. */
static void for_some_cases(property holds, int stride) {
    for (int type = 0; type < problem_dtype_count; type++) {
        const fdma_dtype dtype = problem_dtypes[type];
        const kernel_list kernels = backward_kernels(dtype);
        for (int n = 0; n < TEST_COUNT(gradient_cases); n += stride) {
            const problem x = case_problem(find_case(gradient_cases[n]), dtype);
            const gradient_problem p = gradient_of(&x, (n + type) % 2);
            for (int kernel = 0; kernel < kernels.count; kernel++) {
                test_context("%s %s, %s", kernels.name[kernel], dtype_name(dtype),
                             gradient_cases[n]);
                holds(&p, kernels.name[kernel]);
            }
            test_free_all();
        }
    }
}

static void for_each_case(property holds) { for_some_cases(holds, 1); }

static void gradients_are_right(void) { for_each_case(check_right); }
static void runs_and_threads_are_equal(void) { for_each_case(check_repeats); }
static void each_sequence_is_alone(void) { for_each_case(check_alone); }
static void gradients_accumulate(void) { for_each_case(check_accumulated); }
static void bias_and_its_gradient_are_optional(void) { for_each_case(check_optional); }
static void memory_order_does_not_matter(void) { for_each_case(check_layouts); }
static void nan_rows_stay_with_their_keys(void) { for_each_case(check_nan_row); }

static void corrupt_selections_stay_inside(void) { for_some_cases(check_corrupt, 5); }

static void check_unread_cases(const char *kernel, fdma_dtype dtype) {
    for (int s = 0; s < TEST_COUNT(unread_cases); s++) {
        test_context("%s %s, unread case %d", kernel, dtype_name(dtype), s);
        check_unread(unread_cases[s], kernel, dtype);
    }
}

static void unread_keys_do_not_show(void) { for_each_kernel(check_unread_cases); }
static void read_keys_show(void) { for_each_kernel(check_read_shows); }

/* ---- what the fused call, and in it that of scores, adds to ---- */

enum { fused_outputs = 5 }; /* dq, dk, dv, ddt_proj, da */

/* Fills the outputs with random numbers, keeps a copy of these in `held`, and writes the gradients
 * or adds them. */
static void run_fused(const gradient_problem *p, const char *kernel, int accumulate,
                      fdma_tensor to[fused_outputs], fdma_tensor held[fused_outputs]) {
    const problem *x = &p->x;
    const fdma_tensor dt_proj =
        new_tensor(x->dtype, x->kv_heads, x->kv_heads * x->head_dim, -1, -1);
    const fdma_tensor a = new_tensor(FDMA_FLOAT32, x->kv_heads, -1, -1, -1);
    const fdma_tensor like[fused_outputs] = {x->q, x->k, x->v, dt_proj, a};
    uint64_t state = 6;
    fill_random(dt_proj, &state, 0.2F);
    fill_random(a, &state, 1);
    for (int i = 0; i < fused_outputs; i++) {
        to[i] = copy_tensor(like[i]);
        fill_random(to[i], &state, 1);
        held[i] = copy_tensor(to[i]);
    }
    fdma_attention_backward_args args = fused_args(p, dt_proj, a, FDMA_BIAS_LINEAR, to, kernel);
    args.bias = x->bias;
    args.accumulate = accumulate;
    CHECK_OK(run_attention_backward(&args));
}

static void check_fused_accumulated(const char *kernel, fdma_dtype dtype) {
    const problem x = unread_problem(unread_cases[0], dtype);
    const gradient_problem p = gradient_of(&x, 1);
    fdma_tensor alone[fused_outputs], sum[fused_outputs], held[fused_outputs];
    run_fused(&p, kernel, 0, alone, held);
    run_fused(&p, kernel, 1, sum, held);
    for (int i = 0; i < fused_outputs; i++)
        check_added(sum[i], held[i], alone[i]);
}

static void the_fused_call_accumulates(void) { for_each_kernel(check_fused_accumulated); }

static const test_entry tests[] = {
    TEST(gradients_are_right),
    TEST(runs_and_threads_are_equal),
    TEST(each_sequence_is_alone),
    TEST(gradients_accumulate),
    TEST(the_fused_call_accumulates),
    TEST(bias_and_its_gradient_are_optional),
    TEST(memory_order_does_not_matter),
    TEST(unread_keys_do_not_show),
    TEST(read_keys_show),
    TEST(corrupt_selections_stay_inside),
    TEST(nan_rows_stay_with_their_keys),
};

int main(void) {
    gradient_backend.run = run_here;
    gradient_backend.ask = ask_here;
    gradient_backend.most_threads = 5;
    return test_run(tests, TEST_COUNT(tests));
}
