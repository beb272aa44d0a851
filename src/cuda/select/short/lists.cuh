/* The records and lists of forward's plan, written by the block that selects; plan/lists.cu builds
 * them from any selection. Here lists need no rolling: a slot passes from the evicted key to the
 * key that evicts it, so at a list's first position it holds the last key that took it before. */
#pragma once

#include "cuda/select/short/memory.cuh"

struct list_target {
    key_record *records;
    int32_t *list; // of query block 0
    int2 *count;
    key_changes *changes;
    int64_t list_tile;
    uint32_t lists, origin; // origin: the position of query 0
    uint32_t kv_len;
    uint32_t slots; // of a list: window + recent
};

__device__ static list_target target_of(const forward_plan &plan, uint32_t slots) {
    const int64_t head = blockIdx.x;
    return {plan.records + head * plan.kv_len,
            plan.list + head * plan.list_head,
            plan.count + head * plan.lists,
            plan.changes + head * plan.lists * list_queries,
            plan.list_tile,
            (uint32_t)plan.lists,
            (uint32_t)(plan.kv_len - plan.q_len),
            (uint32_t)plan.kv_len,
            slots};
}

__device__ static uint32_t list_position(const list_target &to, uint32_t t) {
    return to.origin + t * list_queries;
}

/* Clears the table of live keys. Its memory must not be in use, and a barrier must follow before
 * enter_live(). */
template <class config>
__device__ static void clear_live(short_memory<config> &shared, const list_target &to) {
    uint32_t *const words = reinterpret_cast<uint32_t *>(shared.live);
    const uint32_t count = (to.lists * to.slots + 1) / 2;
    for (uint32_t n = threadIdx.x; n < count; n += config::threads)
        words[n] = 0;
}

/* Enters a kept key into the table of the first list in which it is live. A key that is evicted
 * before that list's first position is not entered. No other key is live in its slot there. */
template <class config>
__device__ static void enter_live(short_memory<config> &shared, const list_target &to, uint32_t j,
                                  uint32_t kept_index, uint32_t expiry, uint32_t slot) {
    const uint32_t t =
        j <= to.origin ? 0 : (j - to.origin + list_queries - 1) / (uint32_t)list_queries;
    if (t < to.lists && expiry > list_position(to, t))
        shared.live[t * to.slots + slot] = (uint16_t)(kept_index + 1);
}

template <class config>
__device__ static void write_keys(short_memory<config> &shared, const select_segment &segment,
                                  const list_target &to, const float (&bias)[config::items]) {
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t j = own_index<config>(r), number = shared.number[j];
        const uint32_t kept_index = number & index_mask;
        if (j >= to.kv_len)
            continue;
        if ((number & kept_bit) == 0) {
            write_key(segment, j, j, -1);
            to.records[j] = {INT32_MIN, bias[r]};
            continue;
        }
        const uint32_t expiry = shared.expiry[kept_index];
        const uint32_t slot = shared.parent[kept_index] & index_mask;
        write_key(segment, j, expiry, (int32_t)slot);
        to.records[j] = {expiry == to.kv_len ? INT32_MAX : (int32_t)expiry, bias[r]};
        enter_live(shared, to, j, kept_index, expiry, slot);
    }
    __syncthreads();
}

/* By one warp: the changes in the query block of list t. These are the keys that arrive there, and
 * the keys evicted there that were live at its first position. */
template <class config>
__device__ static void write_changes(short_memory<config> &shared, const list_target &to,
                                     uint32_t t) {
    const uint32_t lane = threadIdx.x % warp_lanes, position = list_position(to, t);
    const uint32_t at_first = shared.number[position];
    const uint32_t kept = (at_first & index_mask) + ((at_first & kept_bit) != 0);
    const uint32_t live = min(kept, to.slots);
    int32_t *const list = to.list + t * to.list_tile;
    uint32_t evicted = 0, arrived = 0;
#pragma unroll
    for (uint32_t r = 0; r < list_queries / warp_lanes; r++) {
        const uint32_t n = r * warp_lanes + lane, j = position + 1 + n;
        const uint32_t number = n < list_queries - 1 && j < to.kv_len ? shared.number[j] : 0;
        const uint32_t kept_index = number & index_mask;
        const bool arrives = (number & kept_bit) != 0;
        const uint32_t leaves = arrives && kept_index >= to.slots ? shared.evicted[kept_index] : j;
        const bool evicts = leaves <= position;
        const uint32_t rank = number_flag(evicts, &evicted), order = number_flag(arrives, &arrived);
        to.changes[t * list_queries + n] = {(uint16_t)rank, (uint16_t)order};
        if (arrives)
            list[live + order] = (int32_t)j;
        if (evicts) {
            list[rank] = (int32_t)leaves;
            shared.evicted_slot[t][rank] = shared.parent[kept_index] & index_mask;
        }
    }
    if (lane == 0) {
        to.count[t] = make_int2((int32_t)live, (int32_t)(live + arrived));
        shared.evicted_count[t] = (uint16_t)evicted;
    }
}

/* Writes a key that is live in slot s at the first position of list t, unless it is evicted inside
 * the list's query block. The first entries of the list belong to the evicted keys; see
 * write_entry() in plan/roll.cuh. */
template <class config>
__device__ static void write_entry(const short_memory<config> &shared, const list_target &to,
                                   uint32_t t, uint32_t s, uint32_t kept_index) {
    const uint32_t end = min(list_position(to, t) + list_queries, to.kv_len);
    if (shared.expiry[kept_index] < end)
        return;
    uint32_t entry = s;
    while (entry < shared.evicted_count[t])
        entry = shared.evicted_slot[t][entry];
    to.list[t * to.list_tile + entry] = shared.position[kept_index];
}

/* A thread follows a slot through the lists: a key is in the list that it was entered into and in
 * the following ones, up to the next key of its slot. If there are fewer slots than threads, each
 * group of threads writes some of the lists. */
template <class config>
__device__ static void write_live(const short_memory<config> &shared, const list_target &to) {
    const uint32_t slots = (to.slots + warp_lanes - 1) / warp_lanes * warp_lanes;
    const uint32_t groups = max(config::threads / slots, 1U), group = threadIdx.x / slots;
    const uint32_t most = (to.lists + groups - 1) / groups; // lists of a group
    const uint32_t first = group * most, end = min(first + most, to.lists);
    if (group >= groups)
        return;
    for (uint32_t s = threadIdx.x - group * slots; s < to.slots; s += config::threads) {
        uint32_t live = 0;
        for (uint32_t t = 0; t < end; t++) {
            const uint32_t entered = shared.live[t * to.slots + s];
            live = entered != 0 ? entered : live;
            if (t >= first && live != 0)
                write_entry(shared, to, t, s, live - 1);
        }
    }
}

template <class config>
__device__ static void write_lists(short_memory<config> &shared, const list_target &to) {
    for (uint32_t t = threadIdx.x / warp_lanes; t < to.lists; t += config::warps)
        write_changes(shared, to, t);
    __syncthreads();
    write_live(shared, to);
}
