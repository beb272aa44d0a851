/* See bench/job.h. Jobs are causal, with batch 1 and normally distributed data, the same in each
 * run of the program. */
#include "bench/job.h"

#include "bench/peak.h"
#include "common/arrays.h"
#include "common/calls.h"
#include "common/device.h"
#include "common/random.h"
#include "common/timing.h"

#include <math.h>
#include <stdlib.h>

#define DEFINE_OPERATION(name)                                                                     \
    DEFINE_CALL(name)                                                                              \
    static fdma_status kernel_of_##name(bench_job *job) {                                          \
        return fdma_##name##_kernel(&job->name##_args, &job->kernel);                              \
    }

DEFINE_OPERATION(forward)
DEFINE_OPERATION(select)
DEFINE_OPERATION(score)
DEFINE_CALL(attention)
static fdma_status kernel_of_attention(bench_job *job) { return kernel_of_forward(job); }
DEFINE_OPERATION(backward)
DEFINE_OPERATION(score_backward)
DEFINE_OPERATION(rotate)
DEFINE_OPERATION(rotate_backward)

/* The calls, the offsets of their arguments in a job, and functions that find its kernel. */
#define OPERATION(name) {CALL_OF(name), offsetof(bench_job, name##_args), kernel_of_##name}
static const struct {
    library_call to;
    size_t args;
    fdma_status (*find_kernel)(bench_job *job);
} calls[] = {
    [BENCH_FORWARD] = OPERATION(forward),   [BENCH_SELECT] = OPERATION(select),
    [BENCH_SCORE] = OPERATION(score),       [BENCH_ATTENTION] = OPERATION(attention),
    [BENCH_BACKWARD] = OPERATION(backward), [BENCH_SCORE_BACKWARD] = OPERATION(score_backward),
    [BENCH_ROTATE] = OPERATION(rotate),     [BENCH_ROTATE_BACKWARD] = OPERATION(rotate_backward),
};
enum { call_count = sizeof calls / sizeof calls[0] };

static void *args_of(bench_job *job, bench_operation operation) {
    return (char *)job + calls[operation].args;
}

/* Memory of the job's device, which close_job() frees. */
static void *own(bench_job *job, void *memory) { return job->owned[job->owned_count++] = memory; }

/* This many random elements are repeated, because a gigabyte of them would take a minute. The
 * number is prime, so that no row is equal to another. */
enum { DISTINCT = 1048573 };

static fdma_tensor allocate_there(bench_job *job, fdma_dtype dtype, int32_t rank,
                                  const int64_t *shape) {
    fdma_tensor tensor = fdma_dense_tensor(NULL, dtype, rank, shape);
    const size_t bytes = (size_t)element_count(&tensor) * dtype_bytes(dtype);
    tensor.data = own(job, device_allocate(job->target.device, bytes));
    return tensor;
}

static fdma_tensor random_array(bench_job *job, fdma_dtype dtype, int32_t rank,
                                const int64_t *shape, double scale, uint64_t *state) {
    const fdma_tensor tensor = allocate_there(job, dtype, rank, shape);
    const int64_t count = element_count(&tensor);
    const int64_t distinct = count < DISTINCT ? count : DISTINCT;
    const size_t bytes = dtype_bytes(dtype);
    const fdma_tensor first = allocate_array(dtype, 1, &distinct);
    for (int64_t index = 0; index < distinct; index++)
        store_element(first.data, dtype, index, scale * random_normal(state));
    for (int64_t index = 0; index < count; index += DISTINCT) {
        const int64_t left = count - index;
        device_copy(job->target.device, (char *)tensor.data + (size_t)index * bytes, first.data,
                    (size_t)(left < DISTINCT ? left : DISTINCT) * bytes);
    }
    free(first.data);
    return tensor;
}

static fdma_tensor move_there(bench_job *job, fdma_tensor host) {
    const fdma_tensor copy = device_copy_of(job->target.device, &host);
    if (copy.data != host.data)
        free(host.data);
    own(job, copy.data);
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

static void fill_scores(const bench_case *item, bench_job *job, uint64_t *state) {
    const int64_t shape[] = {1, item->kv_heads, item->kv_len};
    const fdma_tensor score = allocate_array(FDMA_FLOAT32, 3, shape);
    const fdma_tensor bias = allocate_array(FDMA_FLOAT32, 3, shape);
    for (int64_t key = 0; key < item->kv_heads * item->kv_len; key++) {
        ((float *)score.data)[key] = (float)ordered_score(item->order, key % item->kv_len, state);
        ((float *)bias.data)[key] = ((float *)score.data)[key];
    }
    job->score = move_there(job, score);
    job->bias = move_there(job, bias);
    job->selection = (fdma_selection){
        .size = sizeof job->selection,
        .expiry = allocate_there(job, FDMA_INT32, 3, shape),
        .slot = allocate_there(job, FDMA_INT32, 3, shape),
        .window = item->window,
        .recent = item->recent,
        .kv_len = item->kv_len,
        .scope = FDMA_SCOPE_CAUSAL,
    };
}

static void fill_gradients(const bench_case *item, bench_job *job, uint64_t *state) {
    const int64_t keys[] = {1, item->kv_heads, item->kv_len};
    job->dv = allocate_there(job, item->dtype, 4, job->v.shape);
    if (item->operation == BENCH_SCORE_BACKWARD) {
        job->dbias = random_array(job, FDMA_FLOAT32, 3, keys, 1, state);
        job->ddt_proj = allocate_there(job, item->dtype, 2, job->dt_proj.shape);
        job->da = allocate_there(job, item->dtype, 1, job->a.shape);
        return;
    }
    job->dbias = allocate_there(job, FDMA_FLOAT32, 3, keys);
    job->dout = random_array(job, item->dtype, 4, job->q.shape, 1, state);
    job->dq = allocate_there(job, item->dtype, 4, job->q.shape);
    job->dk = allocate_there(job, item->dtype, 4, job->k.shape);
}

/* x is v, out and dx are out; dout is k, too, so that a plain read counts it. */
static void fill_rotation(const bench_case *item, bench_job *job) {
    const int64_t rows[] = {1, item->kv_len, item->kv_heads, item->head_dim};
    const int64_t table[] = {item->kv_len, item->head_dim};
    uint64_t state = 1;
    job->v = random_array(job, item->dtype, 4, rows, 1, &state);
    job->out = allocate_there(job, item->dtype, 4, rows);
    job->rotary = allocate_there(job, FDMA_FLOAT32, 2, table);
    if (job->target.device > 0)
        job->copy = allocate_there(job, item->dtype, 4, rows).data;
    if (item->operation == BENCH_ROTATE)
        return;
    job->dout = job->k = random_array(job, item->dtype, 4, rows, 1, &state);
    job->weight = random_array(job, FDMA_FLOAT32, 1, &item->head_dim, 1, &state);
    job->dweight = allocate_there(job, FDMA_FLOAT32, 1, &item->head_dim);
}

static void fill_tensors(const bench_case *item, bench_job *job) {
    if (bench_case_rotates(item)) {
        fill_rotation(item, job);
        return;
    }
    const int64_t q_len = bench_case_queries(item);
    const int64_t queries[] = {1, q_len, item->q_heads, item->head_dim};
    const int64_t keys[] = {1, item->kv_len, item->kv_heads, item->head_dim};
    const int64_t rows[] = {1, item->q_heads, q_len};
    const int64_t projection[] = {item->kv_heads, item->kv_heads * item->head_dim};
    uint64_t state = 1;
    if (item->operation != BENCH_SCORE && item->operation != BENCH_SCORE_BACKWARD)
        fill_scores(item, job, &state);
    if (item->operation == BENCH_SELECT)
        return;
    job->v = random_array(job, item->dtype, 4, keys, 1, &state);
    if (item->operation != BENCH_FORWARD && item->operation != BENCH_BACKWARD) {
        // this scale gives dt the variance 1
        const double scale = 1 / sqrt((double)projection[1]);
        job->dt_proj = random_array(job, item->dtype, 2, projection, scale, &state);
        job->a = random_array(job, item->dtype, 1, &item->kv_heads, 1, &state);
    }
    if (bench_case_reads(item) && job->target.device > 0)
        job->copy = allocate_there(job, item->dtype, 4, keys).data;
    if (item->operation == BENCH_SCORE) {
        const int64_t scores[] = {1, item->kv_heads, item->kv_len};
        job->score = allocate_there(job, FDMA_FLOAT32, 3, scores);
        job->bias = allocate_there(job, FDMA_FLOAT32, 3, scores);
        return;
    }
    if (item->operation == BENCH_SCORE_BACKWARD) {
        fill_gradients(item, job, &state);
        return;
    }
    job->q = random_array(job, item->dtype, 4, queries, 1, &state);
    job->k = random_array(job, item->dtype, 4, keys, 1, &state);
    job->out = allocate_there(job, item->dtype, 4, queries);
    job->lse = allocate_there(job, FDMA_FLOAT32, 3, rows);
    if (item->operation == BENCH_BACKWARD)
        fill_gradients(item, job, &state);
}

static void describe_gradients(const bench_case *item, bench_job *job, fdma_exec exec) {
    job->backward_args = (fdma_backward_args){
        .size = sizeof job->backward_args,
        .dout = job->dout,
        .out = job->out,
        .lse = job->lse,
        .q = job->q,
        .k = job->k,
        .v = job->v,
        .bias = item->window > 0 ? job->bias : (fdma_tensor){0},
        .dq = job->dq,
        .dk = job->dk,
        .dv = job->dv,
        .dbias = item->window > 0 ? job->dbias : (fdma_tensor){0},
        .selection = item->window > 0 ? &job->selection : NULL,
        .causal = 1,
        .exec = exec,
    };
    job->score_backward_args = (fdma_score_backward_args){
        .size = sizeof job->score_backward_args,
        .dbias = job->dbias,
        .v = job->v,
        .dt_proj = job->dt_proj,
        .a = job->a,
        .dv = job->dv,
        .ddt_proj = job->ddt_proj,
        .da = job->da,
        .bias_form = FDMA_BIAS_LINEAR,
        .exec = exec,
    };
}

static void describe_rotation(bench_job *job, fdma_exec exec) {
    job->rotate_args = (fdma_rotate_args){
        .size = sizeof job->rotate_args,
        .x = job->v,
        .rotary = job->rotary,
        .out = job->out,
        .exec = exec,
    };
    job->rotate_backward_args = (fdma_rotate_backward_args){
        .size = sizeof job->rotate_backward_args,
        .dout = job->dout,
        .x = job->v,
        .weight = job->weight,
        .rotary = job->rotary,
        .dx = job->out,
        .dweight = job->dweight,
        .eps = job->weight.rank > 0 ? 1e-6 : 0,
        .exec = exec,
    };
}

static void describe_job(const bench_case *item, bench_job *job) {
    const fdma_exec exec = {
        .kernel = job->target.kernel, .device = job->target.device, .threads = job->target.threads};
    describe_gradients(item, job, exec);
    describe_rotation(job, exec);
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
        .window = item->window,
        .recent = item->recent,
        .exec = exec,
    };
    job->forward_args = (fdma_forward_args){
        .size = sizeof job->forward_args,
        .q = job->q,
        .k = job->k,
        .v = job->v,
        .bias = item->window > 0 ? job->bias : (fdma_tensor){0},
        .out = job->out,
        .lse = job->lse,
        .selection = item->window > 0 ? &job->selection : NULL,
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
        .window = item->window,
        .recent = item->recent,
        .causal = 1,
        .exec = exec,
    };
}

/* ---- running and timing ---- */

/* Every call of the job uses the same workspace. */
static void give_workspace(bench_job *job, size_t bytes) {
    void *const workspace = own(job, device_allocate(job->target.device, bytes));
    for (int c = 0; c < call_count; c++) {
        fdma_exec *const exec = exec_of(&calls[c].to, args_of(job, (bench_operation)c));
        exec->workspace = workspace;
        exec->workspace_size = bytes;
    }
}

static fdma_status plan_job(const bench_case *item, bench_job *job) {
    const bench_operation operation = item->operation;
    size_t bytes = 0, select_bytes = 0, forward_bytes = 0;
    fdma_status status = calls[operation].find_kernel(job);
    if (status == FDMA_OK)
        status = calls[operation].to.workspace(args_of(job, operation), &bytes);
    if (status == FDMA_OK && item->window > 0 && item->operation != BENCH_SELECT)
        status = fdma_select_workspace(&job->select_args, &select_bytes);
    if (status == FDMA_OK && item->operation == BENCH_BACKWARD) {
        // the forward call before it runs on the kernel that would be dispatched
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
    if (bench_case_rotates(item)) {
        const fdma_rotary_table_args args = {
            .size = sizeof args,
            .rotary = job->rotary,
            .base = 10000,
            .exec = {.device = job->target.device},
        };
        return fdma_rotary_table(&args);
    }
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
    fill_tensors(item, job);
    describe_job(item, job);
    job->selects = item->window > 0 && item->q_len == 0 && item->operation != BENCH_BACKWARD;
    if (plan_job(item, job) == FDMA_OK && prepare_job(item, job) == FDMA_OK)
        return job;
    close_job(job);
    return NULL;
}

void close_job(bench_job *job) {
    for (int n = 0; n < job->owned_count; n++)
        device_free(job->target.device, job->owned[n]);
    free(job);
}

static fdma_status run_job(bench_job *job) {
    if (job->operation == BENCH_FORWARD && job->selects) {
        const fdma_status status = fdma_select(&job->select_args);
        if (status != FDMA_OK)
            return status;
    }
    return calls[job->operation].to.run(args_of(job, job->operation));
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

fdma_status measure_job(const bench_case *item, bench_job *job, bench_figures *figures) {
    enum { LEAST_RUNS = 5, ENOUGH_MS = 3000 };
    const double sample_ms = 0.1;
    const double flops = bench_case_flops(item);
    const bool keys = item->operation == BENCH_SELECT;
    const double key_count = (double)(item->kv_len * item->kv_heads);
    samples times = {.count = 0};
    samples peaks = {.count = 0};
    samples reads = {.count = 0};
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
        add_sample(&times, time_runs(job, runs, &status));
    }
    *figures = (bench_figures){
        .ms = median(&times),
        .spread = spread(&times),
        .useful_gflops = flops > 0 ? flops / (median(&times) * 1e6) : (double)NAN,
        .ns_per_key = keys ? median(&times) * 1e6 / key_count : (double)NAN,
    };
    figures->of_read = median(&reads) / median(&times);
    figures->of_peak = figures->useful_gflops / median(&peaks); // NaN if no peak was measured
    return status;
}
