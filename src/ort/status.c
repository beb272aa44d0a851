/* Statuses of ONNX Runtime, and the attributes of a node. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "ort/ort.h"

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
