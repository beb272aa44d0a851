/* fdma_cache_store(): the keys of a prefill that are kept, and their rows. */
#include "core/cache.h"

#include "core/element.h"
#include "core/integers.h"

#include <math.h>

stored_prompt fdma_stored_prompt(const fdma_problem *problem, int64_t n) {
    const fdma_cache *const cache = &problem->cache;
    const int32_t *const starts = problem->starts.data;
    const bool packed = is_present(&problem->starts);
    const int64_t sequence = number_of_stream(&problem->index, n, n);
    stored_prompt prompt = {.b = packed ? 0 : n,
                            .first = packed ? starts[n] : 0,
                            .end = packed ? starts[n + 1] : problem->new_len,
                            .sequence = sequence};
    if (sequence < 0 || sequence >= cache->sequences)
        prompt.sequence = -1;
    else if (problem->carried_len > 0)
        prompt.seen = ((const int32_t *)cache->table.seen.data)[sequence];
    return prompt;
}

static int32_t int_of_key(const fdma_tensor *tensor, int64_t b, int64_t g, int64_t j) {
    return ((const int32_t *)tensor->data)[offset_of(tensor, b, g, j)];
}

/* Empties every row, except rows of carried keys that are kept to the end. */
static void empty_rows(const fdma_problem *problem, const stored_prompt *prompt, int64_t g) {
    const fdma_table *const table = &problem->cache.table;
    for (int64_t row = 0; row < rows_of_cache(&problem->cache); row++) {
        const bool carried = row < problem->carried_len;
        if (carried && int_of_key(&problem->expiry, prompt->b, g, row) >= problem->kv_len)
            continue;
        fdma_empty_cache_row(table, (cache_row){prompt->sequence, g, row});
    }
}

void fdma_store_kept_keys(const fdma_problem *problem, const stored_prompt *prompt, int64_t g) {
    const int64_t rows = rows_of_cache(&problem->cache), carried = problem->carried_len;
    empty_rows(problem, prompt, g);
    for (int64_t m = prompt->first; m < prompt->end; m++) {
        if (int_of_key(&problem->expiry, prompt->b, g, carried + m) < carried + prompt->end)
            continue;
        const int64_t row = int_of_key(&problem->slot, prompt->b, g, carried + m);
        const cache_row to = {prompt->sequence, g, row};
        if (row >= 0 && row < rows) // false only if the selection was changed by hand
            fdma_write_cache_row(problem, prompt->b, m, to, prompt->seen + m - prompt->first);
    }
}

void fdma_count_stored(const fdma_problem *problem) {
    for (int64_t n = 0; n < count_prompts(problem); n++) {
        const stored_prompt prompt = fdma_stored_prompt(problem, n);
        const int64_t seen = prompt.seen + prompt.end - prompt.first;
        if (prompt.sequence >= 0) // beyond INT32_MAX only if two entries have one index
            ((int32_t *)problem->cache.table.seen.data)[prompt.sequence] =
                (int32_t)min(seen, INT32_MAX);
    }
}
