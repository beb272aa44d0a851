/* Prompts stored in a cache, and copies of its sequences, row by row and element by element. */
#include "core/cache.h"
#include "reference/reference.h"

#include <math.h>

static int32_t *int_at(const fdma_tensor *tensor, int64_t x0, int64_t x1, int64_t x2) {
    return (int32_t *)tensor->data + offset_of(tensor, x0, x1, x2);
}

/* ---- store ---- */

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

/* ---- copy ---- */

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
