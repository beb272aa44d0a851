/* Select, in parallel: a pass over the keys of each (b, g), which are cut into chunks where threads
 * outnumber the (b, g).
 *
 * What a chunk must know of those before it is the set that is kept when it begins, and that is the
 * best of their best: found without a pass, chunk by chunk, then merged. From there on each chunk
 * makes its own pass, with slots of its own for the keys that it found there; these get their true
 * names when all are done. Global scope asks for nothing but the best of all. Where chunks are cut
 * never changes a result. */
#ifndef FDMA_CPU_SELECT_CHUNKS_H
#define FDMA_CPU_SELECT_CHUNKS_H

#include "cpu/parallel.h"
#include "cpu/select/best_keys.h"

typedef struct select_context {
    const fdma_problem *problem;
    int64_t heads; /* batch * kv_heads */
    int32_t threads;
    int32_t places;     /* min(window, kv_len) */
    int32_t chunks;     /* of each (b, g) */
    int32_t chunk_keys; /* of each chunk but the last */
    /* for each (b, g) and chunk: */
    int64_t *best;    /* [places] its best keys; after joining, the best of all up to its end */
    int32_t *count;   /* how many these are */
    int32_t *expiry;  /* [places] of the keys kept when it began, as far as it decides them */
    int32_t *name;    /* [1 + places] true slots: of -1, of its own 0, of its own 1, ... */
    uint8_t *scratch; /* [threads][scratch_size] */
    size_t scratch_size;
} select_context;

enum {
    least_chunks = 3,         /* of two, the second would wait for the first */
    least_chunk_keys = 16384, /* threads take as long to meet as for some thousands of keys */
    chunk_windows = 10,       /* a chunk costs some steps for each place of the window */
    keys_a_microsecond = 500,
};

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Chunks of each (b, g), where they pay: one that begins at once, then one for each thread that
 * there is for it. */
static int64_t count_chunks(const fdma_problem *problem) {
    const int64_t heads = greater(problem->batch * problem->kv_heads, 1);
    const int64_t threads = fdma_thread_count(problem->exec.threads, INT32_MAX);
    const int64_t places = lesser(problem->window, problem->kv_len);
    const int64_t most = problem->kv_len / greater(chunk_windows * places, least_chunk_keys);
    const int64_t chunks = lesser(most, threads / heads + 1);
    return chunks < least_chunks ? 1 : chunks;
}

static select_context cut_chunks(const fdma_problem *problem, int64_t chunks) {
    const int64_t keys = greater(ceil_div(problem->kv_len, chunks), 1);
    return (select_context){
        .problem = problem,
        .heads = problem->batch * problem->kv_heads,
        .places = (int32_t)lesser(problem->window, problem->kv_len),
        .chunk_keys = (int32_t)keys,
        .chunks = (int32_t)greater(ceil_div(problem->kv_len, keys), 1),
    };
}

/* One (b, g): its rows. */
typedef struct select_rows {
    const float *score;
    const uint8_t *valid;
    int32_t *expiry, *slot; /* slot: NULL if nobody wants it */
} select_rows;

static select_rows find_select_rows(const fdma_problem *problem, int64_t head) {
    const fdma_tensor *const score = &problem->score, *const valid = &problem->key_valid;
    const fdma_tensor *const expiry = &problem->expiry, *const slot = &problem->slot;
    const int64_t b = head / problem->kv_heads, g = head % problem->kv_heads;
    select_rows rows = {
        .score = (const float *)score->data + b * score->stride[0] + g * score->stride[1],
        .expiry = (int32_t *)expiry->data + b * expiry->stride[0] + g * expiry->stride[1],
    };
    if (is_present(valid))
        rows.valid = (const uint8_t *)valid->data + b * valid->stride[0];
    if (is_present(slot))
        rows.slot = (int32_t *)slot->data + b * slot->stride[0] + g * slot->stride[1];
    return rows;
}

static key_range find_range(const select_context *select, const select_rows *rows, int32_t chunk) {
    const int32_t first = chunk * select->chunk_keys;
    const int32_t left = (int32_t)select->problem->kv_len - first;
    return (key_range){
        .score = rows->score + first,
        .valid = rows->valid ? rows->valid + first : NULL,
        .first = first,
        .count = left < select->chunk_keys ? left : select->chunk_keys,
    };
}

/* What a thread needs for one task, of either kind. */
typedef struct select_scratch {
    rank_buffer buffer;
    kept_set set;
    int32_t *expiry, *slot; /* of a pass */
} select_scratch;

static size_t lay_out_best(const select_context *select, uint8_t *base, select_scratch *scratch) {
    fdma_arena arena = {.base = base};
    const int64_t capacity = buffer_capacity(select->places, select->chunk_keys);
    scratch->buffer = (rank_buffer){
        .ranks = fdma_arena_take(&arena, (size_t)capacity * sizeof(int64_t)),
        .spare = fdma_arena_take(&arena, (size_t)capacity * sizeof(int64_t)),
        .capacity = capacity,
    };
    return arena.used;
}

static size_t lay_out_pass(const select_context *select, uint8_t *base, select_scratch *scratch) {
    fdma_arena arena = {.base = base};
    const bool split = select->chunks > 1, named = is_present(&select->problem->slot);
    const size_t keys = (size_t)select->chunk_keys + (size_t)(split ? select->places : 0);
    const size_t tree = (size_t)tree_size(select->places);
    const uint32_t ring = queue_ring(select->places);
    scratch->set = (kept_set){
        .places = select->places,
        .ring = ring,
        .tree = fdma_arena_take(&arena, tree * sizeof(int64_t)),
        .queue = fdma_arena_take(&arena, ((size_t)ring + 1) * sizeof(int64_t)),
    };
    scratch->expiry = fdma_arena_take(&arena, split ? keys * sizeof(int32_t) : 0);
    scratch->slot = fdma_arena_take(&arena, split || !named ? keys * sizeof(int32_t) : 0);
    return arena.used;
}

static fdma_arena place_select(select_context *select) {
    const bool global = select->problem->scope == FDMA_SCOPE_GLOBAL, split = select->chunks > 1;
    const size_t all = (size_t)select->heads * (size_t)select->chunks;
    const size_t kept = all * (size_t)select->places;
    fdma_arena arena = fdma_arena_of(select->problem);
    select_scratch scratch;
    const size_t best_size = global || split ? lay_out_best(select, NULL, &scratch) : 0;
    const size_t pass_size = global ? 0 : lay_out_pass(select, NULL, &scratch);
    if (global || split) {
        select->best = fdma_arena_take(&arena, kept * sizeof *select->best);
        select->count = fdma_arena_take(&arena, all * sizeof *select->count);
    }
    if (!global && split) {
        select->expiry = fdma_arena_take(&arena, kept * sizeof *select->expiry);
        select->name = fdma_arena_take(&arena, (kept + all) * sizeof *select->name);
    }
    select->threads =
        fdma_worthwhile_threads(select->problem->exec.threads, select->heads * select->chunks,
                                select->heads * select->problem->kv_len / keys_a_microsecond);
    select->scratch_size = best_size > pass_size ? best_size : pass_size;
    select->scratch = fdma_arena_take(&arena, (size_t)select->threads * select->scratch_size);
    return arena;
}

static uint8_t *thread_scratch(const select_context *select, int32_t thread) {
    return select->scratch + (size_t)thread * select->scratch_size;
}

/* Where what is kept of a chunk begins in the context's arrays. */
static int64_t chunk_offset(const select_context *select, int64_t head, int32_t chunk) {
    return (head * select->chunks + chunk) * select->places;
}

static void find_chunk(const select_context *select, int64_t head, int32_t chunk, int32_t thread) {
    const select_rows rows = find_select_rows(select->problem, head);
    const key_range keys = find_range(select, &rows, chunk);
    select_scratch scratch;
    lay_out_best(select, thread_scratch(select, thread), &scratch);
    select->count[head * select->chunks + chunk] = find_best(
        &keys, select->places, scratch.buffer, select->best + chunk_offset(select, head, chunk));
}

/* The pass of a chunk that nothing precedes. */
static void pass_first(const select_context *select, int64_t head, int32_t thread) {
    const select_rows rows = find_select_rows(select->problem, head);
    select_scratch scratch;
    lay_out_pass(select, thread_scratch(select, thread), &scratch);
    const select_pass pass = {
        .keys = find_range(select, &rows, 0),
        .kv_len = (int32_t)select->problem->kv_len,
        .expiry = rows.expiry,
        .slot = rows.slot ? rows.slot : scratch.slot,
    };
    select_keys(&pass, scratch.set);
}

/* The pass of a later chunk. */
static void pass_chunk(const select_context *select, int64_t head, int32_t chunk, int32_t thread) {
    const select_rows rows = find_select_rows(select->problem, head);
    const int64_t at = chunk_offset(select, head, chunk);
    select_scratch scratch;
    lay_out_pass(select, thread_scratch(select, thread), &scratch);
    const select_pass pass = {
        .keys = find_range(select, &rows, chunk),
        .kv_len = (int32_t)select->problem->kv_len,
        .before = select->count[head * select->chunks + chunk - 1],
        .kept = select->best + at - select->places,
        .expiry = scratch.expiry,
        .slot = scratch.slot,
    };
    select_keys(&pass, scratch.set);
    const size_t before = (size_t)pass.before * sizeof(int32_t);
    const size_t bytes = (size_t)pass.keys.count * sizeof(int32_t);
    memcpy(select->expiry + at, pass.expiry, before);
    memcpy(rows.expiry + pass.keys.first, pass.expiry + pass.before, bytes);
    if (rows.slot)
        memcpy(rows.slot + pass.keys.first, pass.slot + pass.before, bytes);
}

/* Tasks: for each (b, g) the pass of its first chunk, which takes longest; then the best of every
 * chunk but the last. */
static void prepare_task(const void *context, int64_t index, int32_t thread) {
    const select_context *const select = context;
    const int64_t heads = select->heads, n = index - heads;
    if (n < 0)
        pass_first(select, index, thread);
    else
        find_chunk(select, n % heads, (int32_t)(n / heads), thread);
}

static void find_task(const void *context, int64_t index, int32_t thread) {
    const select_context *const select = context;
    find_chunk(select, index / select->chunks, (int32_t)(index % select->chunks), thread);
}

static void pass_task(const void *context, int64_t index, int32_t thread) {
    const select_context *const select = context;
    const int32_t later = select->chunks - 1;
    pass_chunk(select, index / later, 1 + (int32_t)(index % later), thread);
}

/* The best of each chunk become the best of all keys up to its end. Causal scope asks for no more
 * than the beginnings of chunks. */
static void join_task(const void *context, int64_t head, int32_t thread) {
    const select_context *const select = context;
    const int32_t chunks = select->chunks - (select->problem->scope == FDMA_SCOPE_CAUSAL);
    int32_t *const count = select->count + head * select->chunks;
    select_scratch scratch;
    lay_out_best(select, thread_scratch(select, thread), &scratch);
    int64_t *const joined = scratch.buffer.ranks;
    for (int32_t chunk = 1; chunk < chunks; chunk++) {
        int64_t *const best = select->best + chunk_offset(select, head, chunk);
        count[chunk] = merge_best(best - select->places, count[chunk - 1], best, count[chunk],
                                  select->places, joined);
        memcpy(best, joined, (size_t)count[chunk] * sizeof *best);
    }
}

static int32_t *slot_names(const select_context *select, int64_t head, int64_t chunk) {
    return select->name + (head * select->chunks + chunk) * (select->places + 1) + 1;
}

/* A key that was kept when a chunk began has the slot that the chunk of its own calls by some name;
 * free slots of a set that was not full have been given out by their true names. */
static void find_names(const select_context *select, const select_rows *rows, int64_t head,
                       int32_t chunk) {
    const int64_t *const kept = select->best + chunk_offset(select, head, chunk) - select->places;
    const int32_t count = select->count[head * select->chunks + chunk - 1];
    int32_t *const name = slot_names(select, head, chunk);
    for (int32_t n = 0; n < count; n++) {
        const int32_t key = rank_key(kept[n]);
        name[n] = slot_names(select, head, key / select->chunk_keys)[rows->slot[key]];
    }
    for (int32_t n = count; n < select->places; n++)
        name[n] = n;
    name[-1] = -1;
}

static void name_task(const void *context, int64_t head, int32_t thread) {
    const select_context *const select = context;
    const select_rows rows = find_select_rows(select->problem, head);
    (void)thread;
    for (int32_t n = -1; n < select->places; n++)
        slot_names(select, head, 0)[n] = n;
    for (int32_t chunk = 1; chunk < select->chunks; chunk++)
        find_names(select, &rows, head, chunk);
}

/* Calls the slots of a later chunk by their true names, and hands the expiry of the keys that were
 * kept when it began, and that it evicted, to where it belongs: one chunk evicts a key. */
static void finish_task(const void *context, int64_t index, int32_t thread) {
    const select_context *const select = context;
    const int64_t head = index / (select->chunks - 1);
    const int32_t chunk = 1 + (int32_t)(index % (select->chunks - 1));
    const select_rows rows = find_select_rows(select->problem, head);
    const key_range keys = find_range(select, &rows, chunk);
    const int64_t at = chunk_offset(select, head, chunk);
    const int64_t *const kept = select->best + at - select->places;
    const int32_t count = select->count[head * select->chunks + chunk - 1];
    const int32_t *const name = slot_names(select, head, chunk);
    (void)thread;
    for (int32_t n = 0; n < count; n++)
        if (select->expiry[at + n] < (int32_t)select->problem->kv_len)
            rows.expiry[rank_key(kept[n])] = select->expiry[at + n];
    for (int32_t n = 0; rows.slot && n < keys.count; n++)
        rows.slot[keys.first + n] = name[rows.slot[keys.first + n]];
}

/* Global scope: of a chunk, the keys that are among the best of all; slots count these. */
static void mark_task(const void *context, int64_t index, int32_t thread) {
    const select_context *const select = context;
    const int64_t head = index / select->chunks, last = (head + 1) * select->chunks - 1;
    const select_rows rows = find_select_rows(select->problem, head);
    const key_range keys = find_range(select, &rows, (int32_t)(index % select->chunks));
    const int64_t *const best = select->best + last * select->places;
    const int32_t count = select->count[last];
    const int64_t floor = count < select->places ? INT64_MIN : count > 0 ? best[0] : INT64_MAX;
    int32_t slot = 0;
    (void)thread;
    for (int32_t n = 0; n < count; n++)
        slot += rank_key(best[n]) < keys.first;
    for (int32_t n = 0; n < keys.count; n++) {
        const int32_t j = keys.first + n;
        const bool valid = !keys.valid || keys.valid[n];
        const bool stays = valid && rank_of(keys.score[n], j) >= floor;
        rows.expiry[j] = stays ? (int32_t)select->problem->kv_len : j;
        if (rows.slot)
            rows.slot[j] = stays ? slot : -1;
        slot += stays;
    }
}

static void select_global(const select_context *select, int32_t few) {
    const int64_t chunks = select->heads * select->chunks;
    fdma_parallel_for(select->threads, chunks, find_task, select);
    fdma_parallel_for(few, select->heads, join_task, select);
    fdma_parallel_for(select->threads, chunks, mark_task, select);
}

static void select_causal(const select_context *select, int32_t few) {
    const int64_t later = select->heads * (select->chunks - 1);
    fdma_parallel_for(select->threads, select->heads + later, prepare_task, select);
    if (later == 0)
        return;
    fdma_parallel_for(few, select->heads, join_task, select);
    fdma_parallel_for(select->threads, later, pass_task, select);
    if (is_present(&select->problem->slot))
        fdma_parallel_for(few, select->heads, name_task, select);
    fdma_parallel_for(select->threads, later, finish_task, select);
}

static void select_chunks(const select_context *select) {
    const int32_t few = (int32_t)lesser(select->heads, select->threads);
    (select->problem->scope == FDMA_SCOPE_GLOBAL ? select_global : select_causal)(select, few);
}

#endif
