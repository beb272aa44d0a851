/* test_masks.c - attn_mask and attn_bias: compared with selections, with calls without them, and
 * with expanded tensors; and memory that they must not read. */
#include "masks.h"

static const problem sizes[] = {
    SIZES(2, 70, 70, 4, 2, 64, 20, 1),    SIZES(1, 131, 170, 6, 2, 40, 30, 0),
    SIZES(1, 300, 300, 3, 3, 128, 9, 1),  SIZES(2, 1, 300, 8, 2, 128, 50, 1),
    SIZES(1, 30, 20, 2, 2, 24, 12, 0),    SIZES(1, 400, 413, 5, 1, 32, 64, 1),
    SIZES(1, 60, 1163, 2, 2, 16, 300, 1), // more keys than are scanned at a time
};

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

static void check_selection(problem *x, const char *kernel) {
    const problem dense = dense_of(x);
    if (!masks_are_taken(x, kernel))
        return;
    const attended want = problem_attend(x, kernel, 1);
    const pairs given = {.mask = mask_of_selection(x)};
    check_close_results(x, attend_masked(&dense, kernel, given, 1), want);
    check_close_results(x, attend_masked(x, kernel, given, 1), want);
}

static void are_what_a_selection_keeps(void) {
    for_each_size_of(sizes, TEST_COUNT(sizes), check_selection);
}

/* A mask of ones, a bias of zeros, a bias of -inf in place of a mask, and a bias for each key in
 * place of `bias`. */
static void check_trivial(problem *x, const char *kernel) {
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

static void are_what_other_arguments_are(void) {
    for_each_size_of(sizes, TEST_COUNT(sizes), check_trivial);
}

/* ---- axes ---- */

/* Every combination of broadcast axes gives the bits of the expanded tensors. */
static void check_axes(problem *x, const char *kernel) {
    if (!masks_are_taken(x, kernel))
        return;
    x->softcap = 3;
    for (int axes = 0; axes <= (all_axes | per_kv_head); axes++) {
        const int others = (axes * 7 + 5) % 32;
        const fdma_dtype dtype = axes % 2 ? x->dtype : FDMA_FLOAT32;
        const pairs both = {new_mask(x, axes, 30, (uint64_t)axes + 1),
                            new_pair_bias(x, dtype, others, (uint64_t)axes + 50)};
        const pairs given = pairs_taken(x, kernel, both);
        const pairs full = {expanded(x, given.mask), expanded(x, given.bias)};
        check_same_results(attend_masked(x, kernel, given, 2), attend_masked(x, kernel, full, 1));
    }
}

static void may_be_broadcast(void) {
    static const problem some[] = {SIZES(2, 37, 53, 6, 2, 16, 20, 1),
                                   SIZES(2, 41, 130, 4, 4, 24, -1, 0)};
    for_each_size_of(some, TEST_COUNT(some), check_axes);
}

/* Strides may be anything: heads and queries are transposed, and rows lie apart. */
static void check_strides(problem *x, const char *kernel) {
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

static void may_have_any_strides(void) {
    static const problem one = SIZES(2, 37, 53, 6, 2, 16, 20, 1);
    for_each_problem(&one, 5, check_strides);
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

static void check_poison(problem *x, const char *kernel) {
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

static void read_nothing_that_is_not_kept(void) {
    for_each_size_of(sizes, TEST_COUNT(sizes), check_poison);
}

static void check_nan(problem *x, const char *kernel) {
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

static void nan_of_a_kept_pair_is_seen(void) { for_each_problem(&sizes[0], 2, check_nan); }

static void check_empty_rows(problem *x, const char *kernel) {
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

static void may_leave_rows_empty(void) {
    for_each_size_of(sizes, TEST_COUNT(sizes), check_empty_rows);
}

/* ---- packed sequences, and sequences with only some keys ---- */

/* A rectangle of a tensor with all its axes; an absent tensor stays absent. */
static fdma_tensor rectangle_of(fdma_tensor tensor, int64_t b, int64_t first, int64_t queries,
                                int64_t keys) {
    const int64_t at = b * tensor.stride[0] + first * tensor.stride[2] + (queries > 0 ? first : 0);
    if (tensor.rank == 0)
        return tensor;
    tensor.data = (char *)tensor.data + (size_t)at * dtype_size(tensor.dtype);
    tensor.shape[0] = 1;
    tensor.shape[2] = queries;
    tensor.shape[3] = keys;
    return tensor;
}

static void cut_rows(fdma_tensor *tensor, int axis, int64_t first, int64_t count) {
    tensor->data =
        (char *)tensor->data + (size_t)(first * tensor->stride[axis]) * dtype_size(tensor->dtype);
    tensor->shape[axis] = count;
}

static void check_packed(problem *x, const char *kernel) {
    static int32_t starts[] = {0, 25, 25, 60};
    if (!masks_are_taken(x, kernel))
        return;
    const pairs given = pairs_taken(x, kernel, sparse_pairs(x));
    x->starts = fdma_tensor_1d(starts, FDMA_INT32, TEST_COUNT(starts));
    const attended whole = attend_masked(x, kernel, given, 1);
    for (int n = 0; n < 2; n++) {
        const int64_t first = n == 0 ? 0 : 25, count = n == 0 ? 25 : 35;
        problem one = *x;
        one.starts = (fdma_tensor){0};
        one.q_len = one.kv_len = count;
        cut_rows(&one.q, 1, first, count);
        cut_rows(&one.k, 1, first, count);
        cut_rows(&one.v, 1, first, count);
        cut_rows(&one.bias, 2, first, count);
        const pairs own = {rectangle_of(given.mask, 0, first, count, count),
                           rectangle_of(given.bias, 0, first, count, count)};
        attended want = attend_masked(&one, kernel, own, 1), got = whole;
        cut_rows(&got.out, 1, first, count);
        if (strncmp(kernel, "cuda", 4) == 0) // other keys of a tile change the order of sums
            CHECK_NEAR(largest_difference(got.out, want.out), 0, problem_out_tolerance(x));
        else
            CHECK_BYTES(got.out.data, want.out.data, bytes_of(want.out));
    }
}

static void are_indexed_by_packed_positions(void) {
    static const problem packed = SIZES(1, 60, 60, 4, 2, 64, -1, 1);
    for_each_problem(&packed, 4, check_packed);
}

static void check_used(problem *x, const char *kernel) {
    static int32_t used[] = {20, 50, 0};
    if (!masks_are_taken(x, kernel))
        return;
    const pairs given = pairs_taken(x, kernel, sparse_pairs(x));
    x->kv_used = fdma_tensor_1d(used, FDMA_INT32, TEST_COUNT(used));
    const attended whole = attend_masked(x, kernel, given, 1);
    for (int b = 0; b < TEST_COUNT(used); b++) {
        problem one = problem_sequence(x, b);
        one.kv_used = (fdma_tensor){0};
        one.kv_len = one.k.shape[1] = one.v.shape[1] = one.bias.shape[2] = used[b];
        pairs own = given;
        own.mask = sequence_of(given.mask, b);
        if (given.bias.rank > 0)
            own.bias = sequence_of(given.bias, b);
        own.mask.shape[3] = own.bias.shape[3] = used[b];
        const attended want = attend_masked(&one, kernel, own, 1);
        check_close_results(x, (attended){sequence_of(whole.out, b), sequence_of(whole.lse, b)},
                            want);
    }
}

static void are_cut_to_the_keys_that_exist(void) {
    static const problem batch = SIZES(3, 30, 50, 4, 2, 64, -1, 1);
    for_each_problem(&batch, 4, check_used);
}

/* ---- probabilities ---- */

static void check_probabilities(problem *x, const char *kernel) {
    if (!masks_are_taken(x, kernel) || strcmp(kernel, "reference") == 0)
        return;
    const pairs given = pairs_taken(x, kernel, sparse_pairs(x));
    const attended done = attend_masked(x, kernel, given, 1);
    poison_pairs(x, given);
    fdma_probabilities_args args = {
        .size = sizeof args,
        .q = x->q,
        .k = x->k,
        .bias = x->bias,
        .lse = done.lse,
        .probability = new_output(FDMA_FLOAT32, x->batch, x->q_heads, x->q_len, x->kv_len),
        .selection = x->window >= 0 ? &x->selection : NULL,
        .causal = x->causal,
        .attn_mask = given.mask,
        .attn_bias = given.bias,
    };
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

static void have_probabilities(void) { for_each_problem(&sizes[0], 2, check_probabilities); }

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
    TEST(are_what_a_selection_keeps),
    TEST(are_what_other_arguments_are),
    TEST(may_be_broadcast),
    TEST(may_have_any_strides),
    TEST(read_nothing_that_is_not_kept),
    TEST(nan_of_a_kept_pair_is_seen),
    TEST(may_leave_rows_empty),
    TEST(are_indexed_by_packed_positions),
    TEST(are_cut_to_the_keys_that_exist),
    TEST(have_probabilities),
    TEST(are_refused_with_carried_keys),
};

int main(int argc, char **argv) { return test_run_backend(argc, argv, tests, TEST_COUNT(tests)); }
