/* The best keys of a range, found without a pass for expiries, and the best of several ranges. */
#pragma once

#include "cpu/select/kept_set.h"

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

/* Collects the sinks of a range. There are no more sinks than slots. */
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
