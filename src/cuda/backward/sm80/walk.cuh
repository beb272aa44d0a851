/* What a block of the key pass visits: which keys its rows are in each epoch, and the queries that
 * stream past them, step after step. */
#ifndef FDMA_CUDA_BACKWARD_SM80_WALK_CUH
#define FDMA_CUDA_BACKWARD_SM80_WALK_CUH

#include "cuda/backward/sm80/tile.cuh"

enum key_pass {
    pass_diagonal, // keys that arrive inside an epoch, against this epoch
    pass_slots, // keys that live in slots: of a part, or where no slot changes its key of all time
};

/* The work of a block: in shared memory, to keep it out of the registers. */
struct key_work {
    int64_t head; // of all sequences
    int32_t b, g;
    int32_t part;
    int32_t first_slot;   // or list entry, where slots do not change or keys arrive
    int32_t end_slot;     // where slots do not change or keys arrive: the end of these entries
    int32_t epoch, end;   // epochs to visit
    int32_t first_query;  // nothing before it sees a key of the first epoch
    bool changes, causal; // whether slots change their keys; whether keys may come after queries
    row_source k, v, q, dout; // q, dout: of the group's first head
    logit_form form;
};

/* A key's row of a gradient. */
template <typename element>
__device__ static inline element *row_at(const head_view &view, const key_work &work, int32_t key) {
    return (element *)view.data + work.b * view.batch + key * view.row + work.g * view.head;
}

/* Where a block stands: a step is some queries of one head, an epoch's steps head after head. */
struct query_step {
    int32_t epoch, h;
    int32_t query;       // the first one
    int32_t first_query; // of each head in this epoch
};

__device__ static inline query_step start_steps(const key_work &work, int32_t step) {
    const int32_t first = max(work.epoch * list_queries, work.first_query / step * step);
    return {work.epoch, 0, first, first};
}

__device__ static inline query_step step_after(const query_step &now, int32_t step, int32_t group,
                                               int32_t q_len) {
    const int32_t end = min((now.epoch + 1) * list_queries, q_len);
    query_step next = now;
    next.query += step;
    if (next.query < end)
        return next;
    next.query = now.first_query;
    next.h++;
    if (next.h < group)
        return next;
    const int32_t first = (now.epoch + 1) * list_queries;
    return {now.epoch + 1, 0, first, first};
}

/* Row n of the block in an epoch: a key, or what is_key() says no to. */
__device__ static inline int32_t row_key(const backward_plan &plan, const key_work &work,
                                         int32_t epoch, int32_t n) {
    const forward_plan &forward = plan.forward;
    const int32_t slot = work.first_slot + n;
    if (work.changes)
        return key_in_slot(plan, work.head, epoch, slot);
    if (slot >= work.end_slot)
        return -1;
    if (forward.list == nullptr)
        return slot;
    return forward.list[work.head * forward.list_head + epoch * forward.list_tile + slot];
}

/* The first query that may see a key from list entry first_slot on: entries ascend. Some query,
 * whatever a corrupt selection says. */
__device__ static inline int32_t first_query(const backward_plan &plan, const key_work &work) {
    if (!work.causal || work.first_slot >= work.end_slot)
        return 0;
    const int32_t entry = row_key(plan, work, work.epoch, 0);
    const int32_t key = entry < 0 ? ~entry : entry;
    const int32_t query = key - (plan.forward.kv_len - plan.forward.q_len);
    return min(max(query, 0), plan.forward.q_len - 1);
}

/* Block n of a diagonal pass: the n % tiles th rows of those that arrive in epoch n / tiles. */
__device__ static inline void start_diagonal(const backward_plan &plan, key_work *work, int32_t n,
                                             int32_t rows) {
    const int32_t tiles = list_queries / rows;
    work->epoch = n / tiles;
    work->end = work->epoch + 1;
    const int2 count = list_counts(plan, work->head, work->epoch);
    work->first_slot = count.x + n % tiles * rows;
    work->end_slot = count.y;
    work->causal = true;
    work->first_query = first_query(plan, *work);
    if (work->first_slot >= work->end_slot)
        work->end = work->epoch;
}

/* Entries of a list that all epochs share. */
__device__ static inline int32_t count_entries(const backward_plan &plan, int64_t head) {
    const forward_plan &forward = plan.forward;
    if (forward.count == nullptr)
        return forward.kv_len;
    const int2 count = forward.count[head * forward.lists + forward.lists - 1];
    return (int32_t)min((int64_t)max(count.y, 0), forward.list_head);
}

/* Block n of a slot pass: rows n % blocks of part n / blocks. */
__device__ static inline void start_slots(const backward_plan &plan, key_work *work, int32_t n,
                                          int32_t rows) {
    const int32_t blocks = plan.slots / rows, epochs = plan.rows / list_queries;
    work->first_slot = n % blocks * rows;
    work->changes = plan.is_rolling;
    if (plan.is_rolling) {
        work->part = n / blocks;
        work->epoch = work->part * plan.part_lists;
        work->end = min(work->epoch + plan.part_lists, epochs);
        return;
    }
    work->end_slot = count_entries(plan, work->head);
    work->causal = plan.forward.causal;
    work->first_query = first_query(plan, *work);
    work->epoch = work->first_query / list_queries;
    work->end = work->first_slot < work->end_slot ? epochs : 0;
}

__device__ static inline key_work start_work(const backward_plan &plan, key_pass pass, int64_t head,
                                             int32_t n, int32_t rows, bool aligned) {
    const forward_plan &forward = plan.forward;
    const int32_t b = (int32_t)(head / forward.kv_heads), g = (int32_t)(head % forward.kv_heads);
    const int32_t h = g * forward.group;
    key_work work = {};
    work.head = head;
    work.b = b;
    work.g = g;
    work.k = source_of(forward.k, b, g, forward.head_dim, aligned);
    work.v = source_of(forward.v, b, g, forward.head_dim, aligned);
    work.q = source_of(forward.q, b, h, forward.head_dim, aligned);
    work.dout = source_of(plan.dout, b, h, forward.head_dim, aligned);
    work.form = form_of(forward);
    if (pass == pass_diagonal)
        start_diagonal(plan, &work, n, rows);
    else
        start_slots(plan, &work, n, rows);
    return work;
}

#endif
