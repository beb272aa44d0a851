/* gradient_properties.h - properties of every backward kernel, on the CPU and on a device: each is
 * checked on one problem. Also the cases of tests/cases.def that are hard for backward kernels. */
#pragma once

#include "cases.h"
#include "gradient.h"

static const char *const gradient_cases[] = {
    "scores/tied",    "scores/rising",    "scores/falling",   "scores/crown",   "scores/crown-wide",
    "scores/saw",     "window/1",         "window/1-tied",    "window/3-saw",   "window/len-1",
    "window/len",     "later/tied",       "head-dim/8",       "head-dim/192",   "head-dim/256",
    "long/one-query", "dense/one-query",  "dense/full-65",    "dense/pad-left", "dense/pad-holes",
    "dense/softcap",  "dense/empty-rows", "padding/left",     "padding/holes",  "global/more",
    "global/padding", "global/causal",    "softcap/selected", "group/1",        "group/2",
    "group/3",        "group/4",          "group/5",          "group/6",        "group/7",
    "group/8",        "group/11",         "group/16",         "empty/queries",  "empty/keys-dense",
};

static inline bool gradient_is_taken(const gradient_problem *p, const char *kernel) {
    fdma_backward_args args = gradient_args(p, kernel);
    return call_takes(operation_backward, &args);
}

static inline void check_right(const gradient_problem *p, const char *kernel) {
    check_expected(p, gradient_run(p, kernel, 1));
}

/* The initial contents of outputs and workspace and the number of threads do not change a bit. */
static inline void check_repeats(const gradient_problem *p, const char *kernel) {
    static const unsigned char fills[] = {0x00, 0x7f, 0xff};
    const unsigned char before = test_backend.fill;
    const int32_t most_threads = is_device_kernel(kernel) ? 1 : is_reference(kernel) ? 2 : 5;
    const gradients want = gradient_run(p, kernel, 1);
    for (int run = 0; run < TEST_COUNT(fills); run++) {
        fdma_backward_args args = gradient_args(p, kernel);
        const gradients outputs = gradient_outputs(&args);
        for (int i = 0; i < TEST_COUNT(outputs.all); i++)
            memset(outputs.all[i].data, fills[run], bytes_of(outputs.all[i]));
        test_backend.fill = fills[run];
        CHECK_OK(run_backward(&args));
        check_same_gradients(gradient_outputs(&args), want);
    }
    test_backend.fill = before;
    for (int32_t threads = 2; threads <= most_threads; threads++)
        check_same_gradients(gradient_run(p, kernel, threads), want);
}

static inline void check_alone(const gradient_problem *p, const char *kernel) {
    if (p->x.batch < 2)
        return;
    const gradient_problem alone = last_gradient_problem(p);
    const gradients want = last_gradients(gradient_run(p, kernel, 2));
    check_same_gradients(gradient_run(&alone, kernel, 2), want);
}

/* ---- accumulate ---- */

/* Checks held + gradient. A kernel may add the gradient in two terms: then held plus one term is
 * rounded, then the whole sum. The gradient in `alone` was rounded, too. */
static inline void check_added(fdma_tensor sum, fdma_tensor held, fdma_tensor alone) {
    const double step = step_of(sum.dtype), largest = largest_of(alone);
    for (int64_t i = 0; i < count_of(sum); i++) {
        const double x = load_double(held.data, held.dtype, i);
        const double y = load_double(alone.data, alone.dtype, i);
        CHECK_NEAR(load_double(sum.data, sum.dtype, i), x + y,
                   step * (fabs(x) + fabs(x + y) + largest) + 3 * gradient_floor(sum.dtype));
    }
}

static inline void check_accumulated(const gradient_problem *p, const char *kernel) {
    uint64_t state = 3;
    const gradients alone = gradient_run(p, kernel, 1);
    fdma_backward_args args = gradient_args(p, kernel);
    const gradients sums = gradient_outputs(&args);
    fdma_tensor held[3];
    for (int i = 0; i < 3; i++) {
        fill_random(sums.all[i], &state, 1);
        held[i] = copy_tensor(sums.all[i]);
    }
    args.accumulate = 1;
    CHECK_OK(run_backward(&args));
    for (int i = 0; i < 3; i++)
        check_added(sums.all[i], held[i], alone.all[i]);
    CHECK(same_tensor(args.dbias, alone.dbias)); /* never added to */
}

/* ---- absent outputs and inputs ---- */

static inline void check_optional(const gradient_problem *p, const char *kernel) {
    const gradients want = gradient_run(p, kernel, 1);
    fdma_backward_args args = gradient_args(p, kernel);
    args.dbias = (fdma_tensor){0};
    CHECK_OK(run_backward(&args));
    CHECK(same_tensor(args.dq, want.dq) && same_tensor(args.dk, want.dk));
    CHECK(same_tensor(args.dv, want.dv));

    /* Without a bias, dbias is still written. */
    gradient_problem without = *p;
    without.x.bias = (fdma_tensor){0};
    without.expected = test_alloc(sizeof *without.expected);
    const attended done = gradient_forward(&without.x);
    without.out = done.out;
    without.lse = done.lse;
    check_right(&without, kernel);
}

/* ---- strides ---- */

static inline void check_layouts(const gradient_problem *p, const char *kernel) {
    static const int64_t gaps[] = {24, 24, 24, 5}; // elements; 24 keep rows aligned to 16 bytes
    const gradients want = gradient_run(p, kernel, 1);
    gradient_problem other = *p;
    fdma_tensor *const swapped[] = {&other.x.q, &other.x.k, &other.x.v, &other.out, &other.dout};
    for (int i = 0; i < TEST_COUNT(swapped); i++)
        *swapped[i] = heads_first(*swapped[i]);
    check_same_gradients(gradient_run(&other, kernel, 1), want);

    fdma_tensor *const spread[] = {
        &other.x.bias,           &other.x.key_valid, &other.x.selection.expiry,
        &other.x.selection.slot, &other.lse,         &other.dlse};
    for (int i = 0; i < TEST_COUNT(spread); i++)
        *spread[i] = with_gaps(*spread[i], 3);
    fdma_backward_args args = gradient_args(&other, kernel);
    fdma_tensor *const outputs[] = {&args.dq, &args.dk, &args.dv, &args.dbias};
    for (int i = 0; i < TEST_COUNT(outputs); i++)
        *outputs[i] = with_gaps(*outputs[i], gaps[i]);
    CHECK_OK(run_backward(&args));
    for (int i = 0; i < TEST_COUNT(outputs); i++)
        check_gapped(*outputs[i], want.all[i], gaps[i]);
}

/* A tensor q or dout that repeats index 0 along some axes gives the same bits as a copy in full. */
static inline void check_repeated(const gradient_problem *p, const char *kernel, bool rows) {
    gradient_problem repeated = *p;
    fdma_tensor *const inputs[] = {&repeated.x.q, &repeated.dout};
    for (int i = 0; i < TEST_COUNT(inputs); i++)
        for (int axis = 0; axis < 3; axis++)
            if ((axis == 1) == rows)
                inputs[i]->stride[axis] = 0;
    if (!gradient_is_taken(&repeated, kernel))
        return;
    gradient_problem copied = repeated;
    copied.x.q = gathered(repeated.x.q);
    copied.dout = gathered(repeated.dout);
    check_same_gradients(gradient_run(&repeated, kernel, 1), gradient_run(&copied, kernel, 1));
}

static inline void check_repeats_of_inputs(const gradient_problem *p, const char *kernel) {
    check_repeated(p, kernel, false);
    check_repeated(p, kernel, true);
}

/* ---- keys that no query keeps ---- */

static inline void check_zero(fdma_tensor tensor, int64_t first, int64_t count) {
    for (int64_t i = first; i < first + count; i++)
        CHECK(load_double(tensor.data, tensor.dtype, i) == 0);
}

static inline void check_unread_zero(const problem *x, gradients got) {
    for (int64_t key = 0; key < x->batch * x->kv_heads * x->kv_len; key++) {
        const int64_t j = key % x->kv_len, g = key / x->kv_len % x->kv_heads;
        const int64_t b = key / x->kv_len / x->kv_heads;
        const int64_t row = ((b * x->kv_len + j) * x->kv_heads + g) * x->head_dim;
        if (!is_read(x, b, g, j)) {
            check_zero(got.dk, row, x->head_dim);
            check_zero(got.dv, row, x->head_dim);
            check_zero(got.dbias, key, 1);
        }
    }
}

static inline void check_unread(const char *name, const char *kernel, fdma_dtype dtype) {
    static const float poisons[] = {NAN, INFINITY, -INFINITY};
    problem x = unread_problem(name, dtype);
    gradient_problem p = gradient_of(&x, 1);
    p.deterministic = 1;
    if (!gradient_is_taken(&p, kernel))
        return;
    const gradients clean = gradient_run(&p, kernel, 1);
    check_unread_zero(&x, clean);
    for (int64_t i = 0; i < count_of(clean.dq); i++)
        CHECK(isfinite(load_double(clean.dq.data, dtype, i)));
    for (int i = 0; i < TEST_COUNT(poisons); i++) {
        CHECK(poison_unread(&x, poisons[i]) > 0); /* else the test shows nothing */
        check_same_gradients(gradient_run(&p, kernel, 2), clean);
    }
}

/* The same poison in a key that is read changes the results. */
static inline void check_read_shows(const char *kernel, fdma_dtype dtype) {
    problem x = unread_problem(unread_cases[0], dtype);
    gradient_problem p = gradient_of(&x, 1);
    p.deterministic = 1;
    const gradients clean = gradient_run(&p, kernel, 1);
    int64_t j = 0;
    while (j < x.kv_len && !is_read(&x, 0, 0, j))
        j++;
    if (CHECK(j < x.kv_len)) {
        spoil_key(x.v, 0, j, 0, NAN);
        CHECK(!same_tensor(gradient_run(&p, kernel, 1).dq, clean.dq));
    }
}

/* ---- rows that are NaN ---- */

/* A row whose lse is NaN has no finite gradient, and gives no finite gradient to the keys that it
 * keeps. All other gradients are as if the row did not exist. */
static inline void check_nan_row(const gradient_problem *p, const char *kernel) {
    const problem *x = &p->x;
    const int64_t i = 2 * x->q_len / 3, h = x->q_heads - 1, g = x->kv_heads - 1, dim = x->head_dim;
    if (x->batch > 1 || x->q_len == 0 || !keeps_any(x, 0, g, i))
        return;
    const gradients clean = gradient_run(p, kernel, 1);
    gradient_problem spoilt = *p;
    spoilt.lse = copy_tensor(p->lse);
    spoilt.out = copy_tensor(p->out);
    ((float *)spoilt.lse.data)[h * x->q_len + i] = NAN;
    for (int64_t d = 0; d < dim; d++)
        store_float(spoilt.out.data, x->dtype, (i * x->q_heads + h) * dim + d, NAN);
    const gradients got = gradient_run(&spoilt, kernel, 1);
    for (int64_t j = 0; j < x->kv_len; j++) {
        const int kept = problem_keeps(x, 0, g, i, j);
        for (int64_t d = 0; d < dim; d++) {
            const int64_t at = (j * x->kv_heads + g) * dim + d;
            CHECK(isnan(load_double(got.dk.data, x->dtype, at)) == kept);
            CHECK(isnan(load_double(got.dv.data, x->dtype, at)) == kept);
        }
        CHECK(isnan(((const float *)got.dbias.data)[g * x->kv_len + j]) == kept);
    }
    for (int64_t at = 0; at < x->q_len * x->q_heads * dim; at++) {
        const int same = at / dim != i * x->q_heads + h;
        const double now = load_double(got.dq.data, x->dtype, at);
        CHECK(same ? now == load_double(clean.dq.data, x->dtype, at) : isnan(now));
    }
}

/* ---- corrupt selections ---- */

/* A call gives wrong numbers or, on the CPU, is refused. It touches no memory outside of its
 * tensors: guards and sanitizers check that. */
static inline void run_corrupt(const gradient_problem *p, const char *kernel) {
    uint64_t state = 77;
    gradient_problem wrong = *p;
    wrong.x.selection.expiry = copy_tensor(p->x.selection.expiry);
    wrong.x.selection.slot = copy_tensor(p->x.selection.slot);
    for (int how = 0; how < corruption_count * corruption_count && p->x.window >= 0; how++) {
        corrupt(wrong.x.selection.expiry, (corruption)(how / corruption_count), &state);
        corrupt(wrong.x.selection.slot, (corruption)(how % corruption_count), &state);
        fdma_backward_args args = gradient_args(&wrong, kernel);
        const fdma_status status = run_backward(&args);
        CHECK(status == FDMA_OK || (test_backend.run == NULL && status == FDMA_INVALID_ARGUMENT));
    }
}

/* Later calls are not harmed either. */
static inline void check_corrupt(const gradient_problem *p, const char *kernel) {
    const gradients want = gradient_run(p, kernel, 1);
    run_corrupt(p, kernel);
    check_same_gradients(gradient_run(p, kernel, 1), want);
}
