/* check_plain.c - score and attention as one would first write them, in the dtype of the case.
 *
 * The error that this makes against float64 is what the dtype costs; a kernel may make twice that.
 * 16-bit types follow what a framework does that has one kernel an operation: products are summed
 * in float32, every intermediate tensor (logits, probabilities, out) is rounded to the dtype. */
#include "arrays.h"
#include "check.h"

#include <math.h>

static float *narrow(fdma_tensor tensor) {
    const int64_t count = element_count(&tensor);
    const double *wide = check_widen(tensor);
    float *narrowed = check_alloc(count, sizeof *narrowed);
    for (int64_t i = 0; i < count; i++) {
        narrowed[i] = (float)wide[i];
    }
    return narrowed;
}

static float dot(const float *x, const float *y, int64_t count) {
    float sum = 0;
    for (int64_t i = 0; i < count; i++) {
        sum += x[i] * y[i];
    }
    return sum;
}

void check_plain_score(check_problem *problem) {
    const check_case *test = problem->test;
    const int64_t row = test->kv_heads * test->head_dim;
    const float *v = narrow(problem->v), *a = narrow(problem->a);
    const float *dt_proj = narrow(problem->dt_proj);
    const float *valid = problem->key_valid.rank > 0 ? narrow(problem->key_valid) : NULL;
    for (int64_t b = 0; b < test->batch; b++) {
        for (int64_t j = 0; j < test->kv_len; j++) {
            const int64_t key = b * test->kv_len + j;
            for (int64_t g = 0; g < test->kv_heads; g++) {
                const int64_t at = (b * test->kv_heads + g) * test->kv_len + j;
                const float dt = dot(v + key * row, dt_proj + g * row, row);
                const float softplus = fmaxf(dt, 0) + log1pf(expf(-fabsf(dt)));
                const float z = valid != NULL && valid[key] == 0 ? -INFINITY : a[g] * softplus;
                problem->z.plain[at] = (double)z;
            }
        }
    }
}

typedef struct plain_inputs {
    const check_problem *problem;
    const float *q, *k, *v;
    const float *bias;    /* or NULL */
    const float *valid;   /* or NULL */
    const double *expiry; /* or NULL: dense */
    float *logits;        /* [kv_len], then probabilities; only those of kept keys count */
    unsigned char *kept;  /* [kv_len] */
} plain_inputs;

static int is_kept(const plain_inputs *in, int64_t b, int64_t g, int64_t j, int64_t position) {
    const check_case *test = in->problem->test;
    const int visible = !check_mask_is_causal(test) || j <= position;
    if (in->expiry == NULL) {
        return visible && (in->valid == NULL || in->valid[b * test->kv_len + j] != 0);
    }
    const double expiry = in->expiry[(b * test->kv_heads + g) * test->kv_len + j];
    if (check_mask_is_causal(test)) {
        return visible && (double)position < expiry;
    }
    return expiry > (double)j;
}

static float logit_of(const plain_inputs *in, const float *q, const float *k, float bias) {
    const check_case *test = in->problem->test;
    const fdma_dtype dtype = in->problem->dtype;
    const float scale = 1 / sqrtf((float)test->head_dim), cap = (float)test->softcap;
    float logit = check_round(dtype, dot(q, k, test->head_dim));
    logit = check_round(dtype, logit * scale);
    if (cap > 0) {
        logit = check_round(dtype, cap * check_round(dtype, tanhf(logit / cap)));
    }
    return check_round(dtype, logit + bias);
}

/* Logits of one query become probabilities, rounded to the dtype; the row's lse. */
static float softmax(const plain_inputs *in) {
    const int64_t kv_len = in->problem->test->kv_len;
    float highest = -INFINITY, sum = 0;
    for (int64_t j = 0; j < kv_len; j++) {
        if (in->kept[j] && !(in->logits[j] <= highest)) { /* a NaN stays */
            highest = isnan(highest) ? highest : in->logits[j];
        }
    }
    if (highest == -INFINITY) { /* nothing kept, or nothing of weight */
        for (int64_t j = 0; j < kv_len; j++) {
            in->logits[j] = 0;
        }
        return -INFINITY;
    }
    for (int64_t j = 0; j < kv_len; j++) {
        in->logits[j] = in->kept[j] ? expf(in->logits[j] - highest) : 0;
        sum += in->logits[j];
    }
    for (int64_t j = 0; j < kv_len; j++) {
        in->logits[j] = check_round(in->problem->dtype, in->logits[j] / sum);
    }
    return highest + logf(sum);
}

static void attend_row(const plain_inputs *in, int64_t b, int64_t i, int64_t h) {
    const check_case *test = in->problem->test;
    const int64_t g = h / (test->q_heads / test->kv_heads), head_dim = test->head_dim;
    const int64_t position = i + test->kv_len - test->q_len;
    const int64_t q_row = (b * test->q_len + i) * test->q_heads + h;
    for (int64_t j = 0; j < test->kv_len; j++) {
        const int64_t kv_row = (b * test->kv_len + j) * test->kv_heads + g;
        const int64_t key = (b * test->kv_heads + g) * test->kv_len + j;
        in->kept[j] = (unsigned char)is_kept(in, b, g, j, position);
        if (in->kept[j]) {
            in->logits[j] = logit_of(in, in->q + q_row * head_dim, in->k + kv_row * head_dim,
                                     in->bias != NULL ? in->bias[key] : 0);
        }
    }
    const int64_t lse_at = (b * test->q_heads + h) * test->q_len + i;
    in->problem->lse.plain[lse_at] = (double)softmax(in);
    for (int64_t d = 0; d < head_dim; d++) {
        float sum = 0;
        for (int64_t j = 0; j < test->kv_len; j++) {
            if (in->kept[j]) {
                const int64_t kv_row = (b * test->kv_len + j) * test->kv_heads + g;
                sum += in->logits[j] * in->v[kv_row * head_dim + d];
            }
        }
        in->problem->out.plain[q_row * head_dim + d] = (double)check_round(in->problem->dtype, sum);
    }
}

void check_plain_forward(check_problem *problem) {
    const check_case *test = problem->test;
    const plain_inputs in = {
        .problem = problem,
        .q = narrow(problem->q),
        .k = narrow(problem->k),
        .v = narrow(problem->v),
        .bias = problem->bias.rank > 0 ? narrow(problem->bias) : NULL,
        .valid = problem->key_valid.rank > 0 ? narrow(problem->key_valid) : NULL,
        .expiry = test->window >= 0 ? check_widen(problem->selection.expiry) : NULL,
        .logits = check_alloc(test->kv_len, sizeof(float)),
        .kept = check_alloc(test->kv_len, 1),
    };
    for (int64_t b = 0; b < test->batch; b++) {
        for (int64_t i = 0; i < test->q_len; i++) {
            for (int64_t h = 0; h < test->q_heads; h++) {
                attend_row(&in, b, i, h);
            }
        }
    }
}
