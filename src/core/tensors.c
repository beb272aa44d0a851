/* The list of tensors as tables. */
#include "core/tensors.h"

#include <stddef.h>

#define OF_ARGS(operation, field, dims, dtypes, role)                                              \
    OF_PROBLEM(operation, field, field, dims, dtypes, role)
#define OF_PROBLEM(operation, field, member, dims, dtypes, role)                                   \
    {#field,                                                                                       \
     dims,                                                                                         \
     offsetof(fdma_##operation##_args, field),                                                     \
     offsetof(fdma_problem, member),                                                               \
     dtypes_##dtypes,                                                                              \
     role_##role,                                                                                  \
     false},
#define OF_SELECTION(field, dims, dtypes, role)                                                    \
    {#field,                                                                                       \
     dims,                                                                                         \
     offsetof(fdma_selection, field),                                                              \
     offsetof(fdma_problem, field),                                                                \
     dtypes_##dtypes,                                                                              \
     role_##role,                                                                                  \
     true},

#define TABLE(name, LIST)                                                                          \
    static const tensor_entry name##_tensors[] = {LIST(OF_ARGS, OF_SELECTION, OF_PROBLEM)};        \
    _Static_assert(sizeof name##_tensors / sizeof name##_tensors[0] <= most_tensors, #name);

TABLE(score, FDMA_SCORE_TENSORS)
TABLE(select, FDMA_SELECT_TENSORS)
TABLE(lists, FDMA_LISTS_TENSORS)
TABLE(forward, FDMA_FORWARD_TENSORS)
TABLE(backward, FDMA_BACKWARD_TENSORS)
TABLE(score_backward, FDMA_SCORE_BACKWARD_TENSORS)
TABLE(merge, FDMA_MERGE_TENSORS)
TABLE(merge_backward, FDMA_MERGE_BACKWARD_TENSORS)
TABLE(attention, FDMA_ATTENTION_TENSORS)
TABLE(attention_backward, FDMA_ATTENTION_BACKWARD_TENSORS)

#define ENTRY(name)                                                                                \
    [operation_##name] = {name##_tensors, sizeof name##_tensors / sizeof name##_tensors[0]}

const tensor_table fdma_tensors[] = {
    ENTRY(score),     ENTRY(select),
    ENTRY(lists),     ENTRY(forward),
    ENTRY(backward),  ENTRY(score_backward),
    ENTRY(merge),     ENTRY(merge_backward),
    ENTRY(attention), ENTRY(attention_backward),
};
