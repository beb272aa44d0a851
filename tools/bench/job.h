/* A case of `fdma bench` on its device: tensors, workspace and calls, which run and are timed. */
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
    fdma_tensor dout, dq, dk, dv, dbias, ddt_proj, da;
    fdma_tensor rotary, weight, dweight; /* of rotations, whose x is v */
    fdma_selection selection;
    fdma_score_args score_args;
    fdma_select_args select_args;
    fdma_forward_args forward_args;
    fdma_attention_args attention_args;
    fdma_backward_args backward_args;
    fdma_score_backward_args score_backward_args;
    fdma_rotate_args rotate_args;
    fdma_rotate_backward_args rotate_backward_args;
    void *owned[32]; /* memory of the device */
    int owned_count;
    void *copy;         /* on a device: the destination of a plain read */
    const char *kernel; /* the kernel of the main part */
    bool selects;       /* each run makes its selection */
} bench_job;

/*! open_job() - a job that is ready to run, or NULL if no such kernel takes the case:
 *  fdma_last_error() says why. */
bench_job *open_job(const bench_case *item, const bench_target *target);
void close_job(bench_job *job);

/* Figures are NaN where they do not apply. */
typedef struct bench_figures {
    double ms, spread;
    double useful_gflops, of_peak; /* cases with useful operations, where the peak is known */
    double ns_per_key;             /* and kv head: select */
    double of_read;                /* time of a plain read / ms, where reading is the work */
} bench_figures;

/*! measure_job() - times the job in turn with its comparison: the peak loop or a plain read. On a
 *  device there is no peak loop, and a plain read takes half the time of a copy. Returns the status
 *  of the calls. */
fdma_status measure_job(const bench_case *item, bench_job *job, bench_figures *figures);
