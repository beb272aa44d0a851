/* See check/plain_row.h. */
#include "check/plain_row.h"

#include "common/arrays.h"

#include <math.h>

float *plain_narrow(fdma_tensor tensor) {
    const int64_t count = element_count(&tensor);
    const double *wide = check_widen(tensor);
    float *narrowed = check_alloc(count, sizeof *narrowed);
    for (int64_t i = 0; i < count; i++)
        narrowed[i] = (float)wide[i];
    return narrowed;
}

float plain_dot(const float *x, const float *y, int64_t count) {
    float sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += x[i] * y[i];
    return sum;
}

double plain_wide_dot(const float *x, const float *y, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += (double)x[i] * (double)y[i];
    return sum;
}

void plain_add_scaled(float *to, float factor, const float *from, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        to[i] += factor * from[i];
}

int64_t plain_kv_offset(const plain_inputs *in, const plain_row *row, int64_t j) {
    const check_case *test = in->problem->test;
    return ((row->b * test->kv_len + j) * test->kv_heads + row->g) * test->head_dim;
}

int64_t plain_bias_offset(const plain_inputs *in, const plain_row *row, int64_t j) {
    const check_case *test = in->problem->test;
    return (row->b * test->kv_heads + row->g) * test->kv_len + j;
}

bool plain_keeps(const plain_inputs *in, const plain_row *row, int64_t j) {
    const check_case *test = in->problem->test;
    const bool visible = !check_is_causal(test) || j <= row->position;
    if (in->expiry == NULL)
        return visible && (in->valid == NULL || in->valid[row->b * test->kv_len + j] != 0);
    const int64_t expiry = (int64_t)in->expiry[plain_bias_offset(in, row, j)];
    return check_is_causal(test) ? visible && row->position < expiry : j < expiry;
}

plain_logit plain_logit_of(const plain_inputs *in, const plain_row *row, int64_t j) {
    const check_case *test = in->problem->test;
    const fdma_dtype dtype = in->problem->dtype;
    const float scale = 1 / sqrtf((float)test->head_dim), cap = (float)test->softcap;
    const float product =
        plain_dot(in->q + row->q_offset, in->k + plain_kv_offset(in, row, j), test->head_dim);
    float logit = check_round(dtype, check_round(dtype, product) * scale), slope = 1;
    if (cap > 0) {
        const float capped = check_round(dtype, tanhf(logit / cap));
        logit = check_round(dtype, cap * capped);
        slope = check_round(dtype, 1 - capped * capped);
    }
    const float bias = in->bias != NULL ? in->bias[plain_bias_offset(in, row, j)] : 0;
    return (plain_logit){check_round(dtype, logit + bias), slope};
}

plain_inputs plain_open(const check_problem *problem) {
    return (plain_inputs){
        .problem = problem,
        .q = plain_narrow(problem->q),
        .k = plain_narrow(problem->k),
        .v = plain_narrow(problem->v),
        .bias = problem->bias.rank > 0 ? plain_narrow(problem->bias) : NULL,
        .valid = problem->key_valid.rank > 0 ? plain_narrow(problem->key_valid) : NULL,
        .expiry = check_is_selected(problem->test) ? check_widen(problem->selection.expiry) : NULL,
    };
}

static plain_row row_at(const check_case *test, int64_t b, int64_t i, int64_t h) {
    return (plain_row){
        .b = b,
        .g = h / (test->q_heads / test->kv_heads),
        .position = i + test->kv_len - test->q_len,
        .q_offset = ((b * test->q_len + i) * test->q_heads + h) * test->head_dim,
        .lse_offset = (b * test->q_heads + h) * test->q_len + i,
    };
}

void plain_for_each_row(plain_inputs *in, void (*run)(plain_inputs *, const plain_row *)) {
    const check_case *test = in->problem->test;
    for (int64_t b = 0; b < test->batch; b++) {
        for (int64_t i = 0; i < test->q_len; i++) {
            for (int64_t h = 0; h < test->q_heads; h++) {
                const plain_row row = row_at(test, b, i, h);
                run(in, &row);
            }
        }
    }
}
