/* test_decode.c - few rows over many keys: several threads work on one row, its bits depend only on
 * its own keys, long sums lose no small terms, and each kernel of forward can be forced. */
#include "problem.h"

enum { decode_len = 3001 };

/* Long enough that several threads are worth waking. */
static problem decode_problem(fdma_dtype dtype, int64_t q_len, int64_t window) {
    problem x = {
        .batch = 2,
        .q_len = q_len,
        .kv_len = decode_len,
        .q_heads = 3,
        .kv_heads = 3,
        .head_dim = 64,
        .window = window,
        .causal = 1,
        .dtype = dtype,
    };
    problem_fill(&x, (uint64_t)dtype);
    problem_select(&x);
    return x;
}

static const struct {
    int64_t q_len, window;
} forms[] = {{1, -1}, {1, 1600}, {4, -1}, {4, 1600}};

static void for_each_form(void (*test)(const problem *x, const char *kernel)) {
    const kernel_list kernels = kernels_of("forward");
    for (int form = 0; form < TEST_COUNT(forms); form++) {
        for (int dtype = 0; dtype < test_dtype_count; dtype++) {
            if (is_left_out(form, dtype))
                continue;
            const problem x =
                decode_problem(test_dtypes[dtype], forms[form].q_len, forms[form].window);
            for (int kernel = 0; kernel < kernels.count; kernel++) {
                test_context("%s %s q_len %d window %d", kernels.name[kernel], dtype_name(x.dtype),
                             (int)x.q_len, (int)x.window);
                test(&x, kernels.name[kernel]);
            }
            test_free_all();
        }
    }
}

static void check_threads(const problem *x, const char *kernel) {
    const attended one = problem_attend(x, kernel, 1);
    check_same_results(problem_attend(x, kernel, 2), one);
    check_same_results(problem_attend(x, kernel, 3), one);
    check_close_results(x, one, problem_attend(x, "reference", 1));
}

static void threads_work_on_one_row(void) { for_each_form(check_threads); }

static void check_alone(const problem *x, const char *kernel) {
    const problem last = last_problem(x);
    const attended both = problem_attend(x, kernel, 2);
    const attended want = {last_of(both.out), last_of(both.lse)};
    check_same_results(problem_attend(&last, kernel, 2), want);
}

static void each_sequence_is_alone(void) { for_each_form(check_alone); }

static void check_layout(const problem *x, const char *kernel) {
    problem swapped = *x;
    swapped.k = heads_first(x->k);
    swapped.v = heads_first(x->v);
    check_same_results(problem_attend(&swapped, kernel, 1), problem_attend(x, kernel, 1));
}

static void memory_order_does_not_matter(void) { for_each_form(check_layout); }

static void check_unread(const problem *x, const char *kernel) {
    problem spoilt = *x;
    spoilt.k = copy_tensor(x->k);
    spoilt.v = copy_tensor(x->v);
    spoilt.bias = copy_tensor(x->bias);
    CHECK(poison_unread(&spoilt, NAN) > 0 || x->window < 0);
    check_same_results(problem_attend(&spoilt, kernel, 1), problem_attend(x, kernel, 1));
}

static void keys_that_are_not_kept_are_not_read(void) { for_each_form(check_unread); }

/* Only without a selection does one row read keys in the order of memory; the bits are the same. */
static void a_selection_of_all_keys_is_dense(void) {
    const kernel_list kernels = kernels_of("forward");
    for (int dtype = 0; dtype < test_dtype_count; dtype++) {
        const problem all = decode_problem(test_dtypes[dtype], 1, decode_len);
        problem dense = all;
        dense.window = -1;
        for (int kernel = 0; kernel < kernels.count; kernel++) {
            const char *const name = kernels.name[kernel];
            test_context("%s %s", name, dtype_name(all.dtype));
            if (strstr(name, "/decode") != NULL)
                check_same_results(problem_attend(&dense, name, 2), problem_attend(&all, name, 2));
        }
        test_free_all();
    }
}

/* One query and `kv_len` keys of 8 channels. The logits are the biases. */
static problem long_problem(int64_t kv_len) {
    problem x = {
        .batch = 1,
        .q_len = 1,
        .kv_len = kv_len,
        .q_heads = 1,
        .kv_heads = 1,
        .head_dim = 8,
        .window = -1,
        .causal = 1,
        .dtype = FDMA_FLOAT32,
    };
    problem_fill(&x, 0);
    memset(x.q.data, 0, bytes_of(x.q));
    return x;
}

/* v is 2^24 for the first key and 1 for the others, with equal weights. Ones added one by one to
 * 2^24 would be lost, like the keys of a long split in a single running sum. */
static void small_values_count(void) {
    enum { keys = 481 };
    const kernel_list kernels = kernels_of("forward");
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        const problem x = long_problem(keys);
        memset(x.bias.data, 0, bytes_of(x.bias));
        for (int64_t n = 0; n < 8 * keys; n++)
            ((float *)x.v.data)[n] = n < 8 ? 0x1p24F : 1;
        test_context("%s", kernels.name[kernel]);
        const attended got = problem_attend(&x, kernels.name[kernel], 1);
        const double want = (0x1p24 + keys - 1) / keys;
        CHECK_NEAR((double)*(float *)got.out.data, want, 120.0 / keys); /* for tiles: a key block */
        test_free_all();
    }
}

/* The first key has weight 1, the others 2^-24 each. */
static void small_weights_count(void) {
    enum { keys = 481 };
    const kernel_list kernels = kernels_of("forward");
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        const problem x = long_problem(keys);
        for (int64_t n = 0; n < keys; n++)
            ((float *)x.bias.data)[n] = n == 0 ? 0 : -24 * 0.693147181F;
        test_context("%s", kernels.name[kernel]);
        const attended got = problem_attend(&x, kernels.name[kernel], 1);
        CHECK_NEAR((double)*(float *)got.lse.data, log1p((keys - 1) * 0x1p-24), 2.5e-6);
        test_free_all();
    }
}

/* The name of a point forces its decode kernel for few rows and its tile kernel for more. The name
 * of each of the two forces it, but decode for few rows only. */
static void each_kernel_can_be_forced(void) {
    const problem few = decode_problem(FDMA_FLOAT32, 1, -1);
    const problem many = decode_problem(FDMA_FLOAT32, 17, -1);
    static const struct {
        const char *forced, *few, *many;
    } cases[] = {
        {"cpu/scalar", "cpu/scalar/decode", "cpu/scalar/tile"},
        {"cpu/scalar/tile", "cpu/scalar/tile", "cpu/scalar/tile"},
        {"cpu/scalar/decode", "cpu/scalar/decode", NULL},
    };
    for (int n = 0; n < TEST_COUNT(cases); n++) {
        const fdma_forward_args args[] = {problem_args(&few, cases[n].forced),
                                          problem_args(&many, cases[n].forced)};
        const char *picked = NULL;
        test_context("%s", cases[n].forced);
        CHECK_OK(fdma_forward_kernel(&args[0], &picked));
        CHECK(strcmp(picked, cases[n].few) == 0);
        if (cases[n].many != NULL) {
            CHECK_OK(fdma_forward_kernel(&args[1], &picked));
            CHECK(strcmp(picked, cases[n].many) == 0);
        } else {
            CHECK_INT(fdma_forward_kernel(&args[1], &picked), FDMA_UNSUPPORTED);
            CHECK_WORD(fdma_last_error(), "16 rows");
        }
        check_close_results(&few, problem_attend(&few, cases[n].forced, 2),
                            problem_attend(&few, "reference", 1));
    }
}

static const test_entry tests[] = {
    TEST(threads_work_on_one_row),      TEST(each_sequence_is_alone),
    TEST(memory_order_does_not_matter), TEST(keys_that_are_not_kept_are_not_read),
    TEST(small_values_count),           TEST(small_weights_count),
    TEST(each_kernel_can_be_forced),    TEST(a_selection_of_all_keys_is_dense),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
