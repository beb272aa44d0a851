/* The gradients of attention, one row after another. */
#pragma once

#include "core/pair_sums.h"
#include "reference/logit.h"

/* Sums of one (b, g), and inputs of a row and a key. */
typedef struct key_gradients {
    real *dk, *dv;  /* [kv_len, head_dim] */
    real *dbias;    /* [kv_len] */
    real *dpairs;   /* sums of dattn_bias over all (b, g), contiguous */
    real *dq;       /* [head_dim] of the row */
    real *q, *dout; /* [head_dim] of the row */
    real *k, *v;    /* [head_dim] of the key */
} key_gradients;

static key_gradients take_sums(const fdma_problem *problem, fdma_arena *arena) {
    const int64_t keys = problem->kv_len, dim = problem->head_dim;
    return (key_gradients){
        take_reals(arena, keys * dim), take_reals(arena, keys * dim),
        take_reals(arena, keys),       take_reals(arena, count_elements(&problem->dattn_bias)),
        take_reals(arena, dim),        take_reals(arena, dim),
        take_reals(arena, dim),        take_reals(arena, dim),
        take_reals(arena, dim)};
}

static size_t backward_workspace(const fdma_problem *problem) {
    fdma_arena arena = {0};
    take_sums(problem, &arena);
    return fdma_arena_size(&arena);
}

static real dlse_of(const fdma_problem *problem, int64_t b, int64_t i, int64_t h) {
    const fdma_tensor *const dlse = &problem->dlse;
    return is_present(dlse) ? load(dlse, offset_of(dlse, b, h, i)) : 0;
}

/* delta of a row, summed from the last channel to the first. In a row that keeps one key it equals
 * <dout, v>, which is subtracted from it. If both were summed in the same order, their rounding
 * errors would cancel. */
static real delta_of(const fdma_problem *problem, int64_t b, int64_t i, int64_t h) {
    const fdma_tensor *const dout = &problem->dout, *const out = &problem->out;
    real sum = 0;
    for (int64_t d = problem->head_dim - 1; d >= 0; d--)
        sum += rounded(problem->dtype, load(dout, offset_of(dout, b, i, h) + d) *
                                           load(out, offset_of(out, b, i, h) + d));
    return rounded(problem->dtype, sum) - dlse_of(problem, b, i, h);
}

/* Inputs of a row's gradients beside its q and dout. */
typedef struct row_inputs {
    int64_t p; /* its position */
    real lse, delta;
    row_code code;
} row_inputs;

/* Adds the terms of one row, whose q and dout are loaded, and one key. */
static void add_key(const fdma_problem *problem, int64_t b, int64_t h, int64_t i, int64_t j,
                    const row_inputs *row, const key_gradients *sums) {
    const int64_t g = h / problem->group;
    const fdma_dtype dtype = problem->dtype;
    const int64_t dim = problem->head_dim;
    const bool drops = is_dropped(problem, row->code, b, g, j, row->p);
    load_key(sums->k, problem, &problem->k, &problem->k_carried, b, j, g);
    load_key(sums->v, problem, &problem->v, &problem->v_carried, b, j, g);
    const logit s = logit_of(problem, sums->q, sums->k, b, h, i, j);
    const real p = rounded(dtype, exp(s.value - row->lse));
    const real dropped = rounded(dtype, after_dropout(problem, drops, p));
    const real product = rounded(dtype, dot(sums->dout, sums->v, dim));
    const real dp = rounded(dtype, after_dropout(problem, drops, product));
    const real ds = rounded(dtype, p * (dp - row->delta));
    const real dproduct = rounded(dtype, rounded(dtype, ds * s.slope) * (real)problem->scale);
    sums->dbias[j] += ds;
    if (is_present(&problem->dattn_bias)) {
        const fdma_tensor *const to = &problem->dattn_bias;
        const fdma_tensor pairs = dense_pairs(to, sums->dpairs, to->dtype);
        sums->dpairs[offset_of_pair(problem, &pairs, b, h, i, j)] += ds;
    }
    for (int64_t d = 0; d < dim; d++) {
        sums->dv[j * dim + d] += dropped * sums->dout[d];
        sums->dk[j * dim + d] += dproduct * sums->q[d];
        sums->dq[d] += dproduct * sums->k[d];
    }
}

static void add_row(const fdma_problem *problem, int64_t b, int64_t i, int64_t h,
                    const key_gradients *sums) {
    const int64_t dim = problem->head_dim, p = query_position(problem, i);
    const row_inputs row = {.p = p,
                            .lse = load(&problem->lse, offset_of(&problem->lse, b, h, i)),
                            .delta = delta_of(problem, b, i, h),
                            .code = row_code_of(problem, b, h, p)};
    memset(sums->dq, 0, (size_t)dim * sizeof *sums->dq);
    load_row(sums->q, &problem->q, offset_of(&problem->q, b, i, h), dim);
    load_row(sums->dout, &problem->dout, offset_of(&problem->dout, b, i, h), dim);
    for (int64_t j = 0; j < problem->kv_len && row.lse != -infinity; j++)
        if (attends_to(problem, b, h, i, j))
            add_key(problem, b, h, i, j, &row, sums);
    for (int64_t d = 0; d < dim; d++)
        put(&problem->dq, offset_of(&problem->dq, b, i, h) + d, sums->dq[d], problem->accumulate);
}

static void put_keys(const fdma_problem *problem, int64_t b, int64_t g, const key_gradients *sums) {
    const int64_t dim = problem->head_dim;
    for (int64_t j = 0; j < problem->kv_len; j++) {
        const key_row dk = row_of_key(problem, &problem->dk, &problem->dk_carried, b, j, g);
        const key_row dv = row_of_key(problem, &problem->dv, &problem->dv_carried, b, j, g);
        for (int64_t d = 0; d < dim; d++) {
            put(dk.tensor, dk.offset + d, sums->dk[j * dim + d], problem->accumulate);
            put(dv.tensor, dv.offset + d, sums->dv[j * dim + d], problem->accumulate);
        }
        if (is_present(&problem->dbias)) {
            const key_row dbias =
                number_of_key(problem, &problem->dbias, &problem->dbias_carried, b, g, j);
            put(dbias.tensor, dbias.offset, sums->dbias[j], adds_dbias(problem, j));
        }
    }
}

/* Writes dattn_bias, or adds it to the tensor. */
static void put_pairs(const fdma_problem *problem, const key_gradients *sums) {
    const fdma_tensor *const to = &problem->dattn_bias;
    const real *from = sums->dpairs;
    for (int64_t n = 0; n < count_elements(&problem->dattn_bias); n++) {
        const int64_t x3 = n % to->shape[3], rest = n / to->shape[3];
        const int64_t x2 = rest % to->shape[2], x1 = rest / to->shape[2] % to->shape[1];
        const int64_t x0 = rest / to->shape[2] / to->shape[1];
        put(to, offset_of(to, x0, x1, x2) + x3, *from++, problem->add_dattn_bias);
    }
}

/* Minus the sum of the sink's probability times delta, over all rows of a query head. */
static real sink_gradient(const fdma_problem *problem, int64_t h) {
    const real sink = sink_logit_of(problem, h);
    real sum = 0;
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t i = 0; i < problem->q_len; i++) {
            const real lse = load(&problem->lse, offset_of(&problem->lse, b, h, i));
            if (sink != -infinity && lse != -infinity)
                sum -= rounded(problem->dtype, exp(sink - lse)) *
                       (is_empty_row(problem, b, h, i) ? -dlse_of(problem, b, i, h)
                                                       : delta_of(problem, b, i, h));
        }
    return sum;
}

static fdma_status run_backward(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const key_gradients sums = take_sums(problem, &arena);
    const size_t keys = (size_t)problem->kv_len, dim = (size_t)problem->head_dim;
    const int64_t group = problem->q_len > 0 ? problem->group : 0; // without queries it may be huge
    if (is_present(&problem->dattn_bias))
        memset(sums.dpairs, 0, (size_t)count_elements(&problem->dattn_bias) * sizeof *sums.dpairs);
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t g = 0; g < problem->kv_heads; g++) {
            memset(sums.dk, 0, keys * dim * sizeof *sums.dk);
            memset(sums.dv, 0, keys * dim * sizeof *sums.dv);
            memset(sums.dbias, 0, keys * sizeof *sums.dbias);
            for (int64_t i = 0; i < problem->q_len; i++)
                for (int64_t h = g * group; h < (g + 1) * group; h++)
                    add_row(problem, b, i, h, &sums);
            put_keys(problem, b, g, &sums);
        }
    put_pairs(problem, &sums);
    for (int64_t h = 0; h < problem->q_heads && is_present(&problem->dsink_logit); h++)
        put(&problem->dsink_logit, offset_of(&problem->dsink_logit, h, 0, 0),
            sink_gradient(problem, h), problem->add_dsinks);
    return FDMA_OK;
}
