/* Tensors and memory of ONNX Runtime. */
#include <stdint.h>

#include "ort/ort.h"

static fdma_dtype dtype_of(ONNXTensorElementDataType type) {
    switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
        return FDMA_FLOAT32;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
        return FDMA_FLOAT16;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
        return FDMA_BFLOAT16;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE:
        return FDMA_FLOAT64;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32:
        return FDMA_INT32;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64:
        return FDMA_INT64;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL: // one byte, 0 or 1
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8:
        return FDMA_UINT8;
    default:
        return (fdma_dtype)0;
    }
}

static OrtStatus *read_shape(const OrtApi *api, const OrtTensorTypeAndShapeInfo *info,
                             const char *name, void *data, fdma_tensor *view) {
    ONNXTensorElementDataType type;
    size_t rank;
    int64_t shape[4];
    ORT_TRY(api->GetTensorElementType(info, &type));
    ORT_TRY(api->GetDimensionsCount(info, &rank));
    if (rank < 1 || rank > 4)
        return fdma_ort_refuse(api, ORT_INVALID_ARGUMENT, "%s: rank is %zu, want 1 to 4", name,
                               rank);
    if (dtype_of(type) == 0)
        return fdma_ort_refuse(api, ORT_NOT_IMPLEMENTED,
                               "%s: element type is %d, which no kernel supports", name, type);
    ORT_TRY(api->GetDimensions(info, shape, rank));
    *view = fdma_dense_tensor(data, dtype_of(type), (int32_t)rank, shape);
    return NULL;
}

OrtStatus *fdma_ort_view(const OrtApi *api, const OrtValue *value, const char *name,
                         fdma_tensor *view) {
    void *data;
    OrtTensorTypeAndShapeInfo *info;
    // The data of an input is only read: the C interface has one function for both.
    ORT_TRY(api->GetTensorMutableData((OrtValue *)(uintptr_t)value, &data));
    ORT_TRY(api->GetTensorTypeAndShape(value, &info));
    OrtStatus *const status = read_shape(api, info, name, data, view);
    api->ReleaseTensorTypeAndShapeInfo(info);
    return status;
}

OrtStatus *fdma_ort_allocate_output(const ort_call *call, size_t index, const fdma_tensor *like,
                                    void **out) {
    OrtValue *value = NULL;
    *out = NULL;
    ORT_TRY(call->api->KernelContext_GetOutput(call->context, index, like->shape,
                                               (size_t)like->rank, &value));
    if (value == NULL)
        return fdma_ort_refuse(call->api, ORT_INVALID_ARGUMENT,
                               "output %zu: is left out, want a name for it in the graph", index);
    return call->api->GetTensorMutableData(value, out);
}

OrtStatus *fdma_ort_take_scratch(const ort_call *call, size_t bytes, ort_scratch *scratch) {
    const OrtApi *const api = call->api;
    *scratch = (ort_scratch){0};
    if (bytes == 0)
        return NULL;
    ORT_TRY(api->KernelContext_GetAllocator(call->context, call->memory, &scratch->allocator));
    OrtStatus *const status = api->AllocatorAlloc(scratch->allocator, bytes, &scratch->memory);
    if (status != NULL) {
        api->ReleaseAllocator(scratch->allocator);
        *scratch = (ort_scratch){0};
    }
    return status;
}

OrtStatus *fdma_ort_free_scratch(const ort_call *call, ort_scratch *scratch, OrtStatus *status) {
    if (scratch->allocator == NULL)
        return status;
    OrtStatus *const freed = call->api->AllocatorFree(scratch->allocator, scratch->memory);
    call->api->ReleaseAllocator(scratch->allocator);
    *scratch = (ort_scratch){0};
    if (status == NULL)
        return freed;
    if (freed != NULL)
        call->api->ReleaseStatus(freed);
    return status;
}
