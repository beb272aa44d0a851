/* Merge of attention over two disjoint sets of keys, and its gradients: a row at a time, with
 * channels in the lanes. Source: arXiv:2205.14135, section 3.1. */
#ifndef FDMA_CPU_MERGE_MERGE_H
#define FDMA_CPU_MERGE_MERGE_H

#include "cpu/common/tile.h"
#include "cpu/parallel.h"

enum {
    merge_rows = 64,    /* of a task */
    merge_bytes = 5000, /* of out, that a thread merges in a microsecond, about */
};

/* Shares of two parts in their sum, by their lse; 0: the part is empty. */
typedef struct merge_shares {
    float lse;
    float of[2];
} merge_shares;

typedef struct merge_place {
    int64_t b, i, h;
} merge_place;

static merge_place merge_place_at(const fdma_problem *problem, int64_t index) {
    const int64_t h = index % problem->q_heads, row = index / problem->q_heads;
    return (merge_place){.b = row / problem->q_len, .i = row % problem->q_len, .h = h};
}

static void *channels_at_row(const fdma_tensor *tensor, const merge_place *row) {
    return head_row(tensor, row->b, row->i, row->h);
}

static float *float_at_row(const fdma_tensor *tensor, const merge_place *row) {
    return (float *)tensor->data + row->b * tensor->stride[0] + row->h * tensor->stride[1] +
           row->i * tensor->stride[2];
}

static merge_shares shares_of(const fdma_problem *problem, const merge_place *row) {
    const double a = (double)*float_at_row(&problem->partial[0].lse, row);
    const double b = (double)*float_at_row(&problem->partial[1].lse, row);
    const double most = a > b ? a : b;
    if (a != a || b != b)
        return (merge_shares){NAN, {NAN, NAN}};
    if (most == -(double)INFINITY)
        return (merge_shares){.lse = -INFINITY};
    const double lse = most + log(exp(a - most) + exp(b - most));
    return (merge_shares){(float)lse, {(float)exp(a - lse), (float)exp(b - lse)}};
}

/* What a part's channels count in the sum; those of an empty one are not read. */
static inline vf share_of_channels(const fdma_problem *problem, const void *const *rows,
                                   const merge_shares *shares, int n, int64_t d, int64_t count) {
    if (shares->of[n] == 0)
        return vf_set(0);
    return vf_mul(vf_set(shares->of[n]), load_channels(rows[n], problem->dtype, d, count));
}

static void merge_one(const fdma_problem *problem, int64_t index) {
    const merge_place row = merge_place_at(problem, index);
    const merge_shares shares = shares_of(problem, &row);
    const void *const rows[] = {channels_at_row(&problem->partial[0].out, &row),
                                channels_at_row(&problem->partial[1].out, &row)};
    void *const to = channels_at_row(&problem->out, &row);
    for (int64_t d = 0; d < problem->head_dim; d += vf_width) {
        const int64_t count = channels_at(d, problem->head_dim);
        store_channels(to, problem->dtype, d,
                       vf_add(share_of_channels(problem, rows, &shares, 0, d, count),
                              share_of_channels(problem, rows, &shares, 1, d, count)),
                       count);
    }
    if (is_present(&problem->lse))
        *float_at_row(&problem->lse, &row) = shares.lse;
}

/* <dout, out of part n - merged out> */
static float share_gradient(const fdma_problem *problem, const void *dout, const void *const *rows,
                            const merge_shares *shares, int n) {
    vf sum = vf_set(0);
    if (shares->of[n] == 0)
        return 0;
    for (int64_t d = 0; d < problem->head_dim; d += vf_width) {
        const int64_t count = channels_at(d, problem->head_dim);
        const vf merged = vf_add(share_of_channels(problem, rows, shares, 0, d, count),
                                 share_of_channels(problem, rows, shares, 1, d, count));
        const vf part = load_channels(rows[n], problem->dtype, d, count);
        sum = vf_fma(load_channels(dout, problem->dtype, d, count), vf_sub(part, merged), sum);
    }
    return vf_sum(sum);
}

static void split_one(const fdma_problem *problem, int64_t index) {
    const merge_place row = merge_place_at(problem, index);
    const merge_shares shares = shares_of(problem, &row);
    const void *const dout = channels_at_row(&problem->dout, &row);
    const void *const rows[] = {channels_at_row(&problem->partial[0].out, &row),
                                channels_at_row(&problem->partial[1].out, &row)};
    const float dlse = is_present(&problem->dlse) ? *float_at_row(&problem->dlse, &row) : 0;
    for (int n = 0; n < 2; n++) {
        const fdma_partial *const part = &problem->partial[n];
        void *const to = channels_at_row(&part->dout, &row);
        const float share = shares.of[n];
        const float sum = dlse + share_gradient(problem, dout, rows, &shares, n);
        for (int64_t d = 0; d < problem->head_dim; d += vf_width) {
            const int64_t count = channels_at(d, problem->head_dim);
            const vf gradient = load_channels(dout, problem->dtype, d, count);
            store_channels(to, problem->dtype, d,
                           share == 0 ? vf_set(0) : vf_mul(vf_set(share), gradient), count);
        }
        *float_at_row(&part->dlse, &row) = share == 0 ? 0 : share * sum;
    }
}

static int64_t rows_to_merge(const fdma_problem *problem) {
    return problem->batch * problem->q_len * problem->q_heads;
}

static void merge_some(const void *context, int64_t index, int32_t thread) {
    const fdma_problem *const problem = context;
    const int64_t rows = rows_to_merge(problem), end = (index + 1) * merge_rows;
    const uint32_t rounding = keep_subnormals();
    (void)thread;
    for (int64_t row = index * merge_rows; row < end && row < rows; row++) {
        if (problem->operation == operation_merge)
            merge_one(problem, row);
        else
            split_one(problem, row);
    }
    restore_modes(rounding);
}

static size_t merge_workspace(const fdma_problem *problem) {
    (void)problem;
    return 0;
}

static fdma_status run_merge(const fdma_problem *problem) {
    const int64_t rows = rows_to_merge(problem), tasks = (rows + merge_rows - 1) / merge_rows;
    const int64_t bytes = rows * problem->head_dim * (int64_t)fdma_dtype_size(problem->dtype);
    const int32_t threads =
        fdma_worthwhile_threads(problem->exec.threads, tasks, bytes / merge_bytes);
    fdma_parallel_for(threads, tasks, merge_some, problem);
    return FDMA_OK;
}

#endif
