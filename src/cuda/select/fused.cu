/* Selections of fused calls that also write the records and lists of forward's plan, on any device
 * from compute capability 8.0. That saves a launch between the scores and attention.
 *
 * cuda/sm80/short takes short sequences: one thread block takes a segment. select.cuh names the
 * steps. cuda/sm80/keep_all takes calls with at least as many slots as keys: every key is kept as
 * long as there are queries, in the slot of its own number, whatever its score.
 *
 * A block of cuda/sm80/short counts exactly the keys that outrank a key when it arrives. Keys of
 * earlier position partitions are counted by rank, from a table and by the lanes of its rank
 * partition. Keys of its own position partition are counted by the lanes of a warp. So no
 * thresholds are needed. */
extern "C" {
#include "core/adapter.h"
}

#include "cuda/plan/host.cuh"
#include "cuda/plan/plan.cuh"
#include "cuda/select/rules.cuh"
#include "cuda/select/select.cuh"

#include <assert.h>

/* keys: the most keys of a segment. A partition, of ranks or of positions, is the 32 keys that the
 * lanes of a warp have at once. */
template <int keys_, int threads_> struct short_config {
    static constexpr int threads = threads_, warps = threads / warp_lanes;
    static constexpr int blocks = 1024 / threads; // of a multiprocessor, at least, by registers
    static constexpr int keys = keys_, items = keys / threads; // items: of a thread
    static constexpr int partitions = keys / warp_lanes;
    static constexpr int partition_bits = keys == 512 ? 4 : keys == 1024 ? 5 : keys == 2048 ? 6 : 7;
    static constexpr int rank_bits = partition_bits + 5;
    static constexpr int lane_partitions = (partitions + warp_lanes - 1) / warp_lanes;
    static constexpr int buckets = 2 * keys, most_crowd = 24; // most_crowd: keys of a bucket
    static constexpr int lists = keys / list_queries;         // at most
    static constexpr int most_entries = 32768;                // 64 KB
    static constexpr int entries = lists * keys < most_entries ? lists * keys : most_entries;
    static constexpr int pairs = partitions / 2; // pairs of columns of earlier_count
    static constexpr int strips = threads / pairs < 8 ? threads / pairs : 8;
    static constexpr int strip_rows = partitions / strips;

    static_assert(1 << rank_bits == keys, "keys is 512, 1024, 2048 or 4096");
    static_assert(items > 0 && threads >= digits, "a thread has a key, and maybe a digit");
    static_assert(lane_partitions <= 4, "a word has a count for each partition of a lane");
};

template <class config> struct alignas(16) short_memory {
    union {
        struct {
            uint2 key[config::keys]; // by rank or by bucket: {order, position}
            union {
                uint32_t digit_count[config::warps][digits];
                uint32_t bucket[config::buckets]; // first their keys, then where they start
            };
        };
        // [c][d]: keys of rank partition c before position partition d; later those of all higher
        // rank partitions
        struct {
            uint16_t earlier_count[config::partitions][config::partitions];
            uint32_t row[config::warps][warp_lanes]; // counts of a row, before they are summed
        };
        // [t][s]: kept_index + 1 of the live key in slot s at the first position of list t; 0: none
        uint16_t live[config::entries];
    };
    union {
        uint32_t standing[config::keys]; // by position: the rank, and in the upper 16 bits the keys
                                         // of earlier partitions that outrank the key
        struct {                         // by kept_index
            uint16_t parent[config::keys]; // kept_index of the key that it evicts; later the slot,
                                           // with slot_bit
            uint16_t expiry[config::keys];
        };
    };
    union {
        uint16_t kept_index[config::keys]; // by rank, with kept_bit
        // by list: the slots of the keys that are evicted inside its query block
        uint16_t evicted_slot[config::lists][list_queries];
    };
    uint16_t number[config::keys];   // by position: kept keys before it, with kept_bit if it is
                                     // kept
    uint16_t position[config::keys]; // by kept_index
    uint16_t evicted[config::keys];  // by kept_index: the position of the key that it evicts
    uint32_t start[digits];
    uint32_t strip_sum[config::strips][config::pairs];
    // one for each sum over warps, which saves a barrier between two sums
    uint32_t least[config::warps], most[config::warps], absent_scratch[config::warps],
        bucket_scratch[config::warps];
    uint32_t digit_scratch[config::warps], position_scratch[config::warps],
        rank_scratch[config::warps], recent_scratch[config::warps];
    uint16_t evicted_count[config::lists]; // by list
};

/* Bits above any index of a key. */
static constexpr uint32_t kept_bit = 1U << 15, slot_bit = 1U << 15, index_mask = kept_bit - 1;

/* The index of key r of a thread, by position or by rank. */
template <class config> __device__ static uint32_t own_index(int r) {
    return threadIdx.x / warp_lanes * (config::items * warp_lanes) + r * warp_lanes +
           threadIdx.x % warp_lanes;
}

/* The partition of key r of this warp's threads. */
template <class config> __device__ static uint32_t own_partition(int r) {
    return threadIdx.x / warp_lanes * config::items + r;
}

/* The sum of `value`, one per warp, over the lower warps; *total: over all warps. Uses one
 * barrier. */
template <int warps>
__device__ static uint32_t add_lower_warps(uint32_t (&scratch)[warps], uint32_t value,
                                           uint32_t *total) {
    const uint32_t warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    if (lane == 0)
        scratch[warp] = value;
    __syncthreads();
    const uint32_t others = lane < warps ? scratch[lane] : 0;
    *total = __reduce_add_sync(all_lanes, others);
    return __reduce_add_sync(all_lanes, lane < warp ? others : 0);
}

/* One pass of the radix sort: the keys of all threads by the digit at `shift`, in place. */
template <class config>
__device__ static void sort_digit(short_memory<config> &shared, uint2 (&key)[config::items],
                                  int shift) {
    const uint32_t warp = threadIdx.x / warp_lanes, digit = threadIdx.x;
    uint32_t order[config::items], before[config::items], total;
#pragma unroll
    for (int r = 0; r < config::items; r++)
        order[r] = key[r].x;
    count_digits(shared.digit_count[warp], order, shift, before);
    __syncthreads();
    const uint32_t sum = digit < digits ? sum_digit(shared.digit_count, digit) : 0;
    const uint32_t lower_lanes = sum_lower_lanes(sum);
    const uint32_t of_warp = __shfl_sync(all_lanes, lower_lanes + sum, warp_lanes - 1);
    const uint32_t start = lower_lanes + add_lower_warps(shared.digit_scratch, of_warp, &total);
    if (digit < digits)
        shared.start[digit] = start;
    __syncthreads();
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t own = digit_of(order[r], shift);
        shared.key[shared.start[own] + shared.digit_count[warp][own] + before[r]] = key[r];
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < config::items; r++)
        key[r] = shared.key[own_index<config>(r)];
}

/* The range of the orders of all keys but the sinks, and the number of absent keys. */
struct order_range {
    uint32_t least, most, absents;
    uint32_t next_absent; // in this warp
};

template <class config>
__device__ static order_range find_range(short_memory<config> &shared,
                                         const uint2 (&key)[config::items]) {
    const uint32_t warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    order_range range = {UINT32_MAX, 0};
    uint32_t absents = 0;
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const bool is_absent = (key[r].y & absent) != 0, is_top = key[r].x == order_sink;
        range.least = min(range.least, is_absent ? UINT32_MAX : key[r].x);
        range.most = max(range.most, is_absent || is_top ? 0 : key[r].x);
        absents += __popc(__ballot_sync(all_lanes, is_absent));
    }
    shared.least[warp] = __reduce_min_sync(all_lanes, range.least);
    shared.most[warp] = __reduce_max_sync(all_lanes, range.most);
    range.next_absent = add_lower_warps(shared.absent_scratch, absents, &range.absents);
    const bool has_warp = lane < config::warps;
    range.least = __reduce_min_sync(all_lanes, has_warp ? shared.least[lane] : UINT32_MAX);
    range.most = __reduce_max_sync(all_lanes, has_warp ? shared.most[lane] : 0);
    range.most = max(range.most, range.least);
    return range;
}

/* Replaces the number of keys of each bucket by the number in those before it, and in `first`. */
template <class config>
__device__ static void sum_buckets(short_memory<config> &shared, uint32_t first) {
    constexpr int each = config::buckets / config::threads;
    uint32_t *const own = &shared.bucket[threadIdx.x * each];
    uint32_t count[each], sum = 0, total;
#pragma unroll
    for (int n = 0; n < each; n++)
        sum += count[n] = own[n];
    const uint32_t lower = sum_lower_lanes(sum);
    const uint32_t of_warp = __shfl_sync(all_lanes, lower + sum, warp_lanes - 1);
    uint32_t next = first + lower + add_lower_warps(shared.bucket_scratch, of_warp, &total);
#pragma unroll
    for (int n = 0; n < each; n++) {
        own[n] = next;
        next += count[n];
    }
    __syncthreads();
}

/* The number of keys[first] to keys[end - 1] that come before `key`. */
__device__ static uint32_t count_before(const uint2 *keys, uint32_t first, uint32_t end,
                                        const uint2 key) {
    const ranked_key own = ranked_key_of(key.x, key.y, key_bits);
    uint32_t count = 0;
    for (uint32_t n = first; n < end; n++)
        count += ranked_key_of(keys[n].x, keys[n].y, key_bits) < own;
    return count;
}

/* sort_keys() by one pass: buckets divide the range of the orders evenly, and a key is compared
 * with the keys of its bucket. False if a bucket has many keys. */
template <class config>
__device__ static bool sort_buckets(short_memory<config> &shared,
                                    const uint2 (&key)[config::items]) {
    uint32_t own[config::items], nth[config::items];
    uint32_t most = 0;
    for (int n = threadIdx.x; n < config::buckets; n += config::threads)
        shared.bucket[n] = 0;
    const order_range range = find_range(shared, key);
    const int shift = max(31 - config::rank_bits - __clz(range.most - range.least), 0);
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t order = min(key[r].x, range.most) - range.least;
        own[r] = min(order >> shift, config::buckets - 2);
        nth[r] = (key[r].y & absent) != 0 ? 0 : atomicAdd(&shared.bucket[own[r]], 1);
        most = max(most, nth[r]);
    }
    // __shfl_sync tells the compiler that all threads have the same value
    if (__shfl_sync(all_lanes, __syncthreads_or(most >= config::most_crowd), 0))
        return false;
    sum_buckets(shared, range.absents);
#pragma unroll
    for (int r = 0; r < config::items; r++)
        if ((key[r].y & absent) == 0)
            shared.key[shared.bucket[own[r]] + nth[r]] = key[r];
    __syncthreads();
    uint32_t next_absent = range.next_absent;
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const bool is_absent = (key[r].y & absent) != 0;
        uint32_t rank = number_flag(is_absent, &next_absent);
        if (!is_absent) {
            rank = shared.bucket[own[r]];
            rank += count_before(shared.key, rank, shared.bucket[own[r] + 1], key[r]);
        }
        shared.standing[rank] = key[r].y;
    }
    __syncthreads();
    return true;
}

/* Ascending and stable. Returns positions by rank. */
template <class config>
__device__ static void sort_keys(short_memory<config> &shared, const select_call &call,
                                 const select_segment &segment,
                                 uint32_t (&position)[config::items]) {
    uint2 key[config::items];
#pragma unroll
    for (int r = 0; r < config::items; r++)
        key[r] = load_key<false>(call, segment, own_index<config>(r));
    if (!sort_buckets(shared, key)) {
#pragma unroll 1
        for (int shift = 0; shift < key_bits; shift += digit_bits)
            sort_digit(shared, key, shift);
#pragma unroll
        for (int r = 0; r < config::items; r++)
            shared.standing[own_index<config>(r)] = key[r].y;
    }
#pragma unroll
    for (int r = 0; r < config::items; r++)
        position[r] = shared.standing[own_index<config>(r)];
}

template <int bits> __device__ static uint32_t lanes_above(uint32_t value) {
    uint32_t above = 0, same = all_lanes;
#pragma unroll
    for (int bit = bits - 1; bit >= 0; bit--) {
        const uint32_t agree = vote_ballot_same(value, 1U << bit);
        above |= (value >> bit & 1) != 0 ? 0 : same & ~agree;
        same &= agree;
    }
    return above;
}

/* The position partition of a key by rank. An absent key gets the last one, so it counts as earlier
 * than none. */
template <class config> __device__ static uint32_t partition_of(uint32_t position) {
    return (position & absent) != 0 ? config::partitions - 1 : position / warp_lanes;
}

/* The row of rank partition `own_partition(r)`, without the higher ones. A word has the counts of
 * all position partitions of a lane, which are warp_lanes apart, in 8 bits each: a rank partition
 * has only warp_lanes keys. */
template <class config>
__device__ static void count_row(short_memory<config> &shared, int r, uint32_t position) {
    const uint32_t lane = threadIdx.x % warp_lanes, d = partition_of<config>(position);
    uint32_t *const row = shared.row[threadIdx.x / warp_lanes];
    row[lane] = 0;
    __syncwarp();
    if ((position & absent) == 0)
        atomicAdd(&row[d % warp_lanes], 1U << d / warp_lanes * 8);
    __syncwarp();
    const uint32_t own = row[lane], lower = sum_lower_lanes(own);
    const uint32_t all = __shfl_sync(all_lanes, lower + own, warp_lanes - 1);
    uint32_t before = 0; // in the partitions of lower numbers of all lanes
#pragma unroll
    for (int n = 0; n < config::lane_partitions; n++) {
        if (lane < config::partitions)
            shared.earlier_count[own_partition<config>(r)][n * warp_lanes + lane] =
                (uint16_t)(before + (lower >> 8 * n & 0xff));
        before += all >> 8 * n & 0xff;
    }
}

/* Replaces each row of earlier_count by the sum of the rows above it. A thread takes two columns,
 * as a word, of one strip of rows. */
template <class config> __device__ static void sum_columns(short_memory<config> &shared) {
    const uint32_t strip = threadIdx.x / config::pairs, pair = threadIdx.x % config::pairs;
    const uint32_t end = (strip + 1) * config::strip_rows;
    const bool has_strip = strip < config::strips;
    const auto words = reinterpret_cast<uint32_t (*)[config::pairs]>(shared.earlier_count);
    uint32_t own[config::strip_rows], sum = 0;
#pragma unroll
    for (int n = 0; n < config::strip_rows; n++)
        own[n] = has_strip ? words[end - 1 - n][pair] : 0;
#pragma unroll
    for (int n = 0; n < config::strip_rows; n++)
        sum += own[n];
    if (has_strip)
        shared.strip_sum[strip][pair] = sum;
    __syncthreads();
    sum = 0;
    for (uint32_t other = strip + 1; other < config::strips; other++)
        sum += shared.strip_sum[other][pair];
#pragma unroll
    for (int n = 0; n < config::strip_rows; n++) {
        if (has_strip)
            words[end - 1 - n][pair] = sum;
        sum += own[n];
    }
}

/* Sends to the position of each key its rank and the number of keys of earlier position partitions
 * that outrank it: keys of higher rank partitions, and keys of its own. */
template <class config>
__device__ static void count_earlier(short_memory<config> &shared,
                                     const uint32_t (&position)[config::items]) {
    __syncthreads(); // every thread has read its sorted keys
#pragma unroll
    for (int r = 0; r < config::items; r++)
        count_row(shared, r, position[r]);
    __syncthreads();
    sum_columns(shared);
    __syncthreads();
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t d = partition_of<config>(position[r]);
        const uint32_t earlier = lanes_above<config::partition_bits>(~d);
        const uint32_t higher = shared.earlier_count[own_partition<config>(r)][d] +
                                __popc(earlier & ~lanemask_lt()); // without this lane's own
        const bool is_absent = (position[r] & absent) != 0;
        shared.standing[position[r] & ~absent] =
            own_index<config>(r) | (is_absent ? config::keys : higher) << 16;
    }
    __syncthreads();
}

/* Bit r stands for key r of a thread, by position. */
struct kept_flags {
    uint32_t present, kept; // the key is present; it is ever kept
    uint32_t total;         // kept keys of the segment
};

/* True if fewer keys than the window outrank a key when it arrives. Keys of the same partition are
 * counted here, unless they cannot change the result of any lane. */
template <class config> __device__ static bool is_kept(uint32_t standing, uint32_t window) {
    const uint32_t higher = standing >> 16, rank = standing & 0xffff;
    const uint32_t lane = threadIdx.x % warp_lanes;
    bool keeps = higher < window;
    if (__any_sync(all_lanes, keeps && higher + lane >= window))
        keeps = higher + __popc(lanes_above<config::rank_bits>(rank) & lanemask_lt()) < window;
    return keeps;
}

/* Numbers the kept keys: sends kept_index to each key's rank and position, and its position to its
 * kept_index. The first `window` keys have slots of their own. */
template <class config>
__device__ static kept_flags index_kept(short_memory<config> &shared, uint32_t window) {
    kept_flags own = {};
    uint32_t rank[config::items], count = 0;
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t standing = shared.standing[own_index<config>(r)];
        const bool keeps = is_kept<config>(standing, window);
        rank[r] = standing & 0xffff;
        own.present |= (uint32_t)(standing >> 16 != config::keys) << r;
        own.kept |= (uint32_t)keeps << r;
        count += __popc(__ballot_sync(all_lanes, keeps));
    }
    uint32_t next = add_lower_warps(shared.position_scratch, count, &own.total);
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t j = own_index<config>(r);
        const bool keeps = (own.kept >> r & 1) != 0;
        const uint32_t kept_index = number_flag(keeps, &next);
        const uint16_t flagged = (uint16_t)(kept_index | (keeps ? kept_bit : 0));
        shared.kept_index[rank[r]] = flagged;
        shared.number[j] = flagged;
        if (keeps)
            shared.position[kept_index] = (uint16_t)j;
        if (keeps && kept_index < window)
            shared.parent[kept_index] = (uint16_t)(kept_index | slot_bit);
    }
    __syncthreads();
    return own;
}

/* By rank: the i-th worst kept key is evicted by the key of kept_index window + i. That key takes
 * over its slot, so the evicted key becomes its parent. */
template <class config>
__device__ static void match_evictions(short_memory<config> &shared, const select_call &call,
                                       const uint32_t (&position)[config::items], uint32_t total) {
    uint32_t flagged[config::items], count = 0, all;
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        flagged[r] = shared.kept_index[own_index<config>(r)];
        count += __popc(__ballot_sync(all_lanes, (flagged[r] & kept_bit) != 0));
    }
    uint32_t next = call.window + add_lower_warps(shared.rank_scratch, count, &all);
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const bool keeps = (flagged[r] & kept_bit) != 0;
        const uint32_t evictor = number_flag(keeps, &next), own = flagged[r] & index_mask;
        const bool is_evicted = keeps && evictor < total;
        if (is_evicted) {
            shared.parent[evictor] = (uint16_t)own;
            shared.evicted[evictor] = (uint16_t)position[r];
        }
        if (keeps)
            shared.expiry[own] = is_evicted ? shared.position[evictor] : (uint16_t)call.kv_len;
    }
    __syncthreads();
}

/* Applies the rule `recent` (rules.cuh): each key leaves `recent` valid keys later, and all
 * valid keys are kept for that long. From here on they are numbered by kept_index. Returns their
 * number. */
template <class config>
__device__ static uint32_t move_expiries(short_memory<config> &shared, const select_call &call,
                                         const kept_flags &by_score) {
    uint32_t leaving[config::items], count = 0, total; // leaving: position at which a key leaves by
                                                       // score
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t j = own_index<config>(r), number = shared.number[j];
        leaving[r] = (number & kept_bit) != 0 ? shared.expiry[number & index_mask] : j;
        count += __popc(__ballot_sync(all_lanes, (by_score.present >> r & 1) != 0));
    }
    uint32_t next = add_lower_warps(shared.recent_scratch, count, &total);
    const uint32_t first = next;
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const bool present = (by_score.present >> r & 1) != 0;
        const uint32_t j = own_index<config>(r), n = number_flag(present, &next);
        shared.number[j] = (uint16_t)(n | (present ? kept_bit : 0));
        if (present)
            shared.position[n] = (uint16_t)j;
        if (present && n < call.window + call.recent)
            shared.parent[n] = (uint16_t)(n | slot_bit);
    }
    __syncthreads();
    next = first;
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const bool present = (by_score.present >> r & 1) != 0;
        const uint32_t n = number_flag(present, &next);
        if (!present)
            continue;
        const bool leaves_by_score = leaving[r] < call.kv_len;
        const uint32_t evictor =
            leaves_by_score ? (shared.number[leaving[r]] & index_mask) + call.recent : total;
        shared.expiry[n] = evictor < total ? shared.position[evictor] : (uint16_t)call.kv_len;
        if (evictor < total) {
            shared.parent[evictor] = (uint16_t)n;
            shared.evicted[evictor] = (uint16_t)own_index<config>(r);
        }
    }
    __syncthreads();
    return total;
}

/* Replaces parents by slots. Each thread follows the chains of its keys while other threads move
 * the parents that it reads farther along the same chains, so every step may double its length. */
template <class config>
__device__ static void follow_slots(short_memory<config> &shared, uint32_t total) {
    volatile uint16_t *const parent = shared.parent;
    uint32_t link[config::items];
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t n = r * config::threads + threadIdx.x;
        link[r] = n < total ? parent[n] : slot_bit;
    }
    for (bool goes_on = true; goes_on;) {
        goes_on = false;
#pragma unroll
        for (int r = 0; r < config::items; r++) {
            if ((link[r] & slot_bit) != 0)
                continue;
            link[r] = parent[link[r]];
            parent[r * config::threads + threadIdx.x] = (uint16_t)link[r];
            goes_on = true;
        }
    }
    __syncthreads();
}

/* The records and lists of forward's plan, written by the block that selects; plan/lists.cu builds
 * them from any selection. Here lists need no rolling: a slot passes from the evicted key to the
 * key that evicts it, so at a list's first position it holds the last key that took it before. */

struct list_target {
    key_record *records;
    int32_t *list; // of query block 0
    int2 *count;
    key_changes *changes;
    int64_t list_tile;
    uint32_t lists, origin; // origin: the position of query 0
    uint32_t kv_len;
    uint32_t slots;       // of a list: window + recent
    uint32_t part, parts; // the block is one of `parts` blocks: it writes every parts-th list
};

__device__ static list_target target_of(const forward_plan &plan, uint32_t slots, uint32_t segment,
                                        uint32_t parts) {
    const int64_t head = segment;
    return {plan.records + head * plan.kv_len,
            plan.list + head * plan.list_head,
            plan.count + head * plan.lists,
            plan.changes + head * plan.lists * list_queries,
            plan.list_tile,
            (uint32_t)plan.lists,
            (uint32_t)(plan.kv_len - plan.q_len),
            (uint32_t)plan.kv_len,
            slots,
            blockIdx.x % parts,
            parts};
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
        const bool is_own = j / list_queries % to.parts == to.part;
        if (j >= to.kv_len)
            continue;
        if ((number & kept_bit) == 0) {
            if (is_own)
                write_key(segment, j, j, -1);
            if (is_own)
                to.records[j] = {INT32_MIN, bias[r]};
            continue;
        }
        const uint32_t expiry = shared.expiry[kept_index];
        const uint32_t slot = shared.parent[kept_index] & index_mask;
        enter_live(shared, to, j, kept_index, expiry, slot);
        if (!is_own)
            continue;
        write_key(segment, j, expiry, (int32_t)slot);
        to.records[j] = {expiry == to.kv_len ? INT32_MAX : (int32_t)expiry, bias[r]};
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
 * write_entry() in plan/lists.cu. */
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
            if (t >= first && t % to.parts == to.part && live != 0)
                write_entry(shared, to, t, s, live - 1);
        }
    }
}

template <class config>
__device__ static void write_lists(short_memory<config> &shared, const list_target &to) {
    for (uint32_t n = threadIdx.x / warp_lanes; n * to.parts + to.part < to.lists;
         n += config::warps)
        write_changes(shared, to, n * to.parts + to.part);
    __syncthreads();
    write_live(shared, to);
}

/* The biases of the keys by position, as exponents of 2. Loaded long before they are written, to
 * hide the latency. */
template <class config>
__device__ static void load_bias(const number_view<const float> &view, uint32_t segment,
                                 const select_call &call, float (&bias)[config::items]) {
    const float *const from =
        view.data == NULL ? NULL : view.at(segment / call.kv_heads, segment % call.kv_heads);
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t j = own_index<config>(r);
        bias[r] = from != NULL && j < call.kv_len ? log2_e * from[j] : 0;
    }
}

template <class config>
static __global__ void __launch_bounds__(config::threads, config::blocks)
    select_short(const select_call call, const forward_plan plan,
                 const number_view<const float> bias_view, const uint32_t parts) {
    short_memory<config> &shared = shared_memory<short_memory<config>>();
    const uint32_t own_segment = blockIdx.x / parts;
    const list_target to = target_of(plan, call.window + call.recent, own_segment, parts);
    uint32_t position[config::items];
    float bias[config::items];
    griddepcontrol_wait(); // for the scores and the sinks
    griddepcontrol_launch_dependents();
    const select_segment segment = segment_of(call, own_segment);
    sort_keys(shared, call, segment, position);
    count_earlier(shared, position);
    const kept_flags kept = index_kept(shared, call.window);
    load_bias<config>(bias_view, own_segment, call, bias);
    clear_live(shared, to);
    match_evictions(shared, call, position, kept.total);
    const uint32_t total = call.recent > 0 ? move_expiries(shared, call, kept) : kept.total;
    follow_slots(shared, total);
    write_keys(shared, segment, to, bias);
    write_lists(shared, to);
}

/* Blocks of a segment that all do the same, until each writes some of the lists. */
static int64_t count_parts(const fdma_problem *problem, const forward_plan &plan) {
    const int64_t segments = problem->batch * problem->kv_heads;
    const int64_t fitting = fdma_cuda_device(problem->exec.device)->multiprocessors / segments;
    return max(min(fitting, (int64_t)plan.lists), (int64_t)1);
}

/* A block for each multiprocessor starts early, with so much shared memory that no two blocks get
 * the same multiprocessor beside the blocks of score that still run. More blocks start after
 * score. */
template <class config>
static fdma_status run_with(const fdma_problem *problem, const select_call &call,
                            const forward_plan &plan) {
    const cuda_device *const device = fdma_cuda_device(problem->exec.device);
    const int64_t parts = count_parts(problem, plan);
    const int64_t blocks = problem->batch * problem->kv_heads * parts;
    const bool is_alone = blocks <= device->multiprocessors;
    const size_t half = (size_t)device->shared_bytes / 2 + 1024, own = sizeof(short_memory<config>);
    const launch_shape shape = {dim3((unsigned)blocks), dim3(config::threads),
                                is_alone ? max(own, half) : own,
                                is_alone ? start_early : start_after};
    return launch("select", select_short<config>, shape, problem, call, plan,
                  numbers_of<const float>(&problem->fused.forward->bias), (uint32_t)parts);
}

typedef fdma_status short_run(const fdma_problem *problem, const select_call &call,
                              const forward_plan &plan);

/* Configurations of a block that holds a segment. */
struct short_choice {
    int64_t keys, entries;
    size_t shared_bytes;
    short_run *few, *many; // for at most as many segments as multiprocessors, and for more
};

/* few: the fastest for one block of a multiprocessor. many: small enough for several blocks. */
template <class few, class many>
static constexpr short_choice choice_of = {few::keys, few::entries, sizeof(short_memory<few>),
                                           run_with<few>, run_with<many>};

static const short_choice choices[] = {
    choice_of<short_config<512, 512>, short_config<512, 256>>,
    choice_of<short_config<1024, 512>, short_config<1024, 512>>,
    choice_of<short_config<2048, 1024>, short_config<2048, 512>>,
    choice_of<short_config<4096, 1024>, short_config<4096, 1024>>,
};

/* The smallest block that holds the segment; kv_len is at most most_short_keys. */
static const short_choice *choose(const fdma_problem *problem) {
    const short_choice *choice = choices;
    while (choice->keys < problem->kv_len)
        choice++;
    return choice;
}

static const char *refuses_call(const fdma_problem *problem) {
    const fdma_problem *const forward = problem->fused.forward;
    if (forward == NULL)
        return "a selection by itself";
    if (problem->scope != FDMA_SCOPE_CAUSAL || is_present(&problem->starts) || problem->gap > 0)
        return "global scope, packed sequences or a gap";
    if (is_present(&problem->kv_used) || has_table(problem) || problem->carried_len > 0)
        return "kv_used, tables or carried keys";
    if (problem->kv_len > most_short_keys || forward->q_len > problem->kv_len)
        return "more than 4096 keys, or fewer keys than queries";
    return problem->slots >= problem->kv_len ? "no more keys than slots" : NULL;
}

static const char *short_refuses(const fdma_problem *problem) {
    const char *refused = refuses_scores(problem, fdma_refuses_before_sm80(problem));
    if (refused == NULL)
        refused = refuses_call(problem);
    if (refused != NULL)
        return refused;
    const short_choice *const choice = choose(problem);
    const int64_t lists = divide_up(problem->fused.forward->q_len, list_queries);
    if (lists * problem->slots > choice->entries)
        return "a window of so many keys for its queries";
    const cuda_device *const device = fdma_cuda_device(problem->exec.device);
    return choice->shared_bytes > (size_t)device->shared_bytes
               ? "a device with less shared memory per block than this kernel needs"
               : NULL;
}

/* The plan comes first, where forward expects it. */
struct short_space {
    forward_plan plan;
    rules_space rules;
};

static short_space lay_out_short(const fdma_problem *problem, fdma_arena *arena) {
    short_space space = {};
    space.plan = fdma_cuda_plan_forward(problem->fused.forward, arena);
    space.rules = fdma_cuda_lay_out_rules(problem, arena);
    return space;
}

static fdma_status run_short(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const short_space space = lay_out_short(problem, &arena);
    assert(space.plan.block_queries == list_queries);
    select_call call = describe_select(problem, {}, NULL);
    call.slot = numbers_of<int32_t>(&problem->slot); // also with recent keys
    if (problem->batch == 0 || problem->kv_len == 0)
        return FDMA_OK;
    FDMA_TRY(fdma_cuda_find_sinks(problem, space.rules, &call));
    const bool is_many = problem->batch * problem->kv_heads >
                         fdma_cuda_device(problem->exec.device)->multiprocessors;
    const short_choice *const choice = choose(problem);
    return (is_many ? choice->many : choice->few)(problem, call, space.plan);
}

/* ---- cuda/sm80/keep_all ---- */

static constexpr int keep_threads = 256;

/* A thread takes one key of a (b, g). */
static __global__ void __launch_bounds__(keep_threads)
    keep_all(const number_view<int32_t> expiry, const number_view<int32_t> slot,
             const number_view<const float> bias, const forward_plan plan, const int32_t kv_heads,
             const int32_t kv_len, const int64_t heads) {
    const int64_t head = head_of_block(), b = head / kv_heads, g = head % kv_heads;
    const int32_t j = (int32_t)blockIdx.x * keep_threads + (int32_t)threadIdx.x;
    griddepcontrol_wait(); // for the scores
    griddepcontrol_launch_dependents();
    if (j >= kv_len || head >= heads)
        return;
    expiry.at(b, g)[j] = kv_len;
    if (slot.data != NULL)
        slot.at(b, g)[j] = j;
    if (plan.records != NULL)
        plan.records[head * kv_len + j] = {INT32_MAX,
                                           bias.data == NULL ? 0 : log2_e * bias.at(b, g)[j]};
    if (plan.list != NULL)
        plan.list[head * plan.list_head + j] = j;
}

static const char *keep_all_refuses(const fdma_problem *problem) {
    const char *const refused = refuses_scores(problem, fdma_refuses_before_sm80(problem));
    if (refused != NULL)
        return refused;
    if (problem->slots < problem->kv_len)
        return "fewer slots than keys";
    if (is_present(&problem->key_valid) || problem->gap > 0)
        return "key_valid or a gap, by which keys are left out";
    if (is_present(&problem->starts) || is_present(&problem->kv_used))
        return "packed sequences or kv_used";
    return has_table(problem) || problem->carried_len > 0 ? "tables or carried keys" : NULL;
}

/* The plan of the forward call that follows, which uses the same layout. */
static forward_plan lay_out_keep_all(const fdma_problem *problem, fdma_arena *arena) {
    return problem->fused.forward == NULL ? forward_plan{}
                                          : fdma_cuda_plan_forward(problem->fused.forward, arena);
}

static fdma_status run_keep_all(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const forward_plan plan = lay_out_keep_all(problem, &arena);
    const int64_t heads = problem->batch * problem->kv_heads;
    const fdma_problem *const forward = problem->fused.forward;
    if (heads == 0 || problem->kv_len == 0)
        return FDMA_OK;
    return launch(
        "select", keep_all,
        {grid_of(divide_up(problem->kv_len, keep_threads), heads), dim3(keep_threads), 0,
         start_early},
        problem, numbers_of<int32_t>(&problem->expiry), numbers_of<int32_t>(&problem->slot),
        forward == NULL ? number_view<const float>{} : numbers_of<const float>(&forward->bias),
        plan, (int32_t)problem->kv_heads, (int32_t)problem->kv_len, heads);
}

FDMA_CUDA_TABLE(fdma_cuda_sm80_fused_select,
                {"cuda/sm80/short", operation_select, fdma_missing_sm80, short_refuses,
                 workspace_of<lay_out_short>, run_short, true, trait_writes_plan},
                {"cuda/sm80/keep_all", operation_select, fdma_missing_sm80, keep_all_refuses,
                 workspace_of<lay_out_keep_all>, run_keep_all, true, trait_writes_plan});
