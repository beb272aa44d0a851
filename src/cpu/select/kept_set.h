/* The keys that are kept while one pass over the keys goes by, and the worst of them.
 *
 * A key that enters takes the slot of the worst. It waits in one of two places: in a queue, best
 * last, if it outranks all that wait there, which is free; else in a tournament tree, leaf = slot,
 * whose root is the worst of the tree, at the price of one path of log2(window) comparisons. Scores
 * that rise or tie live in the queue; of random ones hardly any does.
 * Which keys are worth a look is found for a block at a time, without branches. */
#ifndef FDMA_CPU_SELECT_KEPT_SET_H
#define FDMA_CPU_SELECT_KEPT_SET_H

#include "core/kernel.h"

#include <string.h>

/* The score's place in the order of the reals: NaN lowest, both zeros alike. In integers, because
 * subnormal numbers count for what they are, however the caller's thread rounds. */
static inline int32_t order_of(float score) {
    int32_t bits;
    memcpy(&bits, &score, sizeof bits);
    const int32_t size = bits & INT32_MAX, infinity = 0x7f800000;
    const int32_t order = bits < 0 ? -size : size;
    return size > infinity ? INT32_MIN : order;
}

/* The total order of keys as a number, greater being better: order above, its number below. */
static inline int64_t rank_of(float score, int32_t key) {
    return (int64_t)order_of(score) * ((int64_t)1 << 32) + key;
}

static inline int32_t rank_key(int64_t rank) { return (int32_t)rank; }

static inline int32_t rank_order(int64_t rank) { return (int32_t)(rank >> 32); }

static inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

/* Some keys of a (b, g), one after the other. */
typedef struct key_range {
    const float *score;   /* [count] */
    const uint8_t *valid; /* [count], NULL: all are */
    int32_t first;        /* position of the first */
    int32_t count;
} key_range;

enum { select_block = 64, marked_at_once = 32 };

/* Bit n: whether key `at` + n reaches `order`. No more at once than fill a word of 32 bits: that
 * compilers make vector code of. */
static inline uint32_t mark_orders(const key_range *keys, int64_t at, int64_t count,
                                   int32_t order) {
    uint32_t marks = 0;
    for (int64_t n = 0; n < count; n++)
        marks |= (uint32_t)(order_of(keys->score[at + n]) >= order) << n;
    return marks;
}

static inline uint32_t mark_valid(const key_range *keys, int64_t at, int64_t count) {
    uint32_t marks = 0;
    for (int64_t n = 0; n < count; n++)
        marks |= (uint32_t)(keys->valid[at + n] != 0) << n;
    return marks;
}

static inline uint64_t mark_some(const key_range *keys, int64_t at, int64_t count, int32_t order) {
    const uint32_t marks = mark_orders(keys, at, count, order);
    return keys->valid ? marks & mark_valid(keys, at, count) : marks;
}

/* Bit n: whether key `at` + n of a block is there, valid, and of at least this order. */
static inline uint64_t mark_keys(const key_range *keys, int64_t at, int32_t order) {
    const int64_t left = keys->count - at, half = marked_at_once;
    if (left >= select_block)
        return mark_some(keys, at, half, order) | mark_some(keys, at + half, half, order) << half;
    const uint64_t low = mark_some(keys, at, lesser(left, half), order);
    return left > half ? low | mark_some(keys, at + half, left - half, order) << half : low;
}

/* The children of a node n of the tree are 2n and 2n + 1, a slot's leaf is places + slot. */
typedef struct kept_set {
    int64_t places;      /* how many keys it holds */
    int64_t *tree;       /* [tree_size(places)], INT64_MAX for keys in the queue */
    int64_t *queue;      /* [ring + 1], INT64_MAX at `tail` */
    uint32_t ring;       /* one less than a power of two */
    uint32_t head, tail; /* modulo ring + 1 */
    int64_t newest;      /* the last that joined the queue */
    int64_t worst;       /* of all */
} kept_set;

/* The root's children are looked at even where there are none. */
static int64_t tree_size(int64_t places) { return places < 2 ? 4 : 2 * places; }

static uint32_t queue_ring(int64_t places) {
    uint32_t ring = 1;
    while (ring < places)
        ring = 2 * ring + 1;
    return ring;
}

static inline bool join_queue(kept_set *set, int64_t rank) {
    const bool joins = rank > set->newest;
    set->queue[set->tail & set->ring] = rank;
    set->tail += joins;
    set->queue[set->tail & set->ring] = INT64_MAX;
    set->newest = joins ? rank : set->newest;
    return joins;
}

static inline void find_worst(kept_set *set) {
    set->worst = lesser(set->tree[1], set->queue[set->head & set->ring]);
}

/* Puts `rank` at leaf `n` and replays its matches, two at a time: the second's other side does not
 * wait for the first. */
static inline void replay(int64_t *tree, int64_t n, int64_t rank) {
    tree[n] = rank;
    for (; n > 3; n /= 4) {
        const int64_t other = tree[n ^ 1], others = lesser(other, tree[n / 2 ^ 1]);
        tree[n / 2] = lesser(rank, other);
        rank = lesser(rank, others);
        tree[n / 4] = rank;
    }
    if (n > 1)
        tree[1] = lesser(rank, tree[n ^ 1]);
}

/* Puts `rank` into `slot`, where the worst was. */
static inline void replace_worst(kept_set *set, int32_t slot, int64_t rank) {
    const bool leaves = set->worst == set->queue[set->head & set->ring];
    set->head += leaves;
    const bool joins = join_queue(set, rank);
    if (!leaves || !joins)
        replay(set->tree, set->places + slot, joins ? INT64_MAX : rank);
    find_worst(set);
}

/* A pass over a range of keys. It numbers them from `before` on: the numbers below are those of the
 * keys that were kept when the range began, worst first, number = slot. */
typedef struct select_pass {
    key_range keys;
    int32_t kv_len; /* the expiry of what stays */
    int32_t before;
    const int64_t *kept; /* [before] ranks */
    int32_t *expiry;     /* [before + keys.count] */
    int32_t *slot;       /* the same */
} select_pass;

static void start_set(const select_pass *pass, kept_set *set) {
    set->head = set->tail = 0;
    set->newest = INT64_MIN;
    set->queue[0] = INT64_MAX;
    for (int64_t n = 0; n < tree_size(0); n++)
        set->tree[n] = INT64_MAX;
    for (int32_t n = 0; n < pass->before; n++) {
        pass->expiry[n] = pass->kv_len;
        pass->slot[n] = n;
        set->tree[set->places + n] = INT64_MAX;
        set->queue[n] = rank_order(pass->kept[n]) * ((int64_t)1 << 32) + n;
    }
    if (pass->before == 0)
        return;
    set->tail = (uint32_t)pass->before;
    set->newest = set->queue[pass->before - 1];
    set->queue[pass->before] = INT64_MAX;
}

/* Takes valid keys as they come while there are free slots; returns how many keys it looked at. */
static int32_t fill_set(const select_pass *pass, kept_set *set) {
    const key_range *const keys = &pass->keys;
    const bool crowded = keys->count > set->places - pass->before; // else none ever leaves
    int32_t count = pass->before, n = 0;
    for (; n < keys->count && count < set->places; n++) {
        const bool taken = !keys->valid || keys->valid[n];
        const int32_t key = pass->before + n;
        const int64_t rank = rank_of(keys->score[n], key);
        pass->expiry[key] = taken ? pass->kv_len : keys->first + n;
        pass->slot[key] = taken ? count : -1;
        if (taken && crowded)
            set->tree[set->places + count] = join_queue(set, rank) ? INT64_MAX : rank;
        count += taken;
    }
    if (n == keys->count)
        return n; // nobody is left to ask for the worst
    for (int64_t node = set->places - 1; node > 0; node--)
        set->tree[node] = lesser(set->tree[2 * node], set->tree[2 * node + 1]);
    find_worst(set);
    return n;
}

/* Key `key` of `rank` takes the place of the worst. The next to go is likely the worse below either
 * child of the root: slots are asked for ahead (slot[-1] where there is no key). */
static inline void enter_key(const select_pass *pass, kept_set *set, int32_t key, int64_t rank) {
    const int32_t evicted = rank_key(set->worst), slot = pass->slot[evicted];
    pass->expiry[key] = pass->kv_len;
    pass->expiry[evicted] = pass->keys.first + (key - pass->before);
    pass->slot[key] = slot;
    replace_worst(set, slot, rank);
    __builtin_prefetch(pass->slot + rank_key(set->tree[2]));
    __builtin_prefetch(pass->slot + rank_key(set->tree[3]));
}

/* Looks at the marked keys from `at` on. Apart from the marking, which would take its registers. */
__attribute__((noinline)) static void enter_marked(const select_pass *pass, kept_set *shared,
                                                   int32_t at, uint64_t marks) {
    kept_set set = *shared;
    for (; marks; marks &= marks - 1) {
        const int32_t n = at + __builtin_ctzll(marks), key = pass->before + n;
        const int64_t rank = rank_of(pass->keys.score[n], key);
        if (rank > set.worst)
            enter_key(pass, &set, key, rank);
    }
    *shared = set;
}

/* Expiry and slot of the keys of a range, as far as the range decides them. */
static void select_keys(const select_pass *pass, kept_set set) {
    const key_range *const keys = &pass->keys;
    start_set(pass, &set);
    for (int64_t at = fill_set(pass, &set); at < keys->count; at += select_block) {
        const int64_t count = lesser(keys->count - at, select_block);
        int32_t *const expiry = pass->expiry + pass->before + at;
        int32_t *const slot = pass->slot + pass->before + at;
        for (int32_t n = 0; n < count; n++)
            expiry[n] = keys->first + (int32_t)at + n;
        for (int32_t n = 0; n < count; n++)
            slot[n] = -1;
        const uint64_t marks = mark_keys(keys, at, rank_order(set.worst));
        if (marks)
            enter_marked(pass, &set, (int32_t)at, marks);
    }
}

#endif
