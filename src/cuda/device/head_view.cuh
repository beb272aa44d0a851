/* Tensors as arguments of kernels. Strides are in elements. */
#pragma once

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
