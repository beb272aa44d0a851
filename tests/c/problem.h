/* problem.h - a forward problem for the C tests: its tensors, its selection, its results. */
#pragma once

#include "calls.h"

#include <float.h>

static inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

typedef struct problem {
    int64_t batch, q_len, kv_len, q_heads, kv_heads, head_dim;
    int64_t window; /* -1: dense */
    int64_t recent, sinks;
    double gap;
    fdma_scope scope;
    int causal;
    fdma_dtype dtype;
    double scale, softcap;
    fdma_tensor q, k, v;
    fdma_tensor score, bias; /* [batch, kv_heads, kv_len] float32 */
    fdma_tensor key_valid;   /* absent unless a test sets it, like starts */
    fdma_tensor starts, kv_used;
    fdma_selection selection;
    double dropout;
    uint64_t seed, offset;
    fdma_tensor rng_state;
} problem;

/* The sizes of a problem: batch, queries, keys, query heads, kv heads, channels, window (-1:
 * dense), causal. */
#define SIZES(b, i, j, h, g, d, w, is_causal)                                                      \
    {.batch = b,                                                                                   \
     .q_len = i,                                                                                   \
     .kv_len = j,                                                                                  \
     .q_heads = h,                                                                                 \
     .kv_heads = g,                                                                                \
     .head_dim = d,                                                                                \
     .window = w,                                                                                  \
     .scope = is_causal ? FDMA_SCOPE_CAUSAL : FDMA_SCOPE_GLOBAL,                                   \
     .causal = is_causal}

typedef struct attended {
    fdma_tensor out, lse;
} attended;

/* The caller has set sizes, options and dtype. Makes random contiguous tensors. */
static inline void problem_fill(problem *x, uint64_t seed) {
    uint64_t state = seed;
    x->q = new_tensor(x->dtype, x->batch, x->q_len, x->q_heads, x->head_dim);
    x->k = new_tensor(x->dtype, x->batch, x->kv_len, x->kv_heads, x->head_dim);
    x->v = new_tensor(x->dtype, x->batch, x->kv_len, x->kv_heads, x->head_dim);
    x->score = new_tensor(FDMA_FLOAT32, x->batch, x->kv_heads, x->kv_len, -1);
    fill_random(x->q, &state, 2);
    fill_random(x->k, &state, 2);
    fill_random(x->v, &state, 2);
    fill_random(x->score, &state, 2);
    x->bias = copy_tensor(x->score);
}

/* Problems of sequences of different lengths: packed ones of 25, 0 and 35 positions, or a batch
 * whose sequences have 20, 50 and 0 keys. */
static inline problem pieces_problem(bool packed, fdma_dtype dtype) {
    static int32_t starts[] = {0, 25, 25, 60}, used[] = {20, 50, 0};
    problem x = SIZES(3, 30, 50, 4, 2, 64, -1, 1);
    if (packed)
        x = (problem)SIZES(1, 60, 60, 4, 2, 64, -1, 1);
    x.dtype = dtype;
    problem_fill(&x, packed ? 5 : 6);
    if (packed)
        x.starts = fdma_tensor_1d(starts, FDMA_INT32, TEST_COUNT(starts));
    else
        x.kv_used = fdma_tensor_1d(used, FDMA_INT32, TEST_COUNT(used));
    return x;
}

/* Sizes without queries, without keys, and without sequences. */
static const problem empty_sizes[] = {
    SIZES(1, 0, 9, 4, 2, 64, -1, 1), SIZES(1, 0, 0, 4, 2, 64, -1, 1),
    SIZES(0, 5, 9, 4, 2, 64, -1, 0), SIZES(1, 5, 0, 4, 2, 64, -1, 0)};

/* A call that writes its selection to `to`. */
static inline fdma_select_args select_args(const problem *x, fdma_selection *to,
                                           const char *kernel) {
    return (fdma_select_args){
        .size = sizeof(fdma_select_args),
        .score = x->score,
        .key_valid = x->key_valid,
        .starts = x->starts,
        .selection = to,
        .window = x->window,
        .recent = x->recent,
        .sinks = x->sinks,
        .scope = x->scope,
        .exec = {.kernel = kernel, .threads = 2},
        .kv_used = x->kv_used,
        .gap = x->gap,
    };
}

static inline fdma_selection selected_by(const problem *x, const char *kernel) {
    fdma_selection selection = selection_for(x->score);
    fdma_select_args args = select_args(x, &selection, kernel);
    CHECK_OK(run_select(&args));
    return selection;
}

/* Selects by x->score with the reference; all kernels select alike. */
static inline void problem_select(problem *x) {
    if (x->window < 0)
        return;
    x->selection = selected_by(x, "reference");
}

/* A problem of these sizes and options, with random tensors and its selection. */
static inline problem new_problem(const problem *sizes, fdma_dtype dtype, uint64_t seed) {
    problem x = *sizes;
    x.dtype = dtype;
    problem_fill(&x, seed);
    problem_select(&x);
    return x;
}

/* The same problem with tensors of its own. */
static inline problem copied_problem(const problem *x) {
    problem copy = *x;
    fdma_tensor *const tensors[] = {&copy.q,
                                    &copy.k,
                                    &copy.v,
                                    &copy.score,
                                    &copy.bias,
                                    &copy.selection.expiry,
                                    &copy.selection.slot};
    for (int t = 0; t < TEST_COUNT(tensors); t++)
        *tensors[t] = copy_tensor(*tensors[t]);
    return copy;
}

static inline fdma_forward_args problem_args(const problem *x, const char *kernel) {
    return (fdma_forward_args){
        .size = sizeof(fdma_forward_args),
        .q = x->q,
        .k = x->k,
        .v = x->v,
        .bias = x->bias,
        .key_valid = x->key_valid,
        .starts = x->starts,
        .out = new_output(x->dtype, x->batch, x->q_len, x->q_heads, x->head_dim),
        .lse = new_output(FDMA_FLOAT32, x->batch, x->q_heads, x->q_len, -1),
        .selection = x->window >= 0 ? &x->selection : NULL,
        .scale = x->scale,
        .softcap = x->softcap,
        .causal = x->causal,
        .exec = {.kernel = kernel, .threads = 1},
        .kv_used = x->kv_used,
        .dropout = x->dropout,
        .seed = x->seed,
        .offset = x->offset,
        .rng_state = x->rng_state,
    };
}

/* Kernels that every CPU has. They make the out and lse that other calls are given, so that the
 * bits of these inputs, and with them the outcome of a test, do not depend on the machine. */
static inline const char *input_kernels(fdma_dtype dtype) {
    return dtype == FDMA_FLOAT64 ? "reference" : "cpu/scalar";
}

static inline fdma_probabilities_args probabilities_args(const problem *x, fdma_tensor lse,
                                                         const char *kernel) {
    return (fdma_probabilities_args){
        .size = sizeof(fdma_probabilities_args),
        .q = x->q,
        .k = x->k,
        .bias = x->bias,
        .key_valid = x->key_valid,
        .starts = x->starts,
        .lse = lse,
        .probability = new_output(FDMA_FLOAT32, x->batch, x->q_heads, x->q_len, x->kv_len),
        .selection = x->window >= 0 ? &x->selection : NULL,
        .scale = x->scale,
        .softcap = x->softcap,
        .causal = x->causal,
        .exec = {.kernel = kernel, .threads = 2},
        .kv_used = x->kv_used,
        .dropout = x->dropout,
        .seed = x->seed,
        .offset = x->offset,
        .rng_state = x->rng_state,
    };
}

static inline fdma_tensor find_probabilities(const problem *x, fdma_tensor lse,
                                             const char *kernel) {
    fdma_probabilities_args args = probabilities_args(x, lse, kernel);
    CHECK_OK(run_probabilities(&args));
    return args.probability;
}

static inline attended problem_attend(const problem *x, const char *kernel, int32_t threads) {
    fdma_forward_args args = problem_args(x, kernel);
    args.exec.threads = threads;
    CHECK_OK(run_forward(&args));
    return (attended){.out = args.out, .lse = args.lse};
}

static inline void check_same_results(attended actual, attended want) {
    CHECK_BYTES(actual.out.data, want.out.data, bytes_of(want.out));
    CHECK_BYTES(actual.lse.data, want.lse.data, bytes_of(want.lse));
}

/* One rounding step of a number in [1, 2). */
static inline double step_of(fdma_dtype dtype) {
    return dtype == FDMA_FLOAT32 ? (double)FLT_EPSILON : dtype == FDMA_FLOAT16 ? 0x1p-10 : 0x1p-7;
}

/* Largest difference between two evaluations over the same keys: they add at most kv_len terms in
 * different orders, which costs a fraction of kv_len steps of float32; then one rounding to the
 * dtype. */
static inline double problem_sums(const problem *x) {
    return (double)x->kv_len * (double)FLT_EPSILON;
}

static inline double problem_out_tolerance(const problem *x) {
    return 2 * (problem_sums(x) + step_of(x->dtype)); /* |v| <= 2 */
}

static inline double problem_lse_tolerance(const problem *x, double lse) {
    return (1 + fabs(lse)) * problem_sums(x);
}

static inline void check_close_results(const problem *x, attended actual, attended want) {
    for (int64_t i = 0; i < count_of(want.out); i++) {
        CHECK_NEAR(load_double(actual.out.data, x->dtype, i),
                   load_double(want.out.data, x->dtype, i), problem_out_tolerance(x));
    }
    for (int64_t i = 0; i < count_of(want.lse); i++) {
        const double lse = (double)((const float *)want.lse.data)[i];
        CHECK_NEAR((double)((const float *)actual.lse.data)[i], lse, problem_lse_tolerance(x, lse));
    }
}

/* True if query i keeps key j, by the rules in fdma.h on fdma_selection and positions. */
static inline int problem_keeps(const problem *x, int64_t b, int64_t g, int64_t i, int64_t j) {
    const int64_t p = i + x->kv_len - x->q_len;
    const int visible = !x->causal || j <= p;
    if (x->window < 0) {
        return visible && (x->key_valid.rank == 0 ||
                           ((const uint8_t *)x->key_valid.data)[b * x->kv_len + j] != 0);
    }
    const int32_t expiry =
        ((const int32_t *)x->selection.expiry.data)[(b * x->kv_heads + g) * x->kv_len + j];
    return x->causal ? visible && p < expiry : expiry > j;
}

static inline bool keeps_any(const problem *x, int64_t b, int64_t g, int64_t i) {
    for (int64_t j = 0; j < x->kv_len; j++)
        if (problem_keeps(x, b, g, i, j))
            return true;
    return false;
}

static inline bool is_read(const problem *x, int64_t b, int64_t g, int64_t j) {
    for (int64_t i = 0; i < x->q_len; i++)
        if (problem_keeps(x, b, g, i, j))
            return true;
    return false;
}

/* False if the kernel refuses the problem, which CPU kernels must not. */
static inline bool problem_is_taken(const problem *x, const char *kernel) {
    fdma_forward_args args = problem_args(x, kernel);
    return call_takes(operation_forward, &args);
}

static inline void spoil_key(fdma_tensor tensor, int64_t b, int64_t j, int64_t g, float value) {
    const int64_t kv_len = tensor.shape[1], kv_heads = tensor.shape[2], head_dim = tensor.shape[3];
    for (int64_t d = 0; d < head_dim; d++) {
        store_float(tensor.data, tensor.dtype, ((b * kv_len + j) * kv_heads + g) * head_dim + d,
                    value);
    }
}

/* Writes `poison` into the keys that no query reads, and returns how many there are. */
static inline int64_t poison_unread(problem *x, float poison) {
    int64_t unread = 0;
    for (int64_t key = 0; key < x->batch * x->kv_heads * x->kv_len; key++) {
        const int64_t j = key % x->kv_len, g = key / x->kv_len % x->kv_heads;
        const int64_t b = key / x->kv_len / x->kv_heads;
        if (!is_read(x, b, g, j)) {
            spoil_key(x->k, b, j, g, poison);
            spoil_key(x->v, b, j, g, poison);
            ((float *)x->bias.data)[key] = poison;
            unread++;
        }
    }
    return unread;
}

/* One sequence of a tensor's batch; an absent tensor stays absent. */
static inline fdma_tensor sequence_of(fdma_tensor tensor, int64_t b) {
    return positions_of(tensor, 0, b, b + 1);
}

static inline fdma_tensor last_of(fdma_tensor tensor) {
    return sequence_of(tensor, tensor.shape[0] - 1);
}

static inline problem problem_sequence(const problem *x, int64_t b) {
    problem alone = *x;
    alone.batch = 1;
    alone.q = sequence_of(x->q, b);
    alone.k = sequence_of(x->k, b);
    alone.v = sequence_of(x->v, b);
    alone.score = sequence_of(x->score, b);
    alone.bias = sequence_of(x->bias, b);
    alone.key_valid = sequence_of(x->key_valid, b);
    alone.kv_used = sequence_of(x->kv_used, b);
    alone.selection.expiry = sequence_of(x->selection.expiry, b);
    alone.selection.slot = sequence_of(x->selection.slot, b);
    return alone;
}

static inline problem last_problem(const problem *x) { return problem_sequence(x, x->batch - 1); }

/* Checks a property on random problems of these sizes and options, with every kernel of an
 * operation. */
static inline void for_each_problem_of_type(const char *operation, const problem *sizes,
                                            uint64_t seed, int type,
                                            void (*holds)(problem *x, const char *kernel)) {
    const kernel_list kernels = kernels_for(operation, test_dtypes[type]);
    const problem made = new_problem(sizes, test_dtypes[type], seed);
    const int kept = test_state.blocks;
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        test_context("%s %s, q_len %d, kv_len %d, window %d", kernels.name[kernel],
                     dtype_name(made.dtype), (int)made.q_len, (int)made.kv_len, (int)made.window);
        problem x = copied_problem(&made);
        holds(&x, kernels.name[kernel]);
        test_free_after(kept);
    }
    test_free_all();
}

/* With a divided number of cases, each test has one dtype; if it has several sizes, each size. */
static inline void test_each_problem(const test_entry *test) {
    for (int n = 0; n < test->count || n == 0; n++)
        for (int type = first_dtype(); type < test_dtype_count; type++)
            if (!is_left_out(test->count > 0 ? n : test_state.index, type))
                for_each_problem_of_type(test->operation, &test->sizes[n],
                                         test->count > 0 ? (uint64_t)n + 1 : test->seed, type,
                                         test->each_problem);
}

/* Entries of a table of tests: a property that is checked on problems of these sizes, or of each of
 * a table of sizes, with every kernel of forward or of another operation. */
#define EACH_PROBLEM(property, of_sizes, of_seed)                                                  \
    {.name = #property " of " #of_sizes,                                                           \
     .run_each = test_each_problem,                                                                \
     .operation = "forward",                                                                       \
     .each_problem = property,                                                                     \
     .sizes = &(of_sizes),                                                                         \
     .seed = of_seed}
#define EACH_SIZE_OF(of, property, table)                                                          \
    {.name = #property,                                                                            \
     .run_each = test_each_problem,                                                                \
     .operation = of,                                                                              \
     .each_problem = property,                                                                     \
     .sizes = table,                                                                               \
     .count = TEST_COUNT(table)}
#define EACH_SIZE(property, table) EACH_SIZE_OF("forward", property, table)
