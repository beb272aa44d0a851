/* test_cuda_backward.c - gradients on a CUDA device: every row at the shapes where such kernels go
 * wrong, in both forms, and what the deterministic form must not show. (`fdma check --device cuda`
 * walks cases.def.) */
#include "device.h"
#include "gradient_properties.h"

/* ---- calls whose tensors the CPU has, on the device ---- */

enum { backward_tensors = 15 };

static void list_tensors(fdma_backward_args *args, fdma_selection *selection,
                         fdma_tensor *list[backward_tensors]) {
    fdma_tensor *const all[backward_tensors] = {
        &args->dq,   &args->dk,   &args->dv,        &args->dbias,       &args->dout,
        &args->dlse, &args->out,  &args->lse,       &args->q,           &args->k,
        &args->v,    &args->bias, &args->key_valid, &selection->expiry, &selection->slot,
    };
    memcpy(list, all, sizeof all);
}

/* A copy of the arguments there: with what lies between rows, and what outputs hold. */
static fdma_backward_args upload(const fdma_backward_args *args, fdma_selection *selection) {
    fdma_backward_args there = *args;
    fdma_tensor *list[backward_tensors];
    *selection = args->selection != NULL ? *args->selection : (fdma_selection){0};
    list_tensors(&there, selection, list);
    for (int i = 0; i < backward_tensors; i++)
        *list[i] = device_tensor(*list[i]);
    there.selection = args->selection != NULL ? selection : NULL;
    return there;
}

static void download(const fdma_backward_args *args, const fdma_backward_args *there) {
    device_wait();
    device_read_into(args->dq, there->dq);
    device_read_into(args->dk, there->dk);
    device_read_into(args->dv, there->dv);
    if (args->dbias.rank > 0)
        device_read_into(args->dbias, there->dbias);
}

static fdma_status run_there(fdma_backward_args *args) {
    fdma_selection selection;
    fdma_backward_args there = upload(args, &selection);
    device_state.fill = gradient_backend.fill;
    const fdma_status status = device_run_backward(&there);
    download(args, &there);
    device_free_all();
    return status;
}

static fdma_status ask_there(fdma_backward_args *args, size_t *bytes) {
    args->exec.device = device_number;
    const fdma_status status = fdma_backward_workspace(args, bytes);
    args->exec.device = 0;
    return status;
}

/* ---- properties ---- */

typedef void (*property)(const gradient_problem *p, const char *kernel);

/* Every stride-th of the cases that a kernel takes: some properties are slow to test. */
static void for_some_cases(property holds, int deterministic, int stride) {
    const kernel_list kernels = device_kernels("backward");
    int taken[kernel_limit] = {0};
    for (int i = 0; i < TEST_COUNT(gradient_cases) * device_dtype_count; i++) {
        const fdma_dtype dtype = device_dtypes[i % device_dtype_count];
        const char *const name = gradient_cases[i / device_dtype_count];
        const problem x = case_problem(find_case(name), dtype);
        gradient_problem p = gradient_of(&x, i % 3 > 0);
        p.deterministic = deterministic;
        for (int kernel = 0; kernel < kernels.count; kernel++) {
            test_context("%s %s, %s", kernels.name[kernel], dtype_name(dtype), name);
            if (gradient_backend_takes(&p, kernels.name[kernel]) && taken[kernel]++ % stride == 0)
                holds(&p, kernels.name[kernel]);
        }
        test_free_all();
    }
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        test_context("%s", kernels.name[kernel]);
        CHECK(taken[kernel] > 0);
    }
}

static void for_each_case(property holds, int deterministic) {
    for_some_cases(holds, deterministic, 1);
}

static void every_gradient_has_rows(void) {
    CHECK(device_kernels("backward").count > 0);
    CHECK(device_kernels("score_backward").count > 0);
    CHECK(device_kernels("merge").count > 0);
    CHECK(device_kernels("merge_backward").count > 0);
}

static void gradients_are_right(void) { for_each_case(check_right, 0); }
static void deterministic_gradients_are_right(void) { for_each_case(check_right, 1); }
static void runs_are_equal(void) { for_some_cases(check_repeats, 1, 3); }
static void each_sequence_is_alone(void) { for_each_case(check_alone, 1); }
static void gradients_accumulate(void) { for_some_cases(check_accumulated, 1, 5); }
static void bias_and_its_gradient_are_optional(void) { for_some_cases(check_optional, 1, 5); }
static void memory_order_does_not_matter(void) { for_some_cases(check_layouts, 1, 3); }
static void nan_rows_stay_with_their_keys(void) { for_some_cases(check_nan_row, 1, 3); }

static void corrupt_selections_stay_inside(void) {
    for_some_cases(check_corrupt, 1, 17);
    for_some_cases(run_corrupt, 0, 19); /* the fast form has no bits to hold it to */
}

/* ---- more epochs than a device has room for at once ---- */

/* A block of threads takes several lists' arriving keys then, of a sequence by itself one's; in
 * between, lists in which none arrives. */
static const shape_case crowd_cases[] = {
    SHAPE("saw", 44, 390, 390, 8, 8, 64, 20, CAUSAL, LINEAR, 0, SAW, PLAIN, NONE),
    SHAPE("falling", 44, 390, 390, 8, 8, 64, 150, CAUSAL, LINEAR, 0, FALLING, PLAIN, NONE),
    SHAPE("wide", 22, 390, 390, 8, 8, 256, 90, CAUSAL, LINEAR, 0, RISING, PLAIN, NONE),
};

static void many_epochs_are_each_alone(void) {
    const kernel_list kernels = device_kernels("backward");
    for (int i = 0; i < TEST_COUNT(crowd_cases) * kernels.count; i++) {
        const shape_case *n = &crowd_cases[i / kernels.count];
        const char *kernel = kernels.name[i % kernels.count];
        const problem x = shape_problem(n, 91, FDMA_BFLOAT16);
        gradient_problem p = gradient_of(&x, 1);
        p.deterministic = 1;
        test_context("%s, %s", kernel, n->name);
        if (gradient_backend_takes(&p, kernel))
            check_alone(&p, kernel);
        test_free_all();
    }
}

/* Of a selection in which all keys leave at once, later lists have fewer keys than those before,
 * which no selection of this library has: blocks that wait for one another must still end. */
static void keys_that_all_leave_stop_nothing(void) {
    const shape_case n =
        SHAPE("leave", 8, 1024, 1024, 32, 32, 8, 200, CAUSAL, LINEAR, 0, IID, PLAIN, NONE);
    const kernel_list kernels = device_kernels("backward");
    const problem x = shape_problem(&n, 91, FDMA_BFLOAT16);
    gradient_problem p = gradient_of(&x, 0);
    int32_t *const expiry = p.x.selection.expiry.data;
    for (int64_t i = 0; i < count_of(p.x.selection.expiry); i++)
        expiry[i] = expiry[i] < 896 ? expiry[i] : 896;
    for (p.deterministic = 0; p.deterministic < 2; p.deterministic++) {
        for (int kernel = 0; kernel < kernels.count; kernel++) {
            test_context("%s", kernels.name[kernel]);
            if (gradient_backend_takes(&p, kernels.name[kernel]))
                gradient_run(&p, kernels.name[kernel], 1);
        }
    }
    test_free_all();
}

/* ---- keys that none keeps ---- */

static void unread_keys_do_not_show(void) {
    const kernel_list kernels = device_kernels("backward");
    for (int i = 0; i < kernels.count * TEST_COUNT(unread_cases) * device_dtype_count; i++) {
        const fdma_dtype dtype = device_dtypes[i % device_dtype_count];
        const int s = i / device_dtype_count % TEST_COUNT(unread_cases);
        const char *kernel = kernels.name[i / device_dtype_count / TEST_COUNT(unread_cases)];
        test_context("%s %s, unread case %d", kernel, dtype_name(dtype), s);
        check_unread(unread_cases[s], kernel, dtype);
        test_free_all();
    }
}

/* The fast form has no bits to hold it to: what is poisoned is not finite. */
static void check_unread_fast(const char *name, const char *kernel, fdma_dtype dtype) {
    problem x = unread_problem(name, dtype);
    const gradient_problem p = gradient_of(&x, 1);
    if (!gradient_backend_takes(&p, kernel))
        return;
    CHECK(poison_unread(&x, NAN) > 0);
    const gradients got = gradient_run(&p, kernel, 1);
    const fdma_tensor all[] = {got.dq, got.dk, got.dv, got.dbias};
    for (int t = 0; t < TEST_COUNT(all); t++)
        for (int64_t i = 0; i < count_of(all[t]); i++)
            CHECK(isfinite(load_double(all[t].data, all[t].dtype, i)));
    check_unread_zero(&x, got);
}

static void unread_keys_do_not_show_in_the_fast_form(void) {
    const kernel_list kernels = device_kernels("backward");
    for (int i = 0; i < kernels.count * TEST_COUNT(unread_cases); i++) {
        const int s = i % TEST_COUNT(unread_cases);
        const char *kernel = kernels.name[i / TEST_COUNT(unread_cases)];
        test_context("%s, unread case %d", kernel, s);
        check_unread_fast(unread_cases[s], kernel, device_dtypes[s % device_dtype_count]);
        test_free_all();
    }
}

/* ---- two hundred runs ---- */

enum { run_count = 200 };

static const shape_case long_cases[] = {
    SHAPE("iid", 1, 1200, 1200, 8, 2, 128, 200, CAUSAL, LINEAR, 0, IID, PLAIN, NONE),
    SHAPE("rising", 2, 700, 1500, 4, 4, 64, 100, CAUSAL, LINEAR, 0, RISING, PLAIN, NONE),
    SHAPE("dense", 1, 900, 900, 4, 1, 128, -1, CAUSAL, LINEAR, 0, IID, PLAIN, NONE),
    SHAPE("full", 2, 300, 1000, 2, 1, 256, 333, FULL, LINEAR, 0, IID, PLAIN, HOLES),
    SHAPE("crown", 1, 1500, 1500, 2, 1, 96, 3, CAUSAL, LINEAR, 0, CROWN, PLAIN, NONE),
    SHAPE("saw", 1, 1100, 1100, 16, 1, 192, 70, CAUSAL, LINEAR, 2, SAW, PLAIN, NONE),
};

static void check_two_hundred(const gradient_problem *p, const char *kernel) {
    const fdma_backward_args args = gradient_args(p, kernel);
    fdma_selection selection;
    fdma_backward_args there = upload(&args, &selection);
    const fdma_tensor outputs[] = {there.dq, there.dk, there.dv, there.dbias};
    fdma_tensor first[4], again[4];
    CHECK_OK(device_run_backward(&there));
    device_wait();
    for (int t = 0; t < 4; t++) {
        first[t] = device_read(outputs[t]);
        again[t] = copy_tensor(first[t]);
    }
    for (int run = 1; run < run_count; run++) {
        for (int t = 0; t < 4; t++)
            device_clear(outputs[t]);
        CHECK_OK(fdma_backward(&there));
        device_wait();
        for (int t = 0; t < 4; t++) {
            device_read_into(again[t], outputs[t]);
            CHECK(same_tensor(again[t], first[t]));
        }
    }
    device_free_all();
}

static void two_hundred_runs_are_equal(void) {
    const kernel_list kernels = device_kernels("backward");
    for (int s = 0; s < TEST_COUNT(long_cases); s++) {
        const problem x = shape_problem(&long_cases[s], 91, device_dtypes[s % 2]);
        gradient_problem p = gradient_of(&x, 1);
        p.deterministic = 1;
        for (int kernel = 0; kernel < kernels.count; kernel++) {
            test_context("%s, %s", kernels.name[kernel], long_cases[s].name);
            if (gradient_backend_takes(&p, kernels.name[kernel]))
                check_two_hundred(&p, kernels.name[kernel]);
        }
        test_free_all();
    }
}

/* Of the scores: dv is added to, so it starts from the same each time. */
static void check_score_runs(const char *kernel, fdma_dtype dtype) {
    uint64_t state = 23;
    const fdma_tensor v = new_tensor(dtype, 2, 1500, 4, 64);
    const fdma_tensor dbias = new_tensor(FDMA_FLOAT32, 2, 4, 1500, -1);
    const fdma_tensor dt_proj = new_tensor(dtype, 4, 256, -1, -1),
                      a = new_tensor(dtype, 4, -1, -1, -1);
    fill_random(v, &state, 1);
    fill_random(dbias, &state, 1);
    fill_random(dt_proj, &state, 0.1F);
    fill_random(a, &state, 1);
    fdma_score_backward_args args = {.size = sizeof args,
                                     .dbias = device_tensor(dbias),
                                     .v = device_tensor(v),
                                     .dt_proj = device_tensor(dt_proj),
                                     .a = device_tensor(a),
                                     .dv = device_output(v),
                                     .ddt_proj = device_output(dt_proj),
                                     .da = device_output(a),
                                     .exec = {.kernel = kernel}};
    const fdma_tensor outputs[] = {args.dv, args.ddt_proj, args.da};
    fdma_tensor first[3] = {{0}};
    device_write(args.dv, v);
    CHECK_OK(device_run_score_backward(&args));
    for (int run = 0; run < run_count; run++) {
        device_write(args.dv, v);
        device_clear(args.ddt_proj);
        device_clear(args.da);
        CHECK_OK(fdma_score_backward(&args));
        device_wait();
        for (int t = 0; t < 3; t++) {
            const fdma_tensor now = device_read(outputs[t]);
            first[t] = run == 0 ? now : first[t];
            CHECK(same_tensor(now, first[t]));
        }
    }
    device_free_all();
}

static void gradients_of_scores_repeat(void) {
    const kernel_list kernels = device_kernels("score_backward");
    for (int i = 0; i < kernels.count * device_dtype_count; i++) {
        const fdma_dtype dtype = device_dtypes[i % device_dtype_count];
        test_context("%s %s", kernels.name[i / device_dtype_count], dtype_name(dtype));
        check_score_runs(kernels.name[i / device_dtype_count], dtype);
        test_free_all();
    }
}

static const test_entry tests[] = {
    TEST(every_gradient_has_rows),
    TEST(gradients_are_right),
    TEST(deterministic_gradients_are_right),
    TEST(runs_are_equal),
    TEST(each_sequence_is_alone),
    TEST(gradients_accumulate),
    TEST(bias_and_its_gradient_are_optional),
    TEST(memory_order_does_not_matter),
    TEST(nan_rows_stay_with_their_keys),
    TEST(unread_keys_do_not_show),
    TEST(unread_keys_do_not_show_in_the_fast_form),
    TEST(corrupt_selections_stay_inside),
    TEST(many_epochs_are_each_alone),
    TEST(keys_that_all_leave_stop_nothing),
    TEST(two_hundred_runs_are_equal),
    TEST(gradients_of_scores_repeat),
};

int main(void) {
    gradient_backend.run = run_there;
    gradient_backend.ask = ask_there;
    return device_test_run(tests, TEST_COUNT(tests));
}
