/* Gradients and merging, plainly; see check/plain.h.
 *
 * dbias and da are sums whose terms have errors of both signs, and one order of summation may be
 * accurate by chance. Their terms are therefore split into groups, and the scatter of a result is
 * the sum of the magnitudes of its groups' errors: the plain error of the worst order. */
#include "check/plain.h"

#include "check/plain_row.h"

#include <math.h>

enum { error_groups = 8 };

static void put_plain(const check_result *result, const float *values, fdma_dtype dtype) {
    for (int64_t i = 0; i < result->count; i++)
        result->plain[i] = (double)check_round(dtype, values[i]);
}

static void put_scatter(check_result *result, const double *error) {
    result->scatter = check_alloc(result->count, sizeof *result->scatter);
    for (int64_t i = 0; i < result->count * error_groups; i++)
        result->scatter[i / error_groups] += fabs(error[i]);
}

/* ---- backward ---- */

typedef struct plain_gradients {
    plain_inputs in; /* first: plain_for_each_row() passes its address */
    const float *out, *lse, *dout;
    const float *dlse;  /* NULL: none */
    float *dq;          /* [head_dim] of the row */
    float *dk, *dv;     /* shaped as k and v */
    float *dbias;       /* [batch, kv_heads, kv_len] */
    double *error;      /* [batch, kv_heads, kv_len, error_groups] of the terms of dbias */
    double exact_delta; /* of the row */
} plain_gradients;

/* The sum of a tensor of products, each of which is rounded, added up from the end. The <dout, v>
 * that delta is subtracted from is close to delta where a row has one key, and with the same order
 * of summation the two would cancel to the last bit by chance. */
static float sum_products(fdma_dtype dtype, const float *x, const float *y, int64_t count) {
    float sum = 0;
    for (int64_t i = count - 1; i >= 0; i--)
        sum += check_round(dtype, x[i] * y[i]);
    return check_round(dtype, sum);
}

/* delta of a row in double precision. */
static double exact_delta(const plain_gradients *to, const plain_row *row) {
    const float *dout = to->dout + row->q_offset, *out = to->out + row->q_offset;
    return plain_wide_dot(dout, out, to->in.problem->test->head_dim) -
           (to->dlse != NULL ? (double)to->dlse[row->lse_offset] : 0);
}

/* dS of a row and key in double precision. */
static double exact_dlogit(const plain_gradients *to, const plain_row *row, int64_t j) {
    const plain_inputs *in = &to->in;
    const check_case *test = in->problem->test;
    const int64_t dim = test->head_dim, at = plain_kv_offset(in, row, j);
    double logit = plain_wide_dot(in->q + row->q_offset, in->k + at, dim) / sqrt((double)dim);
    logit = test->softcap > 0 ? test->softcap * tanh(logit / test->softcap) : logit;
    logit += in->bias != NULL ? (double)in->bias[plain_bias_offset(in, row, j)] : 0;
    const double dprobability = plain_wide_dot(to->dout + row->q_offset, in->v + at, dim);
    return exp(logit - (double)to->lse[row->lse_offset]) * (dprobability - to->exact_delta);
}

static void add_key(const plain_gradients *to, const plain_row *row, int64_t j, float delta) {
    const plain_inputs *in = &to->in;
    const fdma_dtype dtype = in->problem->dtype;
    const int64_t dim = in->problem->test->head_dim, at = plain_kv_offset(in, row, j);
    const float *dout = to->dout + row->q_offset, scale = 1 / sqrtf((float)dim);
    const plain_logit logit = plain_logit_of(in, row, j);
    const float probability = check_round(dtype, expf(logit.value - to->lse[row->lse_offset]));
    const float dprobability = check_round(dtype, plain_dot(dout, in->v + at, dim));
    const float dlogit = check_round(dtype, probability * (dprobability - delta));
    const float dproduct = check_round(dtype, check_round(dtype, dlogit * logit.slope) * scale);
    const int64_t key = plain_bias_offset(in, row, j);
    to->dbias[key] += dlogit;
    to->error[key * error_groups + row->lse_offset % error_groups] +=
        (double)dlogit - exact_dlogit(to, row, j);
    plain_add_scaled(to->dv + at, probability, dout, dim);
    plain_add_scaled(to->dk + at, dproduct, in->q + row->q_offset, dim);
    plain_add_scaled(to->dq, dproduct, in->k + at, dim);
}

static void add_row(plain_inputs *in, const plain_row *row) {
    plain_gradients *to = (plain_gradients *)in;
    const check_problem *problem = in->problem;
    const int64_t dim = problem->test->head_dim;
    const float *dout = to->dout + row->q_offset, *out = to->out + row->q_offset;
    const float delta = sum_products(problem->dtype, dout, out, dim) -
                        (to->dlse != NULL ? to->dlse[row->lse_offset] : 0);
    to->exact_delta = exact_delta(to, row);
    for (int64_t d = 0; d < dim; d++)
        to->dq[d] = 0;
    for (int64_t j = 0; j < problem->test->kv_len; j++)
        if (to->lse[row->lse_offset] != -INFINITY && plain_keeps(in, row, j))
            add_key(to, row, j, delta);
    for (int64_t d = 0; d < dim; d++)
        problem->dq.plain[row->q_offset + d] = (double)check_round(problem->dtype, to->dq[d]);
}

void check_plain_backward(check_problem *problem) {
    plain_gradients to = {
        .in = plain_open(problem),
        .out = plain_narrow(problem->forward_out),
        .lse = plain_narrow(problem->forward_lse),
        .dout = plain_narrow(problem->dout),
        .dlse = problem->dlse.rank > 0 ? plain_narrow(problem->dlse) : NULL,
        .dq = check_alloc(problem->test->head_dim, sizeof(float)),
        .dk = check_alloc(problem->dk.count, sizeof(float)),
        .dv = check_alloc(problem->dv.count, sizeof(float)),
        .dbias = check_alloc(problem->z.count, sizeof(float)),
        .error = check_alloc(problem->z.count * error_groups, sizeof(double)),
    };
    plain_for_each_row(&to.in, add_row);
    put_plain(&problem->dk, to.dk, problem->dtype);
    put_plain(&problem->dv, to.dv, problem->dtype);
    put_plain(&problem->dbias, to.dbias, FDMA_FLOAT32);
    put_scatter(&problem->dbias, to.error);
}

/* ---- score_backward ---- */

typedef struct plain_score_gradients {
    const check_problem *problem;
    const float *v, *dt_proj, *a, *dbias;
    float *ddt_proj, *da;
    float *dv;     /* [kv_heads * head_dim] of the key */
    double *error; /* [kv_heads, error_groups] of the terms of da */
} plain_score_gradients;

/* The term of one key in da, in double precision. */
static double exact_da(const plain_score_gradients *to, const float *v, int64_t g, float dbias) {
    const check_case *test = to->problem->test;
    const int64_t width = test->kv_heads * test->head_dim;
    const double dt = plain_wide_dot(v, to->dt_proj + g * width, width);
    const double softplus = fmax(dt, 0) + log1p(exp(-fabs(dt)));
    const bool is_exp = test->bias_form == FDMA_BIAS_EXP;
    return (double)dbias * (is_exp ? exp((double)to->a[g] * softplus) : 1) * softplus;
}

/* Adds the terms of one key and kv head to da, ddt_proj and dv. */
static void add_score(const plain_score_gradients *to, int64_t key, int64_t g, float dbias) {
    const check_case *test = to->problem->test;
    const int64_t width = test->kv_heads * test->head_dim;
    const float *v = to->v + key * width, *projection = to->dt_proj + g * width;
    const float dt = plain_dot(v, projection, width);
    const float softplus = fmaxf(dt, 0) + log1pf(expf(-fabsf(dt)));
    const float dz = test->bias_form == FDMA_BIAS_EXP ? dbias * expf(to->a[g] * softplus) : dbias;
    const float ddt = check_round(to->problem->dtype, dz * to->a[g] / (1 + expf(-dt)));
    to->da[g] += dz * softplus;
    to->error[g * error_groups + key % error_groups] +=
        (double)(dz * softplus) - exact_da(to, v, g, dbias);
    plain_add_scaled(to->ddt_proj + g * width, ddt, v, width);
    plain_add_scaled(to->dv, ddt, projection, width);
}

void check_plain_score_backward(check_problem *problem) {
    const check_case *test = problem->test;
    const int64_t heads = test->kv_heads, width = heads * test->head_dim, kv_len = test->kv_len;
    const plain_score_gradients to = {
        .problem = problem,
        .v = plain_narrow(problem->score_v),
        .dt_proj = plain_narrow(problem->dt_proj),
        .a = plain_narrow(problem->a),
        .dbias = plain_narrow(problem->score_dbias),
        .ddt_proj = check_alloc(heads * width, sizeof(float)),
        .da = check_alloc(heads, sizeof(float)),
        .dv = check_alloc(width, sizeof(float)),
        .error = check_alloc(heads * error_groups, sizeof(double)),
    };
    const float *prior = plain_narrow(problem->prior_dv);
    for (int64_t key = 0; key < test->batch * kv_len; key++) {
        const int64_t b = key / kv_len, j = key % kv_len;
        for (int64_t c = 0; c < width; c++)
            to.dv[c] = 0;
        for (int64_t g = 0; g < heads; g++) {
            const float dbias = to.dbias[(b * heads + g) * kv_len + j];
            if (dbias != 0 && check_key_is_valid(test, b, j))
                add_score(&to, key, g, dbias);
        }
        for (int64_t c = 0; c < width; c++) {
            const float sum = prior[key * width + c] + check_round(problem->dtype, to.dv[c]);
            problem->score_dv.plain[key * width + c] = (double)check_round(problem->dtype, sum);
        }
    }
    put_plain(&problem->ddt_proj, to.ddt_proj, problem->dtype);
    put_plain(&problem->da, to.da, problem->dtype);
    put_scatter(&problem->da, to.error);
}

/* ---- merge and merge_backward ---- */

typedef struct plain_partials {
    const check_problem *problem;
    const float *out[2], *lse[2], *dout;
    const float *dlse; /* NULL: none */
} plain_partials;

static float log_sum_exp(float x, float y) {
    const float largest = fmaxf(x, y);
    if (isnan(x) || isnan(y))
        return NAN;
    return largest == -INFINITY ? largest : largest + logf(expf(x - largest) + expf(y - largest));
}

/* The factor of partial result `n` in the merged row, rounded to the dtype. It is 0 for an empty
 * one, whose out is not read. */
static float factor_of(const plain_partials *in, int n, int64_t at, float lse) {
    if (isnan(lse))
        return lse;
    const float own = in->lse[n][at];
    return own > -INFINITY ? check_round(in->problem->dtype, expf(own - lse)) : 0;
}

static void merge_row(const plain_partials *in, int64_t q_offset, int64_t at) {
    const check_problem *problem = in->problem;
    const fdma_dtype dtype = problem->dtype;
    const int64_t dim = problem->test->head_dim;
    const float lse = log_sum_exp(in->lse[0][at], in->lse[1][at]);
    const float factor[2] = {factor_of(in, 0, at, lse), factor_of(in, 1, at, lse)};
    float dfactor[2] = {0, 0}; /* <dout, partial out - out> */
    problem->merged_lse.plain[at] = (double)lse;
    for (int64_t i = q_offset; i < q_offset + dim; i++) {
        float out = 0;
        for (int n = 0; n < 2; n++)
            out += factor[n] != 0 ? check_round(dtype, factor[n] * in->out[n][i]) : 0;
        out = check_round(dtype, out);
        problem->merged_out.plain[i] = (double)out;
        for (int n = 0; n < 2; n++) {
            const float dout = factor[n] != 0 ? factor[n] * in->dout[i] : 0;
            problem->partial_dout[n].plain[i] = (double)check_round(dtype, dout);
            dfactor[n] += in->dout[i] * check_round(dtype, in->out[n][i] - out);
        }
    }
    const float dlse = in->dlse != NULL ? in->dlse[at] : 0;
    for (int n = 0; n < 2; n++)
        problem->partial_dlse[n].plain[at] =
            factor[n] != 0 ? (double)(factor[n] * (dlse + dfactor[n])) : 0;
}

void check_plain_merge(check_problem *problem) {
    const check_case *test = problem->test;
    const plain_partials in = {
        .problem = problem,
        .out = {plain_narrow(problem->partial_out[0]), plain_narrow(problem->partial_out[1])},
        .lse = {plain_narrow(problem->partial_lse[0]), plain_narrow(problem->partial_lse[1])},
        .dout = plain_narrow(problem->dout),
        .dlse = problem->dlse.rank > 0 ? plain_narrow(problem->dlse) : NULL,
    };
    for (int64_t at = 0; at < test->batch * test->q_heads * test->q_len; at++) {
        const int64_t i = at % test->q_len, h = at / test->q_len % test->q_heads;
        const int64_t b = at / test->q_len / test->q_heads;
        merge_row(&in, ((b * test->q_len + i) * test->q_heads + h) * test->head_dim, at);
    }
}
