/* Running and timing the jobs of `fdma bench`. */
#pragma once

#include "bench/job.h"

/*! open_job() - a job that is ready to run, or NULL if no such kernel takes the case:
 *  fdma_last_error() says why. */
bench_job *open_job(const bench_case *item, const bench_target *target);
void close_job(bench_job *job);

/* Figures are NaN where they do not apply. */
typedef struct bench_figures {
    double ms, spread;
    double useful_gflops, of_peak; /* cases with useful operations, where the peak is known */
    double ns_per_key;             /* and kv head: select and lists */
    double of_read;                /* time of a plain read / ms, where reading is the work */
    double of_forward;             /* lists: ms / time of attention over the same selection */
} bench_figures;

/*! measure_job() - times the job in turn with its comparison: the peak loop, a plain read, or the
 *  attention that lists are for. On a device there is no peak loop, and a plain read takes half the
 *  time of a copy. Returns the status of the calls. */
fdma_status measure_job(const bench_case *item, bench_job *job, bench_figures *figures);
