/* Merge of attention over two disjoint sets of keys, and its gradients: one row at a time, with
 * channels in the lanes. Source: arXiv:2205.14135, section 3.1. */
#ifndef FDMA_CPU_MERGE_MERGE_H
#define FDMA_CPU_MERGE_MERGE_H

#include "cpu/common/tile.h"
#include "cpu/parallel.h"

enum {
    merge_rows = 64,    /* of a task */
    merge_bytes = 5000, /* of out, that a thread merges in a microsecond, roughly */
};

/* The weights of two partial results in the merged one, from their lse; 0: that one is empty. */
typedef struct merge_weights {
    float lse; /* merged */
    float of[2];
} merge_weights;

typedef struct row_index {
    int64_t b, i, h;
} row_index;

static row_index index_of_row(const fdma_problem *problem, int64_t n) {
    const int64_t h = n % problem->q_heads, row = n / problem->q_heads;
    return (row_index){.b = row / problem->q_len, .i = row % problem->q_len, .h = h};
}

static void *channels_at_row(const fdma_tensor *tensor, const row_index *row) {
    return head_row(tensor, row->b, row->i, row->h);
}

static float *float_at_row(const fdma_tensor *tensor, const row_index *row) {
    return (float *)tensor->data + row->b * tensor->stride[0] + row->h * tensor->stride[1] +
           row->i * tensor->stride[2];
}

static merge_weights weigh_partials(const fdma_problem *problem, const row_index *row) {
    const double a = (double)*float_at_row(&problem->partial[0].lse, row);
    const double b = (double)*float_at_row(&problem->partial[1].lse, row);
    const double most = a > b ? a : b;
    if (a != a || b != b)
        return (merge_weights){NAN, {NAN, NAN}};
    if (most == -(double)INFINITY)
        return (merge_weights){.lse = -INFINITY};
    const double lse = most + log(exp(a - most) + exp(b - most));
    return (merge_weights){(float)lse, {(float)exp(a - lse), (float)exp(b - lse)}};
}

/* What partial result n adds to some channels of the merged one. Channels of an empty one are not
 * read. */
static inline vf weighted_channels(const fdma_problem *problem, const void *const *rows,
                                   const merge_weights *weights, int n, int64_t d, int64_t count) {
    if (weights->of[n] == 0)
        return vf_set(0);
    return vf_mul(vf_set(weights->of[n]), load_channels(rows[n], problem->dtype, d, count));
}

static inline vf merged_channels(const fdma_problem *problem, const void *const *rows,
                                 const merge_weights *weights, int64_t d, int64_t count) {
    return vf_add(weighted_channels(problem, rows, weights, 0, d, count),
                  weighted_channels(problem, rows, weights, 1, d, count));
}

static void merge_row(const fdma_problem *problem, int64_t n) {
    const row_index row = index_of_row(problem, n);
    const merge_weights weights = weigh_partials(problem, &row);
    const void *const rows[] = {channels_at_row(&problem->partial[0].out, &row),
                                channels_at_row(&problem->partial[1].out, &row)};
    void *const to = channels_at_row(&problem->out, &row);
    for (int64_t d = 0; d < problem->head_dim; d += vf_width) {
        const int64_t count = channels_at(d, problem->head_dim);
        store_channels(to, problem->dtype, d, merged_channels(problem, rows, &weights, d, count),
                       count);
    }
    if (is_present(&problem->lse))
        *float_at_row(&problem->lse, &row) = weights.lse;
}

/* <dout, out of partial result n - merged out>: the gradient of its weight. */
static float weight_gradient(const fdma_problem *problem, const void *dout, const void *const *rows,
                             const merge_weights *weights, int n) {
    vf sum = vf_set(0);
    if (weights->of[n] == 0)
        return 0;
    for (int64_t d = 0; d < problem->head_dim; d += vf_width) {
        const int64_t count = channels_at(d, problem->head_dim);
        const vf merged = merged_channels(problem, rows, weights, d, count);
        const vf own = load_channels(rows[n], problem->dtype, d, count);
        sum = vf_fma(load_channels(dout, problem->dtype, d, count), vf_sub(own, merged), sum);
    }
    return vf_sum(sum);
}

static void merge_row_backward(const fdma_problem *problem, int64_t index) {
    const row_index row = index_of_row(problem, index);
    const merge_weights weights = weigh_partials(problem, &row);
    const void *const dout = channels_at_row(&problem->dout, &row);
    const void *const rows[] = {channels_at_row(&problem->partial[0].out, &row),
                                channels_at_row(&problem->partial[1].out, &row)};
    const float dlse = is_present(&problem->dlse) ? *float_at_row(&problem->dlse, &row) : 0;
    for (int n = 0; n < 2; n++) {
        const fdma_partial *const partial = &problem->partial[n];
        void *const to = channels_at_row(&partial->dout, &row);
        const float weight = weights.of[n];
        const float sum = dlse + weight_gradient(problem, dout, rows, &weights, n);
        for (int64_t d = 0; d < problem->head_dim; d += vf_width) {
            const int64_t count = channels_at(d, problem->head_dim);
            const vf gradient = load_channels(dout, problem->dtype, d, count);
            store_channels(to, problem->dtype, d,
                           weight == 0 ? vf_set(0) : vf_mul(vf_set(weight), gradient), count);
        }
        *float_at_row(&partial->dlse, &row) = weight == 0 ? 0 : weight * sum;
    }
}

static int64_t rows_to_merge(const fdma_problem *problem) {
    return problem->batch * problem->q_len * problem->q_heads;
}

static void merge_some_rows(const void *context, int64_t index, int32_t thread) {
    const fdma_problem *const problem = context;
    const int64_t end = min((index + 1) * merge_rows, rows_to_merge(problem));
    const uint32_t modes = keep_subnormals();
    (void)thread;
    for (int64_t row = index * merge_rows; row < end; row++)
        if (problem->operation == operation_merge)
            merge_row(problem, row);
        else
            merge_row_backward(problem, row);
    restore_modes(modes);
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
    fdma_parallel_for(threads, tasks, merge_some_rows, problem);
    return FDMA_OK;
}

#endif
