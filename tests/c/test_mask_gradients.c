/* test_mask_gradients.c - backward with attn_mask and attn_bias: compared with the reference, with
 * selections and bias, and with expanded tensors, and on any number of threads. */
#include "masks.h"

static const problem sizes[] = {
    SIZES(2, 70, 70, 4, 2, 64, 20, 1),    SIZES(1, 131, 170, 6, 2, 40, 30, 0),
    SIZES(1, 300, 300, 3, 3, 128, 9, 1),  SIZES(2, 1, 300, 8, 2, 128, 50, 1),
    SIZES(1, 30, 20, 2, 2, 24, 12, 0),    SIZES(1, 400, 413, 5, 1, 32, 64, 1),
    SIZES(1, 60, 1163, 2, 2, 16, 300, 1), // more keys than are scanned at a time
};

static void for_each_size(const char *kernel, fdma_dtype dtype,
                          void (*check)(problem *x, const char *kernel)) {
    for (int n = 0; n < TEST_COUNT(sizes); n++) {
        problem x = sizes[n];
        if (is_left_out(n, (int)dtype))
            continue;
        x.dtype = dtype;
        problem_fill(&x, (uint64_t)n + 1);
        problem_select(&x);
        if (masks_are_taken(&x, kernel))
            check(&x, kernel);
    }
}

/* A mask and a bias if the kernel takes them: the kernels of forward and backward of one name take
 * the same. */
static pairs random_pairs(const problem *x, const char *kernel, int mask_axes, int bias_axes) {
    return pairs_taken(
        x, kernel,
        (pairs){new_mask(x, mask_axes, 24, 6), new_pair_bias(x, x->dtype, bias_axes, 7)});
}

/* dattn_bias is a sum of terms of both signs. Its error is at most the error of all terms in a
 * row. */
static void check_sums(const problem *x, fdma_tensor found, fdma_tensor full) {
    if (found.rank == 0)
        return;
    const fdma_tensor want = summed_like(x, full, found);
    const double terms = (double)(count_of(full) / count_of(found));
    CHECK_NEAR(largest_difference(found, want), 0,
               (double)FLT_EPSILON * sqrt(terms) * largest_of(full) * terms + DBL_MIN);
}

/* ---- the reference ---- */

static masked_gradients reference_of(const gradient_problem *p, pairs given, const char *kernel,
                                     bool wide) {
    gradient_problem own = *p;
    fdma_tensor *const tensors[] = {&own.x.q, &own.x.k, &own.x.v,  &own.x.bias,
                                    &own.out, &own.lse, &own.dout, &own.dlse};
    for (int t = 0; t < TEST_COUNT(tensors) && wide; t++)
        *tensors[t] = widened(*tensors[t]);
    if (wide) {
        own.x.dtype = FDMA_FLOAT64;
        given.bias = widened(given.bias);
    }
    return run_masked(&own, kernel, given, 1);
}

static void check_against_reference(problem *x, const char *kernel, pairs given) {
    const gradient_problem p = gradient_masked(x, given);
    const masked_gradients found = run_masked(&p, kernel, given, 1);
    const masked_gradients want = reference_of(&p, given, "reference", true);
    const masked_gradients plain = reference_of(&p, given, "reference/float32", false);
    for (int t = 0; t < TEST_COUNT(want.rows.all); t++)
        CHECK_NEAR(largest_difference(found.rows.all[t], want.rows.all[t]), 0,
                   4 * largest_difference(plain.rows.all[t], want.rows.all[t]) +
                       2 * step_of(x->dtype) * largest_of(want.rows.all[t]));
    if (given.bias.rank == 0)
        return;
    CHECK_NEAR(largest_difference(found.dpairs, want.dpairs), 0,
               4 * largest_difference(plain.dpairs, want.dpairs) +
                   2 * step_of(x->dtype) * largest_of(want.dpairs));
}

static void check_reference(problem *x, const char *kernel) {
    check_against_reference(x, kernel, random_pairs(x, kernel, all_axes, axis_h | axis_i | axis_j));
}

/* Logits are so low that a weight is infinite unless a mask clears it. No query keeps every third
 * key, so that a list is shorter than the keys. */
static void check_low_logits(const char *kernel, fdma_dtype dtype) {
    problem x = sizes[1];
    x.dtype = dtype;
    problem_fill(&x, 9);
    problem_select(&x);
    if (!masks_are_taken(&x, kernel))
        return;
    const pairs given = random_pairs(&x, kernel, all_axes, axis_h | axis_i | axis_j);
    for (int64_t n = 0; n < count_of(given.mask); n++)
        if (n % x.kv_len % 3 == 1)
            ((uint8_t *)given.mask.data)[n] = 0;
    for (int64_t n = 0; n < count_of(x.bias); n++)
        store_float(x.bias.data, x.bias.dtype, n,
                    (float)load_double(x.bias.data, x.bias.dtype, n) - 120);
    check_against_reference(&x, kernel, given);
}

static void may_have_low_logits(void) { for_each_kernel("backward", check_low_logits); }

static void check_reference_of(const char *kernel, fdma_dtype dtype) {
    for_each_size(kernel, dtype, check_reference);
}

static void are_those_of_the_reference(void) { for_each_kernel("backward", check_reference_of); }

/* ---- masks that repeat other arguments ---- */

/* Compares with a mask of the pairs that a selection keeps, and with a bias for each key. */
static void check_selection(problem *x, const char *kernel) {
    if (!biases_are_taken(x, kernel))
        return;
    const gradient_problem p = gradient_of(x, 1);
    const gradients want = gradient_run(&p, kernel, 1);
    gradient_problem dense = p;
    dense.x.window = -1;
    dense.x.bias = (fdma_tensor){0};
    const int axes = axis_b | axis_h | axis_j | per_kv_head;
    const pairs given = {new_pairs(x, FDMA_UINT8, all_axes), new_pairs(x, FDMA_FLOAT32, axes)};
    memcpy(given.bias.data, x->bias.data, bytes_of(given.bias));
    for (int64_t n = 0; n < pair_total(x); n++)
        ((uint8_t *)given.mask.data)[n] = pair_is_kept(x, (fdma_tensor){0}, pair_of(x, n));
    const masked_gradients found = run_masked(&dense, kernel, given, 1);
    const double tolerance = 64 * step_of(x->dtype);
    check_near(found.rows.dq, want.dq, tolerance);
    check_near(found.rows.dk, want.dk, tolerance);
    check_near(found.rows.dv, want.dv, tolerance);
    fdma_tensor dbias = want.dbias;
    check_near(found.dpairs, dbias, tolerance);
}

static void check_selection_of(const char *kernel, fdma_dtype dtype) {
    for_each_size(kernel, dtype, check_selection);
}

static void are_those_of_a_selection(void) { for_each_kernel("backward", check_selection_of); }

/* ---- axes ---- */

/* Broadcast tensors give the bits of expanded ones, except for dattn_bias, which is their sum. */
static void check_axes(const char *kernel, fdma_dtype dtype) {
    problem x = SIZES(2, 37, 53, 6, 2, 16, 20, 1);
    x.dtype = dtype;
    x.softcap = 3;
    problem_fill(&x, 3);
    problem_select(&x);
    if (!masks_are_taken(&x, kernel))
        return;
    for (int axes = 0; axes <= (all_axes | per_kv_head); axes += test_divisor() > 1 ? 3 : 1) {
        const pairs given = random_pairs(&x, kernel, (axes * 7 + 5) % 32, axes);
        const pairs full = {expanded(&x, given.mask), expanded(&x, given.bias)};
        const gradient_problem p = gradient_masked(&x, given);
        const masked_gradients found = run_masked(&p, kernel, given, 3);
        const masked_gradients want = run_masked(&p, kernel, full, 1);
        check_equal_gradients(kernel, found.rows, want.rows);
        check_sums(&x, found.dpairs, want.dpairs);
    }
}

static void are_summed_over_broadcast_axes(void) { for_each_kernel("backward", check_axes); }

/* ---- threads ---- */

/* Tasks that add to the same elements take turns. */
static void check_threads(const char *kernel, fdma_dtype dtype) {
    static const problem large[] = {SIZES(2, 700, 700, 3, 1, 16, -1, 1),
                                    SIZES(1, 700, 700, 4, 2, 16, 40, 1)};
    static const int axes[] = {0, axis_i | axis_j, axis_j, axis_h | axis_i | axis_j | per_kv_head,
                               all_axes};
    for (int n = 0; n < TEST_COUNT(large) * TEST_COUNT(axes); n++) {
        problem x = large[n / TEST_COUNT(axes)];
        if (strcmp(kernel, "reference") == 0 || n % test_divisor() != 0)
            continue; // the reference has one thread
        if (is_left_out(n, (int)dtype))
            continue;
        if (strncmp(kernel, "cuda", 4) == 0)
            continue; // without `deterministic` a device adds in any order
        x.dtype = dtype;
        problem_fill(&x, 3);
        problem_select(&x);
        if (!masks_are_taken(&x, kernel))
            continue;
        const pairs given = random_pairs(&x, kernel, axis_i | axis_j, axes[n % TEST_COUNT(axes)]);
        const gradient_problem p = gradient_masked(&x, given);
        const masked_gradients one = run_masked(&p, kernel, given, 1);
        const masked_gradients many = run_masked(&p, kernel, given, 7);
        check_same_gradients(many.rows, one.rows);
        CHECK_BYTES(many.dpairs.data, one.dpairs.data, bytes_of(one.dpairs));
    }
}

static void do_not_depend_on_threads(void) { for_each_kernel("backward", check_threads); }

/* ---- pairs and keys that are not kept ---- */

/* Gradients of pairs and keys that are not kept are 0, and NaN in these has no effect. */
static void check_poison(problem *x, const char *kernel) {
    const pairs given = random_pairs(x, kernel, all_axes, all_axes);
    for (int64_t n = 0; n < count_of(given.mask); n++)
        if (n % x->kv_len % 3 == 1 || n / x->kv_len % 5 == 2)
            ((uint8_t *)given.mask.data)[n] = 0;
    const gradient_problem p = gradient_masked(x, given);
    const masked_gradients want = run_masked_as(&p, kernel, given, 1, x->dtype);
    gradient_problem poisoned = p;
    poisoned.x.k = copy_tensor(x->k);
    poisoned.x.v = copy_tensor(x->v);
    for (int64_t b = 0; b < x->batch; b++)
        for (int64_t g = 0; g < x->kv_heads; g++)
            for (int64_t j = 1; j < x->kv_len; j += 3) {
                spoil_key(poisoned.x.k, b, j, g, NAN);
                spoil_key(poisoned.x.v, b, j, g, NAN);
            }
    for (int64_t n = 0; n < pair_total(x); n++)
        if (given.bias.rank > 0 && !pair_is_kept(x, given.mask, pair_of(x, n))) {
            CHECK(load_double(want.dpairs.data, x->dtype, n) == 0);
            store_float(given.bias.data, given.bias.dtype, n, NAN);
        }
    const masked_gradients found = run_masked_as(&poisoned, kernel, given, 1, x->dtype);
    check_equal_gradients(kernel, found.rows, want.rows);
    if (given.bias.rank > 0)
        CHECK_BYTES(found.dpairs.data, want.dpairs.data, bytes_of(want.dpairs));
    CHECK(isfinite(largest_of(want.rows.dq)) && largest_of(want.rows.dv) > 0);
}

static void check_poison_of(const char *kernel, fdma_dtype dtype) {
    for_each_size(kernel, dtype, check_poison);
}

static void ignore_what_is_not_kept(void) { for_each_kernel("backward", check_poison_of); }

/* ---- packed sequences, sequences with only some keys, and no rows ---- */

/* All sequences share a bias: dattn_bias of the whole is the sum over its pieces. */
static void check_pieces(const char *kernel, fdma_dtype dtype) {
    static int32_t starts[] = {0, 25, 25, 60}, used[] = {20, 50, 0};
    problem packed = SIZES(1, 60, 60, 4, 2, 64, -1, 1), batch = SIZES(3, 30, 50, 4, 2, 64, -1, 1);
    packed.dtype = batch.dtype = dtype;
    problem_fill(&packed, 5);
    problem_fill(&batch, 6);
    if (!masks_are_taken(&packed, kernel))
        return;
    packed.starts = fdma_tensor_1d(starts, FDMA_INT32, TEST_COUNT(starts));
    batch.kv_used = fdma_tensor_1d(used, FDMA_INT32, TEST_COUNT(used));
    const problem *const both[] = {&packed, &batch};
    for (int n = 0; n < 2; n++) {
        const problem *const x = both[n];
        const pairs heads = random_pairs(x, kernel, axis_h | axis_i | axis_j, axis_h);
        const pairs full = {heads.mask, expanded(x, heads.bias)};
        const gradient_problem p = gradient_masked(x, heads);
        const masked_gradients found = run_masked(&p, kernel, heads, 2);
        const masked_gradients each = run_masked(&p, kernel, full, 1);
        check_equal_gradients(kernel, found.rows, each.rows);
        check_sums(x, found.dpairs, each.dpairs);
        CHECK(heads.bias.rank == 0 || largest_of(each.dpairs) > 0);
    }
}

static void add_up_over_pieces(void) { for_each_kernel("backward", check_pieces); }

static void check_empty(const char *kernel, fdma_dtype dtype) {
    const problem empty[] = {SIZES(1, 0, 9, 4, 2, 64, -1, 1), SIZES(1, 5, 0, 4, 2, 64, -1, 0),
                             SIZES(0, 5, 9, 4, 2, 64, -1, 0), SIZES(1, 0, 0, 4, 2, 64, -1, 1)};
    for (int n = 0; n < TEST_COUNT(empty); n++) {
        problem x = empty[n];
        x.dtype = dtype;
        problem_fill(&x, 5);
        if (!masks_are_taken(&x, kernel))
            continue;
        const pairs given = random_pairs(&x, kernel, axis_i | axis_j, axis_h);
        const gradient_problem p = gradient_masked(&x, given);
        const masked_gradients found = run_masked(&p, kernel, given, 2);
        for (int h = 0; h < 4 && given.bias.rank > 0; h++)
            CHECK(((const float *)found.dpairs.data)[h] == 0);
    }
}

static void no_rows_give_zero(void) { for_each_kernel("backward", check_empty); }

static const test_entry tests[] = {
    TEST(are_those_of_the_reference), TEST(may_have_low_logits),
    TEST(are_those_of_a_selection),   TEST(are_summed_over_broadcast_axes),
    TEST(do_not_depend_on_threads),   TEST(ignore_what_is_not_kept),
    TEST(add_up_over_pieces),         TEST(no_rows_give_zero),
};

int main(int argc, char **argv) { return test_run_backend(argc, argv, tests, TEST_COUNT(tests)); }
