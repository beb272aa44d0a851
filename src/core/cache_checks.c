/* Checks of caches, and of calls against their cache. */
#include "core/cache.h"
#include "core/error.h"
#include "core/integers.h"

#include <string.h>

fdma_status fdma_check_cache(const fdma_cache *cache) {
    FDMA_REQUIRE(cache != NULL, FDMA_INVALID_ARGUMENT, "cache: is NULL, want a struct");
    FDMA_TRY(fdma_check_reserved("cache", cache->reserved, sizeof cache->reserved));
    FDMA_TRY(
        fdma_check_reserved("cache.table", cache->table.reserved, sizeof cache->table.reserved));
    FDMA_REQUIRE(cache->sequences >= 1 && cache->sequences <= INT32_MAX, FDMA_INVALID_ARGUMENT,
                 "cache: its sequences is %lld, want 1 to %d", (long long)cache->sequences,
                 INT32_MAX);
    FDMA_REQUIRE(cache->kv_heads >= 1 && cache->kv_heads <= INT32_MAX, FDMA_INVALID_ARGUMENT,
                 "cache: its kv_heads is %lld, want 1 to %d", (long long)cache->kv_heads,
                 INT32_MAX);
    FDMA_REQUIRE(cache->head_dim >= 8 && cache->head_dim <= 256 && cache->head_dim % 8 == 0,
                 FDMA_UNSUPPORTED,
                 "cache: its head_dim is %lld, supported: multiples of 8 from 8 to 256",
                 (long long)cache->head_dim);
    FDMA_REQUIRE(cache->window >= 1 && cache->window <= INT32_MAX / 2, FDMA_INVALID_ARGUMENT,
                 "cache: its window is %lld, want 1 to %d", (long long)cache->window,
                 INT32_MAX / 2);
    FDMA_REQUIRE(cache->recent >= 0 && cache->recent <= INT32_MAX / 2, FDMA_INVALID_ARGUMENT,
                 "cache: its recent is %lld, want 0 to %d", (long long)cache->recent,
                 INT32_MAX / 2);
    FDMA_REQUIRE(cache->sinks >= 0 && cache->sinks <= cache->window, FDMA_INVALID_ARGUMENT,
                 "cache: its sinks is %lld, want 0 to its window, %lld", (long long)cache->sinks,
                 (long long)cache->window);
    FDMA_REQUIRE(cache->dtype >= FDMA_FLOAT32 && cache->dtype <= FDMA_FLOAT64, FDMA_UNSUPPORTED,
                 "cache: its dtype is %s, supported: float32, float16, bfloat16, float64",
                 fdma_dtype_name(cache->dtype));
    FDMA_REQUIRE(cache->device >= 0, FDMA_INVALID_ARGUMENT,
                 "cache: its device is %d, want FDMA_CPU or FDMA_CUDA(n)", cache->device);
    return FDMA_OK;
}

static fdma_status check_int_tensor(const char *name, const fdma_tensor *tensor, int32_t rank,
                                    const int64_t *shape) {
    FDMA_TRY(fdma_check_form(name, tensor, rank, takes_int32));
    for (int axis = 0; axis < rank; axis++)
        FDMA_REQUIRE(tensor->shape[axis] == shape[axis], FDMA_INVALID_ARGUMENT,
                     "%s: axis %d has %lld elements, want %lld", name, axis,
                     (long long)tensor->shape[axis], (long long)shape[axis]);
    return fdma_check_layout(name, tensor, true, true);
}

fdma_status fdma_check_cache_positions(const fdma_cache *cache) {
    const int64_t shape[] = {cache->sequences, cache->kv_heads, rows_of_cache(cache)};
    FDMA_TRY(fdma_check_cache(cache));
    FDMA_TRY(check_int_tensor("cache.table.position", &cache->table.position, 3, shape));
    return check_int_tensor("cache.table.seen", &cache->table.seen, 1, shape);
}

/* The caller's scores, the cache's scores and the bias have one dtype. With given scores dt_bias
 * would have no effect. */
static fdma_status check_score(const fdma_problem *problem) {
    const bool given = is_present(&problem->score);
    const fdma_dtype dtype = problem->cache.table.score.dtype;
    FDMA_REQUIRE(problem->cache.bias.dtype == dtype, FDMA_INVALID_ARGUMENT,
                 "cache.bias: dtype is %s, want that of cache.table.score, %s",
                 fdma_dtype_name(problem->cache.bias.dtype), fdma_dtype_name(dtype));
    FDMA_REQUIRE(!given || problem->score.dtype == dtype, FDMA_INVALID_ARGUMENT,
                 "score: dtype is %s, want that of cache.table.score, %s",
                 fdma_dtype_name(problem->score.dtype), fdma_dtype_name(dtype));
    FDMA_REQUIRE(!given || !is_present(&problem->dt_bias), FDMA_INVALID_ARGUMENT,
                 "dt_bias: is given, want none with score");
    return FDMA_OK;
}

static fdma_status check_rule(const char *rule, int64_t of_selection, int64_t of_cache) {
    FDMA_REQUIRE(of_selection == of_cache, FDMA_INVALID_ARGUMENT,
                 "selection: its %s is %lld, want that of the cache, %lld", rule,
                 (long long)of_selection, (long long)of_cache);
    return FDMA_OK;
}

fdma_status fdma_check_cache_rules(const fdma_problem *problem) {
    const fdma_cache *const cache = &problem->cache;
    FDMA_REQUIRE(problem->scope == FDMA_SCOPE_CAUSAL, FDMA_INVALID_ARGUMENT,
                 "selection: its scope is global, want causal for a cache");
    FDMA_REQUIRE(problem->gap == 0, FDMA_INVALID_ARGUMENT,
                 "selection: its gap is %g, want 0 for a cache", problem->gap);
    FDMA_TRY(check_rule("window", problem->window, cache->window));
    FDMA_TRY(check_rule("recent", problem->recent, cache->recent));
    return check_rule("sinks", problem->sinks, cache->sinks);
}

static fdma_status check_decode(const fdma_problem *problem) {
    FDMA_REQUIRE(problem->new_len <= most_new_tokens, FDMA_INVALID_ARGUMENT,
                 "k: axis 1 has %lld elements, want at most %d tokens", (long long)problem->new_len,
                 most_new_tokens);
    FDMA_REQUIRE(problem->q_len <= problem->new_len, FDMA_INVALID_ARGUMENT,
                 "q_len: is %lld, want at most the new tokens, %lld", (long long)problem->q_len,
                 (long long)problem->new_len);
    return FDMA_OK;
}

static fdma_status check_store(const fdma_problem *problem) {
    const int64_t starts = problem->starts.shape[0], most = problem->cache.sequences + 1;
    if (!is_present(&problem->starts))
        return FDMA_OK;
    FDMA_REQUIRE(problem->carried_len == 0, FDMA_INVALID_ARGUMENT,
                 "starts: is given, want none with carried keys in the selection");
    FDMA_REQUIRE(is_present(&problem->index) || starts <= most, FDMA_INVALID_ARGUMENT,
                 "starts: axis 0 has %lld elements, want at most %lld without index",
                 (long long)starts, (long long)most);
    return FDMA_OK;
}

/* Checks k alone: the pools of k and v have the same sizes. */
static fdma_status check_pages(const fdma_problem *problem) {
    const fdma_tensor *const table = &problem->cache.page_table;
    const int64_t rows = rows_of_cache(&problem->cache), page_len = problem->page_len;
    FDMA_REQUIRE(page_len >= 1 && (page_len & (page_len - 1)) == 0, FDMA_INVALID_ARGUMENT,
                 "cache.k: axis 1 has %lld elements, want a power of 2 with page_table",
                 (long long)page_len);
    FDMA_REQUIRE(problem->cache.bias.shape[2] == rows, FDMA_INVALID_ARGUMENT,
                 "cache.bias: axis 2 has %lld elements, want window + recent, %lld",
                 (long long)problem->cache.bias.shape[2], (long long)rows);
    FDMA_REQUIRE(table->shape[1] >= divide_up(rows, page_len), FDMA_INVALID_ARGUMENT,
                 "cache.page_table: axis 1 has %lld elements, want %lld or more pages of %lld rows",
                 (long long)table->shape[1], (long long)divide_up(rows, page_len),
                 (long long)page_len);
    return FDMA_OK;
}

static fdma_status check_rows(const fdma_cache *cache) {
    FDMA_REQUIRE(cache->k.shape[1] == rows_of_cache(cache), FDMA_INVALID_ARGUMENT,
                 "cache.k: axis 1 has %lld elements, want window + recent, %lld",
                 (long long)cache->k.shape[1], (long long)rows_of_cache(cache));
    return FDMA_OK;
}

fdma_status fdma_check_cache_sizes(const fdma_problem *problem) {
    const fdma_cache *const cache = &problem->cache;
    const bool copies = problem->operation == operation_cache_copy;
    const bool stores = problem->operation == operation_cache_store;
    FDMA_TRY(check_score(problem));
    FDMA_REQUIRE(problem->exec.device == cache->device, FDMA_INVALID_ARGUMENT,
                 "cache: its device is %s, want exec.device, %s",
                 fdma_device_text(cache->device).text, fdma_device_text(problem->exec.device).text);
    FDMA_REQUIRE(problem->dtype == cache->dtype, FDMA_INVALID_ARGUMENT,
                 "cache: its dtype is %s, want that of cache.k, %s", fdma_dtype_name(cache->dtype),
                 fdma_dtype_name(problem->dtype));
    FDMA_REQUIRE(problem->kv_heads == cache->kv_heads, FDMA_INVALID_ARGUMENT,
                 "cache: its kv_heads is %lld, want %lld", (long long)cache->kv_heads,
                 (long long)problem->kv_heads);
    FDMA_REQUIRE(problem->head_dim == cache->head_dim, FDMA_INVALID_ARGUMENT,
                 "cache: its head_dim is %lld, want %lld", (long long)cache->head_dim,
                 (long long)problem->head_dim);
    FDMA_TRY(has_pages(cache) ? check_pages(problem) : check_rows(cache));
    if (problem->operation == operation_decode)
        FDMA_TRY(check_decode(problem));
    FDMA_REQUIRE(copies || is_present(&problem->index) || problem->batch <= cache->sequences,
                 FDMA_INVALID_ARGUMENT,
                 "batch: is %lld, want at most the sequences of the cache, %lld, without index",
                 (long long)problem->batch, (long long)cache->sequences);
    FDMA_REQUIRE(!copies || problem->batch <= cache->sequences, FDMA_INVALID_ARGUMENT,
                 "to: axis 0 has %lld elements, want at most the sequences of the cache, %lld",
                 (long long)problem->batch, (long long)cache->sequences);
    return stores ? check_store(problem) : FDMA_OK;
}

static fdma_status check_number(const char *name, int64_t b, int64_t number, int64_t least,
                                int64_t most) {
    FDMA_REQUIRE(number >= least && number <= most, FDMA_INVALID_ARGUMENT,
                 "%s: element %lld is %lld, want %lld to %lld", name, (long long)b,
                 (long long)number, (long long)least, (long long)most);
    return FDMA_OK;
}

/* Checks that `tokens` more can be counted. */
static fdma_status check_seen(const fdma_cache *cache, int64_t sequence, int64_t tokens) {
    return check_number("cache.table.seen", sequence,
                        ((const int32_t *)cache->table.seen.data)[sequence], 0, INT32_MAX - tokens);
}

static fdma_status check_decode_lists(const fdma_problem *problem) {
    const fdma_cache *const cache = &problem->cache;
    for (int64_t b = 0; b < problem->batch; b++) {
        const int64_t sequence = number_of_stream(&problem->index, b, b);
        const int64_t tokens = number_of_stream(&problem->n_tokens, b, problem->new_len);
        const int64_t commit = number_of_stream(&problem->commit, b, tokens);
        FDMA_TRY(check_number("index", b, sequence, -1, cache->sequences - 1));
        FDMA_TRY(check_number("n_tokens", b, tokens, 0, problem->new_len));
        FDMA_TRY(check_number("commit", b, commit, 0, tokens));
        if (sequence >= 0)
            FDMA_TRY(check_seen(cache, sequence, tokens));
    }
    return FDMA_OK;
}

static fdma_status check_store_lists(const fdma_problem *problem) {
    const fdma_cache *const cache = &problem->cache;
    for (int64_t n = 0; n < count_prompts(problem); n++) {
        const int64_t sequence = number_of_stream(&problem->index, n, n);
        FDMA_TRY(check_number("index", n, sequence, -1, cache->sequences - 1));
        if (sequence >= 0 && problem->carried_len > 0)
            FDMA_TRY(check_seen(cache, sequence, problem->new_len));
    }
    return FDMA_OK;
}

/* Checks that no sequence occurs twice. Goes over ranges of 32768 sequences with one bit each,
 * because a call allocates nothing. */
static fdma_status check_distinct(const char *name, const fdma_tensor *list, int64_t sequences) {
    enum { range_len = 1 << 15 };
    const int32_t *const numbers = list->data;
    uint8_t found[range_len / 8];
    for (int64_t first = 0; first < sequences; first += range_len) {
        memset(found, 0, sizeof found);
        for (int64_t n = 0; n < list->shape[0]; n++) {
            const int64_t at = numbers[n] - first;
            if (at < 0 || at >= range_len)
                continue;
            FDMA_REQUIRE((found[at / 8] >> at % 8 & 1) == 0, FDMA_INVALID_ARGUMENT,
                         "%s: element %lld is %d, want a number that it has only once", name,
                         (long long)n, numbers[n]);
            found[at / 8] |= (uint8_t)(1 << at % 8);
        }
    }
    return FDMA_OK;
}

static fdma_status check_copy_lists(const fdma_problem *problem) {
    const int64_t last = problem->cache.sequences - 1;
    for (int64_t n = 0; n < problem->batch; n++) {
        FDMA_TRY(check_number("from", n, ((const int32_t *)problem->from.data)[n], -1, last));
        FDMA_TRY(check_number("to", n, ((const int32_t *)problem->to.data)[n], 0, last));
    }
    return check_distinct("to", &problem->to, problem->cache.sequences);
}

fdma_status fdma_check_cache_lists(const fdma_problem *problem) {
    if (problem->operation == operation_decode)
        return check_decode_lists(problem);
    return problem->operation == operation_cache_store ? check_store_lists(problem)
                                                       : check_copy_lists(problem);
}
