/* What the plain evaluations of attention and of its gradients share: their inputs in float32, and
 * for one row the keys that it keeps and their logits. */
#ifndef FDMA_TOOLS_CHECK_PLAIN_ROW_H
#define FDMA_TOOLS_CHECK_PLAIN_ROW_H

#include "check/problem.h"

/* Inputs of a case, contiguous. */
typedef struct plain_inputs {
    const check_problem *problem;
    const float *q, *k, *v;
    const float *bias;    /* NULL: none */
    const float *valid;   /* NULL: every key is valid */
    const double *expiry; /* NULL: dense */
} plain_inputs;

/* A row, and the offsets of its q (which are those of out and dq too) and of its lse. */
typedef struct plain_row {
    int64_t b, g, position, q_offset, lse_offset;
} plain_row;

typedef struct plain_logit {
    float value;
    float slope; /* derivative of the softcap; 1 without one */
} plain_logit;

float *plain_narrow(fdma_tensor tensor);
float plain_dot(const float *x, const float *y, int64_t count);
double plain_wide_dot(const float *x, const float *y, int64_t count);
void plain_add_scaled(float *to, float factor, const float *from, int64_t count);

plain_inputs plain_open(const check_problem *problem);
void plain_for_each_row(plain_inputs *in, void (*run)(plain_inputs *, const plain_row *));

bool plain_keeps(const plain_inputs *in, const plain_row *row, int64_t j);
plain_logit plain_logit_of(const plain_inputs *in, const plain_row *row, int64_t j);

/*! plain_kv_offset(), plain_bias_offset() - of key j's k and v, and of its bias. */
int64_t plain_kv_offset(const plain_inputs *in, const plain_row *row, int64_t j);
int64_t plain_bias_offset(const plain_inputs *in, const plain_row *row, int64_t j);

#endif /* FDMA_TOOLS_CHECK_PLAIN_ROW_H */
