/* test_small_window.c - selections that declare fewer keys than they keep. A call refuses them and
 * writes nothing, or its numbers are right; on a device wrong numbers are NaN. */
#include "backend.h"
#include "cases.h"
#include "gradient.h"

/* Selections of 64 keys in a few forms. */
static const shape_case small_cases[] = {
    SHAPE("causal", 2, 300, 300, 4, 2, 64, 64, CAUSAL, LINEAR, 0, IID, PLAIN, NONE),
    SHAPE("last queries", 1, 40, 300, 4, 2, 64, 64, CAUSAL, LINEAR, 0, IID, PLAIN, NONE),
    SHAPE("one query", 2, 1, 700, 4, 2, 64, 64, CAUSAL, LINEAR, 0, RISING, PLAIN, NONE),
    SHAPE("falling", 1, 300, 300, 2, 2, 64, 64, CAUSAL, LINEAR, 0, FALLING, PLAIN, NONE),
    SHAPE_RULES("recent", 1, 300, 300, 4, 2, 64, 40, CAUSAL, LINEAR, 0, IID, PLAIN, NONE, 24, 3),
    SHAPE("long", 1, 900, 900, 2, 1, 64, 64, CAUSAL, LINEAR, 0, STEPS, PLAIN, NONE),
    SHAPE("softcap", 1, 300, 300, 4, 2, 64, 64, CAUSAL, LINEAR, 5, IID, PLAIN, NONE),
    SHAPE("global and causal", 1, 300, 300, 4, 2, 64, 64, GLOBAL, LINEAR, 0, IID, PLAIN, NONE),
    SHAPE("global", 2, 130, 300, 4, 2, 64, 64, FULL, LINEAR, 0, IID, PLAIN, NONE),
    SHAPE("packed", 1, 700, 700, 4, 2, 64, 64, CAUSAL, LINEAR, 0, IID, PLAIN, NONE),
};
static const int64_t said_windows[] = {32, 1, 63};

/* The window that the selection of case c declares; it differs between dtypes. */
static int64_t said_window(int c, fdma_dtype dtype) {
    return said_windows[(c + (int)dtype) % TEST_COUNT(said_windows)];
}

/* A problem whose selection declares the right number of keys. Its sequences are packed if those of
 * the case are. */
static problem right_problem(const shape_case *n, fdma_dtype dtype) {
    static int32_t starts[] = {0, 20, 320, 330, 690};
    problem x = shape_problem(n, 7, dtype);
    if (strcmp(n->name, "packed") == 0) {
        x.key_valid = (fdma_tensor){0};
        x.starts = fdma_tensor_1d(starts, FDMA_INT32, TEST_COUNT(starts));
        problem_select(&x);
    }
    return x;
}

static problem with_window(const problem *x, int64_t window) {
    problem small = *x;
    small.selection.window = window;
    small.selection.recent = 0;
    return small;
}

/* True if key j has a slot that the selection says it does not use. */
static bool lacks_slot(const problem *x, int64_t b, int64_t g, int64_t j) {
    const int32_t *const slot = x->selection.slot.data;
    return slot[(b * x->kv_heads + g) * x->kv_len + j] >= x->selection.window;
}

static bool loses_key(const problem *x, int64_t b, int64_t g, int64_t i) {
    for (int64_t j = 0; j < x->kv_len; j++)
        if (problem_keeps(x, b, g, i, j) && lacks_slot(x, b, g, j))
            return true;
    return false;
}

/* Rows [batch, q_len, q_heads, head_dim] are within a tolerance of `want`. On a device rows may be
 * NaN instead, and must be if they lose a key. Returns the number of such rows. */
static int64_t check_rows(const problem *x, fdma_tensor actual, fdma_tensor want,
                          double tolerance) {
    int64_t lost = 0;
    for (int64_t n = 0; n < count_of(want) / x->head_dim; n++) {
        const int64_t h = n % x->q_heads, i = n / x->q_heads % x->q_len;
        const int64_t b = n / x->q_heads / x->q_len, g = h / (x->q_heads / x->kv_heads);
        const double first = load_double(actual.data, actual.dtype, n * x->head_dim);
        const bool is_nan = test_backend.run != NULL && isnan(first);
        CHECK(test_backend.run == NULL || is_nan || !loses_key(x, b, g, i));
        lost += is_nan;
        for (int64_t d = n * x->head_dim; d < (n + 1) * x->head_dim; d++) {
            const double value = load_double(actual.data, actual.dtype, d);
            if (is_nan)
                CHECK(isnan(value));
            else
                CHECK_NEAR(value, load_double(want.data, want.dtype, d), tolerance);
        }
    }
    return lost;
}

/* Calls `check` for each case in each dtype. All kernels share the expected results. */
static void for_each_case(void (*check)(const problem *right, int64_t window, const char *name)) {
    for (int type = first_dtype(); type < test_dtype_count; type++) {
        const fdma_dtype dtype = test_dtypes[type];
        for (int c = 0; c < TEST_COUNT(small_cases); c++) {
            if (is_left_out(c, type))
                continue;
            const problem right = right_problem(&small_cases[c], dtype);
            check(&right, said_window(c, dtype), small_cases[c].name);
            test_free_all();
        }
    }
}

static void check_attended(const problem *x, const char *kernel, attended want) {
    const attended found = problem_attend(x, kernel, 2);
    const int64_t lost = check_rows(x, found.out, want.out, problem_out_tolerance(x));
    CHECK((lost > 0) == (test_backend.run != NULL));
    for (int64_t i = 0; i < count_of(want.lse); i++) {
        const double lse = (double)((const float *)want.lse.data)[i];
        const double value = (double)((const float *)found.lse.data)[i];
        if (test_backend.run == NULL || !isnan(value))
            CHECK_NEAR(value, lse, problem_lse_tolerance(x, lse));
    }
}

static void check_forward(const problem *right, int64_t window, const char *name) {
    const problem x = with_window(right, window);
    const attended want = problem_attend(right, "reference", 1);
    const kernel_list kernels = kernels_for("forward", x.dtype);
    for (int k = 0; k < kernels.count; k++) {
        test_context("%s %s, %s, %d", kernels.name[k], dtype_name(x.dtype), name, (int)window);
        if (problem_is_taken(&x, kernels.name[k]))
            check_attended(&x, kernels.name[k], want);
    }
}

static void forward_is_right(void) { for_each_case(check_forward); }

static void check_unwritten(fdma_tensor output) {
    for (size_t i = 0; i < bytes_of(output); i++)
        if (!CHECK(((const unsigned char *)output.data)[i] == test_guard_byte))
            return;
}

/* Backward on the CPU has no room for more keys than the selection declares. */
static void check_gradients(const gradient_problem *p, const char *kernel) {
    fdma_backward_args args = gradient_args(p, kernel);
    args.exec.threads = 2;
    const fdma_status status = run_backward(&args);
    const gradients found = gradient_outputs(&args);
    if (test_backend.run != NULL) {
        expect_gradients(p);
        const gradients want = p->expected->reference;
        const double error = largest_difference(p->expected->plain.dq, want.dq);
        CHECK_OK(status);
        CHECK(check_rows(&p->x, found.dq, want.dq,
                         2 * error + step_of(p->x.dtype) * largest_of(want.dq)) > 0);
    } else if (status == FDMA_OK) {
        check_expected(p, found);
    } else {
        CHECK_INT(status, FDMA_INVALID_ARGUMENT);
        CHECK(strstr(fdma_last_error(), "as it says") != NULL);
        for (int t = 0; t < TEST_COUNT(found.all); t++)
            check_unwritten(found.all[t]);
    }
    CHECK(status == FDMA_OK || strncmp(kernel, "reference", 9) != 0);
    CHECK(status != FDMA_OK || test_backend.run != NULL || p->x.kv_len < 700 ||
          strncmp(kernel, "reference", 9) == 0);
}

static void check_backward(const problem *right, int64_t window, const char *name) {
    const kernel_list kernels = kernels_for("backward", right->dtype);
    gradient_problem p = gradient_of(right, 0);
    p.x = with_window(right, window);
    p.deterministic = 1;
    for (int k = 0; k < kernels.count; k++) {
        test_context("%s %s, %s, %d", kernels.name[k], dtype_name(p.x.dtype), name, (int)window);
        fdma_backward_args args = gradient_args(&p, kernels.name[k]);
        if (call_takes(operation_backward, &args))
            check_gradients(&p, kernels.name[k]);
    }
}

static void backward_is_right_or_refused(void) { for_each_case(check_backward); }

/* As above, with only some keys of each sequence. */
static void used_keys_are_right_or_refused(void) {
    static const shape_case n =
        SHAPE("used", 2, 300, 720, 4, 2, 64, 64, CAUSAL, LINEAR, 0, IID, PLAIN, NONE);
    static int32_t used[] = {700, 720};
    for (int type = first_dtype(); type < test_dtype_count; type++) {
        problem right = shape_problem(&n, 7, test_dtypes[type]);
        right.key_valid = (fdma_tensor){0};
        right.kv_used = fdma_tensor_1d(used, FDMA_INT32, 2);
        problem_select(&right);
        check_backward(&right, 32, n.name);
        test_free_all();
    }
}

/* The fused call finds out before it writes a gradient of the score. */
static void fused_gradients_are_refused(void) {
    const problem right = right_problem(&small_cases[5], FDMA_FLOAT32);
    gradient_problem p = gradient_of(&right, 0);
    p.x = with_window(&right, 32);
    const fdma_tensor dt_proj =
        new_tensor(FDMA_FLOAT32, right.kv_heads, right.kv_heads * right.head_dim, -1, -1);
    const fdma_tensor a = new_tensor(FDMA_FLOAT32, right.kv_heads, -1, -1, -1);
    const fdma_tensor to[] = {
        new_output(FDMA_FLOAT32, 1, right.q_len, right.q_heads, right.head_dim),
        new_output(FDMA_FLOAT32, 1, right.kv_len, right.kv_heads, right.head_dim),
        new_output(FDMA_FLOAT32, 1, right.kv_len, right.kv_heads, right.head_dim),
        new_output(FDMA_FLOAT32, right.kv_heads, right.kv_heads * right.head_dim, -1, -1),
        new_output(FDMA_FLOAT32, right.kv_heads, -1, -1, -1),
    };
    fdma_attention_backward_args args = fused_args(&p, dt_proj, a, FDMA_BIAS_LINEAR, to, "cpu");
    CHECK_INT(run_attention_backward(&args), FDMA_INVALID_ARGUMENT);
    for (int t = 0; t < TEST_COUNT(to); t++)
        check_unwritten(to[t]);
    args.selection = &right.selection;
    CHECK_OK(run_attention_backward(&args));
    test_free_all();
}

static const test_entry tests[] = {
    TEST(forward_is_right),
    TEST(backward_is_right_or_refused),
    TEST(used_keys_are_right_or_refused),
    TEST(fused_gradients_are_refused),
};

int main(int argc, char **argv) { return test_run_backend(argc, argv, tests, TEST_COUNT(tests)); }
