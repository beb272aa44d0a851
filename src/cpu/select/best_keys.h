/* The best keys of a range, whatever the order in which they came, and of ranges put together. */
#ifndef FDMA_CPU_SELECT_BEST_KEYS_H
#define FDMA_CPU_SELECT_BEST_KEYS_H

#include "cpu/select/kept_set.h"

typedef struct rank_buffer {
    int64_t *ranks, *spare; /* [capacity] each */
    int64_t capacity;
    int32_t count;
} rank_buffer;

enum {
    sample_keys = 512,     /* of a range, to guess how good a key must be */
    least_capacity = 1024, /* ranks, so that small windows do not sort all the time */
};

static int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }

/* Ranks to gather from a range of so many keys before all but the best are dropped: all of them, if
 * they are few. The best of two ranges find room too. */
static int64_t buffer_capacity(int64_t places, int64_t keys) {
    const int64_t some = lesser(greater(4 * places, least_capacity), keys);
    return greater(some, places) + select_block;
}

static void sort_by_byte(const int64_t *ranks, int64_t *to, int32_t count, int32_t shift) {
    const uint64_t sign = (uint64_t)1 << 63;
    int32_t place[256] = {0};
    for (int32_t n = 0; n < count; n++)
        place[((uint64_t)ranks[n] ^ sign) >> shift & 255]++;
    for (int32_t value = 0, before = 0; value < 256; value++) {
        const int32_t here = place[value];
        place[value] = before;
        before += here;
    }
    for (int32_t n = 0; n < count; n++)
        to[place[((uint64_t)ranks[n] ^ sign) >> shift & 255]++] = ranks[n];
}

/* Radix sort by order, stable: equals stand in the order of their keys already. */
static void sort_ranks(rank_buffer *buffer) {
    int64_t varying = 0;
    bool sorted = true;
    for (int32_t n = 1; n < buffer->count; n++) {
        varying |= buffer->ranks[n] ^ buffer->ranks[0];
        sorted &= buffer->ranks[n] > buffer->ranks[n - 1];
    }
    for (int32_t shift = 32; shift < 64 && !sorted; shift += 8) {
        int64_t *const from = buffer->ranks;
        if (((uint64_t)varying >> shift & 255) == 0)
            continue;
        sort_by_byte(from, buffer->spare, buffer->count, shift);
        buffer->ranks = buffer->spare;
        buffer->spare = from;
    }
}

/* Drops all but the best `places`, and puts these in ascending order. */
static void keep_best(rank_buffer *buffer, int32_t places) {
    sort_ranks(buffer);
    const int32_t dropped = buffer->count - places;
    if (dropped <= 0)
        return;
    memmove(buffer->ranks, buffer->ranks + dropped, (size_t)places * sizeof *buffer->ranks);
    buffer->count = places;
}

/* A rank that about 1.5 `places` keys of the range reach, and some more for a sample's chance. */
static int64_t guess_floor(const key_range *keys, int32_t places, rank_buffer *buffer) {
    const int32_t all = keys->count / sample_keys;
    // odd: scores may well have a period of a power of two
    const int32_t step = (all - 1) | 1;
    if (all < 2)
        return INT64_MIN;
    buffer->count = 0;
    for (int32_t n = 0; n < sample_keys * step; n += step) {
        buffer->ranks[buffer->count] = rank_of(keys->score[n], keys->first + n);
        buffer->count += !keys->valid || keys->valid[n];
    }
    sort_ranks(buffer);
    const int64_t above = (int64_t)sample_keys * places * 3 / 2 / keys->count + 16;
    return above < buffer->count ? buffer->ranks[buffer->count - above] : INT64_MIN;
}

/* The best of the keys that reach `floor`, in ascending order. */
static void collect_best(const key_range *keys, int32_t places, int64_t floor,
                         rank_buffer *buffer) {
    buffer->count = 0;
    for (int64_t at = 0; at < keys->count; at += select_block) {
        uint64_t marks = mark_keys(keys, at, rank_order(floor));
        for (; marks; marks &= marks - 1) {
            const int32_t n = (int32_t)at + __builtin_ctzll(marks);
            const int64_t rank = rank_of(keys->score[n], keys->first + n);
            buffer->ranks[buffer->count] = rank;
            buffer->count += rank >= floor;
        }
        if (buffer->count > buffer->capacity - select_block) {
            keep_best(buffer, places);
            floor = places > 0 ? buffer->ranks[0] : INT64_MAX;
        }
    }
    keep_best(buffer, places);
}

/* Writes the ranks of the best `places` valid keys, in ascending order, by position; returns how
 * many there are. */
static int32_t find_best(const key_range *keys, int32_t places, rank_buffer buffer, int64_t *best) {
    const int64_t floor = guess_floor(keys, places, &buffer);
    collect_best(keys, places, floor, &buffer);
    if (buffer.count < places && floor > INT64_MIN)
        collect_best(keys, places, INT64_MIN, &buffer);
    memcpy(best, buffer.ranks, (size_t)buffer.count * sizeof *best);
    return buffer.count;
}

/* `to` becomes the best `places` of `left` and `right`; returns how many there are. */
static int32_t merge_best(const int64_t *left, int32_t left_count, const int64_t *right,
                          int32_t right_count, int32_t places, int64_t *to) {
    const int64_t all = (int64_t)left_count + right_count;
    const int32_t count = (int32_t)lesser(all, places);
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

#endif
