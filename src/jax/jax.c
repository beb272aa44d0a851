/* libfdma_jax: the operations of fdma.h as a target of XLA's foreign function interface, which
 * flash_dmattn.jax registers for the CPU and for CUDA devices.
 *
 * Python has checked a call, and has filled in its argument struct, when the program was traced.
 * The handler copies the struct, writes the addresses of XLA's buffers into it and makes the call.
 * Attributes of a call, in the order of their names, which is XLA's:
 *
 *   backend    exec.kernel, or ""
 *   operation  the name of fdma_<operation>()
 *   plan       numbers of 8-byte words: see plan_word; then for each argument and each result the
 *              word of its address, or -1
 *   words      the argument struct and, behind it, the fdma_selection
 *
 * Source: xla/ffi/api/c_api.h of jaxlib. */
#include <string.h>

#include <fdma.h>
#include <xla/ffi/api/c_api.h>

enum { BACKEND, OPERATION, PLAN, WORDS, ATTRIBUTES };

/* Numbers of words at the beginning of `plan`. */
typedef enum plan_word {
    PLAN_EXEC,              /* of the argument struct's exec */
    PLAN_SELECTION_POINTER, /* of its `selection`; -1: it has none */
    PLAN_SELECTION,         /* of the selection itself */
    PLAN_ADDRESSES          /* where the list of the buffers' words begins */
} plan_word;

enum { MEMORY_WORDS = 1024, NAME_MAX = 128 };

typedef struct jax_call {
    union { // the argument struct and, behind it, the selection
        uint64_t words[MEMORY_WORDS];
        fdma_decode_args decode;
        fdma_cache_store_args cache_store;
    } memory;
    char backend[NAME_MAX], operation[NAME_MAX];
} jax_call;

static XLA_FFI_Error *refuse(const XLA_FFI_Api *api, XLA_FFI_Error_Code code, const char *message) {
    XLA_FFI_Error_Create_Args args = {.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE};
    args.message = message;
    args.errc = code;
    return api->XLA_FFI_Error_Create(&args);
}

static XLA_FFI_Error_Code code_of(fdma_status status) {
    switch (status) {
    case FDMA_INVALID_ARGUMENT:
        return XLA_FFI_Error_Code_INVALID_ARGUMENT;
    case FDMA_UNSUPPORTED:
        return XLA_FFI_Error_Code_UNIMPLEMENTED;
    default:
        return XLA_FFI_Error_Code_INTERNAL;
    }
}

/* Returns 1 for the call that XLA makes once, at registration, and answers it: calls of the handler
 * may become part of a CUDA graph. The type of `extension_start` has another name in each version
 * of XLA's header. */
static int describes(const XLA_FFI_CallFrame *frame) {
    XLA_FFI_Metadata_Extension *const asked = (XLA_FFI_Metadata_Extension *)frame->extension_start;
    if (asked == NULL || asked->extension_base.type != XLA_FFI_Extension_Metadata)
        return 0;
    asked->metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    asked->metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    asked->metadata->traits = XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE;
    return 1;
}

/* ---- the attributes ---- */

static int read_text(const XLA_FFI_Attrs *attrs, int index, char text[NAME_MAX]) {
    const XLA_FFI_ByteSpan *const span = attrs->attrs[index];
    if (attrs->types[index] != XLA_FFI_AttrType_STRING || span->len >= NAME_MAX)
        return 0;
    memcpy(text, span->ptr, span->len);
    text[span->len] = 0;
    return 1;
}

static const XLA_FFI_Array *numbers_of(const XLA_FFI_Attrs *attrs, int index) {
    const XLA_FFI_Array *const array = attrs->attrs[index];
    const int fits =
        attrs->types[index] == XLA_FFI_AttrType_ARRAY && array->dtype == XLA_FFI_DataType_S64;
    return fits ? array : NULL;
}

static void put_address(jax_call *call, int64_t word, const void *address) {
    call->memory.words[word] = (uintptr_t)address;
}

/* Makes the struct of a call with the addresses of XLA's buffers. Returns 0 if the attributes are
 * not those that this file describes. */
static int read_call(const XLA_FFI_CallFrame *frame, jax_call *call, int64_t *exec_word) {
    const XLA_FFI_Attrs *const attrs = &frame->attrs;
    if (attrs->size != ATTRIBUTES || !read_text(attrs, BACKEND, call->backend) ||
        !read_text(attrs, OPERATION, call->operation))
        return 0;
    const XLA_FFI_Array *const plan = numbers_of(attrs, PLAN), *const words =
                                                                   numbers_of(attrs, WORDS);
    const int64_t buffers = frame->args.size + frame->rets.size;
    if (plan == NULL || words == NULL || words->size > MEMORY_WORDS ||
        plan->size != (size_t)(PLAN_ADDRESSES + buffers))
        return 0;
    const int64_t *const numbers = plan->data;
    for (size_t x = 0; x < plan->size; x++)
        if (numbers[x] >= (int64_t)words->size)
            return 0;
    memcpy(call->memory.words, words->data, words->size * sizeof(uint64_t));
    for (int64_t x = 0; x < buffers; x++) {
        const XLA_FFI_Buffer *const buffer =
            x < frame->args.size ? frame->args.args[x] : frame->rets.rets[x - frame->args.size];
        if (numbers[PLAN_ADDRESSES + x] >= 0)
            put_address(call, numbers[PLAN_ADDRESSES + x], buffer->data);
    }
    if (numbers[PLAN_SELECTION_POINTER] >= 0)
        put_address(call, numbers[PLAN_SELECTION_POINTER],
                    call->memory.words + numbers[PLAN_SELECTION]);
    *exec_word = numbers[PLAN_EXEC];
    return 1;
}

/* ---- calls ---- */

static int is_named(const jax_call *call, const char *operation) {
    return strcmp(call->operation, operation) == 0;
}

static fdma_status make_call(const jax_call *call) {
    const void *const args = &call->memory;
    if (is_named(call, "attention"))
        return fdma_attention(args);
    if (is_named(call, "attention_backward"))
        return fdma_attention_backward(args);
    if (is_named(call, "forward"))
        return fdma_forward(args);
    if (is_named(call, "backward"))
        return fdma_backward(args);
    if (is_named(call, "score"))
        return fdma_score(args);
    if (is_named(call, "score_backward"))
        return fdma_score_backward(args);
    if (is_named(call, "select"))
        return fdma_select(args);
    if (is_named(call, "decode"))
        return fdma_decode(args);
    if (is_named(call, "cache_store"))
        return fdma_cache_store(args);
    return FDMA_UNSUPPORTED;
}

static XLA_FFI_Error *run(const XLA_FFI_CallFrame *frame, int32_t device, void *stream) {
    jax_call call;
    int64_t exec_word;
    if (!read_call(frame, &call, &exec_word))
        return refuse(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                      "flash_dmattn.jax: the call was traced by another version of the package");
    fdma_exec exec;
    memcpy(&exec, call.memory.words + exec_word, sizeof exec);
    exec.device = device;
    exec.stream = stream;
    exec.kernel = call.backend[0] == 0 ? NULL : call.backend;
    memcpy(call.memory.words + exec_word, &exec, sizeof exec);
    if (is_named(&call, "decode"))
        call.memory.decode.cache.device = device;
    if (is_named(&call, "cache_store"))
        call.memory.cache_store.cache.device = device;
    const fdma_status status = make_call(&call);
    return status == FDMA_OK ? NULL : refuse(frame->api, code_of(status), fdma_last_error());
}

FDMA_API XLA_FFI_Error *fdma_jax_cpu(XLA_FFI_CallFrame *frame);

XLA_FFI_Error *fdma_jax_cpu(XLA_FFI_CallFrame *frame) {
    if (describes(frame))
        return NULL;
    return run(frame, FDMA_CPU, NULL);
}

FDMA_API XLA_FFI_Error *fdma_jax_cuda(XLA_FFI_CallFrame *frame);

XLA_FFI_Error *fdma_jax_cuda(XLA_FFI_CallFrame *frame) {
    if (describes(frame))
        return NULL;
    XLA_FFI_Stream_Get_Args stream = {.struct_size = XLA_FFI_Stream_Get_Args_STRUCT_SIZE};
    stream.ctx = frame->ctx;
    XLA_FFI_Error *error = frame->api->XLA_FFI_Stream_Get(&stream);
    if (error != NULL)
        return error;
    XLA_FFI_DeviceOrdinal_Get_Args device = {.struct_size =
                                                 XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE};
    device.ctx = frame->ctx;
    error = frame->api->XLA_FFI_DeviceOrdinal_Get(&device);
    return error != NULL ? error : run(frame, FDMA_CUDA(device.device_ordinal), stream.stream);
}
