/* test_kv_used_errors.c - calls with kv_used that are refused. */
#include "errors.h"
#include "used_problem.h"

static void check_refused(const problem *x, fdma_tensor used, const expectation *want) {
    problem wrong = *x;
    size_t bytes = 0;
    wrong.kv_used = used;
    fdma_forward_args args = problem_args(&wrong, NULL);
    const fdma_tensor out = copy_tensor(args.out);
    check_query(fdma_forward_workspace(&args, &bytes), want);
    args.kv_used = (fdma_tensor){0};
    CHECK_OK(fdma_forward_workspace(&args, &bytes));
    args.kv_used = used;
    exec_alloc(&args.exec, 4 * bytes);
    check_status(fdma_forward(&args), want);
    CHECK(same_tensor(args.out, out));
}

static void wrong_numbers_are_refused(void) {
    const used_shape shape = {2, 3, 9, 1, 1, 8, 4, 0, 0, FDMA_SCOPE_CAUSAL, 1, 0, 0, 0};
    problem x = used_problem(&shape, FDMA_FLOAT32, 1);
    x.kv_used = (fdma_tensor){0};
    problem_select(&x);
    int32_t used[] = {9, 10, 0};
    fdma_tensor tensor = fdma_tensor_1d(used, FDMA_INT32, 2);
    check_refused(&x, tensor, &(expectation){FDMA_INVALID_ARGUMENT, {"kv_used", "1", "10"}, 1});
    used[1] = -1;
    check_refused(&x, tensor, &(expectation){FDMA_INVALID_ARGUMENT, {"kv_used", "-1", "9"}, 1});
    used[1] = 4;
    check_refused(&x, fdma_tensor_1d(used, FDMA_INT32, 3),
                  &(expectation){FDMA_INVALID_ARGUMENT, {"kv_used", "3", "2"}, 0});
    check_refused(&x, fdma_tensor_2d(used, FDMA_INT32, 2, 1),
                  &(expectation){FDMA_INVALID_ARGUMENT, {"kv_used", "rank", "1"}, 0});
    check_refused(&x, fdma_tensor_1d(used, FDMA_FLOAT32, 2),
                  &(expectation){FDMA_UNSUPPORTED, {"kv_used", "float32", "int32"}, 0});
    check_refused(&x, fdma_tensor_1d(NULL, FDMA_INT32, 2),
                  &(expectation){FDMA_INVALID_ARGUMENT, {"kv_used", "NULL"}, 1});
}

/* kv_used excludes packed sequences, carried keys and tables. */
static void other_options_are_refused(void) {
    const used_shape shape = {1, 9, 9, 1, 1, 8, 4, 0, 0, FDMA_SCOPE_CAUSAL, 1, 0, 0, 0};
    problem x = used_problem(&shape, FDMA_FLOAT32, 1);
    fdma_tensor used = x.kv_used, seen = new_tensor(FDMA_INT32, 1, -1, -1, -1);
    x.kv_used = (fdma_tensor){0};
    problem_select(&x);
    x.starts = new_tensor(FDMA_INT32, 1, -1, -1, -1);
    check_refused(&x, used, &(expectation){FDMA_INVALID_ARGUMENT, {"kv_used", "starts"}, 0});
    x.starts = (fdma_tensor){0};
    fdma_forward_args carried = problem_args(&x, NULL);
    carried.k_carried = carried.v_carried = x.k;
    carried.bias_carried = x.bias;
    carried.selection = NULL;
    carried.kv_used = used;
    check_status(fdma_forward(&carried),
                 &(expectation){FDMA_INVALID_ARGUMENT, {"kv_used", "k_carried"}, 0});
    fdma_select_args select = {.size = sizeof select,
                               .score = x.score,
                               .selection = &x.selection,
                               .window = 4,
                               .kv_used = used};
    select.table_out = (fdma_table){.score = new_output(FDMA_FLOAT32, 1, 1, 4, -1),
                                    .position = new_output(FDMA_INT32, 1, 1, 4, -1),
                                    .seen = seen};
    check_status(fdma_select(&select),
                 &(expectation){FDMA_INVALID_ARGUMENT, {"kv_used", "table_out"}, 0});
}

static const test_entry tests[] = {
    TEST(wrong_numbers_are_refused),
    TEST(other_options_are_refused),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
