/* A validated call, made once from a public argument struct. Every kernel works from it. */
#pragma once

#include "core/dropout.h"
#include "core/tensor.h"

#include <stddef.h>

typedef enum fdma_operation {
    operation_score,
    operation_select,
    operation_forward,
    operation_backward,
    operation_score_backward,
    operation_merge,
    operation_merge_backward,
    operation_decode, /* with a step for the score, unless it is given */
    operation_cache_store,
    operation_cache_copy,
    operation_probabilities,
    operation_rotary_table,
    operation_rotate,
    operation_rotate_backward,
    operation_attention, /* fused: made of others, without kernels of its own */
    operation_attention_backward,
    operation_prefill,
} fdma_operation;

/* A partial result: attention over some of the keys, and its gradients. */
typedef struct fdma_partial {
    fdma_tensor out, lse, dout, dlse;
} fdma_partial;

/* The requests of fdma_prefill(). Lists are in memory of the host. */
typedef struct prefill_requests {
    const int32_t *starts, *index; /* index may be NULL: 0, 1, ... */
    int64_t count;
    bool is_scored;   /* the caller gives the scores */
    bool in_pieces;   /* decode runs all requests, up to 64 tokens at a time */
    int32_t *listed;  /* [count]: index in memory of exec.device */
    fdma_tensor kept; /* [1, kv_heads, kv_len] int32: expiry without keys of missing pages */
} prefill_requests;

/* Options of a rotary embedding and of its table. */
typedef struct rotary_options {
    int64_t first;  /* the position of the table's row 0 */
    int64_t offset; /* the position of a sequence's first row, if there are no positions */
    int64_t nope_heads, k_nope_heads; /* the last heads of x and of k, which are not rotated */
    double eps;
    double base, factor; /* of the table; factor is never 0 */
    bool interleaved;
} rotary_options;

/* Pages of a stream's carried keys. A page has 1 << shift rows. */
typedef struct key_pages {
    const int32_t *page; /* the number of each page, in the order of rows; NULL: no pages */
    int shift;
} key_pages;

/* A selection for the last positions only, which a select kernel leaves for forward on a device.
 * All of it is scratch, in the layout that forward kernels read (cuda/plan/plan.cuh). */
typedef struct fdma_last_keys {
    fdma_tensor list;   /* [batch, kv_heads, room] int32: keys live at the first position, then keys
                           that arrive later, both ascending; absent: the selection is in expiry
                           and slot */
    fdma_tensor count;  /* [batch, kv_heads, 2] int32: number of the former, and of both together */
    fdma_tensor record; /* [batch, kv_heads, kv_len, 2]: int32 expiry and float32 bias, set only
                           for the keys of the list */
} fdma_last_keys;

/* Passed from select to forward in a fused call on a device, beside the selection. All of it is 0
 * in calls of a single operation. */
typedef struct fused_steps {
    const struct fdma_problem *forward; /* select: the step that uses its selection */
    int64_t last_positions; /* select: only this many positions, up to the last key that exists,
                               need a result; 0: all. Kernels may select for all */
    fdma_last_keys
        last_keys;     /* if present, kernels with trait_writes_last_keys write them, with the
                                 bias, and forward reads them in place of expiry and slot. Other
                                 kernels of select ignore them */
    bool plan_is_made; /* forward: select has made the plan of forward */
} fused_steps;

/* Tensors and sizes that an operation does not have are absent (rank 0) and 0. */
typedef struct fdma_problem {
    fdma_operation operation;
    fdma_dtype dtype; /* dtype of the operation's first tensor */
    int64_t batch, q_len, kv_len, q_heads, kv_heads, head_dim;
    int64_t carried_len; /* keys before the keys of the call; kv_len counts them too */
    int64_t new_len;     /* keys of the call: kv_len - carried_len */
    int64_t group;       /* query heads of one kv head */
    fdma_tensor q, k, v, out, lse, bias, score, dt_proj, a, dt_bias, key_valid, starts, kv_used,
        expiry, slot;
    fdma_tensor dout, dlse, dq, dk, dv, dbias, ddt_proj, da, ddt_bias;
    fdma_tensor sink_logit, dsink_logit, probability, rng_state;
    fdma_tensor attn_mask, attn_bias, dattn_bias; /* axes that are broadcast have stride 0 */
    fdma_tensor mask_lists;
    fdma_tensor x, dx, weight, dweight, rotary, positions, inv_freq;
    fdma_tensor k_out, dk_out, k_weight, dk_weight; /* of a rotation, with k and dk */
    fdma_tensor k_carried, v_carried, bias_carried, dk_carried, dv_carried, dbias_carried;
    fdma_table table_in, table_out;
    fdma_tensor index, n_tokens, commit, from, to;
    fdma_cache cache;        /* its tensors and sizes */
    int64_t pages, page_len; /* with a page table: sizes of the pools of k and v */
    key_pages carried_pages; /* k_carried and v_carried are then pools. Rows whose page is missing
                                are kept by no query */
    prefill_requests prefill;
    fdma_partial partial[2]; /* the two that fdma_merge() joins */
    int64_t window, recent, sinks;
    double gap;     /* of the selection; 0: off. Slots of a given one with a gap may be empty */
    int64_t slots;  /* window + recent of a selection, at most INT64_MAX */
    double scale;   /* never 0 */
    double softcap; /* 0: off; otherwise 1e-30 or more */
    rotary_options rotation;
    dropout_params dropout;
    int64_t first_entry, first_position; /* of a problem that is cut out of a call: its first batch
                                            entry and position in the call; dropout depends on
                                            them */
    fdma_scope scope;
    fdma_bias_form bias_form;
    bool causal;
    bool selected;
    bool deterministic;
    bool batch_invariant;   /* decode: bits do not depend on the batch */
    bool accumulate;        /* gradients are added to what their tensors hold */
    bool add_dsinks;        /* dsink_logit is added to its tensor's content: with `accumulate`, and
                             in each of the problems that a call is cut into */
    bool add_dattn_bias;    /* the same for dattn_bias, in such problems only */
    bool add_dbias_carried; /* the same for dbias_carried, with `accumulate` of a fused call */
    bool only_checks;       /* backward: checks the selection, and writes nothing */
    bool only_mask_lists;   /* forward: makes mask_lists, and writes nothing else */
    bool any_len; /* asks for a workspace that also serves every smaller kv_len and q_len */
    fused_steps fused;
    fdma_selection *made; /* select: the caller's, in which a call records its rules */
    fdma_exec exec;
} fdma_problem;

/* The softcap in float32, at most 1e30, so that it times log2(e) is finite: such a cap changes no
 * logit. 0 means no softcap. */
static inline float softcap_of(const fdma_problem *problem) {
    return (float)(problem->softcap < 1e30 ? problem->softcap : 1e30);
}

/* scale / cap: the factor of products of q and k before tanh. */
static inline float scale_over_cap(float scale, float cap) {
    const double ratio = (double)scale / (double)cap;
    return (float)(ratio < 1e30 ? ratio : 1e30);
}

/* Depth of the checks. check_shapes ignores the pointers to data and workspace, which may still be
 * NULL in a question for the workspace size or the kernel. */
typedef enum check_depth { check_shapes, check_all } check_depth;

static inline bool is_fused(fdma_operation operation) {
    return operation == operation_attention || operation == operation_attention_backward;
}

/* True if an operation attends to the keys of a cache: it may be given scores. */
static inline bool attends_to_cache(fdma_operation operation) {
    return operation == operation_decode || operation == operation_prefill;
}

static inline bool has_cache(fdma_operation operation) {
    return attends_to_cache(operation) || operation == operation_cache_store ||
           operation == operation_cache_copy;
}

/* True if an operation rotates rows. */
static inline bool is_rotating(fdma_operation operation) {
    return operation == operation_rotate || operation == operation_rotate_backward;
}

/* True if a rotation has two tensors of rows. */
static inline bool rotates_k(const fdma_problem *problem) {
    return is_present(&problem->k_out) || is_present(&problem->dk_out);
}

/* True if an operation computes attention, or its gradients, from q and k. */
static inline bool is_attending(fdma_operation operation) {
    return operation == operation_forward || operation == operation_backward ||
           operation == operation_probabilities || attends_to_cache(operation) ||
           is_fused(operation);
}

/* True if the caller's version of a selection has the field `gap`. */
static inline bool has_gap_field(const fdma_selection *selection) {
    return selection->size >= offsetof(fdma_selection, gap) + sizeof selection->gap;
}

static inline int64_t query_position(const fdma_problem *problem, int64_t i) {
    return i + problem->kv_len - problem->q_len;
}

/* The positions `first` to `end` - 1. */
typedef struct sequence_range {
    int64_t first, end;
} sequence_range;

/* The positions of the packed sequence that `position` belongs to: all without `starts`, none
 * beyond the last sequence. */
static inline sequence_range sequence_at(const fdma_problem *problem, int64_t position) {
    const int32_t *const starts = (const int32_t *)problem->starts.data;
    if (!is_present(&problem->starts))
        return (sequence_range){0, problem->kv_len};
    int64_t low = 0, high = problem->starts.shape[0]; // starts[low] <= position < starts[high]
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        low = starts[middle] <= position ? middle : low;
        high = starts[middle] <= position ? high : middle;
    }
    return high < problem->starts.shape[0] ? (sequence_range){starts[low], starts[high]}
                                           : (sequence_range){position, position};
}

static inline row_code row_code_of(const fdma_problem *problem, int64_t b, int64_t h, int64_t p) {
    const int64_t head = (problem->first_entry + b) * problem->q_heads + h;
    return dropout_row(&problem->dropout, head, problem->first_position + p);
}

static inline uint32_t key_code_of(const fdma_problem *problem, int64_t b, int64_t g, int64_t j) {
    const int64_t head = (problem->first_entry + b) * problem->kv_heads + g;
    return dropout_key(&problem->dropout, head, problem->first_position + j);
}

static inline bool is_dropped(const fdma_problem *problem, row_code row, int64_t b, int64_t g,
                              int64_t j, int64_t p) {
    const uint32_t threshold = problem->dropout.threshold;
    return threshold != 0 && dropout_drops(threshold, row, problem->first_position + p,
                                           key_code_of(problem, b, g, j));
}

/* The tensor that stores a number or a row of a key, and the index of the key in it. */
typedef struct key_storage {
    const fdma_tensor *tensor;
    int64_t index;
} key_storage;

/* `own` stores the keys of the call, `carried` those before them. */
static inline key_storage storage_of_key(const fdma_problem *problem, const fdma_tensor *own,
                                         const fdma_tensor *carried, int64_t j) {
    return j < problem->carried_len ? (key_storage){carried, j}
                                    : (key_storage){own, j - problem->carried_len};
}

/* True if the gradient of key j's bias is added to the content of its tensor. */
static inline bool adds_dbias(const fdma_problem *problem, int64_t j) {
    return problem->add_dbias_carried && j < problem->carried_len;
}

/* Indices of a row of keys on the first two axes of a tensor. */
typedef struct key_indices {
    int64_t first, row;
} key_indices;

static inline key_indices indices_of_carried(const fdma_problem *problem, int64_t b, int64_t j) {
    const key_pages *const pages = &problem->carried_pages;
    if (pages->page == NULL)
        return (key_indices){b, j};
    return (key_indices){pages->page[j >> pages->shift], j & ((INT64_C(1) << pages->shift) - 1)};
}

static inline bool is_valid_key(const fdma_problem *problem, int64_t b, int64_t j) {
    const fdma_tensor *const valid = &problem->key_valid;
    return !is_present(valid) || ((const uint8_t *)valid->data)[b * valid->stride[0] + j] != 0;
}

/* True if the query at position p keeps key j, by causality, validity, sequence and expiry. */
static inline bool is_kept(const fdma_problem *problem, int64_t b, int64_t g, int64_t j,
                           int64_t p) {
    const fdma_tensor *const expiry = &problem->expiry;
    if ((problem->causal && j > p) || !is_valid_key(problem, b, j))
        return false;
    const sequence_range own = sequence_at(problem, j);
    if (is_present(&problem->starts) && (p < own.first || p >= own.end))
        return false;
    if (!problem->selected)
        return true;
    const int32_t end =
        ((const int32_t *)expiry->data)[b * expiry->stride[0] + g * expiry->stride[1] + j];
    return problem->causal ? p < end : end == (int32_t)own.end;
}

/* Offset of query head h, query i and key j in a tensor shaped as attn_mask. */
static inline int64_t offset_of_pair(const fdma_problem *problem, const fdma_tensor *tensor,
                                     int64_t b, int64_t h, int64_t i, int64_t j) {
    const int64_t head = tensor->shape[1] == problem->q_heads ? h : h / problem->group;
    return b * tensor->stride[0] + head * tensor->stride[1] + i * tensor->stride[2] +
           j * tensor->stride[3];
}

/* True if an element of attn_mask is set: a byte that is not 0, or a number above 0. */
static inline bool is_set(const fdma_tensor *mask, int64_t offset) {
    const unsigned infinity = mask->dtype == FDMA_FLOAT16 ? 0x7c00 : 0x7f80;
    if (mask->dtype == FDMA_UINT8)
        return ((const uint8_t *)mask->data)[offset] != 0;
    const unsigned bits = ((const uint16_t *)mask->data)[offset];
    return bits != 0 && bits <= infinity; // neither negative nor NaN
}

/* True if query i of head h attends to key j, by is_kept() and by the mask. */
static inline bool attends_to(const fdma_problem *problem, int64_t b, int64_t h, int64_t i,
                              int64_t j) {
    const fdma_tensor *const mask = &problem->attn_mask;
    if (!is_kept(problem, b, h / problem->group, j, query_position(problem, i)))
        return false;
    return !is_present(mask) || is_set(mask, offset_of_pair(problem, mask, b, h, i, j));
}

static inline bool is_empty_row(const fdma_problem *problem, int64_t b, int64_t h, int64_t i) {
    int64_t j = 0;
    while (j < problem->kv_len && !attends_to(problem, b, h, i, j))
        j++;
    return j == problem->kv_len;
}
