/* The two products of decode. Channels stand in the lanes, so that a row of k or v is used in its
 * order in memory. Two vectors of bfloat16 channels are loaded at once, the even channels into one
 * and the odd ones into the other, which takes fewer instructions than loading them in order. q and
 * out have this order too; restore_order() puts out in the order of channels before it is
 * stored. */
#pragma once

#include "cpu/decode/decode_keys.h"

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

INLINE void prefetch_channels(const void *const *rows, int count, fdma_dtype dtype, int64_t d,
                              int vectors) {
    UNROLL
    for (int m = 0; rows != NULL && m < vectors; m++)
        prefetch_rows(rows, count, (d + m * vf_width) * (dtype == FDMA_FLOAT32 ? 4 : 2));
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

/* The first product of a block of keys, while k of the next one is prefetched. */
INLINE void multiply_block(const decode_task *task, const decode_block *now,
                           const decode_block *next, fdma_dtype dtype, int rows) {
    const decode_context *const decode = task->decode;
    const float *const q = task->q + now->head * decode->padded * decode->width;
    for (int n = 0; n < now->count; n += decode_sums / rows)
        for (int64_t r = 0; r < decode->padded; r += rows)
            multiply_keys(task->weights + r * decode_keys + n, q + r * decode->width, decode->width,
                          now->k + n, r == 0 ? next->k + n : NULL, dtype, rows,
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

/* The second product of a block of keys, while v of the next one is prefetched. */
INLINE void add_block(const decode_task *task, const decode_block *now, const decode_block *next,
                      fdma_dtype dtype, int rows) {
    const decode_context *const decode = task->decode;
    for (int64_t r = 0; r < decode->padded; r += rows)
        add_rows(partial_of(decode, head_of(task, now->head), task->split, r).out,
                 partial_length(decode), task->weights + r * decode_keys, now->v, now->count,
                 r == 0 ? next->v : NULL, dtype, rows, false, decode->problem->head_dim);
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
