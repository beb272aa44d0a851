/* gradient.h - a backward problem for the C tests: its tensors, calls on it, and the comparison of
 * its gradients with the gradients of the kernel "reference" in float64. */
#pragma once

#include "problem.h"

typedef union gradients {
    struct {
        fdma_tensor dq, dk, dv, dbias;
    };
    fdma_tensor all[4];
} gradients;

/* Empty until check_expected() first needs them. */
typedef struct expected_gradients {
    int known;
    gradients reference, plain;
} expected_gradients;

typedef struct gradient_problem {
    problem x; /* includes its selection */
    fdma_tensor out, lse, dout;
    fdma_tensor dlse; /* may be absent */
    int deterministic;
    expected_gradients *expected;
} gradient_problem;

/* Out and lse of a problem in its dtype. */
static inline attended gradient_forward(const problem *x) {
    fdma_forward_args args = problem_args(x, input_kernels(x->dtype));
    if (x->dtype == FDMA_FLOAT64)
        args.lse = new_output(FDMA_FLOAT64, x->batch, x->q_heads, x->q_len, -1);
    CHECK_OK(run_forward(&args));
    return (attended){.out = args.out, .lse = args.lse};
}

/* The caller's problem already has its tensors and its selection. */
static inline gradient_problem gradient_of(const problem *x, int with_dlse) {
    uint64_t state = 77;
    const attended done = gradient_forward(x);
    gradient_problem p = {
        .x = *x, .out = done.out, .lse = done.lse, .expected = test_alloc(sizeof *p.expected)};
    p.dout = new_tensor(x->dtype, x->batch, x->q_len, x->q_heads, x->head_dim);
    fill_random(p.dout, &state, 1);
    if (with_dlse) {
        p.dlse = new_tensor(p.lse.dtype, x->batch, x->q_heads, x->q_len, -1);
        fill_random(p.dlse, &state, 1);
    }
    return p;
}

/* The arguments point to the selection of the problem, so it must outlive them. */
static inline fdma_backward_args gradient_args(const gradient_problem *p, const char *kernel) {
    const problem *x = &p->x;
    return (fdma_backward_args){
        .size = sizeof(fdma_backward_args),
        .dout = p->dout,
        .dlse = p->dlse,
        .out = p->out,
        .lse = p->lse,
        .q = x->q,
        .k = x->k,
        .v = x->v,
        .bias = x->bias,
        .key_valid = x->key_valid,
        .starts = x->starts,
        .dq = new_output(x->dtype, x->batch, x->q_len, x->q_heads, x->head_dim),
        .dk = new_output(x->dtype, x->batch, x->kv_len, x->kv_heads, x->head_dim),
        .dv = new_output(x->dtype, x->batch, x->kv_len, x->kv_heads, x->head_dim),
        .dbias = new_output(x->bias.rank > 0 ? x->bias.dtype : p->lse.dtype, x->batch, x->kv_heads,
                            x->kv_len, -1),
        .selection = x->window >= 0 ? &x->selection : NULL,
        .scale = x->scale,
        .softcap = x->softcap,
        .causal = x->causal,
        .deterministic = p->deterministic,
        .exec = {.kernel = kernel, .threads = 1},
        .kv_used = x->kv_used,
        .dropout = x->dropout,
        .seed = x->seed,
        .offset = x->offset,
        .rng_state = x->rng_state,
    };
}

static inline gradients gradient_outputs(const fdma_backward_args *args) {
    return (gradients){.all = {args->dq, args->dk, args->dv, args->dbias}};
}

static inline gradients gradient_run(const gradient_problem *p, const char *kernel,
                                     int32_t threads) {
    fdma_backward_args args = gradient_args(p, kernel);
    args.exec.threads = threads;
    CHECK_OK(run_backward(&args));
    return gradient_outputs(&args);
}

/* The fused call on the same problem; `to` has dq, dk, dv, ddt_proj and da. */
static inline fdma_attention_backward_args fused_args(const gradient_problem *p,
                                                      fdma_tensor dt_proj, fdma_tensor a,
                                                      fdma_bias_form form, const fdma_tensor to[5],
                                                      const char *kernel) {
    const problem *x = &p->x;
    return (fdma_attention_backward_args){
        .size = sizeof(fdma_attention_backward_args),
        .dout = p->dout,
        .dlse = p->dlse,
        .out = p->out,
        .lse = p->lse,
        .q = x->q,
        .k = x->k,
        .v = x->v,
        .dt_proj = dt_proj,
        .a = a,
        .key_valid = x->key_valid,
        .starts = x->starts,
        .dq = to[0],
        .dk = to[1],
        .dv = to[2],
        .ddt_proj = to[3],
        .da = to[4],
        .selection = &x->selection,
        .scale = x->scale,
        .softcap = x->softcap,
        .bias_form = form,
        .causal = x->causal,
        .exec = {.kernel = kernel, .threads = 2},
        .kv_used = x->kv_used,
        .dropout = x->dropout,
        .seed = x->seed,
        .offset = x->offset,
        .rng_state = x->rng_state,
    };
}

static inline void check_same_gradients(gradients actual, gradients want) {
    for (int t = 0; t < TEST_COUNT(want.all); t++)
        CHECK_BYTES(actual.all[t].data, want.all[t].data, bytes_of(want.all[t]));
}

/* The last sequence of a problem's batch, alone. */
static inline gradient_problem last_gradient_problem(const gradient_problem *p) {
    return (gradient_problem){
        .x = last_problem(&p->x),
        .out = last_of(p->out),
        .lse = last_of(p->lse),
        .dout = last_of(p->dout),
        .dlse = last_of(p->dlse),
        .deterministic = p->deterministic,
    };
}

static inline gradients last_gradients(gradients all) {
    for (int t = 0; t < TEST_COUNT(all.all); t++)
        all.all[t] = last_of(all.all[t]);
    return all;
}

/* ---- comparison with the reference ---- */

/* The same problem in float64. */
static inline gradient_problem widened_problem(const gradient_problem *p) {
    gradient_problem wide = *p;
    fdma_tensor *const tensors[] = {&wide.x.q, &wide.x.k, &wide.x.v,  &wide.x.bias,
                                    &wide.out, &wide.lse, &wide.dout, &wide.dlse};
    for (int t = 0; t < TEST_COUNT(tensors); t++)
        *tensors[t] = widened(*tensors[t]);
    wide.x.dtype = FDMA_FLOAT64;
    return wide;
}

/* The gradients in float64, from the same inputs. */
static inline gradients reference_gradients(const gradient_problem *p) {
    const gradient_problem wide = widened_problem(p);
    fdma_backward_args args = gradient_args(&wide, "reference");
    CHECK_OK(run_backward(&args));
    return gradient_outputs(&args);
}

/* The plain evaluation ("reference/float32") in the dtype of the problem. */
static inline gradients plain_gradients(const gradient_problem *p) {
    fdma_backward_args args = gradient_args(p, "reference/float32");
    CHECK_OK(run_backward(&args));
    return gradient_outputs(&args);
}

static inline double larger_or_nan(double x, double y) { return y > x || isnan(y) ? y : x; }

static inline double largest_of(fdma_tensor tensor) {
    double largest = 0;
    for (int64_t i = 0; i < count_of(tensor); i++)
        largest = larger_or_nan(largest, fabs(load_double(tensor.data, tensor.dtype, i)));
    return largest;
}

static inline double largest_difference(fdma_tensor x, fdma_tensor y) {
    double largest = 0;
    CHECK_INT(count_of(x), count_of(y));
    for (int64_t i = 0; i < count_of(x); i++) {
        const double error = load_double(x.data, x.dtype, i) - load_double(y.data, y.dtype, i);
        largest = larger_or_nan(largest, fabs(error));
    }
    return largest;
}

/* The steps of a dtype do not shrink below its normal numbers. */
static inline double gradient_floor(fdma_dtype dtype) {
    return dtype == FDMA_FLOAT16 ? 0x1p-24 : 0x1p-126;
}

/* Uses the tolerance of `fdma check` for results of this dtype: twice the largest error of the
 * plain evaluation, and a rounding step. */
static inline void check_like_plain(fdma_tensor actual, fdma_tensor want, fdma_tensor plain,
                                    fdma_dtype dtype) {
    const double error = largest_difference(plain, want);
    CHECK_NEAR(largest_difference(actual, want), 0,
               2 * error + step_of(dtype) * largest_of(want) + gradient_floor(dtype));
}

static inline void expect_gradients(const gradient_problem *p) {
    if (!p->expected->known)
        *p->expected = (expected_gradients){1, reference_gradients(p), plain_gradients(p)};
}

static inline void check_expected(const gradient_problem *p, gradients actual) {
    expect_gradients(p);
    const gradients want = p->expected->reference, plain = p->expected->plain;
    for (int t = 0; t < TEST_COUNT(want.all); t++)
        check_like_plain(actual.all[t], want.all[t], plain.all[t], actual.all[t].dtype);
}

static inline void check_near(fdma_tensor actual, fdma_tensor want, double relative) {
    CHECK_NEAR(largest_difference(actual, want), 0, relative * largest_of(want) + DBL_MIN);
}
