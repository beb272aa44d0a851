/* The tensors and calls of a job: causal, batch 1, normally distributed data that is the same each
 * time. */
#include "bench/job.h"
#include "common/arrays.h"
#include "common/device.h"
#include "common/random.h"

#include <math.h>
#include <stdlib.h>

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

/* What gradients come from, and where they go. */
static void fill_gradients(const bench_case *row, bench_job *job, uint64_t *state) {
    const int64_t keys[] = {1, row->kv_heads, row->kv_len};
    const int is_score = row->operation == BENCH_SCORE_BACKWARD;
    job->dv = place_array(job, row->dtype, 4, job->v.shape);
    if (is_score) {
        job->dbias = random_array(job, FDMA_FLOAT32, 3, keys, 1, state);
        job->ddt_proj = place_array(job, row->dtype, 2, job->dt_proj.shape);
        job->da = place_array(job, row->dtype, 1, job->a.shape);
        return;
    }
    job->dbias = place_array(job, FDMA_FLOAT32, 3, keys);
    job->dout = random_array(job, row->dtype, 4, job->q.shape, 1, state);
    job->dq = place_array(job, row->dtype, 4, job->q.shape);
    job->dk = place_array(job, row->dtype, 4, job->k.shape);
}

static void fill_tensors(const bench_case *row, bench_job *job) {
    const int64_t q_len = bench_case_queries(row);
    const int64_t queries[] = {1, q_len, row->q_heads, row->head_dim};
    const int64_t keys[] = {1, row->kv_len, row->kv_heads, row->head_dim};
    const int64_t rows[] = {1, row->q_heads, q_len};
    const int64_t projection[] = {row->kv_heads, row->kv_heads * row->head_dim};
    uint64_t state = 1;
    if (row->operation != BENCH_SCORE && row->operation != BENCH_SCORE_BACKWARD)
        fill_scores(row, job, &state);
    if (row->operation == BENCH_SELECT)
        return;
    job->v = random_array(job, row->dtype, 4, keys, 1, &state);
    if (row->operation == BENCH_LISTS) {
        allocate_lists(row, job);
    } else if (row->operation != BENCH_FORWARD && row->operation != BENCH_BACKWARD) {
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
    if (row->operation == BENCH_SCORE_BACKWARD) {
        fill_gradients(row, job, &state);
        return;
    }
    job->q = random_array(job, row->dtype, 4, queries, 1, &state);
    job->k = random_array(job, row->dtype, 4, keys, 1, &state);
    job->out = place_array(job, row->dtype, 4, queries);
    job->lse = place_array(job, FDMA_FLOAT32, 3, rows);
    if (row->operation == BENCH_BACKWARD)
        fill_gradients(row, job, &state);
}

static void describe_gradients(const bench_case *row, bench_job *job, fdma_exec exec) {
    job->backward_args = (fdma_backward_args){
        .size = sizeof job->backward_args,
        .dout = job->dout,
        .out = job->out,
        .lse = job->lse,
        .q = job->q,
        .k = job->k,
        .v = job->v,
        .bias = row->window > 0 ? job->bias : (fdma_tensor){0},
        .dq = job->dq,
        .dk = job->dk,
        .dv = job->dv,
        .dbias = row->window > 0 ? job->dbias : (fdma_tensor){0},
        .selection = row->window > 0 ? &job->selection : NULL,
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

static void describe_job(const bench_case *row, bench_job *job) {
    const fdma_exec exec = {
        .kernel = job->place.kernel,
        .device = job->place.device,
        .threads = job->place.threads,
    };
    describe_gradients(row, job, exec);
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

void fill_job(const bench_case *row, bench_job *job) {
    fill_tensors(row, job);
    describe_job(row, job);
}
