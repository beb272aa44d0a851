/* Selection in one pass over the keys: the set of kept keys, and the worst of them.
 *
 * A key that enters a full set takes the slot of the worst. The set is stored in two structures, a
 * queue and a tournament tree. A key that outranks all keys of the queue is appended to it, which
 * costs next to nothing. Any other key goes into the tree, at the leaf of its slot, which costs one
 * path of log2(window) comparisons; the root of the tree is its worst key. Keys whose scores rise
 * or tie go to the queue. Nearly all keys in random order go to the tree, and so do sinks, which
 * would let no other key into the queue. Keys that may enter are found a block at a time, without
 * branches. */
#pragma once

#include "core/integers.h"
#include "core/kernel.h"
#include "cpu/common/memory.h"
#include "cpu/common/order.h"

/* Consecutive keys of one (b, g). */
typedef struct key_range {
    const float *score;   /* [count] */
    const uint8_t *valid; /* [count]; NULL: all keys are valid */
    int32_t first;        /* the first key */
    int32_t count;
    int32_t sinks_end; /* valid keys among the first `sinks_end` are sinks */
} key_range;

/* The order of key n of a range, with the number `key` in place of the key's index. */
static inline int64_t order_in_range(const key_range *keys, int32_t n, int32_t key) {
    return n < keys->sinks_end ? sink_order(key) : key_order(keys->score[n], key);
}

enum { select_block = 64, marked_at_once = 32 };

/* mark_keys() of at most 32 keys: compilers vectorize the loops for marks of 32 bits, not of 64. */
static inline uint64_t mark_some(const key_range *keys, int64_t at, int64_t count, int32_t least) {
    uint32_t marks = 0, valid = 0;
    for (int64_t n = 0; n < count; n++)
        marks |= (uint32_t)(score_order(keys->score[at + n]) >= least) << n;
    if (keys->valid == NULL)
        return marks;
    for (int64_t n = 0; n < count; n++)
        valid |= (uint32_t)(keys->valid[at + n] != 0) << n;
    return marks & valid;
}

/* Bit n is set if key `at` + n exists, is valid, and has a score of order `least` or above, for the
 * select_block keys from `at` on. */
static inline uint64_t mark_keys(const key_range *keys, int64_t at, int32_t least) {
    const int64_t left = keys->count - at, half = marked_at_once;
    if (left >= select_block)
        return mark_some(keys, at, half, least) | mark_some(keys, at + half, half, least) << half;
    const uint64_t low = mark_some(keys, at, min(left, half), least);
    return left > half ? low | mark_some(keys, at + half, left - half, least) << half : low;
}

/* The children of node n of the tree are 2n and 2n + 1; the leaf of slot s is slots + s. */
typedef struct kept_set {
    int64_t slots;       /* keys that it holds when it is full */
    int64_t filled;      /* slots that have been taken */
    int64_t *tree;       /* [tree_size(slots)] orders; INT64_MAX for keys in the queue */
    int64_t *queue;      /* [ring + 1] orders, ascending from `head`; INT64_MAX at `tail` */
    uint32_t ring;       /* one less than a power of two */
    uint32_t head, tail; /* counters: an index into `queue` is one of them modulo ring + 1 */
    int64_t newest;      /* the last order that was appended to the queue */
    int64_t worst;       /* the least order of all */
} kept_set;

/* At least 4, because enter_key() reads the children of the root even where there are none. */
static int64_t tree_size(int64_t slots) { return slots < 2 ? 4 : 2 * slots; }

static uint32_t queue_ring(int64_t slots) {
    uint32_t ring = 1;
    while (ring < slots)
        ring = 2 * ring + 1;
    return ring;
}

static inline bool join_queue(kept_set *set, int64_t order) {
    const bool joins = order > set->newest;
    set->queue[set->tail & set->ring] = order;
    set->tail += joins;
    set->queue[set->tail & set->ring] = INT64_MAX;
    set->newest = joins ? order : set->newest;
    return joins;
}

static inline void find_worst(kept_set *set) {
    set->worst = min(set->tree[1], set->queue[set->head & set->ring]);
}

/* Puts `order` at leaf `n` and recomputes the minima on the path to the root, two levels at a time,
 * so that the loads of the second level do not wait for the first. */
static inline void replay(int64_t *tree, int64_t n, int64_t order) {
    tree[n] = order;
    for (; n > 3; n /= 4) {
        const int64_t other = tree[n ^ 1], others = min(other, tree[n / 2 ^ 1]);
        tree[n / 2] = min(order, other);
        order = min(order, others);
        tree[n / 4] = order;
    }
    if (n > 1)
        tree[1] = min(order, tree[n ^ 1]);
}

/* Puts `order` into `slot`, the slot of the worst. */
static inline void replace_worst(kept_set *set, int32_t slot, int64_t order) {
    const bool was_queued = set->worst == set->queue[set->head & set->ring];
    set->head += was_queued;
    const bool joins = join_queue(set, order);
    if (!was_queued || !joins)
        replay(set->tree, set->slots + slot, joins ? INT64_MAX : order);
    find_worst(set);
}

/* A pass over a range of keys. It numbers the keys that it handles. Numbers 0 to before - 1 are the
 * keys that were kept when the range began, the worst first, number n in slot n. The keys of the
 * range follow from number `before` on. Orders in the set hold these numbers in place of key
 * indices. */
typedef struct select_pass {
    key_range keys;
    int32_t kv_len; /* the expiry of keys that are not evicted */
    int32_t before;
    const int64_t *kept;    /* [before] orders */
    int32_t *kept_expiry;   /* [before] */
    int32_t *expiry, *slot; /* [keys.count] */
} select_pass;

static void start_set(const select_pass *pass, kept_set *set) {
    set->head = set->tail = 0;
    set->newest = INT64_MIN;
    set->queue[0] = INT64_MAX;
    // with one slot, only this writes the root's children, which enter_key() reads
    for (int64_t n = 0; n < tree_size(0); n++)
        set->tree[n] = INT64_MAX;
    for (int32_t n = 0; n < pass->before; n++) {
        const int64_t order = score_order_of(pass->kept[n]) * ((int64_t)1 << 32) + n;
        const bool is_sink = order >= sink_order(0);
        pass->kept_expiry[n] = pass->kv_len;
        set->tree[set->slots + n] = !is_sink && join_queue(set, order) ? INT64_MAX : order;
    }
}

/* Takes all valid keys while there are free slots. Sinks are among them, because there are no more
 * sinks than slots. Returns the number of keys of the range that were seen. */
static int32_t fill_set(const select_pass *pass, kept_set *set) {
    const key_range *const keys = &pass->keys;
    const bool crowded = keys->count > set->slots - pass->before; // else no key is evicted
    int32_t count = pass->before, n = 0;
    for (; n < keys->count && count < set->slots; n++) {
        const bool taken = !keys->valid || keys->valid[n];
        const int32_t key = pass->before + n;
        const int64_t order = order_in_range(keys, n, key);
        pass->expiry[n] = taken ? pass->kv_len : keys->first + n;
        pass->slot[n] = taken ? count : -1;
        if (taken && crowded)
            set->tree[set->slots + count] =
                n >= keys->sinks_end && join_queue(set, order) ? INT64_MAX : order;
        count += taken;
    }
    set->filled = count;
    if (n == keys->count)
        return n; // no key is left that could evict the worst
    for (int64_t node = set->slots - 1; node > 0; node--)
        set->tree[node] = min(set->tree[2 * node], set->tree[2 * node + 1]);
    find_worst(set);
    return n;
}

static inline int32_t slot_of(const select_pass *pass, int32_t number, bool any_before) {
    return any_before && number < pass->before ? number : pass->slot[number - pass->before];
}

/* Key n of the range, whose order is `order`, evicts the worst. The next key to be evicted is
 * likely one of the root's children, so their slots are prefetched. For a child that is no key of
 * the range the address lies before the array, which is harmless in a prefetch. */
static inline void enter_key(const select_pass *pass, kept_set *set, int32_t n, int64_t order,
                             bool any_before) {
    const int32_t evicted = key_of(set->worst), slot = slot_of(pass, evicted, any_before);
    pass->expiry[n] = pass->kv_len;
    if (any_before && evicted < pass->before)
        pass->kept_expiry[evicted] = pass->keys.first + n;
    else
        pass->expiry[evicted - pass->before] = pass->keys.first + n;
    pass->slot[n] = slot;
    replace_worst(set, slot, order);
    __builtin_prefetch(pass->slot + key_of(set->tree[2]) - pass->before);
    __builtin_prefetch(pass->slot + key_of(set->tree[3]) - pass->before);
}

static inline void enter_all(const select_pass *pass, kept_set *shared, int32_t at, uint64_t marks,
                             bool any_before) {
    kept_set set = *shared;
    for (; marks != 0; marks &= marks - 1) {
        const int32_t n = at + __builtin_ctzll(marks);
        const int64_t order = key_order(pass->keys.score[n], pass->before + n);
        if (order > set.worst)
            enter_key(pass, &set, n, order, any_before);
    }
    *shared = set;
}

/* Enters the marked keys from `at` on that outrank the worst. Not inlined, because the marking loop
 * would take registers from it. */
NOINLINE void enter_marked(const select_pass *pass, kept_set *set, int32_t at, uint64_t marks) {
    if (pass->before > 0)
        enter_all(pass, set, at, marks, true);
    else
        enter_all(pass, set, at, marks, false);
}

/* Finds expiry and slot of the keys of a range, as far as the range decides them. */
static void select_keys(const select_pass *pass, kept_set *set) {
    const key_range *const keys = &pass->keys;
    start_set(pass, set);
    for (int64_t at = fill_set(pass, set); at < keys->count; at += select_block) {
        const int64_t count = min(keys->count - at, select_block);
        int32_t *const expiry = pass->expiry + at;
        int32_t *const slot = pass->slot + at;
        for (int32_t n = 0; n < count; n++)
            expiry[n] = keys->first + (int32_t)at + n;
        for (int32_t n = 0; n < count; n++)
            slot[n] = -1;
        const uint64_t marks = mark_keys(keys, at, score_order_of(set->worst));
        if (marks != 0)
            enter_marked(pass, set, (int32_t)at, marks);
    }
}

/* Writes the orders of the kept keys, unsorted, after a pass over more keys than slots. Returns
 * their number. */
static int32_t list_kept(const kept_set *set, int64_t *orders) {
    int32_t count = 0;
    for (int64_t slot = 0; slot < set->filled; slot++) {
        orders[count] = set->tree[set->slots + slot];
        count += orders[count] != INT64_MAX; // else the key of this slot is in the queue
    }
    for (uint32_t n = set->head; n != set->tail; n++)
        orders[count++] = set->queue[n & set->ring];
    return count;
}

/* ---- the best keys ---- */

/* The best keys of a range, found without a pass for expiries, and the best of several ranges. */

typedef struct order_buffer {
    int64_t *orders, *spare; /* [capacity] each */
    int64_t capacity;
    int32_t count;
} order_buffer;

enum {
    sample_keys = 512,     /* keys of a range, from which the worst of its best keys is guessed */
    least_capacity = 1024, /* orders, so that small windows do not sort too often */
};

/* Orders of a range of `keys` keys that are collected before all but the best are dropped. There is
 * also room for the best of two ranges that are merged. */
static int64_t buffer_capacity(int64_t slots, int64_t keys) {
    const int64_t some = min(max(4 * slots, least_capacity), keys);
    return max(some, slots) + select_block;
}

static void sort_by_byte(const int64_t *orders, int64_t *to, int32_t count, int32_t shift) {
    const uint64_t sign = (uint64_t)1 << 63;
    int32_t start[256] = {0}; // start of each byte in `to`; before that, its count
    for (int32_t n = 0; n < count; n++)
        start[((uint64_t)orders[n] ^ sign) >> shift & 255]++;
    for (int32_t value = 0, before = 0; value < 256; value++) {
        const int32_t here = start[value];
        start[value] = before;
        before += here;
    }
    for (int32_t n = 0; n < count; n++)
        to[start[((uint64_t)orders[n] ^ sign) >> shift & 255]++] = orders[n];
}

/* Radix sort, byte by byte from bit `least_bit` on. It is stable, so that bit 32, where the score's
 * order begins, suffices for keys in ascending order. */
static void sort_orders(order_buffer *buffer, int32_t least_bit) {
    int64_t varying = 0;
    bool sorted = true;
    for (int32_t n = 1; n < buffer->count; n++) {
        varying |= buffer->orders[n] ^ buffer->orders[0];
        sorted &= buffer->orders[n] > buffer->orders[n - 1];
    }
    for (int32_t shift = least_bit; shift < 64 && !sorted; shift += 8) {
        int64_t *const from = buffer->orders;
        if (((uint64_t)varying >> shift & 255) == 0)
            continue;
        sort_by_byte(from, buffer->spare, buffer->count, shift);
        buffer->orders = buffer->spare;
        buffer->spare = from;
    }
}

static void keep_best(order_buffer *buffer, int32_t slots) {
    sort_orders(buffer, 32);
    const int32_t dropped = buffer->count - slots;
    if (dropped <= 0)
        return;
    memmove(buffer->orders, buffer->orders + dropped, (size_t)slots * sizeof *buffer->orders);
    buffer->count = slots;
}

/* Guesses an order that about 1.5 * `slots` keys of the range reach, from a sample; some more keys
 * allow for its error. */
static int64_t guess_least(const key_range *keys, int32_t slots, order_buffer *buffer) {
    const int32_t all = keys->count / sample_keys;
    // odd, because scores may repeat with a period that is a power of two
    const int32_t step = (all - 1) | 1;
    if (all < 2)
        return INT64_MIN;
    buffer->count = 0;
    for (int32_t n = 0; n < sample_keys * step; n += step) {
        buffer->orders[buffer->count] = key_order(keys->score[n], keys->first + n);
        buffer->count += !keys->valid || keys->valid[n];
    }
    sort_orders(buffer, 32);
    const int64_t above = (int64_t)sample_keys * slots * 3 / 2 / keys->count + 16;
    return above < buffer->count ? buffer->orders[buffer->count - above] : INT64_MIN;
}

static void collect_sinks(const key_range *keys, order_buffer *buffer) {
    buffer->count = 0;
    for (int32_t n = 0; n < keys->sinks_end; n++) {
        buffer->orders[buffer->count] = sink_order(keys->first + n);
        buffer->count += !keys->valid || keys->valid[n];
    }
}

/* Collects the best `slots` of the keys that reach `least`, in ascending order. */
static void collect_best(const key_range *keys, int32_t slots, int64_t least,
                         order_buffer *buffer) {
    collect_sinks(keys, buffer);
    for (int64_t at = keys->sinks_end; at < keys->count; at += select_block) {
        uint64_t marks = mark_keys(keys, at, score_order_of(least));
        for (; marks; marks &= marks - 1) {
            const int32_t n = (int32_t)at + __builtin_ctzll(marks);
            const int64_t order = key_order(keys->score[n], keys->first + n);
            buffer->orders[buffer->count] = order;
            buffer->count += order >= least;
        }
        if (buffer->count > buffer->capacity - select_block) {
            keep_best(buffer, slots);
            least = slots > 0 ? buffer->orders[0] : INT64_MAX;
        }
    }
    keep_best(buffer, slots);
}

/* Writes the orders of the best `slots` valid keys, ascending. Returns their number. */
static int32_t find_best(const key_range *keys, int32_t slots, order_buffer buffer, int64_t *best) {
    const int64_t least = guess_least(keys, slots, &buffer);
    collect_best(keys, slots, least, &buffer);
    if (buffer.count < slots && least > INT64_MIN)
        collect_best(keys, slots, INT64_MIN, &buffer);
    memcpy(best, buffer.orders, (size_t)buffer.count * sizeof *best);
    return buffer.count;
}

/* Writes the best `slots` of `left` and `right` to `to`. Returns their number. */
static int32_t merge_best(const int64_t *left, int32_t left_count, const int64_t *right,
                          int32_t right_count, int32_t slots, int64_t *to) {
    const int64_t all = (int64_t)left_count + right_count;
    const int32_t count = (int32_t)min(all, slots);
    int32_t n = count, l = left_count, r = right_count;
    while (n > 0 && l > 0 && r > 0) {
        const int64_t a = left[l - 1], b = right[r - 1];
        const bool take_left = a > b;
        to[--n] = take_left ? a : b;
        l -= take_left;
        r -= !take_left;
    }
    while (n > 0)
        to[--n] = l > 0 ? left[--l] : right[--r];
    return count;
}
