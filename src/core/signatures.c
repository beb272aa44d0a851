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

/* The tensors of a table, of the carried keys and of their gradients. */
#define TABLE_IN(operation, rows, dtypes) TABLE_OF(operation, table_in, rows, dtypes, optional)
#define TABLE_OUT(operation, dtypes) TABLE_OF(operation, table_out, "z", dtypes, optional_output)
#define TABLE_OF(operation, table, rows, dtypes, role)                                             \
    ARG(operation, table.score, "bg" rows, dtypes, role),                                          \
        ARG(operation, table.position, "bg" rows, int32, role),                                    \
        ARG(operation, table.seen, "b", int32, role)
#define CARRIED(operation)                                                                         \
    ARG(operation, k_carried, "brgd", same, optional),                                             \
        ARG(operation, v_carried, "brgd", same, optional),                                         \
        ARG(operation, bias_carried, "bgr", wide, optional)
#define CARRIED_GRADIENTS(operation)                                                               \
    ARG(operation, dk_carried, "brgd", same, optional_output),                                     \
        ARG(operation, dv_carried, "brgd", same, optional_output),                                 \
        ARG(operation, dbias_carried, "bgr", wide, optional_output)

/* The tensors with an element for each pair of a query and a key. */
#define PAIRS(operation)                                                                           \
    ARG(operation, attn_mask, "BHIJ", mask, optional),                                             \
        ARG(operation, attn_bias, "BHIJ", weight, optional)

/* The tensors of a cache, whose rows have the letter `r`. */
#define CACHE(operation, r)                                                                        \
    ARG(operation, cache.k, "p" r "gd", same, output),                                             \
        ARG(operation, cache.v, "p" r "gd", same, output),                                         \
        ARG(operation, cache.bias, "pg" r, wide, output),                                          \
        ARG(operation, cache.table.score, "pg" r, wide, output),                                   \
        ARG(operation, cache.table.position, "pg" r, int32, output),                               \
        ARG(operation, cache.table.seen, "p", int32, output),                                      \
        ARG(operation, cache.page_table, "px", int32, optional)

/* Axes: b batch, i q_len, j kv_len, h q_heads, g kv_heads, d head_dim; c kv_heads * head_dim, s
 * sequences + 1, 2 an axis of length 2. With carried keys: r the carried keys, n the keys of the
 * call, j both; z window + recent, which are the rows of a stream's table; p the sequences of a
 * cache, r or z their rows, x the pages of each; e the prompts of a call, which are its packed
 * sequences or its batch. With a page table, k and v of a cache are pools: their first axes are m,
 * the pages of a pool, and l, the rows of a page; y counts bytes. t are the rows of a rotary table,
 * w its columns, v half as many. B, H, I and J are axes of b, h, i
 * and j elements that may have length 1 instead; H may also have g elements. The first tensor with
 * one of b, i, j, h, g, d, n, r, p, m and l settles its length, and the others must agree: the
 * tensors that a caller is least likely to get wrong come first. */
/* clang-format off */
static const tensor_entry score_tensors[] = {
    ARG(score, v, "bjgd", same, input),
    ARG(score, dt_proj, "gc", weight, input),
    ARG(score, a, "g", weight, input),
    ARG(score, dt_bias, "g", weight, optional),
    ARG(score, key_valid, "bj", uint8, optional),
    ARG(score, kv_used, "b", int32, optional),
    ARG(score, score, "bgj", wide, optional_output),
    ARG(score, bias, "bgj", wide, optional_output),
};

static const tensor_entry select_tensors[] = {
    ARG(select, score, "bgn", wide, input),
    ARG(select, key_valid, "bn", uint8, optional),
    ARG(select, starts, "s", int32, optional),
    ARG(select, kv_used, "b", int32, optional),
    TABLE_IN(select, "r", same),
    SELECTION(expiry, "bgj", int32, output),
    SELECTION(slot, "bgj", int32, optional_output),
    TABLE_OUT(select, same),
};

static const tensor_entry forward_tensors[] = {
    ARG(forward, q, "bihd", same, input),
    ARG(forward, k, "bngd", same, input),
    ARG(forward, v, "bngd", same, input),
    ARG(forward, bias, "bgn", wide, optional),
    ARG(forward, key_valid, "bn", uint8, optional),
    ARG(forward, starts, "s", int32, optional),
    ARG(forward, kv_used, "b", int32, optional),
    ARG(forward, sink_logit, "h", wide, optional),
    ARG(forward, rng_state, "2", int64, optional),
    CARRIED(forward),
    PAIRS(forward),
    ARG(forward, mask_lists, "y", uint8, optional),
    SELECTION(expiry, "bgj", int32, input),
    SELECTION(slot, "bgj", int32, optional),
    ARG(forward, out, "bihd", same, output),
    ARG(forward, lse, "bhi", wide, optional_output),
};

static const tensor_entry backward_tensors[] = {
    ARG(backward, q, "bihd", same, input),
    ARG(backward, k, "bngd", same, input),
    ARG(backward, v, "bngd", same, input),
    ARG(backward, bias, "bgn", wide, optional),
    ARG(backward, key_valid, "bn", uint8, optional),
    ARG(backward, starts, "s", int32, optional),
    ARG(backward, kv_used, "b", int32, optional),
    ARG(backward, sink_logit, "h", wide, optional),
    ARG(backward, rng_state, "2", int64, optional),
    CARRIED(backward),
    PAIRS(backward),
    ARG(backward, mask_lists, "y", uint8, optional),
    SELECTION(expiry, "bgj", int32, input),
    SELECTION(slot, "bgj", int32, optional),
    ARG(backward, out, "bihd", same, input),
    ARG(backward, lse, "bhi", wide, input),
    ARG(backward, dout, "bihd", same, input),
    ARG(backward, dlse, "bhi", wide, optional),
    ARG(backward, dq, "bihd", same, output),
    ARG(backward, dk, "bngd", same, output),
    ARG(backward, dv, "bngd", same, output),
    ARG(backward, dbias, "bgn", wide, optional_output),
    ARG(backward, dsink_logit, "h", wide, optional_output),
    ARG(backward, dattn_bias, "BHIJ", as_attn_bias, optional_output),
    CARRIED_GRADIENTS(backward),
};

static const tensor_entry score_backward_tensors[] = {
    ARG(score_backward, v, "bjgd", same, input),
    ARG(score_backward, dt_proj, "gc", weight, input),
    ARG(score_backward, a, "g", weight, input),
    ARG(score_backward, dt_bias, "g", weight, optional),
    ARG(score_backward, key_valid, "bj", uint8, optional),
    ARG(score_backward, kv_used, "b", int32, optional),
    ARG(score_backward, dbias, "bgj", wide, input),
    ARG(score_backward, dv, "bjgd", same, optional_output),
    ARG(score_backward, ddt_proj, "gc", as_dt_proj, output),
    ARG(score_backward, da, "g", as_a, output),
    ARG(score_backward, ddt_bias, "g", as_dt_bias, optional_output),
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

static const tensor_entry decode_tensors[] = {
    ARG(decode, q, "bihd", same, input),
    ARG(decode, k, "bngd", same, input),
    ARG(decode, v, "bngd", same, input),
    ARG(decode, dt_proj, "gc", weight, input),
    ARG(decode, a, "g", weight, input),
    ARG(decode, dt_bias, "g", weight, optional),
    ARG(decode, score, "bgn", wide, optional),
    ARG(decode, index, "b", int32, optional),
    ARG(decode, n_tokens, "b", int32, optional),
    ARG(decode, commit, "b", int32, optional),
    ARG(decode, sink_logit, "h", wide, optional),
    CACHE(decode, "r"),
    ARG(decode, out, "bihd", same, output),
    ARG(decode, lse, "bhi", wide, optional_output),
};

static const tensor_entry prefill_tensors[] = {
    ARG(prefill, q, "ihd", same, input),
    ARG(prefill, k, "ngd", same, input),
    ARG(prefill, v, "ngd", same, input),
    ARG(prefill, dt_proj, "gc", weight, input),
    ARG(prefill, a, "g", weight, input),
    ARG(prefill, dt_bias, "g", weight, optional),
    ARG(prefill, score, "gn", wide, optional),
    ARG(prefill, sink_logit, "h", wide, optional),
    CACHE(prefill, "r"),
    ARG(prefill, out, "ihd", same, output),
    ARG(prefill, lse, "hi", wide, optional_output),
};

static const tensor_entry cache_store_tensors[] = {
    ARG(cache_store, k, "bngd", same, input),
    ARG(cache_store, v, "bngd", same, input),
    ARG(cache_store, score, "bgn", wide, input),
    ARG(cache_store, starts, "s", int32, optional),
    ARG(cache_store, index, "e", int32, optional),
    SELECTION(expiry, "bgj", int32, input),
    SELECTION(slot, "bgj", int32, input),
    CACHE(cache_store, "z"),
};

static const tensor_entry cache_copy_tensors[] = {
    CACHE(cache_copy, "r"),
    ARG(cache_copy, from, "b", int32, input),
    ARG(cache_copy, to, "b", int32, input),
};

static const tensor_entry probabilities_tensors[] = {
    ARG(probabilities, q, "bihd", same, input),
    ARG(probabilities, k, "bngd", same, input),
    ARG(probabilities, bias, "bgn", wide, optional),
    ARG(probabilities, key_valid, "bn", uint8, optional),
    ARG(probabilities, starts, "s", int32, optional),
    ARG(probabilities, kv_used, "b", int32, optional),
    ARG(probabilities, rng_state, "2", int64, optional),
    ARG(probabilities, k_carried, "brgd", same, optional),
    ARG(probabilities, bias_carried, "bgr", wide, optional),
    PAIRS(probabilities),
    SELECTION(expiry, "bgj", int32, input),
    SELECTION(slot, "bgj", int32, optional),
    ARG(probabilities, lse, "bhi", wide, input),
    ARG(probabilities, probability, "bhij", wide, output),
};

static const tensor_entry rotary_table_tensors[] = {
    ARG(rotary_table, rotary, "tw", wide, output),
    ARG(rotary_table, inv_freq, "v", wide, optional),
    ARG(rotary_table, positions, "t", int32, optional),
};

static const tensor_entry rotate_tensors[] = {
    ARG(rotate, x, "bihd", same, input),
    ARG(rotate, weight, "d", weight, optional),
    ARG(rotate, rotary, "tw", wide, input),
    ARG(rotate, positions, "Bi", int32, optional),
    ARG(rotate, starts, "s", int32, optional),
    ARG(rotate, out, "bihd", same, output),
    ARG(rotate, k, "bigd", same, optional),
    ARG(rotate, k_weight, "d", weight, optional),
    ARG(rotate, k_out, "bigd", same, optional_output),
};

static const tensor_entry rotate_backward_tensors[] = {
    ARG(rotate_backward, dout, "bihd", same, input),
    ARG(rotate_backward, x, "bihd", same, optional),
    ARG(rotate_backward, weight, "d", weight, optional),
    ARG(rotate_backward, rotary, "tw", wide, input),
    ARG(rotate_backward, positions, "Bi", int32, optional),
    ARG(rotate_backward, starts, "s", int32, optional),
    ARG(rotate_backward, dx, "bihd", same, output),
    ARG(rotate_backward, dweight, "d", wide, optional_output),
    ARG(rotate_backward, dk_out, "bigd", same, optional),
    ARG(rotate_backward, k, "bigd", same, optional),
    ARG(rotate_backward, k_weight, "d", weight, optional),
    ARG(rotate_backward, dk, "bigd", same, optional_output),
    ARG(rotate_backward, dk_weight, "d", wide, optional_output),
};

static const tensor_entry attention_tensors[] = {
    ARG(attention, q, "bihd", same, input),
    ARG(attention, k, "bngd", same, input),
    ARG(attention, v, "bngd", same, input),
    ARG(attention, dt_proj, "gc", weight, input),
    ARG(attention, a, "g", weight, input),
    ARG(attention, dt_bias, "g", weight, optional),
    ARG(attention, key_valid, "bn", uint8, optional),
    ARG(attention, starts, "s", int32, optional),
    ARG(attention, kv_used, "b", int32, optional),
    ARG(attention, sink_logit, "h", wide, optional),
    ARG(attention, rng_state, "2", int64, optional),
    TABLE_IN(attention, "z", wide),
    CARRIED(attention),
    ARG(attention, out, "bihd", same, output),
    ARG(attention, lse, "bhi", wide, optional_output),
    ARG(attention, score, "bgn", wide, optional_output),
    ARG(attention, bias, "bgn", wide, optional_output),
    SELECTION(expiry, "bgj", int32, output),
    SELECTION(slot, "bgj", int32, optional_output),
    TABLE_OUT(attention, wide),
};

static const tensor_entry attention_backward_tensors[] = {
    ARG(attention_backward, q, "bihd", same, input),
    ARG(attention_backward, k, "bngd", same, input),
    ARG(attention_backward, v, "bngd", same, input),
    ARG(attention_backward, dt_proj, "gc", weight, input),
    ARG(attention_backward, a, "g", weight, input),
    ARG(attention_backward, dt_bias, "g", weight, optional),
    ARG(attention_backward, bias, "bgn", wide, optional),
    ARG(attention_backward, key_valid, "bn", uint8, optional),
    ARG(attention_backward, starts, "s", int32, optional),
    ARG(attention_backward, kv_used, "b", int32, optional),
    ARG(attention_backward, sink_logit, "h", wide, optional),
    ARG(attention_backward, rng_state, "2", int64, optional),
    CARRIED(attention_backward),
    SELECTION(expiry, "bgj", int32, input),
    SELECTION(slot, "bgj", int32, optional),
    ARG(attention_backward, out, "bihd", same, input),
    ARG(attention_backward, lse, "bhi", wide, input),
    ARG(attention_backward, dout, "bihd", same, input),
    ARG(attention_backward, dlse, "bhi", wide, optional),
    ARG(attention_backward, dq, "bihd", same, output),
    ARG(attention_backward, dk, "bngd", same, output),
    ARG(attention_backward, dv, "bngd", same, output),
    ARG(attention_backward, ddt_proj, "gc", as_dt_proj, output),
    ARG(attention_backward, da, "g", as_a, output),
    ARG(attention_backward, ddt_bias, "g", as_dt_bias, optional_output),
    ARG(attention_backward, dsink_logit, "h", wide, optional_output),
    CARRIED_GRADIENTS(attention_backward),
};

/* clang-format on */

#define TABLE(name)                                                                                \
    [operation_##name] = {name##_tensors, sizeof name##_tensors / sizeof name##_tensors[0]}

const tensor_table fdma_tensors[] = {
    TABLE(score),          TABLE(select),          TABLE(forward),        TABLE(backward),
    TABLE(score_backward), TABLE(merge),           TABLE(merge_backward), TABLE(decode),
    TABLE(cache_store),    TABLE(cache_copy),      TABLE(probabilities),  TABLE(rotary_table),
    TABLE(rotate),         TABLE(rotate_backward), TABLE(attention),      TABLE(attention_backward),
    TABLE(prefill),
};
