/* The tensors of every operation. */
#include "core/signatures.h"

#include <stddef.h>

#define ENTRY(field, dims, offset, member, dtypes, role, in_selection)                             \
    {#field,          dims,        sizeof dims - 1, offset, offsetof(fdma_problem, member),        \
     dtypes_##dtypes, role_##role, in_selection}

/* A field of fdma_<operation>_args. */
#define ARG(operation, field, dims, dtypes, role)                                                  \
    MEMBER(operation, field, field, dims, dtypes, role)

/* A field that fdma_problem holds under another name. */
#define MEMBER(operation, field, member, dims, dtypes, role)                                       \
    ENTRY(field, dims, offsetof(fdma_##operation##_args, field), member, dtypes, role, false)

/* A field of the selection. */
#define SELECTION(field, dims, dtypes, role)                                                       \
    ENTRY(field, dims, offsetof(fdma_selection, field), field, dtypes, role, true)

/* Axes: b batch, i q_len, j kv_len, h q_heads, g kv_heads, d head_dim; c kv_heads * head_dim,
 * t tiles, w the width of a list, s sequences + 1, 2 an axis of length 2. The first tensor that has
 * one of b, i, j, h, g and d settles its length, and the others must agree: the tensors that a
 * caller is least likely to get wrong come first. */
/* clang-format off */
static const tensor_entry score_tensors[] = {
    ARG(score, v, "bjgd", same, input),
    ARG(score, dt_proj, "gc", weight, input),
    ARG(score, a, "g", weight, input),
    ARG(score, key_valid, "bj", uint8, optional),
    ARG(score, score, "bgj", wide, optional_output),
    ARG(score, bias, "bgj", wide, optional_output),
};

static const tensor_entry select_tensors[] = {
    ARG(select, score, "bgj", wide, input),
    ARG(select, key_valid, "bj", uint8, optional),
    ARG(select, starts, "s", int32, optional),
    SELECTION(expiry, "bgj", int32, output),
    SELECTION(slot, "bgj", int32, optional_output),
};

static const tensor_entry lists_tensors[] = {
    SELECTION(expiry, "bgj", int32, input),
    SELECTION(slot, "bgj", int32, input),
    ARG(lists, starts, "s", int32, optional),
    ARG(lists, list, "bgtw", int32, output),
    ARG(lists, count, "bgt2", int32, output),
};

static const tensor_entry forward_tensors[] = {
    ARG(forward, q, "bihd", same, input),
    ARG(forward, k, "bjgd", same, input),
    ARG(forward, v, "bjgd", same, input),
    ARG(forward, bias, "bgj", wide, optional),
    ARG(forward, key_valid, "bj", uint8, optional),
    ARG(forward, starts, "s", int32, optional),
    SELECTION(expiry, "bgj", int32, input),
    SELECTION(slot, "bgj", int32, optional),
    ARG(forward, out, "bihd", same, output),
    ARG(forward, lse, "bhi", wide, optional_output),
};

static const tensor_entry backward_tensors[] = {
    ARG(backward, q, "bihd", same, input),
    ARG(backward, k, "bjgd", same, input),
    ARG(backward, v, "bjgd", same, input),
    ARG(backward, bias, "bgj", wide, optional),
    ARG(backward, key_valid, "bj", uint8, optional),
    ARG(backward, starts, "s", int32, optional),
    SELECTION(expiry, "bgj", int32, input),
    SELECTION(slot, "bgj", int32, optional),
    ARG(backward, out, "bihd", same, input),
    ARG(backward, lse, "bhi", wide, input),
    ARG(backward, dout, "bihd", same, input),
    ARG(backward, dlse, "bhi", wide, optional),
    ARG(backward, dq, "bihd", same, output),
    ARG(backward, dk, "bjgd", same, output),
    ARG(backward, dv, "bjgd", same, output),
    ARG(backward, dbias, "bgj", wide, optional_output),
};

static const tensor_entry score_backward_tensors[] = {
    ARG(score_backward, v, "bjgd", same, input),
    ARG(score_backward, dt_proj, "gc", weight, input),
    ARG(score_backward, a, "g", weight, input),
    ARG(score_backward, key_valid, "bj", uint8, optional),
    ARG(score_backward, dbias, "bgj", wide, input),
    ARG(score_backward, dv, "bjgd", same, optional_output),
    ARG(score_backward, ddt_proj, "gc", as_dt_proj, output),
    ARG(score_backward, da, "g", as_a, output),
};

static const tensor_entry merge_tensors[] = {
    MEMBER(merge, out_a, partial[0].out, "bihd", same, input),
    MEMBER(merge, lse_a, partial[0].lse, "bhi", wide, input),
    MEMBER(merge, out_b, partial[1].out, "bihd", same, input),
    MEMBER(merge, lse_b, partial[1].lse, "bhi", wide, input),
    ARG(merge, out, "bihd", same, output),
    ARG(merge, lse, "bhi", wide, optional_output),
};

static const tensor_entry merge_backward_tensors[] = {
    MEMBER(merge_backward, out_a, partial[0].out, "bihd", same, input),
    MEMBER(merge_backward, lse_a, partial[0].lse, "bhi", wide, input),
    MEMBER(merge_backward, out_b, partial[1].out, "bihd", same, input),
    MEMBER(merge_backward, lse_b, partial[1].lse, "bhi", wide, input),
    ARG(merge_backward, dout, "bihd", same, input),
    ARG(merge_backward, dlse, "bhi", wide, optional),
    MEMBER(merge_backward, dout_a, partial[0].dout, "bihd", same, output),
    MEMBER(merge_backward, dlse_a, partial[0].dlse, "bhi", wide, output),
    MEMBER(merge_backward, dout_b, partial[1].dout, "bihd", same, output),
    MEMBER(merge_backward, dlse_b, partial[1].dlse, "bhi", wide, output),
};

static const tensor_entry attention_tensors[] = {
    ARG(attention, q, "bihd", same, input),
    ARG(attention, k, "bjgd", same, input),
    ARG(attention, v, "bjgd", same, input),
    ARG(attention, dt_proj, "gc", weight, input),
    ARG(attention, a, "g", weight, input),
    ARG(attention, key_valid, "bj", uint8, optional),
    ARG(attention, starts, "s", int32, optional),
    ARG(attention, out, "bihd", same, output),
    ARG(attention, lse, "bhi", wide, optional_output),
    ARG(attention, score, "bgj", wide, optional_output),
    ARG(attention, bias, "bgj", wide, optional_output),
    SELECTION(expiry, "bgj", int32, output),
    SELECTION(slot, "bgj", int32, optional_output),
};

static const tensor_entry attention_backward_tensors[] = {
    ARG(attention_backward, q, "bihd", same, input),
    ARG(attention_backward, k, "bjgd", same, input),
    ARG(attention_backward, v, "bjgd", same, input),
    ARG(attention_backward, dt_proj, "gc", weight, input),
    ARG(attention_backward, a, "g", weight, input),
    ARG(attention_backward, bias, "bgj", wide, optional),
    ARG(attention_backward, key_valid, "bj", uint8, optional),
    ARG(attention_backward, starts, "s", int32, optional),
    SELECTION(expiry, "bgj", int32, input),
    SELECTION(slot, "bgj", int32, optional),
    ARG(attention_backward, out, "bihd", same, input),
    ARG(attention_backward, lse, "bhi", wide, input),
    ARG(attention_backward, dout, "bihd", same, input),
    ARG(attention_backward, dlse, "bhi", wide, optional),
    ARG(attention_backward, dq, "bihd", same, output),
    ARG(attention_backward, dk, "bjgd", same, output),
    ARG(attention_backward, dv, "bjgd", same, output),
    ARG(attention_backward, ddt_proj, "gc", as_dt_proj, output),
    ARG(attention_backward, da, "g", as_a, output),
};

/* clang-format on */

#define TABLE(name)                                                                                \
    [operation_##name] = {name##_tensors, sizeof name##_tensors / sizeof name##_tensors[0]}

const tensor_table fdma_tensors[] = {
    TABLE(score),     TABLE(select),
    TABLE(lists),     TABLE(forward),
    TABLE(backward),  TABLE(score_backward),
    TABLE(merge),     TABLE(merge_backward),
    TABLE(attention), TABLE(attention_backward),
};
