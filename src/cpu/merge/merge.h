/* Merge of attention over two disjoint sets of keys, and its gradients: one row at a time, with
 * channels in the lanes. Source: arXiv:2205.14135, section 3.1. */
#pragma once

#include "cpu/common/tile.h"
#include "cpu/parallel.h"

#include <math.h>

enum {
    merge_rows = 64,    /* rows of a task */
    merge_bytes = 5000, /* bytes of out that one thread merges in a microsecond, roughly */
};

/* A row of the merged result and of both partial results. */
typedef struct merged_row {
    const fdma_problem *problem;
    int64_t b, i, h;
    const void *out[2]; /* out of the partial results */
    float lse;          /* merged */
    float weight[2];    /* weights of the partial results in the merged one; 0 for an empty one */
} merged_row;

static float *float_of_row(const merged_row *row, const fdma_tensor *tensor) {
    return float_at(tensor, row->b, row->h, row->i);
}

static void *channels_of_row(const merged_row *row, const fdma_tensor *tensor) {
    return head_row(tensor, row->b, row->i, row->h);
}

static void weigh_partials(merged_row *row) {
    const fdma_partial *const partial = row->problem->partial;
    const double a = (double)*float_of_row(row, &partial[0].lse);
    const double b = (double)*float_of_row(row, &partial[1].lse);
    const double most = a > b ? a : b, lse = most + log(exp(a - most) + exp(b - most));
    if (a != a || b != b) {
        row->lse = row->weight[0] = row->weight[1] = NAN;
    } else if (most == -(double)INFINITY) {
        row->lse = -INFINITY; // both are empty
    } else {
        row->lse = (float)lse;
        row->weight[0] = (float)exp(a - lse);
        row->weight[1] = (float)exp(b - lse);
    }
}

static merged_row find_row(const fdma_problem *problem, int64_t index) {
    const int64_t row_index = index / problem->q_heads;
    merged_row row = {
        .problem = problem,
        .b = row_index / problem->q_len,
        .i = row_index % problem->q_len,
        .h = index % problem->q_heads,
    };
    for (int n = 0; n < 2; n++)
        row.out[n] = channels_of_row(&row, &problem->partial[n].out);
    weigh_partials(&row);
    return row;
}

/* Some channels times the weight of partial result n. The channels of an empty one are not read. */
static inline vf weighted_channels(const merged_row *row, int n, const void *from, int64_t d) {
    const fdma_problem *const problem = row->problem;
    if (row->weight[n] == 0)
        return vf_set(0);
    return vf_mul(vf_set(row->weight[n]),
                  load_channels(from, problem->dtype, d, channels_at(d, problem->head_dim)));
}

static inline vf merged_channels(const merged_row *row, int64_t d) {
    return vf_add(weighted_channels(row, 0, row->out[0], d),
                  weighted_channels(row, 1, row->out[1], d));
}

static void merge_row(const merged_row *row) {
    const fdma_problem *const problem = row->problem;
    void *const to = channels_of_row(row, &problem->out);
    for (int64_t d = 0; d < problem->head_dim; d += vf_width)
        store_channels(to, problem->dtype, d, merged_channels(row, d),
                       channels_at(d, problem->head_dim));
    if (is_present(&problem->lse))
        *float_of_row(row, &problem->lse) = row->lse;
}

/* The gradient of the weight of partial result n: <dout, its out - merged out>. */
static float weight_gradient(const merged_row *row, const void *dout, int n) {
    const fdma_problem *const problem = row->problem;
    vf sum = vf_set(0);
    for (int64_t d = 0; d < problem->head_dim && row->weight[n] != 0; d += vf_width) {
        const int64_t count = channels_at(d, problem->head_dim);
        const vf own = load_channels(row->out[n], problem->dtype, d, count);
        const vf difference = vf_sub(own, merged_channels(row, d));
        sum = vf_fma(load_channels(dout, problem->dtype, d, count), difference, sum);
    }
    return vf_sum(sum);
}

static void merge_row_backward(const merged_row *row) {
    const fdma_problem *const problem = row->problem;
    const void *const dout = channels_of_row(row, &problem->dout);
    const float dlse = is_present(&problem->dlse) ? *float_of_row(row, &problem->dlse) : 0;
    for (int n = 0; n < 2; n++) {
        const fdma_partial *const partial = &problem->partial[n];
        void *const to = channels_of_row(row, &partial->dout);
        const float weight = row->weight[n];
        const float sum = dlse + weight_gradient(row, dout, n);
        for (int64_t d = 0; d < problem->head_dim; d += vf_width)
            store_channels(to, problem->dtype, d, weighted_channels(row, n, dout, d),
                           channels_at(d, problem->head_dim));
        *float_of_row(row, &partial->dlse) = weight == 0 ? 0 : weight * sum;
    }
}

static int64_t rows_to_merge(const fdma_problem *problem) {
    return problem->batch * problem->q_len * problem->q_heads;
}

static void merge_some_rows(const void *context, int64_t index, int32_t thread) {
    const fdma_problem *const problem = context;
    const int64_t end = min((index + 1) * merge_rows, rows_to_merge(problem));
    (void)thread;
    for (int64_t n = index * merge_rows; n < end; n++) {
        const merged_row row = find_row(problem, n);
        if (problem->operation == operation_merge)
            merge_row(&row);
        else
            merge_row_backward(&row);
    }
}

static size_t merge_workspace(const fdma_problem *problem) {
    (void)problem;
    return 0;
}

static fdma_status run_merge(const fdma_problem *problem) {
    const int64_t rows = rows_to_merge(problem), tasks = divide_up(rows, merge_rows);
    const int64_t bytes = rows * problem->head_dim * (int64_t)fdma_dtype_size(problem->dtype);
    const int32_t threads =
        fdma_worthwhile_threads(problem->exec.threads, tasks, bytes / merge_bytes);
    fdma_parallel_for(problem->exec.parallel, threads, tasks, merge_some_rows, problem);
    return FDMA_OK;
}
