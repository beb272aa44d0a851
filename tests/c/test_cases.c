/* test_cases.c - walks tests/cases.def: on every case, every kernel gives the same bits for any
 * number of threads, stays within its outputs, and answers each sequence as if it were alone.
 * (`fdma check` walks the same list for accuracy.) */
#include "cases.h"

/* Each case in the next of the types. */
static problem problem_of(int index) {
    return case_problem(index, problem_dtypes[index % problem_dtype_count]);
}

static void every_thread_count_gives_the_same(void) {
    for (int index = 0; index < TEST_COUNT(cases); index++) {
        const kernel_list kernels =
            kernels_for("forward", problem_dtypes[index % problem_dtype_count]);
        for (int kernel = 0; kernel < kernels.count; kernel++) {
            test_context("%s %s", kernels.name[kernel], cases[index].name);
            const problem x = problem_of(index);
            const attended one = problem_attend(&x, kernels.name[kernel], 1);
            check_same_results(problem_attend(&x, kernels.name[kernel], 3), one);
            check_written(one.out);
            check_written(one.lse);
            test_free_all();
        }
    }
}

static void each_sequence_is_alone(void) {
    for (int index = 0; index < TEST_COUNT(cases); index++) {
        const kernel_list kernels =
            kernels_for("forward", problem_dtypes[index % problem_dtype_count]);
        for (int kernel = 0; kernel < kernels.count && cases[index].sizes.batch > 1; kernel++) {
            test_context("%s %s", kernels.name[kernel], cases[index].name);
            const problem x = problem_of(index);
            const problem last = last_problem(&x);
            const attended all = problem_attend(&x, kernels.name[kernel], 1);
            const attended want = {last_of(all.out), last_of(all.lse)};
            check_same_results(problem_attend(&last, kernels.name[kernel], 2), want);
            test_free_all();
        }
    }
}

static const test_entry tests[] = {
    TEST(every_thread_count_gives_the_same),
    TEST(each_sequence_is_alone),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
