/* Score and attention, plainly; see check/plain.h. */
#include "check/plain.h"

#include "check/plain_row.h"

#include <math.h>

void check_plain_score(check_problem *problem) {
    const check_case *test = problem->test;
    const int64_t width = test->kv_heads * test->head_dim;
    const float *v = plain_narrow(problem->v), *a = plain_narrow(problem->a);
    const float *dt_proj = plain_narrow(problem->dt_proj);
    for (int64_t b = 0; b < test->batch; b++) {
        for (int64_t j = 0; j < test->kv_len; j++) {
            const float *value = v + (b * test->kv_len + j) * width;
            const bool valid = check_key_is_valid(test, b, j);
            for (int64_t g = 0; g < test->kv_heads; g++) {
                const float dt = plain_dot(value, dt_proj + g * width, width);
                const float softplus = fmaxf(dt, 0) + log1pf(expf(-fabsf(dt)));
                const float z = valid ? a[g] * softplus : -INFINITY;
                problem->z.plain[(b * test->kv_heads + g) * test->kv_len + j] = (double)z;
            }
        }
    }
}

typedef struct plain_attention {
    plain_inputs in;     /* first: plain_for_each_row() passes its address */
    float *logits;       /* [kv_len], then probabilities; defined for kept keys only */
    unsigned char *kept; /* [kv_len] */
    float *out;          /* [head_dim] */
} plain_attention;

/* Turns the logits of one row into probabilities, rounded to the dtype. Returns the row's lse. */
static float softmax(const plain_attention *to) {
    const int64_t kv_len = to->in.problem->test->kv_len;
    float row_max = -INFINITY, row_sum = 0;
    for (int64_t j = 0; j < kv_len; j++)
        if (to->kept[j] && !(to->logits[j] <= row_max)) // true for NaN, which then stays
            row_max = isnan(row_max) ? row_max : to->logits[j];
    if (row_max == -INFINITY) { // no key is kept, or every kept logit is -inf
        for (int64_t j = 0; j < kv_len; j++)
            to->logits[j] = 0;
        return -INFINITY;
    }
    for (int64_t j = 0; j < kv_len; j++) {
        to->logits[j] = to->kept[j] ? expf(to->logits[j] - row_max) : 0;
        row_sum += to->logits[j];
    }
    for (int64_t j = 0; j < kv_len; j++)
        to->logits[j] = check_round(to->in.problem->dtype, to->logits[j] / row_sum);
    return row_max + logf(row_sum);
}

static void attend_row(plain_inputs *in, const plain_row *row) {
    const plain_attention *to = (const plain_attention *)in;
    const check_problem *problem = in->problem;
    const int64_t head_dim = problem->test->head_dim, kv_len = problem->test->kv_len;
    for (int64_t j = 0; j < kv_len; j++) {
        to->kept[j] = plain_keeps(in, row, j);
        if (to->kept[j])
            to->logits[j] = plain_logit_of(in, row, j).value;
    }
    problem->lse.plain[row->lse_offset] = (double)softmax(to);
    for (int64_t d = 0; d < head_dim; d++)
        to->out[d] = 0;
    for (int64_t j = 0; j < kv_len; j++)
        if (to->kept[j])
            plain_add_scaled(to->out, to->logits[j], in->v + plain_kv_offset(in, row, j), head_dim);
    for (int64_t d = 0; d < head_dim; d++)
        problem->out.plain[row->q_offset + d] = (double)check_round(problem->dtype, to->out[d]);
}

void check_plain_forward(check_problem *problem) {
    plain_attention to = {
        .in = plain_open(problem),
        .logits = check_alloc(problem->test->kv_len, sizeof(float)),
        .kept = check_alloc(problem->test->kv_len, 1),
        .out = check_alloc(problem->test->head_dim, sizeof(float)),
    };
    plain_for_each_row(&to.in, attend_row);
}
