/* Decode: forward for few rows of each kv head, such as one new query. Channels stand in the lanes,
 * and each row of k and v is read once for all rows that keep its key. The time goes into reading
 * memory, so the rows of the next block are prefetched; one row of each head without a selection is
 * multiplied in the order of memory. The keys are divided into splits, which threads work on
 * independently and whose partial results are merged in order. */
#pragma once

#include "cpu/decode/list.h"
#include "cpu/parallel.h"

/* ---- the two products ---- */

/* Channels stand in the lanes, so that a row of k or v is used in its
 * order in memory. Two vectors of bfloat16 channels are loaded at once, the even channels into one
 * and the odd ones into the other, which takes fewer instructions than loading them in order. q and
 * out have this order too; restore_order() puts out in the order of channels before it is
 * stored. */

/* The channels of a row that are loaded two vectors at a time. The others, fewer than two vectors,
 * keep their order. */
INLINE int64_t whole_pairs(int64_t dim) { return dim - dim % (2 * vf_width); }

INLINE vf channels_of(const void *row, fdma_dtype dtype, int64_t d, int64_t count) {
    if (dtype == FDMA_FLOAT32 && count == vf_width)
        return vf_load((const float *)row + d);
    return load_channels(row, dtype, d, count);
}

/* Two vectors of channels from d on. */
INLINE void load_pair(vf *x, const void *row, fdma_dtype dtype, int64_t d) {
    if (dtype == FDMA_BFLOAT16) {
        vf_load_even_odd_bf16((const uint16_t *)row + d, &x[0], &x[1]);
    } else {
        x[0] = channels_of(row, dtype, d, vf_width);
        x[1] = channels_of(row, dtype, d + vf_width, vf_width);
    }
}

/* Prefetches channels of the rows near_keys behind rows[0], ... into the L1 cache, and of those
 * decode_keys behind into the L2 cache. */
INLINE void prefetch_channels(const void *const *rows, int count, fdma_dtype dtype, int64_t d,
                              int vectors) {
    UNROLL
    for (int m = 0; rows != NULL && m < vectors; m++) {
        const int64_t byte = (d + m * vf_width) * (dtype == FDMA_FLOAT32 ? 4 : 2);
        if (byte % line_size != 0)
            continue;
        UNROLL
        for (int n = 0; n < count; n++)
            __builtin_prefetch((const uint8_t *)rows[near_keys + n] + byte);
        prefetch_rows(rows + decode_keys, count, byte);
    }
}

/* ---- Q K^T ---- */

/* Factors are the operands of the first product: vectors of words of channels, of q and of k. */
enum { pair_factors = 2 / terms }; /* factors of two vectors of channels */

INLINE void load_factor_pair(vf *x, const void *row, fdma_dtype dtype, int64_t d) {
    if (terms == 2)
        x[0] = vf_load((const float *)row + d / 2);
    else
        load_pair(x, row, dtype, d);
}

/* One vector of factors: the channels from d on, where fewer than two vectors of them are left. */
INLINE vf load_last_factors(const void *row, fdma_dtype dtype, int64_t d, int64_t dim) {
    return terms == 2 ? vf_load_first((const float *)row + d / 2, (dim - d) / 2)
                      : channels_of(row, dtype, d, channels_at(d, dim));
}

/* The channels that load_last_factors() loads. */
enum { last_channels = terms * vf_width };

/* Writes a row of q as factors. */
INLINE void load_query(float *q, const void *row, fdma_dtype dtype, int64_t dim) {
    int64_t d = 0;
    for (; d < whole_pairs(dim); d += 2 * vf_width) {
        vf x[pair_factors];
        load_factor_pair(x, row, dtype, d);
        store_vectors(q + d / terms, x, 0, pair_factors);
    }
    for (; d < dim; d += last_channels)
        vf_store(q + d / terms, load_last_factors(row, dtype, d, dim));
}

/* sums += q k of rows x keys, over two vectors of channels from d on or over the last channels. */
INLINE void multiply_factors(vf *sums, const float *q, int64_t width, const void *const *k,
                             fdma_dtype dtype, int rows, int keys, bool last, int64_t d,
                             int64_t dim) {
    const int vectors = last ? 1 : pair_factors;
    vf factors[shared_rows][pair_factors];
    UNROLL
    for (int r = 0; r < rows; r++)
        load_vectors(factors[r], q + r * width + d / terms, 0, vectors);
    UNROLL
    for (int n = 0; n < keys; n++) {
        vf key[pair_factors];
        if (last)
            key[0] = load_last_factors(k[n], dtype, d, dim);
        else
            load_factor_pair(key, k[n], dtype, d);
        UNROLL
        for (int m = 0; m < vectors; m++) {
            UNROLL
            for (int r = 0; r < rows; r++)
                sums[r * keys + n] = vf_dot_lanes(factors[r][m], key[m], sums[r * keys + n]);
        }
    }
}

/* Adds up the lanes of the products of `rows` rows and decode_sums / rows keys. The results of one
 * row are contiguous; two rows are decode_keys apart. */
INLINE void store_products(float *products, const vf *sums, int rows) {
    const int keys = decode_sums / rows;
    float lanes[decode_sums];
    UNROLL
    for (int x = 0; x < decode_sums; x += vf_width)
        vf_store(lanes + x, vf_sum_each(sums + x));
    for (int r = 0; r < rows; r++)
        memcpy(products + r * decode_keys, lanes + r * keys, sizeof(float) * (size_t)keys);
}

/* Products of `rows` rows of q and decode_sums / rows keys. Meanwhile prefetches as many keys from
 * `ahead` on (NULL: none). */
INLINE void multiply_keys(float *products, const float *q, int64_t width, const void *const *k,
                          const void *const *ahead, fdma_dtype dtype, int rows, int64_t dim) {
    const int keys = decode_sums / rows;
    vf sums[decode_sums];
    int64_t d = 0;
    clear_vectors(sums, 0, decode_sums);
    for (; d < whole_pairs(dim); d += 2 * vf_width) {
        prefetch_channels(ahead, keys, dtype, d, 2);
        multiply_factors(sums, q, width, k, dtype, rows, keys, false, d, dim);
    }
    for (; d < dim; d += last_channels) {
        prefetch_channels(ahead, keys, dtype, d, terms);
        multiply_factors(sums, q, width, k, dtype, rows, keys, true, d, dim);
    }
    store_products(products, sums, rows);
}

/* The first product of a list of keys, while k of the next one is prefetched. */
INLINE void multiply_list(const decode_task *task, const decode_list *keys, fdma_dtype dtype,
                          int rows) {
    const decode_context *const decode = task->decode;
    const float *const q = task->q + keys->head * decode->padded * decode->width;
    for (int n = 0; n < keys->count; n += decode_sums / rows)
        for (int64_t r = 0; r < decode->padded; r += rows)
            multiply_keys(task->weights + r * decode_keys + n, q + r * decode->width, decode->width,
                          keys->k + n, r == 0 ? keys->k + n : NULL, dtype, rows,
                          decode->problem->head_dim);
}

/* ---- P V ---- */

/* Loads channels from d on of `terms` rows of v: an even number of vectors, or one vector with the
 * last channels. Each lane is a word of keys, of one channel. */
INLINE void load_value_words(vf *x, const void *const *v, fdma_dtype dtype, int64_t d, int vectors,
                             int64_t dim) {
    if (vectors == 1 && terms == 2)
        x[0] = vf_load_pairs(v[0], v[1], d, channels_at(d, dim));
    else if (vectors == 1)
        x[0] = channels_of(v[0], dtype, d, channels_at(d, dim));
    UNROLL
    for (int m = 0; m + 1 < vectors; m += 2) {
        const int64_t at = d + m * vf_width;
        if (terms == 2)
            vf_load_even_odd_pairs((const uint16_t *)v[0] + at, (const uint16_t *)v[1] + at, &x[m],
                                   &x[m + 1]);
        else
            load_pair(x + m, v[0], dtype, at);
    }
}

/* out += weights v, for some rows and the vectors of channels that load_value_words() loads. A
 * block is summed before it is added to out. So out is a sum of split / decode_keys numbers, and a
 * single key still counts next to all others of a long split. If `resumed`, out is the sum of the
 * block's earlier keys. */
INLINE void add_channels(float *out, int64_t length, const float *weights, const void *const *v,
                         int32_t count, const void *const *ahead, fdma_dtype dtype, int rows,
                         int vectors, bool resumed, int64_t d, int64_t dim) {
    vf o[shared_rows][strip_vectors];
    UNROLL
    for (int r = 0; r < rows; r++)
        if (resumed)
            load_vectors(o[r], out + r * length + d, 0, vectors);
        else
            clear_vectors(o[r], 0, vectors);
    for (int32_t n = 0; n < count; n += terms) {
        vf values[strip_vectors];
        prefetch_channels(ahead == NULL ? NULL : ahead + n, terms, dtype, d, vectors);
        load_value_words(values, v + n, dtype, d, vectors, dim);
        UNROLL
        for (int r = 0; r < rows; r++) {
            const vf_word weight = vf_load_word(weights + r * decode_keys + n / terms);
            UNROLL
            for (int m = 0; m < vectors; m++)
                o[r][m] = vf_dot(weight, values[m], o[r][m]);
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++)
        if (resumed)
            store_vectors(out + r * length + d, o[r], 0, vectors);
        else
            add_vectors(out + r * length + d, o[r], 0, vectors);
}

/* The second product for some rows. The channels are taken in strips whose sums fit the registers;
 * the rest is taken two vectors at a time, and then one. */
INLINE void add_rows(float *out, int64_t length, const float *weights, const void *const *v,
                     int32_t count, const void *const *ahead, fdma_dtype dtype, int rows,
                     bool resumed, int64_t dim) {
    const int strip = strip_vectors < decode_sums / rows ? strip_vectors : decode_sums / rows;
    int64_t d = 0;
    for (; d + strip * vf_width <= dim; d += strip * vf_width)
        add_channels(out, length, weights, v, count, ahead, dtype, rows, strip, resumed, d, dim);
    for (; d < whole_pairs(dim); d += 2 * vf_width)
        add_channels(out, length, weights, v, count, ahead, dtype, rows, 2, resumed, d, dim);
    for (; d < dim; d += vf_width)
        add_channels(out, length, weights, v, count, ahead, dtype, rows, 1, resumed, d, dim);
}

/* The second product of a list of keys, while v of the next one is prefetched. */
INLINE void add_list(const decode_task *task, const decode_list *keys, float *out, fdma_dtype dtype,
                     int rows) {
    const decode_context *const decode = task->decode;
    for (int64_t r = 0; r < decode->padded; r += rows)
        add_rows(out + r * partial_length(decode), partial_length(decode),
                 task->weights + r * decode_keys, keys->v, keys->count, r == 0 ? keys->v : NULL,
                 dtype, rows, false, decode->problem->head_dim);
}

/* Restores the order of the channels of a row of out, which are in the order of load_pair(). */
static void restore_order(float *out, fdma_dtype dtype, int64_t dim) {
    float pair[2 * vf_width];
    for (int64_t d = 0; dtype == FDMA_BFLOAT16 && d < whole_pairs(dim); d += 2 * vf_width) {
        memcpy(pair, out + d, sizeof pair);
        for (int64_t n = 0; n < vf_width; n++) {
            out[d + 2 * n] = pair[n];
            out[d + 2 * n + 1] = pair[vf_width + n];
        }
    }
}

/* ---- the products in the order of memory ---- */

/* The two products for one row of each head, without a selection. All heads of a task
 * then keep the same keys, and rows are read in the order of memory: all heads of a key, then the
 * next key. The processor's own prefetchers follow this order. Prefetch instructions alone reach
 * two thirds of the rate of a plain read, because each occupies one of the few miss buffers of the
 * L1 cache until its line has come from memory. The results equal those of the other products
 * bit for bit: which of the two a task uses depends on the number of threads. */

enum {
    ahead_bytes = 4096, /* bytes of k or v from the multiplied row to the prefetched one */
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

INLINE void multiply_heads(const decode_task *task, const dense_arrays *arrays,
                           const decode_list *keys, fdma_dtype dtype) {
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

static void prefetch_first_values(const decode_task *task, const decode_list *keys, int64_t head) {
    const dense_rows v = dense_rows_of(task, &task->decode->problem->v);
    for (int64_t n = 0; n < min(v.keys, keys->count); n++)
        prefetch_row((const uint8_t *)keys->v[n] + head * v.head_bytes, v.bytes);
}

/* The second product of a block of keys, into the arrays' sums. */
INLINE void add_heads(const decode_task *task, const dense_arrays *arrays, const decode_list *keys,
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

/* Makes the logits of a block -inf where the row does not keep the key. */
NOINLINE void mask_row(const decode_task *task, const decode_list *keys, int64_t row,
                       float *logits) {
    const int32_t position = row_position(task->decode->problem, row);
    for (int32_t n = 0; n < keys->count; n++) {
        const int32_t j = keys->key[n];
        if (j > position || (keys->expiry != NULL && keys->expiry[j] <= position))
            logits[n] = -INFINITY;
    }
}

/* cap * tanh(products * scale / cap) */
NOINLINE void cap_row(float *products, float scale, float cap) {
    for (int64_t n = 0; n < decode_keys; n += vf_width) {
        const vf scaled = vf_mul(vf_load(products + n), vf_set(scale_over_cap(scale, cap)));
        vf_store(products + n, vf_mul(vf_set(cap), tanh_of(scaled)));
    }
}

/* Turns products into logits, -inf where the row does not keep the key. */
INLINE void find_row_logits(vf *s, const decode_task *task, const decode_list *keys, int64_t row,
                            float *products) {
    const float cap = task->decode->cap, scale = task->decode->scale;
    if (cap > 0)
        cap_row(products, scale, cap);
    UNROLL
    for (int m = 0; m < key_vectors; m++) {
        const vf bias = vf_load(keys->bias + m * vf_width);
        s[m] = vf_fma(vf_load(products + m * vf_width), vf_set(cap > 0 ? 1 : scale), bias);
        s[m] = vf_keep(s[m], 0, keys->count - m * vf_width);
    }
    if (keys->masked) {
        store_vectors(products, s, 0, key_vectors);
        mask_row(task, keys, row, products);
        load_vectors(s, products, 0, key_vectors);
    }
}

/* Raises the maximum of a row to the greatest lane of `top`, and rescales everything that was
 * summed under the old maximum. */
NOINLINE void raise_row_max(const decode_context *decode, decode_partial row, vf top) {
    float lanes[vf_width];
    vf_store(lanes, top);
    for (int lane = 1; lane < vf_width; lane++)
        lanes[0] = lanes[lane] > lanes[0] ? lanes[lane] : lanes[0];
    const vf raised = vf_set(lanes[0]);
    const vf below = vf_sub(vf_load(row.max), raised);
    const vf factor = exp2_of(vf_mul(below, vf_set(log2e)));
    for (int64_t d = 0; d < decode->width; d += vf_width)
        vf_store(row.out + d, vf_mul(vf_load(row.out + d), factor));
    vf_store(row.sum, vf_mul(vf_load(row.sum), factor));
    vf_store(row.max, raised);
}

/* Turns the products of a row and a block of keys into weights, stored as words of keys. */
INLINE void weigh_row(const decode_task *task, const decode_list *keys, int64_t row,
                      decode_partial partial) {
    float *const weights = task->weights + row * decode_keys;
    vf s[key_vectors], top = vf_load(partial.max), sum = vf_set(0);
    find_row_logits(s, task, keys, row, weights);
    UNROLL
    for (int m = 0; m < key_vectors; m++)
        top = vf_max(s[m], top);
    if (vf_any_greater(top, vf_load(partial.max)))
        raise_row_max(task->decode, partial, top);
    const vf max = vf_load(partial.max);
    UNROLL
    for (int m = 0; m < key_vectors; m++) {
        const vf weight = exp2_of(vf_mul(vf_sub(s[m], max), vf_set(log2e)));
        vf_store_terms(weights + m * vf_width / terms, weight);
        sum = vf_add(sum, weight);
    }
    vf_store(partial.sum, vf_add(vf_load(partial.sum), sum));
}

INLINE void attend_list_as(const decode_task *task, const decode_list *keys, fdma_dtype dtype,
                           int rows) {
    const decode_context *const decode = task->decode;
    float *const out = partial_of(decode, head_of(task, keys->head), task->split, 0).out;
    const int64_t length = partial_length(decode), padded = decode->padded;
    multiply_list(task, keys, dtype, rows);
    for (int64_t row = 0; row < padded; row++)
        weigh_row(task, keys, row, partial_at(decode, out + row * length));
    add_list(task, keys, out, dtype, rows);
}

INLINE void attend_list_of(const decode_task *task, const decode_list *keys, fdma_dtype dtype) {
    if (task->decode->padded == 1)
        attend_list_as(task, keys, dtype, 1);
    else if (task->decode->padded == 2)
        attend_list_as(task, keys, dtype, 2);
    else
        attend_list_as(task, keys, dtype, shared_rows);
}

/* The loops are compiled for each dtype and for one, two and more rows. */
static void attend_list(const decode_task *task, const decode_list *keys) {
    if (task->decode->problem->dtype == FDMA_FLOAT32)
        attend_list_of(task, keys, FDMA_FLOAT32);
    else if (task->decode->problem->dtype == FDMA_FLOAT16)
        attend_list_of(task, keys, FDMA_FLOAT16);
    else
        attend_list_of(task, keys, FDMA_BFLOAT16);
}

/* Turns the products of all heads and a block of keys into weights, and prefetches the first rows
 * of v. */
static void weigh_heads(const decode_task *task, const dense_arrays *arrays, decode_list *keys) {
    decode_task one = *task;
    for (int64_t head = 0; head < task->heads; head++) {
        prefetch_first_values(task, keys, head);
        find_bias(task->decode->problem, task->b, task->first_head + head, keys->key, keys->count,
                  keys->bias);
        keys->head = head;
        one.weights = arrays->weights + head * decode_keys;
        weigh_row(&one, keys, 0, partial_of(task->decode, head_of(task, head), task->split, 0));
    }
}

INLINE void attend_heads_of(const decode_task *task, const dense_arrays *arrays, decode_list *keys,
                            fdma_dtype dtype) {
    multiply_heads(task, arrays, keys, dtype);
    weigh_heads(task, arrays, keys);
    add_heads(task, arrays, keys, dtype);
}

static void attend_heads(const decode_task *task, const dense_arrays *arrays, decode_list *keys) {
    const decode_context *const decode = task->decode;
    if (decode->problem->dtype == FDMA_FLOAT32)
        attend_heads_of(task, arrays, keys, FDMA_FLOAT32);
    else if (decode->problem->dtype == FDMA_FLOAT16)
        attend_heads_of(task, arrays, keys, FDMA_FLOAT16);
    else
        attend_heads_of(task, arrays, keys, FDMA_BFLOAT16);
    for (int64_t head = 0; head < task->heads; head++) {
        float *const out = partial_of(decode, head_of(task, head), task->split, 0).out;
        const float *const sums = arrays->sums + head * decode->width;
        for (int64_t d = 0; d < decode->width; d += vf_width)
            vf_store(out + d, vf_add(vf_load(out + d), vf_load(sums + d)));
    }
}

static void attend_dense_split(const decode_task *task) {
    const dense_arrays arrays = dense_arrays_of(task);
    decode_task first = *task; // all heads have the keys of one
    decode_list keys;
    first.heads = 1;
    for (;;) {
        first.next_head = 0;
        list_decode_keys(&first, &keys);
        if (keys.count == 0)
            return;
        attend_heads(task, &arrays, &keys);
    }
}

/* Loads q of a head, with zeros past the last channel, and clears its partial results.
 * Rows beyond the last one repeat it. */
static void begin_head(const decode_task *task, int64_t head) {
    const decode_context *const decode = task->decode;
    const fdma_problem *const problem = decode->problem;
    const int64_t dim = problem->head_dim;
    const row_range rows = {.b = task->b, .g = task->first_head + head};
    for (int64_t row = 0; row < decode->padded; row++) {
        const void *const from =
            row_of_lane(problem, &problem->q, &rows, min(row, decode->rows - 1));
        const decode_partial partial = partial_of(decode, head_of(task, head), task->split, row);
        float *const q = task->q + (head * decode->padded + row) * decode->width;
        load_query(q, from, problem->dtype, dim);
        for (int64_t d = 0; d < dim; d += vf_width)
            vf_store(partial.out + d, vf_set(0));
        vf_store(partial.sum, vf_set(0));
        vf_store(partial.max, vf_set(-FLT_MAX));
    }
}

/* Lists the first block of the next split, which this thread will probably take next. */
static void list_next_split(const decode_task *task, decode_list *keys) {
    decode_task next = *task;
    next.split++;
    next.next_head = 0;
    for (int64_t head = 0; head < next.heads; head++)
        next.cursor[head] = start_split(&next, head);
    list_decode_keys(&next, keys);
}

static void attend_selected_split(decode_task *task) {
    decode_list lists[2], after;
    list_decode_keys(task, &lists[0]);
    for (int now = 0; lists[now].count > 0; now = 1 - now) {
        const decode_list *next = &lists[1 - now];
        list_decode_keys(task, &lists[1 - now]);
        if (next->count == 0) {
            list_next_split(task, &after);
            next = after.count > 0 ? &after : &lists[now];
        }
        add_rows_ahead(&lists[now], next);
        attend_list(task, &lists[now]);
    }
}

static void attend_split(const void *context, int64_t index, int32_t thread) {
    const decode_context *const decode = context;
    const uint32_t modes = flush_subnormals();
    const int64_t set = index / decode->splits % decode->head_sets;
    const int64_t first_head = set * decode->heads;
    decode_task task = {
        .decode = decode,
        .b = index / decode->splits / decode->head_sets,
        .first_head = first_head,
        .heads = min(decode->problem->kv_heads - first_head, decode->heads),
        .split = index % decode->splits,
        .q = decode->scratch + thread * decode->scratch_size,
    };
    task.weights = task.q + decode->heads * decode->padded * decode->width;
    for (int64_t head = 0; head < task.heads; head++) {
        begin_head(&task, head);
        task.cursor[head] = start_split(&task, head);
    }
    if (decode->dense)
        attend_dense_split(&task);
    else
        attend_selected_split(&task);
    restore_modes(modes);
}

/* Merges the partial results of a row into the one of the first split, and returns its sum. */
static float merge_splits(const decode_context *decode, int64_t head, int64_t row) {
    const decode_partial merged = partial_of(decode, head, 0, row);
    vf max = vf_load(merged.max), total = vf_set(0);
    for (int64_t split = 1; split < decode->splits; split++)
        max = vf_max(vf_load(partial_of(decode, head, split, row).max), max);
    for (int64_t split = 0; split < decode->splits; split++) {
        const decode_partial partial = partial_of(decode, head, split, row);
        const vf factor = exp2_of(vf_mul(vf_sub(vf_load(partial.max), max), vf_set(log2e)));
        total = vf_fma(vf_load(partial.sum), factor, total);
        for (int64_t d = 0; d < decode->width; d += vf_width) {
            const vf before = split > 0 ? vf_load(merged.out + d) : vf_set(0);
            vf_store(merged.out + d, vf_fma(vf_load(partial.out + d), factor, before));
        }
    }
    vf_store(merged.max, max);
    return vf_sum(total);
}

/* Merges the splits of a head, and writes out and lse. */
static void merge_head(const void *context, int64_t head, int32_t thread) {
    const decode_context *const decode = context;
    const fdma_problem *const problem = decode->problem;
    const row_range rows = rows_of_head(problem, head);
    const uint32_t modes = flush_subnormals();
    (void)thread;
    for (int64_t row = 0; row < decode->rows; row++) {
        const decode_partial merged = partial_of(decode, head, 0, row);
        const float sum = decode->splits > 0 ? merge_splits(decode, head, row) : 0;
        const float max = sum == 0 ? 0 : *merged.max;
        const float sink = sink_of_row(problem, rows.g, row);
        void *const to = row_of_lane(problem, &problem->out, &rows, row);
        const vf inverse = vf_set(inverse_of_sum(max, sum, sink));
        if (sum != 0)
            restore_order(merged.out, problem->dtype, problem->head_dim);
        for (int64_t d = 0; d < problem->head_dim; d += vf_width)
            store_channels(to, problem->dtype, d,
                           sum == 0 ? inverse : vf_mul(vf_load(merged.out + d), inverse),
                           channels_at(d, problem->head_dim));
        if (is_present(&problem->lse))
            *float_of_lane(problem, &problem->lse, &rows, row) = lse_of_row(max, sum, sink);
    }
    restore_modes(modes);
}

static int32_t threads_to_read(const fdma_problem *problem, int64_t tasks, int64_t bytes) {
    return fdma_worthwhile_threads(problem->exec.threads, tasks, bytes / bytes_per_microsecond);
}

/* Heads of a task: neighbours in memory, and few enough that each thread has two tasks. */
static int64_t heads_of_task(const fdma_problem *problem, int64_t most, int64_t splits,
                             int32_t threads) {
    if (problem->k.stride[2] > problem->k.stride[1])
        return 1;
    int64_t heads = min(problem->kv_heads, most);
    while (heads > 1 && splits < 2 * threads * heads)
        heads = divide_up(heads, 2);
    return heads;
}

/* Divides the heads among tasks. Without a selection, the keys of one row are read in the order of
 * memory if a task has all heads, or if the rows of a head follow each other. */
static void divide_heads(const fdma_problem *problem, int64_t splits, decode_context *decode) {
    const bool dense = !problem->selected && problem->carried_len == 0 && decode->padded == 1;
    const bool by_head = problem->k.stride[2] > problem->k.stride[1];
    const int64_t heads = heads_of_task(problem, dense_heads, splits, decode->threads);
    decode->dense = dense && (by_head || heads == problem->kv_heads);
    decode->heads =
        decode->dense ? heads : heads_of_task(problem, decode_heads, splits, decode->threads);
}

/* The most splits of a sequence. They depend on kv_len alone, so that results depend neither on the
 * threads nor on the batch. No smaller kv_len has more splits. */
static int64_t most_splits(const fdma_problem *problem) {
    return min(max((problem->kv_len + usual_split / 2) / usual_split, 1), max_splits);
}

/* Divides the workspace, and returns the bytes that the call needs of it. */
static size_t plan_decode(const fdma_problem *problem, decode_context *decode) {
    const int64_t rows = problem->q_len * problem->group;
    const int64_t heads = problem->batch * problem->kv_heads;
    const int64_t key_bytes = problem->head_dim * (int64_t)fdma_dtype_size(problem->dtype);
    *decode = (decode_context){
        .problem = problem,
        .rows = rows,
        .padded = rows > 2 ? round_up(rows, shared_rows) : rows,
        .width = round_up(problem->head_dim, vf_width),
        .scale = (float)problem->scale,
        .cap = softcap_of(problem),
    };
    const int64_t most = most_splits(problem);
    decode->split = round_up(max(divide_up(problem->kv_len, most), 1), decode_keys);
    decode->splits = problem->any_len ? most : divide_up(problem->kv_len, decode->split);
    const int64_t splits = heads * decode->splits;
    decode->threads =
        threads_to_read(problem, splits, 2 * heads * keys_of_query(problem) * key_bytes);
    divide_heads(problem, splits, decode);
    if (problem->any_len) {
        decode->threads = fdma_thread_count(problem->exec.threads, INT32_MAX);
        decode->heads = problem->kv_heads;
    }
    decode->head_sets = divide_up(problem->kv_heads, decode->heads);
    decode->scratch_size = decode->padded * decode->heads * decode->width +
                           max(decode->padded * decode_keys, dense_scratch(decode));
    fdma_arena arena = fdma_arena_of(problem);
    decode->partial = take_floats(&arena, splits * decode->padded * partial_length(decode));
    decode->scratch = take_floats(&arena, decode->threads * decode->scratch_size);
    return fdma_arena_size(&arena);
}

static size_t decode_workspace(const fdma_problem *problem) {
    decode_context decode;
    return plan_decode(problem, &decode);
}

static fdma_status run_decode(const fdma_problem *problem) {
    decode_context decode;
    plan_decode(problem, &decode);
    const int64_t heads = problem->batch * problem->kv_heads, splits = heads * decode.splits;
    const int64_t bytes = splits * decode.rows * partial_length(&decode) * (int64_t)sizeof(float);
    fdma_parallel_for(problem->exec.parallel, decode.threads,
                      problem->batch * decode.head_sets * decode.splits, attend_split, &decode);
    fdma_parallel_for(problem->exec.parallel, threads_to_read(problem, heads, bytes), heads,
                      merge_head, &decode);
    return FDMA_OK;
}
