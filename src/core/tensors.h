/* The tensors of every operation: the single list that the argument checks and the tests walk.
 *
 *   X(operation, field, dims, dtypes, role)  a field of fdma_<operation>_args
 *   S(field, dims, dtypes, role)             a field of its selection
 *   P(operation, field, member, dims, dtypes, role)  a field that fdma_problem holds under `member`
 *
 * `dims` has a letter for each axis: b batch, i q_len, j kv_len, h q_heads, g kv_heads, d head_dim,
 * c kv_heads * head_dim, t tiles, w the width of a list, 2 an axis of length 2. */
#ifndef FDMA_CORE_TENSORS_H
#define FDMA_CORE_TENSORS_H

#include "core/problem.h"

/* clang-format off: tables */
#define FDMA_SCORE_TENSORS(X, S, P)                                                                \
    X(score, v, "bjgd", same, input)                                                               \
    X(score, dt_proj, "gc", weight, input)                                                         \
    X(score, a, "g", weight, input)                                                                \
    X(score, key_valid, "bj", uint8, optional)                                                     \
    X(score, score, "bgj", wide, optional_output)                                                  \
    X(score, bias, "bgj", wide, optional_output)

#define FDMA_SELECT_TENSORS(X, S, P)                                                               \
    X(select, score, "bgj", wide, input)                                                           \
    X(select, key_valid, "bj", uint8, optional)                                                    \
    S(expiry, "bgj", int32, output)                                                                \
    S(slot, "bgj", int32, optional_output)

#define FDMA_LISTS_TENSORS(X, S, P)                                                                \
    S(expiry, "bgj", int32, input)                                                                 \
    S(slot, "bgj", int32, input)                                                                   \
    X(lists, list, "bgtw", int32, output)                                                          \
    X(lists, count, "bgt2", int32, output)

#define FDMA_FORWARD_TENSORS(X, S, P)                                                              \
    X(forward, q, "bihd", same, input)                                                             \
    X(forward, k, "bjgd", same, input)                                                             \
    X(forward, v, "bjgd", same, input)                                                             \
    X(forward, bias, "bgj", wide, optional)                                                        \
    X(forward, key_valid, "bj", uint8, optional)                                                   \
    S(expiry, "bgj", int32, selected)                                                              \
    S(slot, "bgj", int32, optional)                                                                \
    X(forward, out, "bihd", same, output)                                                          \
    X(forward, lse, "bhi", wide, optional_output)

#define FDMA_BACKWARD_TENSORS(X, S, P)                                                             \
    X(backward, dout, "bihd", same, input)                                                         \
    X(backward, dlse, "bhi", wide, optional)                                                       \
    X(backward, out, "bihd", same, input)                                                          \
    X(backward, lse, "bhi", wide, input)                                                           \
    X(backward, q, "bihd", same, input)                                                            \
    X(backward, k, "bjgd", same, input)                                                            \
    X(backward, v, "bjgd", same, input)                                                            \
    X(backward, bias, "bgj", wide, optional)                                                       \
    X(backward, key_valid, "bj", uint8, optional)                                                  \
    S(expiry, "bgj", int32, selected)                                                              \
    S(slot, "bgj", int32, optional)                                                                \
    X(backward, dq, "bihd", same, output)                                                          \
    X(backward, dk, "bjgd", same, output)                                                          \
    X(backward, dv, "bjgd", same, output)                                                          \
    X(backward, dbias, "bgj", wide, optional_output)

#define FDMA_SCORE_BACKWARD_TENSORS(X, S, P)                                                       \
    X(score_backward, dbias, "bgj", wide, input)                                                   \
    X(score_backward, v, "bjgd", same, input)                                                      \
    X(score_backward, dt_proj, "gc", weight, input)                                                \
    X(score_backward, a, "g", weight, input)                                                       \
    X(score_backward, key_valid, "bj", uint8, optional)                                            \
    X(score_backward, dv, "bjgd", same, optional_output)                                           \
    X(score_backward, ddt_proj, "gc", as_dt_proj, output)                                          \
    X(score_backward, da, "g", as_a, output)

#define FDMA_MERGE_TENSORS(X, S, P)                                                                \
    P(merge, out_a, partial[0].out, "bihd", same, input)                                           \
    P(merge, lse_a, partial[0].lse, "bhi", wide, input)                                            \
    P(merge, out_b, partial[1].out, "bihd", same, input)                                           \
    P(merge, lse_b, partial[1].lse, "bhi", wide, input)                                            \
    X(merge, out, "bihd", same, output)                                                            \
    X(merge, lse, "bhi", wide, optional_output)

#define FDMA_MERGE_BACKWARD_TENSORS(X, S, P)                                                       \
    X(merge_backward, dout, "bihd", same, input)                                                   \
    X(merge_backward, dlse, "bhi", wide, optional)                                                 \
    P(merge_backward, out_a, partial[0].out, "bihd", same, input)                                  \
    P(merge_backward, lse_a, partial[0].lse, "bhi", wide, input)                                   \
    P(merge_backward, out_b, partial[1].out, "bihd", same, input)                                  \
    P(merge_backward, lse_b, partial[1].lse, "bhi", wide, input)                                   \
    P(merge_backward, dout_a, partial[0].dout, "bihd", same, output)                               \
    P(merge_backward, dlse_a, partial[0].dlse, "bhi", wide, output)                                \
    P(merge_backward, dout_b, partial[1].dout, "bihd", same, output)                               \
    P(merge_backward, dlse_b, partial[1].dlse, "bhi", wide, output)

#define FDMA_ATTENTION_TENSORS(X, S, P)                                                            \
    X(attention, q, "bihd", same, input)                                                           \
    X(attention, k, "bjgd", same, input)                                                           \
    X(attention, v, "bjgd", same, input)                                                           \
    X(attention, dt_proj, "gc", weight, input)                                                     \
    X(attention, a, "g", weight, input)                                                            \
    X(attention, key_valid, "bj", uint8, optional)                                                 \
    X(attention, out, "bihd", same, output)                                                        \
    X(attention, lse, "bhi", wide, optional_output)                                                \
    X(attention, score, "bgj", wide, optional_output)                                              \
    X(attention, bias, "bgj", wide, optional_output)                                               \
    S(expiry, "bgj", int32, output)                                                                \
    S(slot, "bgj", int32, optional_output)

#define FDMA_ATTENTION_BACKWARD_TENSORS(X, S, P)                                                   \
    X(attention_backward, dout, "bihd", same, input)                                               \
    X(attention_backward, dlse, "bhi", wide, optional)                                             \
    X(attention_backward, out, "bihd", same, input)                                                \
    X(attention_backward, lse, "bhi", wide, input)                                                 \
    X(attention_backward, q, "bihd", same, input)                                                  \
    X(attention_backward, k, "bjgd", same, input)                                                  \
    X(attention_backward, v, "bjgd", same, input)                                                  \
    X(attention_backward, dt_proj, "gc", weight, input)                                            \
    X(attention_backward, a, "g", weight, input)                                                   \
    X(attention_backward, bias, "bgj", wide, optional)                                             \
    X(attention_backward, key_valid, "bj", uint8, optional)                                        \
    S(expiry, "bgj", int32, input)                                                                 \
    S(slot, "bgj", int32, optional)                                                                \
    X(attention_backward, dq, "bihd", same, output)                                                \
    X(attention_backward, dk, "bjgd", same, output)                                                \
    X(attention_backward, dv, "bjgd", same, output)                                                \
    X(attention_backward, ddt_proj, "gc", as_dt_proj, output)                                      \
    X(attention_backward, da, "g", as_a, output)
/* clang-format on */

typedef enum tensor_dtypes {
    dtypes_same,   /* that of q, or of v where there is no q */
    dtypes_weight, /* the same, or float32 */
    dtypes_wide,   /* float32, or float64 for the reference */
    dtypes_int32,
    dtypes_uint8,
    dtypes_as_dt_proj,
    dtypes_as_a,
} tensor_dtypes;

typedef enum tensor_role {
    role_input,
    role_optional,
    role_selected, /* required with a selection, absent without one */
    role_output,
    role_optional_output,
} tensor_role;

typedef struct tensor_entry {
    const char *name;
    const char *dims;
    size_t offset; /* in the argument struct, or in fdma_selection */
    size_t member; /* in fdma_problem */
    tensor_dtypes dtypes;
    tensor_role role;
    bool in_selection;
} tensor_entry;

enum { most_tensors = 18 }; /* of one operation */

/* The tensors of one operation, in the order in which they are checked. */
typedef struct tensor_table {
    const tensor_entry *entries;
    size_t count;
} tensor_table;

extern const tensor_table fdma_tensors[]; /* indexed by fdma_operation */

static inline const fdma_tensor *tensor_at(const void *base, size_t offset) {
    return (const fdma_tensor *)((const char *)base + offset);
}

#endif
