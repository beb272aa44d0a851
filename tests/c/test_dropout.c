/* test_dropout.c - checks which pairs of a query and a key every kernel of the CPU or of a device
 * drops, in probabilities, out and gradients, pair by pair against core/dropout.h; and the
 * statistics of that function. test_backward.c checks that gradients are the derivatives of out. */
#include "backend.h"
#include "core/dropout.h"
#include "gradient.h"

typedef struct shape {
    const char *name;
    problem sizes;
    double dropout;
    uint64_t seed, offset;
    int32_t numbers[4]; /* the starts of packed sequences, or kv_used of each sequence */
    bool packed, cut;
} shape;

/* head_dim is at least q_len and kv_len, so that a channel can stand for a query or a key. */
static const shape shapes[] = {
    {"dense", SIZES(2, 64, 64, 2, 2, 64, -1, 1), 0.5, 1, 0, {0}, false, false},
    {"later queries", SIZES(1, 37, 96, 4, 1, 96, -1, 1), 0.1, UINT64_MAX, 9, {0}, false, false},
    {"more queries", SIZES(1, 65, 40, 3, 1, 72, -1, 0), 0.5, 2, 0, {0}, false, false},
    {"selected", SIZES(1, 250, 250, 4, 2, 256, 70, 1), 0.5, 3, UINT64_MAX, {0}, false, false},
    {"global", SIZES(2, 100, 121, 2, 1, 128, 50, 0), 0.9, 4, 1, {0}, false, false},
    {"packed", SIZES(1, 120, 120, 2, 2, 128, 20, 1), 0.3, 5, 0, {0, 33, 34, 117}, true, false},
    {"kv_used", SIZES(4, 50, 90, 4, 2, 96, -1, 1), 0.5, 6, 0, {0, 30, 90, 61}, false, true},
};

static problem problem_of(const shape *n, fdma_dtype dtype) {
    problem x = n->sizes;
    x.dtype = dtype;
    x.dropout = n->dropout;
    x.seed = n->seed;
    x.offset = n->offset;
    problem_fill(&x, 8);
    const fdma_tensor numbers = new_list(n->numbers, TEST_COUNT(n->numbers));
    if (n->packed)
        x.starts = numbers;
    if (n->cut)
        x.kv_used = numbers;
    problem_select(&x);
    return x;
}

static dropout_params params_of(const problem *x) {
    return (dropout_params){.seed = x->seed,
                            .offset = x->offset,
                            .threshold = (uint32_t)lround(x->dropout * dropout_range)};
}

static bool drops(const problem *x, int64_t b, int64_t h, int64_t i, int64_t j) {
    const dropout_params params = params_of(x);
    const int64_t group = x->q_heads / x->kv_heads, g = h / group;
    const int64_t keys = x->kv_used.rank > 0 ? ((const int32_t *)x->kv_used.data)[b] : x->kv_len;
    const int64_t p = i + keys - x->q_len;
    const row_code row = dropout_row(&params, b * x->q_heads + h, p);
    return dropout_drops(params.threshold, row, p, dropout_key(&params, b * x->kv_heads + g, j));
}

static problem without_dropout(const problem *x) {
    problem plain = *x;
    plain.dropout = 0;
    return plain;
}

/* ---- one pair after another ---- */

typedef struct pair {
    int64_t b, h, i, j;
} pair;

static pair pair_at(const problem *x, int64_t at) {
    const int64_t row = at / x->kv_len, head = row / x->q_len;
    return (pair){head / x->q_heads, head % x->q_heads, row % x->q_len, at % x->kv_len};
}

/* The results of the reference without dropout. A kept pair has a probability above 0. */
typedef struct plain_results {
    fdma_tensor lse, probability;
} plain_results;

/* Checks each shape, in each dtype, with each kernel of an operation. */
static void for_each_shape(const char *operation,
                           void (*check)(const problem *x, const plain_results *plain,
                                         const char *kernel)) {
    for (int i = 0; i < TEST_COUNT(shapes) * test_dtype_count; i++) {
        const int n = i / test_dtype_count, type = i % test_dtype_count;
        if (type < first_dtype() || is_left_out(n, (int)test_dtypes[type]))
            continue;
        const kernel_list kernels = kernels_for(operation, test_dtypes[type]);
        const problem x = problem_of(&shapes[n], test_dtypes[type]);
        const problem without = without_dropout(&x);
        plain_results plain = {.lse = problem_attend(&without, "reference", 1).lse};
        plain.probability = find_probabilities(&without, plain.lse, "reference");
        for (int kernel = 0; kernel < kernels.count; kernel++) {
            test_context("%s %s %s", shapes[n].name, kernels.name[kernel],
                         dtype_name(test_dtypes[type]));
            check(&x, &plain, kernels.name[kernel]);
        }
        test_free_all();
    }
}

static void check_probabilities(const problem *x, const plain_results *plain, const char *kernel) {
    const problem without = without_dropout(x);
    const fdma_tensor found = find_probabilities(x, plain->lse, kernel);
    const fdma_tensor whole = find_probabilities(&without, plain->lse, kernel);
    const double scale = dropout_scale(params_of(x).threshold);
    int64_t dropped = 0;
    for (int64_t at = 0; at < count_of(found); at++) {
        const pair n = pair_at(x, at);
        const double p = (double)((const float *)whole.data)[at];
        const bool drop = p > 0 && drops(x, n.b, n.h, n.i, n.j);
        CHECK_NEAR((double)((const float *)found.data)[at], drop ? 0 : p * scale,
                   drop ? 0 : 4 * p * scale * (double)FLT_EPSILON);
        dropped += drop;
    }
    CHECK(dropped > 0);
}

/* Sets channel d of row d to 1 and all others to 0, in each head or in one of each `group`. */
static void make_unit_rows(fdma_tensor tensor, int64_t group) {
    for (int64_t at = 0; at < count_of(tensor); at++) {
        const int64_t d = at % tensor.shape[3], h = at / tensor.shape[3] % tensor.shape[2];
        const int64_t row = at / tensor.shape[3] / tensor.shape[2] % tensor.shape[1];
        store_float(tensor.data, tensor.dtype, at, d == row && h % group == 0 ? 1 : 0);
    }
}

/* If the values of keys are unit vectors, channel j of out is the probability of key j. Dropout
 * does not change lse. */
static void check_out(const problem *given, const plain_results *plain, const char *kernel) {
    problem x = *given;
    if (!problem_is_taken(&x, kernel))
        return;
    x.v = copy_tensor(x.v);
    make_unit_rows(x.v, 1);
    const problem without = without_dropout(&x);
    const attended found = problem_attend(&x, kernel, 2);
    const attended whole = problem_attend(&without, kernel, 1);
    const fdma_tensor probability = plain->probability;
    const double scale = dropout_scale(params_of(&x).threshold);
    for (int64_t row = 0; row < count_of(whole.lse); row++) {
        const double lse = load_double(whole.lse.data, FDMA_FLOAT32, row);
        CHECK_NEAR(load_double(found.lse.data, FDMA_FLOAT32, row), lse,
                   problem_lse_tolerance(&x, lse));
    }
    for (int64_t at = 0; at < count_of(probability); at++) {
        const pair n = pair_at(&x, at);
        const double p = (double)((const float *)probability.data)[at];
        const int64_t in_out = ((n.b * x.q_len + n.i) * x.q_heads + n.h) * x.head_dim + n.j;
        const double out = load_double(found.out.data, x.dtype, in_out);
        if (p < 1e-6) // float16 has no numbers much smaller
            continue;
        const bool drop = drops(&x, n.b, n.h, n.i, n.j);
        CHECK(drop == (out == 0));
        CHECK_NEAR(out, drop ? 0 : p * scale, scale * problem_out_tolerance(&x));
    }
}

/* If dout of one head of each group are unit vectors, channel i of dv is the probability that query
 * i gives to the key. */
static void check_dv(const problem *x, const plain_results *plain, const char *kernel) {
    const int64_t group = x->q_heads / x->kv_heads;
    const gradient_problem p = gradient_of(x, 0);
    fdma_backward_args args = gradient_args(&p, kernel);
    if (!call_takes(operation_backward, &args))
        return;
    make_unit_rows(p.dout, group);
    const gradients found = gradient_run(&p, kernel, 2);
    const fdma_tensor probability = plain->probability;
    const double scale = dropout_scale(params_of(x).threshold);
    for (int64_t at = 0; at < count_of(probability); at++) {
        const pair n = pair_at(x, at);
        const double weight = (double)((const float *)probability.data)[at];
        const int64_t row = (n.b * x->kv_len + n.j) * x->kv_heads + n.h / group;
        const double dv = load_double(found.dv.data, x->dtype, row * x->head_dim + n.i);
        if (n.h % group != 0 || weight < 1e-6)
            continue;
        const bool drop = drops(x, n.b, n.h, n.i, n.j);
        CHECK(drop == (dv == 0));
        CHECK_NEAR(dv, drop ? 0 : weight * scale, scale * problem_out_tolerance(x));
    }
}

static void probabilities_are_dropped(void) {
    for_each_shape("probabilities", check_probabilities);
}
static void out_lacks_dropped_pairs(void) { for_each_shape("forward", check_out); }
static void gradients_lack_dropped_pairs(void) { for_each_shape("backward", check_dv); }

/* ---- options ---- */

/* Seed and offset in memory have the same effect as in the arguments, and replace those. */
static void check_rng_state(const char *kernel, fdma_dtype dtype) {
    const problem x = problem_of(&shapes[3], dtype);
    problem stored = x;
    if (is_left_out(0, (int)dtype) || !problem_is_taken(&x, kernel))
        return;
    stored.rng_state = new_tensor(FDMA_INT64, 2, -1, -1, -1);
    ((int64_t *)stored.rng_state.data)[0] = (int64_t)x.seed;
    ((int64_t *)stored.rng_state.data)[1] = (int64_t)x.offset;
    stored.seed = stored.offset = 77;
    check_same_results(problem_attend(&stored, kernel, 1), problem_attend(&x, kernel, 1));
}

static void check_rng_state_of_gradients(const char *kernel, fdma_dtype dtype) {
    const problem x = problem_of(&shapes[1], dtype);
    gradient_problem p = gradient_of(&x, 1);
    fdma_backward_args args = gradient_args(&p, kernel);
    if (!call_takes(operation_backward, &args))
        return;
    p.deterministic = 1;
    const gradients want = gradient_run(&p, kernel, 1);
    p.x.rng_state = new_tensor(FDMA_INT64, 2, -1, -1, -1);
    ((int64_t *)p.x.rng_state.data)[0] = (int64_t)x.seed;
    ((int64_t *)p.x.rng_state.data)[1] = (int64_t)x.offset;
    p.x.seed = p.x.offset = 0;
    check_same_gradients(gradient_run(&p, kernel, 1), want);
}

static void state_replaces_seed_and_offset(void) {
    for_each_kernel("forward", check_rng_state);
    for_each_kernel("backward", check_rng_state_of_gradients);
}

/* Dropout that rounds to 0 has no effect. */
static void dropout_is_rounded(const char *kernel, fdma_dtype dtype) {
    problem x = problem_of(&shapes[0], dtype);
    x.dropout = 0x1p-18;
    if (!problem_is_taken(&x, kernel))
        return;
    const problem plain = without_dropout(&x);
    check_same_results(problem_attend(&x, kernel, 1), problem_attend(&plain, kernel, 1));
}

/* The last queries alone, and any number of threads, drop the same pairs. */
static void some_queries_drop_the_same(const char *kernel, fdma_dtype dtype) {
    const problem x = problem_of(&shapes[0], dtype);
    problem last = x;
    const int64_t first = 27;
    if (!problem_is_taken(&x, kernel))
        return;
    last.q_len = last.q.shape[1] = x.q_len - first;
    last.q.data = (char *)x.q.data + (size_t)(first * x.q.stride[1]) * dtype_size(dtype);
    const attended whole = problem_attend(&x, kernel, 1), some = problem_attend(&last, kernel, 1);
    check_same_results(problem_attend(&x, kernel, 3), whole);
    for (int64_t at = 0; at < count_of(some.out); at++) {
        const int64_t width = x.q_heads * x.head_dim, row = at / width;
        const int64_t b = row / last.q_len, i = row % last.q_len + first;
        CHECK_NEAR(load_double(some.out.data, dtype, at),
                   load_double(whole.out.data, dtype, (b * x.q_len + i) * width + at % width),
                   2 * problem_out_tolerance(&x));
    }
}

/* ---- the function ---- */

/* Salmon et al., Random123, kat_vectors: philox4x32 10. */
static void generator_is_known(void) {
    const struct {
        uint64_t seed, offset;
        uint32_t index, head, want[2];
    } known[] = {
        {0, 0, 0, 0, {0x6627e8d5, 0xe169c58d}},
        {UINT64_MAX, UINT64_MAX, UINT32_MAX, UINT32_MAX, {0x408f276d, 0x41c83b0e}},
        {0x299f31d0a4093822, 0x0370734413198a2e, 0x243f6a88, 0x85a308d3, {0xd16cfe09, 0x94fdcceb}},
    };
    for (int n = 0; n < TEST_COUNT(known); n++) {
        const row_code found =
            dropout_philox(known[n].seed, known[n].offset, known[n].index, known[n].head);
        CHECK(found.flips == known[n].want[0] && found.adds == known[n].want[1]);
    }
}

enum { square = 512 }; /* positions and keys */

typedef struct drop_square {
    bool drops[square][square];
} drop_square;

static const drop_square *new_square(dropout_params params, int64_t head, int64_t kv_head) {
    drop_square *const made = test_alloc(sizeof *made);
    for (int64_t p = 0; p < square; p++) {
        const row_code row = dropout_row(&params, head, p);
        for (int64_t j = 0; j < square; j++)
            made->drops[p][j] =
                dropout_drops(params.threshold, row, p, dropout_key(&params, kv_head, j));
    }
    return made;
}

/* The correlation of two squares, in standard deviations. The second is shifted by some positions
 * and keys. */
static double correlation(const drop_square *x, const drop_square *y, int positions, int keys,
                          double p) {
    double sum = 0;
    int64_t count = 0;
    for (int i = 0; i + positions < square; i++)
        for (int j = 0; j + keys < square; j++, count++)
            sum += (x->drops[i][j] - p) * (y->drops[i + positions][j + keys] - p);
    return sum / (p * (1 - p) * sqrt((double)count));
}

/* As correlation(), for the products of the four corners of rectangles, which would be correlated
 * if rows and keys entered linearly. */
static double corner_correlation(const drop_square *x, int positions, int keys, double p) {
    double sum = 0;
    int64_t count = 0;
    for (int i = 0; i + positions < square; i++)
        for (int j = 0; j + keys < square; j++, count++)
            sum += (x->drops[i][j] - p) * (x->drops[i + positions][j] - p) *
                   (x->drops[i][j + keys] - p) * (x->drops[i + positions][j + keys] - p);
    return sum / (p * p * (1 - p) * (1 - p) * sqrt((double)count));
}

static void check_square(double p, uint64_t seed) {
    const double most = 5; // standard deviations, over about a hundred numbers
    const dropout_params params = {seed, 3, (uint32_t)lround(p * dropout_range)};
    dropout_params other_seed = params, other_offset = params;
    other_seed.seed++, other_offset.offset++;
    const drop_square *const x = new_square(params, 6, 2);
    const drop_square *const others[] = {new_square(params, 7, 2), new_square(params, 14, 5),
                                         new_square(other_seed, 6, 2),
                                         new_square(other_offset, 6, 2)};
    double rate = 0;
    for (int at = 0; at < square * square; at++)
        rate += x->drops[at / square][at % square];
    CHECK_NEAR(rate, p * square * square, most * square * sqrt(p * (1 - p)));
    for (int n = 0; n < TEST_COUNT(others); n++)
        CHECK(fabs(correlation(x, others[n], 0, 0, p)) < most);
    for (int lag = 1; lag <= 64; lag *= 2) {
        CHECK(fabs(correlation(x, x, lag, 0, p)) < most);
        CHECK(fabs(correlation(x, x, 0, lag, p)) < most);
        CHECK(fabs(correlation(x, x, lag, lag, p)) < most);
        CHECK(fabs(corner_correlation(x, lag, lag, p)) < most);
        CHECK(fabs(corner_correlation(x, 1, lag, p)) < most);
    }
}

static void pairs_are_independent(void) {
    static const double probabilities[] = {0.1, 0.5, 0.9};
    for (int n = 0; n < TEST_COUNT(probabilities); n++)
        for (uint64_t seed = 0; seed < (uint64_t)test_repeats(4); seed++) {
            test_context("dropout %g, seed %d", probabilities[n], (int)seed);
            check_square(probabilities[n], seed);
            test_free_all();
        }
}

/* Every bit of a pair is set half of the time, and any two bits are equal half of the time. */
static void bits_are_fair(void) {
    enum { bits = 32 };
    const int pairs = test_repeats(square * square);
    static int64_t set[bits], equal[bits][bits];
    const dropout_params params = {11, 0, 1};
    for (int64_t n = 0; n < pairs; n++) {
        const uint32_t mixed = dropout_mix(dropout_row(&params, 0, n / square * 2),
                                           dropout_key(&params, 0, n % square));
        for (int x = 0; x < bits; x++) {
            set[x] += mixed >> x & 1;
            for (int y = 0; y < x; y++)
                equal[x][y] += (mixed >> x & 1) == (mixed >> y & 1);
        }
    }
    for (int x = 0; x < bits; x++) {
        CHECK_NEAR((double)set[x], (double)pairs / 2, 5 * sqrt((double)pairs / 4));
        for (int y = 0; y < x; y++)
            CHECK_NEAR((double)equal[x][y], (double)pairs / 2, 5 * sqrt((double)pairs / 4));
    }
}

static const test_entry tests[] = {
    TEST(generator_is_known),
    TEST(bits_are_fair),
    TEST(pairs_are_independent),
    TEST(probabilities_are_dropped),
    TEST(out_lacks_dropped_pairs),
    TEST(gradients_lack_dropped_pairs),
    TEST(state_replaces_seed_and_offset),
    EACH_KERNEL("forward", dropout_is_rounded),
    EACH_KERNEL("forward", some_queries_drop_the_same),
};

int main(int argc, char **argv) { return test_run_backend(argc, argv, tests, TEST_COUNT(tests)); }
