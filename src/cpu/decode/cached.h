/* fdma_decode(): a task has one kv head of one stream. It finds the keys that the new tokens evict,
 * attends, and writes the committed tokens into rows of the cache that no other task reads. If
 * there are fewer tasks than threads, the tasks run in turn, and the threads share the splits of
 * each. */
#pragma once

#include "core/cache.h"
#include "cpu/common/memory.h"
#include "cpu/common/order.h"
#include "cpu/decode/decode.h"

/* ---- which keys the tokens evict ---- */

/* The key that each new token of fdma_decode() evicts. There are few tokens, so each of them reads
 * every row. */

/* The rows of one kv head after the tokens of the call so far. */
typedef struct live_rows {
    int64_t rows, sinks, recent;
    int32_t sink_end;  /* sinks have positions before it; found when all rows have keys, as no sink
                          leaves after that; -1 until then */
    int32_t *order;    /* [rows] of the score */
    int32_t *position; /* [rows]; -1: empty */
    int32_t *key;      /* [rows]: the row's number, or the number of the token that took it */
} live_rows;

static live_rows take_live_rows(fdma_arena *arena, const fdma_problem *problem) {
    live_rows live = {.rows = problem->carried_len,
                      .sinks = problem->sinks,
                      .recent = problem->recent,
                      .sink_end = -1};
    live.order = take_ints(arena, live.rows);
    live.position = take_ints(arena, live.rows);
    live.key = take_ints(arena, live.rows);
    return live;
}

/* Loads the rows. Writes the expiries and slots that they have if no token evicts them. */
static void load_rows(const decode_head *head, const live_rows *live,
                      const head_selection *selection) {
    const fdma_table *const table = &head->problem->cache.table;
    const float *const score = float_at(&table->score, head->sequence, head->g, 0);
    const int32_t *const position = int_at(&table->position, head->sequence, head->g, 0);
    const int32_t rows = (int32_t)live->rows, kv_len = rows + (int32_t)head->tokens;
    memcpy(live->order, score, (size_t)rows * sizeof *score);
    memcpy(live->position, position, (size_t)rows * sizeof *position);
    for (int32_t row = 0; row < rows; row++) {
        live->order[row] = order_of_bits(live->order[row]);
        live->key[row] = row;
    }
    for (int32_t row = 0; row < rows; row++) {
        const bool filled = live->position[row] >= 0;
        selection->expiry[row] = filled ? kv_len : row;
        selection->slot[row] = filled ? row : -1;
    }
}

/* x if `holds`, else the greatest number, in a form that compilers vectorize. */
static inline int32_t number_if(bool holds, int32_t x) {
    const int32_t mask = -(int32_t)holds;
    return (x & mask) | (INT32_MAX & ~mask);
}

static inline int32_t least_of(int32_t a, int32_t b) { return a < b ? a : b; }

/* The first row without a key; INT32_MAX if there is none. */
static int32_t first_empty(const live_rows *live) {
    const int32_t *const position = live->position, rows = (int32_t)live->rows;
    int32_t first = INT32_MAX;
    for (int32_t row = 0; row < rows; row++)
        first = least_of(first, number_if(position[row] < 0, row));
    return first;
}

static int64_t count_from(const live_rows *live, int32_t position) {
    int32_t count = 0;
    for (int64_t row = 0; row < live->rows; row++)
        count += live->position[row] >= position;
    return count;
}

/* The position of the `count`-th newest row, 1 or more: the greatest position that `count` rows
 * reach. It is the `count`-th last position of the stream unless padding stands in between. */
static int32_t newest_position(const live_rows *live, int64_t count, int32_t end) {
    const int64_t likely = end - count;
    if (likely >= 0 && count_from(live, (int32_t)likely) == count)
        return (int32_t)likely;
    int32_t low = 0, high = INT32_MAX; // count_from(low) >= count
    while (low < high) {
        const int32_t middle = low + (high - low) / 2 + 1;
        if (count_from(live, middle) >= count)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* The end of the positions of the sinks, the oldest rows. They are the first rows, too, unless a
 * sink was lost with a page. */
static int32_t find_sink_end(const live_rows *live) {
    const int32_t rows = (int32_t)live->rows, sinks = (int32_t)min(live->sinks, live->rows);
    int32_t newest = -1, least = INT32_MAX;
    for (int32_t row = 0; row < sinks; row++)
        newest = live->position[row] > newest ? live->position[row] : newest;
    for (int32_t row = sinks; row < rows; row++)
        least = least_of(least, live->position[row]);
    return newest < least ? least : newest_position(live, rows - sinks, 0);
}

/* The worst row among those that compete: rows that are no sink and older than `newest`. -1 if
 * there is none. Each pass finds a minimum without branches, so that compilers vectorize it: the
 * least score, the oldest position with that score, and the row with both. */
static int64_t worst_row(const live_rows *live, int32_t newest) {
    const int32_t *const order = live->order, *const position = live->position;
    const int32_t end = live->sink_end, rows = (int32_t)live->rows;
    int32_t least = INT32_MAX, oldest = INT32_MAX, worst = INT32_MAX;
    for (int32_t row = 0; row < rows; row++)
        least = least_of(least,
                         number_if((position[row] >= end) & (position[row] < newest), order[row]));
    for (int32_t row = 0; row < rows; row++)
        oldest = least_of(oldest, number_if((order[row] == least) & (position[row] >= end) &
                                                (position[row] < newest),
                                            position[row]));
    for (int32_t row = 0; row < rows; row++)
        worst = least_of(worst, number_if((order[row] == least) & (position[row] == oldest), row));
    return worst < INT32_MAX ? worst : -1;
}

/* The row that token m takes: an empty one, or the row of the key that it evicts; -1 if the token
 * itself is the worst. */
static int64_t row_for_token(live_rows *live, int32_t position, int32_t order) {
    const int64_t empty = first_empty(live), others = live->recent - 1;
    if (empty < live->rows)
        return empty;
    if (live->sink_end < 0)
        live->sink_end = find_sink_end(live);
    const int32_t newest = others > 0 ? newest_position(live, others, position) : INT32_MAX;
    const int64_t worst = worst_row(live, newest);
    const bool competes = live->recent == 0;
    return competes && worst >= 0 && order < live->order[worst] ? -1 : worst;
}

/* Writes the expiry and the slot of every row and token. */
static void evict_keys(const decode_head *head, live_rows *live, const head_selection *selection) {
    const fdma_problem *const problem = head->problem;
    const int32_t rows = (int32_t)live->rows, kv_len = rows + (int32_t)head->tokens;
    load_rows(head, live, selection);
    for (int32_t m = 0; m < (int32_t)head->tokens; m++) {
        const int32_t order = score_order(*float_at(&problem->score, head->b, head->g, m));
        const int32_t position = head->seen + m, j = rows + m;
        const int64_t row = row_for_token(live, position, order);
        selection->slot[j] = (int32_t)row;
        selection->expiry[j] = row >= 0 ? kv_len : j;
        if (row < 0)
            continue;
        if (live->position[row] >= 0)
            selection->expiry[live->key[row]] = j;
        live->order[row] = order;
        live->position[row] = position;
        live->key[row] = j;
    }
}

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
    fdma_problem one;
    fdma_decode_forward(&head, &none, &one);
    one.exec.workspace = NULL;
    one.exec.threads = threads;
    one.any_len = true;
    return one;
}

/* With any_len each of all threads has a task: no fewer tokens or streams need more. */
static size_t plan_cached(const fdma_problem *problem, cached_context *context) {
    const int64_t tasks = problem->batch * problem->kv_heads;
    const int64_t row_bytes = problem->head_dim * (int64_t)fdma_dtype_size(problem->dtype);
    const int32_t threads =
        problem->any_len
            ? fdma_thread_count(problem->exec.threads, INT32_MAX)
            : threads_to_read(problem, INT64_MAX, 2 * tasks * problem->kv_len * row_bytes);
    const bool in_turn = tasks < threads && !problem->any_len;
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
    fdma_problem one;
    fdma_decode_forward(&head, &selection, &one);
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
    fdma_parallel_for(problem->exec.parallel, context.threads, problem->batch * problem->kv_heads,
                      decode_head_task, &context);
    fdma_count_committed(problem);
    return FDMA_OK;
}
