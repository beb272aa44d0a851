/* problem.h - a forward problem for the C tests: its tensors, its selection, its results. */
#pragma once

#include "calls.h"

#include <float.h>

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

/* Selects by x->score with the reference; all kernels select alike. */
static inline void problem_select(problem *x) {
    if (x->window < 0)
        return;
    x->selection = (fdma_selection){
        .size = sizeof x->selection,
        .expiry = new_output(FDMA_INT32, x->batch, x->kv_heads, x->kv_len, -1),
        .slot = new_output(FDMA_INT32, x->batch, x->kv_heads, x->kv_len, -1),
    };
    fdma_select_args args = {
        .size = sizeof args,
        .score = x->score,
        .key_valid = x->key_valid,
        .starts = x->starts,
        .selection = &x->selection,
        .window = x->window,
        .recent = x->recent,
        .sinks = x->sinks,
        .scope = x->scope,
        .exec = {.kernel = "reference"},
        .kv_used = x->kv_used,
        .gap = x->gap,
    };
    CHECK_OK(run_select(&args));
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
    if (tensor.rank > 0) {
        tensor.data =
            (char *)tensor.data + (size_t)(b * tensor.stride[0]) * dtype_size(tensor.dtype);
        tensor.shape[0] = 1;
    }
    return tensor;
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
    alone.bias = sequence_of(x->bias, b);
    alone.key_valid = sequence_of(x->key_valid, b);
    alone.kv_used = sequence_of(x->kv_used, b);
    alone.selection.expiry = sequence_of(x->selection.expiry, b);
    alone.selection.slot = sequence_of(x->selection.slot, b);
    return alone;
}

static inline problem last_problem(const problem *x) { return problem_sequence(x, x->batch - 1); }

static inline void for_each_problem_of_type(const problem *sizes, uint64_t seed, int type,
                                            void (*holds)(problem *x, const char *kernel)) {
    const kernel_list kernels = kernels_for("forward", test_dtypes[type]);
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        problem x = *sizes;
        test_context("%s %s", kernels.name[kernel], dtype_name(test_dtypes[type]));
        x.dtype = test_dtypes[type];
        problem_fill(&x, seed);
        problem_select(&x);
        holds(&x, kernels.name[kernel]);
        test_free_all();
    }
}

/* Checks a property on random problems of these sizes and options, with every kernel of forward.
 * With a divided number of cases, each property is checked in one dtype. */
static inline void for_each_problem(const problem *sizes, uint64_t seed,
                                    void (*holds)(problem *x, const char *kernel)) {
    static int properties;
    for (int type = first_dtype(); type < test_dtype_count; type++)
        if (!is_left_out(properties, type))
            for_each_problem_of_type(sizes, seed, type, holds);
    properties++;
}

/* As for_each_problem(), for each of several sizes. With a divided number of cases, each size has
 * one dtype. */
static inline void for_each_size_of(const problem *sizes, int count,
                                    void (*holds)(problem *x, const char *kernel)) {
    for (int n = 0; n < count; n++)
        for (int type = first_dtype(); type < test_dtype_count; type++)
            if (!is_left_out(n, type))
                for_each_problem_of_type(&sizes[n], (uint64_t)n + 1, type, holds);
}
