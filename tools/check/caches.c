/* See check/caches.h. */
#include "check/caches.h"

#include "common/arrays.h"

#include <math.h>

enum { cache_tensors = 6, copied_sequences = 5 };

/* Copies to sequences 3, 0, 1 and 4; sequence 2 stays as it is. */
static const int32_t copied_from[] = {1, 3, -1, 1}, copied_to[] = {3, 0, 1, 4};

enum { copies = sizeof copied_from / sizeof copied_from[0] };

bool check_has_cache(const check_case *test) {
    return test->batch > 0 && test->sequences != 0 && test->mask == MASK_CAUSAL &&
           check_is_selected(test) && check_gap(test) == 0 && // caches know no gap
           test->recent <= test->kv_len && test->window <= test->kv_len;
}

/* Fills the cache before the call: sequence s has a key in s quarters of its rows. */
static void fill_cache(const check_case *test, fdma_cache *cache) {
    const int64_t rows = cache->k.shape[1];
    uint64_t random = check_seed(test) + 3;
    check_fill_normal(cache->k, &random, 1);
    check_fill_normal(cache->v, &random, 1);
    check_fill_normal(cache->bias, &random, 1);
    check_fill_normal(cache->table.score, &random, 1);
    for (int64_t n = 0; n < element_count(&cache->table.position); n++) {
        const int64_t s = n / rows / test->kv_heads, row = n % rows;
        ((int32_t *)cache->table.position.data)[n] = row < rows * s / 4 ? (int32_t)row : -1;
    }
    for (int64_t s = 0; s < cache->sequences; s++)
        ((int32_t *)cache->table.seen.data)[s] = (int32_t)(rows * s / 4);
}

/* ---- pages ---- */

/* The page that has a row of a cache: the last page has the first rows. */
static int64_t page_of(const fdma_cache *paged, int64_t s, int64_t row) {
    const int64_t columns = paged->page_table.shape[1];
    return ((const int32_t *)paged->page_table.data)[s * columns + row / paged->k.shape[1]];
}

/* Copies k or v between a pool and a tensor [sequences, rows, kv_heads, head_dim]. */
static void copy_rows(const fdma_cache *paged, fdma_tensor pool, fdma_tensor rows, bool to_pool) {
    const int64_t len = paged->k.shape[1], count = rows.shape[1],
                  inner = rows.shape[2] * rows.shape[3];
    const double *const values = check_widen(to_pool ? rows : pool);
    for (int64_t n = 0; n < rows.shape[0] * count; n++) {
        const int64_t row = n % count, at = page_of(paged, n / count, row) * len + row % len;
        for (int64_t x = 0; x < inner; x++)
            if (to_pool)
                check_store(pool, at * inner + x, values[n * inner + x]);
            else
                check_store(rows, n * inner + x, values[at * inner + x]);
    }
}

fdma_cache check_in_pages(const check_problem *problem, const fdma_cache *cache) {
    const check_case *const test = problem->test;
    const int64_t len = check_page_len(test);
    if (len == 0)
        return *cache;
    const int64_t columns = (cache->k.shape[1] + len - 1) / len, pages = cache->sequences * columns;
    const int64_t table_shape[2] = {cache->sequences, columns};
    const int64_t pool_shape[4] = {pages, len, test->kv_heads, test->head_dim};
    fdma_cache paged = *cache;
    paged.k = check_layout_tensor(cache->dtype, test->layout, pool_shape);
    paged.v = check_layout_tensor(cache->dtype, test->layout, pool_shape);
    paged.page_table = check_tensor(FDMA_INT32, 2, table_shape);
    for (int64_t n = 0; n < pages; n++)
        ((int32_t *)paged.page_table.data)[n] = (int32_t)(pages - 1 - n);
    check_fill(paged.k, (double)NAN);
    check_fill(paged.v, (double)NAN);
    copy_rows(&paged, paged.k, cache->k, true);
    copy_rows(&paged, paged.v, cache->v, true);
    return paged;
}

/* ---- one call ---- */

static fdma_tensor list_of(const int32_t *numbers, int64_t count) {
    const fdma_tensor list = check_tensor(FDMA_INT32, 1, &count);
    for (int64_t n = 0; n < count; n++)
        ((int32_t *)list.data)[n] = numbers[n];
    return list;
}

/* Runs a kernel on a cache of its own, and returns the cache's tensors. */
static fdma_status run(const check_problem *problem, check_operation_id id, const char *kernel,
                       bool in_pages, fdma_tensor tensors[cache_tensors]) {
    const check_case *const test = problem->test;
    const int64_t stored = check_is_packed(test) ? test->sequences : test->batch;
    fdma_cache cache =
        check_empty_cache(problem, id == CHECK_CACHE_COPY ? copied_sequences : stored);
    fill_cache(test, &cache);
    check_problem given = *problem;
    given.cache = in_pages ? check_in_pages(problem, &cache) : cache;
    given.from = list_of(copied_from, copies);
    given.to = list_of(copied_to, copies);
    const fdma_tensor all[cache_tensors] = {
        given.cache.k,
        given.cache.v,
        given.cache.bias,
        given.cache.table.score,
        given.cache.table.position,
        given.cache.table.seen,
    };
    for (int t = 0; t < cache_tensors; t++)
        tensors[t] = all[t];
    const fdma_status status = check_run(&given, id, kernel, tensors);
    if (given.cache.page_table.rank > 0) {
        copy_rows(&given.cache, tensors[0], cache.k, false);
        copy_rows(&given.cache, tensors[1], cache.v, false);
        tensors[0] = cache.k, tensors[1] = cache.v;
    }
    return status;
}

/* exp() may differ in the last bit. */
static check_error compare_bias(fdma_tensor found, fdma_tensor expected) {
    double *const want = check_widen(expected);
    const check_result result = {
        .count = element_count(&expected), .reference = want, .plain = want};
    return check_compare("cache.bias", &result, found);
}

fdma_status check_judge_cache(const check_problem *problem, check_operation_id id,
                              const char *kernel, check_error *error) {
    static const char *const names[cache_tensors] = {
        "cache.k",         "cache.v", "cache.bias", "cache.table.score", "cache.table.position",
        "cache.table.seen"};
    fdma_tensor found[cache_tensors], expected[cache_tensors];
    fdma_status status = run(problem, id, "reference", false, expected);
    if (status == FDMA_OK)
        status = run(problem, id, kernel, true, found);
    if (status != FDMA_OK)
        return status;
    *error = compare_bias(found[2], expected[2]);
    for (int t = 0; t < cache_tensors; t++)
        if (t != 2)
            *error = check_worse(*error, check_compare_exact(names[t], found[t], expected[t]));
    return FDMA_OK;
}
