/* What a job of `fdma bench` consists of. */
#ifndef FDMA_TOOLS_BENCH_JOB_H
#define FDMA_TOOLS_BENCH_JOB_H

#include "bench/bench.h"

struct bench_job {
    bench_operation operation;
    bench_place place;
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
    void *spare; /* what a plain read on a device is copied to */
    const char *kernel;
    int selects; /* each time */
};

/*! fill_job() - the tensors of a case, random where they are inputs, and the calls' arguments.
 *  job->place is set. */
void fill_job(const bench_case *row, bench_job *job);

#endif /* FDMA_TOOLS_BENCH_JOB_H */
