/* Attention, one row after another. */
#pragma once

#include "reference/logit.h"

typedef struct row_scratch {
    real *weights; /* [kv_len] */
    real *q, *key; /* [head_dim]: the row's query, and k or v of a key */
    real *out;     /* [head_dim] */
} row_scratch;

static row_scratch take_row(const fdma_problem *problem, fdma_arena *arena) {
    const int64_t dim = problem->head_dim;
    return (row_scratch){take_reals(arena, problem->kv_len), take_reals(arena, dim),
                         take_reals(arena, dim), take_reals(arena, dim)};
}

/* The weights exp(s[j] - row_max) of one row's keys, 0 for keys that it does not keep. Returns
 * their sum plus the weight of the sink logit: 0 for an empty row, NaN if a kept logit is NaN or
 * +inf. */
static real weigh_keys(const fdma_problem *problem, int64_t b, int64_t i, int64_t h,
                       const row_scratch *row, real *row_max) {
    const int64_t g = h / problem->group;
    const real sink = sink_logit_of(problem, h);
    real *const weights = row->weights;
    real sum = 0;
    *row_max = sink;
    load_row(row->q, &problem->q, offset_of(&problem->q, b, i, h), problem->head_dim);
    for (int64_t j = 0; j < problem->kv_len; j++) {
        weights[j] = -infinity;
        if (attends_to(problem, b, h, i, j)) {
            load_key(row->key, problem, &problem->k, &problem->k_carried, b, j, g);
            weights[j] = logit_of(problem, row->q, row->key, b, h, i, j).value;
        }
        *row_max = isnan(weights[j]) || weights[j] > *row_max ? weights[j] : *row_max;
        if (isnan(*row_max))
            return *row_max;
    }
    if (sink != -infinity)
        sum += exp(sink - *row_max); // NaN if the sink logit is NaN or +inf
    for (int64_t j = 0; j < problem->kv_len; j++) {
        weights[j] = weights[j] == -infinity ? 0 : exp(weights[j] - *row_max); // -inf - -inf is NaN
        sum += weights[j];
    }
    return sum;
}

static void attend_row(const fdma_problem *problem, int64_t b, int64_t i, int64_t h,
                       const row_scratch *row) {
    const int64_t g = h / problem->group, p = query_position(problem, i);
    real row_max;
    const real sum = weigh_keys(problem, b, i, h, row, &row_max);
    const row_code code = row_code_of(problem, b, h, p);
    for (int64_t d = 0; d < problem->head_dim; d++)
        row->out[d] = isnan(sum) ? sum : 0;
    for (int64_t j = 0; j < problem->kv_len && sum > 0; j++) {
        if (!attends_to(problem, b, h, i, j))
            continue;
        const bool dropped = is_dropped(problem, code, b, g, j, p);
        const real weight = rounded(problem->dtype, row->weights[j] / sum);
        const real probability = rounded(problem->dtype, after_dropout(problem, dropped, weight));
        load_key(row->key, problem, &problem->v, &problem->v_carried, b, j, g);
        for (int64_t d = 0; d < problem->head_dim; d++)
            row->out[d] += probability * row->key[d];
    }
    for (int64_t d = 0; d < problem->head_dim; d++)
        store(&problem->out, offset_of(&problem->out, b, i, h) + d, row->out[d]);
    if (is_present(&problem->lse))
        store(&problem->lse, offset_of(&problem->lse, b, h, i), row_max + log(sum));
}

static size_t forward_workspace(const fdma_problem *problem) {
    fdma_arena arena = {0};
    take_row(problem, &arena);
    return fdma_arena_size(&arena);
}

static fdma_status run_forward(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const row_scratch row = take_row(problem, &arena);
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t h = 0; h < problem->q_heads; h++)
            for (int64_t i = 0; i < problem->q_len; i++)
                attend_row(problem, b, i, h, &row);
    return FDMA_OK;
}
