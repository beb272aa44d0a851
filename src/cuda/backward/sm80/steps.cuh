/* The work of a thread block of the key passes: the key of each of its rows in each query block,
 * and the steps in which queries are streamed past them. */
#pragma once

#include "cuda/backward/sm80/tile.cuh"

enum key_pass {
    pass_diagonal, // keys that arrive inside a query block, for this query block
    pass_slots,    // keys in slots, for a partition, or for all queries if not is_rolling
};

/* The inputs of a thread block. Shared memory holds them to save registers. */
struct key_inputs {
    int64_t head; // of all sequences
    int32_t b, g;
    int32_t origin; // the position of query 0
    int32_t partition;
    int32_t first_slot;             // of row 0: a slot, or an entry of the list
    int32_t end_slot;               // the end of the entries; not used if changes_keys
    int32_t query_block, end_block; // the query blocks to visit
    int32_t first_query;            // no query before it sees a key of these rows
    bool changes_keys;              // rows are slots, whose keys change between query blocks
    bool by_position;               // a key may come after some of the queries
    row_source k, v, q, dout;       // q and dout: of the first head of the group
    logit_params logits;
};

/* A step is some consecutive queries of one head. The steps of a query block go head by head. */
struct query_step {
    int32_t query_block, h; // h: in the group
    int32_t query;          // the first of this step
    int32_t first_query;    // of every head in this query block
};

__device__ static query_step first_step(const key_inputs &inputs, int32_t step) {
    const int32_t first = max(inputs.query_block * list_queries, inputs.first_query / step * step);
    return {inputs.query_block, 0, first, first};
}

__device__ static query_step step_after(const query_step &now, int32_t step, int32_t group,
                                        int32_t q_len) {
    const int32_t end = min((now.query_block + 1) * list_queries, q_len);
    query_step next = now;
    next.query += step;
    if (next.query < end)
        return next;
    next.query = now.first_query;
    next.h++;
    if (next.h < group)
        return next;
    const int32_t first = (now.query_block + 1) * list_queries;
    return {now.query_block + 1, 0, first, first};
}

/* The key of row n in a query block, or a number that fails is_key(). */
__device__ static int32_t key_of_row(const backward_plan &plan, const key_inputs &inputs,
                                     int32_t query_block, int32_t n) {
    const forward_plan &forward = plan.forward;
    const int32_t slot = inputs.first_slot + n;
    if (inputs.changes_keys)
        return key_in_slot(plan, inputs.head, query_block, slot);
    if (slot >= inputs.end_slot)
        return -1;
    return forward.list == NULL ? slot : list_entry(forward, inputs.head, query_block, slot);
}

/* The first query that may see a key from list entry first_slot on, if entries ascend and sequences
 * are not packed. It is in range even if the selection is corrupt. */
__device__ static int32_t first_query(const backward_plan &plan, const key_inputs &inputs) {
    if (!inputs.by_position || inputs.first_slot >= inputs.end_slot)
        return 0;
    const int32_t entry = key_of_row(plan, inputs, inputs.query_block, 0);
    const int32_t key = entry < 0 ? ~entry : entry;
    const int32_t query = key - inputs.origin;
    return min(max(query, 0), plan.forward.q_len - 1);
}

/* Thread block n of a diagonal pass takes tile n % tiles of the keys that arrive in query block
 * n / tiles. */
__device__ static void start_diagonal(const backward_plan &plan, key_inputs *inputs, int32_t n,
                                      int32_t rows) {
    const int32_t tiles = list_queries / rows;
    inputs->query_block = n / tiles;
    inputs->end_block = inputs->query_block + 1;
    const int2 count = list_counts(plan, inputs->head, inputs->query_block);
    inputs->first_slot = count.x + n % tiles * rows;
    inputs->end_slot = count.y;
    inputs->by_position = true;
    inputs->first_query = first_query(plan, *inputs);
    if (inputs->first_slot >= inputs->end_slot)
        inputs->end_block = inputs->query_block;
}

/* Thread block n of a slot pass takes slot block n % blocks in partition n / blocks. */
__device__ static void start_slots(const backward_plan &plan, key_inputs *inputs, int32_t n,
                                   int32_t rows) {
    const int32_t blocks = plan.slots / rows, query_blocks = plan.rows / list_queries;
    inputs->first_slot = n % blocks * rows;
    inputs->changes_keys = plan.is_rolling;
    if (plan.is_rolling) {
        inputs->partition = n / blocks;
        inputs->query_block = inputs->partition * plan.partition_lists;
        inputs->end_block = min(inputs->query_block + plan.partition_lists, query_blocks);
        return;
    }
    inputs->end_slot = shared_entries(plan.forward, inputs->b, inputs->head);
    inputs->by_position = plan.forward.by_position;
    if (plan.forward.sequences.ranges != NULL) {
        const int32_t end = min(inputs->first_slot + rows, inputs->end_slot);
        const block_range seen = seeing_blocks(plan.forward, inputs->head, inputs->first_slot, end);
        inputs->query_block = seen.first;
        inputs->end_block = seen.end;
        return;
    }
    inputs->first_query = first_query(plan, *inputs);
    inputs->query_block = inputs->first_query / list_queries;
    inputs->end_block = inputs->first_slot < inputs->end_slot ? query_blocks : 0;
}

__device__ static key_inputs key_inputs_of(const backward_plan &plan, key_pass pass, int64_t head,
                                           int32_t n, int32_t rows, bool aligned) {
    const forward_plan &forward = plan.forward;
    const int32_t b = (int32_t)(head / forward.kv_heads), g = (int32_t)(head % forward.kv_heads);
    const int32_t h = g * forward.group;
    key_inputs inputs = {};
    inputs.head = head;
    inputs.b = b;
    inputs.g = g;
    inputs.origin = query_position(forward, b, 0);
    inputs.k = key_source_of(forward, forward.k, forward.k_carried, b, g, aligned);
    inputs.v = key_source_of(forward, forward.v, forward.v_carried, b, g, aligned);
    inputs.q = source_of(forward.q, b, h, forward.head_dim, aligned);
    inputs.dout = source_of(plan.dout, b, h, forward.head_dim, aligned);
    inputs.logits = logit_params_of(forward);
    if (pass == pass_diagonal)
        start_diagonal(plan, &inputs, n, rows);
    else
        start_slots(plan, &inputs, n, rows);
    return inputs;
}
