/* A case made concrete in one dtype: the inputs of every operation, and the expected results. */
#pragma once

#include "check/case.h"

/* Values that a kernel's result is compared with. Contiguous, in the order of the tensor's
 * indices. */
typedef struct check_result {
    int64_t count;
    double *reference; /* the kernel "reference" in float64 */
    double *plain;     /* the plain evaluation in the dtype of the case */
    double *scatter;   /* NULL, or the plain error to expect in another order of summation */
} check_result;

typedef enum check_operation_id {
    CHECK_SCORE,
    CHECK_SELECT,
    CHECK_FORWARD,
    CHECK_BACKWARD,
    CHECK_SCORE_BACKWARD,
    CHECK_MERGE,
    CHECK_MERGE_BACKWARD,
    CHECK_DECODE,
    CHECK_CACHE_STORE,
    CHECK_CACHE_COPY,
    CHECK_PROBABILITIES,
    CHECK_ROTARY_TABLE,
    CHECK_ROTATE,
    CHECK_ROTATE_BACKWARD,
    check_operation_count,
} check_operation_id;

enum { check_output_limit = 6 }; /* outputs of an operation */

/* Inputs and options of rotations; of the tensors all but the table may be absent. */
typedef struct check_rotary {
    fdma_tensor rotary;        /* float32, the reference's */
    fdma_tensor inv_freq;      /* float64 */
    fdma_tensor positions;     /* int32 */
    fdma_tensor row_positions; /* int32: of the rows of a table that is made */
    fdma_tensor weight;        /* in dtype or float32 */
    fdma_tensor dweight;       /* float32 or, made wide, float64, without data */
    fdma_tensor k, dk_out;     /* [batch, q_len, kv_heads, head_dim] */
    fdma_tensor k_weight;      /* with k and weight */
    fdma_tensor dk_weight;     /* as dweight */
    double base, eps;
    int64_t first, offset, nope_heads, k_nope_heads;
    int32_t interleaved;
} check_rotary;

/* Everything that is computed once for a case and a dtype. Absent tensors have rank 0. */
typedef struct check_problem {
    const check_case *test;
    fdma_dtype dtype;
    int32_t device;                  /* whose kernels are checked; tensors are in host memory */
    double scale;                    /* of logits; 0: the default */
    bool deterministic;              /* of fdma_backward() */
    fdma_tensor q, k, v, dt_proj, a; /* in dtype */
    fdma_tensor dt_bias;             /* in dtype; absent in some cases */
    fdma_tensor key_valid;           /* uint8 */
    fdma_tensor starts;              /* int32 */
    fdma_tensor score;               /* float32, what the selection ranks */
    fdma_tensor bias;                /* float32, made from score */
    fdma_tensor sink_logit;          /* float32; absent in most cases */
    fdma_tensor rng_state;           /* int64; absent in some cases */
    fdma_tensor attn_mask;           /* uint8; absent in most cases */
    fdma_tensor attn_bias;           /* in dtype or float32; absent in most cases */
    fdma_tensor dattn_bias;          /* of attn_bias's dtype, or wider; without data */
    fdma_selection selection;        /* the reference's, for `score` */

    fdma_cache cache;                       /* of decode: the keys before its tokens */
    fdma_tensor new_q, new_k, new_v;        /* the last tokens, and their queries */
    fdma_tensor new_score, new_lse, commit; /* no token enters the cache */
    fdma_tensor from, to;                   /* of cache_copy */

    check_rotary rotation; /* of q, and of dout */

    fdma_tensor forward_out, forward_lse;       /* inputs of backward: the reference's, rounded */
    fdma_tensor probability;                    /* float32 or, made wide, float64, without data */
    fdma_tensor dout, dlse;                     /* dlse is absent in some cases */
    fdma_tensor score_dbias;                    /* 0 for some keys, NaN for keys not valid */
    fdma_tensor score_v;                        /* v, with NaN where dbias is 0 in every head */
    fdma_tensor prior_dv;                       /* what dv holds before fdma_score_backward() */
    fdma_tensor partial_out[2], partial_lse[2]; /* inputs of merge; some rows are empty */

    check_result results[check_operation_count][check_output_limit];
} check_problem;

/*! check_empty_cache() - a cache of the case's sizes and rules, filled with zeros. */
fdma_cache check_empty_cache(const check_problem *problem, int64_t sequences);

/*! check_has_decode() - whether fdma_decode() is checked with the last tokens of the case. */
bool check_has_decode(const check_case *test);

/*! check_make_inputs() - fills q to bias and the inputs of decode, and allocates the selection and
 *  forward_lse. The numbers are the same on every machine. */
void check_make_inputs(check_problem *problem, const check_case *test, fdma_dtype dtype,
                       int32_t device);

/*! check_make_gradient_inputs() - fills the inputs of backward, score_backward, merge and
 *  merge_backward. The reference's results of forward are known already: every kernel is given the
 *  same ones, whichever kernel would have computed forward. */
void check_make_gradient_inputs(check_problem *problem);
