/* Prompts that enter a cache, and copies of its sequences. */
#pragma once

#include "core/cache.h"
#include "cpu/common/memory.h"
#include "cpu/parallel.h"

#include <string.h>

/* Approximate work of one thread in a microsecond: positions or expiries that are read, and bytes
 * of k and v that are moved. */
enum { seen_keys = 1000, moved_bytes = 5000 };

static inline int32_t threads_to_move(const fdma_problem *problem, int64_t tasks, int64_t keys,
                                      int64_t rows) {
    const int64_t row_bytes = 2 * problem->head_dim * (int64_t)fdma_dtype_size(problem->dtype);
    return fdma_worthwhile_threads(problem->exec.threads, tasks,
                                   keys / seen_keys + rows * row_bytes / moved_bytes);
}

/* ---- store ---- */

/* fdma_cache_store(): a task stores one kv head of one prompt, whose rows no other task writes. */

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
    fdma_parallel_for(problem->exec.parallel, threads, tasks, store_head_task, problem);
    fdma_count_stored(problem);
    return FDMA_OK;
}

/* ---- copy ---- */

/* fdma_cache_copy(): a task copies some rows of one kv head, of every sequence. All sequences are
 * read before any is written; this is done for a slice of one row at a time, so that the copies
 * need little memory. */

enum {
    task_rows = 64,
    slice_bytes = 256, // bytes of a row; a slice of each sequence is read in one go
};

typedef struct copy_context {
    const fdma_problem *problem;
    int64_t row_tasks; /* tasks of each kv head */
    int32_t threads;
    uint8_t *scratch; /* thread 0's; the other threads' follow at multiples of scratch_size */
    size_t scratch_size;
} copy_context;

typedef struct row_copies {
    int32_t *position; /* [count]: of the copied sequences */
    int32_t *page;     /* [2, count]: the pages of the rows that are read and written */
    uint8_t *slices;   /* [count, slice_bytes] */
} row_copies;

/* The indices on the first axis of a tensor that rows are copied from and to. */
typedef struct copied_pairs {
    const int32_t *from, *to; /* [count] */
} copied_pairs;

static row_copies take_row_copies(fdma_arena *arena, const fdma_problem *problem) {
    row_copies copies;
    copies.position = take_ints(arena, problem->batch);
    copies.page = has_pages(&problem->cache) ? take_ints(arena, 2 * problem->batch) : NULL;
    copies.slices = fdma_arena_take(arena, (size_t)problem->batch * slice_bytes);
    return copies;
}

static int64_t copied_sequence(const fdma_tensor *list, int64_t n) {
    return ((const int32_t *)list->data)[n];
}

/* Pairs of sequences, which are the first axis of every tensor without pages. */
static copied_pairs copied_sequences(const fdma_problem *problem) {
    return (copied_pairs){problem->from.data, problem->to.data};
}

/* Reads the positions of a row; -1 for an empty sequence. */
static void read_positions(const fdma_problem *problem, int64_t g, int64_t row,
                           const row_copies *copies) {
    for (int64_t n = 0; n < problem->batch; n++) {
        const int64_t from = copied_sequence(&problem->from, n);
        copies->position[n] = from < 0 ? -1 : *int_at(&problem->cache.table.position, from, g, row);
    }
}

/* Finds the pages of a row. The row becomes empty if one is missing; a sequence that is copied to
 * itself stays as it is. */
static copied_pairs find_pages(const fdma_problem *problem, int64_t row, const row_copies *copies) {
    const copied_pairs all = copied_sequences(problem);
    int32_t *const from = copies->page, *const to = copies->page + problem->batch;
    for (int64_t n = 0; n < problem->batch; n++) {
        from[n] = to[n] = 0;
        if (copies->position[n] < 0 || all.from[n] == all.to[n])
            continue;
        from[n] = (int32_t)indices_of_row(&problem->cache, all.from[n], row).first;
        to[n] = (int32_t)indices_of_row(&problem->cache, all.to[n], row).first;
        if (from[n] < 0 || to[n] < 0)
            copies->position[n] = -1;
    }
    return (copied_pairs){from, to};
}

static void write_positions(const fdma_problem *problem, int64_t g, int64_t row,
                            const row_copies *copies) {
    for (int64_t n = 0; n < problem->batch; n++)
        *int_at(&problem->cache.table.position, copied_sequence(&problem->to, n), g, row) =
            copies->position[n];
}

/* True if there is a key, and its row moves. */
static bool moves(copied_pairs pairs, const row_copies *copies, int64_t n) {
    return copies->position[n] >= 0 && pairs.from[n] != pairs.to[n];
}

/* Copies `count` elements of every sequence that has a key in this row. At index 0 of the
 * first axis they begin at `first`. */
static void copy_elements_of_row(const fdma_problem *problem, const fdma_tensor *tensor,
                                 copied_pairs pairs, int64_t first, int64_t count,
                                 const row_copies *copies) {
    const size_t size = fdma_dtype_size(tensor->dtype), bytes = (size_t)count * size;
    const size_t step = (size_t)tensor->stride[0] * size;
    uint8_t *const base = (uint8_t *)tensor->data + (size_t)first * size;
    for (size_t begin = 0; begin < bytes; begin += slice_bytes) {
        const size_t length = (size_t)min((int64_t)(bytes - begin), slice_bytes);
        for (int64_t n = 0; n < problem->batch; n++)
            if (moves(pairs, copies, n))
                memcpy(copies->slices + n * slice_bytes,
                       base + (size_t)pairs.from[n] * step + begin, length);
        for (int64_t n = 0; n < problem->batch; n++)
            if (moves(pairs, copies, n))
                memcpy(base + (size_t)pairs.to[n] * step + begin, copies->slices + n * slice_bytes,
                       length);
    }
}

static void copy_row(const fdma_problem *problem, int64_t g, int64_t row,
                     const row_copies *copies) {
    const fdma_cache *const cache = &problem->cache;
    const fdma_tensor *const bias = &cache->bias, *const score = &cache->table.score;
    const int64_t dim = problem->head_dim;
    const bool pages = has_pages(cache);
    const int64_t k = offset_of(&cache->k, 0, pages ? row % problem->page_len : row, g);
    const int64_t v = offset_of(&cache->v, 0, pages ? row % problem->page_len : row, g);
    const copied_pairs all = copied_sequences(problem);
    read_positions(problem, g, row, copies);
    const copied_pairs pairs = pages ? find_pages(problem, row, copies) : all;
    copy_elements_of_row(problem, &cache->k, pairs, k, dim, copies);
    copy_elements_of_row(problem, &cache->v, pairs, v, dim, copies);
    copy_elements_of_row(problem, bias, all, offset_of(bias, 0, g, row), 1, copies);
    copy_elements_of_row(problem, score, all, offset_of(score, 0, g, row), 1, copies);
    write_positions(problem, g, row, copies);
}

static void copy_rows_task(const void *context, int64_t index, int32_t thread) {
    const copy_context *const copy = context;
    const fdma_problem *const problem = copy->problem;
    const int64_t g = index / copy->row_tasks, first = index % copy->row_tasks * task_rows;
    const int64_t end = min(first + task_rows, rows_of_cache(&problem->cache));
    fdma_arena arena = scratch_of_thread(copy->scratch, copy->scratch_size, thread);
    const row_copies copies = take_row_copies(&arena, problem);
    for (int64_t row = first; row < end; row++)
        copy_row(problem, g, row, &copies);
}

/* Divides the workspace, and returns the bytes that the call needs of it. */
static size_t plan_copy(const fdma_problem *problem, copy_context *copy) {
    const int64_t rows = rows_of_cache(&problem->cache);
    fdma_arena arena = fdma_arena_of(problem), own = {0};
    take_row_copies(&own, problem);
    *copy = (copy_context){.problem = problem, .row_tasks = divide_up(rows, task_rows)};
    const int64_t copied = problem->batch * problem->kv_heads * rows;
    copy->threads = threads_to_move(problem, problem->kv_heads * copy->row_tasks, copied, copied);
    copy->scratch_size = own.used;
    copy->scratch = fdma_arena_take(&arena, own.used * (size_t)copy->threads);
    return fdma_arena_size(&arena);
}

static size_t cache_copy_workspace(const fdma_problem *problem) {
    copy_context copy;
    return plan_copy(problem, &copy);
}

static void copy_seen(const fdma_problem *problem, int32_t *numbers) {
    int32_t *const seen = problem->cache.table.seen.data;
    for (int64_t n = 0; n < problem->batch; n++) {
        const int64_t from = copied_sequence(&problem->from, n);
        numbers[n] = from < 0 ? 0 : seen[from];
    }
    for (int64_t n = 0; n < problem->batch; n++)
        seen[copied_sequence(&problem->to, n)] = numbers[n];
}

static fdma_status run_cache_copy(const fdma_problem *problem) {
    copy_context copy;
    plan_copy(problem, &copy);
    if (problem->batch == 0)
        return FDMA_OK;
    fdma_parallel_for(problem->exec.parallel, copy.threads, problem->kv_heads * copy.row_tasks,
                      copy_rows_task, &copy);
    fdma_arena arena = {.base = copy.scratch};
    copy_seen(problem, take_row_copies(&arena, problem).position);
    return FDMA_OK;
}
