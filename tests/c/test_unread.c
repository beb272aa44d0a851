/* test_unread.c - keys that no query of a call keeps are not read: NaN and infinities in k, v and
 * bias of every key that is never kept, has expired before the first query, or is not valid, do not
 * change a bit of the results. */
#include "backend.h"
#include "cases.h"

static void every_type_has_poison(void) {
    for (int type = 0; type < test_dtype_count; type++) {
        const fdma_dtype dtype = test_dtypes[type];
        void *const data = test_alloc(3 * dtype_size(dtype));
        test_context("%s", dtype_name(dtype));
        store_float(data, dtype, 0, NAN);
        store_float(data, dtype, 1, INFINITY);
        store_float(data, dtype, 2, -INFINITY);
        CHECK(isnan(load_double(data, dtype, 0)));
        CHECK(load_double(data, dtype, 1) == (double)INFINITY);
        CHECK(load_double(data, dtype, 2) == -(double)INFINITY);
    }
}

static void check_unread(problem *x, const char *kernel) {
    static const float poisons[] = {NAN, INFINITY, -INFINITY};
    const attended clean = problem_attend(x, kernel, 1);
    for (int64_t i = 0; i < count_of(clean.lse); i++)
        CHECK(!isnan(((const float *)clean.lse.data)[i]));
    for (int p = 0; p < TEST_COUNT(poisons); p++) {
        CHECK(poison_unread(x, poisons[p]) > 0); /* else the test shows nothing */
        check_same_results(problem_attend(x, kernel, 1), clean);
    }
}

static void check_unread_cases(const char *kernel, fdma_dtype dtype) {
    for (int s = 0; s < TEST_COUNT(unread_cases); s++) {
        problem x = unread_problem(unread_cases[s], dtype);
        test_context("%s %s, %s", kernel, dtype_name(dtype), unread_cases[s]);
        if (problem_is_taken(&x, kernel))
            check_unread(&x, kernel);
    }
}

/* The same poison in one key that is read changes the results. */
static void check_read_shows(const char *kernel, fdma_dtype dtype) {
    problem x = unread_problem(unread_cases[0], dtype);
    if (!problem_is_taken(&x, kernel))
        return;
    const attended clean = problem_attend(&x, kernel, 1);
    int64_t j = 0;
    while (j < x.kv_len && !is_read(&x, 0, 0, j))
        j++;
    if (CHECK(j < x.kv_len)) {
        spoil_key(x.v, 0, j, 0, NAN);
        CHECK(!same_tensor(problem_attend(&x, kernel, 1).out, clean.out));
    }
}

static void unread_keys_do_not_show(void) { for_each_kernel("forward", check_unread_cases); }
static void read_keys_show(void) { for_each_kernel("forward", check_read_shows); }

static const test_entry tests[] = {
    TEST(every_type_has_poison),
    TEST(unread_keys_do_not_show),
    TEST(read_keys_show),
};

int main(int argc, char **argv) { return test_run_backend(argc, argv, tests, TEST_COUNT(tests)); }
