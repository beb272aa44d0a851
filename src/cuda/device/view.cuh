/* Tensors as arguments of kernels. Strides are in elements. */
#pragma once

#include "cuda/device/element.cuh"

#include <cuda_runtime.h>
#include <stdint.h>

/* [batch, length, heads, head_dim] */
struct head_view {
    void *data;
    int64_t batch, row, head;
};

/* True if rows of 16-bit elements can be copied 16 bytes at a time. strides: the bitwise or of all
 * strides, in elements. */
static inline bool is_aligned(const void *data, int64_t strides) {
    return (uintptr_t)data % 16 == 0 && strides % 8 == 0;
}

static inline bool is_aligned(const head_view &view) {
    return is_aligned(view.data, view.batch | view.row | view.head);
}

/* The first row of a head, of 16-bit elements. */
__device__ static const char *rows_of(const head_view &view, int32_t b, int32_t head) {
    return (const char *)view.data + 2 * (b * view.batch + head * view.head);
}

/* [batch, heads, length]: a number for each row or key. data NULL: absent. */
template <typename number> struct number_view {
    number *data;
    int64_t batch, head;

    __device__ number *at(int64_t b, int64_t h) const { return data + b * batch + h * head; }
};

/* The row of key j of a head: row j of `carried` if j is below carried_len, otherwise row j -
 * carried_len of `own`. */
template <typename element>
__device__ static element *row_of_key(const head_view &own, const head_view &carried,
                                      int32_t carried_len, int64_t b, int64_t g, int32_t j) {
    const bool is_carried = j < carried_len;
    const head_view &view = is_carried ? carried : own;
    const int64_t row = is_carried ? j : j - carried_len;
    return (element *)view.data + b * view.batch + row * view.row + g * view.head;
}

/* The number of key j, found as in row_of_key(). */
template <typename number>
__device__ static number *number_of_key(const number_view<number> &own,
                                        const number_view<number> &carried, int32_t carried_len,
                                        int64_t b, int64_t g, int32_t j) {
    return j < carried_len ? carried.at(b, g) + j : own.at(b, g) + (j - carried_len);
}

/* [batch, heads, q_len, kv_len]; data NULL: absent. Strides are in elements, and 0 along an axis
 * that is broadcast. */
struct pair_view {
    void *data;
    int64_t batch, head, query, key;
    int32_t sharing;                      // query heads that share an entry of the axis of heads
    int32_t dtype;                        // an fdma_dtype; kernels do not see fdma.h
    static constexpr int32_t float32 = 1; // FDMA_FLOAT32
    static constexpr int32_t float16 = 2, bfloat16 = 3;

    __device__ int64_t offset(int64_t b, int32_t h, int64_t i, int64_t j) const {
        return b * batch + h / sharing * head + i * query + j * key;
    }
};

/* Infinity in the 16-bit type of a mask. Numbers above 0 are the bits from 1 up to it. */
__device__ static uint32_t infinity_of(const pair_view &mask) {
    return mask.dtype == pair_view::float16 ? 0x7c00 : 0x7f80;
}

/* True if the element of attn_mask at an offset lets its query attend to its key: a byte that is
 * not 0, or a number above 0. */
__device__ static bool is_unmasked(const pair_view &mask, int64_t offset) {
    if (mask.data == NULL)
        return true;
    if (mask.dtype != pair_view::float16 && mask.dtype != pair_view::bfloat16)
        return ((const uint8_t *)mask.data)[offset] != 0;
    return ((const uint16_t *)mask.data)[offset] - 1u < infinity_of(mask);
}

__device__ static bool is_unmasked(const pair_view &mask, int64_t b, int32_t h, int64_t i,
                                   int64_t j) {
    return is_unmasked(mask, mask.offset(b, h, i, j));
}

/* The attn_bias at an offset. `element` is q's. */
template <typename element> __device__ static float bias_at(const pair_view &bias, int64_t offset) {
    return bias.dtype == pair_view::float32 ? ((const float *)bias.data)[offset]
                                            : to_float(((const element *)bias.data)[offset]);
}

/* The attn_bias of a query and a key, 0 without one. */
template <typename element>
__device__ static float pair_bias(const pair_view &bias, int64_t b, int32_t h, int64_t i,
                                  int64_t j) {
    return bias.data == NULL ? 0 : bias_at<element>(bias, bias.offset(b, h, i, j));
}

/* Packed sequences on a device: the beginning and the end of the sequence of each position.
 *
 * `starts` is device memory that the host does not read, so it may hold any number. It is clamped
 * first: element 0 counts as 0, and each other one as the largest up to it, within 0 to kv_len. The
 * ranges from the clamped starts ascend with the position and stay within kv_len, and kernels rely
 * on that. */

/* All arrays are in the workspace. */
struct packed_sequences {
    int32_t *starts; // [count + 1], clamped; NULL: the problem is not packed
    // [kv_len]: the first position and the end of the sequence of each position; past the last
    // sequence, its end twice
    int2 *ranges;
    uint32_t *index; // [kv_len]: index of the sequence; past the last one, count. May be NULL
    int32_t count;
};

/* Sequences in which only the first kv_used keys exist. kv_used is device memory that the host does
 * not read, so it may hold any number: its numbers are clamped wherever they are read. */

/* The number of keys of sequence b that exist. kv_used: [batch], the caller's; NULL: all exist. */
__device__ static int32_t count_used(const int32_t *kv_used, int64_t b, int32_t kv_len) {
    return kv_used == NULL ? kv_len : min(max(kv_used[b], 0), kv_len);
}
