/* fdma_decode(): a task has one kv head of one stream. It finds the keys that the new tokens evict,
 * attends, and writes the committed tokens into rows of the cache that no other task reads. If
 * there are fewer tasks than threads, the tasks run in turn, and the threads share the splits of
 * each. */
#pragma once

#include "cpu/decode/decode.h"
#include "cpu/decode/evict.h"

typedef struct cached_context {
    const fdma_problem *problem;
    uint8_t *scratch; /* thread 0's; the other threads' follow at multiples of scratch_size */
    size_t scratch_size;
    int32_t threads;      /* threads that take tasks */
    int32_t head_threads; /* threads that attend within a task */
} cached_context;

/* A head with as many tokens and queries as the call allows. Fewer keys may have more splits, so
 * the workspace must also suffice for them. */
static fdma_problem largest_head(const fdma_problem *problem, int32_t threads) {
    const head_selection none = {0};
    const decode_head head = {
        .problem = problem, .tokens = problem->new_len, .queries = problem->q_len};
    fdma_problem one = fdma_decode_forward(&head, &none);
    one.exec.workspace = NULL;
    one.exec.threads = threads;
    one.any_len = true;
    return one;
}

static size_t plan_cached(const fdma_problem *problem, cached_context *context) {
    const int64_t tasks = problem->batch * problem->kv_heads;
    const int64_t row_bytes = problem->head_dim * (int64_t)fdma_dtype_size(problem->dtype);
    const int32_t threads =
        threads_to_read(problem, INT64_MAX, 2 * tasks * problem->kv_len * row_bytes);
    const bool in_turn = tasks < threads;
    fdma_arena arena = fdma_arena_of(problem), own = {0};
    fdma_take_selection(&own, problem);
    take_live_rows(&own, problem);
    *context = (cached_context){
        .problem = problem,
        .threads = in_turn ? 1 : threads,
        .head_threads = in_turn ? threads : 1,
    };
    const fdma_problem one = largest_head(problem, context->head_threads);
    context->scratch_size = own.used + decode_workspace(&one);
    context->scratch_size = (size_t)round_up((int64_t)context->scratch_size, arena_alignment);
    context->scratch = fdma_arena_take(&arena, context->scratch_size * (size_t)context->threads);
    return fdma_arena_size(&arena);
}

/* Prefetches the first rows of attention while the tokens' rows are being found. */
static void prefetch_first_rows(const decode_head *head) {
    const fdma_cache *const cache = &head->problem->cache;
    const int64_t bytes = cache->head_dim * (int64_t)fdma_dtype_size(cache->dtype);
    for (int64_t row = 0; row < min(head->problem->carried_len, decode_keys); row++) {
        const key_indices at = indices_of_row(cache, head->sequence, row);
        if (at.first < 0)
            continue;
        const void *const rows[] = {head_row(&cache->k, at.first, at.row, head->g),
                                    head_row(&cache->v, at.first, at.row, head->g)};
        for (int64_t byte = 0; byte < bytes; byte += 64)
            prefetch_rows(rows, 2, byte);
    }
}

static void decode_head_task(const void *context, int64_t index, int32_t thread) {
    const cached_context *const cached = context;
    const fdma_problem *const problem = cached->problem;
    const decode_head head =
        fdma_decode_head(problem, index / problem->kv_heads, index % problem->kv_heads);
    fdma_arena arena = scratch_of_thread(cached->scratch, cached->scratch_size, thread);
    const head_selection selection = fdma_take_selection(&arena, problem);
    live_rows live = take_live_rows(&arena, problem);
    fdma_clear_queries(&head);
    if (head.sequence < 0 || head.tokens == 0)
        return;
    prefetch_first_rows(&head);
    evict_keys(&head, &live, &selection);
    fdma_hide_missing_rows(&head, &selection);
    fdma_fill_bias(&head, &selection);
    fdma_problem one = fdma_decode_forward(&head, &selection);
    one.exec.workspace = arena.base + arena.used;
    one.exec.threads = cached->head_threads;
    if (head.queries > 0)
        run_decode(&one);
    fdma_commit_tokens(&head, &selection);
}

static size_t cached_workspace(const fdma_problem *problem) {
    cached_context context;
    return plan_cached(problem, &context);
}

static fdma_status run_cached(const fdma_problem *problem) {
    cached_context context;
    plan_cached(problem, &context);
    fdma_parallel_for(context.threads, problem->batch * problem->kv_heads, decode_head_task,
                      &context);
    fdma_count_committed(problem);
    return FDMA_OK;
}
