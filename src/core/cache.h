/* Caches, and the steps that all kernels of decode share: they turn the new tokens of one kv head
 * of one stream into a forward problem, and move tokens into the cache. Also the prompts that
 * fdma_cache_store() writes. */
#pragma once

#include "core/kernel.h"

enum { most_new_tokens = 64 };

static inline int64_t rows_of_cache(const fdma_cache *cache) {
    return cache->window + cache->recent;
}

static inline bool has_pages(const fdma_cache *cache) { return is_present(&cache->page_table); }

/* Indices of a cache row in k and v; `first` is -1 if the row's page is missing. */
static inline key_indices indices_of_row(const fdma_cache *cache, int64_t sequence, int64_t row) {
    const fdma_tensor *const table = &cache->page_table;
    const int64_t pages = cache->k.shape[0], page_len = cache->k.shape[1];
    if (!has_pages(cache))
        return (key_indices){sequence, row};
    const int64_t at = sequence * table->stride[0] + row / page_len;
    const int64_t page = ((const int32_t *)table->data)[at];
    return (key_indices){page >= 0 && page < pages ? page : -1, row % page_len};
}

/* Element b of an optional int32 list with one element per stream; `absent` without a list. */
static inline int64_t number_of_stream(const fdma_tensor *tensor, int64_t b, int64_t absent) {
    return is_present(tensor) ? ((const int32_t *)tensor->data)[b] : absent;
}

fdma_status fdma_check_cache(const fdma_cache *cache);

/* Checks the sizes of a cache, and the tensors that say which of its rows are filled. */
fdma_status fdma_check_cache_positions(const fdma_cache *cache);

typedef fdma_status (*fill_memory)(int32_t device, void *data, int byte, size_t bytes);

fdma_status fdma_take_cache_memory(fdma_cache *cache, void *memory);

/* Empties all sequences of a cache whose tensors are in the memory that it was given. */
fdma_status fdma_empty_cache(const fdma_cache *cache, fill_memory fill);

fdma_status fdma_empty_sequence(const fdma_cache *cache, int64_t sequence, fill_memory fill);

typedef struct cache_row {
    int64_t sequence, g, row;
} cache_row;

/* Marks a row as empty: score -inf, position -1. */
void fdma_empty_cache_row(const fdma_table *table, cache_row at);

/* Writes key m of batch entry b, with its score, bias and position, to a row; empties the row if
 * its page is missing. */
void fdma_write_cache_row(const fdma_problem *problem, int64_t b, int64_t m, cache_row to,
                          int64_t position);

/* One kv head of one stream of a batch. */
typedef struct decode_head {
    const fdma_problem *problem;
    int64_t b, g;
    int64_t sequence; /* of the cache; -1: none */
    int64_t tokens;   /* new ones */
    int64_t committed;
    int64_t queries; /* queries with a token; the others get empty rows */
    int32_t seen;    /* tokens before the new ones */
} decode_head;

decode_head fdma_decode_head(const fdma_problem *problem, int64_t b, int64_t g);

/* Selection of the keys of one kv head: rows of the cache first, then new tokens. */
typedef struct head_selection {
    int32_t *expiry; /* [rows + new_len] */
    int32_t *slot;   /* [rows + new_len] */
    void *bias;      /* [new_len] of the scores' dtype */
} head_selection;

head_selection fdma_take_selection(fdma_arena *arena, const fdma_problem *problem);

/* The pages of a sequence, if the cache has any. */
key_pages fdma_pages_of_sequence(const fdma_cache *cache, int64_t sequence);

/* Hides the keys whose pages are missing from all queries. */
void fdma_hide_missing_rows(const decode_head *head, const head_selection *selection);

void fdma_fill_bias(const decode_head *head, const head_selection *selection);

/* Sets `one` to the problem of fdma_forward() for the queries of one head, with expiry and bias
 * from `selection`. */
void fdma_decode_forward(const decode_head *head, const head_selection *selection,
                         fdma_problem *one);

/* Writes empty rows of out and lse for queries without a token. */
void fdma_clear_queries(const decode_head *head);

/* Puts the committed tokens into their rows, in order: each overwrites the key that it evicts. */
void fdma_commit_tokens(const decode_head *head, const head_selection *selection);

/* Counts the committed tokens of every stream, once all heads have been committed. */
void fdma_count_committed(const fdma_problem *problem);

/* ---- store ---- */

/* A prompt of fdma_cache_store(): a batch entry, or one of the packed sequences. */
typedef struct stored_prompt {
    int64_t b;
    int64_t first, end; /* its keys in the call */
    int64_t sequence;   /* of the cache; -1: none */
    int32_t seen;       /* tokens of the sequence before it */
} stored_prompt;

static inline int64_t count_prompts(const fdma_problem *problem) {
    return is_present(&problem->starts) ? problem->starts.shape[0] - 1 : problem->batch;
}

stored_prompt fdma_stored_prompt(const fdma_problem *problem, int64_t n);

/* Puts the kept keys of one kv head into their rows, and empties the rows that no key has. */
void fdma_store_kept_keys(const fdma_problem *problem, const stored_prompt *prompt, int64_t g);

/* Counts the tokens of every prompt, once all heads have been stored. */
void fdma_count_stored(const fdma_problem *problem);
