/* The plan of a backward call: forward's plan, the gradients, and the intermediate tensors in the
 * workspace. The backward kernels of every architecture work from it.
 *
 *   fdma_cuda_plan_backward()   on the host: lays out the workspace
 *   fdma_cuda_begin_backward()  on the stream, the prologue: lists and records, lse and delta of
 *                               each row, zeros
 *   the kernel's passes         write dq, and add to dk, dv and dbias
 *   fdma_cuda_end_backward()    the epilogue: adds the sums across partitions
 *
 * Positions are cut into query blocks of block_queries, each with a list. A kernel makes dk, dv and
 * dbias in two passes. The slot pass takes the keys that are live at a block's first position, slot
 * by slot: list entries below count.x. The diagonal pass takes the keys that arrive inside a block:
 * entries from count.x to count.y. So each pass adds at most one contribution per key to dk, dv and
 * dbias, in the order of the launches.
 *
 * With few slots the slot pass runs once for each of several partitions: consecutive query blocks
 * that are processed independently. A key that is live at a boundary (the first position of a
 * partition after the first) has sums in several partitions, which go to the boundary sums of its
 * slot. At most two partitions add to one boundary sum, which begins at 0, so their order does not
 * matter. fdma_cuda_end_backward() adds a key's boundary sums in order. So results are bit-equal
 * from run to run.
 *
 * With slot_per_key there is one list, of all keys that some query keeps, and one pass: each key
 * has a slot of its own, and pairs are masked by expiry. That is faster for short sequences, and
 * where most visible pairs are kept. */
#pragma once

#include "cuda/plan/plan.cuh"

static constexpr int empty_rows = 32; // that share an element of empty_blocks

/* The requirements of a backward kernel on its plan. */
struct backward_shape {
    int32_t block_slots; // slots of a slot block
    int32_t most_partitions;
    int32_t most_queries; // of a query block
    bool slot_per_key;    // only for a causal selection whose lists would roll
};

/* Sums of the keys that are live at a boundary: [batch * kv_heads][partitions - 1][slots], all zero
 * at first. dk is already multiplied by scale. */
struct boundary_sums {
    float *dk, *dv; // rows of head_dim
    float *dbias;
};

/* A range of sums in the workspace that begin at zero. */
struct cleared_range {
    float4 *data;
    int64_t vecs;
};

/* floats: a multiple of 4, aligned to 16 bytes. */
static inline cleared_range cleared_floats(float *data, int64_t floats) {
    return {(float4 *)data, floats / 4};
}

enum pair_writing {
    pairs_added,  // to float32 zeros, by any lanes in any order
    pairs_stored, // over zeros: one lane has all pairs that map to an element
    rows_stored,  // as pairs_stored, by tiles that also write the zeros of their rows
};

struct backward_plan {
    forward_plan forward; // its out and lse are inputs here
    head_view dout, dq, dk, dv;
    head_view dk_carried, dv_carried; // of carried keys, as k_carried in forward
    number_view<float> dbias, dbias_carried;
    number_view<const float> dlse;
    float *dsink_logit; // [q_heads]; NULL: not wanted
    pair_view dpairs;   // dattn_bias, or its float32 sums in the workspace: see pair_writing
    pair_writing dpair_writing;
    int32_t sharing_rows; // a lane's consecutive rows that share elements; see rows_sharing_pairs()
    bool aligned_pairs;   // rows of dattn_bias are whole vectors of 16 bytes
    // [batch * kv_heads][kv_len][2][sum_channels]: sums of dk / scale and dv / dropout_scale, if
    // both are made from lists of kept keys. Channels are in the order of accumulators: the four
    // that a lane has of each 16 are neighbours
    float *key_sums;
    int32_t sum_channels;
    // of row i of (b, h), at (b * q_heads + h) * rows + i:
    float *row_lse;   // times log2(e); +inf if empty or past q_len, so that weights are 0
    float *row_delta; // <dout, out> - dlse; 0 if empty or past q_len
    // [batch * q_heads][rows / empty_rows]: 1 if some of these rows is empty, and 0 otherwise; rows
    // past q_len do not count
    uint8_t *empty_blocks;
    boundary_sums boundary;
    cleared_range cleared[2]; // boundary or key_sums, and the kernel's own sums, if any
    int32_t rows;             // q_len rounded up to a multiple of list_queries
    int32_t slots; // of a list, or keys of a shared list, rounded up to whole slot blocks
    int32_t partitions;
    int32_t partition_lists; // query blocks of a partition; the last may have fewer
    bool is_rolling;         // each query block has a list; otherwise a slot never changes its key
    bool slot_per_key;       // a slot has one key, and a causal selection is a mask by expiry
    bool accumulate, deterministic;
    bool add_dbias_carried; // adds to the tensor instead of overwriting it
};

template <typename element>
__device__ static element *dk_of_key(const backward_plan &plan, int64_t b, int64_t g, int32_t j) {
    return row_of_key<element>(plan.dk, plan.dk_carried, plan.forward.carried_len, b, g, j);
}

template <typename element>
__device__ static element *dv_of_key(const backward_plan &plan, int64_t b, int64_t g, int32_t j) {
    return row_of_key<element>(plan.dv, plan.dv_carried, plan.forward.carried_len, b, g, j);
}

__device__ static float *dbias_of_key(const backward_plan &plan, int64_t b, int64_t g, int32_t j) {
    return number_of_key(plan.dbias, plan.dbias_carried, plan.forward.carried_len, b, g, j);
}

__device__ static bool adds_dbias(const backward_plan &plan, int32_t j) {
    return plan.add_dbias_carried && j < plan.forward.carried_len;
}

/* True if dk and dv of all keys can be written 16 bytes at a time. */
static inline bool has_aligned_sums(const backward_plan &plan) {
    return is_aligned(plan.dk) && is_aligned(plan.dv) && is_aligned(plan.dk_carried) &&
           is_aligned(plan.dv_carried);
}

/* The counts of list t of (b, g): entries live at its first position (x), and all entries (y).
 * Clamped, because a selection may be corrupt. Only if is_rolling. */
__device__ static int2 list_counts(const backward_plan &plan, int64_t head, int32_t t) {
    const int2 count = plan.forward.count[head * plan.forward.lists + t];
    const int32_t all = (int32_t)min((int64_t)max(count.y, 0), plan.forward.list_tile);
    return make_int2(min(max(count.x, 0), all), all);
}

__device__ static int32_t list_entry(const forward_plan &plan, int64_t head, int32_t t, int32_t n) {
    return plan.list[head * plan.list_head + t * plan.list_tile + n];
}

/* Entries of the list that all query blocks of a kv head of sequence b share. Only if not
 * is_rolling. */
__device__ static int32_t shared_entries(const forward_plan &plan, int32_t b, int64_t head) {
    if (plan.sequences.ranges != NULL)
        return entries_seen(plan, head, plan.kv_len - 1);
    if (plan.count == NULL)
        return key_count(plan, b);
    const int2 count = plan.count[head * plan.lists + plan.lists - 1];
    return (int32_t)min((int64_t)max(count.y, 0), plan.list_head);
}

/* The key of entry n of a list that packed sequences share, absent or not. */
__device__ static int32_t key_of_entry(const forward_plan &plan, int64_t head, int32_t n) {
    const int32_t entry = plan.list == NULL ? n : list_entry(plan, head, 0, n);
    return entry < 0 ? ~entry : entry;
}

/* Query blocks `first` to `end` - 1. */
struct block_range {
    int32_t first, end;
};

/* The query blocks, of list_queries, whose queries may see an entry of the shared list from `entry`
 * to `end` - 1. The range is empty if there are no entries. */
__device__ static block_range seeing_blocks(const forward_plan &plan, int64_t head, int32_t entry,
                                            int32_t end) {
    if (entry >= end)
        return {0, 0};
    const int32_t last_key = key_of_entry(plan, head, end - 1);
    return {first_position(plan, key_of_entry(plan, head, entry)) / list_queries,
            (plan.sequences.ranges[last_key].y + list_queries - 1) / list_queries};
}

/* The key that is live in a slot at the first position of query block t, or a number that fails
 * is_key(). */
__device__ static int32_t key_in_slot(const backward_plan &plan, int64_t head, int32_t t,
                                      int32_t slot) {
    return slot < list_counts(plan, head, t).x ? list_entry(plan.forward, head, t, slot) : -1;
}

/* The boundary whose sums take the result of a partition for the key in a slot: the boundary at
 * its start or at its end, if the key is live there. 0: neither, and the sums go to dk, dv and
 * dbias. */
__device__ static int32_t boundary_of(const backward_plan &plan, int64_t head, int32_t partition,
                                      int32_t slot, int32_t key) {
    const int32_t first = partition * plan.partition_lists, next = partition + 1;
    if (partition > 0 && key_in_slot(plan, head, first, slot) == key)
        return partition;
    if (next < plan.partitions && key_in_slot(plan, head, next * plan.partition_lists, slot) == key)
        return next;
    return 0;
}

/* The index of a boundary and slot in boundary.dbias. Times head_dim: in boundary.dk and dv. */
__device__ static int64_t boundary_row(const backward_plan &plan, int64_t head, int32_t boundary,
                                       int32_t slot) {
    return (head * (plan.partitions - 1) + boundary - 1) * plan.slots + slot;
}
