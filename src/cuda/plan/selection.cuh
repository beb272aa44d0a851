/* The selection that a plan's lists and records are built from, as kernels see it. */
#pragma once

#include "cuda/plan/plan.cuh"

struct selection_view {
    number_view<const int32_t> expiry, slot;     // absent: dense
    number_view<const float> bias, bias_carried; // as forward_plan has k and k_carried
    const uint8_t *key_valid;                    // NULL: all
    int64_t valid_batch;
    int32_t slots;       // slots that the selection says it uses
    int32_t block_lists; // lists of a thread block
    bool is_global;
    bool table_fits;   // the live keys of a thread block fit in shared memory
    bool checks_slots; // a kept key whose slot is not below `slots` is a misfit
};

struct head_selection {
    const int32_t *expiry, *slot;
    const uint8_t *key_valid;
    const float *bias, *bias_carried;
    int32_t kv_len; // keys that exist; nothing is read of the others
};

__device__ static head_selection selection_of(const forward_plan &plan,
                                              const selection_view &selection, int head) {
    const int64_t b = head / plan.kv_heads, g = head % plan.kv_heads;
    head_selection of = {};
    of.kv_len = key_count(plan, (int32_t)b);
    if (selection.expiry.data != NULL)
        of.expiry = selection.expiry.at(b, g);
    if (selection.slot.data != NULL)
        of.slot = selection.slot.at(b, g);
    if (selection.key_valid != NULL)
        of.key_valid = selection.key_valid + b * selection.valid_batch;
    if (selection.bias.data != NULL)
        of.bias = selection.bias.at(b, g);
    if (selection.bias_carried.data != NULL)
        of.bias_carried = selection.bias_carried.at(b, g);
    return of;
}

/* The entry of a kept key in the table: its slot, or the entry `slots`, which the misfits share. */
__device__ static int32_t table_entry(const selection_view &selection, const head_selection &of,
                                      int32_t j) {
    return (int32_t)min((uint32_t)of.slot[j], (uint32_t)selection.slots);
}

__device__ static bool is_valid(const head_selection &selection, int32_t j) {
    return selection.key_valid == NULL || selection.key_valid[j] != 0;
}

__device__ static int32_t list_position(const forward_plan &plan, const head_selection &of,
                                        int32_t t) {
    return t * plan.block_queries + of.kv_len - plan.q_len;
}

__device__ static int32_t sequence_end(const forward_plan &plan, const head_selection &of,
                                       int32_t j) {
    return plan.sequences.ranges == NULL ? of.kv_len : plan.sequences.ranges[j].y;
}

/* The expiry of a key's record: INT32_MIN if it is never kept or does not exist, INT32_MAX if it
 * outlives all queries. */
__device__ static int32_t record_expiry(const forward_plan &plan, const head_selection &selection,
                                        int32_t j) {
    const int32_t end = sequence_end(plan, selection, j);
    const bool is_dense = selection.expiry == NULL || j >= selection.kv_len;
    const int32_t given = is_dense ? end : selection.expiry[j];
    const int32_t expiry = plan.sequences.ranges == NULL ? given : min(given, end);
    const bool kept = expiry > j && (plan.causal || expiry == end);
    if (!kept || !is_valid(selection, j))
        return INT32_MIN;
    return expiry == selection.kv_len ? INT32_MAX : expiry;
}
