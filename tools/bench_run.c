/* The jobs of `fdma bench`: causal, batch 1, normally distributed data that is the same each time.
 */
#include "arrays.h"
#include "bench.h"
#include "device.h"
#include "peak.h"
#include "random.h"
#include "timing.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct bench_job {
    bench_operation operation;
    bench_place place;
    fdma_tensor q, k, v, out, lse;
    fdma_tensor score, bias, dt_proj, a;
    fdma_tensor list, count;
    fdma_selection selection;
    fdma_score_args score_args;
    fdma_select_args select_args;
    fdma_lists_args lists_args;
    fdma_forward_args forward_args;
    fdma_attention_args attention_args;
    void *workspace;
    void *spare; /* what a plain read on a device is copied to */
    const char *kernel;
    int selects; /* each time */
};

/* Random elements, repeated: a gigabyte of them takes a minute. A prime, so that no two rows repeat
 * each other. */
enum { DISTINCT = 1048573 };

static fdma_tensor place_array(const bench_job *job, fdma_dtype dtype, int32_t rank,
                               const int64_t *shape) {
    fdma_tensor tensor = fdma_dense_tensor(NULL, dtype, rank, shape);
    const size_t bytes = (size_t)element_count(&tensor) * dtype_bytes(dtype);
    tensor.data = device_allocate(job->place.device, bytes);
    return tensor;
}

static fdma_tensor random_array(const bench_job *job, fdma_dtype dtype, int32_t rank,
                                const int64_t *shape, double scale, uint64_t *state) {
    const fdma_tensor tensor = place_array(job, dtype, rank, shape);
    const int64_t count = element_count(&tensor);
    const int64_t distinct = count < DISTINCT ? count : DISTINCT;
    const size_t bytes = dtype_bytes(dtype);
    const fdma_tensor first = allocate_array(dtype, 1, &distinct);
    for (int64_t index = 0; index < distinct; index++)
        store_element(first.data, dtype, index, scale * random_normal(state));
    for (int64_t index = 0; index < count; index += DISTINCT) {
        const int64_t left = count - index;
        device_copy(job->place.device, (char *)tensor.data + (size_t)index * bytes, first.data,
                    (size_t)(left < DISTINCT ? left : DISTINCT) * bytes);
    }
    free(first.data);
    return tensor;
}

/* A host's array, moved to where the job runs. */
static fdma_tensor moved(const bench_job *job, fdma_tensor host) {
    const fdma_tensor copy = device_copy_of(job->place.device, &host);
    if (copy.data != host.data)
        free(host.data);
    return copy;
}

static double ordered_score(score_order order, int64_t j, uint64_t *state) {
    enum { SAW = 4096, NAN_EVERY = 8 };
    const double drift = 1.0 / 16384; // standard deviations a key
    switch (order) {
    case ORDER_DRIFT:
        return random_normal(state) + drift * (double)j;
    case ORDER_RISING:
        return (double)j;
    case ORDER_FALLING:
        return (double)-j;
    case ORDER_EQUAL:
        return 0;
    case ORDER_SAWTOOTH:
        return (double)(j % SAW);
    case ORDER_NAN:
        return j % NAN_EVERY == 0 ? (double)NAN : random_normal(state);
    default:
        return random_normal(state);
    }
}

/* Scores of every kv head, and the linear bias that they make. */
static void fill_scores(const bench_case *row, bench_job *job, uint64_t *state) {
    const int64_t shape[] = {1, row->kv_heads, row->kv_len};
    const fdma_tensor score = allocate_array(FDMA_FLOAT32, 3, shape);
    const fdma_tensor bias = allocate_array(FDMA_FLOAT32, 3, shape);
    for (int64_t key = 0; key < row->kv_heads * row->kv_len; key++) {
        ((float *)score.data)[key] = (float)ordered_score(row->order, key % row->kv_len, state);
        ((float *)bias.data)[key] = ((float *)score.data)[key];
    }
    job->score = moved(job, score);
    job->bias = moved(job, bias);
    job->selection = (fdma_selection){
        .size = sizeof job->selection,
        .expiry = place_array(job, FDMA_INT32, 3, shape),
        .slot = place_array(job, FDMA_INT32, 3, shape),
        .window = row->window,
        .kv_len = row->kv_len,
        .scope = FDMA_SCOPE_CAUSAL,
    };
}

static void allocate_lists(const bench_case *row, bench_job *job) {
    const int64_t tile = bench_case_tile(row), width = row->window + tile - 1;
    int64_t shape[] = {1, row->kv_heads, (row->kv_len + tile - 1) / tile,
                       width < row->kv_len ? width : row->kv_len};
    job->list = place_array(job, FDMA_INT32, 4, shape);
    shape[3] = 2;
    job->count = place_array(job, FDMA_INT32, 4, shape);
}

static void fill_tensors(const bench_case *row, bench_job *job) {
    const int64_t q_len = bench_case_queries(row);
    const int64_t queries[] = {1, q_len, row->q_heads, row->head_dim};
    const int64_t keys[] = {1, row->kv_len, row->kv_heads, row->head_dim};
    const int64_t rows[] = {1, row->q_heads, q_len};
    const int64_t projection[] = {row->kv_heads, row->kv_heads * row->head_dim};
    uint64_t state = 1;
    if (row->operation != BENCH_SCORE)
        fill_scores(row, job, &state);
    if (row->operation == BENCH_SELECT)
        return;
    job->v = random_array(job, row->dtype, 4, keys, 1, &state);
    if (row->operation == BENCH_LISTS) {
        allocate_lists(row, job);
    } else if (row->operation != BENCH_FORWARD) {
        // dt is then normal too
        const double scale = 1 / sqrt((double)projection[1]);
        job->dt_proj = random_array(job, row->dtype, 2, projection, scale, &state);
        job->a = random_array(job, row->dtype, 1, &row->kv_heads, 1, &state);
    }
    if (bench_case_reads(row) && job->place.device)
        job->spare = device_allocate(job->place.device,
                                     (size_t)element_count(&job->v) * dtype_bytes(row->dtype));
    if (row->operation == BENCH_SCORE) {
        const int64_t scores[] = {1, row->kv_heads, row->kv_len};
        job->score = place_array(job, FDMA_FLOAT32, 3, scores);
        job->bias = place_array(job, FDMA_FLOAT32, 3, scores);
        return;
    }
    job->q = random_array(job, row->dtype, 4, queries, 1, &state);
    job->k = random_array(job, row->dtype, 4, keys, 1, &state);
    job->out = place_array(job, row->dtype, 4, queries);
    job->lse = place_array(job, FDMA_FLOAT32, 3, rows);
}

static void describe_job(const bench_case *row, bench_job *job) {
    const fdma_exec exec = {
        .kernel = job->place.kernel,
        .device = job->place.device,
        .threads = job->place.threads,
    };
    job->score_args = (fdma_score_args){
        .size = sizeof job->score_args,
        .v = job->v,
        .dt_proj = job->dt_proj,
        .a = job->a,
        .score = job->score,
        .bias = job->bias,
        .exec = exec,
    };
    job->select_args = (fdma_select_args){
        .size = sizeof job->select_args,
        .score = job->score,
        .selection = &job->selection,
        .window = row->window,
        .exec = exec,
    };
    job->lists_args = (fdma_lists_args){
        .size = sizeof job->lists_args,
        .selection = &job->selection,
        .list = job->list,
        .count = job->count,
        .q_len = row->kv_len,
        .tile_len = row->operation == BENCH_LISTS ? bench_case_tile(row) : 0,
        .causal = 1,
        .exec = exec,
    };
    job->forward_args = (fdma_forward_args){
        .size = sizeof job->forward_args,
        .q = job->q,
        .k = job->k,
        .v = job->v,
        .bias = row->window > 0 ? job->bias : (fdma_tensor){0},
        .out = job->out,
        .lse = job->lse,
        .selection = row->window > 0 ? &job->selection : NULL,
        .causal = 1,
        .exec = exec,
    };
    job->attention_args = (fdma_attention_args){
        .size = sizeof job->attention_args,
        .q = job->q,
        .k = job->k,
        .v = job->v,
        .dt_proj = job->dt_proj,
        .a = job->a,
        .out = job->out,
        .lse = job->lse,
        .window = row->window,
        .causal = 1,
        .exec = exec,
    };
}

/* One workspace for every call of the job. */
static void give_workspace(bench_job *job, size_t bytes) {
    fdma_exec *const execs[] = {&job->score_args.exec, &job->select_args.exec,
                                &job->lists_args.exec, &job->forward_args.exec,
                                &job->attention_args.exec};
    job->workspace = device_allocate(job->place.device, bytes);
    for (size_t e = 0; e < sizeof execs / sizeof execs[0]; e++) {
        execs[e]->workspace = job->workspace;
        execs[e]->workspace_size = bytes;
    }
}

/* The attention that lists are held against is whatever would be dispatched. */
static fdma_status plan_lists(bench_job *job, size_t *bytes) {
    size_t forward_bytes = 0;
    job->forward_args.exec.kernel = NULL;
    fdma_status status = fdma_lists_kernel(&job->lists_args, &job->kernel);
    status = status ? status : fdma_lists_workspace(&job->lists_args, bytes);
    status = status ? status : fdma_forward_workspace(&job->forward_args, &forward_bytes);
    *bytes = forward_bytes > *bytes ? forward_bytes : *bytes;
    return status;
}

/* Finds the kernel and the workspace. */
static fdma_status plan_job(const bench_case *row, bench_job *job) {
    size_t bytes = 0;
    size_t select_bytes = 0;
    fdma_status status = FDMA_OK;
    switch (row->operation) {
    case BENCH_SCORE:
        status = fdma_score_kernel(&job->score_args, &job->kernel);
        status = status ? status : fdma_score_workspace(&job->score_args, &bytes);
        break;
    case BENCH_SELECT:
        status = fdma_select_kernel(&job->select_args, &job->kernel);
        status = status ? status : fdma_select_workspace(&job->select_args, &bytes);
        break;
    case BENCH_FORWARD:
        status = fdma_forward_kernel(&job->forward_args, &job->kernel);
        status = status ? status : fdma_forward_workspace(&job->forward_args, &bytes);
        if (!status && row->window > 0)
            status = fdma_select_workspace(&job->select_args, &select_bytes);
        break;
    case BENCH_ATTENTION:
        status = fdma_forward_kernel(&job->forward_args, &job->kernel);
        status = status ? status : fdma_attention_workspace(&job->attention_args, &bytes);
        break;
    case BENCH_LISTS:
        status = plan_lists(job, &bytes);
        if (!status)
            status = fdma_select_workspace(&job->select_args, &select_bytes);
        break;
    }
    if (status)
        return status;
    bytes = select_bytes > bytes ? select_bytes : bytes;
    give_workspace(job, bytes);
    return FDMA_OK;
}

bench_job *open_job(const bench_case *row, const bench_place *place) {
    bench_job *job = allocate(sizeof *job);
    job->operation = row->operation;
    job->place = *place;
    fill_tensors(row, job);
    describe_job(row, job);
    job->selects = row->window > 0 && row->q_len == 0 && row->operation != BENCH_LISTS;
    if (plan_job(row, job) == FDMA_OK &&
        (row->window == 0 || job->selects || fdma_select(&job->select_args) == FDMA_OK))
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
        job->selection.expiry.data,
        job->selection.slot.data,
        job->workspace,
        job->spare,
    };
    for (size_t o = 0; o < sizeof owned / sizeof owned[0]; o++)
        device_free(job->place.device, owned[o]);
    free(job);
}

const char *job_kernel(const bench_job *job) { return job->kernel; }

fdma_status run_job(bench_job *job) {
    switch (job->operation) {
    case BENCH_SCORE:
        return fdma_score(&job->score_args);
    case BENCH_SELECT:
        return fdma_select(&job->select_args);
    case BENCH_ATTENTION:
        return fdma_attention(&job->attention_args);
    case BENCH_LISTS:
        return fdma_lists(&job->lists_args);
    default:
        break;
    }
    if (job->selects) {
        const fdma_status status = fdma_select(&job->select_args);
        if (status)
            return status;
    }
    return fdma_forward(&job->forward_args);
}

/* Milliseconds of a plain read of one tensor; on a device half of a copy, which writes as much. */
static double read_array(const bench_job *job, const peak_loop *peak, const void *data,
                         size_t bytes) {
    const int32_t device = job->place.device;
    if (!data)
        return 0;
    return device ? time_copy(device, job->spare, data, bytes) / 2
                  : measure_read(peak, data, bytes);
}

/* Milliseconds of a plain read of what the job reads; NaN where that is not most of its work. */
static double time_read(const bench_case *row, const bench_job *job, const peak_loop *peak) {
    const int64_t keys = row->window > 0 ? row->window : row->kv_len;
    const size_t bytes = (size_t)(keys * row->kv_heads * row->head_dim) * dtype_bytes(row->dtype);
    if (!bench_case_reads(row))
        return (double)NAN;
    return read_array(job, peak, job->v.data, bytes) + read_array(job, peak, job->k.data, bytes);
}

/* Milliseconds of a run, out of so many that the clock can tell. */
static double time_runs(bench_job *job, int64_t runs, fdma_status *status) {
    start_clock(job->place.device);
    for (int64_t run = 0; run < runs && !*status; run++)
        *status = run_job(job);
    return stop_clock(job->place.device) / (double)runs;
}

/* Milliseconds of the attention that lists are for; NaN for other jobs. */
static double time_forward(const bench_case *row, bench_job *job, fdma_status *status) {
    if (row->operation != BENCH_LISTS)
        return (double)NAN;
    start_clock(job->place.device);
    *status = fdma_forward(&job->forward_args);
    return stop_clock(job->place.device);
}

fdma_status measure_job(const bench_case *row, bench_job *job, bench_figures *figures) {
    enum { LEAST_RUNS = 5, ENOUGH_MS = 3000 };
    const double sample_ms = 0.1;
    const double flops = bench_case_flops(row);
    const int keys = row->operation == BENCH_SELECT || row->operation == BENCH_LISTS;
    const double key_count = (double)(row->kv_len * row->kv_heads);
    samples times = {.count = 0};
    samples peaks = {.count = 0};
    samples reads = {.count = 0};
    samples forwards = {.count = 0};
    peak_loop peak;
    const int has_peak = !job->place.device && flops > 0 &&
                         prepare_peak(job->kernel, job->place.threads, &peak) == 0;
    fdma_status status = run_job(job); // warms up
    const int64_t runs = 1 + (int64_t)(sample_ms / time_runs(job, 1, &status));
    const double start = now_ms();
    while (!status && (times.count < LEAST_RUNS ||
                       (times.count < SAMPLE_LIMIT && now_ms() - start < ENOUGH_MS))) {
        if (has_peak)
            add_sample(&peaks, measure_peak(&peak));
        if (has_peak || job->place.device)
            add_sample(&reads, time_read(row, job, &peak));
        add_sample(&forwards, time_forward(row, job, &status));
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
    figures->of_peak = figures->useful_gflops / median(&peaks); // NaN without a peak
    return status;
}
