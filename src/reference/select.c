/* Selection by insertion sort, where each key is ranked among the keys before it; and caches, row
 * by row and element by element. */
#include "core/cache.h"
#include "core/integers.h"
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

/* ---- prompts stored in a cache ---- */

/* The last key of a prompt that is kept to the end in this row, as an index of the call's own keys;
 * -1 without one. */
static int64_t key_of_row(const fdma_problem *problem, const stored_prompt *prompt, int64_t g,
                          int64_t row) {
    const int64_t carried = problem->carried_len;
    int64_t found = -1;
    for (int64_t m = prompt->first; m < prompt->end; m++)
        if (*int_at(&problem->expiry, prompt->b, g, carried + m) >= carried + prompt->end &&
            *int_at(&problem->slot, prompt->b, g, carried + m) == row)
            found = m;
    return found;
}

static void write_key(const fdma_problem *problem, const stored_prompt *prompt, int64_t g,
                      int64_t row, int64_t m) {
    const fdma_cache *const cache = &problem->cache;
    const int64_t s = prompt->sequence, b = prompt->b;
    const key_indices at = indices_of_row(cache, s, row);
    const double score = fdma_load(&problem->score, offset_of(&problem->score, b, g, m));
    for (int64_t d = 0; d < problem->head_dim; d++) {
        fdma_store(&cache->k, offset_of(&cache->k, at.first, at.row, g) + d,
                   fdma_load(&problem->k, offset_of(&problem->k, b, m, g) + d));
        fdma_store(&cache->v, offset_of(&cache->v, at.first, at.row, g) + d,
                   fdma_load(&problem->v, offset_of(&problem->v, b, m, g) + d));
    }
    if (problem->bias_form != FDMA_BIAS_NONE)
        fdma_store(&cache->bias, offset_of(&cache->bias, s, g, row),
                   problem->bias_form == FDMA_BIAS_EXP ? exp(score) : score);
    fdma_store(&cache->table.score, offset_of(&cache->table.score, s, g, row), score);
    *int_at(&cache->table.position, s, g, row) = (int32_t)(prompt->seen + m - prompt->first);
}

static void store_row(const fdma_problem *problem, const stored_prompt *prompt, int64_t g,
                      int64_t row) {
    const fdma_table *const table = &problem->cache.table;
    const int64_t s = prompt->sequence, m = key_of_row(problem, prompt, g, row);
    const bool stays = row < problem->carried_len &&
                       *int_at(&problem->expiry, prompt->b, g, row) >= problem->kv_len;
    if (m >= 0 && indices_of_row(&problem->cache, s, row).first >= 0) {
        write_key(problem, prompt, g, row, m);
    } else if (m >= 0 || !stays) {
        *int_at(&table->position, s, g, row) = -1;
        fdma_store(&table->score, offset_of(&table->score, s, g, row), -INFINITY);
    }
}

fdma_status fdma_reference_cache_store(const fdma_problem *problem) {
    for (int64_t n = 0; n < count_prompts(problem); n++) {
        const stored_prompt prompt = fdma_stored_prompt(problem, n);
        for (int64_t g = 0; g < problem->kv_heads && prompt.sequence >= 0; g++)
            for (int64_t row = 0; row < rows_of_cache(&problem->cache); row++)
                store_row(problem, &prompt, g, row);
    }
    fdma_count_stored(problem);
    return FDMA_OK;
}

/* ---- copies of sequences ---- */

/* A copy of one row of a sequence. */
typedef struct copied_row {
    double k[256], v[256]; // head_dim is 256 at most
    double score, bias;
    int32_t position; /* -1: the row is empty */
} copied_row;

static copied_row read_row(const fdma_problem *problem, int64_t s, int64_t g, int64_t row) {
    const fdma_cache *const cache = &problem->cache;
    copied_row read = {.position = -1};
    const key_indices at = s < 0 ? (key_indices){-1, 0} : indices_of_row(cache, s, row);
    if (at.first < 0)
        return read;
    read.position = *int_at(&cache->table.position, s, g, row);
    if (read.position < 0)
        return read; // the other tensors may hold anything there
    for (int64_t d = 0; d < problem->head_dim; d++) {
        read.k[d] = fdma_load(&cache->k, offset_of(&cache->k, at.first, at.row, g) + d);
        read.v[d] = fdma_load(&cache->v, offset_of(&cache->v, at.first, at.row, g) + d);
    }
    read.score = fdma_load(&cache->table.score, offset_of(&cache->table.score, s, g, row));
    read.bias = fdma_load(&cache->bias, offset_of(&cache->bias, s, g, row));
    return read;
}

static void write_row(const fdma_problem *problem, int64_t s, int64_t g, int64_t row,
                      const copied_row *read) {
    const fdma_cache *const cache = &problem->cache;
    const key_indices at = indices_of_row(cache, s, row);
    const bool filled = read->position >= 0 && at.first >= 0;
    *int_at(&cache->table.position, s, g, row) = filled ? read->position : -1;
    for (int64_t d = 0; d < problem->head_dim && filled; d++) {
        fdma_store(&cache->k, offset_of(&cache->k, at.first, at.row, g) + d, read->k[d]);
        fdma_store(&cache->v, offset_of(&cache->v, at.first, at.row, g) + d, read->v[d]);
    }
    if (!filled)
        return;
    fdma_store(&cache->table.score, offset_of(&cache->table.score, s, g, row), read->score);
    fdma_store(&cache->bias, offset_of(&cache->bias, s, g, row), read->bias);
}

static copied_row *take_rows(fdma_arena *arena, const fdma_problem *problem) {
    return fdma_arena_take(arena, (size_t)problem->batch * sizeof(copied_row));
}

size_t fdma_reference_cache_copy_workspace(const fdma_problem *problem) {
    fdma_arena arena = {0};
    take_rows(&arena, problem);
    return fdma_arena_size(&arena);
}

fdma_status fdma_reference_cache_copy(const fdma_problem *problem) {
    const int32_t *const from = problem->from.data, *const to = problem->to.data;
    const int64_t rows = rows_of_cache(&problem->cache);
    int32_t *const seen = problem->cache.table.seen.data;
    fdma_arena arena = fdma_arena_of(problem);
    copied_row *const read = take_rows(&arena, problem);
    for (int64_t n = 0; n < problem->kv_heads * rows; n++) {
        const int64_t g = n / rows, row = n % rows;
        for (int64_t i = 0; i < problem->batch; i++)
            read[i] = read_row(problem, from[i], g, row);
        for (int64_t i = 0; i < problem->batch; i++)
            if (from[i] != to[i])
                write_row(problem, to[i], g, row, &read[i]);
    }
    for (int64_t i = 0; i < problem->batch; i++)
        read[i].position = from[i] < 0 ? 0 : seen[from[i]];
    for (int64_t i = 0; i < problem->batch; i++)
        seen[to[i]] = read[i].position;
    return FDMA_OK;
}
