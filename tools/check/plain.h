/* What the plain evaluations of attention and of its gradients share. */
#ifndef FDMA_TOOLS_CHECK_PLAIN_H
#define FDMA_TOOLS_CHECK_PLAIN_H

#include "check/check.h"

/* Inputs of a case as float32, contiguous. */
typedef struct plain_inputs {
    const check_problem *problem;
    const float *q, *k, *v;
    const float *bias;    /* or NULL */
    const float *valid;   /* or NULL */
    const double *expiry; /* or NULL: dense */
} plain_inputs;

/* A query's row of one head: where it stands, and where its q and its lse are. */
typedef struct plain_row {
    int64_t b, g, position, q, lse;
} plain_row;

typedef struct plain_logit {
    float value;
    float slope; /* of the softcap there; 1 without */
} plain_logit;

float *plain_narrow(fdma_tensor tensor);
float plain_dot(const float *x, const float *y, int64_t count);
double plain_wide_dot(const float *x, const float *y, int64_t count);
void plain_add_scaled(float *to, float factor, const float *from, int64_t count);

plain_inputs plain_open(const check_problem *problem);
void plain_for_each_row(plain_inputs *in, void (*run)(plain_inputs *, const plain_row *));

/* Of key j for a row: whether the row keeps it, its logit, where its k and v and where its bias
 * are. */
int plain_keeps(const plain_inputs *in, const plain_row *row, int64_t j);
plain_logit plain_logit_of(const plain_inputs *in, const plain_row *row, int64_t j);
int64_t plain_key_row(const plain_inputs *in, const plain_row *row, int64_t j);
int64_t plain_key(const plain_inputs *in, const plain_row *row, int64_t j);

#endif /* FDMA_TOOLS_CHECK_PLAIN_H */
