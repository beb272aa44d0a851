/* test_mask_gradients.c - backward with attn_mask and attn_bias: compared with the reference, with
 * selections and bias, and with expanded tensors, and on any number of threads. In 16 bits each
 * element of dattn_bias is the float32 sum of its terms, rounded once, for any heads, rows, keys
 * and sequences that share it. */
#include "masks.h"

/* A mask and a bias if the kernel takes them. */
static pairs random_pairs(const problem *x, const char *kernel, int mask_axes, int bias_axes) {
    return gradient_pairs(
        x, kernel,
        (pairs){new_mask(x, mask_axes, 24, 6), new_pair_bias(x, x->dtype, bias_axes, 7)});
}

/* The tolerance of dattn_bias, a sum of terms of both signs: the error of all terms in a row, and
 * of rounding to its dtype. */
static void check_sums(const problem *x, fdma_tensor found, fdma_tensor full) {
    if (found.rank == 0)
        return;
    const fdma_tensor want = summed_like(x, full, found);
    const double terms = (double)(count_of(full) / count_of(found));
    const double step = found.dtype == FDMA_FLOAT32 ? 0 : step_of(found.dtype) / 2;
    CHECK_NEAR(largest_difference(found, want), 0,
               (double)FLT_EPSILON * sqrt(terms) * largest_of(full) * terms +
                   step * largest_of(want) + DBL_MIN);
}

/* ---- the reference ---- */

/* The expected gradients of a problem with some mask and bias; empty until a kernel needs them. */
typedef struct masked_reference {
    bool known;
    gradient_problem p;
    masked_gradients want, plain;
} masked_reference;

static void make_reference(masked_reference *r, const problem *x, pairs given) {
    const pairs wide_pairs = {given.mask, widened(given.bias)};
    r->p = gradient_masked(x, given);
    const gradient_problem wide = widened_problem(&r->p);
    r->want = run_masked(&wide, "reference", wide_pairs, 1);
    r->plain = run_masked(&r->p, "reference/float32", given, 1);
    r->known = true;
}

static void check_like_reference(fdma_tensor found, fdma_tensor want, fdma_tensor plain,
                                 fdma_dtype dtype) {
    CHECK_NEAR(largest_difference(found, want), 0,
               4 * largest_difference(plain, want) + 2 * step_of(dtype) * largest_of(want));
}

/* Compares every kernel with the reference: with the bias if it takes one, else without. Kernels
 * that take no mask are compared if there is none. */
static void check_against_reference(const problem *x, pairs both) {
    masked_reference references[2] = {{.known = false}};
    const kernel_list kernels = kernels_for("backward", x->dtype);
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        const char *const name = kernels.name[kernel];
        const pairs given = gradient_pairs(x, name, both);
        masked_reference *const r = &references[given.bias.rank > 0];
        test_context("%s %s, q_len %d", name, dtype_name(x->dtype), (int)x->q_len);
        if (both.mask.rank > 0 ? !masks_are_taken(x, name) : given.bias.rank == 0)
            continue;
        if (!r->known)
            make_reference(r, x, given);
        const masked_gradients found = run_masked(&r->p, name, given, 1);
        for (int t = 0; t < TEST_COUNT(found.rows.all); t++)
            check_like_reference(found.rows.all[t], r->want.rows.all[t], r->plain.rows.all[t],
                                 x->dtype);
        if (given.bias.rank > 0)
            check_like_reference(found.dpairs, r->want.dpairs, r->plain.dpairs, x->dtype);
    }
}

static void are_those_of_the_reference(void) {
    for (int n = 0; n < TEST_COUNT(mask_sizes); n++)
        for (int type = first_dtype(); type < test_dtype_count; type++) {
            if (is_left_out(n, (int)test_dtypes[type]))
                continue;
            const problem x = new_problem(&mask_sizes[n], test_dtypes[type], (uint64_t)n + 1);
            check_against_reference(
                &x, (pairs){new_mask(&x, all_axes, 24, 6),
                            new_pair_bias(&x, x.dtype, axis_h | axis_i | axis_j, 7)});
            test_free_all();
        }
}

/* A bias without a mask. Infinite elements leave keys out, and NaN of later keys has no effect. */
static void may_have_a_bias_alone(void) {
    static const int axes[] = {all_axes, axis_i | axis_j, axis_h | axis_i | axis_j | per_kv_head};
    for (int n = 0; n < TEST_COUNT(mask_sizes); n++)
        for (int type = first_dtype(); type < test_dtype_count; type++) {
            if (is_left_out(n, (int)test_dtypes[type]))
                continue;
            const problem x = new_problem(&mask_sizes[n], test_dtypes[type], (uint64_t)n + 1);
            const fdma_dtype dtype = n % 2 == 0 ? x.dtype : FDMA_FLOAT32;
            const fdma_tensor bias = new_pair_bias(&x, dtype, axes[n % TEST_COUNT(axes)], 7);
            for (int64_t at = 0; at < pair_total(&x); at++) {
                const pair_index p = pair_of(&x, at);
                const int64_t element = pair_at(&x, bias, p.b, p.h, p.i, p.j);
                if (x.causal && p.j > p.i + x.kv_len - x.q_len)
                    store_float(bias.data, dtype, element, NAN);
                else if ((p.i + p.j) % 7 == 3)
                    store_float(bias.data, dtype, element, -INFINITY);
            }
            check_against_reference(&x, (pairs){.bias = bias});
            test_free_all();
        }
}

/* Logits are so low that a weight is infinite unless a mask clears it. No query keeps every third
 * key, so that a list is shorter than the keys. */
static void may_have_low_logits(void) {
    for (int type = first_dtype(); type < test_dtype_count; type++) {
        const problem x = new_problem(&mask_sizes[1], test_dtypes[type], 9);
        const pairs given = {new_mask(&x, all_axes, 24, 6),
                             new_pair_bias(&x, x.dtype, axis_h | axis_i | axis_j, 7)};
        for (int64_t n = 0; n < count_of(given.mask); n++)
            if (n % x.kv_len % 3 == 1)
                ((uint8_t *)given.mask.data)[n] = 0;
        for (int64_t n = 0; n < count_of(x.bias); n++)
            ((float *)x.bias.data)[n] -= 120;
        check_against_reference(&x, given);
        test_free_all();
    }
}

/* ---- masks that repeat other arguments ---- */

/* Compares with a mask of the pairs that a selection keeps, and with a bias for each key. */
static void are_those_of_a_selection(problem *x, const char *kernel) {
    if (!bias_gradients_are_taken(x, kernel))
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

/* ---- axes ---- */

/* Broadcast tensors give the bits of expanded ones, except for dattn_bias, which is their sum. */
static void are_summed_over_broadcast_axes(const char *kernel, fdma_dtype dtype) {
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

/* ---- threads ---- */

/* Tasks that add to the same elements take turns. */
static void do_not_depend_on_threads(const char *kernel, fdma_dtype dtype) {
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

/* ---- pairs and keys that are not kept ---- */

/* Gradients of pairs and keys that are not kept are 0, and NaN in these has no effect. */
static void ignore_what_is_not_kept(problem *x, const char *kernel) {
    if (!masks_are_taken(x, kernel))
        return;
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

/* ---- packed sequences, sequences with only some keys, and no rows ---- */

/* All sequences share a bias: dattn_bias of the whole is the sum over its pieces. */
static void add_up_over_pieces(const char *kernel, fdma_dtype dtype) {
    for (int n = 0; n < 2; n++) {
        const problem x = pieces_problem(n == 0, dtype);
        if (!masks_are_taken(&x, kernel))
            return;
        const pairs heads = random_pairs(&x, kernel, axis_h | axis_i | axis_j, axis_h);
        const pairs full = {heads.mask, expanded(&x, heads.bias)};
        const gradient_problem p = gradient_masked(&x, heads);
        const masked_gradients found = run_masked(&p, kernel, heads, 2);
        const masked_gradients each = run_masked(&p, kernel, full, 1);
        check_equal_gradients(kernel, found.rows, each.rows);
        check_sums(&x, found.dpairs, each.dpairs);
        CHECK(heads.bias.rank == 0 || largest_of(each.dpairs) > 0);
    }
}

static void no_rows_give_zero(const char *kernel, fdma_dtype dtype) {
    const fdma_dtype dtypes[] = {FDMA_FLOAT32, dtype};
    for (int n = 0; n < 2 * TEST_COUNT(empty_sizes); n++) {
        const problem x = new_problem(&empty_sizes[n / 2], dtype, 5);
        if (!masks_are_taken(&x, kernel))
            continue;
        const pairs given = random_pairs(&x, kernel, axis_i | axis_j, axis_h);
        const gradient_problem p = gradient_masked(&x, given);
        const masked_gradients found = run_masked_as(&p, kernel, given, 2, dtypes[n % 2]);
        for (int64_t h = 0; h < count_of(found.dpairs); h++)
            CHECK(load_double(found.dpairs.data, found.dpairs.dtype, h) == 0);
    }
}

/* ---- dattn_bias in 16 bits ---- */

/* Groups of 1, 2, 3, 4 and 8 heads; rows of whole vectors and others; lists of several blocks. */
static const problem short_sizes[] = {
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
    check_sums(x, found.dpairs, each);
}

static void check_axes_of(const problem *x, const char *kernel, bool has_mask, int axes) {
    const pairs given = {has_mask ? new_mask(x, (axes * 7 + 5) % 32, 40, 6) : (fdma_tensor){0},
                         new_pair_bias(x, x->dtype, axes, 7)};
    const gradient_problem p = gradient_masked(x, given);
    check_short(x, kernel, &p, given);
}

/* Every broadcast for the first problem, some for the others. */
static void are_rounded_once(const char *kernel, fdma_dtype dtype) {
    static const int some_axes[] = {all_axes | per_kv_head, all_axes, all_axes - axis_h, axis_j};
    const int step = test_divisor() > 1 ? 7 : 1;
    for (int n = 0; n < TEST_COUNT(short_sizes); n++) {
        if (!is_short(dtype) || is_left_out(n, (int)dtype))
            continue;
        const problem x = new_problem(&short_sizes[n], dtype, (uint64_t)n + 1);
        if (!bias_gradients_are_taken(&x, kernel))
            continue;
        for (int axes = 0; n == 0 && axes <= (all_axes | per_kv_head); axes += step)
            check_axes_of(&x, kernel, axes % 4 != 1, axes);
        for (int s = 0; s < TEST_COUNT(some_axes); s++)
            check_axes_of(&x, kernel, (s + n) % 4 != 0, some_axes[s]);
    }
}

/* dS = -P delta can have any size, because delta is -dlse: too small for 16 bits, subnormal, too
 * large. */
static void may_have_any_size(const char *kernel, fdma_dtype dtype) {
    const problem x = new_problem(&short_sizes[4], dtype, 9);
    if (!is_short(dtype) || !bias_gradients_are_taken(&x, kernel))
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

/* Runs where a device may not add in any order. */
static void are_made_deterministically(const char *kernel, fdma_dtype dtype) {
    const problem x = new_problem(&short_sizes[2], dtype, 5);
    if (!is_short(dtype))
        return;
    for (int has_mask = 0; has_mask < 2; has_mask++) {
        const pairs given = {has_mask ? new_mask(&x, all_axes, 20, 6) : (fdma_tensor){0},
                             new_pair_bias(&x, x.dtype, all_axes, 7)};
        if (!gradients_are_taken(&x, kernel, given, 1))
            continue;
        gradient_problem p = gradient_masked(&x, given);
        p.deterministic = 1;
        check_short(&x, kernel, &p, given);
    }
}

/* A bias that several sequences share is rounded once, not once per sequence. Another bias gets
 * zeros where no query sees a key. */
static void are_rounded_once_over_pieces(const char *kernel, fdma_dtype dtype) {
    for (int n = 0; n < 4; n++) {
        const problem x = pieces_problem(n % 2 == 0, dtype);
        if (!is_short(dtype) || !bias_gradients_are_taken(&x, kernel))
            return;
        const pairs given = {new_mask(&x, axis_h | axis_i | axis_j, 40, 6),
                             new_pair_bias(&x, x.dtype, n < 2 ? axis_h : all_axes, 7)};
        const gradient_problem p = gradient_masked(&x, given);
        check_short(&x, kernel, &p, given);
    }
}

static const test_entry tests[] = {
    TEST(are_those_of_the_reference),
    TEST(may_have_a_bias_alone),
    TEST(may_have_low_logits),
    EACH_SIZE_OF("backward", are_those_of_a_selection, mask_sizes),
    EACH_KERNEL("backward", are_summed_over_broadcast_axes),
    EACH_KERNEL("backward", do_not_depend_on_threads),
    EACH_SIZE_OF("backward", ignore_what_is_not_kept, mask_sizes),
    EACH_KERNEL("backward", add_up_over_pieces),
    EACH_KERNEL("backward", no_rows_give_zero),
    EACH_KERNEL("backward", are_rounded_once),
    EACH_KERNEL("backward", may_have_any_size),
    EACH_KERNEL("backward", are_made_deterministically),
    EACH_KERNEL("backward", are_rounded_once_over_pieces),
};

int main(int argc, char **argv) { return test_run_backend(argc, argv, tests, TEST_COUNT(tests)); }
