/* check.h - what the sources of `fdma check` share: a case, the tensors made for it, the verdict.
 *
 * The way of a case: check_problem.c and check_gradients.c make the tensors and the oracle's
 * results, check_plain.c and check_plain_backward.c evaluate the same plainly in the same dtype,
 * check_judge.c has a kernel do it and check_compare.c holds its results against both, check.c
 * walks and reports. */
#ifndef FDMA_TOOLS_CHECK_CHECK_H
#define FDMA_TOOLS_CHECK_CHECK_H

#include "fdma.h"

typedef enum check_mask { MASK_FULL, MASK_CAUSAL, MASK_GLOBAL } check_mask;
typedef enum check_scores {
    SCORES_IID,
    SCORES_TIED,
    SCORES_RISING,
    SCORES_FALLING,
    SCORES_CLIMB,
    SCORES_DIVE,
    SCORES_SAW,
    SCORES_STEPS,
    SCORES_SPECIAL,
} check_scores;
typedef enum check_layout { LAYOUT_PLAIN, LAYOUT_SWAP, LAYOUT_PACK } check_layout;
typedef enum check_padding {
    PADDING_NONE,
    PADDING_LEFT,
    PADDING_RIGHT,
    PADDING_HOLES,
    PADDING_ALL,
} check_padding;

/* One line of tests/cases.def. */
typedef struct check_case {
    const char *name;
    int64_t batch, q_len, kv_len, q_heads, kv_heads, head_dim;
    int64_t window; /* -1: dense */
    check_mask mask;
    fdma_bias_form bias_form;
    double softcap;
    check_scores scores;
    check_layout layout;
    check_padding padding;
} check_case;

/* A result three ways, contiguous, in the order of its tensor's indices. */
typedef struct check_result {
    int64_t count;
    double *oracle;  /* the reference in float64 */
    double *plain;   /* a plain evaluation in the dtype of the case */
    double *scatter; /* NULL, or what the plain error may be in another order of its sum */
} check_result;

/* Sums of few elements: a plain one may be right by accident, where errors of its terms cancel. Its
 * scatter is the sum of the magnitudes of the errors that so many parts of its terms have. */
enum { check_parts = 8 };

/* Everything that is made once for a case and a dtype. Absent tensors have rank 0. */
typedef struct check_problem {
    const check_case *test;
    fdma_dtype dtype;
    int32_t device; /* of its rows; the tensors are the CPU's, and copied for their calls */
    fdma_tensor q, k, v, dt_proj, a, key_valid; /* q to a in dtype */
    fdma_tensor score;                          /* float32, what the selection ranks */
    fdma_tensor bias;                           /* float32, from score */
    fdma_selection selection;                   /* the reference's, for `score` */
    check_result z;                             /* of fdma_score() */
    check_result out, lse;                      /* of fdma_forward() */

    /* Gradients and merging. What is given is of the types that a caller has. */
    fdma_tensor given_out, given_lse;        /* the oracle's, rounded */
    fdma_tensor dout, dlse;                  /* dlse: absent in some cases */
    check_result dq, dk, dv, dbias;          /* of fdma_backward() */
    fdma_tensor given_dbias;                 /* 0 for some keys, NaN for those not valid */
    fdma_tensor scored_v;                    /* v, with NaN where no head's dbias is other than 0 */
    fdma_tensor held_dv;                     /* what dv holds before fdma_score_backward() */
    check_result added_dv, ddt_proj, da;     /* of fdma_score_backward() */
    fdma_tensor part_out[2], part_lse[2];    /* to be merged; some are empty */
    check_result merged_out, merged_lse;     /* of fdma_merge() */
    check_result part_dout[2], part_dlse[2]; /* of fdma_merge_backward() */
} check_problem;

/* Outputs of a call. */
typedef struct check_backward_outputs {
    fdma_tensor dq, dk, dv, dbias;
} check_backward_outputs;

typedef struct check_score_outputs {
    fdma_tensor dv, ddt_proj, da;
} check_score_outputs;

typedef struct check_part_outputs {
    fdma_tensor dout[2], dlse[2];
} check_part_outputs;

/* How far a result is from the oracle. */
typedef struct check_verdict {
    double excess; /* error / tolerance: passes at 1 and below; infinite where nothing helps */
    int64_t compared;
    const char *tensor; /* the one that it is of */
} check_verdict;

/* Every check_* that returns a status has its line in fdma_last_error(). */

/* check_problem.c */
fdma_status check_problem_make(check_problem *problem, const check_case *test, fdma_dtype dtype,
                               int32_t device);
uint64_t check_seed(const char *name);
void check_fill_normal(fdma_tensor tensor, uint64_t *random, double deviation);
int check_key_is_valid(const check_case *test, int64_t b, int64_t j);
int check_mask_is_causal(const check_case *test);
fdma_scope check_mask_scope(const check_case *test);

/* check_run.c: one call of each operation with the problem's tensors; the outputs are the caller's.
 */
fdma_status check_run_score(const check_problem *problem, const char *kernel, fdma_tensor score,
                            fdma_tensor bias);
fdma_status check_run_select(const check_problem *problem, const char *kernel,
                             fdma_selection *selection);
fdma_status check_run_lists(const check_problem *problem, const char *kernel, int64_t tile_len,
                            fdma_tensor list, fdma_tensor count);
fdma_status check_run_forward(const check_problem *problem, const char *kernel, fdma_tensor out,
                              fdma_tensor lse);
fdma_status check_run_oracle(check_problem *problem);
check_problem check_widen_problem(const check_problem *problem);
check_result check_result_of(fdma_tensor oracle);

/* check_run_backward.c: the same for gradients and merging. */
fdma_status check_run_backward(const check_problem *problem, const char *kernel, int deterministic,
                               const check_backward_outputs *to);
fdma_status check_run_score_backward(const check_problem *problem, const char *kernel,
                                     const check_score_outputs *to);
fdma_status check_run_merge(const check_problem *problem, const char *kernel, fdma_tensor out,
                            fdma_tensor lse);
fdma_status check_run_merge_backward(const check_problem *problem, const char *kernel,
                                     const check_part_outputs *to);

/* check_gradients.c: what gradients and merging are given, and the oracle's results of them, once
 * those of forward are there. */
fdma_status check_gradients_make(check_problem *problem);

/* check_plain.c, check_plain_backward.c: fill the `plain` side of the results. */
void check_plain_score(check_problem *problem);
void check_plain_forward(check_problem *problem);
void check_plain_backward(check_problem *problem);
void check_plain_score_backward(check_problem *problem);
void check_plain_merge(check_problem *problem);

/* check_judge.c: what a row can do, how it is judged, and whether a case is for it. */
typedef struct check_operation {
    const char *name;
    int (*concerns)(const check_problem *);
    fdma_status (*judge)(const check_problem *, const char *kernel, check_verdict *);
} check_operation;

enum { check_operation_count = 8 };
extern const check_operation check_operations[check_operation_count];

/* check_compare.c */
check_verdict check_compare(const char *tensor, const check_result *result, fdma_tensor actual);
check_verdict check_compare_exact(const char *tensor, fdma_tensor actual, fdma_tensor want);

/* check_tensor.c: zeroed tensors out of an arena that check_free_all() empties. */
void *check_alloc(int64_t count, size_t size);
void check_free_all(void);
fdma_tensor check_tensor(fdma_dtype dtype, int32_t rank, const int64_t *shape);
fdma_tensor check_layout_tensor(fdma_dtype dtype, check_layout layout, const int64_t *shape);
void check_fill(fdma_tensor tensor, double value);
double *check_widen(fdma_tensor tensor);
fdma_tensor check_wide_tensor(fdma_tensor tensor);
void check_store(fdma_tensor tensor, int64_t index, double value);
float check_round(fdma_dtype dtype, float value);
double check_step(fdma_dtype dtype, double magnitude); /* between neighbours at that magnitude */

#endif /* FDMA_TOOLS_CHECK_CHECK_H */
