/* test_cuda.c - attention on a CUDA device: on every case each row gives the same bits again, stays
 * within its outputs, answers a sequence as if it were alone and reads no key that none keeps.
 * (`fdma check --device cuda` walks the same cases for accuracy.) */
#include "cases.h"
#include "device.h"
#include "unread.h"

static void every_operation_has_rows(void) {
    CHECK(device_kernels("score").count > 0);
    CHECK(device_kernels("select").count > 0);
    CHECK(device_kernels("lists").count > 0);
    CHECK(device_kernels("forward").count > 0);
}

/* For each row, type and case that the row takes. */
static void for_each_case(void (*check)(const problem *host, const problem *on_device,
                                        const char *kernel)) {
    const kernel_list kernels = device_kernels("forward");
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        int taken = 0;
        for (int i = 0; i < TEST_COUNT(cases) * device_dtype_count; i++) {
            const fdma_dtype dtype = device_dtypes[i % device_dtype_count];
            const int index = i / device_dtype_count;
            test_context("%s %s %s", kernels.name[kernel], cases[index].name, dtype_name(dtype));
            const problem x = case_problem(index, dtype);
            if (device_takes(&x, kernels.name[kernel])) {
                const problem on_device = device_problem(&x);
                check(&x, &on_device, kernels.name[kernel]);
                taken++;
            }
            device_free_both();
        }
        test_context("%s", kernels.name[kernel]);
        CHECK(taken > 0);
    }
}

/* Whatever lay in the workspace and the outputs before. */
static void check_repeats(const problem *host, const problem *x, const char *kernel) {
    static const unsigned char fills[] = {0xff, 0x00, 0x7f};
    attended first = {0};
    (void)host;
    for (int run = 0; run < TEST_COUNT(fills); run++) {
        device_state.fill = fills[run];
        const attended now = device_attend(x, kernel);
        check_written(now.out);
        check_written(now.lse);
        first = run == 0 ? now : first;
        check_same_results(now, first);
    }
    device_state.fill = fills[0];
}

static void results_repeat_and_stay_inside(void) { for_each_case(check_repeats); }

static void check_alone(const problem *host, const problem *x, const char *kernel) {
    if (host->batch > 1) {
        const attended all = device_attend(x, kernel);
        const attended want = {last_of(all.out), last_of(all.lse)};
        const problem last = last_problem(x);
        check_same_results(device_attend(&last, kernel), want);
    }
}

static void each_sequence_is_alone(void) { for_each_case(check_alone); }

/* A row without keys is 0, its lse -inf; one with keys is neither. */
static void check_empty(const problem *host, const problem *x, const char *kernel) {
    const attended found = device_attend(x, kernel);
    const int64_t rows = host->batch * host->q_heads * host->q_len;
    for (int64_t at = 0; at < rows; at++) {
        const int64_t i = at % host->q_len, h = at / host->q_len % host->q_heads;
        const int64_t b = at / host->q_len / host->q_heads,
                      g = h / (host->q_heads / host->kv_heads);
        int keeps = 0;
        for (int64_t j = 0; j < host->kv_len && !keeps; j++)
            keeps = problem_keeps(host, b, g, i, j);
        const float lse = ((const float *)found.lse.data)[at];
        CHECK(keeps ? isfinite(lse) : lse == -INFINITY);
        for (int64_t d = 0; d < host->head_dim && !keeps; d++) {
            const int64_t element =
                ((b * host->q_len + i) * host->q_heads + h) * host->head_dim + d;
            CHECK(load_double(found.out.data, host->dtype, element) == 0);
        }
    }
}

static void rows_without_keys_are_empty(void) { for_each_case(check_empty); }

/* ---- longer than any case ---- */

static const problem long_shapes[] = {
    {.batch = 1,
     .q_len = 1200,
     .kv_len = 1200,
     .q_heads = 8,
     .kv_heads = 2,
     .head_dim = 128,
     .window = 200,
     .scope = FDMA_SCOPE_CAUSAL,
     .causal = 1},
    {.batch = 2,
     .q_len = 700,
     .kv_len = 1500,
     .q_heads = 4,
     .kv_heads = 4,
     .head_dim = 64,
     .window = -1,
     .scope = FDMA_SCOPE_CAUSAL,
     .causal = 1},
    {.batch = 3,
     .q_len = 1,
     .kv_len = 9000,
     .q_heads = 8,
     .kv_heads = 2,
     .head_dim = 128,
     .window = -1,
     .scope = FDMA_SCOPE_CAUSAL,
     .causal = 1},
    {.batch = 2,
     .q_len = 7,
     .kv_len = 20000,
     .q_heads = 8,
     .kv_heads = 2,
     .head_dim = 64,
     .window = 3000,
     .scope = FDMA_SCOPE_CAUSAL,
     .causal = 1},
    {.batch = 2,
     .q_len = 300,
     .kv_len = 2000,
     .q_heads = 2,
     .kv_heads = 1,
     .head_dim = 256,
     .window = 333,
     .scope = FDMA_SCOPE_GLOBAL,
     .causal = 0},
};

static problem long_problem(int shape, fdma_dtype dtype) {
    problem x = long_shapes[shape];
    x.dtype = dtype;
    problem_fill(&x, (uint64_t)shape + 7);
    problem_select(&x);
    return x;
}

static void check_run_to_run(const problem *x, const char *kernel) {
    enum { runs = 200 };
    fdma_forward_args args = device_args(x, kernel);
    CHECK_OK(device_run_forward(&args));
    const attended first = device_read_results(&args);
    const attended again = {copy_tensor(first.out), copy_tensor(first.lse)};
    for (int run = 1; run < runs; run++) {
        device_clear(args.out);
        device_clear(args.lse);
        CHECK_OK(fdma_forward(&args));
        device_wait();
        device_read_into(again.out, args.out);
        device_read_into(again.lse, args.lse);
        CHECK(same_tensor(again.out, first.out) && same_tensor(again.lse, first.lse));
    }
}

static void two_hundred_runs_are_equal(void) {
    const kernel_list kernels = device_kernels("forward");
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        for (int i = 0; i < TEST_COUNT(long_shapes) * device_dtype_count; i++) {
            const fdma_dtype dtype = device_dtypes[i % device_dtype_count];
            const problem x = long_problem(i / device_dtype_count, dtype);
            test_context("%s, shape %d, %s", kernels.name[kernel], i / device_dtype_count,
                         dtype_name(dtype));
            if (device_takes(&x, kernels.name[kernel])) {
                const problem on_device = device_problem(&x);
                check_run_to_run(&on_device, kernels.name[kernel]);
                check_alone(&x, &on_device, kernels.name[kernel]);
            }
            device_free_both();
        }
    }
}

/* ---- keys that none keeps ---- */

static void check_unread(const char *name, fdma_dtype dtype, const char *kernel) {
    static const float poisons[] = {NAN, INFINITY};
    problem x = unread_problem(name, dtype);
    if (!device_takes(&x, kernel))
        return;
    const problem on_device = device_problem(&x);
    const attended clean = device_attend(&on_device, kernel);
    for (int64_t i = 0; i < count_of(clean.lse); i++)
        CHECK(!isnan(((const float *)clean.lse.data)[i]));
    for (int p = 0; p < TEST_COUNT(poisons); p++) {
        CHECK(poison_unread(&x, poisons[p]) > 0); /* else nothing is shown */
        device_write(on_device.k, x.k);
        device_write(on_device.v, x.v);
        device_write(on_device.bias, x.bias);
        check_same_results(device_attend(&on_device, kernel), clean);
    }
}

static void unread_keys_do_not_show(void) {
    const kernel_list kernels = device_kernels("forward");
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        for (int i = 0; i < TEST_COUNT(unread_cases) * device_dtype_count; i++) {
            const fdma_dtype dtype = device_dtypes[i % device_dtype_count];
            test_context("%s %s, unread case %d", kernels.name[kernel], dtype_name(dtype),
                         i / device_dtype_count);
            check_unread(unread_cases[i / device_dtype_count], dtype, kernels.name[kernel]);
            device_free_both();
        }
    }
}

/* ---- biases ---- */

/* Every seventh key has one beside which products vanish, of either sign. */
static void fill_large_biases(const problem *x) {
    float *const bias = x->bias.data;
    for (int64_t at = 0; at < count_of(x->bias); at += 7)
        bias[at] = (at % 2 == 0 ? 1e30F : -1e30F) * (1 + (float)(at % x->kv_len) / 1000);
}

static problem biased_problem(int64_t head_dim, fdma_dtype dtype, double scale, int large) {
    problem x = {.batch = 1,
                 .q_len = 200,
                 .kv_len = 300,
                 .q_heads = 4,
                 .kv_heads = 2,
                 .head_dim = head_dim,
                 .window = 90,
                 .scope = FDMA_SCOPE_CAUSAL,
                 .causal = 1,
                 .dtype = dtype,
                 .scale = scale};
    problem_fill(&x, 3);
    problem_select(&x);
    if (large)
        fill_large_biases(&x);
    return x;
}

/* Whatever the scale: bias / scale need not be a float32. */
static void biases_of_any_size_count(void) {
    static const int64_t head_dims[] = {64, 128, 256};
    static const double scales[] = {0, 1e-39, 3};
    for (int i = 0; i < TEST_COUNT(head_dims) * TEST_COUNT(scales) * device_dtype_count * 2; i++) {
        const fdma_dtype dtype = device_dtypes[i / 2 % device_dtype_count];
        const int shape = i / 2 / device_dtype_count;
        const problem x = biased_problem(head_dims[shape / TEST_COUNT(scales)], dtype,
                                         scales[shape % TEST_COUNT(scales)], i % 2);
        const problem on_device = device_problem(&x);
        test_context("head_dim %d, %s, scale %g, large %d", (int)x.head_dim, dtype_name(dtype),
                     x.scale, i % 2);
        check_close_results(&x, device_attend(&on_device, NULL),
                            problem_attend(&x, "reference", 1));
        device_free_both();
    }
}

static const test_entry tests[] = {
    TEST(every_operation_has_rows),   TEST(results_repeat_and_stay_inside),
    TEST(each_sequence_is_alone),     TEST(rows_without_keys_are_empty),
    TEST(two_hundred_runs_are_equal), TEST(unread_keys_do_not_show),
    TEST(biases_of_any_size_count),
};

int main(void) { return device_test_run(tests, TEST_COUNT(tests)); }
