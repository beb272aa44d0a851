/* test_probabilities.c - fdma_probabilities() by every kernel of the CPU or of a device: compares
 * its rows with fdma_forward()'s out and lse, and its zeros with the rules of docs/algorithm.md,
 * applied here to each query and key by counting. */
#include "backend.h"
#include "problem.h"

/* ---- problems ---- */

typedef struct shape {
    const char *name;
    problem sizes;
    int64_t sequences; /* packed; 0: not packed */
    bool padded, cut, without_bias;
} shape;

#define LENGTHS(n_batch, n_q, n_kv, n_q_heads, n_kv_heads, n_dim)                                  \
    .batch = n_batch, .q_len = n_q, .kv_len = n_kv, .q_heads = n_q_heads, .kv_heads = n_kv_heads,  \
    .head_dim = n_dim
#define DENSE .window = -1
#define CAUSAL_SCOPE .causal = 1, .scope = FDMA_SCOPE_CAUSAL
#define GLOBAL_SCOPE .scope = FDMA_SCOPE_GLOBAL

static const shape probability_shapes[] = {
    {"dense", .sizes = {LENGTHS(2, 37, 61, 4, 2, 40), DENSE, .causal = 1}, .without_bias = true},
    {"full", .sizes = {LENGTHS(2, 41, 29, 3, 1, 24), DENSE}, .padded = true},
    {"empty rows", .sizes = {LENGTHS(1, 45, 31, 2, 2, 64), DENSE, .causal = 1}},
    {"one query", .sizes = {LENGTHS(2, 1, 97, 8, 2, 128), .window = 20, CAUSAL_SCOPE}},
    {"causal scope",
     .sizes = {LENGTHS(1, 67, 67, 6, 2, 48), .window = 13, CAUSAL_SCOPE, .softcap = 2}},
    {"padding", .sizes = {LENGTHS(2, 53, 67, 2, 1, 72), .window = 13, CAUSAL_SCOPE},
     .padded = true},
    {"rules",
     .sizes = {LENGTHS(2, 33, 71, 4, 2, 96), .window = 9, .recent = 5, .sinks = 2, CAUSAL_SCOPE,
               .scale = 0.3},
     .padded = true},
    {"global scope",
     .sizes = {LENGTHS(2, 51, 51, 3, 1, 64), .window = 12, GLOBAL_SCOPE, .causal = 1}},
    {"global, full", .sizes = {LENGTHS(1, 21, 65, 2, 2, 80), .window = 12, GLOBAL_SCOPE},
     .padded = true},
    {"packed", .sizes = {LENGTHS(1, 91, 91, 4, 2, 32), .window = 8, CAUSAL_SCOPE}, .sequences = 4},
    {"packed, dense", .sizes = {LENGTHS(1, 75, 75, 2, 1, 64), DENSE}, .sequences = 3,
     .padded = true},
    {"packed, causal", .sizes = {LENGTHS(1, 75, 75, 2, 1, 64), DENSE, .causal = 1}, .sequences = 3},
    {"packed, global", .sizes = {LENGTHS(1, 85, 85, 2, 1, 16), .window = 7, GLOBAL_SCOPE},
     .sequences = 5},
    {"kv_used", .sizes = {LENGTHS(5, 23, 70, 2, 1, 64), .window = 11, CAUSAL_SCOPE}, .cut = true},
    {"kv_used, full", .sizes = {LENGTHS(5, 19, 43, 2, 1, 56), DENSE}, .cut = true, .padded = true},
};

/* A problem; the caller makes its selection. The last packed sequence ends before the keys do.
 * Among the sequences that are cut, one has no key, one fewer keys than queries, one all keys. */
static problem make_problem(const shape *n, fdma_dtype dtype) {
    const int64_t len = n->sizes.kv_len;
    problem x = n->sizes;
    x.dtype = dtype;
    problem_fill(&x, 70);
    if (n->padded)
        x.key_valid = new_tensor(FDMA_UINT8, x.batch, len, -1, -1);
    for (int64_t key = 0; key < count_of(x.key_valid); key++)
        ((uint8_t *)x.key_valid.data)[key] = key * 7 % 5 != 1;
    if (n->sequences > 0)
        x.starts = new_tensor(FDMA_INT32, n->sequences + 1, -1, -1, -1);
    for (int64_t s = 0; s < count_of(x.starts); s++)
        ((int32_t *)x.starts.data)[s] =
            (int32_t)((len - 6) * s * s / (n->sequences * n->sequences));
    if (n->cut)
        x.kv_used = new_tensor(FDMA_INT32, x.batch, -1, -1, -1);
    for (int64_t b = 0; b < count_of(x.kv_used); b++)
        ((int32_t *)x.kv_used.data)[b] = (int32_t)(len * b / (x.batch - 1));
    if (n->without_bias)
        x.bias = (fdma_tensor){0};
    return x;
}

/* ---- kept keys, by counting ---- */

typedef struct key_range {
    int64_t first, end;
} key_range;

/* The keys of the sequence of position p; none if p belongs to no sequence. */
static key_range keys_around(const problem *x, int64_t b, int64_t p) {
    const int32_t *const starts = x->starts.data, *const used = x->kv_used.data;
    key_range found = {0, 0};
    if (used != NULL)
        return (key_range){0, used[b]};
    if (starts == NULL)
        return (key_range){0, x->kv_len};
    for (int64_t s = 0; s + 1 < count_of(x->starts); s++)
        if (starts[s] <= p && p < starts[s + 1])
            found = (key_range){starts[s], starts[s + 1]};
    return found;
}

static bool is_valid(const problem *x, int64_t b, int64_t j) {
    return x->key_valid.rank == 0 || ((const uint8_t *)x->key_valid.data)[b * x->kv_len + j] != 0;
}

static int64_t count_valid(const problem *x, int64_t b, int64_t first, int64_t end) {
    int64_t count = 0;
    for (int64_t j = first; j < end; j++)
        count += is_valid(x, b, j);
    return count;
}

/* True if key j ranks before key r: a sink, a higher score, or an equal score and more recent. */
static bool outranks(const problem *x, int64_t b, int64_t g, key_range own, int64_t j, int64_t r) {
    const float *const score = (const float *)x->score.data + (b * x->kv_heads + g) * x->kv_len;
    const bool sink = count_valid(x, b, own.first, j) < x->sinks;
    if (sink != (count_valid(x, b, own.first, r) < x->sinks))
        return sink;
    return score[j] > score[r] || (score[j] == score[r] && j > r);
}

static bool query_keeps(const problem *x, int64_t b, int64_t g, int64_t i, int64_t j) {
    const int64_t keys = x->kv_used.rank > 0 ? ((const int32_t *)x->kv_used.data)[b] : x->kv_len;
    const int64_t p = i + keys - x->q_len;
    const key_range own = keys_around(x, b, p);
    if (j < own.first || j >= own.end || (x->causal && j > p) || !is_valid(x, b, j))
        return false;
    const int64_t end = x->scope == FDMA_SCOPE_CAUSAL && p + 1 < own.end ? p + 1 : own.end;
    if (x->window < 0 || count_valid(x, b, j + 1, end) < x->recent)
        return true;
    int64_t better = 0;
    for (int64_t r = own.first; r < end; r++)
        better += is_valid(x, b, r) && count_valid(x, b, r + 1, end) >= x->recent &&
                  outranks(x, b, g, own, r, j);
    return better < x->window;
}

/* ---- rows ---- */

/* The probabilities of a row add up to 1 and, multiplied by v, to out. */
static void check_row(const problem *x, const attended *forward, const float *row, int64_t b,
                      int64_t h, int64_t i) {
    const int64_t g = h / (x->q_heads / x->kv_heads);
    const double lse =
        (double)((const float *)forward->lse.data)[(b * x->q_heads + h) * x->q_len + i];
    double sum = 0, out[256] = {0};
    for (int64_t j = 0; j < x->kv_len; j++) {
        if (!query_keeps(x, b, g, i, j)) {
            CHECK_INT(float_to_bits(row[j]), 0);
            continue;
        }
        CHECK(row[j] > 0);
        sum += (double)row[j];
        for (int64_t d = 0; d < x->head_dim; d++)
            out[d] += (double)row[j] *
                      load_double(x->v.data, x->dtype,
                                  ((b * x->kv_len + j) * x->kv_heads + g) * x->head_dim + d);
    }
    if (isfinite(lse))
        CHECK_NEAR(sum, 1, problem_lse_tolerance(x, lse));
    else
        CHECK(sum == 0);
    for (int64_t d = 0; d < x->head_dim; d++)
        CHECK_NEAR(out[d],
                   load_double(forward->out.data, x->dtype,
                               ((b * x->q_len + i) * x->q_heads + h) * x->head_dim + d),
                   problem_out_tolerance(x));
}

static void check_rows(const problem *x, const attended *forward, fdma_tensor probability) {
    const float *row = probability.data;
    for (int64_t b = 0; b < x->batch; b++)
        for (int64_t h = 0; h < x->q_heads; h++)
            for (int64_t i = 0; i < x->q_len; i++, row += x->kv_len)
                check_row(x, forward, row, b, h, i);
}

/* Calls `holds` for a problem of this shape with every kernel in every dtype, and with forward's
 * results on the CPU. */
static void for_each_kernel_of(const shape *n, void (*holds)(const problem *x, const attended *a,
                                                             const char *kernel)) {
    for (int type = first_dtype(); type < test_dtype_count; type++) {
        const kernel_list kernels = kernels_for("probabilities", test_dtypes[type]);
        for (int kernel = 0; kernel < kernels.count; kernel++) {
            test_context("%s %s %s, head_dim %d", kernels.name[kernel],
                         dtype_name(test_dtypes[type]), n->name, (int)n->sizes.head_dim);
            problem x = make_problem(n, test_dtypes[type]);
            problem_select(&x);
            const attended forward = problem_attend(&x, input_kernels(x.dtype), 1);
            holds(&x, &forward, kernels.name[kernel]);
            test_free_all();
        }
    }
}

static void check_shape(const problem *x, const attended *forward, const char *kernel) {
    check_rows(x, forward, find_probabilities(x, forward->lse, kernel));
}

static void rows_are_those_of_forward(void) {
    for (int s = 0; s < TEST_COUNT(probability_shapes); s++)
        for_each_kernel_of(&probability_shapes[s], check_shape);
}

static void every_head_dim_is_computed(void) {
    for (int64_t head_dim = 8; head_dim <= 256; head_dim += 8) {
        const shape n = {"head_dim",
                         .sizes = {LENGTHS(1, 9, 39, 2, 1, head_dim), .window = 7, CAUSAL_SCOPE}};
        for_each_kernel_of(&n, check_shape);
    }
}

/* ---- other tensors ---- */

static const shape usual_shape = {
    "usual shape", .sizes = {LENGTHS(2, 33, 71, 4, 2, 40), .window = 9, .recent = 3, CAUSAL_SCOPE}};

/* 30 carried keys and the others give the probabilities of all keys in one tensor. */
static void check_carried(const problem *x, const attended *forward, const char *kernel) {
    const fdma_tensor whole = find_probabilities(x, forward->lse, kernel);
    fdma_probabilities_args args = probabilities_args(x, forward->lse, kernel);
    args.k_carried = positions_of(x->k, 1, 0, 30);
    args.k = positions_of(x->k, 1, 30, x->kv_len);
    args.bias_carried = positions_of(x->bias, 2, 0, 30);
    args.bias = positions_of(x->bias, 2, 30, x->kv_len);
    CHECK_OK(run_probabilities(&args));
    CHECK(same_tensor(args.probability, whole));
}

static void carried_keys_come_first(void) { for_each_kernel_of(&usual_shape, check_carried); }

static void check_strides(const problem *x, const attended *forward, const char *kernel) {
    const fdma_tensor plain = find_probabilities(x, forward->lse, kernel);
    fdma_probabilities_args args = probabilities_args(x, forward->lse, kernel);
    args.q = heads_first(x->q);
    args.k = with_gaps(x->k, 3);
    args.bias = with_gaps(x->bias, 5);
    args.lse = with_gaps(forward->lse, 1);
    args.probability = with_gaps(args.probability, 7);
    CHECK_OK(run_probabilities(&args));
    check_gapped(args.probability, plain, 7);
    args.probability = heads_first(plain);
    memset(args.probability.data, test_guard_byte, bytes_of(plain));
    args.exec.threads = 3;
    CHECK_OK(run_probabilities(&args));
    CHECK(same_tensor(gathered(args.probability), plain));
}

static void strides_change_no_bit(void) { for_each_kernel_of(&usual_shape, check_strides); }

static void check_refused(const fdma_probabilities_args *args, const char *message) {
    const fdma_tensor before = copy_tensor(args->probability);
    CHECK_INT(fdma_probabilities(args), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), message);
    CHECK(same_tensor(args->probability, before));
}

static void check_carried_mistakes(const problem *x, const attended *forward, const char *kernel) {
    fdma_probabilities_args args = probabilities_args(x, forward->lse, kernel);
    args.exec.kernel = NULL; // these checks run before a kernel and a device are chosen
    args.k_carried = positions_of(x->k, 1, 0, 30);
    check_refused(&args, "expiry: axis 2 has 71 elements, want 101");
    args.k = positions_of(x->k, 1, 30, x->kv_len);
    args.bias = positions_of(x->bias, 2, 30, x->kv_len);
    check_refused(&args, "bias_carried: is absent, want it with k_carried and a bias");
    args.bias_carried = args.bias;
    check_refused(&args, "bias_carried: axis 2 has 41 elements, want 30");
    args.bias_carried = positions_of(x->bias, 2, 0, 30);
    args.kv_used = new_tensor(FDMA_INT32, x->batch, -1, -1, -1);
    check_refused(&args, "kv_used: is given, want none with k_carried");
    args.kv_used = (fdma_tensor){0};
    args.key_valid = new_tensor(FDMA_UINT8, x->batch, x->kv_len - 30, -1, -1);
    check_refused(&args, "key_valid: is given, want none with k_carried");
}

static void carried_keys_are_checked(void) {
    for_each_kernel_of(&usual_shape, check_carried_mistakes);
}

/* ---- special values ---- */

static void check_special_lse(const problem *x, const attended *forward, const char *kernel) {
    const fdma_tensor lse = copy_tensor(forward->lse);
    const fdma_tensor plain = find_probabilities(x, lse, kernel);
    for (int64_t at = 0; at < count_of(lse); at++)
        if (at % x->q_len < 2)
            ((float *)lse.data)[at] = at % x->q_len == 0 ? NAN : -INFINITY;
    const float *const want = plain.data;
    const float *const found = find_probabilities(x, lse, kernel).data;
    for (int64_t at = 0; at < count_of(plain); at++) {
        const int64_t i = at / x->kv_len % x->q_len;
        if (i == 0)
            CHECK(want[at] > 0 ? isnan(found[at]) : found[at] == 0);
        else
            CHECK(found[at] == (i == 1 ? 0 : want[at]));
    }
}

static void lse_may_be_special(void) { for_each_kernel_of(&usual_shape, check_special_lse); }

static void check_unread(const problem *x, const attended *forward, const char *kernel) {
    const fdma_tensor plain = find_probabilities(x, forward->lse, kernel);
    problem poisoned = *x;
    CHECK(poison_unread(&poisoned, NAN) > 0);
    CHECK(same_tensor(find_probabilities(&poisoned, forward->lse, kernel), plain));
}

static void keys_that_no_query_keeps_are_not_read(void) {
    for_each_kernel_of(&usual_shape, check_unread);
}

static const test_entry tests[] = {
    TEST(rows_are_those_of_forward),
    TEST(every_head_dim_is_computed),
    TEST(carried_keys_come_first),
    TEST(strides_change_no_bit),
    TEST(carried_keys_are_checked),
    TEST(lse_may_be_special),
    TEST(keys_that_no_query_keeps_are_not_read),
};

int main(int argc, char **argv) { return test_run_backend(argc, argv, tests, TEST_COUNT(tests)); }
