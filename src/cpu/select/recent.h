/* The rule `recent`: a query keeps the `recent` newest valid keys, and the best `window` of the
 * older ones.
 *
 * A key competes by score only once `recent` valid keys have followed it. So the selection is the
 * one without the rule, delayed by `recent` valid keys: each expiry moves by that many. If the
 * arrival of valid key n drops a key without the rule, that key now leaves when valid key n +
 * recent arrives, which takes over its slot. The first window + recent valid keys take free
 * slots. */
#pragma once

#include "cpu/common/memory.h"

/* Valid keys are numbered in ascending order. */
typedef struct recent_keys {
    int32_t *number;   /* [kv_len] of each valid key; NULL: all keys are valid */
    int32_t *position; /* [kv_len] by number; NULL likewise */
    int32_t *evicted;  /* [kv_len]: the key that the window drops as valid key n arrives */
} recent_keys;

static recent_keys take_recent(fdma_arena *arena, const fdma_problem *problem) {
    const int64_t mapped = is_present(&problem->key_valid) ? problem->kv_len : 0;
    recent_keys keys = {0};
    int32_t *const number = take_ints(arena, mapped), *const position = take_ints(arena, mapped);
    keys.evicted = take_ints(arena, is_present(&problem->slot) ? problem->kv_len : 0);
    if (mapped > 0)
        keys.number = number, keys.position = position;
    return keys;
}

/* Numbers the valid keys of a sequence. Returns their number. */
static int32_t number_keys(const fdma_problem *problem, const uint8_t *valid, recent_keys keys) {
    int32_t count = 0;
    if (valid == NULL)
        return (int32_t)problem->kv_len;
    for (int32_t j = 0; j < (int32_t)problem->kv_len; j++) {
        keys.number[j] = count;
        keys.position[count] = j;
        count += valid[j] != 0;
    }
    return count;
}

static inline int32_t position_of(recent_keys keys, int32_t number) {
    return keys.position != NULL ? keys.position[number] : number;
}

static inline int32_t number_of(recent_keys keys, int32_t position) {
    return keys.number != NULL ? keys.number[position] : position;
}

/* Moves the expiries of the valid keys by `recent` valid keys, and fills keys.evicted. */
static void move_expiries(const fdma_problem *problem, recent_keys keys, int32_t count,
                          int32_t *expiry, bool wants_slots) {
    const int32_t kv_len = (int32_t)problem->kv_len;
    const int64_t recent = min(problem->recent, problem->kv_len);
    for (int32_t n = 0; n < count; n++) {
        const int32_t j = position_of(keys, n);
        const int32_t end = expiry[j] < kv_len ? number_of(keys, expiry[j]) : count;
        expiry[j] = end < count - recent ? position_of(keys, (int32_t)(end + recent)) : kv_len;
        if (wants_slots && end < count)
            keys.evicted[end] = n;
    }
}

static void number_slots(const fdma_problem *problem, const uint8_t *valid, recent_keys keys,
                         int32_t count, int32_t *slot) {
    const int64_t slots = problem->slots, recent = problem->recent;
    for (int64_t j = 0; valid != NULL && j < problem->kv_len; j++)
        slot[j] = -1;
    for (int32_t n = 0; n < count; n++)
        slot[position_of(keys, n)] =
            n < slots ? n : slot[position_of(keys, keys.evicted[n - recent])];
}

static void keep_recent(const fdma_problem *problem, int64_t head, recent_keys keys) {
    const int64_t b = head / problem->kv_heads, g = head % problem->kv_heads;
    const uint8_t *const valid = valid_keys(problem, b);
    const bool wants_slots = is_present(&problem->slot);
    const int32_t count = number_keys(problem, valid, keys);
    move_expiries(problem, keys, count, int_at(&problem->expiry, b, g, 0), wants_slots);
    if (wants_slots)
        number_slots(problem, valid, keys, count, int_at(&problem->slot, b, g, 0));
}
