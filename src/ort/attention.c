/* The operators of the domain "fdma": Attention, which is fdma_attention(), and Decode. */
#include "ort/ort.h"

#include <stdlib.h>
#include <string.h>

/* What both operators pass on. Their optional inputs, dt_bias, key_valid and sink_logit, are
 * neighbours; `first` is the number of dt_bias. */
static fdma_attention_args attention_args_of(const ort_call *call, int first) {
    const fdma_tensor *const inputs = call->inputs;
    const ort_attributes *const attributes = &call->attributes;
    return (fdma_attention_args){
        .size = sizeof(fdma_attention_args),
        .q = inputs[ORT_Q],
        .k = inputs[ORT_K],
        .v = inputs[ORT_V],
        .dt_proj = inputs[ORT_DT_PROJ],
        .a = inputs[ORT_A],
        .dt_bias = inputs[first],
        .key_valid = inputs[first + 1],
        .sink_logit = inputs[first + 2],
        .bias_form = attributes->bias_form,
        .scale = attributes->scale,
        .softcap = attributes->softcap,
    };
}

OrtStatus *fdma_ort_attention(const ort_call *call) {
    const ort_attributes *const attributes = &call->attributes;
    fdma_attention_args args = attention_args_of(call, ORT_SHARED_INPUTS);
    args.out = args.q; // its shape and dtype
    args.window = attributes->window;
    args.recent = attributes->recent;
    args.sinks = attributes->sinks;
    args.scope = attributes->scope;
    args.causal = attributes->causal != 0;
    args.out.data = NULL;
    ORT_TRY(fdma_ort_status(call->api, fdma_attention_workspace(&args, &args.exec.workspace_size)));
    ORT_TRY(fdma_ort_allocate_output(call, 0, &args.q, &args.out.data));
    ort_scratch scratch;
    ORT_TRY(fdma_ort_take_scratch(call, args.exec.workspace_size, &scratch));
    args.exec.workspace = scratch.memory;
    return fdma_ort_free_scratch(call, &scratch, fdma_ort_status(call->api, fdma_attention(&args)));
}

/* ---- Decode ---- */

/* Decode of the domain "fdma": attention of the next tokens of a batch over a cache and each other.
 *
 * Up to 64 tokens are an fdma_decode(). More, or any with key_valid, are an fdma_attention(), with
 * the cache's rows as carried keys, and an fdma_cache_store(): see fdma.h, "Streams". The cache
 * before the tokens is an input, the cache after them an output: the outputs are first made copies
 * of the inputs, except where ONNX Runtime has given both the same memory. */

enum { TOKENS_MAX = 64 }; // tokens of an fdma_decode()

/* The tensors of a cache are inputs from CACHE on, and outputs from 1 on, in the same order. */
enum { CACHE_TENSORS = 6, CACHE = ORT_SHARED_INPUTS };
enum { CACHE_K = CACHE, CACHE_V, CACHE_BIAS, CACHE_SCORE, CACHE_POSITION, CACHE_SEEN };
enum { DT_BIAS = CACHE + CACHE_TENSORS, KEY_VALID, SINK_LOGIT };

size_t ORT_API_CALL fdma_ort_decode_in_place(int **inputs, int **outputs) {
    *inputs = malloc(CACHE_TENSORS * sizeof **inputs);
    *outputs = malloc(CACHE_TENSORS * sizeof **outputs);
    if (*inputs == NULL || *outputs == NULL)
        return 0; // no output reuses memory; what there is will be released
    for (int index = 0; index < CACHE_TENSORS; index++) {
        (*inputs)[index] = CACHE + index;
        (*outputs)[index] = 1 + index;
    }
    return CACHE_TENSORS;
}

void ORT_API_CALL fdma_ort_release_in_place(int *inputs, int *outputs) {
    free(inputs);
    free(outputs);
}

/* ---- the cache ---- */

/* Views [batch, kv_heads, rows, head_dim], where the rows of a head are adjacent because attention
 * reads them fastest, with the axes of fdma_cache. */
static fdma_tensor swap_heads_and_rows(fdma_tensor tensor) {
    fdma_tensor view = tensor;
    view.shape[1] = tensor.shape[2], view.stride[1] = tensor.stride[2];
    view.shape[2] = tensor.shape[1], view.stride[2] = tensor.stride[1];
    return view;
}

static fdma_cache cache_of(const ort_call *call) {
    const fdma_tensor *const inputs = call->inputs;
    return (fdma_cache){
        .k = swap_heads_and_rows(inputs[CACHE_K]),
        .v = swap_heads_and_rows(inputs[CACHE_V]),
        .bias = inputs[CACHE_BIAS],
        .table = {.score = inputs[CACHE_SCORE],
                  .position = inputs[CACHE_POSITION],
                  .seen = inputs[CACHE_SEEN]},
        .sequences = inputs[CACHE_K].shape[0],
        .kv_heads = inputs[CACHE_K].shape[1],
        .head_dim = inputs[CACHE_K].shape[3],
        .window = call->attributes.window,
        .recent = call->attributes.recent,
        .sinks = call->attributes.sinks,
        .dtype = inputs[CACHE_K].dtype,
    };
}

/* Checks what cache_of() and the calls of fdma.h rely on. They check the rest. */
static OrtStatus *check_ranks(const ort_call *call) {
    static const struct {
        int32_t input;
        const char *name, *axes;
    } rows[] = {
        {ORT_Q, "q", "q_len, q_heads"},
        {ORT_K, "k", "new_len, kv_heads"},
        {CACHE_K, "cache_k", "kv_heads, rows"},
        {CACHE_V, "cache_v", "kv_heads, rows"},
    };
    for (size_t index = 0; index < sizeof rows / sizeof rows[0]; index++) {
        const fdma_tensor *const tensor = &call->inputs[rows[index].input];
        if (tensor->rank != 4)
            return fdma_ort_refuse(call->api, ORT_INVALID_ARGUMENT,
                                   "%s: rank is %d, want 4; %s is [batch, %s, head_dim]",
                                   rows[index].name, tensor->rank, rows[index].name,
                                   rows[index].axes);
    }
    const int64_t batch = call->inputs[ORT_Q].shape[0], cached = call->inputs[CACHE_K].shape[0];
    if (batch != cached)
        return fdma_ort_refuse(call->api, ORT_INVALID_ARGUMENT,
                               "cache_k: axis 0 has %lld element%s, want the batch, %lld",
                               (long long)cached, cached == 1 ? "" : "s", (long long)batch);
    return NULL;
}

static size_t bytes_of(const fdma_tensor *tensor) {
    const size_t element = tensor->dtype == FDMA_FLOAT16 || tensor->dtype == FDMA_BFLOAT16 ? 2 : 4;
    size_t bytes = element;
    for (int32_t axis = 0; axis < tensor->rank; axis++)
        bytes *= (size_t)tensor->shape[axis];
    return bytes;
}

/* Makes the output tensors of the cache copies of the inputs, and points the cache to them. */
static OrtStatus *move_to_outputs(const ort_call *call, fdma_cache *cache) {
    void **const data[CACHE_TENSORS] = {
        &cache->k.data,
        &cache->v.data,
        &cache->bias.data,
        &cache->table.score.data,
        &cache->table.position.data,
        &cache->table.seen.data,
    };
    for (size_t index = 0; index < CACHE_TENSORS; index++) {
        const fdma_tensor *const input = &call->inputs[CACHE + index];
        void *output;
        ORT_TRY(fdma_ort_allocate_output(call, 1 + index, input, &output));
        const size_t bytes = bytes_of(input);
        if (output != input->data && bytes > 0)
            memcpy(output, input->data, bytes);
        *data[index] = output;
    }
    return NULL;
}

/* ---- up to 64 tokens ---- */

static OrtStatus *decode(const ort_call *call, const fdma_tensor *out) {
    const fdma_tensor *const inputs = call->inputs;
    fdma_decode_args args = {
        .size = sizeof args,
        .cache = cache_of(call),
        .q = inputs[ORT_Q],
        .k = inputs[ORT_K],
        .v = inputs[ORT_V],
        .dt_proj = inputs[ORT_DT_PROJ],
        .a = inputs[ORT_A],
        .dt_bias = inputs[DT_BIAS],
        .sink_logit = inputs[SINK_LOGIT],
        .out = *out,
        .scale = call->attributes.scale,
        .softcap = call->attributes.softcap,
        .bias_form = call->attributes.bias_form,
    };
    ORT_TRY(fdma_ort_status(call->api, fdma_decode_workspace(&args, &args.exec.workspace_size)));
    ORT_TRY(fdma_ort_allocate_output(call, 0, out, &args.out.data));
    ORT_TRY(move_to_outputs(call, &args.cache));
    ort_scratch scratch;
    ORT_TRY(fdma_ort_take_scratch(call, args.exec.workspace_size, &scratch));
    args.exec.workspace = scratch.memory;
    return fdma_ort_free_scratch(call, &scratch, fdma_ort_status(call->api, fdma_decode(&args)));
}

/* ---- more tokens ---- */

/* The two calls of a prefill, and the data that the first passes to the second. */
typedef struct prefill {
    fdma_attention_args attention;
    fdma_cache_store_args store;
    fdma_selection selection;
    size_t workspace; // bytes
} prefill;

/* A selection of `kv_len` keys, carried ones and new ones. */
static fdma_selection selection_of(const fdma_cache *cache, int64_t kv_len) {
    return (fdma_selection){
        .size = sizeof(fdma_selection),
        .expiry = fdma_tensor_3d(NULL, FDMA_INT32, cache->sequences, cache->kv_heads, kv_len),
        .slot = fdma_tensor_3d(NULL, FDMA_INT32, cache->sequences, cache->kv_heads, kv_len),
        .window = cache->window,
        .recent = cache->recent,
        .sinks = cache->sinks,
        .kv_len = kv_len,
        .scope = FDMA_SCOPE_CAUSAL,
    };
}

static void describe_prefill(const ort_call *call, const fdma_tensor *out, prefill *calls) {
    const fdma_tensor *const inputs = call->inputs;
    const fdma_cache cache = cache_of(call);
    const ort_attributes *const attributes = &call->attributes;
    const int64_t new_len = inputs[ORT_K].shape[1];
    calls->selection = selection_of(&cache, inputs[CACHE_K].shape[2] + new_len);
    fdma_attention_args *const args = &calls->attention;
    *args = attention_args_of(call, DT_BIAS);
    args->table_in = cache.table;
    args->k_carried = cache.k;
    args->v_carried = cache.v;
    args->out = *out;
    args->score = fdma_tensor_3d(NULL, FDMA_FLOAT32, cache.sequences, cache.kv_heads, new_len);
    args->selection = &calls->selection;
    args->window = cache.window;
    args->recent = cache.recent;
    args->sinks = cache.sinks;
    args->scope = FDMA_SCOPE_CAUSAL;
    args->causal = 1;
    if (attributes->bias_form != FDMA_BIAS_NONE)
        args->bias_carried = cache.bias;
    calls->store = (fdma_cache_store_args){
        .size = sizeof calls->store,
        .cache = cache,
        .k = inputs[ORT_K],
        .v = inputs[ORT_V],
        .score = args->score,
        .selection = &calls->selection,
        .bias_form = attributes->bias_form,
    };
}

static OrtStatus *check_prefill(const ort_call *call, prefill *calls) {
    size_t first, second;
    ORT_TRY(fdma_ort_status(call->api, fdma_attention_workspace(&calls->attention, &first)));
    ORT_TRY(fdma_ort_status(call->api, fdma_cache_store_workspace(&calls->store, &second)));
    calls->workspace = first > second ? first : second;
    return NULL;
}

static size_t round_up(size_t bytes) {
    const size_t line = 64;
    return (bytes + line - 1) / line * line;
}

/* Points the score, the selection and the workspace to scratch memory, unless that is NULL. Returns
 * the bytes that it needs. */
static size_t lay_out(prefill *calls, char *memory) {
    fdma_tensor *const tensors[] = {&calls->attention.score, &calls->selection.expiry,
                                    &calls->selection.slot};
    size_t bytes = 0;
    for (size_t index = 0; index < sizeof tensors / sizeof tensors[0]; index++) {
        if (memory != NULL)
            tensors[index]->data = memory + bytes;
        bytes += round_up(bytes_of(tensors[index]));
    }
    calls->store.score.data = calls->attention.score.data;
    fdma_exec *const lent[] = {&calls->attention.exec, &calls->store.exec};
    for (size_t index = 0; index < sizeof lent / sizeof lent[0] && memory != NULL; index++) {
        lent[index]->workspace = memory + bytes;
        lent[index]->workspace_size = calls->workspace;
    }
    return bytes + calls->workspace;
}

static OrtStatus *run_prefill(const ort_call *call, prefill *calls) {
    ORT_TRY(fdma_ort_status(call->api, fdma_attention(&calls->attention)));
    return fdma_ort_status(call->api, fdma_cache_store(&calls->store));
}

static OrtStatus *prefill_tokens(const ort_call *call, const fdma_tensor *out) {
    prefill calls = {0};
    describe_prefill(call, out, &calls);
    ORT_TRY(check_prefill(call, &calls));
    ORT_TRY(fdma_ort_allocate_output(call, 0, out, &calls.attention.out.data));
    ORT_TRY(move_to_outputs(call, &calls.store.cache));
    ort_scratch scratch;
    ORT_TRY(fdma_ort_take_scratch(call, lay_out(&calls, NULL), &scratch));
    lay_out(&calls, scratch.memory);
    return fdma_ort_free_scratch(call, &scratch, run_prefill(call, &calls));
}

OrtStatus *fdma_ort_decode(const ort_call *call) {
    ORT_TRY(check_ranks(call));
    fdma_tensor out = call->inputs[ORT_Q]; // its shape and dtype
    out.data = NULL;
    const int few = call->inputs[ORT_K].shape[1] <= TOKENS_MAX;
    return few && call->inputs[KEY_VALID].rank == 0 ? decode(call, &out)
                                                    : prefill_tokens(call, &out);
}
