/* test_forward.c - properties of attention that hold for all numbers: the keys that a query depends
 * on, and that threads, batch and time do not change the result. (test_unread.c tests that keys
 * which no query keeps are not read.) */
#include "problem.h"

typedef void (*property)(problem *x, const char *kernel);

/* Large enough for several tiles of queries and blocks of keys; some heads share keys. */
static problem sizes_of(int64_t window) {
    return (problem){.batch = 2,
                     .q_len = 190,
                     .kv_len = 230,
                     .q_heads = 4,
                     .kv_heads = 2,
                     .head_dim = 40,
                     .window = window,
                     .causal = 1};
}

static void check_on_all_kernels(property holds, int64_t window) {
    const problem sizes = sizes_of(window);
    for_each_problem(&sizes, 7, holds);
}

/* ---- independence of threads, batch and time ---- */

static void check_threads(problem *x, const char *kernel) {
    static const int32_t threads[] = {1, 2, 3, 7, 0};
    const attended one = problem_attend(x, kernel, 1);
    for (int t = 0; t < TEST_COUNT(threads); t++)
        check_same_results(problem_attend(x, kernel, threads[t]), one);
}

static void threads_do_not_show(void) { check_on_all_kernels(check_threads, 50); }
static void threads_do_not_show_dense(void) { check_on_all_kernels(check_threads, -1); }

/* 0 * inf spoils the same rows for every number of threads and every batch size. */
static void infinite_values_do_not_tell_threads(void) {
    const kernel_list kernels = kernels_of("forward");
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        if (strcmp(kernels.name[kernel], "reference") == 0)
            continue; /* the reference is slow and has one path */
        test_context("%s", kernels.name[kernel]);
        problem x = {.batch = 2,
                     .q_len = 1100,
                     .kv_len = 1100,
                     .q_heads = 1,
                     .kv_heads = 1,
                     .head_dim = 8,
                     .window = -1,
                     .causal = 1,
                     .dtype = FDMA_FLOAT32};
        problem_fill(&x, 12);
        ((float *)x.v.data)[128 * 8] = INFINITY;
        const attended one = problem_attend(&x, kernels.name[kernel], 1);
        check_same_results(problem_attend(&x, kernels.name[kernel], 2), one);
        check_same_results(problem_attend(&x, kernels.name[kernel], 16), one);
        const problem alone = problem_sequence(&x, 0);
        const attended first = problem_attend(&alone, kernels.name[kernel], 1);
        CHECK_BYTES(first.out.data, one.out.data, bytes_of(first.out));
        test_free_all();
    }
}

static void check_batch(problem *x, const char *kernel) {
    const attended all = problem_attend(x, kernel, 2);
    for (int64_t b = 0; b < x->batch; b++) {
        const problem alone = problem_sequence(x, b);
        const attended got = problem_attend(&alone, kernel, 1);
        const attended want = {sequence_of(all.out, b), sequence_of(all.lse, b)};
        check_same_results(got, want);
    }
}

static void batch_does_not_show(void) { check_on_all_kernels(check_batch, 50); }

static void check_slots_optional(problem *x, const char *kernel) {
    const attended with = problem_attend(x, kernel, 1);
    x->selection.slot = (fdma_tensor){0};
    check_same_results(problem_attend(x, kernel, 1), with);
}

static void slots_are_optional(void) { check_on_all_kernels(check_slots_optional, 50); }

static void check_lse_optional(problem *x, const char *kernel) {
    const attended with = problem_attend(x, kernel, 1);
    fdma_forward_args args = problem_args(x, kernel);
    args.lse = (fdma_tensor){0};
    CHECK_OK(run_forward(&args));
    CHECK_BYTES(args.out.data, with.out.data, bytes_of(with.out));
}

static void lse_is_optional(void) { check_on_all_kernels(check_lse_optional, 50); }

/* ---- a query depends on the keys that it keeps, and on no other ---- */

static void check_wide_window(problem *x, const char *kernel) {
    problem dense = *x;
    dense.window = -1;
    check_close_results(x, problem_attend(x, kernel, 1), problem_attend(&dense, kernel, 1));
}

static void a_wide_window_is_dense(void) { check_on_all_kernels(check_wide_window, 230); }

static void check_evicted(problem *x, const char *kernel) {
    const attended before = problem_attend(x, kernel, 1);
    const int64_t row = x->head_dim, first = x->kv_len - x->q_len;
    const int32_t *expiry = x->selection.expiry.data;
    int evicted = 0;
    for (int64_t b = 0; b < x->batch; b++) {
        for (int64_t g = 0; g < x->kv_heads; g++) {
            for (int64_t j = 0; j < x->kv_len; j++) {
                const int64_t key = (b * x->kv_heads + g) * x->kv_len + j;
                if (expiry[key] <= first || expiry[key] == j) {
                    const int64_t at = ((b * x->kv_len + j) * x->kv_heads + g) * row;
                    for (int64_t d = 0; d < row; d++) {
                        const float other = (float)(evicted % 5 - 2);
                        store_float(x->k.data, x->dtype, at + d, other);
                        store_float(x->v.data, x->dtype, at + d, -other);
                    }
                    ((float *)x->bias.data)[key] = 3;
                    evicted++;
                }
            }
        }
    }
    CHECK(evicted > 0);
    check_same_results(problem_attend(x, kernel, 1), before);
}

static void evicted_keys_do_not_matter(void) { check_on_all_kernels(check_evicted, 20); }

/* Each key contributes to exactly the queries that keep it: with v = 1 for one key and 0 for the
 * others, out is that key's probability. */
static void check_expiries(problem *x, const char *kernel) {
    const int64_t group = x->q_heads / x->kv_heads;
    static const int64_t watched[] = {0, 64, 100, 128, 229};
    for (int w = 0; w < TEST_COUNT(watched); w++) {
        const int64_t j = watched[w];
        memset(x->v.data, 0, bytes_of(x->v));
        for (int64_t b = 0; b < x->batch; b++) {
            spoil_key(x->v, b, j, 0, 1);
            spoil_key(x->v, b, j, 1, 1);
        }
        const attended got = problem_attend(x, kernel, 1);
        for (int64_t row = 0; row < x->batch * x->q_len * x->q_heads; row++) {
            const int64_t h = row % x->q_heads, i = row / x->q_heads % x->q_len;
            const int64_t b = row / x->q_heads / x->q_len;
            const double weight = load_double(got.out.data, x->dtype, row * x->head_dim);
            CHECK_INT(weight > 0, problem_keeps(x, b, h / group, i, j));
        }
    }
}

static void each_query_sees_its_keys(void) { check_on_all_kernels(check_expiries, 20); }
static void each_query_sees_its_keys_dense(void) { check_on_all_kernels(check_expiries, -1); }

/* ---- options ---- */

static void check_scale(problem *x, const char *kernel) {
    const attended by_default = problem_attend(x, kernel, 1);
    x->scale = 1 / sqrt((double)x->head_dim);
    check_same_results(problem_attend(x, kernel, 1), by_default);

    x->scale = 1;
    const attended plain = problem_attend(x, kernel, 1);
    for (int64_t i = 0; i < count_of(x->q); i++) {
        const double value = load_double(x->q.data, x->dtype, i);
        store_float(x->q.data, x->dtype, i, (float)(4 * value));
    }
    x->scale = 0.25;
    check_same_results(problem_attend(x, kernel, 1), plain);
}

static void scale_multiplies_logits(void) { check_on_all_kernels(check_scale, 50); }

/* Logits are at most c, so two weights of one row differ at most by a factor of exp(2 c). */
static void check_softcap(problem *x, const char *kernel) {
    x->bias = (fdma_tensor){0};
    x->scale = 100;
    x->softcap = 0x1p-20;
    const attended flat = problem_attend(x, kernel, 1);
    for (int64_t i = 0; i < count_of(flat.lse); i++) {
        const int64_t p = i % x->q_len + x->kv_len - x->q_len;
        const double kept = (double)(p + 1 < x->window ? p + 1 : x->window);
        CHECK_NEAR((double)((const float *)flat.lse.data)[i], log(kept), 0x1p-19);
    }
}

static void softcap_bounds_logits(void) { check_on_all_kernels(check_softcap, 50); }

/* A damaged selection gives wrong numbers. The guards and the sanitizers check the rest. */
static void check_damaged(problem *x, const char *kernel) {
    const bool is_reference = strcmp(kernel, "reference") == 0; /* it is slow */
    const int step = is_reference ? corruption_count + 1
                     : test_divisor() > 1
                         ? corruption_count - 1 /* every kind of both, not every pair */
                         : 1;
    uint64_t state = 11;
    for (int how = 0; how < corruption_count * corruption_count; how += step) {
        corrupt(x->selection.expiry, (corruption)(how / corruption_count), &state);
        corrupt(x->selection.slot, (corruption)(how % corruption_count), &state);
        problem_attend(x, kernel, 2);
    }
}

/* Runs in every dtype even if other tests leave some out: the sanitizers find most here. */
static void damaged_selections_do_no_harm(void) {
    const problem sizes = sizes_of(50);
    for (int type = first_dtype(); type < test_dtype_count; type++)
        for_each_problem_of_type(&sizes, 7, type, check_damaged);
}

static const test_entry tests[] = {
    TEST(infinite_values_do_not_tell_threads),
    TEST(threads_do_not_show),
    TEST(threads_do_not_show_dense),
    TEST(batch_does_not_show),
    TEST(slots_are_optional),
    TEST(lse_is_optional),
    TEST(a_wide_window_is_dense),
    TEST(evicted_keys_do_not_matter),
    TEST(each_query_sees_its_keys),
    TEST(each_query_sees_its_keys_dense),
    TEST(scale_multiplies_logits),
    TEST(softcap_bounds_logits),
    TEST(damaged_selections_do_no_harm),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
