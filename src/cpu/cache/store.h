/* fdma_cache_store(): a task stores one kv head of one prompt, whose rows no other task writes. */
#pragma once

#include "cpu/cache/move.h"

#include "core/cache.h"

static void store_head_task(const void *context, int64_t index, int32_t thread) {
    const fdma_problem *const problem = context;
    const stored_prompt prompt = fdma_stored_prompt(problem, index / problem->kv_heads);
    (void)thread;
    if (prompt.sequence >= 0)
        fdma_store_kept_keys(problem, &prompt, index % problem->kv_heads);
}

static size_t cache_store_workspace(const fdma_problem *problem) {
    (void)problem;
    return 0;
}

static fdma_status run_cache_store(const fdma_problem *problem) {
    const int64_t tasks = count_prompts(problem) * problem->kv_heads;
    const int64_t rows = min(problem->new_len, rows_of_cache(&problem->cache));
    const int32_t threads = threads_to_move(problem, tasks, tasks * problem->kv_len, tasks * rows);
    fdma_parallel_for(threads, tasks, store_head_task, problem);
    fdma_count_stored(problem);
    return FDMA_OK;
}
