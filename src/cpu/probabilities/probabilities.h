/* The probability of every query and key, from the lse that forward has written: one row of
 * attention at a time, with the channels of a key in the lanes. Nothing is skipped or blocked,
 * because the result is to be looked at, not to be computed with. */
#pragma once

#include "cpu/common/math.h"
#include "cpu/common/tile.h"
#include "cpu/parallel.h"

#include <math.h>

enum {
    multiplied_channels = 2000, /* that a thread multiplies in a microsecond, roughly */
    summed_channels = 16,       /* whose products are added up first, so that rounding errors grow
                                   with the number of such sums */
};

/* A row of attention. */
typedef struct probability_row {
    const fdma_problem *problem;
    int64_t b, i, h, g;
    const void *q; /* [head_dim] */
    float lse;
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
    };
}

static float multiply_key(const probability_row *row, int64_t j) {
    const fdma_problem *const problem = row->problem;
    const void *const k = key_row(problem, &problem->k, &problem->k_carried, row->b, j, row->g);
    vf sum = vf_set(0), partial = vf_set(0);
    for (int64_t d = 0; d < problem->head_dim; d += vf_width) {
        const int64_t count = channels_at(d, problem->head_dim);
        partial = vf_fma(load_channels(row->q, problem->dtype, d, count),
                         load_channels(k, problem->dtype, d, count), partial);
        if ((d + vf_width) % summed_channels == 0) {
            sum = vf_add(sum, partial);
            partial = vf_set(0);
        }
    }
    return vf_sum(vf_add(sum, partial));
}

static float logit_of_key(const probability_row *row, int64_t j) {
    const fdma_problem *const problem = row->problem;
    const float scale = (float)problem->scale, cap = softcap_of(problem);
    const float product = multiply_key(row, j);
    const float s = cap > 0 ? cap * tanhf(product * scale_over_cap(scale, cap)) : product * scale;
    if (!is_present(&problem->bias))
        return s;
    return s + *key_float(problem, &problem->bias, &problem->bias_carried, row->b, row->g, j);
}

static void write_probabilities(const void *context, int64_t index, int32_t thread) {
    const fdma_problem *const problem = context;
    const probability_row row = find_probability_row(problem, index);
    const int64_t p = query_position(problem, row.i);
    float *const to = float_at(&problem->probability, row.b, row.h, row.i);
    (void)thread;
    for (int64_t j = 0; j < problem->kv_len; j++) {
        const bool kept = row.lse != -INFINITY && is_kept(problem, row.b, row.g, j, p);
        to[j] = kept ? expf(logit_of_key(&row, j) - row.lse) : 0;
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
    fdma_parallel_for(threads, rows, write_probabilities, problem);
    return FDMA_OK;
}
