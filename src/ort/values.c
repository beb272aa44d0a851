/* Tensors and memory of ONNX Runtime. */
#include "ort/ort.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

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

/* ---- statuses, and the attributes of a node ---- */

OrtStatus *fdma_ort_refuse(const OrtApi *api, OrtErrorCode code, const char *format, ...) {
    char message[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return api->CreateStatus(code, message);
}

OrtStatus *fdma_ort_status(const OrtApi *api, fdma_status status) {
    switch (status) {
    case FDMA_OK:
        return NULL;
    case FDMA_INVALID_ARGUMENT:
        return api->CreateStatus(ORT_INVALID_ARGUMENT, fdma_last_error());
    case FDMA_UNSUPPORTED:
        return api->CreateStatus(ORT_NOT_IMPLEMENTED, fdma_last_error());
    default:
        return api->CreateStatus(ORT_FAIL, fdma_last_error());
    }
}

/* True if a query for an attribute has succeeded. Releases its status. */
static int succeeds(const OrtApi *api, OrtStatus *status) {
    if (status == NULL)
        return 1;
    api->ReleaseStatus(status);
    return 0;
}

/* ONNX Runtime gives the same status for an attribute that is absent as for one of another type. */
static int is_there(const OrtApi *api, const OrtKernelInfo *info, const char *name) {
    int64_t integer;
    float number;
    size_t size = 0;
    return succeeds(api, api->KernelInfoGetAttribute_int64(info, name, &integer)) ||
           succeeds(api, api->KernelInfoGetAttribute_float(info, name, &number)) ||
           succeeds(api, api->KernelInfoGetAttribute_string(info, name, NULL, &size));
}

/* An absent attribute gets its default, also in the functions below. */
static OrtStatus *read_integer(const OrtApi *api, const OrtKernelInfo *info, const char *name,
                               int64_t *value) {
    if (succeeds(api, api->KernelInfoGetAttribute_int64(info, name, value)))
        return NULL;
    *value = 0;
    if (is_there(api, info, name))
        return fdma_ort_refuse(api, ORT_INVALID_ARGUMENT, "%s: is not an int, want one", name);
    return NULL;
}

static OrtStatus *read_number(const OrtApi *api, const OrtKernelInfo *info, const char *name,
                              double *value) {
    float number = 0;
    if (!succeeds(api, api->KernelInfoGetAttribute_float(info, name, &number)) &&
        is_there(api, info, name))
        return fdma_ort_refuse(api, ORT_INVALID_ARGUMENT, "%s: is not a float, want one", name);
    *value = (double)number;
    return NULL;
}

static OrtStatus *read_choice(const OrtApi *api, const OrtKernelInfo *info, const char *name,
                              const char *const choices[3], int32_t *value) {
    char text[32] = "";
    size_t size = sizeof text;
    *value = 0;
    if (!is_there(api, info, name))
        return NULL;
    if (succeeds(api, api->KernelInfoGetAttribute_string(info, name, text, &size)))
        for (int32_t index = 0; index < 3; index++)
            if (strcmp(text, choices[index]) == 0) {
                *value = index;
                return NULL;
            }
    return fdma_ort_refuse(api, ORT_INVALID_ARGUMENT, "%s: is '%s', want '%s', '%s' or '%s'", name,
                           text, choices[0], choices[1], choices[2]);
}

OrtStatus *fdma_ort_read_attributes(const OrtApi *api, const OrtKernelInfo *info,
                                    ort_attributes *attributes) {
    static const char *const bias_forms[] = {"exp", "linear", "none"};
    static const char *const scopes[] = {"default", "causal", "global"};
    int32_t bias_form, scope;
    ORT_TRY(read_integer(api, info, "window", &attributes->window));
    ORT_TRY(read_integer(api, info, "recent", &attributes->recent));
    ORT_TRY(read_integer(api, info, "sinks", &attributes->sinks));
    ORT_TRY(read_integer(api, info, "causal", &attributes->causal));
    ORT_TRY(read_number(api, info, "scale", &attributes->scale));
    ORT_TRY(read_number(api, info, "softcap", &attributes->softcap));
    ORT_TRY(read_choice(api, info, "bias_form", bias_forms, &bias_form));
    ORT_TRY(read_choice(api, info, "scope", scopes, &scope));
    attributes->bias_form = (fdma_bias_form)bias_form;
    attributes->scope = (fdma_scope)scope;
    return NULL;
}
