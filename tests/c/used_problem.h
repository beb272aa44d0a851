/* used_problem.h - problems in which only the first kv_used keys of each sequence exist, and calls
 * of the kernel "reference" on each sequence cut to those keys. */
#pragma once

#include "backend.h"
#include "gradient.h"
#include "scores.h"

typedef struct used_shape {
    int64_t batch, q_len, kv_len, group, kv_heads, head_dim;
    int64_t window, recent, sinks; /* window -1: dense */
    fdma_scope scope;
    int causal;
    double softcap;
    int padded;
    int equal; /* true if every sequence has equally many keys */
} used_shape;

/* The number of existing keys of each sequence: none, one, fewer than queries, as many as queries,
 * all, or any number. */
static inline fdma_tensor new_used(const used_shape *shape, uint64_t *state) {
    const fdma_tensor tensor = new_tensor(FDMA_INT32, shape->batch, -1, -1, -1);
    const int64_t len = shape->kv_len, queries = shape->q_len < len ? shape->q_len : len;
    const int64_t first = random_below(state, 6);
    for (int64_t b = 0; b < shape->batch; b++) {
        const int64_t choices[] = {0,       1,   random_below(state, queries),
                                   queries, len, random_below(state, len + 1)};
        const int64_t choice = shape->equal ? 5 : (first + b) % TEST_COUNT(choices);
        ((int32_t *)tensor.data)[b] =
            (int32_t)(shape->equal && b > 0 ? ((int32_t *)tensor.data)[0] : choices[choice]);
    }
    return tensor;
}

static inline int64_t used_by(const problem *x, int64_t b) {
    return ((const int32_t *)x->kv_used.data)[b];
}

static inline problem used_problem(const used_shape *shape, fdma_dtype dtype, uint64_t seed) {
    problem x = {.batch = shape->batch,
                 .q_len = shape->q_len,
                 .kv_len = shape->kv_len,
                 .q_heads = shape->group * shape->kv_heads,
                 .kv_heads = shape->kv_heads,
                 .head_dim = shape->head_dim,
                 .window = shape->window,
                 .recent = shape->recent,
                 .sinks = shape->sinks,
                 .scope = shape->scope,
                 .causal = shape->causal,
                 .softcap = shape->softcap,
                 .dtype = dtype};
    problem_fill(&x, seed);
    fill_kinds(x.score, 1 + random_below(&seed, 200), &seed);
    x.kv_used = new_used(shape, &seed);
    if (x.window >= 0 && x.scope == FDMA_SCOPE_CAUSAL && random_below(&seed, 3) == 0)
        x.gap = 0.25 * (double)(1 + random_below(&seed, 8));
    if (shape->padded)
        x.key_valid = new_padding(x.batch, x.kv_len, &seed);
    return x;
}

static inline void poison_rest(problem *x) {
    for (int64_t row = 0; row < x->batch * x->kv_heads; row++) {
        const int64_t b = row / x->kv_heads, g = row % x->kv_heads;
        for (int64_t j = used_by(x, b); j < x->kv_len; j++) {
            spoil_key(x->k, b, j, g, NAN);
            spoil_key(x->v, b, j, g, NAN);
            ((float *)x->score.data)[row * x->kv_len + j] = NAN;
            ((float *)x->bias.data)[row * x->kv_len + j] = NAN;
            if (x->window >= 0) {
                ((int32_t *)x->selection.expiry.data)[row * x->kv_len + j] = INT32_MAX;
                ((int32_t *)x->selection.slot.data)[row * x->kv_len + j] = INT32_MIN;
            }
        }
    }
}

/* Gives the problem a copy of its selection that is corrupt behind the keys that exist. */
static inline void corrupt_rest(problem *x, corruption how, uint64_t *state) {
    fdma_tensor *const tensors[] = {&x->selection.expiry, &x->selection.slot};
    for (int t = 0; t < TEST_COUNT(tensors); t++) {
        const fdma_tensor sound = *tensors[t];
        *tensors[t] = copy_tensor(sound);
        corrupt(*tensors[t], how, state);
        for (int64_t row = 0; row < x->batch * x->kv_heads; row++)
            memcpy((int32_t *)tensors[t]->data + row * x->kv_len,
                   (const int32_t *)sound.data + row * x->kv_len,
                   (size_t)used_by(x, row / x->kv_heads) * sizeof(int32_t));
    }
}

/* ---- cut calls ---- */

/* A range of an axis; an absent tensor stays absent. */
static inline fdma_tensor axis_range(fdma_tensor tensor, int axis, int64_t first, int64_t count) {
    if (tensor.rank > 0) {
        tensor.data =
            (char *)tensor.data + (size_t)(first * tensor.stride[axis]) * dtype_size(tensor.dtype);
        tensor.shape[axis] = count;
    }
    return tensor;
}

/* The number of queries at the position of an existing key. Only these can be in a cut call with
 * causal scope. */
static inline int64_t queries_of(const problem *x, int64_t b) {
    const int64_t used = used_by(x, b);
    return x->causal && used < x->q_len ? used : x->q_len;
}

static inline problem cut_sequence(const problem *x, int64_t b) {
    problem cut = problem_sequence(x, b);
    cut.kv_len = used_by(x, b);
    cut.q_len = queries_of(x, b);
    cut.kv_used = (fdma_tensor){0};
    cut.q = axis_range(cut.q, 1, x->q_len - cut.q_len, cut.q_len);
    cut.k = axis_range(cut.k, 1, 0, cut.kv_len);
    cut.v = axis_range(cut.v, 1, 0, cut.kv_len);
    cut.score = axis_range(sequence_of(x->score, b), 2, 0, cut.kv_len);
    cut.bias = axis_range(cut.bias, 2, 0, cut.kv_len);
    cut.key_valid = axis_range(cut.key_valid, 1, 0, cut.kv_len);
    cut.selection.expiry = axis_range(cut.selection.expiry, 2, 0, cut.kv_len);
    cut.selection.slot = axis_range(cut.selection.slot, 2, 0, cut.kv_len);
    cut.selection.kv_len = cut.kv_len;
    return cut;
}

/* The elements of a tensor for the queries of the cut sequence, which are along `axis`. */
static inline fdma_tensor own_queries(fdma_tensor tensor, const problem *cut, int64_t b, int axis) {
    return axis_range(sequence_of(tensor, b), axis,
                      tensor.rank > 0 ? tensor.shape[axis] - cut->q_len : 0, cut->q_len);
}

/* The value is converted once, because conversions to 16 bits are slow. */
static inline void fill_tensor_with(fdma_tensor tensor, double value) {
    const size_t size = dtype_size(tensor.dtype);
    char *const data = tensor.data;
    if (count_of(tensor) == 0)
        return;
    if (tensor.dtype == FDMA_INT32)
        *(int32_t *)tensor.data = (int32_t)value;
    else if (tensor.dtype == FDMA_FLOAT64)
        *(double *)tensor.data = value;
    else
        store_float(tensor.data, tensor.dtype, 0, (float)value);
    for (int64_t i = 1; i < count_of(tensor); i++)
        memcpy(data + (size_t)i * size, data, size);
}

/* Selects in cut calls, and writes the results to the selection of the problem. */
static inline void select_cut(problem *x) {
    if (x->window < 0)
        return;
    fdma_selection all = selection_for(x->score);
    fill_tensor_with(all.slot, -1);
    for (int64_t i = 0; i < count_of(all.expiry); i++)
        ((int32_t *)all.expiry.data)[i] = (int32_t)(i % x->kv_len);
    for (int64_t b = 0; b < x->batch; b++) {
        x->selection = all;
        problem cut = cut_sequence(x, b);
        fdma_select_args args = {.size = sizeof args,
                                 .score = cut.score,
                                 .key_valid = cut.key_valid,
                                 .selection = &cut.selection,
                                 .window = x->window,
                                 .recent = x->recent,
                                 .sinks = x->sinks,
                                 .scope = x->scope,
                                 .exec = {.kernel = "reference"},
                                 .gap = x->gap};
        CHECK_OK(run_select(&args));
        all.window = cut.selection.window, all.recent = cut.selection.recent;
        all.sinks = cut.selection.sinks, all.scope = cut.selection.scope;
        all.gap = cut.selection.gap;
    }
    all.kv_len = x->kv_len;
    x->selection = all;
}

static inline attended attend_cut(const problem *x) {
    const fdma_forward_args whole = problem_args(x, "reference");
    fill_tensor_with(whole.out, 0);
    fill_tensor_with(whole.lse, -INFINITY);
    for (int64_t b = 0; b < x->batch; b++) {
        const problem cut = cut_sequence(x, b);
        fdma_forward_args args = problem_args(&cut, "reference");
        args.out = own_queries(whole.out, &cut, b, 1);
        args.lse = own_queries(whole.lse, &cut, b, 2);
        CHECK_OK(run_forward(&args));
    }
    return (attended){.out = whole.out, .lse = whole.lse};
}

static inline gradients differentiate_cut(const gradient_problem *p, const char *kernel) {
    const problem *const x = &p->x;
    const fdma_backward_args whole = gradient_args(p, kernel);
    const gradients all = gradient_outputs(&whole);
    for (int t = 0; t < TEST_COUNT(all.all); t++)
        fill_tensor_with(all.all[t], 0);
    for (int64_t b = 0; b < x->batch; b++) {
        gradient_problem cut = {.x = cut_sequence(x, b)};
        const problem *const one = &cut.x;
        cut.out = own_queries(p->out, one, b, 1);
        cut.lse = own_queries(p->lse, one, b, 2);
        cut.dout = own_queries(p->dout, one, b, 1);
        cut.dlse = own_queries(p->dlse, one, b, 2);
        fdma_backward_args args = gradient_args(&cut, kernel);
        args.dq = own_queries(all.dq, one, b, 1);
        args.dk = axis_range(sequence_of(all.dk, b), 1, 0, one->kv_len);
        args.dv = axis_range(sequence_of(all.dv, b), 1, 0, one->kv_len);
        args.dbias = axis_range(sequence_of(all.dbias, b), 2, 0, one->kv_len);
        CHECK_OK(run_backward(&args));
    }
    return all;
}

static inline gradient_problem wide_problem(const gradient_problem *p) {
    gradient_problem wide = *p;
    fdma_tensor *const tensors[] = {&wide.x.q, &wide.x.k, &wide.x.v,  &wide.x.bias,
                                    &wide.out, &wide.lse, &wide.dout, &wide.dlse};
    for (int t = 0; t < TEST_COUNT(tensors); t++)
        *tensors[t] = widened(*tensors[t]);
    wide.x.dtype = FDMA_FLOAT64;
    return wide;
}
