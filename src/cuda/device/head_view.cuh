/* A tensor of four axes as kernels take it. */
#ifndef FDMA_CUDA_DEVICE_HEAD_VIEW_CUH
#define FDMA_CUDA_DEVICE_HEAD_VIEW_CUH

#include "cuda/device/host.cuh"

/* [batch, length, heads, head_dim]; strides in elements. */
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

#endif
