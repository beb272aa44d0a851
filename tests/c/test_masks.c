/* test_masks.c - attn_mask and attn_bias: compared with selections, with calls without them, and
 * with expanded tensors; and memory that they must not read. */
#include "masks.h"

static problem dense_of(const problem *x) {
    problem dense = *x;
    dense.window = -1;
    return dense;
}

/* ---- masks that repeat other arguments ---- */

static fdma_tensor mask_of_selection(const problem *x) {
    const fdma_tensor mask = new_pairs(x, FDMA_UINT8, all_axes | per_kv_head);
    for (int64_t n = 0; n < count_of(mask); n++) {
        const int64_t j = n % x->kv_len, i = n / x->kv_len % x->q_len;
        const int64_t g = n / x->kv_len / x->q_len % x->kv_heads;
        const int64_t b = n / x->kv_len / x->q_len / x->kv_heads;
        ((uint8_t *)mask.data)[n] = problem_keeps(x, b, g, i, j) != 0;
    }
    return mask;
}

static void are_what_a_selection_keeps(problem *x, const char *kernel) {
    const problem dense = dense_of(x);
    if (!masks_are_taken(x, kernel))
        return;
    const attended want = problem_attend(x, kernel, 1);
    const pairs given = {.mask = mask_of_selection(x)};
    check_close_results(x, attend_masked(&dense, kernel, given, 1), want);
    check_close_results(x, attend_masked(x, kernel, given, 1), want);
}

/* A mask of ones, a bias of zeros, a bias of -inf in place of a mask, and a bias for each key in
 * place of `bias`. */
static void are_what_other_arguments_are(problem *x, const char *kernel) {
    const fdma_tensor none = {0};
    if (!masks_are_taken(x, kernel))
        return;
    const pairs ones = {new_mask(x, all_axes, 64, 1), new_pairs(x, x->dtype, axis_b | axis_j)};
    memset(ones.bias.data, 0, bytes_of(ones.bias));
    check_close_results(x, attend_masked(x, kernel, pairs_taken(x, kernel, ones), 1),
                        problem_attend(x, kernel, 1));
    if (!biases_are_taken(x, kernel))
        return;

    const pairs half = {.mask = new_mask(x, axis_h | axis_i | axis_j, 32, 2)};
    const fdma_tensor infinite = new_pairs(x, FDMA_FLOAT32, axis_h | axis_i | axis_j);
    for (int64_t n = 0; n < count_of(infinite); n++)
        ((float *)infinite.data)[n] = ((uint8_t *)half.mask.data)[n] ? 0 : -INFINITY;
    check_close_results(x, attend_masked(x, kernel, (pairs){none, infinite}, 1),
                        attend_masked(x, kernel, half, 1));

    problem bare = *x;
    bare.bias = none;
    pairs keys = {half.mask, new_pairs(x, FDMA_FLOAT32, axis_b | axis_h | axis_j | per_kv_head)};
    memcpy(keys.bias.data, x->bias.data, bytes_of(keys.bias));
    check_close_results(x, attend_masked(&bare, kernel, keys, 1),
                        attend_masked(x, kernel, half, 1));
}

/* ---- axes ---- */

static const problem axes_sizes[] = {SIZES(2, 37, 53, 6, 2, 16, 20, 1),
                                     SIZES(2, 41, 130, 4, 4, 24, -1, 0)};

/* Every combination of broadcast axes gives the bits of the expanded tensors. */
static void may_be_broadcast(problem *x, const char *kernel) {
    if (!masks_are_taken(x, kernel))
        return;
    x->softcap = 3;
    for (int axes = 0; axes <= (all_axes | per_kv_head); axes += test_step(3)) {
        const int others = (axes * 7 + 5) % 32;
        const fdma_dtype dtype = axes % 2 ? x->dtype : FDMA_FLOAT32;
        const pairs both = {new_mask(x, axes, 30, (uint64_t)axes + 1),
                            new_pair_bias(x, dtype, others, (uint64_t)axes + 50)};
        const pairs given = pairs_taken(x, kernel, both);
        const pairs full = {expanded(x, given.mask), expanded(x, given.bias)};
        check_same_results(attend_masked(x, kernel, given, 2), attend_masked(x, kernel, full, 1));
    }
}

/* Strides may be anything: heads and queries are transposed, and rows lie apart. */
static void may_have_any_strides(problem *x, const char *kernel) {
    if (!masks_are_taken(x, kernel))
        return;
    const pairs both = {new_mask(x, all_axes, 30, 3), new_pair_bias(x, x->dtype, all_axes, 4)};
    const pairs given = pairs_taken(x, kernel, both);
    pairs strided = both;
    fdma_tensor *const tensors[] = {&strided.mask, &strided.bias};
    const int64_t row = x->kv_len + 5;
    for (int t = 0; t < 2; t++) {
        const size_t size = dtype_size(tensors[t]->dtype);
        char *const to = test_alloc((size_t)(pair_total(x) / x->kv_len * row) * size);
        for (int64_t n = 0; n < pair_total(x); n += x->kv_len) {
            const pair_index at = pair_of(x, n);
            const int64_t index = (at.b * x->q_len + at.i) * x->q_heads + at.h;
            memcpy(to + (size_t)(index * row) * size, (char *)tensors[t]->data + (size_t)n * size,
                   (size_t)x->kv_len * size);
        }
        tensors[t]->data = to;
        tensors[t]->stride[0] = x->q_len * x->q_heads * row;
        tensors[t]->stride[1] = row;
        tensors[t]->stride[2] = x->q_heads * row;
    }
    check_same_results(attend_masked(x, kernel, pairs_taken(x, kernel, strided), 1),
                       attend_masked(x, kernel, given, 1));
}

static const problem number_sizes[] = {SIZES(2, 70, 304, 4, 2, 64, -1, 1),
                                       SIZES(1, 3, 203, 4, 1, 32, -1, 0)};

/* A mask of bytes as numbers: above 0 where it is set, the least one and infinity among them, and
 * elsewhere 0, -0, below 0 or NaN. */
static fdma_tensor numbers_of(const problem *x, fdma_tensor mask, int axes, fdma_dtype dtype) {
    const fdma_tensor numbers = new_pairs(x, dtype, axes);
    const int infinity = dtype == FDMA_FLOAT16 ? 0x7c00 : 0x7f80;
    const int set[] = {1, 0x3c00, infinity - 1, infinity};
    const int clear[] = {0, 0x8000, 0x8001, 0xbc00, infinity + 1, 0xffff};
    for (int64_t n = 0; n < count_of(mask); n++)
        ((uint16_t *)numbers.data)[n] =
            (uint16_t)(((uint8_t *)mask.data)[n] != 0 ? set[n % TEST_COUNT(set)]
                                                      : clear[n % TEST_COUNT(clear)]);
    return numbers;
}

static void may_be_numbers(problem *x, const char *kernel) {
    const int axes[] = {all_axes, axis_i | axis_j, axis_h | axis_i};
    for (int n = 0; n < TEST_COUNT(axes); n++)
        for (int dtype = FDMA_FLOAT16; dtype <= FDMA_BFLOAT16; dtype++) {
            const pairs bytes = {.mask = new_mask(x, axes[n], 30, 3)};
            const pairs given = {.mask = numbers_of(x, bytes.mask, axes[n], (fdma_dtype)dtype)};
            if (!masks_are_taken(x, kernel) ||
                !(is_device_kernel(kernel) || strncmp(kernel, "reference", 9) == 0))
                return;
            check_same_results(attend_masked(x, kernel, given, 2),
                               attend_masked(x, kernel, bytes, 1));
        }
}

/* ---- pairs that are not kept are not read ---- */

static void poison_keys(problem *x, fdma_tensor mask) {
    uint8_t *const read = test_alloc((size_t)(x->batch * x->kv_heads * x->kv_len));
    memset(read, 0, (size_t)(x->batch * x->kv_heads * x->kv_len));
    for (int64_t n = 0; n < pair_total(x); n++) {
        const pair_index at = pair_of(x, n);
        const int64_t g = at.h / (x->q_heads / x->kv_heads);
        read[(at.b * x->kv_heads + g) * x->kv_len + at.j] |= pair_is_kept(x, mask, at);
    }
    for (int64_t n = 0; n < x->batch * x->kv_heads * x->kv_len; n++) {
        const int64_t b = n / x->kv_len / x->kv_heads, g = n / x->kv_len % x->kv_heads;
        if (read[n])
            continue;
        spoil_key(x->k, b, n % x->kv_len, g, NAN);
        spoil_key(x->v, b, n % x->kv_len, g, NAN);
        ((float *)x->bias.data)[n] = NAN;
    }
}

static void poison_pairs(const problem *x, pairs given) {
    if (given.bias.rank == 0)
        return;
    for (int64_t n = 0; n < pair_total(x); n++)
        if (!pair_is_kept(x, given.mask, pair_of(x, n)))
            store_float(given.bias.data, given.bias.dtype, n, NAN);
}

/* Some columns of the mask are empty, so that no query keeps those keys. */
static pairs sparse_pairs(const problem *x) {
    const pairs given = {new_mask(x, all_axes, 9, 6), new_pair_bias(x, x->dtype, all_axes, 7)};
    for (int64_t n = 0; n < count_of(given.mask); n++)
        if (n % x->kv_len % 3 == 1)
            ((uint8_t *)given.mask.data)[n] = 0;
    return given;
}

static void read_nothing_that_is_not_kept(problem *x, const char *kernel) {
    if (!masks_are_taken(x, kernel))
        return;
    const pairs given = pairs_taken(x, kernel, sparse_pairs(x));
    const attended want = attend_masked(x, kernel, given, 1);
    poison_keys(x, given.mask);
    poison_pairs(x, given);
    check_same_results(attend_masked(x, kernel, given, 1), want);
    for (int64_t n = 0; n < count_of(want.out); n++)
        CHECK(isfinite(load_double(want.out.data, x->dtype, n)));
}

static void nan_of_a_kept_pair_is_seen(problem *x, const char *kernel) {
    if (!masks_are_taken(x, kernel))
        return;
    const pairs given = sparse_pairs(x);
    if (!biases_are_taken(x, kernel))
        return;
    int64_t n = pair_total(x) - 1;
    while (!pair_is_kept(x, given.mask, pair_of(x, n)))
        n--;
    store_float(given.bias.data, given.bias.dtype, n, NAN);
    const attended found = attend_masked(x, kernel, given, 1);
    for (int64_t row = 0; row < count_of(found.lse); row++)
        CHECK(isnan(((float *)found.lse.data)[row]) == (row == n / x->kv_len));
}

static void may_leave_rows_empty(problem *x, const char *kernel) {
    if (!masks_are_taken(x, kernel))
        return;
    const pairs given = {.mask = new_mask(x, axis_i | axis_j, 20, 8)};
    for (int64_t n = 0; n < count_of(given.mask); n++)
        if (n / x->kv_len % 2 == 0 || n / x->kv_len > x->q_len / 2)
            ((uint8_t *)given.mask.data)[n] = 0;
    fdma_forward_args args = problem_args(x, kernel);
    const fdma_tensor sinks = new_tensor(FDMA_FLOAT32, x->q_heads, -1, -1, -1);
    uint64_t state = 3;
    fill_random(sinks, &state, 2);
    const attended without = attend_masked(x, kernel, given, 1);
    args.attn_mask = given.mask;
    args.sink_logit = sinks;
    CHECK_OK(run_forward(&args));
    for (int64_t row = 0; row < count_of(args.lse); row++) {
        const int64_t i = row % x->q_len, h = row / x->q_len % x->q_heads;
        const int64_t first = ((row / x->q_len / x->q_heads * x->q_len + i) * x->q_heads + h);
        if (i % 2 != 0 && i <= x->q_len / 2)
            continue;
        const float sink = ((float *)sinks.data)[h]; // a device multiplies it by log2(e) and back
        CHECK(fabsf(((float *)args.lse.data)[row] - sink) <= 1e-6f * fabsf(sink));
        CHECK(((float *)without.lse.data)[row] == -INFINITY);
        for (int64_t d = first * x->head_dim; d < (first + 1) * x->head_dim; d++)
            CHECK(load_double(args.out.data, x->dtype, d) == 0 &&
                  load_double(without.out.data, x->dtype, d) == 0);
    }
}

/* ---- packed sequences, and sequences with only some keys ---- */

/* Mask and bias of a sequence alone: its rows and columns of tensors with all axes. */
static pairs pairs_of(pairs given, int64_t b, int64_t first, int64_t queries, int64_t keys) {
    fdma_tensor *const tensors[] = {&given.mask, &given.bias};
    for (int t = 0; t < TEST_COUNT(tensors); t++) {
        const fdma_tensor rows =
            positions_of(sequence_of(*tensors[t], b), 2, first, first + queries);
        *tensors[t] = positions_of(rows, 3, first, first + keys);
    }
    return given;
}

static void are_indexed_by_packed_positions(const char *kernel, fdma_dtype dtype) {
    const problem x = pieces_problem(true, dtype);
    if (!masks_are_taken(&x, kernel))
        return;
    const pairs given = pairs_taken(&x, kernel, sparse_pairs(&x));
    const attended whole = attend_masked(&x, kernel, given, 1);
    for (int n = 0; n < 2; n++) {
        const int64_t first = n == 0 ? 0 : 25, end = n == 0 ? 25 : 60;
        problem one = x;
        one.starts = (fdma_tensor){0};
        one.q_len = one.kv_len = end - first;
        one.q = positions_of(x.q, 1, first, end);
        one.k = positions_of(x.k, 1, first, end);
        one.v = positions_of(x.v, 1, first, end);
        one.bias = positions_of(x.bias, 2, first, end);
        const pairs own = pairs_of(given, 0, first, end - first, end - first);
        const attended want = attend_masked(&one, kernel, own, 1);
        const fdma_tensor got = positions_of(whole.out, 1, first, end);
        if (is_device_kernel(kernel)) // other keys of a tile change the order of sums
            CHECK_NEAR(largest_difference(got, want.out), 0, problem_out_tolerance(&x));
        else
            CHECK_BYTES(got.data, want.out.data, bytes_of(want.out));
    }
}

static void are_cut_to_the_keys_that_exist(const char *kernel, fdma_dtype dtype) {
    const problem x = pieces_problem(false, dtype);
    if (!masks_are_taken(&x, kernel))
        return;
    const pairs given = pairs_taken(&x, kernel, sparse_pairs(&x));
    const attended whole = attend_masked(&x, kernel, given, 1);
    for (int64_t b = 0; b < x.batch; b++) {
        problem one = problem_sequence(&x, b);
        one.kv_len = ((const int32_t *)x.kv_used.data)[b];
        one.kv_used = (fdma_tensor){0};
        one.k.shape[1] = one.v.shape[1] = one.bias.shape[2] = one.kv_len;
        const pairs own = pairs_of(given, b, 0, x.q_len, one.kv_len);
        check_close_results(&x, (attended){sequence_of(whole.out, b), sequence_of(whole.lse, b)},
                            attend_masked(&one, kernel, own, 1));
    }
}

/* ---- probabilities ---- */

static void have_probabilities(problem *x, const char *kernel) {
    if (!masks_are_taken(x, kernel) || strcmp(kernel, "reference") == 0)
        return;
    const pairs given = pairs_taken(x, kernel, sparse_pairs(x));
    const attended done = attend_masked(x, kernel, given, 1);
    poison_pairs(x, given);
    fdma_probabilities_args args = probabilities_args(x, done.lse, NULL);
    args.attn_mask = given.mask, args.attn_bias = given.bias;
    CHECK_OK(run_probabilities(&args));
    const float *const found = args.probability.data;
    for (int64_t row = 0; row < count_of(done.lse); row++) {
        const bool empty = ((float *)done.lse.data)[row] == -INFINITY;
        double sum = 0;
        for (int64_t n = row * x->kv_len; n < (row + 1) * x->kv_len; n++) {
            CHECK(found[n] == 0 || pair_is_kept(x, given.mask, pair_of(x, n)));
            sum += (double)found[n];
        }
        CHECK_NEAR(sum, empty ? 0 : 1, 1e-4 + 8 * step_of(x->dtype) * (x->dtype != FDMA_FLOAT32));
    }
}

/* ---- bad input ---- */

static void are_refused_with_carried_keys(void) {
    problem x = SIZES(1, 12, 12, 2, 2, 16, -1, 1);
    size_t bytes;
    x.dtype = backend_dtype();
    problem_fill(&x, 1);
    for (int n = 0; n < 2; n++) {
        fdma_forward_args args = problem_args(&x, NULL);
        args.k_carried = x.k, args.v_carried = x.v, args.bias_carried = x.bias;
        CHECK_OK(fdma_forward_workspace(&args, &bytes));
        *(n == 0 ? &args.attn_mask : &args.attn_bias) =
            new_pairs(&x, n == 0 ? FDMA_UINT8 : FDMA_FLOAT32, 0);
        CHECK_INT(fdma_forward_workspace(&args, &bytes), FDMA_INVALID_ARGUMENT);
        CHECK_WORD(fdma_last_error(), n == 0 ? "attn_mask" : "attn_bias");
        CHECK_WORD(fdma_last_error(), "k_carried");
    }
}

static const test_entry tests[] = {
    EACH_SIZE(are_what_a_selection_keeps, mask_sizes),
    EACH_SIZE(are_what_other_arguments_are, mask_sizes),
    EACH_SIZE(may_be_broadcast, axes_sizes),
    EACH_PROBLEM(may_have_any_strides, axes_sizes[0], 5),
    EACH_SIZE(may_be_numbers, number_sizes),
    EACH_SIZE(read_nothing_that_is_not_kept, mask_sizes),
    EACH_PROBLEM(nan_of_a_kept_pair_is_seen, mask_sizes[0], 2),
    EACH_SIZE(may_leave_rows_empty, mask_sizes),
    EACH_KERNEL("forward", are_indexed_by_packed_positions),
    EACH_KERNEL("forward", are_cut_to_the_keys_that_exist),
    EACH_PROBLEM(have_probabilities, mask_sizes[0], 2),
    TEST(are_refused_with_carried_keys),
};

int main(int argc, char **argv) { return test_run_backend(argc, argv, tests, TEST_COUNT(tests)); }
