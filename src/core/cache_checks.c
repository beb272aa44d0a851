/* The checks of caches, and of decode calls against theirs. */
#include "core/cache.h"
#include "core/error.h"

fdma_status fdma_check_cache(const fdma_cache *cache) {
    FDMA_REQUIRE(cache != NULL, FDMA_INVALID_ARGUMENT, "cache: is NULL, want a struct");
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

/* Scores, the caller's and the cache's, and the bias have one dtype. A dt_bias beside a score that
 * is given would have no effect. */
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

fdma_status fdma_check_decode(const fdma_problem *problem) {
    const fdma_cache *const cache = &problem->cache;
    FDMA_TRY(fdma_check_cache(cache));
    FDMA_TRY(check_score(problem));
    FDMA_REQUIRE(problem->exec.device == cache->device, FDMA_INVALID_ARGUMENT,
                 "cache: its device is %s, want exec.device, %s",
                 fdma_device_text(cache->device).text, fdma_device_text(problem->exec.device).text);
    FDMA_REQUIRE(problem->dtype == cache->dtype, FDMA_INVALID_ARGUMENT,
                 "cache: its dtype is %s, want that of q, %s", fdma_dtype_name(cache->dtype),
                 fdma_dtype_name(problem->dtype));
    FDMA_REQUIRE(problem->kv_heads == cache->kv_heads, FDMA_INVALID_ARGUMENT,
                 "cache: its kv_heads is %lld, want %lld", (long long)cache->kv_heads,
                 (long long)problem->kv_heads);
    FDMA_REQUIRE(problem->head_dim == cache->head_dim, FDMA_INVALID_ARGUMENT,
                 "cache: its head_dim is %lld, want %lld", (long long)cache->head_dim,
                 (long long)problem->head_dim);
    FDMA_REQUIRE(problem->carried_len == rows_of_cache(cache), FDMA_INVALID_ARGUMENT,
                 "cache.k: axis 1 has %lld elements, want window + recent, %lld",
                 (long long)problem->carried_len, (long long)rows_of_cache(cache));
    FDMA_REQUIRE(problem->new_len <= most_new_tokens, FDMA_INVALID_ARGUMENT,
                 "k: axis 1 has %lld elements, want at most %d tokens", (long long)problem->new_len,
                 most_new_tokens);
    FDMA_REQUIRE(problem->q_len <= problem->new_len, FDMA_INVALID_ARGUMENT,
                 "q_len: is %lld, want at most the new tokens, %lld", (long long)problem->q_len,
                 (long long)problem->new_len);
    FDMA_REQUIRE(is_present(&problem->index) || problem->batch <= cache->sequences,
                 FDMA_INVALID_ARGUMENT,
                 "batch: is %lld, want at most the sequences of the cache, %lld, without index",
                 (long long)problem->batch, (long long)cache->sequences);
    return FDMA_OK;
}

static fdma_status check_number(const char *name, int64_t b, int64_t number, int64_t least,
                                int64_t most) {
    FDMA_REQUIRE(number >= least && number <= most, FDMA_INVALID_ARGUMENT,
                 "%s: element %lld is %lld, want %lld to %lld", name, (long long)b,
                 (long long)number, (long long)least, (long long)most);
    return FDMA_OK;
}

fdma_status fdma_check_decode_lists(const fdma_problem *problem) {
    const fdma_cache *const cache = &problem->cache;
    for (int64_t b = 0; b < problem->batch; b++) {
        const int64_t sequence = number_of_stream(&problem->index, b, b);
        const int64_t tokens = number_of_stream(&problem->n_tokens, b, problem->new_len);
        const int64_t commit = number_of_stream(&problem->commit, b, tokens);
        FDMA_TRY(check_number("index", b, sequence, -1, cache->sequences - 1));
        FDMA_TRY(check_number("n_tokens", b, tokens, 0, problem->new_len));
        FDMA_TRY(check_number("commit", b, commit, 0, tokens));
        if (sequence >= 0)
            FDMA_TRY(check_number("cache.table.seen", sequence,
                                  ((const int32_t *)cache->table.seen.data)[sequence], 0,
                                  INT32_MAX - tokens));
    }
    return FDMA_OK;
}
