/* See bench/run.h. */
#include "bench/run.h"

#include "bench/peak.h"
#include "common/arrays.h"
#include "common/device.h"
#include "common/timing.h"

#include <math.h>
#include <stdlib.h>

/* Every call of the job uses the same workspace. */
static void give_workspace(bench_job *job, size_t bytes) {
    fdma_exec *const execs[] = {&job->score_args.exec,         &job->select_args.exec,
                                &job->lists_args.exec,         &job->forward_args.exec,
                                &job->attention_args.exec,     &job->backward_args.exec,
                                &job->score_backward_args.exec};
    job->workspace = device_allocate(job->target.device, bytes);
    for (size_t e = 0; e < sizeof execs / sizeof execs[0]; e++) {
        execs[e]->workspace = job->workspace;
        execs[e]->workspace_size = bytes;
    }
}

static fdma_status plan_job(const bench_case *item, bench_job *job) {
    size_t bytes = 0, select_bytes = 0, forward_bytes = 0;
    fdma_status status = FDMA_OK;
    switch (item->operation) {
    case BENCH_SCORE:
        status = fdma_score_kernel(&job->score_args, &job->kernel);
        if (status == FDMA_OK)
            status = fdma_score_workspace(&job->score_args, &bytes);
        break;
    case BENCH_SELECT:
        status = fdma_select_kernel(&job->select_args, &job->kernel);
        if (status == FDMA_OK)
            status = fdma_select_workspace(&job->select_args, &bytes);
        break;
    case BENCH_FORWARD:
        status = fdma_forward_kernel(&job->forward_args, &job->kernel);
        if (status == FDMA_OK)
            status = fdma_forward_workspace(&job->forward_args, &bytes);
        break;
    case BENCH_ATTENTION:
        status = fdma_forward_kernel(&job->forward_args, &job->kernel);
        if (status == FDMA_OK)
            status = fdma_attention_workspace(&job->attention_args, &bytes);
        break;
    case BENCH_LISTS:
        status = fdma_lists_kernel(&job->lists_args, &job->kernel);
        if (status == FDMA_OK)
            status = fdma_lists_workspace(&job->lists_args, &bytes);
        break;
    case BENCH_BACKWARD:
        status = fdma_backward_kernel(&job->backward_args, &job->kernel);
        if (status == FDMA_OK)
            status = fdma_backward_workspace(&job->backward_args, &bytes);
        break;
    case BENCH_SCORE_BACKWARD:
        status = fdma_score_backward_kernel(&job->score_backward_args, &job->kernel);
        if (status == FDMA_OK)
            status = fdma_score_backward_workspace(&job->score_backward_args, &bytes);
        break;
    }
    if (status == FDMA_OK && item->window > 0 && item->operation != BENCH_SELECT)
        status = fdma_select_workspace(&job->select_args, &select_bytes);
    if (status == FDMA_OK &&
        (item->operation == BENCH_LISTS || item->operation == BENCH_BACKWARD)) {
        // the forward call beside them runs on the kernel that would be dispatched
        job->forward_args.exec.kernel = NULL;
        status = fdma_forward_workspace(&job->forward_args, &forward_bytes);
    }
    if (status != FDMA_OK)
        return status;
    bytes = select_bytes > bytes ? select_bytes : bytes;
    bytes = forward_bytes > bytes ? forward_bytes : bytes;
    give_workspace(job, bytes);
    return FDMA_OK;
}

/* Computes the results of other calls that the job takes as inputs. */
static fdma_status prepare_job(const bench_case *item, bench_job *job) {
    fdma_status status = FDMA_OK;
    if (item->window > 0 && !job->selects)
        status = fdma_select(&job->select_args);
    if (status == FDMA_OK && item->operation == BENCH_BACKWARD)
        status = fdma_forward(&job->forward_args);
    return status;
}

bench_job *open_job(const bench_case *item, const bench_target *target) {
    bench_job *job = allocate(sizeof *job);
    job->operation = item->operation;
    job->target = *target;
    fill_job(item, job);
    job->selects = item->window > 0 && item->q_len == 0 && item->operation != BENCH_LISTS &&
                   item->operation != BENCH_BACKWARD;
    if (plan_job(item, job) == FDMA_OK && prepare_job(item, job) == FDMA_OK)
        return job;
    close_job(job);
    return NULL;
}

void close_job(bench_job *job) {
    void *const owned[] = {
        job->q.data,
        job->k.data,
        job->v.data,
        job->out.data,
        job->lse.data,
        job->score.data,
        job->bias.data,
        job->dt_proj.data,
        job->a.data,
        job->list.data,
        job->count.data,
        job->dout.data,
        job->dq.data,
        job->dk.data,
        job->dv.data,
        job->dbias.data,
        job->ddt_proj.data,
        job->da.data,
        job->selection.expiry.data,
        job->selection.slot.data,
        job->workspace,
        job->copy,
    };
    for (size_t o = 0; o < sizeof owned / sizeof owned[0]; o++)
        device_free(job->target.device, owned[o]);
    free(job);
}

static fdma_status run_job(bench_job *job) {
    switch (job->operation) {
    case BENCH_SCORE:
        return fdma_score(&job->score_args);
    case BENCH_SELECT:
        return fdma_select(&job->select_args);
    case BENCH_ATTENTION:
        return fdma_attention(&job->attention_args);
    case BENCH_LISTS:
        return fdma_lists(&job->lists_args);
    case BENCH_BACKWARD:
        return fdma_backward(&job->backward_args);
    case BENCH_SCORE_BACKWARD:
        return fdma_score_backward(&job->score_backward_args);
    default:
        break;
    }
    if (job->selects) {
        const fdma_status status = fdma_select(&job->select_args);
        if (status != FDMA_OK)
            return status;
    }
    return fdma_forward(&job->forward_args);
}

/* Milliseconds of a plain read of one tensor. On a device it is half of a copy, which reads and
 * writes the same number of bytes. */
static double read_array(const bench_job *job, const peak_loop *peak, const void *data,
                         size_t bytes) {
    const int32_t device = job->target.device;
    if (data == NULL)
        return 0;
    return device > 0 ? time_copy(device, job->copy, data, bytes) / 2
                      : measure_read(peak, data, bytes);
}

/* Milliseconds of a plain read of the tensors that the job reads; NaN if reading is not most of its
 * work. */
static double time_read(const bench_case *item, const bench_job *job, const peak_loop *peak) {
    const int64_t keys = item->window > 0 ? item->window + item->recent : item->kv_len;
    const size_t bytes =
        (size_t)(keys * item->kv_heads * item->head_dim) * dtype_bytes(item->dtype);
    if (!bench_case_reads(item))
        return (double)NAN;
    return read_array(job, peak, job->v.data, bytes) + read_array(job, peak, job->k.data, bytes);
}

/* Milliseconds of one run; `runs` of them are timed together, so that the clock is accurate. */
static double time_runs(bench_job *job, int64_t runs, fdma_status *status) {
    start_clock(job->target.device);
    for (int64_t run = 0; run < runs && *status == FDMA_OK; run++)
        *status = run_job(job);
    return stop_clock(job->target.device) / (double)runs;
}

/* Milliseconds of the attention that uses the lists; NaN for other jobs. */
static double time_forward(const bench_case *item, bench_job *job, fdma_status *status) {
    if (item->operation != BENCH_LISTS)
        return (double)NAN;
    start_clock(job->target.device);
    *status = fdma_forward(&job->forward_args);
    return stop_clock(job->target.device);
}

fdma_status measure_job(const bench_case *item, bench_job *job, bench_figures *figures) {
    enum { LEAST_RUNS = 5, ENOUGH_MS = 3000 };
    const double sample_ms = 0.1;
    const double flops = bench_case_flops(item);
    const bool keys = item->operation == BENCH_SELECT || item->operation == BENCH_LISTS;
    const double key_count = (double)(item->kv_len * item->kv_heads);
    samples times = {.count = 0};
    samples peaks = {.count = 0};
    samples reads = {.count = 0};
    samples forwards = {.count = 0};
    peak_loop peak;
    const bool has_peak = job->target.device == 0 && flops > 0 &&
                          prepare_peak(job->kernel, job->target.threads, &peak) == 0;
    fdma_status status = run_job(job); // warms up
    const int64_t runs = 1 + (int64_t)(sample_ms / time_runs(job, 1, &status));
    const double start = now_ms();
    while (status == FDMA_OK && (times.count < LEAST_RUNS ||
                                 (times.count < SAMPLE_LIMIT && now_ms() - start < ENOUGH_MS))) {
        if (has_peak)
            add_sample(&peaks, measure_peak(&peak));
        if (has_peak || job->target.device > 0)
            add_sample(&reads, time_read(item, job, &peak));
        add_sample(&forwards, time_forward(item, job, &status));
        add_sample(&times, time_runs(job, runs, &status));
    }
    *figures = (bench_figures){
        .ms = median(&times),
        .spread = spread(&times),
        .useful_gflops = flops > 0 ? flops / (median(&times) * 1e6) : (double)NAN,
        .ns_per_key = keys ? median(&times) * 1e6 / key_count : (double)NAN,
    };
    figures->of_read = median(&reads) / median(&times);
    figures->of_forward = median(&times) / median(&forwards);
    figures->of_peak = figures->useful_gflops / median(&peaks); // NaN if no peak was measured
    return status;
}
