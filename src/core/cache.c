/* Caches: their memory, and the parts of decode that do not depend on a backend's arithmetic. */
#include "core/cache.h"

#include "core/element.h"
#include "core/error.h"
#include "core/integers.h"

#include <math.h>
#include <string.h>

/* ---- memory ---- */

/* Takes k or v of a cache. The rows of a head are adjacent, because a query reads all of them. */
static fdma_tensor take_rows(fdma_arena *arena, const fdma_cache *cache) {
    const int64_t heads = cache->kv_heads, rows = rows_of_cache(cache), dim = cache->head_dim;
    const size_t count = (size_t)cache->sequences * (size_t)heads * (size_t)rows * (size_t)dim;
    void *const data = fdma_arena_take(arena, count * fdma_dtype_size(cache->dtype));
    fdma_tensor tensor = fdma_tensor_4d(data, cache->dtype, cache->sequences, rows, heads, dim);
    tensor.stride[1] = dim;
    tensor.stride[2] = rows * dim;
    return tensor;
}

static size_t place_cache(fdma_cache *cache, void *memory) {
    const int64_t sequences = cache->sequences, heads = cache->kv_heads,
                  rows = rows_of_cache(cache);
    const fdma_dtype wide = cache->dtype == FDMA_FLOAT64 ? FDMA_FLOAT64 : FDMA_FLOAT32;
    const size_t numbers = (size_t)sequences * (size_t)heads * (size_t)rows;
    fdma_arena arena = fdma_arena_at(memory);
    if (!has_pages(cache)) {
        cache->k = take_rows(&arena, cache);
        cache->v = take_rows(&arena, cache);
    }
    cache->bias = fdma_tensor_3d(fdma_arena_take(&arena, numbers * fdma_dtype_size(wide)), wide,
                                 sequences, heads, rows);
    cache->table.score = fdma_tensor_3d(fdma_arena_take(&arena, numbers * fdma_dtype_size(wide)),
                                        wide, sequences, heads, rows);
    cache->table.position = fdma_tensor_3d(fdma_arena_take(&arena, numbers * sizeof(int32_t)),
                                           FDMA_INT32, sequences, heads, rows);
    cache->table.seen = fdma_tensor_1d(fdma_arena_take(&arena, (size_t)sequences * sizeof(int32_t)),
                                       FDMA_INT32, sequences);
    return fdma_arena_size(&arena);
}

fdma_status fdma_cache_bytes(const fdma_cache *cache, size_t *bytes) {
    FDMA_TRY(fdma_check_cache(cache));
    FDMA_REQUIRE(bytes != NULL, FDMA_INVALID_ARGUMENT,
                 "bytes: is NULL, want the address of a size_t");
    const double numbers = (double)cache->sequences * (double)rows_of_cache(cache) *
                           (double)cache->kv_heads * (double)cache->head_dim;
    FDMA_REQUIRE(numbers < 0x1p58, FDMA_INVALID_ARGUMENT,
                 "cache: %.3g numbers, want a size that fits in memory", numbers);
    fdma_cache placed = *cache;
    *bytes = place_cache(&placed, NULL);
    return FDMA_OK;
}

fdma_status fdma_empty_cache(const fdma_cache *cache, fill_memory fill) {
    const size_t sequences = (size_t)cache->sequences;
    const size_t rows = sequences * (size_t)cache->kv_heads * (size_t)rows_of_cache(cache);
    FDMA_TRY(fill(cache->device, cache->table.position.data, 0xff, rows * sizeof(int32_t)));
    return fill(cache->device, cache->table.seen.data, 0, sequences * sizeof(int32_t));
}

fdma_status fdma_take_cache_memory(fdma_cache *cache, void *memory) {
    size_t bytes;
    FDMA_TRY(fdma_cache_bytes(cache, &bytes));
    FDMA_REQUIRE(memory != NULL, FDMA_INVALID_ARGUMENT, "memory: is NULL, want %zu bytes", bytes);
    place_cache(cache, memory);
    return FDMA_OK;
}

fdma_status fdma_empty_sequence(const fdma_cache *cache, int64_t sequence, fill_memory fill) {
    FDMA_TRY(fdma_check_cache_positions(cache));
    FDMA_REQUIRE(sequence >= 0 && sequence < cache->sequences, FDMA_INVALID_ARGUMENT,
                 "sequence: is %lld, want 0 to %lld", (long long)sequence,
                 (long long)cache->sequences - 1);
    const fdma_tensor *const position = &cache->table.position;
    const size_t row_bytes = (size_t)rows_of_cache(cache) * sizeof(int32_t);
    for (int64_t g = 0; g < cache->kv_heads; g++)
        FDMA_TRY(fill(cache->device, int_at(position, sequence, g, 0), 0xff, row_bytes));
    return fill(cache->device, (int32_t *)cache->table.seen.data + sequence, 0, sizeof(int32_t));
}

/* ---- decode ---- */

decode_head fdma_decode_head(const fdma_problem *problem, int64_t b, int64_t g) {
    const fdma_cache *const cache = &problem->cache;
    const int64_t sequence = number_of_stream(&problem->index, b, b);
    decode_head head = {.problem = problem, .b = b, .g = g, .sequence = -1};
    if (sequence < 0 || sequence >= cache->sequences)
        return head;
    const int64_t tokens = number_of_stream(&problem->n_tokens, b, problem->new_len);
    head.sequence = sequence;
    head.tokens = min(max(tokens, 0), problem->new_len);
    head.committed = min(max(number_of_stream(&problem->commit, b, head.tokens), 0), head.tokens);
    head.queries = max(problem->q_len - (problem->new_len - head.tokens), 0);
    head.seen = ((const int32_t *)cache->table.seen.data)[sequence];
    return head;
}

head_selection fdma_take_selection(fdma_arena *arena, const fdma_problem *problem) {
    const size_t keys = (size_t)problem->kv_len;
    head_selection taken;
    taken.expiry = fdma_arena_take(arena, keys * sizeof *taken.expiry);
    taken.slot = fdma_arena_take(arena, keys * sizeof *taken.slot);
    taken.bias = fdma_arena_take(arena, (size_t)problem->new_len * sizeof(double));
    return taken;
}

key_pages fdma_pages_of_sequence(const fdma_cache *cache, int64_t sequence) {
    key_pages pages = {.page = cache->page_table.data};
    if (!has_pages(cache) || pages.page == NULL)
        return (key_pages){.page = NULL};
    pages.page += sequence * cache->page_table.stride[0];
    while (INT64_C(1) << pages.shift < cache->k.shape[1])
        pages.shift++;
    return pages;
}

void fdma_hide_missing_rows(const decode_head *head, const head_selection *selection) {
    const fdma_problem *const problem = head->problem;
    for (int64_t row = 0; row < problem->carried_len && has_pages(&problem->cache); row++)
        if (indices_of_row(&problem->cache, head->sequence, row).first < 0)
            selection->expiry[row] = (int32_t)row;
}

static double bias_of(const fdma_problem *problem, double score) {
    return problem->bias_form == FDMA_BIAS_EXP ? exp(score) : score;
}

void fdma_fill_bias(const decode_head *head, const head_selection *selection) {
    const fdma_problem *const problem = head->problem;
    const fdma_tensor bias = fdma_tensor_1d(selection->bias, problem->score.dtype, head->tokens);
    const int64_t first = offset_of(&problem->score, head->b, head->g, 0);
    for (int64_t m = 0; m < head->tokens && problem->bias_form != FDMA_BIAS_NONE; m++)
        fdma_store(&bias, m, bias_of(problem, fdma_load(&problem->score, first + m)));
}

/* k or v of the cache for one head; with a page table, rows of all pages. */
static fdma_tensor carried_rows_of(const decode_head *head, const fdma_tensor *rows) {
    fdma_tensor carried = *rows;
    if (!has_pages(&head->problem->cache))
        cut_axis(&carried, 0, head->sequence, 1);
    cut_axis(&carried, 2, head->g, 1);
    return carried;
}

/* Cuts q, out or lse to the queries of one head; queries and heads have these axes. */
static void cut_queries(const decode_head *head, int query_axis, int head_axis,
                        fdma_tensor *tensor) {
    const int64_t group = head->problem->group;
    cut_axis(tensor, 0, head->b, 1);
    cut_axis(tensor, query_axis, 0, head->queries);
    cut_axis(tensor, head_axis, head->g * group, group);
}

/* Cuts k or v to the tokens of one head. */
static void cut_tokens(const decode_head *head, fdma_tensor *tensor) {
    cut_axis(tensor, 0, head->b, 1);
    cut_axis(tensor, 2, head->g, 1);
}

void fdma_decode_forward(const decode_head *head, const head_selection *selection,
                         fdma_problem *one) {
    const fdma_problem *const problem = head->problem;
    const fdma_cache *const cache = &problem->cache;
    *one = *problem;
    one->operation = operation_forward;
    one->batch = one->kv_heads = 1;
    one->q_heads = problem->group;
    one->q_len = head->queries;
    one->new_len = head->tokens;
    one->kv_len = problem->carried_len + head->tokens;
    cut_queries(head, 1, 2, &one->q);
    cut_queries(head, 1, 2, &one->out);
    cut_queries(head, 2, 1, &one->lse);
    cut_axis(&one->sink_logit, 0, head->g * problem->group, problem->group);
    cut_tokens(head, &one->k);
    cut_tokens(head, &one->v);
    one->k_carried = carried_rows_of(head, &cache->k);
    one->v_carried = carried_rows_of(head, &cache->v);
    one->carried_pages = fdma_pages_of_sequence(cache, head->sequence);
    one->expiry = fdma_tensor_3d(selection->expiry, FDMA_INT32, 1, 1, one->kv_len);
    one->selected = one->causal = true;
    if (problem->bias_form == FDMA_BIAS_NONE)
        return;
    one->bias = fdma_tensor_3d(selection->bias, problem->score.dtype, 1, 1, head->tokens);
    one->bias_carried = cache->bias;
    cut_axis(&one->bias_carried, 0, head->sequence, 1);
    cut_axis(&one->bias_carried, 1, head->g, 1);
}

void fdma_clear_queries(const decode_head *head) {
    const fdma_problem *const problem = head->problem;
    const fdma_tensor *const out = &problem->out, *const lse = &problem->lse;
    for (int64_t i = head->queries; i < problem->q_len; i++)
        for (int64_t h = head->g * problem->group; h < (head->g + 1) * problem->group; h++) {
            for (int64_t d = 0; d < problem->head_dim; d++)
                fdma_store(out, offset_of(out, head->b, i, h) + d, 0);
            if (is_present(lse))
                fdma_store(lse, offset_of(lse, head->b, h, i), -INFINITY);
        }
}

/* Copies `count` adjacent elements from an offset in one tensor to an offset in another of the
 * same dtype. */
static void copy_elements(const fdma_tensor *to, int64_t to_offset, const fdma_tensor *from,
                          int64_t from_offset, int64_t count) {
    const size_t size = fdma_dtype_size(to->dtype);
    memcpy((uint8_t *)to->data + (size_t)to_offset * size,
           (const uint8_t *)from->data + (size_t)from_offset * size, (size_t)count * size);
}

void fdma_empty_cache_row(const fdma_table *table, cache_row at) {
    fdma_store(&table->score, offset_of(&table->score, at.sequence, at.g, at.row), -INFINITY);
    *int_at(&table->position, at.sequence, at.g, at.row) = -1;
}

void fdma_write_cache_row(const fdma_problem *problem, int64_t b, int64_t m, cache_row to,
                          int64_t position) {
    const fdma_cache *const cache = &problem->cache;
    const fdma_table *const table = &cache->table;
    const int64_t s = to.sequence, g = to.g, row = to.row;
    const double score = fdma_load(&problem->score, offset_of(&problem->score, b, g, m));
    const key_indices at = indices_of_row(cache, s, row);
    if (at.first < 0) {
        fdma_empty_cache_row(table, to);
        return;
    }
    copy_elements(&cache->k, offset_of(&cache->k, at.first, at.row, g), &problem->k,
                  offset_of(&problem->k, b, m, g), problem->head_dim);
    copy_elements(&cache->v, offset_of(&cache->v, at.first, at.row, g), &problem->v,
                  offset_of(&problem->v, b, m, g), problem->head_dim);
    fdma_store(&table->score, offset_of(&table->score, s, g, row), score);
    if (problem->bias_form != FDMA_BIAS_NONE)
        fdma_store(&cache->bias, offset_of(&cache->bias, s, g, row), bias_of(problem, score));
    *int_at(&table->position, s, g, row) = (int32_t)position;
}

void fdma_commit_tokens(const decode_head *head, const head_selection *selection) {
    const fdma_problem *const problem = head->problem;
    for (int64_t m = 0; m < head->committed; m++) {
        const int64_t row = selection->slot[problem->carried_len + m];
        const cache_row to = {head->sequence, head->g, row};
        if (row >= 0)
            fdma_write_cache_row(problem, head->b, m, to, head->seen + m);
    }
}

void fdma_count_committed(const fdma_problem *problem) {
    for (int64_t b = 0; b < problem->batch; b++) {
        const decode_head head = fdma_decode_head(problem, b, 0);
        const int64_t seen = head.seen + head.committed;
        if (head.sequence >= 0) // beyond INT32_MAX only if two entries have one index
            ((int32_t *)problem->cache.table.seen.data)[head.sequence] =
                (int32_t)min(seen, INT32_MAX);
    }
}

/* ---- fdma_cache_store(): the keys of a prefill that are kept, and their rows ---- */

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

/* Empties every row, except rows of carried keys that are kept to the end. */
static void empty_rows(const fdma_problem *problem, const stored_prompt *prompt, int64_t g) {
    const fdma_table *const table = &problem->cache.table;
    for (int64_t row = 0; row < rows_of_cache(&problem->cache); row++) {
        const bool carried = row < problem->carried_len;
        if (carried && *int_at(&problem->expiry, prompt->b, g, row) >= problem->kv_len)
            continue;
        fdma_empty_cache_row(table, (cache_row){prompt->sequence, g, row});
    }
}

void fdma_store_kept_keys(const fdma_problem *problem, const stored_prompt *prompt, int64_t g) {
    const int64_t carried = problem->carried_len;
    empty_rows(problem, prompt, g);
    for (int64_t m = prompt->first; m < prompt->end; m++) {
        if (*int_at(&problem->expiry, prompt->b, g, carried + m) < carried + prompt->end)
            continue;
        const int64_t row = *int_at(&problem->slot, prompt->b, g, carried + m);
        const cache_row to = {prompt->sequence, g, row};
        if (row >= 0) // it is below the rows of the cache: fdma_check_slots()
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
