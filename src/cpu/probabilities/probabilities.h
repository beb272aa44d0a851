/* The probability of every query and key, from the lse of forward: one row of attention at a time,
 * in double precision. Nothing is skipped or blocked, because the result is for inspection, not for
 * computing. */
#pragma once

#include "cpu/common/math.h"
#include "cpu/common/tile.h"
#include "cpu/parallel.h"

#include <math.h>

enum { multiplied_channels = 1000 }; /* channels in a microsecond on one thread, roughly */

typedef struct probability_row {
    const fdma_problem *problem;
    int64_t b, i, h, g;
    const void *q; /* [head_dim] */
    float lse;
    row_code code; /* dropout code of the row */
} probability_row;

static probability_row find_probability_row(const fdma_problem *problem, int64_t index) {
    const int64_t head = index / problem->q_len;
    const int64_t b = head / problem->q_heads, h = head % problem->q_heads;
    const int64_t i = index % problem->q_len;
    return (probability_row){
        .problem = problem,
        .b = b,
        .i = i,
        .h = h,
        .g = h / problem->group,
        .q = head_row(&problem->q, b, i, h),
        .lse = *float_at(&problem->lse, b, h, i),
        .code = row_code_of(problem, b, h, query_position(problem, i)),
    };
}

static double logit_of_key(const probability_row *row, int64_t j) {
    const fdma_problem *const problem = row->problem;
    const void *const k = key_row(problem, &problem->k, &problem->k_carried, row->b, j, row->g);
    const double cap = (double)softcap_of(problem);
    double s = problem->scale * product_of_rows(row->q, k, problem->dtype, problem->head_dim);
    if (cap > 0)
        s = cap * tanh(s / cap);
    if (is_present(&problem->bias))
        s += (double)*key_float(problem, &problem->bias, &problem->bias_carried, row->b, row->g, j);
    if (is_present(&problem->attn_bias))
        s += fdma_load(&problem->attn_bias,
                       offset_of_pair(problem, &problem->attn_bias, row->b, row->h, row->i, j));
    return s;
}

static void write_probabilities(const void *context, int64_t index, int32_t thread) {
    const fdma_problem *const problem = context;
    const probability_row row = find_probability_row(problem, index);
    const int64_t p = query_position(problem, row.i);
    const double scale = dropout_scale(problem->dropout.threshold);
    float *const to = float_at(&problem->probability, row.b, row.h, row.i);
    (void)thread;
    for (int64_t j = 0; j < problem->kv_len; j++) {
        const bool kept = row.lse != -INFINITY && attends_to(problem, row.b, row.h, row.i, j) &&
                          !is_dropped(problem, row.code, row.b, row.g, j, p);
        to[j] = kept ? (float)(scale * exp(logit_of_key(&row, j) - (double)row.lse)) : 0;
    }
}

static size_t probabilities_workspace(const fdma_problem *problem) {
    (void)problem;
    return 0;
}

static fdma_status run_probabilities(const fdma_problem *problem) {
    const int64_t rows = problem->batch * problem->q_heads * problem->q_len;
    const int64_t row_time = problem->kv_len * problem->head_dim / multiplied_channels;
    const int64_t microseconds = rows * max(row_time, 1);
    const int32_t threads = fdma_worthwhile_threads(problem->exec.threads, rows, microseconds);
    fdma_parallel_for(problem->exec.parallel, threads, rows, write_probabilities, problem);
    return FDMA_OK;
}
