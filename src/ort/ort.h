/* Declarations that the operators for ONNX Runtime share. Each operator is a row of constants
 * (ort_operator) and a function that makes the calls of fdma.h; operator.c has the callbacks of
 * ONNX Runtime for all. */
#pragma once

#include <onnxruntime_c_api.h>

#include "fdma.h"

/* The oldest version of the interface with everything that is used here: onnxruntime 1.18. */
#define ORT_OLDEST 18
#define ORT_OLDEST_NAME "1.18"

typedef enum ort_type {
    ORT_STATES,  /* float32, float16 or bfloat16, the same for all of a node */
    ORT_ANY,     /* whatever the call of fdma.h takes there; bool counts as uint8 */
    ORT_FLOAT32, /* float32 alone */
    ORT_INT32,   /* int32 alone */
} ort_type;

typedef struct ort_argument {
    const char *name; /* in messages */
    ort_type type;
    int32_t optional;
} ort_argument;

/* The attributes of a node: fields of the argument structs of fdma.h, of the same names. */
typedef struct ort_attributes {
    int64_t window, recent, sinks, causal;
    double scale, softcap;
    fdma_bias_form bias_form;
    fdma_scope scope;
} ort_attributes;

enum { ORT_INPUTS_MAX = 16 };

/* One run of a node. */
typedef struct ort_call {
    const OrtApi *api;
    const OrtMemoryInfo *memory;
    OrtKernelContext *context;
    ort_attributes attributes;
    fdma_tensor inputs[ORT_INPUTS_MAX]; /* rank 0: absent */
} ort_call;

typedef struct ort_operator {
    OrtCustomOp callbacks; /* first: the callbacks are given a pointer to it */
    const char *name;
    const ort_argument *inputs, *outputs;
    size_t input_count, output_count;
    ONNXTensorElementDataType states; /* the dtype of ORT_STATES in this row */
    OrtStatus *(*run)(const ort_call *call);
} ort_operator;

/* The `run` of each operator, and Decode's callbacks for outputs that reuse inputs. */
OrtStatus *fdma_ort_attention(const ort_call *call);
OrtStatus *fdma_ort_decode(const ort_call *call);
size_t ORT_API_CALL fdma_ort_decode_in_place(int **inputs, int **outputs);
void ORT_API_CALL fdma_ort_release_in_place(int *inputs, int *outputs);

/* Indices of the inputs that Attention and Decode share. */
enum { ORT_Q, ORT_K, ORT_V, ORT_DT_PROJ, ORT_A, ORT_SHARED_INPUTS };

/* ---- status.c, values.c: NULL is success; the caller releases any other status ---- */

#define ORT_TRY(call)                                                                              \
    do {                                                                                           \
        OrtStatus *const try_status = (call);                                                      \
        if (try_status != NULL)                                                                    \
            return try_status;                                                                     \
    } while (0)

/* A status with the message of `format`. */
__attribute__((format(printf, 3, 4))) OrtStatus *
fdma_ort_refuse(const OrtApi *api, OrtErrorCode code, const char *format, ...);

/* The status of a call of fdma.h that this thread has just made, with its message. */
OrtStatus *fdma_ort_status(const OrtApi *api, fdma_status status);

OrtStatus *fdma_ort_read_attributes(const OrtApi *api, const OrtKernelInfo *info,
                                    ort_attributes *attributes);

/* A dense view of a tensor of ONNX Runtime of rank 1 to 4. */
OrtStatus *fdma_ort_view(const OrtApi *api, const OrtValue *value, const char *name,
                         fdma_tensor *view);

/* Lets ONNX Runtime allocate output `index`, of the shape of `like`; `out` gets its address. */
OrtStatus *fdma_ort_allocate_output(const ort_call *call, size_t index, const fdma_tensor *like,
                                    void **out);

/* Scratch memory of ONNX Runtime's allocator. */
typedef struct ort_scratch {
    OrtAllocator *allocator;
    void *memory;
} ort_scratch;

OrtStatus *fdma_ort_take_scratch(const ort_call *call, size_t bytes, ort_scratch *scratch);
/* Frees it. Returns `status` or, if that is NULL, the error of freeing. */
OrtStatus *fdma_ort_free_scratch(const ort_call *call, ort_scratch *scratch, OrtStatus *status);
