/* Tensor maps, by which the Tensor Memory Accelerator of compute capability 9.0 copies boxes of
 * rows of q or dout to shared memory, laid out as wgmma.cuh has it. */
#pragma once

#include "cuda/device/head_view.cuh"
#include "cuda/device/host.cuh"
#include "cuda/device/wgmma.cuh"

#include <cuda.h>

/* A tensor [batch, length, heads, head_dim] of 16-bit elements, copied in boxes of `rows` rows of
 * one head and panel_channels channels. Rows and channels past the end are 0. */
struct row_map {
    CUtensorMap map;
    bool has_batches, has_heads; // false: there is one, or it is repeated
};

/* Copies the box that begins with row `row` and channel `channel` of a head. */
__device__ static void copy_box(uint32_t shared, const row_map &rows, int32_t b, int32_t row,
                                int32_t head, int32_t channel, uint64_t *barrier) {
    cp_async_bulk_tensor(shared, &rows.map, channel, row, rows.has_heads ? head : 0,
                         rows.has_batches ? b : 0, barrier);
}

using encode_map = CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* cuTensorMapEncodeTiled() of the driver, to which the library is not linked. */
static inline fdma_status find_encode_map(const char *what, encode_map *encode) {
    static encode_map found; // threads that find it at the same time find the same
    if (found == NULL) {
        const unsigned version = 12000; // of CUDA, in which the function was new
        void *function = NULL;
        cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
        FDMA_TRY(check_cuda(what,
                            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             version, cudaEnableDefault, &result)));
        FDMA_REQUIRE(result == cudaDriverEntryPointSuccess && function != NULL, FDMA_CUDA_ERROR,
                     "%s: the driver has no cuTensorMapEncodeTiled()", what);
        found = (encode_map)function;
    }
    *encode = found;
    return FDMA_OK;
}

/* Whether a tensor map can describe these rows: its strides are below 2^40 bytes, and it repeats
 * heads and sequences, but not rows. */
static inline bool has_row_map(const fdma_tensor *tensor) {
    const int64_t end = (int64_t)1 << 39; // of strides, in elements
    for (int axis = 0; axis < 3; axis++)
        if (tensor->shape[axis] > 1 && tensor->stride[axis] >= end)
            return false;
    return tensor->shape[1] <= 1 || tensor->stride[1] > 0;
}

/* Makes the map. `what` is the call, for messages. */
static inline fdma_status make_row_map(const char *what, const fdma_tensor *tensor, int32_t rows,
                                       row_map *made) {
    enum { rank = 4 };
    const int axes[rank] = {3, 1, 2, 0};
    cuuint64_t shape[rank], strides[rank];
    for (int i = 0; i < rank; i++) {
        const int64_t length = tensor->shape[axes[i]], stride = tensor->stride[axes[i]];
        const bool is_there = length > 1 && stride > 0;
        shape[i] = (cuuint64_t)(is_there ? length : 1);
        strides[i] = (cuuint64_t)(is_there ? 2 * stride : vec_bytes);
    }
    shape[0] = (cuuint64_t)tensor->shape[3];
    made->has_heads = shape[2] > 1;
    made->has_batches = shape[3] > 1;
    const cuuint32_t box[rank] = {panel_channels, (cuuint32_t)rows, 1, 1},
                     steps[rank] = {1, 1, 1, 1};
    encode_map encode = NULL;
    FDMA_TRY(find_encode_map(what, &encode));
    const CUresult result =
        encode(&made->map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, tensor->data, shape, strides + 1,
               box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    FDMA_REQUIRE(result == CUDA_SUCCESS, FDMA_CUDA_ERROR,
                 "%s: cuTensorMapEncodeTiled() returned %d", what, (int)result);
    return FDMA_OK;
}
