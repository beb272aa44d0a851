/* test_cases.c - checks every kernel of forward on every case of tests/cases.def: it gives the same
 * bits for any number of threads and any contents of the workspace, stays within its outputs,
 * writes all of them, with 0 and -inf for empty rows, and computes each sequence as if it were
 * alone. (`fdma check` tests the accuracy on the same list.) */
#include "backend.h"
#include "cases.h"

/* Calls `check` for each kernel and each case that it takes. On the CPU each case has one dtype. */
static void for_each_case(void (*check)(const problem *x, const char *kernel)) {
    int taken[kernel_limit] = {0};
    kernel_list kernels = {.count = 0};
    for (int i = 0; i < TEST_COUNT(cases) * test_dtype_count; i++) {
        const int index = i / test_dtype_count, type = i % test_dtype_count;
        if (type < first_dtype() || (first_dtype() == 0 && type != index % test_dtype_count))
            continue;
        kernels = kernels_for("forward", test_dtypes[type]);
        for (int kernel = 0; kernel < kernels.count; kernel++) {
            const problem x = case_problem(index, test_dtypes[type]);
            test_context("%s %s %s", kernels.name[kernel], cases[index].name, dtype_name(x.dtype));
            if (problem_is_taken(&x, kernels.name[kernel])) {
                check(&x, kernels.name[kernel]);
                taken[kernel]++;
            }
            test_free_all();
        }
    }
    for (int kernel = 0; kernel < kernels.count && first_dtype() > 0; kernel++) {
        test_context("%s", kernels.name[kernel]);
        CHECK(taken[kernel] > 0);
    }
}

/* A row without keys has out 0 and lse -inf; a row with keys has neither. */
static void check_empty(const problem *x, attended found) {
    for (int64_t at = 0; at < x->batch * x->q_heads * x->q_len; at++) {
        const int64_t i = at % x->q_len, h = at / x->q_len % x->q_heads;
        const int64_t b = at / x->q_len / x->q_heads, g = h / (x->q_heads / x->kv_heads);
        const bool keeps = keeps_any(x, b, g, i);
        const float lse = ((const float *)found.lse.data)[at];
        CHECK(keeps ? isfinite(lse) : lse == -INFINITY);
        for (int64_t d = 0; d < x->head_dim && !keeps; d++) {
            const int64_t element = ((b * x->q_len + i) * x->q_heads + h) * x->head_dim + d;
            CHECK(load_double(found.out.data, x->dtype, element) == 0);
        }
    }
}

static void check_repeats(const problem *x, const char *kernel) {
    static const unsigned char fills[] = {0xff, 0x00, 0x7f};
    const unsigned char before = test_backend.fill;
    attended first = {0};
    for (int run = 0; run < TEST_COUNT(fills); run++) {
        test_backend.fill = fills[run];
        const attended now = problem_attend(x, kernel, 1 + 2 * run);
        check_written(now.out);
        check_written(now.lse);
        first = run == 0 ? now : first;
        check_same_results(now, first);
    }
    test_backend.fill = before;
    check_empty(x, first);
}

static void check_alone(const problem *x, const char *kernel) {
    if (x->batch > 1) {
        const problem last = last_problem(x);
        const attended all = problem_attend(x, kernel, 1);
        const attended want = {last_of(all.out), last_of(all.lse)};
        check_same_results(problem_attend(&last, kernel, 2), want);
    }
}

static void results_repeat_and_empty_rows_are_empty(void) { for_each_case(check_repeats); }
static void each_sequence_is_alone(void) { for_each_case(check_alone); }

static const test_entry tests[] = {
    TEST(results_repeat_and_empty_rows_are_empty),
    TEST(each_sequence_is_alone),
};

int main(int argc, char **argv) { return test_run_backend(argc, argv, tests, TEST_COUNT(tests)); }
