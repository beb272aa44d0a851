/* check_plain_backward.c - gradients and merging as one would first write them; see check_plain.c.
 * Every gradient of an intermediate tensor (logits, probabilities) is rounded to the dtype, too. */
#include "check/check.h"
#include "check/plain.h"
#include "common/arrays.h"

#include <math.h>

/* ---- backward ---- */

typedef struct plain_backward {
    plain_inputs in; /* the first: what plain_for_each_row() hands on */
    const float *out, *lse, *dout;
    const float *dlse; /* or NULL */
    float *dq;         /* [head_dim] of the row */
    float *dk, *dv;    /* as k and v */
    float *dbias;      /* [batch, kv_heads, kv_len] */
    double *error;     /* [batch, kv_heads, kv_len, check_parts] of the terms of dbias */
    double carried;    /* exact_carried() of the row */
} plain_backward;

/* The sum of a tensor of products, which is rounded itself; from the end: what D is taken from is
 * about the same, and sums of the same order would cancel to the last bit, by accident, where a row
 * has one key. */
static float sum_products(fdma_dtype dtype, const float *x, const float *y, int64_t count) {
    float sum = 0;
    for (int64_t i = count - 1; i >= 0; i--) {
        sum += check_round(dtype, x[i] * y[i]);
    }
    return check_round(dtype, sum);
}

/* <dout, out> - dlse of a row, and below the gradient of a logit, without any rounding. */
static double exact_carried(const plain_backward *to, const plain_row *row) {
    return plain_wide_dot(to->dout + row->q, to->out + row->q, to->in.problem->test->head_dim) -
           (to->dlse != NULL ? (double)to->dlse[row->lse] : 0);
}

static double exact_dlogit(const plain_backward *to, const plain_row *row, int64_t j) {
    const plain_inputs *in = &to->in;
    const check_case *test = in->problem->test;
    const int64_t dim = test->head_dim, at = plain_key_row(in, row, j);
    double logit = plain_wide_dot(in->q + row->q, in->k + at, dim) / sqrt((double)dim);
    logit = test->softcap > 0 ? test->softcap * tanh(logit / test->softcap) : logit;
    logit += in->bias != NULL ? (double)in->bias[plain_key(in, row, j)] : 0;
    const double dweight = plain_wide_dot(to->dout + row->q, in->v + at, dim);
    return exp(logit - (double)to->lse[row->lse]) * (dweight - to->carried);
}

static void add_key(const plain_backward *to, const plain_row *row, int64_t j, float carried) {
    const plain_inputs *in = &to->in;
    const fdma_dtype dtype = in->problem->dtype;
    const int64_t dim = in->problem->test->head_dim, at = plain_key_row(in, row, j);
    const float *dout = to->dout + row->q, scale = 1 / sqrtf((float)dim);
    const plain_logit logit = plain_logit_of(in, row, j);
    const float weight = check_round(dtype, expf(logit.value - to->lse[row->lse]));
    const float dweight = check_round(dtype, plain_dot(dout, in->v + at, dim));
    const float dlogit = check_round(dtype, weight * (dweight - carried));
    const float step = check_round(dtype, check_round(dtype, dlogit * logit.slope) * scale);
    const int64_t key = plain_key(in, row, j);
    to->dbias[key] += dlogit;
    to->error[key * check_parts + row->lse % check_parts] +=
        (double)dlogit - exact_dlogit(to, row, j);
    plain_add_scaled(to->dv + at, weight, dout, dim);
    plain_add_scaled(to->dk + at, step, in->q + row->q, dim);
    plain_add_scaled(to->dq, step, in->k + at, dim);
}

static void add_row(plain_inputs *in, const plain_row *row) {
    plain_backward *to = (plain_backward *)in;
    const check_problem *problem = in->problem;
    const int64_t dim = problem->test->head_dim;
    const float *dout = to->dout + row->q;
    const float carried = sum_products(problem->dtype, dout, to->out + row->q, dim) -
                          (to->dlse != NULL ? to->dlse[row->lse] : 0);
    to->carried = exact_carried(to, row);
    for (int64_t d = 0; d < dim; d++) {
        to->dq[d] = 0;
    }
    for (int64_t j = 0; j < problem->test->kv_len && to->lse[row->lse] != -INFINITY; j++) {
        if (plain_keeps(in, row, j)) {
            add_key(to, row, j, carried);
        }
    }
    for (int64_t d = 0; d < dim; d++) {
        problem->dq.plain[row->q + d] = (double)check_round(problem->dtype, to->dq[d]);
    }
}

static void put(const check_result *result, const float *values, fdma_dtype dtype) {
    for (int64_t i = 0; i < result->count; i++) {
        result->plain[i] = (double)check_round(dtype, values[i]);
    }
}

static void put_scatter(check_result *result, const double *error) {
    result->scatter = check_alloc(result->count, sizeof *result->scatter);
    for (int64_t i = 0; i < result->count * check_parts; i++) {
        result->scatter[i / check_parts] += fabs(error[i]);
    }
}

void check_plain_backward(check_problem *problem) {
    plain_backward to = {
        .in = plain_open(problem),
        .out = plain_narrow(problem->given_out),
        .lse = plain_narrow(problem->given_lse),
        .dout = plain_narrow(problem->dout),
        .dlse = problem->dlse.rank > 0 ? plain_narrow(problem->dlse) : NULL,
        .dq = check_alloc(problem->test->head_dim, sizeof(float)),
        .dk = check_alloc(problem->dk.count, sizeof(float)),
        .dv = check_alloc(problem->dv.count, sizeof(float)),
        .dbias = check_alloc(problem->z.count, sizeof(float)),
        .error = check_alloc(problem->z.count * check_parts, sizeof(double)),
    };
    plain_for_each_row(&to.in, add_row);
    put(&problem->dk, to.dk, problem->dtype);
    put(&problem->dv, to.dv, problem->dtype);
    put(&problem->dbias, to.dbias, FDMA_FLOAT32);
    put_scatter(&problem->dbias, to.error);
}

/* ---- score_backward ---- */

typedef struct plain_score {
    const check_problem *problem;
    const float *v, *dt_proj, *a, *dbias;
    float *ddt_proj, *da;
    float *dv;     /* [kv_heads * head_dim] of the key */
    double *error; /* [kv_heads, check_parts] of the terms of da */
} plain_score;

/* A key's part in da without any rounding. */
static double exact_da(const plain_score *to, const float *v, int64_t g, float dbias) {
    const check_case *test = to->problem->test;
    const int64_t width = test->kv_heads * test->head_dim;
    const double dt = plain_wide_dot(v, to->dt_proj + g * width, width);
    const double softplus = fmax(dt, 0) + log1p(exp(-fabs(dt)));
    const int is_exp = test->bias_form == FDMA_BIAS_EXP;
    return (double)dbias * (is_exp ? exp((double)to->a[g] * softplus) : 1) * softplus;
}

/* What one kv head gives to the gradients of a key's values, and gets from them. */
static void add_score(const plain_score *to, int64_t key, int64_t g, float dbias) {
    const check_case *test = to->problem->test;
    const int64_t width = test->kv_heads * test->head_dim;
    const float *v = to->v + key * width, *weights = to->dt_proj + g * width;
    const float dt = plain_dot(v, weights, width);
    const float softplus = fmaxf(dt, 0) + log1pf(expf(-fabsf(dt)));
    const float dz = test->bias_form == FDMA_BIAS_EXP ? dbias * expf(to->a[g] * softplus) : dbias;
    const float ddt = check_round(to->problem->dtype, dz * to->a[g] / (1 + expf(-dt)));
    to->da[g] += dz * softplus;
    to->error[g * check_parts + key % check_parts] +=
        (double)(dz * softplus) - exact_da(to, v, g, dbias);
    plain_add_scaled(to->ddt_proj + g * width, ddt, v, width);
    plain_add_scaled(to->dv, ddt, weights, width);
}

void check_plain_score_backward(check_problem *problem) {
    const check_case *test = problem->test;
    const int64_t heads = test->kv_heads, width = heads * test->head_dim, kv_len = test->kv_len;
    const plain_score to = {
        .problem = problem,
        .v = plain_narrow(problem->scored_v),
        .dt_proj = plain_narrow(problem->dt_proj),
        .a = plain_narrow(problem->a),
        .dbias = plain_narrow(problem->given_dbias),
        .ddt_proj = check_alloc(heads * width, sizeof(float)),
        .da = check_alloc(heads, sizeof(float)),
        .dv = check_alloc(width, sizeof(float)),
        .error = check_alloc(heads * check_parts, sizeof(double)),
    };
    const float *held = plain_narrow(problem->held_dv);
    for (int64_t key = 0; key < test->batch * kv_len; key++) {
        const int64_t b = key / kv_len, j = key % kv_len;
        for (int64_t c = 0; c < width; c++) {
            to.dv[c] = 0;
        }
        for (int64_t g = 0; g < heads; g++) {
            const float dbias = to.dbias[(b * heads + g) * kv_len + j];
            if (dbias != 0 && check_key_is_valid(test, b, j)) {
                add_score(&to, key, g, dbias);
            }
        }
        for (int64_t c = 0; c < width; c++) {
            const float sum = held[key * width + c] + check_round(problem->dtype, to.dv[c]);
            problem->added_dv.plain[key * width + c] = (double)check_round(problem->dtype, sum);
        }
    }
    put(&problem->ddt_proj, to.ddt_proj, problem->dtype);
    put(&problem->da, to.da, problem->dtype);
    put_scatter(&problem->da, to.error);
}

/* ---- merge and its gradients ---- */

typedef struct plain_parts {
    const check_problem *problem;
    const float *out[2], *lse[2], *dout;
    const float *dlse; /* or NULL */
} plain_parts;

static float log_of_both(float x, float y) {
    const float most = fmaxf(x, y);
    if (isnan(x) || isnan(y)) {
        return NAN;
    }
    return most == -INFINITY ? most : most + logf(expf(x - most) + expf(y - most));
}

/* A part's share in the row, rounded to the dtype; an empty one's out counts for nothing. */
static float share_of(const plain_parts *in, int n, int64_t at, float lse) {
    const float own = in->lse[n][at];
    return isnan(lse)        ? lse
           : own > -INFINITY ? check_round(in->problem->dtype, expf(own - lse))
                             : 0;
}

static void merge_row(const plain_parts *in, int64_t row, int64_t at) {
    const check_problem *problem = in->problem;
    const fdma_dtype dtype = problem->dtype;
    const int64_t dim = problem->test->head_dim;
    const float lse = log_of_both(in->lse[0][at], in->lse[1][at]);
    const float share[2] = {share_of(in, 0, at, lse), share_of(in, 1, at, lse)};
    float dshare[2] = {0, 0}; /* <dout, out of the part - out> */
    problem->merged_lse.plain[at] = (double)lse;
    for (int64_t i = row; i < row + dim; i++) {
        float out = 0;
        for (int n = 0; n < 2; n++) {
            out += share[n] != 0 ? check_round(dtype, share[n] * in->out[n][i]) : 0;
        }
        out = check_round(dtype, out);
        problem->merged_out.plain[i] = (double)out;
        for (int n = 0; n < 2; n++) {
            const float dout = share[n] != 0 ? share[n] * in->dout[i] : 0;
            problem->part_dout[n].plain[i] = (double)check_round(dtype, dout);
            dshare[n] += in->dout[i] * check_round(dtype, in->out[n][i] - out);
        }
    }
    const float dlse = in->dlse != NULL ? in->dlse[at] : 0;
    for (int n = 0; n < 2; n++) {
        problem->part_dlse[n].plain[at] =
            share[n] != 0 ? (double)(share[n] * (dlse + dshare[n])) : 0;
    }
}

void check_plain_merge(check_problem *problem) {
    const check_case *test = problem->test;
    const plain_parts in = {
        .problem = problem,
        .out = {plain_narrow(problem->part_out[0]), plain_narrow(problem->part_out[1])},
        .lse = {plain_narrow(problem->part_lse[0]), plain_narrow(problem->part_lse[1])},
        .dout = plain_narrow(problem->dout),
        .dlse = problem->dlse.rank > 0 ? plain_narrow(problem->dlse) : NULL,
    };
    for (int64_t at = 0; at < test->batch * test->q_heads * test->q_len; at++) {
        const int64_t i = at % test->q_len, h = at / test->q_len % test->q_heads;
        const int64_t b = at / test->q_len / test->q_heads;
        merge_row(&in, ((b * test->q_len + i) * test->q_heads + h) * test->head_dim, at);
    }
}
