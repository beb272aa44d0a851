/* test_pair_gradients.c - dattn_bias in 16 bits: each element is the float32 sum of its terms,
 * rounded once, for any heads, rows, keys and sequences that share it. */
#include "masks.h"

/* Groups of 1, 2, 3, 4 and 8 heads; rows of whole vectors and others; lists of several blocks. */
static const problem sizes[] = {
    SIZES(2, 37, 53, 6, 2, 16, 20, 1),  SIZES(1, 40, 216, 4, 2, 32, 200, 1),
    SIZES(2, 20, 160, 4, 1, 64, -1, 1), SIZES(1, 33, 90, 8, 1, 24, -1, 0),
    SIZES(1, 20, 40, 2, 2, 16, -1, 1),
};

static bool is_short(fdma_dtype dtype) { return dtype_size(dtype) == 2; }

/* A neighbour of a 16-bit number: `by` = 1 moves away from 0, -1 towards 0 and past it. */
static double neighbour(fdma_tensor tensor, int64_t n, int by) {
    const uint16_t bits = ((const uint16_t *)tensor.data)[n];
    const bool is_zero = (bits & 0x7fff) == 0;
    // 8 bytes, because compilers warn of load_double() where other dtypes would not fit
    const uint16_t next[4] = {is_zero && by < 0 ? 0x8001 : (uint16_t)(bits + by)};
    return load_double(next, tensor.dtype, 0);
}

/* True if element n is the number of its dtype nearest to `want`; of two, the even one. */
static bool is_nearest(fdma_tensor tensor, int64_t n, double want) {
    const double found = load_double(tensor.data, tensor.dtype, n);
    const double most = tensor.dtype == FDMA_FLOAT16 ? 65520 : (double)FLT_MAX;
    const bool is_even = ((const uint16_t *)tensor.data)[n] % 2 == 0;
    if (!isfinite(found))
        return isnan(want) ? isnan(found) : fabs(want) >= most && found * want > 0;
    for (int by = -1; by <= 1; by += 2) {
        const double other = fabs(neighbour(tensor, n, by) - want), error = fabs(found - want);
        if (isnan(want) || other < error || (other == error && !is_even))
            return false;
    }
    return true;
}

static void check_rounded(fdma_tensor found, fdma_tensor want) {
    int64_t wrong = 0;
    for (int64_t n = 0; n < count_of(found); n++)
        wrong += !is_nearest(found, n, load_double(want.data, want.dtype, n));
    CHECK_INT(wrong, 0);
}

/* True if two calls of a kernel add to an element in the same order. On a device that fails where
 * several lanes hold pairs that share it. */
static bool has_one_order(const problem *x, const char *kernel, fdma_tensor dpairs) {
    return strncmp(kernel, "cuda", 4) != 0 || count_of(dpairs) == pair_total(x);
}

/* Checks dattn_bias in 16 bits against dattn_bias in float32 and the terms of its sums. */
static void check_short(const problem *x, const char *kernel, const gradient_problem *p,
                        pairs given) {
    const masked_gradients wide = run_masked(p, kernel, given, 3);
    const masked_gradients found = run_masked_as(p, kernel, given, 3, x->dtype);
    check_equal_gradients(kernel, found.rows, wide.rows);
    if (has_one_order(x, kernel, found.dpairs)) {
        check_rounded(found.dpairs, wide.dpairs);
        return;
    }
    const pairs full = {given.mask, expanded(x, given.bias)};
    const fdma_tensor each = run_masked(p, kernel, full, 1).dpairs;
    const fdma_tensor want = summed_like(x, each, found.dpairs);
    const double terms = (double)(count_of(each) / count_of(want));
    CHECK_NEAR(largest_difference(found.dpairs, want), 0,
               (double)FLT_EPSILON * sqrt(terms) * largest_of(each) * terms +
                   step_of(x->dtype) / 2 * largest_of(want));
}

/* ---- axes ---- */

static void check_axes_of(const problem *x, const char *kernel, bool has_mask, int axes) {
    const pairs given = {has_mask ? new_mask(x, (axes * 7 + 5) % 32, 40, 6) : (fdma_tensor){0},
                         new_pair_bias(x, x->dtype, axes, 7)};
    const gradient_problem p = gradient_masked(x, given);
    check_short(x, kernel, &p, given);
}

/* Every broadcast for the first problem, some for the others. */
static void check_axes(const char *kernel, fdma_dtype dtype) {
    static const int some_axes[] = {all_axes | per_kv_head, all_axes, all_axes - axis_h, axis_j};
    const int step = test_divisor() > 1 ? 7 : 1;
    for (int n = 0; n < TEST_COUNT(sizes); n++) {
        problem x = sizes[n];
        if (!is_short(dtype) || is_left_out(n, (int)dtype))
            continue;
        x.dtype = dtype;
        problem_fill(&x, (uint64_t)n + 1);
        problem_select(&x);
        if (!biases_are_taken(&x, kernel))
            continue;
        for (int axes = 0; n == 0 && axes <= (all_axes | per_kv_head); axes += step)
            check_axes_of(&x, kernel, axes % 4 != 1, axes);
        for (int s = 0; s < TEST_COUNT(some_axes); s++)
            check_axes_of(&x, kernel, (s + n) % 4 != 0, some_axes[s]);
    }
}

static void are_rounded_once(void) { for_each_kernel("backward", check_axes); }

/* ---- numbers of any size ---- */

/* dS = -P delta can have any size, because delta is -dlse: too small for 16 bits, subnormal, too
 * large. */
static void check_magnitudes(const char *kernel, fdma_dtype dtype) {
    problem x = sizes[4];
    x.dtype = dtype;
    if (!is_short(dtype))
        return;
    problem_fill(&x, 9);
    problem_select(&x);
    if (!biases_are_taken(&x, kernel))
        return;
    const pairs given = {new_mask(&x, axis_i | axis_j, 60, 6),
                         new_pair_bias(&x, x.dtype, axis_h | axis_i | axis_j, 7)};
    gradient_problem p = gradient_masked(&x, given);
    memset(p.dout.data, 0, bytes_of(p.dout));
    for (int64_t n = 0; n < count_of(p.dlse); n++)
        ((float *)p.dlse.data)[n] = ldexpf(n % 3 == 0 ? -1 : 1, (int)(n * 7 % 60) - 35);
    const masked_gradients wide = run_masked(&p, kernel, given, 1);
    const masked_gradients found = run_masked_as(&p, kernel, given, 1, x.dtype);
    check_rounded(found.dpairs, wide.dpairs);
    CHECK(dtype != FDMA_FLOAT16 || largest_of(found.dpairs) == (double)INFINITY);
}

static void may_have_any_size(void) { for_each_kernel("backward", check_magnitudes); }

/* ---- other forms of calls ---- */

/* Runs where a device may not add in any order. */
static void check_deterministic(const char *kernel, fdma_dtype dtype) {
    problem x = sizes[2];
    x.dtype = dtype;
    if (!is_short(dtype))
        return;
    problem_fill(&x, 5);
    if (!biases_are_taken(&x, kernel))
        return;
    const pairs given = {new_mask(&x, all_axes, 20, 6), new_pair_bias(&x, x.dtype, all_axes, 7)};
    gradient_problem p = gradient_masked(&x, given);
    p.deterministic = 1;
    check_short(&x, kernel, &p, given);
}

static void are_made_deterministically(void) { for_each_kernel("backward", check_deterministic); }

/* Packed sequences, and sequences with only some keys: a bias that all of them share is rounded
 * once, not once per sequence. Another bias gets zeros where no query sees a key. */
static void check_pieces(const char *kernel, fdma_dtype dtype) {
    static int32_t starts[] = {0, 25, 25, 60}, used[] = {20, 50, 0};
    problem packed = SIZES(1, 60, 60, 4, 2, 64, -1, 1), batch = SIZES(3, 30, 50, 4, 2, 64, -1, 1);
    packed.dtype = batch.dtype = dtype;
    if (!is_short(dtype))
        return;
    problem_fill(&packed, 5);
    problem_fill(&batch, 6);
    if (!biases_are_taken(&packed, kernel))
        return;
    packed.starts = fdma_tensor_1d(starts, FDMA_INT32, TEST_COUNT(starts));
    batch.kv_used = fdma_tensor_1d(used, FDMA_INT32, TEST_COUNT(used));
    const problem *const both[] = {&packed, &batch};
    for (int n = 0; n < 4; n++) {
        const problem *const x = both[n % 2];
        const pairs given = {new_mask(x, axis_h | axis_i | axis_j, 40, 6),
                             new_pair_bias(x, x->dtype, n < 2 ? axis_h : all_axes, 7)};
        const gradient_problem p = gradient_masked(x, given);
        check_short(x, kernel, &p, given);
    }
}

static void add_up_over_pieces(void) { for_each_kernel("backward", check_pieces); }

static void check_empty(const char *kernel, fdma_dtype dtype) {
    const problem empty[] = {SIZES(1, 0, 9, 4, 2, 64, -1, 1), SIZES(1, 5, 0, 4, 2, 64, -1, 0),
                             SIZES(0, 5, 9, 4, 2, 64, -1, 0), SIZES(1, 0, 0, 4, 2, 64, -1, 1)};
    for (int n = 0; n < TEST_COUNT(empty) && is_short(dtype); n++) {
        problem x = empty[n];
        x.dtype = dtype;
        problem_fill(&x, 5);
        if (!biases_are_taken(&x, kernel))
            continue;
        const pairs given = {new_mask(&x, axis_i | axis_j, 40, 6),
                             new_pair_bias(&x, x.dtype, axis_h, 7)};
        const gradient_problem p = gradient_masked(&x, given);
        const masked_gradients found = run_masked_as(&p, kernel, given, 2, x.dtype);
        for (int h = 0; h < 4; h++)
            CHECK(((const uint16_t *)found.dpairs.data)[h] == 0);
    }
}

static void no_rows_give_zero(void) { for_each_kernel("backward", check_empty); }

static const test_entry tests[] = {
    TEST(are_rounded_once),   TEST(may_have_any_size), TEST(are_made_deterministically),
    TEST(add_up_over_pieces), TEST(no_rows_give_zero),
};

int main(int argc, char **argv) { return test_run_backend(argc, argv, tests, TEST_COUNT(tests)); }
