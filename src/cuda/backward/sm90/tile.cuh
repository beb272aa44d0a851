/* What the parties of sm90's backward kernel share: its shapes, its work, its shared memory.
 *
 * A block of threads has a block of slots for a stretch of epochs: k and v of the slots' keys lie
 * in shared memory, dk and dv in the consumers' registers, and the queries stream past, a step at a
 * time. Where a slot's key changes, at the border of two epochs, a segment ends: the gradients of
 * the keys that leave are written, and others take their rows. */
#ifndef FDMA_CUDA_BACKWARD_SM90_TILE_CUH
#define FDMA_CUDA_BACKWARD_SM90_TILE_CUH

#include "cuda/device/gather.cuh"
#include "cuda/device/ring.cuh"
#include "cuda/plan/backward.cuh"

static constexpr int warpgroup_threads = 128;
static constexpr int warpgroup_warps = 4;
static constexpr int step_rows_of_q = 64; // queries, of one head, of a step

/* element: of q, k, v and out. most_channels: head_dim, rounded up to a shape that is built.
 * Consumers share a block's slots; beside 256 channels, where registers hold the sums of half a key
 * only, they share a step's queries and the channels instead. */
template <typename element_, int most_channels, bool softcap> struct backward_config {
    using element = element_;
    static constexpr bool has_softcap = softcap;
    static constexpr int channels = most_channels;
    static constexpr bool is_wide = channels > 128;
    static constexpr int panels = channels / panel_channels;
    static constexpr int row_bytes = panels * line_bytes;
    static constexpr int consumers = 2; // warpgroups that multiply
    static constexpr int warpgroup_slots = 64;
    static constexpr int slots = is_wide ? warpgroup_slots : consumers * warpgroup_slots;
    static constexpr int q_rows = step_rows_of_q;
    static constexpr int own_queries = is_wide ? q_rows / consumers : q_rows;
    static constexpr int own_channels = is_wide ? channels / consumers : channels; // of dk and dv
    static constexpr int dq_channels = channels / consumers;                       // of a consumer
    static constexpr int dq_span = dq_channels > 64 ? 64 : dq_channels;            // at once
    static constexpr int dq_held = q_rows * dq_span / warpgroup_threads;
    static constexpr int stages = channels > 128 ? 2 : channels > 64 ? 3 : 4; // steps in flight
    static constexpr int ds_buffers = is_wide ? 1 : 2;
    static constexpr int threads = (consumers + 1) * warpgroup_threads;
    static constexpr int producer_registers = channels > 128 ? 56 : channels > 64 ? 40 : 104;
    static constexpr int consumer_registers = channels > 128 ? 224 : channels > 64 ? 232 : 200;
    // no registers for a segment's sums of dbias, or two consumers with sums
    static constexpr bool shares_dbias = has_softcap || is_wide;
};

/* What a launch of the kernel is for: the keys that live at an epoch's first position, or, in a
 * pass after it, those that arrive inside. */
struct backward_pass {
    bool is_diagonal;
    int32_t span;      // epochs that a block of threads takes one after the other, if it is
    float *dq;         // [batch * q_heads][tiles] of 64 queries as accumulators hold them
    uint32_t *tickets; // of each tile and consumer, whose turn it is to add; NULL: anybody's
    int32_t tiles;     // of a head
    int32_t blocks;    // of slots
};

/* The work of a block of threads. */
struct backward_item {
    int32_t head, b, g; // head: b * kv_heads + g
    int32_t block, first_slot;
    int32_t part;
    int32_t epoch, end; // epochs
};

/* What a consumer needs to know of a slot. */
struct alignas(16) slot_record {
    int32_t key; // -1: none
    int32_t expiry;
    float bias;     // times log2(e)
    int32_t border; // whose carry takes its sums; 0: none
};

/* A step, as the producer hands it on. */
struct alignas(16) step_note {
    int32_t tile;  // of all heads'
    int32_t first; // position of its first query; 0 where not causal
    uint32_t turn; // of this block to add to dq
    int16_t slots; // where its segment's are kept
    bool is_last;  // of its segment
};

// whose slots are known: the one before, which is being written, this one and the next
static constexpr int kept_segments = 3;

template <class config> struct backward_memory {
    alignas(1024) uint8_t k[config::slots * config::row_bytes];
    alignas(1024) uint8_t v[config::slots * config::row_bytes];
    alignas(1024) uint8_t ds[config::ds_buffers][config::slots * line_bytes]; // [slot][query]
    alignas(1024) uint8_t weights[config::is_wide ? config::slots * line_bytes : 16]; // likewise
    alignas(1024) uint8_t q[config::stages][config::q_rows * config::row_bytes];
    alignas(1024) uint8_t dout[config::stages][config::q_rows * config::row_bytes];
    alignas(16) float lse[config::stages][config::q_rows];
    alignas(16) float delta[config::stages][config::q_rows];
    step_note notes[config::stages];
    slot_record slots[kept_segments][config::slots];
    // of each consumer in this segment and the one before, and of those before it
    float dbias[2][config::consumers][config::slots], dbias_before[config::slots];
    int32_t next[warpgroup_threads]; // the producer's threads' keys of the next epoch
    backward_item item;
    // of each consumer, a ticket that is to be handed on, now that its sums are on their way
    int32_t owed[config::consumers];
    uint32_t owed_turn[config::consumers];
    bool is_over; // there is no next segment
    uint64_t step_full[config::stages], step_empty[config::stages];
    uint64_t ds_full[2];
    uint64_t slots_full, keys_full, keys_empty;
    static constexpr int most_bytes = 227 * 1024; // of a block's shared memory on 9.0
};

/* A list entry, or -1 for what is no key. */
__device__ static inline int32_t key_of(const forward_plan &plan, int32_t entry) {
    return is_key(entry, plan.kv_len) ? entry : -1;
}

/* The key in slot `slot` of an epoch, or the slot-th key that arrives inside it; -1: none. */
__device__ static inline int32_t find_key(const backward_plan &plan, const backward_pass &pass,
                                          int32_t head, int32_t epoch, int32_t slot) {
    const forward_plan &forward = plan.forward;
    if (pass.is_diagonal) {
        const int2 count = list_counts(plan, head, epoch);
        const int32_t place = count.x + slot;
        if (place >= count.y)
            return -1;
        return key_of(forward,
                      forward.list[head * forward.list_head + epoch * forward.list_tile + place]);
    }
    if (plan.is_rolling)
        return key_of(forward, key_in_slot(plan, head, epoch, slot));
    const int32_t slots = forward.count == NULL
                              ? forward.kv_len
                              : forward.count[(int64_t)head * forward.lists + forward.lists - 1].y;
    if (slot >= min(slots, plan.slots))
        return -1;
    return key_of(forward,
                  forward.list == NULL ? slot : forward.list[head * forward.list_head + slot]);
}

/* Slots that some query of an epoch sees; never fewer in a later one. */
__device__ static inline int32_t visible_slots(const backward_plan &plan, int32_t head,
                                               int32_t epoch) {
    const forward_plan &forward = plan.forward;
    if (plan.is_rolling)
        return list_counts(plan, head, epoch).x;
    if (!forward.causal)
        return plan.slots;
    if (forward.count != NULL)
        return forward.count[(int64_t)head * forward.lists + epoch].y;
    const int32_t queries = min(forward.q_len, (epoch + 1) * list_queries);
    return max(0, queries + forward.kv_len - forward.q_len);
}

/* Keys that arrive inside an epoch. */
__device__ static inline int32_t count_arrivals(const backward_plan &plan, int32_t head,
                                                int32_t epoch) {
    const int2 count = list_counts(plan, head, epoch);
    return count.y - count.x;
}

/* The first of an item's epochs in which some query sees one of its slots; a warp together. */
__device__ static inline int32_t first_epoch(const backward_plan &plan, const backward_pass &pass,
                                             const backward_item &item) {
    for (int32_t base = item.epoch; base < item.end; base += 32) {
        const int32_t epoch = base + threadIdx.x % 32;
        int32_t slots = 0;
        if (epoch < item.end)
            slots = pass.is_diagonal ? count_arrivals(plan, item.head, epoch)
                                     : visible_slots(plan, item.head, epoch);
        const uint32_t mask = __ballot_sync(~0u, slots > item.first_slot);
        if (mask != 0)
            return base + __ffs(mask) - 1;
    }
    return item.end;
}

__device__ static inline int32_t epochs_of(const backward_plan &plan) {
    return plan.rows / list_queries;
}

/* Blocks of one head stand together, as they read the same queries; and so that a block that has to
 * wait for another one's sums comes after it. */
template <class config>
__device__ static inline backward_item item_of(const backward_plan &plan,
                                               const backward_pass &pass) {
    const int32_t heads = plan.forward.batch * plan.forward.kv_heads;
    const int32_t group = blockIdx.x / pass.blocks;
    const int32_t place = blockIdx.x % pass.blocks;
    backward_item item;
    const bool backwards = pass.tickets != NULL && !plan.is_rolling; // the first to need no turn
    item.block = backwards ? pass.blocks - 1 - place : place;
    item.first_slot = item.block * config::slots;
    item.head = group % heads;
    item.b = item.head / plan.forward.kv_heads;
    item.g = item.head % plan.forward.kv_heads;
    item.part = group / heads;
    if (pass.is_diagonal) {
        item.epoch = item.part * pass.span;
        item.end = min(item.epoch + pass.span, epochs_of(plan));
        item.part = 0;
    } else {
        item.epoch = item.part * plan.partition_lists;
        item.end = plan.partitions > 1 ? min(item.epoch + plan.partition_lists, epochs_of(plan))
                                       : epochs_of(plan);
    }
    return item;
}

#endif
