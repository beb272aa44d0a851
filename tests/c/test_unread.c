/* test_unread.c - what no query of a call keeps is not read: NaN and infinities in k, v and bias of
 * every key that is never kept, has expired before the first query, or is not valid, do not show in
 * one bit of the results. */
#include "unread.h"

/* The poison has to be there in every type. */
static void every_type_has_poison(void) {
    for (int type = 0; type < problem_dtype_count; type++) {
        const fdma_dtype dtype = problem_dtypes[type];
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

static void check_unread(const char *name, fdma_dtype dtype, const char *kernel) {
    static const float poisons[] = {NAN, INFINITY, -INFINITY};
    problem x = unread_problem(name, dtype);
    const attended clean = problem_attend(&x, kernel, 1);
    for (int64_t i = 0; i < count_of(clean.lse); i++)
        CHECK(!isnan(((const float *)clean.lse.data)[i]));
    for (int p = 0; p < TEST_COUNT(poisons); p++) {
        CHECK(poison_unread(&x, poisons[p]) > 0); /* else nothing is shown */
        check_same_results(problem_attend(&x, kernel, 1), clean);
    }
}

static void unread_keys_do_not_show(void) {
    const kernel_list kernels = kernels_of("forward");
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        for (int type = 0; type < problem_dtype_count; type++) {
            for (int s = 0; s < TEST_COUNT(unread_cases); s++) {
                test_context("%s %s, unread case %d", kernels.name[kernel],
                             dtype_name(problem_dtypes[type]), s);
                check_unread(unread_cases[s], problem_dtypes[type], kernels.name[kernel]);
                test_free_all();
            }
        }
    }
}

/* The same poison in one key that is read changes the results. */
static void read_keys_show(void) {
    const kernel_list kernels = kernels_of("forward");
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        test_context("%s", kernels.name[kernel]);
        problem x = unread_problem(unread_cases[0], FDMA_FLOAT32);
        const attended clean = problem_attend(&x, kernels.name[kernel], 1);
        int64_t j = 0;
        while (j < x.kv_len && !is_read(&x, 0, 0, j))
            j++;
        if (CHECK(j < x.kv_len)) {
            spoil_key(x.v, 0, j, 0, NAN);
            CHECK(!same_tensor(problem_attend(&x, kernels.name[kernel], 1).out, clean.out));
        }
        test_free_all();
    }
}

static const test_entry tests[] = {
    TEST(every_type_has_poison),
    TEST(unread_keys_do_not_show),
    TEST(read_keys_show),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
