/* Tensors as kernels take them. Strides are in elements. */
#pragma once

#include "cuda/device/host.cuh"

/* [batch, length, heads, head_dim] */
struct head_view {
    void *data;
    int64_t batch, row, head;
};

static inline head_view view_of(const fdma_tensor *tensor) {
    return {tensor->data, tensor->stride[0], tensor->stride[1], tensor->stride[2]};
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

    /* The numbers of one head. */
    __device__ number *at(int64_t b, int64_t h) const { return data + b * batch + h * head; }
};

template <typename number> static number_view<number> numbers_of(const fdma_tensor *tensor) {
    return {(number *)tensor->data, tensor->stride[0], tensor->stride[1]};
}
