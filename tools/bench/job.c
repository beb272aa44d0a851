/* See bench/job.h. Jobs are causal, with batch 1 and normally distributed data, the same in each
 * run of the program. */
#include "bench/job.h"

#include "common/arrays.h"
#include "common/device.h"
#include "common/random.h"

#include <math.h>
#include <stdlib.h>

/* This many random elements are repeated, because a gigabyte of them would take a minute. The
 * number is prime, so that no row is equal to another. */
enum { DISTINCT = 1048573 };

static fdma_tensor allocate_there(const bench_job *job, fdma_dtype dtype, int32_t rank,
                                  const int64_t *shape) {
    fdma_tensor tensor = fdma_dense_tensor(NULL, dtype, rank, shape);
    const size_t bytes = (size_t)element_count(&tensor) * dtype_bytes(dtype);
    tensor.data = device_allocate(job->target.device, bytes);
    return tensor;
}

static fdma_tensor random_array(const bench_job *job, fdma_dtype dtype, int32_t rank,
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

static fdma_tensor move_there(const bench_job *job, fdma_tensor host) {
    const fdma_tensor copy = device_copy_of(job->target.device, &host);
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

static void allocate_lists(const bench_case *item, bench_job *job) {
    const int64_t tile = bench_case_tile(item), width = item->window + item->recent + tile - 1;
    int64_t shape[] = {1, item->kv_heads, (item->kv_len + tile - 1) / tile,
                       width < item->kv_len ? width : item->kv_len};
    job->list = allocate_there(job, FDMA_INT32, 4, shape);
    shape[3] = 2;
    job->count = allocate_there(job, FDMA_INT32, 4, shape);
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

static void fill_tensors(const bench_case *item, bench_job *job) {
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
    if (item->operation == BENCH_LISTS) {
        allocate_lists(item, job);
    } else if (item->operation != BENCH_FORWARD && item->operation != BENCH_BACKWARD) {
        // this scale gives dt the variance 1
        const double scale = 1 / sqrt((double)projection[1]);
        job->dt_proj = random_array(job, item->dtype, 2, projection, scale, &state);
        job->a = random_array(job, item->dtype, 1, &item->kv_heads, 1, &state);
    }
    if (bench_case_reads(item) && job->target.device > 0)
        job->copy = device_allocate(job->target.device,
                                    (size_t)element_count(&job->v) * dtype_bytes(item->dtype));
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

static void describe_job(const bench_case *item, bench_job *job) {
    const fdma_exec exec = {
        .kernel = job->target.kernel, .device = job->target.device, .threads = job->target.threads};
    describe_gradients(item, job, exec);
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
    job->lists_args = (fdma_lists_args){
        .size = sizeof job->lists_args,
        .selection = &job->selection,
        .list = job->list,
        .count = job->count,
        .q_len = item->kv_len,
        .tile_len = item->operation == BENCH_LISTS ? bench_case_tile(item) : 0,
        .causal = 1,
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

void fill_job(const bench_case *item, bench_job *job) {
    fill_tensors(item, job);
    describe_job(item, job);
}
