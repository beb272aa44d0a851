/* paged_cache.h - a cache whose rows lie in pages, beside the same cache without pages. */
#pragma once

#include "cached_stream.h"

enum { spare_pages = 3 };

/* A cache in pages. Page `column` of sequence s, once it has one, is number[s * columns +
 * column]. */
typedef struct paged_cache {
    fdma_cache cache;
    int64_t page_len, columns, pages;
    int32_t *number; /* [pages]: all of them, in any order; the last ones have no sequence */
} paged_cache;

static inline int64_t rows_of(const fdma_cache *cache) { return cache->window + cache->recent; }

static inline int32_t *entry_of(const paged_cache *paged, int64_t s, int64_t column) {
    const fdma_tensor *const table = &paged->cache.page_table;
    return (int32_t *)table->data + s * table->stride[0] + column;
}

/* A pool full of NaN. Either the rows of a head are adjacent or the heads of a row. */
static inline fdma_tensor new_pool(const paged_cache *paged, bool rows_adjacent) {
    const int64_t dim = paged->cache.head_dim, len = paged->page_len;
    fdma_tensor pool = fdma_tensor_4d(NULL, paged->cache.dtype, paged->pages, len, kv_heads, dim);
    pool.data = test_alloc_guarded(bytes_of(pool));
    memset(pool.data, 0xff, bytes_of(pool));
    if (rows_adjacent)
        pool.stride[1] = dim, pool.stride[2] = len * dim;
    return pool;
}

static inline void shuffle(int32_t *numbers, int64_t count, uint64_t *state) {
    for (int64_t n = 0; n < count; n++)
        numbers[n] = (int32_t)n;
    for (int64_t n = count - 1; n > 0; n--) {
        const int64_t other = random_below(state, n + 1);
        const int32_t swapped = numbers[n];
        numbers[n] = numbers[other];
        numbers[other] = swapped;
    }
}

/* The same cache in pages, with every page missing. */
static inline paged_cache new_paged(const stream_case *test, fdma_dtype dtype, int64_t page_len,
                                    uint64_t *state) {
    const int64_t rows = test->window + test->recent;
    paged_cache paged = {.cache = new_cache(test, dtype), .page_len = page_len};
    fdma_cache *const cache = &paged.cache;
    size_t bytes = 0;
    paged.columns = (rows + page_len - 1) / page_len + random_below(state, 2);
    paged.pages = sequences * paged.columns + spare_pages;
    paged.number = test_alloc((size_t)paged.pages * sizeof *paged.number);
    shuffle(paged.number, paged.pages, state);
    cache->k = new_pool(&paged, random_below(state, 2) == 0);
    cache->v = new_pool(&paged, random_below(state, 2) == 0);
    cache->page_table = fdma_tensor_2d(NULL, FDMA_INT32, sequences, paged.columns);
    cache->page_table.data = test_alloc_guarded(bytes_of(cache->page_table));
    memset(cache->page_table.data, 0xff, bytes_of(cache->page_table)); // -1
    const fdma_cache before = *cache;
    CHECK_OK(fdma_cache_bytes(cache, &bytes));
    void *const memory = test_alloc_guarded(bytes);
    memset(memory, 0xff, bytes);
    CHECK_OK(fdma_cache_init(cache, memory));
    CHECK_BYTES(&cache->k, &before.k, sizeof before.k);
    CHECK_BYTES(&cache->v, &before.v, sizeof before.v);
    CHECK_BYTES(&cache->page_table, &before.page_table, sizeof before.page_table);
    return paged;
}

/* Gives a sequence the pages for its first `tokens` tokens, and removes the pages beyond them. */
static inline void give_pages(const paged_cache *paged, int64_t s, int64_t tokens) {
    const int64_t rows = rows_of(&paged->cache), filled = tokens < rows ? tokens : rows;
    for (int64_t column = 0; column < paged->columns; column++)
        *entry_of(paged, s, column) =
            column * paged->page_len < filled ? paged->number[s * paged->columns + column] : -1;
}

static inline int32_t seen_of(const fdma_cache *cache, int64_t s) {
    return ((const int32_t *)cache->table.seen.data)[s];
}

static inline void check_same_sequence(const fdma_cache *plain, const paged_cache *paged,
                                       int64_t s) {
    const fdma_cache *const cache = &paged->cache;
    const size_t bytes = (size_t)plain->head_dim * dtype_size(plain->dtype);
    const int64_t rows = rows_of(plain), len = paged->page_len;
    CHECK_INT(seen_of(cache, s), seen_of(plain, s));
    for (int64_t n = 0; n < kv_heads * rows; n++) {
        const int64_t g = n / rows, row = n % rows, page = *entry_of(paged, s, row / len);
        const int32_t position = int_at(plain->table.position, s, g, row);
        CHECK_INT(int_at(cache->table.position, s, g, row), position);
        if (position < 0)
            continue;
        CHECK_BYTES(address(cache->table.score, s, g, row), address(plain->table.score, s, g, row),
                    4);
        CHECK_BYTES(address(cache->bias, s, g, row), address(plain->bias, s, g, row), 4);
        CHECK_BYTES(address(cache->k, page, row % len, g), address(plain->k, s, row, g), bytes);
        CHECK_BYTES(address(cache->v, page, row % len, g), address(plain->v, s, row, g), bytes);
    }
}

static inline int holds_poison(fdma_tensor pool, int64_t page, int64_t row) {
    const size_t bytes = (size_t)pool.shape[3] * dtype_size(pool.dtype);
    int poisoned = 1;
    for (int64_t g = 0; g < kv_heads; g++)
        for (size_t byte = 0; byte < bytes; byte++)
            poisoned &= (unsigned char)address(pool, page, row, g)[byte] == 0xff;
    return poisoned;
}

/* Checks that nothing was written to pages of no sequence, nor to rows of no sequence. */
static inline void check_poison(const paged_cache *paged) {
    for (int64_t n = 0; n < paged->pages * paged->page_len; n++) {
        const int64_t at = n / paged->page_len, in_page = n % paged->page_len;
        const int64_t row = at % paged->columns * paged->page_len + in_page;
        if (at < sequences * paged->columns && row < rows_of(&paged->cache))
            continue;
        CHECK(holds_poison(paged->cache.k, paged->number[at], in_page));
        CHECK(holds_poison(paged->cache.v, paged->number[at], in_page));
    }
}
