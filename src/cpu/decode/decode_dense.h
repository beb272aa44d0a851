/* The two products of decode for one row of each head, without a selection. All heads of a task
 * then keep the same keys, and rows are read in the order of memory: all heads of a key, then the
 * next key. The processor's own prefetchers follow this order. Prefetch instructions alone reach
 * two thirds of the rate of a plain read, because each occupies one of the few miss buffers of the
 * L1 cache until its line has come from memory. The results equal those in decode_products.h bit
 * for bit: which of the two files a task uses depends on the number of threads. */
#pragma once

#include "cpu/decode/decode_products.h"

enum {
    ahead_bytes = 4096, /* bytes of k or v from the multiplied row to the prefetched one */
    line_size = 64,     /* bytes of a cache line */
};

/* Arrays of a task, in the scratch memory of its thread. */
typedef struct dense_arrays {
    float *weights; /* [heads][decode_keys] */
    float *lanes;   /* [heads][decode_sums][vf_width]: products whose lanes are not yet added up */
    float *sums;    /* [heads][width]: out of one block */
} dense_arrays;

static int64_t dense_scratch(const decode_context *decode) {
    return decode->heads * (decode_keys + decode_sums * vf_width + decode->width);
}

static dense_arrays dense_arrays_of(const decode_task *task) {
    const int64_t heads = task->decode->heads;
    float *const lanes = task->weights + heads * decode_keys;
    return (dense_arrays){task->weights, lanes, lanes + heads * decode_sums * vf_width};
}

/* Strides of the rows of k or v. */
typedef struct dense_rows {
    int64_t bytes;      /* bytes of a row */
    int64_t head_bytes; /* from a row to the next head's */
    int64_t ahead;      /* bytes from the multiplied row to the prefetched one */
    int64_t keys;       /* keys between these two rows */
} dense_rows;

static dense_rows dense_rows_of(const decode_task *task, const fdma_tensor *tensor) {
    const int64_t size = (int64_t)fdma_dtype_size(tensor->dtype);
    const int64_t bytes = task->decode->problem->head_dim * size;
    const int64_t keys = divide_up(ahead_bytes, task->heads * bytes);
    return (dense_rows){
        .bytes = bytes,
        .head_bytes = tensor->stride[2] * size,
        .ahead = keys * tensor->stride[1] * size,
        .keys = keys,
    };
}

INLINE void prefetch_row(const uint8_t *row, int64_t bytes) {
    for (int64_t byte = 0; byte < bytes; byte += line_size)
        __builtin_prefetch(row + byte);
}

/* ---- Q K^T ---- */

/* The product of a row of q and one key, lane by lane. */
INLINE vf multiply_key(const float *q, const void *k, fdma_dtype dtype, int64_t dim) {
    vf sum = vf_set(0);
    int64_t d = 0;
    for (; d < whole_pairs(dim); d += 2 * vf_width)
        multiply_factors(&sum, q, 0, &k, dtype, 1, 1, false, d, dim);
    for (; d < dim; d += last_channels)
        multiply_factors(&sum, q, 0, &k, dtype, 1, 1, true, d, dim);
    return sum;
}

/* The first product of a block of keys. */
INLINE void multiply_heads(const decode_task *task, const dense_arrays *arrays,
                           const decode_block *keys, fdma_dtype dtype) {
    const decode_context *const decode = task->decode;
    const dense_rows k = dense_rows_of(task, &decode->problem->k);
    const int64_t count = round_up(keys->count, decode_sums);
    for (int64_t n = 0; n < count; n++) {
        const uint8_t *row = keys->k[n];
        float *lanes = arrays->lanes + n % decode_sums * vf_width;
        for (int64_t head = 0; head < task->heads; head++) {
            prefetch_row(row + k.ahead, k.bytes);
            vf_store(lanes, multiply_key(task->q + head * decode->width, row, dtype,
                                         decode->problem->head_dim));
            row += k.head_bytes;
            lanes += decode_sums * vf_width;
        }
        for (int64_t head = 0; (n + 1) % decode_sums == 0 && head < task->heads; head++) {
            vf sums[decode_sums];
            load_vectors(sums, arrays->lanes + head * decode_sums * vf_width, 0, decode_sums);
            store_products(arrays->weights + head * decode_keys + n + 1 - decode_sums, sums, 1);
        }
    }
}

/* ---- P V ---- */

/* Prefetches the rows of one head that add_heads() begins with. */
static void prefetch_first_values(const decode_task *task, const decode_block *keys, int64_t head) {
    const dense_rows v = dense_rows_of(task, &task->decode->problem->v);
    for (int64_t n = 0; n < min(v.keys, keys->count); n++)
        prefetch_row((const uint8_t *)keys->v[n] + head * v.head_bytes, v.bytes);
}

/* The second product of a block of keys, into the arrays' sums. */
INLINE void add_heads(const decode_task *task, const dense_arrays *arrays, const decode_block *keys,
                      fdma_dtype dtype) {
    const decode_context *const decode = task->decode;
    const dense_rows v = dense_rows_of(task, &decode->problem->v);
    memset(arrays->sums, 0, sizeof(float) * (size_t)(task->heads * decode->width));
    for (int64_t n = 0; n < keys->count; n += terms)
        for (int64_t head = 0; head < task->heads; head++) {
            const void *values[terms];
            UNROLL
            for (int term = 0; term < terms; term++) {
                const uint8_t *row = keys->v[n + term];
                if (n + term < keys->count) { // after the last key comes a row of zeros
                    row += head * v.head_bytes;
                    prefetch_row(row + v.ahead, v.bytes);
                }
                values[term] = row;
            }
            add_rows(arrays->sums + head * decode->width, 0,
                     arrays->weights + head * decode_keys + n / terms, values, terms, NULL, dtype,
                     1, true, decode->problem->head_dim);
        }
}
