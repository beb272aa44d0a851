/* The plan of a forward call: its tensors, and for each query block of 128 consecutive queries
 * (more in some calls) the list of keys that any of them keeps. Every kernel of forward, decode and
 * backward works from it, on every architecture.
 *
 *   fdma_cuda_plan_forward()  on the host: lays out records and lists in the workspace
 *   fdma_cuda_build_lists()   on the stream: fills them in from a selection (plan/lists.cu)
 *   a kernel                  takes tiles of rows, and for each tile visits the keys of its list:
 *                               forward/sm90, forward/sm80   tiles of 64 or 128 rows
 *                               decode                       up to 16 queries, keys in splits
 *                               backward/sm90, backward/sm80 see plan/backward.cuh
 *
 * A row of attention is a (query, query head) pair. The rows of one kv head are numbered with the
 * heads of its group side by side: row r is query r / group, head r % group. */
#pragma once

#include "core/dropout.h"
#include "cuda/device/softmax.cuh"
#include "cuda/device/view.cuh"

/* A query block has list_queries to most_block_queries queries, a power of two, which share a list.
 * A tile may hold the rows of only some of them. */
enum { list_queries = 128, most_block_queries = 512 };

/* The most keys that select/short takes. It also makes the lists, for query blocks of
 * list_queries. */
enum { most_short_keys = 4096 };

/* The data of a key beside k and v. A row at position p keeps a listed key j if p < expiry and,
 * where causal, j <= p. Where not causal, expiry is INT32_MAX or INT32_MIN. In packed sequences
 * that are not causal it is the end of j's sequence, and p must not be below the sequence's first
 * position. */
struct alignas(8) key_record {
    int32_t expiry;
    float bias; // times log2(e), because logits are exponents of 2
};

/* Counts at one position of a query block, since its first position: how many of the keys at the
 * head of its list have been evicted, and how many keys have arrived. */
struct alignas(4) key_changes {
    uint16_t evicted, arrived;
};

/* Lists with attn_mask: the keys that some query of a query block keeps, ascending, and for each
 * query which of the listed keys it keeps by all rules. They exist beside the plan's other lists.
 * Sequences and kv heads with the same mask and rules share lists. The memory is the caller's
 * mask_lists or in the workspace. */
struct kept_lists {
    int32_t *list; // list t of set s: list + (s * lists + t) * size; NULL: there are none
    // [sets][lists][size / 128][mask_heads][128]: for each 128 entries of a list and each query of
    // its query block one bit per entry; bits past the last entry are 0
    uint4 *bits;
    uint32_t *listed;       // [sets][lists][size / 32]: one bit per key, while lists are made
    int32_t *count;         // [sets][lists]
    int64_t size;           // capacity of a list, a multiple of 128
    int32_t lists;          // of each set
    int32_t batches, heads; // of sets: 1 or all sequences, 1 or all kv heads
    int32_t mask_heads;     // heads of the mask for the query heads of a kv head
};

/* List t of (b, g) has the keys that the queries from t * block_queries on keep. The first count.x
 * entries are the keys that are live at the first query's position. The keys that arrive later
 * follow, ascending, up to entry count.y. Without `changes` the live keys are in the order of their
 * slots. With it, the keys that are evicted inside the query block come first, in the order of
 * eviction. There are three forms:
 *   list is NULL              the keys 0, 1, 2, ...: entry j is key j
 *   list given, count NULL    the same, but keys that key_valid leaves out are marked absent
 *   list and count given      a selection's
 * The first form ends with the keys that exist, and the second one marks the others as absent.
 * Packed sequences change that where lists do not roll (list_tile 0): there is no count, and a
 * given list has only kept keys, or marks the others as absent. Its entries ascend, so the keys of
 * a tile's sequences are consecutive entries. */
struct forward_plan {
    head_view q, k, v, out;
    // rows of carried keys, those below carried_len; the other keys are in k and v, from row 0 on
    head_view k_carried, v_carried;
    number_view<float> lse;
    const float *sink_logit; // [q_heads]; NULL: none
    key_record *records;     // [batch * kv_heads][kv_len]; NULL: all keys kept, no bias
    int32_t *list; // of (b, g) and t: list + (b * kv_heads + g) * list_head + t * list_tile
    int64_t list_head, list_tile; // multiples of 4; list_tile 0: all query blocks share a list
    int2 *count;                  // [batch * kv_heads][lists]
    key_changes *changes;         // [batch * kv_heads][lists][block_queries]: by position
    int32_t *entries_before;      // [batch * kv_heads][kv_len + 1]: entries with a key below each
                                  // position, in packed sequences; NULL: entry j is key j
    packed_sequences sequences;   // starts NULL: not packed
    const int32_t *kv_used;       // [batch], the caller's; see key_count(); NULL: all keys exist
    pair_view mask, pair_bias;    // attn_mask and attn_bias
    kept_lists kept;              // with a mask
    int32_t lists;                // of each (b, g); not causal: 1, for all queries
    int32_t block_queries;        // queries of a query block
    int32_t batch, q_len, kv_len, q_heads, kv_heads, group, head_dim;
    int32_t carried_len; // 0: there are no carried keys
    float scale;         // of <q, k>
    float softcap;       // 0: off
    dropout_params dropout;
    float dropout_scale;      // factor of the probabilities that dropout keeps
    const int64_t *rng_state; // [2]: seed and offset, in place of dropout's; NULL: none
    bool causal;
    bool by_position; // causal or packed: the keys that a row keeps depend on its position
};

/* True if a list entry is a key to read. An absent key is listed as ~j, and a corrupt selection may
 * leave any number. */
__device__ static bool is_key(int32_t entry, int32_t kv_len) {
    return (uint32_t)entry < (uint32_t)kv_len;
}

/* The sink logit of query head h as an exponent of 2: -inf if there is none, NaN if it is +inf. */
__device__ static float sink_exponent(const forward_plan &plan, int32_t h) {
    if (plan.sink_logit == NULL)
        return -INFINITY;
    const float sink = plan.sink_logit[h], exponent = sink * log2_e;
    if (isinf(exponent) && !isinf(sink))
        return copysignf(FLT_MAX, sink);
    return exponent == INFINITY ? NAN : exponent;
}

/* Dropout with seed and offset, read from rng_state at run time if it is given. */
__device__ static dropout_params dropout_of(const forward_plan &plan) {
    dropout_params dropout = plan.dropout;
    if (plan.rng_state != NULL) {
        dropout.seed = (uint64_t)plan.rng_state[0];
        dropout.offset = (uint64_t)plan.rng_state[1];
    }
    return dropout;
}

/* Dropout's code of query head h of sequence b at a position; see core/dropout.h. */
__device__ static row_code row_code_of(const forward_plan &plan, int32_t b, int32_t h,
                                       int32_t position) {
    const dropout_params dropout = dropout_of(plan);
    return dropout_row(&dropout, (int64_t)b * plan.q_heads + h, position);
}

__device__ static uint32_t key_code_of(const forward_plan &plan, int32_t b, int32_t g, int32_t j) {
    const dropout_params dropout = dropout_of(plan);
    return dropout_key(&dropout, (int64_t)b * plan.kv_heads + g, j);
}

/* The number of keys of sequence b that exist: keys 0 to key_count - 1. */
__device__ static int32_t key_count(const forward_plan &plan, int32_t b) {
    return count_used(plan.kv_used, b, plan.kv_len);
}

/* p(i) = i + key_count - q_len. If negative, a causal query sees no key. */
__device__ static int32_t query_position(const forward_plan &plan, int32_t b, int32_t query) {
    return query + key_count(plan, b) - plan.q_len;
}

/* The changes of list t from its first position to the one `offset` later. */
__device__ static key_changes changes_at(const forward_plan &plan, int64_t head, int32_t t,
                                         int32_t offset) {
    const int64_t row = head * plan.lists + t;
    return plan.changes[row * plan.block_queries + min(offset, plan.block_queries - 1)];
}

/* The entries of list t of kv head `head` (of all sequences; b is its sequence) that some row up
 * to position `last` may keep. Counts are clamped, because a corrupt selection may leave any
 * number. Keys that arrive are distinct and ascend, so at most one arrives at each position up
 * to `last`. */
__device__ static int32_t visible_entries(const forward_plan &plan, int32_t b, int64_t head,
                                          int32_t t, int32_t last) {
    if (plan.count == NULL)
        return plan.causal ? min(last + 1, key_count(plan, b)) : key_count(plan, b);
    const int2 count = plan.count[head * plan.lists + t];
    const int64_t size = plan.list_tile > 0 ? plan.list_tile : plan.list_head;
    const int32_t all = (int32_t)min((int64_t)max(count.y, 0), size);
    const int32_t live = min(max(count.x, 0), all);
    const int32_t first = query_position(plan, b, t * plan.block_queries);
    if (plan.changes != NULL)
        return min(live + changes_at(plan, head, t, last - first).arrived, all);
    const int32_t seen = max(last - max(first, -1), 0);
    return plan.causal ? live + min(all - live, seen) : all;
}

/* The first position at which a key may be kept, if by_position. */
__device__ static int32_t first_position(const forward_plan &plan, int32_t key) {
    return plan.causal ? key : plan.sequences.ranges[key].x;
}

/* The number of entries of a shared list of packed sequences with a key below `position`. */
__device__ static int32_t entries_below(const forward_plan &plan, int64_t head, int32_t position) {
    return plan.entries_before == NULL
               ? position
               : plan.entries_before[head * ((int64_t)plan.kv_len + 1) + position];
}

/* The number of entries of such a list with a key that the query at a position, or an earlier one,
 * sees. */
__device__ static int32_t entries_seen(const forward_plan &plan, int64_t head, int32_t position) {
    const int32_t end = plan.sequences.ranges[position].y;
    return entries_below(plan, head, plan.causal ? min(position + 1, end) : end);
}

struct tile_list {
    const int32_t *list;       // NULL: the keys first, first + 1, ...
    const key_record *records; // by key; NULL: every row keeps every key, and there is no bias
    const int2 *ranges;        // packed and not causal: their ranges; otherwise NULL
    const uint4 *bits;         // of kept_lists; otherwise NULL
    int32_t first;
    int32_t entries; // that some row of the tile may keep; none if <= 0
    int32_t kv_len;  // keys that exist
};

/* The number of entries at the head of list t whose keys no query from `query` on keeps. If a
 * packed sequence has begun since the list's first position, these include all keys that were live
 * there. Positions are query indices then. */
__device__ static int32_t evicted_entries(const forward_plan &plan, int64_t head, int32_t t,
                                          int32_t query) {
    const int2 *const ranges = plan.sequences.ranges;
    const int32_t first = t * plan.block_queries;
    if (ranges != NULL && ranges[query].x > first)
        return max(plan.count[head * plan.lists + t].x, 0);
    return plan.changes == NULL ? 0 : changes_at(plan, head, t, query - first).evicted;
}

/* Skips the first entries of a list, whose keys have expired by the first query of a tile. */
__device__ static void skip_expired(const forward_plan &plan, int64_t head, int32_t t,
                                    int32_t query, int32_t last, tile_list *keys) {
    if (plan.list_tile > 0) {
        keys->first = min(evicted_entries(plan, head, t, query), keys->entries);
    } else if (plan.sequences.ranges != NULL) {
        keys->first = entries_below(plan, head, plan.sequences.ranges[query].x);
        keys->entries = entries_seen(plan, head, last);
    }
    keys->entries -= keys->first;
    keys->list += keys->list == NULL ? 0 : keys->first;
}

/* The index of list t of (b, g) among all lists of kept keys. */
__device__ static int64_t kept_list(const kept_lists &kept, int32_t b, int32_t g, int32_t t) {
    const int64_t set = (int64_t)min(b, kept.batches - 1) * kept.heads + min(g, kept.heads - 1);
    return set * kept.lists + t;
}

/* The list for the rows of kv head g of sequence b from query `query` to position `last`. */
__device__ static tile_list tile_list_of(const forward_plan &plan, int32_t b, int32_t g,
                                         int32_t query, int32_t last) {
    const int32_t t = plan.causal ? query >> (31 - __clz(plan.block_queries)) : 0;
    const int64_t head = b * plan.kv_heads + g;
    tile_list keys = {};
    if (plan.kept.list != NULL) {
        const int64_t n = kept_list(plan.kept, b, g, query / list_queries);
        keys.list = plan.kept.list + n * plan.kept.size;
        keys.bits = plan.kept.bits + n * plan.kept.size * plan.kept.mask_heads;
        keys.entries = (int32_t)min((int64_t)plan.kept.count[n], plan.kept.size);
    } else {
        if (plan.list != NULL)
            keys.list = plan.list + head * plan.list_head + t * plan.list_tile;
        keys.entries = visible_entries(plan, b, head, t, last);
        skip_expired(plan, head, t, query, last, &keys);
    }
    keys.records = plan.records == NULL ? NULL : plan.records + head * plan.kv_len;
    keys.ranges = plan.causal ? NULL : plan.sequences.ranges;
    keys.kv_len = key_count(plan, b);
    return keys;
}

/* Entry n of a list: a key, or a number that fails is_key(). */
__device__ static int32_t entry_at(const tile_list &keys, int32_t n) {
    if (n >= keys.entries)
        return -1;
    return keys.list == NULL ? keys.first + n : keys.list[n];
}

/* The bits of the entries from 128 n to 128 n + 127 that a query keeps, if list.bits is given:
 * entry e has bit e % 32 of word e / 32. `h` is the query head. */
__device__ static const uint32_t *kept_bits(const forward_plan &plan, const tile_list &list,
                                            int32_t n, int32_t h, int32_t query) {
    const int32_t heads = plan.kept.mask_heads, m = h % plan.group / (plan.group / heads);
    return (const uint32_t *)(list.bits + ((int64_t)n * heads + m) * list_queries +
                              query % list_queries);
}

/* Transposes 32 x 32 bits, a word in each lane: bit n of the result of lane m is bit m of the word
 * of lane n. */
__device__ static uint32_t transpose_bits(uint32_t word) {
    uint32_t lower = 0x0000ffff; // columns of each lower half
#pragma unroll
    for (int width = 16; width > 0; width /= 2) {
        const uint32_t other = __shfl_xor_sync(~0u, word, width);
        word = (threadIdx.x & width) == 0 ? (word & lower) | (other & lower) << width
                                          : (word & ~lower) | (other >> width & lower);
        lower ^= lower << width / 2;
    }
    return word;
}

static inline int64_t list_keys(const forward_plan &plan) {
    return plan.list_tile > 0 ? plan.list_tile : plan.list_head > 0 ? plan.list_head : plan.kv_len;
}

/* True if all rows of q, k, v and out, and of carried keys, can be copied 16 bytes at a time. */
static inline bool is_aligned(const forward_plan &plan) {
    return is_aligned(plan.q) && is_aligned(plan.k) && is_aligned(plan.v) && is_aligned(plan.out) &&
           is_aligned(plan.k_carried) && is_aligned(plan.v_carried);
}
