/* A tensor with a number for each pair of a query and a key, as an argument of kernels. */
#pragma once

#include "cuda/device/element.cuh"

/* [batch, heads, q_len, kv_len]; data NULL: absent. Strides are in elements, and 0 along an axis
 * that is broadcast. */
struct pair_view {
    void *data;
    int64_t batch, head, query, key;
    int32_t sharing;                      // query heads that share an entry of the axis of heads
    int32_t dtype;                        // an fdma_dtype
    static constexpr int32_t float32 = 1; // FDMA_FLOAT32; kernels do not see fdma.h

    __device__ int64_t offset(int64_t b, int32_t h, int64_t i, int64_t j) const {
        return b * batch + h / sharing * head + i * query + j * key;
    }
};

__device__ static bool is_unmasked(const pair_view &mask, int64_t b, int32_t h, int64_t i,
                                   int64_t j) {
    return mask.data == NULL || ((const uint8_t *)mask.data)[mask.offset(b, h, i, j)] != 0;
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
