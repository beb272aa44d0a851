/* test_backward_shapes.c - every backward kernel of the CPU, in every type that it takes, at shapes
 * where such kernels go wrong: right, and bit-equal whatever must not matter. */
#include "gradient_properties.h"
#include "gradient_shapes.h"

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

/* The reference works in double whatever the type: one is enough, of what is slow. */
static kernel_list backward_kernels(fdma_dtype dtype) {
    kernel_list all = kernels_for("backward", dtype), some = {.count = 0};
    for (int i = 0; i < all.count; i++) {
        if (dtype == FDMA_FLOAT32 || strcmp(all.name[i], "reference") != 0) {
            some.name[some.count++] = all.name[i];
        }
    }
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

/* `stride`: of shapes that are taken, where a property is slow and cares for few of their facts. */
static void for_some_shapes(property holds, int stride) {
    for (int type = 0; type < problem_dtype_count; type++) {
        const fdma_dtype dtype = problem_dtypes[type];
        const kernel_list kernels = backward_kernels(dtype);
        for (int s = 0; s < TEST_COUNT(gradient_shapes) && kernels.count > 0; s += stride) {
            const problem x = gradient_shape_problem(&gradient_shapes[s], dtype);
            const gradient_problem p = gradient_of(&x, (s + type) % 2);
            for (int kernel = 0; kernel < kernels.count; kernel++) {
                test_context("%s %s, %s", kernels.name[kernel], dtype_name(dtype),
                             gradient_shapes[s].name);
                holds(&p, kernels.name[kernel]);
            }
            test_free_all();
        }
    }
}

static void for_each_shape(property holds) { for_some_shapes(holds, 1); }

static void gradients_are_right(void) { for_each_shape(check_right); }
static void runs_and_threads_are_equal(void) { for_each_shape(check_repeats); }
static void each_sequence_is_alone(void) { for_each_shape(check_alone); }
static void gradients_accumulate(void) { for_each_shape(check_accumulated); }
static void bias_and_its_gradient_are_optional(void) { for_each_shape(check_optional); }
static void memory_order_does_not_matter(void) { for_each_shape(check_layouts); }
static void nan_rows_stay_with_their_keys(void) { for_each_shape(check_nan_row); }

static void corrupt_selections_stay_inside(void) { for_some_shapes(check_corrupt, 5); }

static void check_unread_shapes(const char *kernel, fdma_dtype dtype) {
    for (int s = 0; s < TEST_COUNT(unread_shapes); s++) {
        test_context("%s %s, shape %d", kernel, dtype_name(dtype), s);
        check_unread(&unread_shapes[s], kernel, dtype);
    }
}

static void unread_keys_do_not_show(void) { for_each_kernel(check_unread_shapes); }
static void read_keys_show(void) { for_each_kernel(check_read_shows); }

/* ---- what the fused call, and in it that of scores, adds to ---- */

enum { whole_outputs = 5 };

typedef struct whole_gradients {
    fdma_tensor to[whole_outputs]; /* dq, dk, dv, ddt_proj, da */
} whole_gradients;

/* Into outputs that hold random numbers; `held`: these, NULL where they do not count. */
static whole_gradients run_whole(const gradient_problem *p, const char *kernel,
                                 whole_gradients *held) {
    const problem *x = &p->x;
    const int64_t heads = x->kv_heads, width = heads * x->head_dim;
    const fdma_tensor dt_proj = new_tensor(x->dtype, heads, width, -1, -1);
    const fdma_tensor a = new_tensor(FDMA_FLOAT32, heads, -1, -1, -1);
    const whole_gradients got = {{copy_tensor(x->q), copy_tensor(x->k), copy_tensor(x->v),
                                  copy_tensor(dt_proj), copy_tensor(a)}};
    uint64_t state = 6;
    fill_random(dt_proj, &state, 0.2F);
    fill_random(a, &state, 1);
    for (int i = 0; i < whole_outputs; i++) {
        fill_random(got.to[i], &state, 1);
        if (held != NULL) {
            held->to[i] = copy_tensor(got.to[i]);
        }
    }
    fdma_attention_backward_args args = {
        .size = sizeof args,
        .dout = p->dout,
        .dlse = p->dlse,
        .out = p->out,
        .lse = p->lse,
        .q = x->q,
        .k = x->k,
        .v = x->v,
        .dt_proj = dt_proj,
        .a = a,
        .bias = x->bias,
        .dq = got.to[0],
        .dk = got.to[1],
        .dv = got.to[2],
        .ddt_proj = got.to[3],
        .da = got.to[4],
        .selection = &x->selection,
        .bias_form = FDMA_BIAS_LINEAR,
        .causal = x->causal,
        .accumulate = held != NULL,
        .exec = {.kernel = kernel, .threads = 2},
    };
    CHECK_OK(run_attention_backward(&args));
    return got;
}

static void check_whole_accumulated(const char *kernel, fdma_dtype dtype) {
    const problem x = unread_problem(&unread_shapes[0], dtype);
    const gradient_problem p = gradient_of(&x, 1);
    whole_gradients held;
    const whole_gradients alone = run_whole(&p, kernel, NULL);
    const whole_gradients sum = run_whole(&p, kernel, &held);
    for (int i = 0; i < whole_outputs; i++) {
        check_added(sum.to[i], held.to[i], alone.to[i]);
    }
}

static void the_fused_call_accumulates(void) { for_each_kernel(check_whole_accumulated); }

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
