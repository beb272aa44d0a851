/* test_values.c - attention on unusual numbers: infinities and NaN in the logits, rows that keep
 * nothing, logits far apart. */
#include "problem.h"

static const problem window_1 = SIZES(1, 150, 150, 3, 1, 24, 1, 1);
static const problem window_20 = SIZES(1, 150, 150, 3, 1, 24, 20, 1);
static const problem window_60 = SIZES(1, 150, 150, 3, 1, 24, 60, 1);
static const problem dense = SIZES(1, 150, 150, 3, 1, 24, -1, 1);

static double lse_of(const problem *x, attended got, int64_t h, int64_t i) {
    return (double)((const float *)got.lse.data)[h * x->q_len + i];
}

static double out_of(const problem *x, attended got, int64_t h, int64_t i, int64_t d) {
    return load_double(got.out.data, x->dtype, (i * x->q_heads + h) * x->head_dim + d);
}

static void set_bias(problem *x, int64_t j, float value) { ((float *)x->bias.data)[j] = value; }

static void check_nan_row(const problem *x, attended got, int64_t h, int64_t i) {
    CHECK(isnan(lse_of(x, got, h, i)));
    for (int64_t d = 0; d < x->head_dim; d++)
        CHECK(isnan(out_of(x, got, h, i, d)));
}

static void check_empty_row(const problem *x, attended got, int64_t h, int64_t i) {
    CHECK_NEAR(lse_of(x, got, h, i), -(double)INFINITY, 0);
    for (int64_t d = 0; d < x->head_dim; d++)
        CHECK_NEAR(out_of(x, got, h, i, d), 0, 0);
}

static void check_same_row(const problem *x, attended got, attended want, int64_t h, int64_t i) {
    const size_t size = dtype_size(x->dtype), row = (size_t)x->head_dim * size;
    const size_t at = (size_t)(i * x->q_heads + h) * row;
    CHECK_BYTES((char *)got.out.data + at, (char *)want.out.data + at, row);
    CHECK_NEAR(lse_of(x, got, h, i), lse_of(x, want, h, i), 0);
}

/* The keys of other rows in a tile may change the row's last bits, and no more. */
static void check_close_row(const problem *x, attended got, attended want, int64_t h, int64_t i) {
    const double lse = lse_of(x, want, h, i);
    CHECK_NEAR(lse_of(x, got, h, i), lse, problem_lse_tolerance(x, lse));
    for (int64_t d = 0; d < x->head_dim; d++)
        CHECK_NEAR(out_of(x, got, h, i, d), out_of(x, want, h, i, d), problem_out_tolerance(x));
}

/* A NaN or +inf logit makes the rows that keep its key NaN, and no other row. */
static void check_poisoned(problem *x, attended got, attended clean, int64_t poisoned) {
    int touched = 0, untouched = 0;
    for (int64_t h = 0; h < x->q_heads; h++) {
        for (int64_t i = 0; i < x->q_len; i++) {
            if (problem_keeps(x, 0, 0, i, poisoned)) {
                check_nan_row(x, got, h, i);
                touched++;
            } else {
                check_close_row(x, got, clean, h, i);
                untouched++;
            }
        }
    }
    CHECK(touched > 0 && untouched > 0);
}

/* If the window evicts, a key that is kept for a while and then evicted; else the 70th. */
static int64_t passing_key(const problem *x) {
    for (int64_t j = 60; x->window >= 0 && j < x->kv_len; j++) {
        const int32_t expiry = ((const int32_t *)x->selection.expiry.data)[j];
        if (expiry > j + 5 && expiry < x->kv_len - 5)
            return j;
    }
    return 70;
}

static void poison_stays_in_its_rows(problem *x, const char *kernel) {
    const int64_t j = passing_key(x);
    const attended clean = problem_attend(x, kernel, 1);
    set_bias(x, j, NAN);
    check_poisoned(x, problem_attend(x, kernel, 1), clean, j);
    set_bias(x, j, INFINITY);
    check_poisoned(x, problem_attend(x, kernel, 1), clean, j);
}

static void nan_keys_stay_in_their_rows(problem *x, const char *kernel) {
    const int64_t j = passing_key(x);
    const attended clean = problem_attend(x, kernel, 1);
    spoil_key(x->k, 0, j, 0, NAN);
    check_poisoned(x, problem_attend(x, kernel, 1), clean, j);
}

static void nan_queries_stay_alone(problem *x, const char *kernel) {
    const int64_t i = 77, h = 1;
    const attended clean = problem_attend(x, kernel, 1);
    for (int64_t d = 0; d < x->head_dim; d++)
        store_float(x->q.data, x->dtype, (i * x->q_heads + h) * x->head_dim + d, NAN);
    const attended got = problem_attend(x, kernel, 1);
    for (int64_t row = 0; row < x->q_heads * x->q_len; row++) {
        const int64_t other_h = row / x->q_len, other_i = row % x->q_len;
        if (other_h == h && other_i == i)
            check_nan_row(x, got, h, i);
        else
            check_same_row(x, got, clean, other_h, other_i);
    }
}

/* Logits of -inf have no weight: first a whole tile of them, then some among others. */
static void minus_infinity_weighs_nothing(problem *x, const char *kernel) {
    problem without = *x;
    without.bias = copy_tensor(x->bias);
    without.v = copy_tensor(x->v);
    for (int64_t j = 0; j < x->kv_len; j++) {
        if (j < 100 || j % 3 == 0) {
            set_bias(x, j, -INFINITY);
            set_bias(&without, j, -INFINITY);
            spoil_key(without.v, 0, j, 0, 5);
        }
    }
    const attended got = problem_attend(x, kernel, 1);
    const attended other_values = problem_attend(&without, kernel, 1);
    for (int64_t h = 0; h < x->q_heads; h++) {
        for (int64_t i = 0; i < x->q_len; i++) {
            if (i < 100) {
                check_empty_row(x, got, h, i);
            } else {
                check_same_row(x, got, other_values, h, i);
                CHECK(isfinite(lse_of(x, got, h, i)) || i == 100);
            }
        }
    }
}

static void check_all_empty(problem *x, const char *kernel) {
    const attended got = problem_attend(x, kernel, 2);
    for (int64_t h = 0; h < x->q_heads; h++)
        for (int64_t i = 0; i < x->q_len; i++)
            check_empty_row(x, got, h, i);
}

static void a_selection_may_keep_nothing(problem *x, const char *kernel) {
    for (int32_t j = 0; j < (int32_t)x->kv_len; j++) {
        ((int32_t *)x->selection.expiry.data)[j] = j;
        ((int32_t *)x->selection.slot.data)[j] = -1;
    }
    check_all_empty(x, kernel);
}

static void padding_alone_keeps_nothing(problem *x, const char *kernel) {
    x->key_valid = new_tensor(FDMA_UINT8, 1, x->kv_len, -1, -1);
    problem_select(x);
    check_all_empty(x, kernel);
    x->causal = 0;
    x->scope = FDMA_SCOPE_GLOBAL;
    problem_select(x);
    check_all_empty(x, kernel);
}

static void queries_before_the_first_key(problem *x, const char *kernel) {
    problem shorter = *x;
    shorter.kv_len = 40;
    shorter.k.shape[1] = shorter.v.shape[1] = 40;
    shorter.bias = new_tensor(FDMA_FLOAT32, 1, 1, 40, -1);
    const attended got = problem_attend(&shorter, kernel, 1);
    for (int64_t h = 0; h < x->q_heads; h++) {
        for (int64_t i = 0; i < x->q_len; i++)
            if (i < x->q_len - 40)
                check_empty_row(x, got, h, i);
            else
                CHECK(isfinite(lse_of(x, got, h, i)));
        for (int64_t d = 0; d < x->head_dim; d++) { /* the first query that sees one key */
            const double v = load_double(x->v.data, x->dtype, d);
            CHECK_NEAR(out_of(x, got, h, x->q_len - 40, d), v, 0x1p-7 * fabs(v));
        }
    }
}

/* One key outweighs all others by exp(1000): the row is its value. */
static void logits_far_apart(problem *x, const char *kernel) {
    set_bias(x, 0, 1000);
    set_bias(x, 90, 2000);
    const attended got = problem_attend(x, kernel, 1);
    for (int64_t h = 0; h < x->q_heads; h++) {
        for (int64_t i = 0; i < x->q_len; i++) {
            const int64_t j = i < 90 ? 0 : 90;
            CHECK_NEAR(lse_of(x, got, h, i), 1000.0 + 1000.0 * (i >= 90), 100);
            for (int64_t d = 0; d < x->head_dim; d++) {
                const double v = load_double(x->v.data, x->dtype, j * x->head_dim + d);
                CHECK_NEAR(out_of(x, got, h, i, d), v, 0x1p-7 * fabs(v));
            }
        }
    }
}

/* A softcap far above all logits has no effect. One far below them makes them all 0; then the lse
 * of n keys is log n, because bias is 0 here. */
static void extreme_softcaps(problem *x, const char *kernel) {
    static const double caps[] = {1e12, 1e30, 1e38, 1e39, 1e300};
    static const double none[] = {1e-25, 1e-38, 1e-39, 1e-300, 1e-309, 1e-320};
    for (int64_t j = 0; j < x->kv_len; j++)
        set_bias(x, j, 0);
    const attended uncapped = problem_attend(x, kernel, 1);
    for (int c = 0; c < TEST_COUNT(caps); c++) {
        x->softcap = caps[c];
        const attended got = problem_attend(x, kernel, 1);
        for (int64_t i = 0; i < x->q_len; i++) {
            const double want = lse_of(x, uncapped, 0, i);
            CHECK_NEAR(lse_of(x, got, 0, i), want, 1e-5 * (1 + fabs(want)));
        }
    }
    for (int c = 0; c < TEST_COUNT(none); c++) {
        x->softcap = none[c];
        const attended got = problem_attend(x, kernel, 1);
        for (int64_t i = 0; i < x->q_len; i++)
            CHECK_NEAR(lse_of(x, got, 0, i), log((double)(i + 1)), 1e-5);
    }
}

static const test_entry tests[] = {
    EACH_PROBLEM(poison_stays_in_its_rows, window_20, 21),
    EACH_PROBLEM(poison_stays_in_its_rows, dense, 21),
    EACH_PROBLEM(nan_keys_stay_in_their_rows, window_20, 21),
    EACH_PROBLEM(nan_keys_stay_in_their_rows, dense, 21),
    EACH_PROBLEM(nan_queries_stay_alone, window_20, 21),
    EACH_PROBLEM(minus_infinity_weighs_nothing, window_60, 21),
    EACH_PROBLEM(minus_infinity_weighs_nothing, dense, 21),
    EACH_PROBLEM(a_selection_may_keep_nothing, window_1, 21),
    EACH_PROBLEM(padding_alone_keeps_nothing, window_20, 21),
    EACH_PROBLEM(padding_alone_keeps_nothing, dense, 21),
    EACH_PROBLEM(queries_before_the_first_key, dense, 21),
    EACH_PROBLEM(logits_far_apart, dense, 21),
    EACH_PROBLEM(extreme_softcaps, dense, 21),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
