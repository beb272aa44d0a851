/* The tensors of every operation: the one list from which arguments are copied and checked, and
 * which the tests walk. */
#pragma once

#include "core/problem.h"

/* The argument struct of any operation. */
typedef union any_args {
    size_t size; /* the first field of each */
    fdma_score_args score;
    fdma_select_args select;
    fdma_forward_args forward;
    fdma_backward_args backward;
    fdma_score_backward_args score_backward;
    fdma_merge_args merge;
    fdma_merge_backward_args merge_backward;
    fdma_decode_args decode;
    fdma_cache_store_args cache_store;
    fdma_cache_copy_args cache_copy;
    fdma_probabilities_args probabilities;
    fdma_rotary_table_args rotary_table;
    fdma_rotate_args rotate;
    fdma_rotate_backward_args rotate_backward;
    fdma_attention_args attention;
    fdma_attention_backward_args attention_backward;
    fdma_prefill_args prefill;
} any_args;

typedef enum tensor_dtypes {
    dtypes_same,   /* dtype of the first tensor, which may have any floating-point dtype */
    dtypes_weight, /* the same, or float32 */
    dtypes_wide,   /* float32, or float64 for the reference */
    dtypes_int32,
    dtypes_uint8,
    dtypes_mask, /* uint8, float16 or bfloat16 */
    dtypes_int64,
    dtypes_as_dt_proj,
    dtypes_as_a,
    dtypes_as_dt_bias,
    dtypes_as_attn_bias, /* as attn_bias, or as dtypes_wide */
} tensor_dtypes;

typedef enum tensor_role {
    role_input,
    role_optional,
    role_output,
    role_optional_output,
} tensor_role;

typedef struct tensor_entry {
    const char *name;
    const char *dims; /* a letter for each axis, see signatures.c */
    int32_t rank;     /* number of letters */
    size_t offset;    /* in the argument struct, or in fdma_selection */
    size_t member;    /* in fdma_problem */
    tensor_dtypes dtypes;
    tensor_role role;
    bool in_selection; /* absent where the call has no selection */
} tensor_entry;

enum { most_tensors = 32 }; /* tensors of one operation */

/* The tensors of one operation, in the order in which they are checked. */
typedef struct tensor_table {
    const tensor_entry *entries;
    size_t count;
} tensor_table;

/* True if an axis of this letter may have length 1 and is then broadcast. */
static inline bool may_broadcast(char dim) { return dim >= 'A' && dim <= 'Z'; }

extern const tensor_table fdma_tensors[]; /* indexed by fdma_operation */

static inline const fdma_tensor *tensor_at(const void *base, size_t offset) {
    return (const fdma_tensor *)((const char *)base + offset);
}

static inline fdma_tensor *problem_tensor(fdma_problem *problem, const tensor_entry *entry) {
    return (fdma_tensor *)((char *)problem + entry->member);
}
