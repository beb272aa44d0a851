/* The logit of a query and a key. */
#pragma once

#include "reference/real.h"

/* The row of a key in a tensor shaped as k, or its element in one shaped as bias. */
typedef struct key_row {
    const fdma_tensor *tensor;
    int64_t offset;
} key_row;

static inline key_row row_of_key(const fdma_problem *problem, const fdma_tensor *own,
                                 const fdma_tensor *carried, int64_t b, int64_t j, int64_t g) {
    if (j >= problem->carried_len)
        return (key_row){own, offset_of(own, b, j - problem->carried_len, g)};
    const key_indices at = indices_of_carried(problem, b, j);
    return (key_row){carried, offset_of(carried, at.first, at.row, g)};
}

static inline void load_key(real *row, const fdma_problem *problem, const fdma_tensor *own,
                            const fdma_tensor *carried, int64_t b, int64_t j, int64_t g) {
    const key_row key = row_of_key(problem, own, carried, b, j, g);
    load_row(row, key.tensor, key.offset, problem->head_dim);
}

/* The element of key j in a tensor shaped as bias. */
static inline key_row number_of_key(const fdma_problem *problem, const fdma_tensor *own,
                                    const fdma_tensor *carried, int64_t b, int64_t g, int64_t j) {
    const key_storage storage = storage_of_key(problem, own, carried, j);
    return (key_row){storage.tensor, offset_of(storage.tensor, b, g, storage.index)};
}

/* The sink logit of a query head; -inf if the call has none. */
static inline real sink_logit_of(const fdma_problem *problem, int64_t h) {
    const fdma_tensor *const sink = &problem->sink_logit;
    return is_present(sink) ? load(sink, offset_of(sink, h, 0, 0)) : -infinity;
}

/* x of a pair after dropout: 0, even for NaN, if the pair is dropped; else scaled up. */
static inline real after_dropout(const fdma_problem *problem, bool dropped, real x) {
    return dropped ? 0 : x * (real)dropout_scale(problem->dropout.threshold);
}

typedef struct logit {
    real value;
    real slope; /* derivative of the softcap; 1 without one */
} logit;

/* The logit of query i of head h, whose row is q, and of key j, whose row is k. */
static inline logit logit_of(const fdma_problem *problem, const real *q, const real *k, int64_t b,
                             int64_t h, int64_t i, int64_t j) {
    const fdma_tensor *const pairs = &problem->attn_bias;
    const fdma_dtype dtype = problem->dtype;
    const real scale = (real)problem->scale, cap = (real)problem->softcap;
    real s = rounded(dtype, rounded(dtype, dot(q, k, problem->head_dim)) * scale), slope = 1;
    if (cap > 0) {
        const real capped = rounded(dtype, tanh(s / cap));
        s = rounded(dtype, cap * capped);
        slope = rounded(dtype, 1 - capped * capped);
    }
    if (is_present(&problem->bias)) {
        const key_row bias = number_of_key(problem, &problem->bias, &problem->bias_carried, b,
                                           h / problem->group, j);
        s += load(bias.tensor, bias.offset);
    }
    if (is_present(pairs))
        s += load(pairs, offset_of_pair(problem, pairs, b, h, i, j));
    return (logit){rounded(dtype, s), slope};
}
