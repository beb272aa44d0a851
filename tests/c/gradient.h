/* gradient.h - a backward problem for the C tests: what it is given, its results, and what they
 * should be by the header's formula, in double. */
#ifndef GRADIENT_H
#define GRADIENT_H

#include "problem.h"

typedef struct gradient_problem {
    problem x; /* with its selection */
    fdma_tensor out, lse, dout;
    fdma_tensor dlse; /* may be absent */
    int deterministic;
} gradient_problem;

typedef struct gradients {
    fdma_tensor dq, dk, dv, dbias;
} gradients;

/* One element: its value, and the sum of the magnitudes that it is the sum of, which is what errors
 * are relative to. */
typedef struct gradient_element {
    double value, size;
} gradient_element;

typedef struct expected_gradients {
    gradient_element *dq, *dk, *dv, *dbias;
} expected_gradients;

/* Out and lse of a problem in its type, by whatever kernel takes it: gradients are judged by what
 * they are given. */
static inline attended gradient_forward(const problem *x) {
    fdma_forward_args args = problem_args(x, NULL);
    if (x->dtype == FDMA_FLOAT64) {
        args.lse = new_output(FDMA_FLOAT64, x->batch, x->q_heads, x->q_len, -1);
    }
    CHECK_OK(run_forward(&args));
    return (attended){.out = args.out, .lse = args.lse};
}

/* The caller's problem has its tensors and its selection. */
static inline gradient_problem gradient_of(const problem *x, int with_dlse) {
    uint64_t state = 77;
    const attended done = gradient_forward(x);
    gradient_problem p = {.x = *x, .out = done.out, .lse = done.lse};
    p.dout = new_tensor(x->dtype, x->batch, x->q_len, x->q_heads, x->head_dim);
    fill_random(p.dout, &state, 1);
    if (with_dlse) {
        p.dlse = new_tensor(p.lse.dtype, x->batch, x->q_heads, x->q_len, -1);
        fill_random(p.dlse, &state, 1);
    }
    return p;
}

/* Calls get a selection by address: the problem has to outlive them. */
static inline fdma_backward_args gradient_args(const gradient_problem *p, const char *kernel) {
    const problem *x = &p->x;
    fdma_tensor dbias = {0};
    if (x->bias.rank > 0) {
        dbias = new_output(x->bias.dtype, x->batch, x->kv_heads, x->kv_len, -1);
    }
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
        .dq = new_output(x->dtype, x->batch, x->q_len, x->q_heads, x->head_dim),
        .dk = new_output(x->dtype, x->batch, x->kv_len, x->kv_heads, x->head_dim),
        .dv = new_output(x->dtype, x->batch, x->kv_len, x->kv_heads, x->head_dim),
        .dbias = dbias,
        .selection = x->window >= 0 ? &x->selection : NULL,
        .scale = x->scale,
        .softcap = x->softcap,
        .causal = x->causal,
        .deterministic = p->deterministic,
        .exec = {.kernel = kernel, .threads = 1},
    };
}

static inline gradients gradient_outputs(const fdma_backward_args *args) {
    return (gradients){args->dq, args->dk, args->dv, args->dbias};
}

static inline gradients gradient_run(const gradient_problem *p, const char *kernel,
                                     int32_t threads) {
    fdma_backward_args args = gradient_args(p, kernel);
    args.exec.threads = threads;
    CHECK_OK(run_backward(&args));
    return gradient_outputs(&args);
}

static inline void check_same_gradients(gradients actual, gradients want) {
    CHECK_BYTES(actual.dq.data, want.dq.data, bytes_of(want.dq));
    CHECK_BYTES(actual.dk.data, want.dk.data, bytes_of(want.dk));
    CHECK_BYTES(actual.dv.data, want.dv.data, bytes_of(want.dv));
    CHECK_BYTES(actual.dbias.data, want.dbias.data, bytes_of(want.dbias));
}

/* The last sequence of a problem's batch, by itself. */
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
    return (gradients){last_of(all.dq), last_of(all.dk), last_of(all.dv), last_of(all.dbias)};
}

static inline gradient_element *new_elements(int64_t count) {
    return test_alloc((size_t)count * sizeof(gradient_element));
}

static inline void add_term(gradient_element *to, double value, double size) {
    to->value += value;
    to->size += size;
}

/* <x, y> of rows of contiguous tensors. */
static inline gradient_element dot_rows(fdma_tensor x, int64_t at_x, fdma_tensor y, int64_t at_y,
                                        int64_t count) {
    gradient_element sum = {0, 0};
    for (int64_t d = 0; d < count; d++) {
        const double term =
            load_double(x.data, x.dtype, at_x + d) * load_double(y.data, y.dtype, at_y + d);
        add_term(&sum, term, fabs(term));
    }
    return sum;
}

/* A kept key's part in the gradients of a row; `carried` is the row's D. The softcap's slope is a
 * difference too: errors are relative to 1. */
static inline void expect_key(const gradient_problem *p, const expected_gradients *to, int64_t q,
                              int64_t k, int64_t key, double lse, gradient_element carried) {
    const problem *x = &p->x;
    const int64_t dim = x->head_dim;
    const double scale = x->scale > 0 ? x->scale : 1 / sqrt((double)dim);
    double s = scale * dot_rows(x->q, q, x->k, k, dim).value, slope = 1;
    if (x->softcap > 0) {
        const double capped = x->softcap * tanh(s / x->softcap);
        slope = 1 - capped * capped / (x->softcap * x->softcap);
        s = capped;
    }
    s += x->bias.rank > 0 ? load_double(x->bias.data, x->bias.dtype, key) : 0;
    const gradient_element dweight = dot_rows(p->dout, q, x->v, k, dim);
    const double weight = exp(s - lse), ds = weight * (dweight.value - carried.value);
    const double size = weight * (dweight.size + carried.size), step = slope * scale;
    add_term(&to->dbias[key], ds, size);
    for (int64_t d = 0; d < dim; d++) {
        const double q_d = load_double(x->q.data, x->dtype, q + d);
        const double k_d = load_double(x->k.data, x->dtype, k + d);
        const double dv = weight * load_double(p->dout.data, x->dtype, q + d);
        add_term(&to->dq[q + d], step * ds * k_d, scale * size * fabs(k_d));
        add_term(&to->dk[k + d], step * ds * q_d, scale * size * fabs(q_d));
        add_term(&to->dv[k + d], dv, fabs(dv));
    }
}

static inline expected_gradients expect_gradients(const gradient_problem *p) {
    const problem *x = &p->x;
    const int64_t dim = x->head_dim;
    const expected_gradients to = {new_elements(count_of(x->q)), new_elements(count_of(x->k)),
                                   new_elements(count_of(x->k)),
                                   new_elements(x->batch * x->kv_heads * x->kv_len)};
    for (int64_t at = 0; at < x->batch * x->q_heads * x->q_len; at++) {
        const int64_t i = at % x->q_len, h = at / x->q_len % x->q_heads;
        const int64_t b = at / x->q_len / x->q_heads, g = h / (x->q_heads / x->kv_heads);
        const int64_t q = ((b * x->q_len + i) * x->q_heads + h) * dim;
        const double lse = load_double(p->lse.data, p->lse.dtype, at);
        const double dlse = p->dlse.rank > 0 ? load_double(p->dlse.data, p->dlse.dtype, at) : 0;
        gradient_element carried = dot_rows(p->dout, q, p->out, q, dim);
        add_term(&carried, -dlse, fabs(dlse));
        for (int64_t j = 0; j < x->kv_len && lse > -(double)INFINITY; j++) {
            if (problem_keeps(x, b, g, i, j)) {
                expect_key(p, &to, q, ((b * x->kv_len + j) * x->kv_heads + g) * dim,
                           (b * x->kv_heads + g) * x->kv_len + j, lse, carried);
            }
        }
    }
    return to;
}

/* Errors relative to `size`: sums of float32, of products over head_dim and then over keys or over
 * queries and their group; weights and gradients of logits rounded to the type, and the result. */
static inline double gradient_unit(const problem *x) {
    const int64_t rows = x->q_len * (x->q_heads / x->kv_heads);
    const int64_t terms = 2 * (x->head_dim + (rows > x->kv_len ? rows : x->kv_len) + 8);
    return (double)terms * (double)FLT_EPSILON + 4 * step_of(x->dtype);
}

/* Below its normal numbers a type's steps do not shrink. */
static inline double gradient_floor(fdma_dtype dtype) {
    return dtype == FDMA_FLOAT16 ? 0x1p-24 : 0x1p-126;
}

static inline void check_elements(fdma_tensor actual, const gradient_element *want, double unit,
                                  double floor) {
    for (int64_t i = 0; i < count_of(actual); i++) {
        CHECK_NEAR(load_double(actual.data, actual.dtype, i), want[i].value,
                   unit * want[i].size + floor);
    }
}

/* What a 16-bit type makes of weights and gradients of logits below its normal numbers, over all
 * terms of a sum. */
static inline double gradient_tiny(const problem *x) {
    const int64_t rows = x->q_len * (x->q_heads / x->kv_heads);
    return 4 * (double)(rows > x->kv_len ? rows : x->kv_len) * gradient_floor(x->dtype);
}

static inline void check_expected(const gradient_problem *p, gradients actual) {
    const expected_gradients want = expect_gradients(p);
    const double unit = gradient_unit(&p->x), tiny = gradient_tiny(&p->x);
    check_elements(actual.dq, want.dq, unit, tiny);
    check_elements(actual.dk, want.dk, unit, tiny);
    check_elements(actual.dv, want.dv, unit, tiny);
    check_elements(actual.dbias, want.dbias, unit, tiny);
}

#endif /* GRADIENT_H */
