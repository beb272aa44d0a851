/* The operators of the domain "fdma", the callbacks by which ONNX Runtime reaches them, and the one
 * exported function, RegisterCustomOps().
 *
 * Source: OrtCustomOp in onnxruntime_c_api.h. */
#include <stdatomic.h>
#include <stdlib.h>

#include "ort/ort.h"

/* ---- what ONNX Runtime asks about an operator ---- */

static const ort_operator *operator_of(const OrtCustomOp *callbacks) {
    return (const ort_operator *)callbacks;
}

static const char *ORT_API_CALL name_of(const OrtCustomOp *callbacks) {
    return operator_of(callbacks)->name;
}

static const char *ORT_API_CALL provider_of(const OrtCustomOp *callbacks) {
    (void)callbacks;
    return NULL; // the CPU
}

static size_t ORT_API_CALL count_inputs(const OrtCustomOp *callbacks) {
    return operator_of(callbacks)->input_count;
}

static size_t ORT_API_CALL count_outputs(const OrtCustomOp *callbacks) {
    return operator_of(callbacks)->output_count;
}

static ONNXTensorElementDataType type_of(const ort_operator *op, ort_type type) {
    switch (type) {
    case ORT_STATES:
        return op->states;
    case ORT_FLOAT32:
        return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    case ORT_INT32:
        return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
    default:
        return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED; // any
    }
}

static ONNXTensorElementDataType ORT_API_CALL input_type(const OrtCustomOp *callbacks,
                                                         size_t index) {
    const ort_operator *const op = operator_of(callbacks);
    return type_of(op, op->inputs[index].type);
}

static ONNXTensorElementDataType ORT_API_CALL output_type(const OrtCustomOp *callbacks,
                                                          size_t index) {
    const ort_operator *const op = operator_of(callbacks);
    return type_of(op, op->outputs[index].type);
}

static OrtCustomOpInputOutputCharacteristic characteristic_of(const ort_argument *argument) {
    return argument->optional ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
}

static OrtCustomOpInputOutputCharacteristic ORT_API_CALL
input_characteristic(const OrtCustomOp *callbacks, size_t index) {
    return characteristic_of(&operator_of(callbacks)->inputs[index]);
}

static OrtCustomOpInputOutputCharacteristic ORT_API_CALL
output_characteristic(const OrtCustomOp *callbacks, size_t index) {
    return characteristic_of(&operator_of(callbacks)->outputs[index]);
}

static OrtMemType ORT_API_CALL input_memory(const OrtCustomOp *callbacks, size_t index) {
    (void)callbacks;
    (void)index;
    return OrtMemTypeDefault;
}

static int ORT_API_CALL first_version(const OrtCustomOp *callbacks) {
    (void)callbacks;
    return 1;
}

static int ORT_API_CALL last_version(const OrtCustomOp *callbacks) {
    (void)callbacks;
    return 1;
}

/* ---- a node ---- */

/* State of a node between its runs. Runs may overlap, so none of them writes to it. */
typedef struct node {
    const ort_operator *op;
    const OrtApi *api;
    OrtMemoryInfo *memory;
    ort_attributes attributes;
} node;

static void ORT_API_CALL destroy(void *kernel) {
    node *const made = kernel;
    if (made->memory != NULL)
        made->api->ReleaseMemoryInfo(made->memory);
    free(made);
}

static OrtStatus *ORT_API_CALL create(const OrtCustomOp *callbacks, const OrtApi *api,
                                      const OrtKernelInfo *info, void **kernel) {
    node *const made = calloc(1, sizeof *made);
    if (made == NULL)
        return fdma_ort_refuse(api, ORT_FAIL, "no memory for a node");
    made->op = operator_of(callbacks);
    made->api = api;
    OrtStatus *status =
        api->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &made->memory);
    if (status == NULL)
        status = fdma_ort_read_attributes(api, info, &made->attributes);
    if (status != NULL) {
        destroy(made);
        return status;
    }
    *kernel = made;
    return NULL;
}

static OrtStatus *ORT_API_CALL compute(void *kernel, OrtKernelContext *context) {
    const node *const made = kernel;
    const OrtApi *const api = made->api;
    ort_call call = {.api = api, .memory = made->memory, .context = context};
    call.attributes = made->attributes;
    size_t count; // without optional inputs that are left out at the end
    ORT_TRY(api->KernelContext_GetInputCount(context, &count));
    for (size_t index = 0; index < made->op->input_count && index < count; index++) {
        const OrtValue *value;
        ORT_TRY(api->KernelContext_GetInput(context, index, &value));
        if (value != NULL) {
            const char *const name = made->op->inputs[index].name;
            ORT_TRY(fdma_ort_view(api, value, name, &call.inputs[index]));
        }
    }
    return made->op->run(&call);
}

/* ---- the operators ---- */

static const ort_argument attention_inputs[] = {
    {"q", ORT_STATES, 0},      {"k", ORT_STATES, 0},
    {"v", ORT_STATES, 0},      {"dt_proj", ORT_ANY, 0},
    {"a", ORT_ANY, 0},         {"dt_bias", ORT_ANY, 1},
    {"key_valid", ORT_ANY, 1}, {"sink_logit", ORT_FLOAT32, 1},
};
static const ort_argument attention_outputs[] = {{"out", ORT_STATES, 0}};

static const ort_argument decode_inputs[] = {
    {"q", ORT_STATES, 0},
    {"k", ORT_STATES, 0},
    {"v", ORT_STATES, 0},
    {"dt_proj", ORT_ANY, 0},
    {"a", ORT_ANY, 0},
    {"cache_k", ORT_STATES, 0},
    {"cache_v", ORT_STATES, 0},
    {"cache_bias", ORT_FLOAT32, 0},
    {"cache_score", ORT_FLOAT32, 0},
    {"cache_position", ORT_INT32, 0},
    {"cache_seen", ORT_INT32, 0},
    {"dt_bias", ORT_ANY, 1},
    {"key_valid", ORT_ANY, 1},
    {"sink_logit", ORT_FLOAT32, 1},
};
static const ort_argument decode_outputs[] = {
    {"out", ORT_STATES, 0},          {"cache_k", ORT_STATES, 0},
    {"cache_v", ORT_STATES, 0},      {"cache_bias", ORT_FLOAT32, 0},
    {"cache_score", ORT_FLOAT32, 0}, {"cache_position", ORT_INT32, 0},
    {"cache_seen", ORT_INT32, 0},
};

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
_Static_assert(COUNT(decode_inputs) <= ORT_INPUTS_MAX, "a call has room for all inputs");

#define CALLBACKS                                                                                  \
    .version = ORT_OLDEST, .GetName = name_of, .GetExecutionProviderType = provider_of,            \
    .GetInputType = input_type, .GetInputTypeCount = count_inputs, .GetOutputType = output_type,   \
    .GetOutputTypeCount = count_outputs, .KernelDestroy = destroy,                                 \
    .GetInputCharacteristic = input_characteristic,                                                \
    .GetOutputCharacteristic = output_characteristic, .GetInputMemoryType = input_memory,          \
    .CreateKernelV2 = create, .KernelComputeV2 = compute, .GetStartVersion = first_version,        \
    .GetEndVersion = last_version

#define ATTENTION(type)                                                                            \
    {                                                                                              \
        .callbacks = {CALLBACKS},                                                                  \
        .name = "Attention",                                                                       \
        .inputs = attention_inputs,                                                                \
        .outputs = attention_outputs,                                                              \
        .input_count = COUNT(attention_inputs),                                                    \
        .output_count = COUNT(attention_outputs),                                                  \
        .states = (type),                                                                          \
        .run = fdma_ort_attention,                                                                 \
    }

#define DECODE(type)                                                                               \
    {                                                                                              \
        .callbacks = {CALLBACKS, .GetMayInplace = fdma_ort_decode_in_place,                        \
                      .ReleaseMayInplace = fdma_ort_release_in_place},                             \
        .name = "Decode",                                                                          \
        .inputs = decode_inputs,                                                                   \
        .outputs = decode_outputs,                                                                 \
        .input_count = COUNT(decode_inputs),                                                       \
        .output_count = COUNT(decode_outputs),                                                     \
        .states = (type),                                                                          \
        .run = fdma_ort_decode,                                                                    \
    }

/* ONNX Runtime takes the row whose dtype fits a node. */
static const ort_operator operators[] = {
    ATTENTION(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT),
    ATTENTION(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16),
    ATTENTION(ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16),
    DECODE(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT),
    DECODE(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16),
    DECODE(ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16),
};

/* ---- registration ---- */

/* The domain, with the interface that made it. Sessions keep pointers to it, so all of them share
 * one, which lives until the library is unloaded. */
typedef struct domain {
    const OrtApi *api;
    OrtCustomOpDomain *handle;
} domain;

static _Atomic(domain *) shared;

static void release_domain(domain *made) {
    if (made == NULL)
        return;
    if (made->handle != NULL)
        made->api->ReleaseCustomOpDomain(made->handle);
    free(made);
}

__attribute__((destructor)) static void unload(void) {
    release_domain(atomic_exchange(&shared, NULL));
}

static OrtStatus *fill_domain(domain *made) {
    ORT_TRY(made->api->CreateCustomOpDomain("fdma", &made->handle));
    for (size_t index = 0; index < COUNT(operators); index++)
        ORT_TRY(made->api->CustomOpDomain_Add(made->handle, &operators[index].callbacks));
    return NULL;
}

static OrtStatus *find_domain(const OrtApi *api, domain **found) {
    *found = atomic_load(&shared);
    if (*found != NULL)
        return NULL;
    domain *const made = calloc(1, sizeof *made);
    if (made == NULL)
        return fdma_ort_refuse(api, ORT_FAIL, "no memory for the domain");
    made->api = api;
    OrtStatus *const status = fill_domain(made);
    if (status != NULL || !atomic_compare_exchange_strong(&shared, found, made))
        release_domain(made); // another thread was faster: `found` has its domain
    else
        *found = made;
    return status;
}

FDMA_API OrtStatus *ORT_API_CALL RegisterCustomOps(OrtSessionOptions *options,
                                                   const OrtApiBase *base);

OrtStatus *ORT_API_CALL RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {
    const OrtApi *const api = base->GetApi(ORT_OLDEST);
    if (api == NULL) // version 1 of the interface suffices for a status
        return fdma_ort_refuse(base->GetApi(1), ORT_NOT_IMPLEMENTED,
                               "onnxruntime: is %s, want %s or later", base->GetVersionString(),
                               ORT_OLDEST_NAME);
    domain *found;
    ORT_TRY(find_domain(api, &found));
    return api->AddCustomOpDomain(options, found->handle);
}
