/* Selection by insertion sort: each key is ranked among the keys before it. */
#include "core/gap.h"
#include "reference/reference.h"

#include <math.h>

/* True if a key of score x outranks an older key of score y. */
static bool outranks(double x, double y) { return x >= y || isnan(y); }

/* The valid keys of one (b, g) up to a position. */
typedef struct key_ranking {
    int32_t *arrived; /* by arrival */
    int32_t *ranked;  /* the `window` best of the keys that compete by score, best first */
    int64_t arrived_count, ranked_count;
} key_ranking;

/* Adds the valid key that arrived as number n to the keys that compete by score. */
static void rank_key(const fdma_problem *problem, int64_t row, int64_t n, key_ranking *keys) {
    const fdma_tensor *const score = &problem->score;
    const int32_t j = keys->arrived[n];
    int64_t rank = keys->ranked_count++;
    for (; rank > 0 && n >= problem->sinks; rank--) {
        const int32_t other = keys->ranked[rank - 1];
        const bool is_sink = rank <= problem->sinks; // sinks come first, in the order of arrival
        if (is_sink || !outranks(fdma_load(score, row + j), fdma_load(score, row + other)))
            break;
        keys->ranked[rank] = other;
    }
    keys->ranked[rank] = j;
}

/* Writes expiry and slot of one (b, g) for causal scope. At position j, ranked[] holds the `window`
 * best, in order, of the valid keys of j's sequence up to j without the `recent` newest. */
static void select_prefixes(const fdma_problem *problem, int64_t b, int64_t g, key_ranking keys,
                            int32_t *expiry, int32_t *slot) {
    const int64_t row = offset_of(&problem->score, b, g, 0);
    for (int32_t j = 0; j < (int32_t)problem->kv_len; j++) {
        const sequence_range own = sequence_at(problem, j);
        if (j == own.first)
            keys.arrived_count = keys.ranked_count = 0;
        expiry[j] = j;
        slot[j] = -1;
        if (own.end <= j || !is_valid_key(problem, b, j))
            continue;
        keys.arrived[keys.arrived_count++] = j;
        expiry[j] = (int32_t)own.end;
        slot[j] = (int32_t)(keys.arrived_count - 1);
        if (keys.arrived_count <= problem->recent)
            continue;
        rank_key(problem, row, keys.arrived_count - 1 - problem->recent, &keys);
        if (keys.ranked_count <= problem->window)
            continue;
        const int32_t evicted = keys.ranked[--keys.ranked_count];
        expiry[evicted] = j;
        slot[j] = evicted != j ? slot[evicted] : -1;
    }
}

/* The first position from j on at which the rule `gap` excludes key j from every query: its score
 * is too low, and it is neither a sink nor among the `recent` newest. At most its expiry. */
static int32_t end_of_key(const fdma_problem *problem, int64_t b, int64_t row, int32_t j,
                          int32_t expiry) {
    int64_t older = 0, newer = 0; // valid keys of its sequence up to i
    double best = -INFINITY;
    for (int32_t i = (int32_t)sequence_at(problem, j).first; i < expiry; i++) {
        if (!is_valid_key(problem, b, i))
            continue;
        best = fmax(best, fdma_load(&problem->score, row + i));
        older += i < j;
        newer += i > j;
        if (i >= j && older >= problem->sinks && newer >= problem->recent &&
            falls_below(fdma_load(&problem->score, row + j), best, problem->gap))
            return i;
    }
    return expiry;
}

static void keep_near_best(const fdma_problem *problem, int64_t b, int64_t g, int32_t *expiry,
                           int32_t *slot) {
    const int64_t row = offset_of(&problem->score, b, g, 0);
    for (int32_t j = 0; j < (int32_t)problem->kv_len; j++) {
        if (expiry[j] > j)
            expiry[j] = end_of_key(problem, b, row, j, expiry[j]);
        if (expiry[j] == j)
            slot[j] = -1;
    }
}

/* Turns causal scope into global scope: every query keeps the keys that the last prefix of its
 * sequence keeps, and slots number the kept keys of each sequence. */
static void keep_last_prefix(const fdma_problem *problem, int32_t *expiry, int32_t *slot) {
    int32_t kept = 0;
    for (int32_t j = 0; j < (int32_t)problem->kv_len; j++) {
        const sequence_range own = sequence_at(problem, j);
        const bool stays = slot[j] >= 0 && expiry[j] == (int32_t)own.end;
        kept = j == own.first ? 0 : kept;
        expiry[j] = stays ? expiry[j] : j;
        slot[j] = stays ? kept++ : -1;
    }
}

static fdma_arena take_scratch(const fdma_problem *problem, key_ranking *keys, int32_t **slot) {
    fdma_arena arena = fdma_arena_of(problem);
    *keys = (key_ranking){0};
    keys->arrived = fdma_arena_take(&arena, (size_t)problem->kv_len * sizeof *keys->arrived);
    keys->ranked = fdma_arena_take(&arena, (size_t)problem->kv_len * sizeof *keys->ranked);
    *slot = fdma_arena_take(&arena, (size_t)problem->kv_len * sizeof **slot);
    return arena;
}

size_t fdma_reference_select_workspace(const fdma_problem *problem) {
    key_ranking keys;
    int32_t *slot;
    const fdma_arena arena = take_scratch(problem, &keys, &slot);
    return fdma_arena_size(&arena);
}

fdma_status fdma_reference_select(const fdma_problem *problem) {
    const fdma_tensor *const expiry = &problem->expiry, *const slots = &problem->slot;
    key_ranking keys;
    int32_t *scratch;
    take_scratch(problem, &keys, &scratch);
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t g = 0; g < problem->kv_heads; g++) {
            int32_t *const out = (int32_t *)expiry->data + offset_of(expiry, b, g, 0);
            int32_t *const slot =
                is_present(slots) ? (int32_t *)slots->data + offset_of(slots, b, g, 0) : scratch;
            select_prefixes(problem, b, g, keys, out, slot);
            if (problem->scope == FDMA_SCOPE_GLOBAL)
                keep_last_prefix(problem, out, slot);
            if (problem->gap > 0)
                keep_near_best(problem, b, g, out, slot);
        }
    return FDMA_OK;
}
