/* Selection by insertion sort: each key is ranked among those before it. */
#ifndef FDMA_REFERENCE_SELECT_H
#define FDMA_REFERENCE_SELECT_H

#include "reference/real.h"

/* Whether a key of score x, more recent than one of score y, outranks it. */
static bool outranks(double x, double y) { return x >= y || isnan(y); }

/* Writes expiry and slot of one (b, g) for causal scope. Every prefix of the keys is sorted: at
 * position j, ranked[] holds the valid keys up to j, best first, and its first `window` are kept.
 * */
static void select_prefixes(const fdma_problem *problem, int64_t b, int64_t g, int32_t *ranked,
                            int32_t *expiry, int32_t *slot) {
    const fdma_tensor *const score = &problem->score;
    const int64_t row = offset_of(score, b, g, 0);
    int64_t count = 0;
    for (int32_t j = 0; j < (int32_t)problem->kv_len; j++) {
        expiry[j] = j;
        slot[j] = -1;
        if (!is_valid_key(problem, b, j))
            continue;
        int64_t rank = count++;
        for (; rank > 0; rank--) {
            if (!outranks(fdma_load(score, row + j), fdma_load(score, row + ranked[rank - 1])))
                break;
            ranked[rank] = ranked[rank - 1];
        }
        ranked[rank] = j;
        if (rank >= problem->window)
            continue;
        expiry[j] = (int32_t)problem->kv_len;
        slot[j] = (int32_t)(count - 1);
        if (count <= problem->window)
            continue;
        const int32_t evicted = ranked[problem->window];
        expiry[evicted] = j;
        slot[j] = slot[evicted];
    }
}

/* From causal to global scope: every query keeps what the last prefix keeps, and slots number the
 * kept keys. */
static void keep_last_prefix(const fdma_problem *problem, int32_t *expiry, int32_t *slot) {
    int32_t kept = 0;
    for (int32_t j = 0; j < (int32_t)problem->kv_len; j++) {
        const bool stays = slot[j] >= 0 && expiry[j] == (int32_t)problem->kv_len;
        expiry[j] = stays ? expiry[j] : j;
        slot[j] = stays ? kept++ : -1;
    }
}

static fdma_arena take_scratch(const fdma_problem *problem, int32_t **ranked, int32_t **slot) {
    fdma_arena arena = fdma_arena_of(problem);
    *ranked = fdma_arena_take(&arena, (size_t)problem->kv_len * sizeof **ranked);
    *slot = fdma_arena_take(&arena, (size_t)problem->kv_len * sizeof **slot);
    return arena;
}

static inline size_t select_workspace(const fdma_problem *problem) {
    int32_t *ranked, *slot;
    const fdma_arena arena = take_scratch(problem, &ranked, &slot);
    return fdma_arena_size(&arena);
}

static inline fdma_status run_select(const fdma_problem *problem) {
    const fdma_tensor *const expiry = &problem->expiry, *const slots = &problem->slot;
    int32_t *ranked, *scratch;
    take_scratch(problem, &ranked, &scratch);
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t g = 0; g < problem->kv_heads; g++) {
            int32_t *const out = (int32_t *)expiry->data + offset_of(expiry, b, g, 0);
            int32_t *const slot =
                is_present(slots) ? (int32_t *)slots->data + offset_of(slots, b, g, 0) : scratch;
            select_prefixes(problem, b, g, ranked, out, slot);
            if (problem->scope == FDMA_SCOPE_GLOBAL)
                keep_last_prefix(problem, out, slot);
        }
    return FDMA_OK;
}

#endif
