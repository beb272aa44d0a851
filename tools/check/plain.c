/* check_plain.c - score and attention as one would first write them, in the dtype of the case.
 *
 * The error that this makes against float64 is what the dtype costs; a kernel may make twice that.
 * 16-bit types follow what a framework does that has one kernel an operation: products are summed
 * in float32, every intermediate tensor (logits, probabilities, out) is rounded to the dtype. */
#include "check/plain.h"
#include "check/check.h"
#include "common/arrays.h"

#include <math.h>

float *plain_narrow(fdma_tensor tensor) {
    const int64_t count = element_count(&tensor);
    const double *wide = check_widen(tensor);
    float *narrowed = check_alloc(count, sizeof *narrowed);
    for (int64_t i = 0; i < count; i++) {
        narrowed[i] = (float)wide[i];
    }
    return narrowed;
}

float plain_dot(const float *x, const float *y, int64_t count) {
    float sum = 0;
    for (int64_t i = 0; i < count; i++) {
        sum += x[i] * y[i];
    }
    return sum;
}

double plain_wide_dot(const float *x, const float *y, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) {
        sum += (double)x[i] * (double)y[i];
    }
    return sum;
}

void plain_add_scaled(float *to, float factor, const float *from, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        to[i] += factor * from[i];
    }
}

void check_plain_score(check_problem *problem) {
    const check_case *test = problem->test;
    const int64_t row = test->kv_heads * test->head_dim;
    const float *v = plain_narrow(problem->v), *a = plain_narrow(problem->a);
    const float *dt_proj = plain_narrow(problem->dt_proj);
    const float *valid = problem->key_valid.rank > 0 ? plain_narrow(problem->key_valid) : NULL;
    for (int64_t b = 0; b < test->batch; b++) {
        for (int64_t j = 0; j < test->kv_len; j++) {
            const int64_t key = b * test->kv_len + j;
            for (int64_t g = 0; g < test->kv_heads; g++) {
                const int64_t at = (b * test->kv_heads + g) * test->kv_len + j;
                const float dt = plain_dot(v + key * row, dt_proj + g * row, row);
                const float softplus = fmaxf(dt, 0) + log1pf(expf(-fabsf(dt)));
                const float z = valid != NULL && valid[key] == 0 ? -INFINITY : a[g] * softplus;
                problem->z.plain[at] = (double)z;
            }
        }
    }
}

static plain_row plain_row_at(const plain_inputs *in, int64_t b, int64_t i, int64_t h) {
    const check_case *test = in->problem->test;
    const int64_t g = h / (test->q_heads / test->kv_heads);
    return (plain_row){
        .b = b,
        .g = g,
        .position = i + test->kv_len - test->q_len,
        .q = ((b * test->q_len + i) * test->q_heads + h) * test->head_dim,
        .lse = (b * test->q_heads + h) * test->q_len + i,
    };
}

int64_t plain_key_row(const plain_inputs *in, const plain_row *row, int64_t j) {
    const check_case *test = in->problem->test;
    return ((row->b * test->kv_len + j) * test->kv_heads + row->g) * test->head_dim;
}

int64_t plain_key(const plain_inputs *in, const plain_row *row, int64_t j) {
    const check_case *test = in->problem->test;
    return (row->b * test->kv_heads + row->g) * test->kv_len + j;
}

int plain_keeps(const plain_inputs *in, const plain_row *row, int64_t j) {
    const check_problem *problem = in->problem;
    const int causal = check_mask_is_causal(problem->test);
    const int visible = !causal || j <= row->position;
    if (in->expiry == NULL) {
        return visible && (in->valid == NULL || in->valid[row->b * problem->test->kv_len + j] != 0);
    }
    const double expiry = in->expiry[plain_key(in, row, j)];
    return causal ? visible && (double)row->position<expiry : expiry>(double) j;
}

plain_logit plain_logit_of(const plain_inputs *in, const plain_row *row, int64_t j) {
    const check_case *test = in->problem->test;
    const fdma_dtype dtype = in->problem->dtype;
    const float scale = 1 / sqrtf((float)test->head_dim), cap = (float)test->softcap;
    float logit = check_round(
              dtype, plain_dot(in->q + row->q, in->k + plain_key_row(in, row, j), test->head_dim)),
          slope = 1;
    logit = check_round(dtype, logit * scale);
    if (cap > 0) {
        const float part = check_round(dtype, tanhf(logit / cap));
        logit = check_round(dtype, cap * part);
        slope = check_round(dtype, 1 - part * part);
    }
    const float bias = in->bias != NULL ? in->bias[plain_key(in, row, j)] : 0;
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
        .expiry = problem->test->window >= 0 ? check_widen(problem->selection.expiry) : NULL,
    };
}

void plain_for_each_row(plain_inputs *in, void (*run)(plain_inputs *, const plain_row *)) {
    const check_case *test = in->problem->test;
    for (int64_t b = 0; b < test->batch; b++) {
        for (int64_t i = 0; i < test->q_len; i++) {
            for (int64_t h = 0; h < test->q_heads; h++) {
                const plain_row row = plain_row_at(in, b, i, h);
                run(in, &row);
            }
        }
    }
}

typedef struct plain_attention {
    plain_inputs in;     /* the first: what plain_for_each_row() hands on */
    float *logits;       /* [kv_len], then probabilities; only those of kept keys count */
    unsigned char *kept; /* [kv_len] */
    float *out;          /* [head_dim] */
} plain_attention;

/* Logits of one query become probabilities, rounded to the dtype; the row's lse. */
static float softmax(const plain_attention *to) {
    const int64_t kv_len = to->in.problem->test->kv_len;
    float highest = -INFINITY, sum = 0;
    for (int64_t j = 0; j < kv_len; j++) {
        if (to->kept[j] && !(to->logits[j] <= highest)) { /* a NaN stays */
            highest = isnan(highest) ? highest : to->logits[j];
        }
    }
    if (highest == -INFINITY) { /* nothing kept, or nothing of weight */
        for (int64_t j = 0; j < kv_len; j++) {
            to->logits[j] = 0;
        }
        return -INFINITY;
    }
    for (int64_t j = 0; j < kv_len; j++) {
        to->logits[j] = to->kept[j] ? expf(to->logits[j] - highest) : 0;
        sum += to->logits[j];
    }
    for (int64_t j = 0; j < kv_len; j++) {
        to->logits[j] = check_round(to->in.problem->dtype, to->logits[j] / sum);
    }
    return highest + logf(sum);
}

static void attend_row(plain_inputs *in, const plain_row *row) {
    const plain_attention *to = (const plain_attention *)in;
    const check_problem *problem = in->problem;
    const int64_t head_dim = problem->test->head_dim, kv_len = problem->test->kv_len;
    for (int64_t j = 0; j < kv_len; j++) {
        to->kept[j] = (unsigned char)plain_keeps(in, row, j);
        if (to->kept[j]) {
            to->logits[j] = plain_logit_of(in, row, j).value;
        }
    }
    problem->lse.plain[row->lse] = (double)softmax(to);
    for (int64_t d = 0; d < head_dim; d++) {
        to->out[d] = 0;
    }
    for (int64_t j = 0; j < kv_len; j++) {
        if (to->kept[j]) {
            plain_add_scaled(to->out, to->logits[j], in->v + plain_key_row(in, row, j), head_dim);
        }
    }
    for (int64_t d = 0; d < head_dim; d++) {
        problem->out.plain[row->q + d] = (double)check_round(problem->dtype, to->out[d]);
    }
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
