/* right_call.h - for the tests of bad arguments: a call of any operation that succeeds, and a check
 * that the call is refused after a test has made one thing in it wrong. The call, its workspace
 * query and its kernel query must agree on the status and the message, and must write nothing. */
#pragma once

#include "calls.h"
#include "errors.h"

enum { region = 8192 }; /* bytes between the starts of two tensors; all of them are smaller */
static const unsigned char untouched = 0x5a;

/* The last call that right_call() made, and the memory of its tensors and its workspace. */
static struct {
    call call;
    call_sizes sizes;
    unsigned char *memory;
    size_t bytes;
} right;

static const call_sizes right_sizes = {
    .batch = 2, .q_len = 7, .kv_len = 10, .q_heads = 4, .kv_heads = 2, .head_dim = 16};

/* The dtype of q, k, v and out. */
static inline fdma_dtype call_dtype(fdma_operation operation) {
    return operation <= operation_backward ? FDMA_FLOAT32 : FDMA_FLOAT16;
}

#define RIGHT_CACHE                                                                                \
    {.sequences = 3, .kv_heads = 2, .head_dim = 16, .window = 4, .dtype = FDMA_FLOAT16}

/* Of a prefill: the tokens of two requests. */
static const int32_t right_starts[] = {0, 3, 10};

/* The fields that are neither tensors nor 0. */
static const call call_options[operation_count] = {
    [operation_select].args.select = {.window = 4},
    [operation_forward].args.forward = {.causal = 1},
    [operation_backward].args.backward = {.causal = 1},
    [operation_decode].args.decode = {.cache = RIGHT_CACHE},
    [operation_prefill].args.prefill = {.cache = RIGHT_CACHE,
                                        .starts = right_starts,
                                        .requests = 2},
    [operation_cache_store].args.cache_store = {.cache = RIGHT_CACHE},
    [operation_cache_copy].args.cache_copy = {.cache = RIGHT_CACHE},
    [operation_probabilities].args.probabilities = {.causal = 1},
    [operation_rotary_table].args.rotary_table = {.base = 10000},
    [operation_attention].args.attention = {.window = 4, .causal = 1},
    [operation_attention_backward].args.attention_backward = {.causal = 1},
};

/* True if a call takes key_valid only without carried keys. */
static inline bool is_unfused_attention(fdma_operation operation) {
    return operation == operation_forward || operation == operation_backward ||
           operation == operation_probabilities;
}

/* Decode and prefill take weights or a score: removes the score if there are tables, else the
 * weights. */
static inline void leave_one_of_pair(call *x, bool with_tables) {
    if (with_tables)
        *call_tensor_named(x, "score") = (fdma_tensor){0};
    else if (call_tensor_named(x, "score")->rank > 0)
        *call_tensor_named(x, "dt_proj") = *call_tensor_named(x, "a") =
            *call_tensor_named(x, "dt_bias") = (fdma_tensor){0};
}

/* Gives a cache copy valid lists of sequences, and a rotation valid positions, in memory apart from
 * the other tensors. */
static inline void give_valid_numbers(call *x) {
    fdma_tensor *const positions = call_tensor_named(x, "positions");
    if (positions != NULL)
        positions->data = test_alloc(region);
    if (x->operation != operation_cache_copy)
        return;
    x->args.cache_copy.from.data = test_alloc(region);
    x->args.cache_copy.to.data = test_alloc(region);
    ((int32_t *)x->args.cache_copy.to.data)[1] = 2;
}

/* A call with all optional tensors or with none. It has `carried` carried keys, and each sequence
 * of its cache has `pages` pages; if that is 0, the cache has no page table. The call has succeeded
 * once, and since then its memory holds `untouched` everywhere. */
static inline call *right_call_with(fdma_operation operation, bool with_optional, int64_t carried,
                                    int64_t pages) {
    enum { spare_workspace = 4096 };
    const tensor_table table = fdma_tensors[operation];
    const bool with_tables = carried > 0;
    call *const x = &right.call;
    size_t bytes = 0;
    test_free_all();
    *x = call_options[operation];
    x->operation = operation;
    right.sizes = right_sizes;
    if (operation == operation_prefill) // each token has a query
        right.sizes.q_len = right.sizes.kv_len;
    if (has_cache(operation))
        carried = 4, right.sizes.sequences = 3; // the rows of its cache and of a page
    right.sizes.kv_len += carried;
    right.sizes.carried = carried;
    right.sizes.pages = pages;
    right.sizes.with_pairs = carried == 0;
    call_make(x, &right.sizes, call_dtype(operation), with_optional);
    if (attends_to_cache(operation))
        leave_one_of_pair(x, with_tables);
    if (carried > 0 && is_unfused_attention(operation))
        *call_tensor_named(x, "key_valid") = (fdma_tensor){0};
    call_describe_selection(x, 4, FDMA_SCOPE_CAUSAL);
    right.bytes = (table.count + 1) * region;
    CHECK_OK(operations[operation].workspace(&x->args, &bytes));
    call_exec(x)->workspace_size = bytes + spare_workspace;
    right.bytes += bytes + spare_workspace;
    right.memory = test_alloc_guarded(right.bytes);
    for (size_t t = 0; t < table.count; t++)
        call_tensor(x, &table.entries[t])->data = right.memory + t * region;
    memset(right.memory, 0, right.bytes);
    give_valid_numbers(x);
    call_exec(x)->workspace = right.memory + table.count * region;
    CHECK_OK(operations[operation].call(&x->args));
    memset(right.memory, untouched, right.bytes);
    return x;
}

static inline call *right_call(fdma_operation operation, bool with_optional) {
    return right_call_with(operation, with_optional, 0, 0);
}

static inline bool is_untouched(void) {
    return right.memory[0] == untouched &&
           memcmp(right.memory, right.memory + 1, right.bytes - 1) == 0;
}

static inline void check_rejected(const call *x, const expectation *want) {
    const operation_info *const operation = &operations[x->operation];
    static const char *const unanswered = "unanswered";
    call before;
    size_t bytes = 99;
    const char *name = unanswered;
    memcpy(&before, x, sizeof before);
    check_status(operation->call(&x->args), want);
    check_query(operation->workspace(&x->args, &bytes), want);
    check_query(operation->kernel(&x->args, &name), want);
    CHECK(want->data_only || (bytes == 99 && name == unanswered));
    CHECK_BYTES(x, &before, sizeof before);
    CHECK(is_untouched());
}

/* A number as a word. It stays valid until seven more have been made. */
static inline const char *number(int64_t value) {
    static char texts[8][24];
    static unsigned next;
    char *const text = texts[next++ % 8];
    snprintf(text, sizeof texts[0], "%lld", (long long)value);
    return text;
}
