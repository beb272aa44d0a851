/* A case of `fdma bench` on its device: tensors, workspace and calls. */
#pragma once

#include "bench/cases.h"

/* How a case runs; as in fdma_exec. */
typedef struct bench_target {
    const char *kernel; /* NULL: the dispatched one */
    int32_t device;
    int threads; /* CPU threads */
} bench_target;

typedef struct bench_job {
    bench_operation operation;
    bench_target target;
    fdma_tensor q, k, v, out, lse;
    fdma_tensor score, bias, dt_proj, a;
    fdma_tensor list, count;
    fdma_tensor dout, dq, dk, dv, dbias, ddt_proj, da;
    fdma_selection selection;
    fdma_score_args score_args;
    fdma_select_args select_args;
    fdma_lists_args lists_args;
    fdma_forward_args forward_args;
    fdma_attention_args attention_args;
    fdma_backward_args backward_args;
    fdma_score_backward_args score_backward_args;
    void *workspace;
    void *copy;         /* on a device: the destination of a plain read */
    const char *kernel; /* the kernel of the main part */
    bool selects;       /* each run makes its selection */
} bench_job;

/*! fill_job() - the tensors of a case, random if they are inputs, and the calls' arguments.
 *  job->target is set. */
void fill_job(const bench_case *item, bench_job *job);
