/* test_backward_shapes.c - every backward kernel, in every dtype that it takes, on cases that are
 * hard for such kernels: checks the gradients, and that their bits depend only on their inputs. All
 * calls are deterministic except those that say so: only a device has another form, whose bits may
 * differ from run to run. */
#include "backend.h"
#include "gradient_properties.h"

typedef void (*property)(const gradient_problem *p, const char *kernel);

/* Calls `holds` for every stride-th case that a kernel takes: some properties are slow to test on a
 * device, or depend little on the shape. The reference is slow and computes in double for every
 * dtype, so it is tested in one dtype. */
static void for_some_cases(property holds, int deterministic, int stride) {
    for (int type = first_dtype(); type < test_dtype_count; type++) {
        const fdma_dtype dtype = test_dtypes[type];
        const kernel_list kernels = kernels_for("backward", dtype);
        int taken[kernel_limit] = {0};
        for (int n = 0; n < TEST_COUNT(gradient_cases); n++) {
            if (is_left_out(n, type))
                continue;
            const problem x = case_problem(find_case(gradient_cases[n]), dtype);
            gradient_problem p = gradient_of(&x, (n + type) % 2);
            p.deterministic = deterministic;
            for (int i = 0; i < kernels.count; i++) {
                test_context("%s %s, %s", kernels.name[i], dtype_name(dtype), gradient_cases[n]);
                if ((type == 0 || !is_reference(kernels.name[i])) &&
                    gradient_is_taken(&p, kernels.name[i]) && taken[i]++ % stride == 0)
                    holds(&p, kernels.name[i]);
            }
            test_free_all();
        }
        for (int i = 0; i < kernels.count; i++) {
            test_context("%s %s", kernels.name[i], dtype_name(dtype));
            CHECK(taken[i] > 0 || is_reference(kernels.name[i]));
        }
    }
}

static void for_each_case(property holds, int device_stride) {
    for_some_cases(holds, 1, test_backend.run != NULL ? device_stride : 1);
}

static void gradients_are_right(void) { for_each_case(check_right, 1); }
static void runs_and_threads_are_equal(void) { for_each_case(check_repeats, 3); }
static void each_sequence_is_alone(void) { for_each_case(check_alone, 1); }
static void gradients_accumulate(void) { for_each_case(check_accumulated, 5); }
static void bias_and_its_gradient_are_optional(void) { for_each_case(check_optional, 5); }
static void memory_order_does_not_matter(void) { for_each_case(check_layouts, 3); }
static void repeated_inputs_are_as_copies(void) { for_each_case(check_repeats_of_inputs, 5); }
static void nan_rows_stay_with_their_keys(void) { for_each_case(check_nan_row, 3); }
static void corrupt_selections_stay_inside(void) {
    for_some_cases(check_corrupt, 1, test_backend.run != NULL ? 17 : 5);
}

/* ---- keys that no query keeps ---- */

static void unread_keys_do_not_show(const char *kernel, fdma_dtype dtype) {
    for (int s = 0; s < TEST_COUNT(unread_cases); s++) {
        test_context("%s %s, %s", kernel, dtype_name(dtype), unread_cases[s]);
        if (dtype == FDMA_FLOAT32 || !is_reference(kernel))
            check_unread(unread_cases[s], kernel, dtype);
    }
}

static void read_keys_show(void) { for_each_kernel("backward", check_read_shows); }

/* ---- calls that are not deterministic ---- */

/* The nondeterministic form has no bits to compare, so the poison is not finite. */
static void unread_keys_do_not_show_in_fast_gradients(const char *kernel, fdma_dtype dtype) {
    for (int s = 0; s < TEST_COUNT(unread_cases); s++) {
        problem x = unread_problem(unread_cases[s], dtype);
        const gradient_problem p = gradient_of(&x, 1);
        test_context("%s %s, %s", kernel, dtype_name(dtype), unread_cases[s]);
        if (test_dtypes[1 + s % 2] != dtype || !gradient_is_taken(&p, kernel))
            continue;
        CHECK(poison_unread(&x, NAN) > 0);
        const gradients got = gradient_run(&p, kernel, 1);
        for (int t = 0; t < TEST_COUNT(got.all); t++)
            for (int64_t i = 0; i < count_of(got.all[t]); i++)
                CHECK(isfinite(load_double(got.all[t].data, got.all[t].dtype, i)));
        check_unread_zero(&x, got);
    }
}

static void fast_gradients_are_right(void) { for_some_cases(check_right, 0, 1); }
static void corrupt_selections_stay_inside_in_fast_calls(void) {
    for_some_cases(run_corrupt, 0, 19);
}

/* ---- more query blocks than fit a device at once ---- */

/* A thread block then computes the arriving keys of several query blocks; for a sequence alone it
 * computes those of one query block. In some query blocks between them no key arrives. */
static const shape_case large_cases[] = {
    SHAPE("saw", 44, 390, 390, 8, 8, 64, 20, CAUSAL, LINEAR, 0, SAW, PLAIN, NONE),
    SHAPE("falling", 44, 390, 390, 8, 8, 64, 150, CAUSAL, LINEAR, 0, FALLING, PLAIN, NONE),
    SHAPE("wide", 22, 390, 390, 8, 8, 256, 90, CAUSAL, LINEAR, 0, RISING, PLAIN, NONE),
};

static void many_query_blocks_are_each_alone(const char *kernel, fdma_dtype dtype) {
    for (int s = 0; s < TEST_COUNT(large_cases) && dtype == FDMA_BFLOAT16; s++) {
        const problem x = shape_problem(&large_cases[s], 91, dtype);
        gradient_problem p = gradient_of(&x, 1);
        p.deterministic = 1;
        test_context("%s, %s", kernel, large_cases[s].name);
        if (gradient_is_taken(&p, kernel))
            check_alone(&p, kernel);
    }
}

/* In this selection all keys leave at once, so later lists have fewer keys than earlier ones. No
 * selection of this library is like that, but blocks that wait for one another must still end. */
static void keys_that_all_leave_stop_nothing(const char *kernel, fdma_dtype dtype) {
    const shape_case n =
        SHAPE("leave", 8, 1024, 1024, 32, 32, 8, 200, CAUSAL, LINEAR, 0, IID, PLAIN, NONE);
    if (dtype != FDMA_BFLOAT16)
        return;
    const problem x = shape_problem(&n, 91, dtype);
    gradient_problem p = gradient_of(&x, 0);
    int32_t *const expiry = p.x.selection.expiry.data;
    for (int64_t i = 0; i < count_of(p.x.selection.expiry); i++)
        expiry[i] = expiry[i] < 896 ? expiry[i] : 896;
    for (p.deterministic = 0; p.deterministic < 2; p.deterministic++)
        if (gradient_is_taken(&p, kernel))
            gradient_run(&p, kernel, 1);
}

/* ---- outputs that the fused call, and its step of scores, add to ---- */

enum { fused_outputs = 6 }; /* dq, dk, dv, ddt_proj, da, ddt_bias */

/* Fills the outputs with random numbers, copies these to `held`, and writes the gradients or adds
 * them. */
static void run_fused(const gradient_problem *p, const char *kernel, int accumulate,
                      fdma_tensor to[fused_outputs], fdma_tensor held[fused_outputs]) {
    const problem *x = &p->x;
    const fdma_tensor dt_proj =
        new_tensor(x->dtype, x->kv_heads, x->kv_heads * x->head_dim, -1, -1);
    const fdma_tensor a = new_tensor(FDMA_FLOAT32, x->kv_heads, -1, -1, -1);
    const fdma_tensor dt_bias = new_tensor(x->dtype, x->kv_heads, -1, -1, -1);
    const fdma_tensor like[fused_outputs] = {x->q, x->k, x->v, dt_proj, a, dt_bias};
    uint64_t state = 6;
    fill_random(dt_proj, &state, 0.2F);
    fill_random(a, &state, 1);
    fill_random(dt_bias, &state, 1);
    for (int i = 0; i < fused_outputs; i++) {
        to[i] = copy_tensor(like[i]);
        fill_random(to[i], &state, 1);
        held[i] = copy_tensor(to[i]);
    }
    fdma_attention_backward_args args = fused_args(p, dt_proj, a, FDMA_BIAS_LINEAR, to, kernel);
    args.dt_bias = dt_bias;
    args.ddt_bias = to[5];
    args.bias = x->bias;
    args.accumulate = accumulate;
    CHECK_OK(run_attention_backward(&args));
}

static void the_fused_call_accumulates(const char *kernel, fdma_dtype dtype) {
    const problem x = unread_problem(unread_cases[0], dtype);
    const gradient_problem p = gradient_of(&x, 1);
    fdma_tensor alone[fused_outputs], sum[fused_outputs], held[fused_outputs];
    run_fused(&p, kernel, 0, alone, held);
    run_fused(&p, kernel, 1, sum, held);
    for (int i = 0; i < fused_outputs; i++)
        check_added(sum[i], held[i], alone[i]);
}

static const test_entry tests[] = {
    TEST(gradients_are_right),
    TEST(runs_and_threads_are_equal),
    TEST(each_sequence_is_alone),
    TEST(gradients_accumulate),
    EACH_KERNEL("backward", the_fused_call_accumulates),
    TEST(bias_and_its_gradient_are_optional),
    TEST(memory_order_does_not_matter),
    TEST(repeated_inputs_are_as_copies),
    EACH_KERNEL("backward", unread_keys_do_not_show),
    TEST(read_keys_show),
    TEST(corrupt_selections_stay_inside),
    TEST(nan_rows_stay_with_their_keys),
};

static const test_entry device_tests[] = {
    TEST(gradients_are_right),
    TEST(runs_and_threads_are_equal),
    TEST(each_sequence_is_alone),
    TEST(gradients_accumulate),
    TEST(bias_and_its_gradient_are_optional),
    TEST(memory_order_does_not_matter),
    TEST(repeated_inputs_are_as_copies),
    EACH_KERNEL("backward", unread_keys_do_not_show),
    TEST(corrupt_selections_stay_inside),
    TEST(nan_rows_stay_with_their_keys),
    TEST(fast_gradients_are_right),
    EACH_KERNEL("backward", unread_keys_do_not_show_in_fast_gradients),
    TEST(corrupt_selections_stay_inside_in_fast_calls),
    EACH_KERNEL("backward", many_query_blocks_are_each_alone),
    EACH_KERNEL("backward", keys_that_all_leave_stop_nothing),
};

int main(int argc, char **argv) {
    return argc > 1 ? test_run_backend(argc, argv, device_tests, TEST_COUNT(device_tests))
                    : test_run(tests, TEST_COUNT(tests));
}
