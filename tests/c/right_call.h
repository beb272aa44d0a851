/* right_call.h - for the tests of bad arguments: a call of any operation that succeeds, and the
 * check that it is refused once a test has made one thing in it wrong. The call, its workspace
 * query and its kernel query must agree on the status and the message, and nothing may be written.
 */
#ifndef RIGHT_CALL_H
#define RIGHT_CALL_H

#include "calls.h"
#include "errors.h"

enum { region = 8192 }; /* bytes between two tensors, more than any of them has */
static const unsigned char untouched = 0x5a;

/* The last call that right_call() made, and the memory of its tensors and its workspace. */
static struct {
    call call;
    unsigned char *memory;
    size_t bytes;
} right;

static inline int64_t size_of_axis(char letter) {
    static const int64_t sizes[] = {['b'] = 2,  ['i'] = 7,  ['j'] = 10, ['h'] = 4, ['g'] = 2,
                                    ['d'] = 16, ['c'] = 32, ['t'] = 3,  ['w'] = 6, ['2'] = 2};
    return sizes[(int)letter];
}

/* Of q, k, v and out. */
static inline fdma_dtype call_dtype(fdma_operation operation) {
    return operation <= operation_backward ? FDMA_FLOAT32 : FDMA_FLOAT16;
}

static inline fdma_dtype right_dtype(fdma_operation operation, const tensor_entry *entry) {
    switch (entry->dtypes) {
    case dtypes_int32:
        return FDMA_INT32;
    case dtypes_uint8:
        return FDMA_UINT8;
    case dtypes_wide:
    case dtypes_as_a:
        return FDMA_FLOAT32;
    default:
        return strcmp(entry->name, "a") == 0 ? FDMA_FLOAT32 : call_dtype(operation);
    }
}

/* The fields that are neither tensors nor 0. */
static const call call_options[operation_count] = {
    [operation_select].args.select = {.window = 4},
    [operation_lists].args.lists = {.q_len = 7, .tile_len = 3, .causal = 1},
    [operation_forward].args.forward = {.causal = 1},
    [operation_backward].args.backward = {.causal = 1},
    [operation_attention].args.attention = {.window = 4, .causal = 1},
    [operation_attention_backward].args.attention_backward = {.causal = 1},
};

static inline bool is_optional(const tensor_entry *entry) {
    return entry->role == role_optional || entry->role == role_optional_output;
}

static inline fdma_tensor right_tensor(fdma_operation operation, const tensor_entry *entry,
                                       void *data) {
    int64_t shape[4] = {0};
    const int32_t rank = (int32_t)strlen(entry->dims);
    for (int axis = 0; axis < rank; axis++)
        shape[axis] = size_of_axis(entry->dims[axis]);
    return fdma_dense_tensor(data, right_dtype(operation, entry), rank, shape);
}

/* A call with all optional tensors or with none. It has succeeded once, and since then its memory
 * holds `untouched` everywhere. */
static inline call *right_call(fdma_operation operation, bool with_optional) {
    enum { spare_workspace = 4096 };
    const tensor_table table = fdma_tensors[operation];
    call *const x = &right.call;
    size_t bytes = 0;
    test_free_all();
    *x = call_options[operation];
    x->operation = operation;
    x->args.size = operations[operation].args_size;
    x->selection = (fdma_selection){
        .size = sizeof x->selection, .window = 4, .kv_len = 10, .scope = FDMA_SCOPE_CAUSAL};
    call_own_selection(x);
    right.bytes = (table.count + 1) * region;
    for (size_t t = 0; t < table.count; t++)
        if (with_optional || !is_optional(&table.entries[t]))
            *call_tensor(x, &table.entries[t]) = right_tensor(operation, &table.entries[t], NULL);
    CHECK_OK(operations[operation].calls->workspace(&x->args, &bytes));
    call_exec(x)->workspace_size = bytes + spare_workspace;
    right.bytes += bytes + spare_workspace;
    right.memory = test_alloc_guarded(right.bytes);
    memset(right.memory, 0, right.bytes);
    for (size_t t = 0; t < table.count; t++)
        call_tensor(x, &table.entries[t])->data = right.memory + t * region;
    call_exec(x)->workspace = right.memory + table.count * region;
    CHECK_OK(operations[operation].calls->call(&x->args));
    memset(right.memory, untouched, right.bytes);
    return x;
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
    check_status(operation->calls->call(&x->args), want);
    check_query(operation->calls->workspace(&x->args, &bytes), want);
    check_query(operation->kernel(&x->args, &name), want);
    CHECK(want->data_only || (bytes == 99 && name == unanswered));
    CHECK_BYTES(x, &before, sizeof before);
    CHECK(is_untouched());
}

/* A number as a word; it lives until seven more have been made. */
static inline const char *number(int64_t value) {
    static char texts[8][24];
    static unsigned next;
    char *const text = texts[next++ % 8];
    snprintf(text, sizeof texts[0], "%lld", (long long)value);
    return text;
}

#endif /* RIGHT_CALL_H */
