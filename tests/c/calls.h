/* calls.h - a call of any operation, with the library's list of its tensors, so that a test can do
 * the same to every tensor of every operation. */
#ifndef CALLS_H
#define CALLS_H

#include "fixture.h"

#include "core/signatures.h"

enum { operation_count = operation_attention_backward + 1 };

/* What fixture.h does not know of an operation. */
typedef struct operation_info {
    const char *name;
    const operation_calls *calls;
    fdma_status (*kernel)(const void *args, const char **name); /* a fused call's first kernel */
    size_t args_size;
    size_t selection; /* offset of the pointer to the selection; 0: there is none */
} operation_info;

#define DEFINE_KERNEL_QUERY(operation)                                                             \
    static inline fdma_status untyped_##operation##_kernel(const void *args, const char **name) {  \
        return fdma_##operation##_kernel(args, name);                                              \
    }
#define DEFINE_FUSED_KERNEL_QUERY(operation, first)                                                \
    static inline fdma_status untyped_##operation##_kernel(const void *args, const char **name) {  \
        fdma_##operation##_kernels names = {.size = sizeof names, .first = *name};                 \
        const fdma_status status = fdma_##operation##_kernel(args, &names);                        \
        *name = names.first;                                                                       \
        return status;                                                                             \
    }

DEFINE_KERNEL_QUERY(score)
DEFINE_KERNEL_QUERY(select)
DEFINE_KERNEL_QUERY(lists)
DEFINE_KERNEL_QUERY(forward)
DEFINE_KERNEL_QUERY(backward)
DEFINE_KERNEL_QUERY(score_backward)
DEFINE_KERNEL_QUERY(merge)
DEFINE_KERNEL_QUERY(merge_backward)
DEFINE_FUSED_KERNEL_QUERY(attention, forward)
DEFINE_FUSED_KERNEL_QUERY(attention_backward, backward)

#define OPERATION(name, selection)                                                                 \
    [operation_##name] = {#name, &name##_calls, untyped_##name##_kernel,                           \
                          sizeof(fdma_##name##_args), selection}
#define SELECTION_OF(name) offsetof(fdma_##name##_args, selection)

static const operation_info operations[operation_count] = {
    OPERATION(score, 0),
    OPERATION(select, SELECTION_OF(select)),
    OPERATION(lists, SELECTION_OF(lists)),
    OPERATION(forward, SELECTION_OF(forward)),
    OPERATION(backward, SELECTION_OF(backward)),
    OPERATION(score_backward, 0),
    OPERATION(merge, 0),
    OPERATION(merge_backward, 0),
    OPERATION(attention, SELECTION_OF(attention)),
    OPERATION(attention_backward, SELECTION_OF(attention_backward)),
};

/* The arguments of one call. If they hold a selection, they point to the one beside them: copies
 * are made by call_copy(). */
typedef struct call {
    fdma_operation operation;
    union {
        size_t size; /* the first field of each */
        fdma_score_args score;
        fdma_select_args select;
        fdma_lists_args lists;
        fdma_forward_args forward;
        fdma_backward_args backward;
        fdma_score_backward_args score_backward;
        fdma_merge_args merge;
        fdma_merge_backward_args merge_backward;
        fdma_attention_args attention;
        fdma_attention_backward_args attention_backward;
    } args;
    fdma_selection selection;
} call;

static inline fdma_exec *call_exec(call *x) {
    return (fdma_exec *)((char *)&x->args + operations[x->operation].calls->exec);
}

/* Has the arguments point to the selection beside them. */
static inline void call_own_selection(call *x) {
    const size_t offset = operations[x->operation].selection;
    fdma_selection *const own = &x->selection;
    if (offset != 0)
        memcpy((char *)&x->args + offset, &own, sizeof own);
}

static inline void call_copy(call *to, const call *from) {
    const size_t offset = operations[from->operation].selection;
    const fdma_selection *given = NULL;
    memcpy(to, from, sizeof *to);
    memcpy(&given, (const char *)&from->args + offset, sizeof given);
    if (given != NULL)
        call_own_selection(to);
}

static inline fdma_tensor *call_tensor(call *x, const tensor_entry *entry) {
    void *const base = entry->in_selection ? (void *)&x->selection : (void *)&x->args;
    return (fdma_tensor *)((char *)base + entry->offset);
}

static inline bool is_output(const tensor_entry *entry) {
    return entry->role == role_output || entry->role == role_optional_output;
}

#endif /* CALLS_H */
