/* Tile lists: which keys a tile of queries visits, read off the slots alone.
 *
 * The keys of a slot follow one another without a gap. So the key that holds a slot is the last one
 * that took it, and the kept set is a table in which each key that arrives changes one entry: a
 * tile's list is a copy of the table at its first position, and the keys that arrive after it. A
 * thread's share of the tiles starts from the table that the keys before them leave. */
#ifndef FDMA_CPU_LISTS_LISTS_H
#define FDMA_CPU_LISTS_LISTS_H

#include "core/kernel.h"
#include "cpu/common/unroll.h"
#include "cpu/parallel.h"

#include <string.h>

/* What one thread does in a microsecond, about. */
enum { passed_keys = 1000, copied_keys = 2000 };

typedef struct lists_context {
    const fdma_problem *problem;
    int64_t chunks, chunk_tiles; /* of each (b, g) */
    int64_t places;              /* slots that there can be */
    int32_t *tables;             /* [threads][places + 1] */
} lists_context;

/* The table, as one key after the other passes. */
typedef struct slot_table {
    int32_t *key;        /* [places + 1]: the last key of each slot; of none */
    const int32_t *slot; /* [kv_len] */
    int64_t places;
    int64_t next;    /* the first key that has not passed */
    int64_t arrived; /* those that have, and took a slot */
} slot_table;

static int32_t *ints_of(const fdma_tensor *tensor, int64_t b, int64_t g, int64_t t) {
    return (int32_t *)tensor->data + b * tensor->stride[0] + g * tensor->stride[1] +
           t * tensor->stride[2];
}

/* The slot of a key; `places`, whatever a corrupt selection says, if it has none. */
INLINE int64_t place_of(const slot_table *table, int64_t j) {
    const int64_t slot = (int64_t)(uint32_t)table->slot[j]; // -1 is beyond all
    return slot < table->places ? slot : table->places;
}

static void pass_keys(slot_table *table, int64_t end) {
    for (; table->next < end; table->next++) {
        const int64_t place = place_of(table, table->next);
        table->key[place] = (int32_t)table->next;
        table->arrived += place < table->places;
    }
}

/* The same, and lists those that arrive: by way of a small buffer, into which each key is written
 * without a branch on whether it arrives, which is hard to foresee. */
static int64_t pass_and_list(slot_table *table, int64_t end, int32_t *list) {
    enum { buffer_keys = 64 };
    int32_t buffer[buffer_keys];
    int64_t used = 0;
    while (table->next < end) {
        const int64_t left = end - table->next;
        const int64_t stop = table->next + (left < buffer_keys ? left : buffer_keys);
        int64_t count = 0;
        for (; table->next < stop; table->next++) {
            const int64_t place = place_of(table, table->next);
            table->key[place] = buffer[count] = (int32_t)table->next;
            count += place < table->places;
        }
        memcpy(list + used, buffer, (size_t)count * sizeof *list);
        used += count;
    }
    table->arrived += used;
    return used;
}

/* Slots 0, 1, ... are taken in this order and never left empty, so that those in use are a
 * beginning of the table. No more keys are listed than have passed: they fit into the list. */
static void list_tile(const lists_context *lists, slot_table *table, int64_t b, int64_t g,
                      int64_t t) {
    const fdma_problem *const problem = lists->problem;
    int32_t *const list = ints_of(&problem->list, b, g, t);
    int32_t *const count = ints_of(&problem->count, b, g, t);
    const tile_span span = span_of(problem, t);
    pass_keys(table, span.first + 1);
    const int64_t alive = table->arrived < table->places ? table->arrived : table->places;
    memcpy(list, table->key, (size_t)alive * sizeof *list);
    count[0] = (int32_t)alive;
    count[1] = (int32_t)(alive + pass_and_list(table, span.last + 1, list + alive));
}

static void list_nothing(const fdma_problem *problem, int64_t b, int64_t g, int64_t t) {
    int32_t *const count = ints_of(&problem->count, b, g, t);
    count[0] = count[1] = 0;
}

/* The last chunks first: most keys lie before them. */
static void list_chunk(const void *context, int64_t index, int32_t thread) {
    const lists_context *const lists = context;
    const fdma_problem *const problem = lists->problem;
    const int64_t head = index / lists->chunks, chunk = lists->chunks - 1 - index % lists->chunks;
    const int64_t b = head / problem->kv_heads, g = head % problem->kv_heads;
    const int64_t first = chunk * lists->chunk_tiles, left = count_tiles(problem) - first;
    const int64_t tiles = left < lists->chunk_tiles ? left : lists->chunk_tiles;
    slot_table table = {
        .key = lists->tables + thread * (lists->places + 1),
        .places = lists->places,
    };
    // without keys or places there may be no memory of slots and lists
    if (lists->places > 0)
        table.slot = ints_of(&problem->slot, b, g, 0);
    // a corrupt selection may leave slots empty: they show key 0
    memset(table.key, 0, (size_t)(lists->places + 1) * sizeof *table.key);
    for (int64_t t = first; t < first + tiles; t++) {
        if (lists->places > 0)
            list_tile(lists, &table, b, g, t);
        else
            list_nothing(problem, b, g, t);
    }
}

static int64_t places_of(const fdma_problem *problem) {
    return problem->window < problem->kv_len ? problem->window : problem->kv_len;
}

static int32_t lists_threads(const fdma_problem *problem) {
    const int64_t heads = problem->batch * problem->kv_heads, tiles = count_tiles(problem);
    const int64_t copied = tiles * places_of(problem);
    return fdma_worthwhile_threads(problem->exec.threads, heads * tiles,
                                   heads * (problem->kv_len / passed_keys + copied / copied_keys));
}

/* Where there are more threads than (b, g) pairs, they share the tiles of one. */
static fdma_arena lay_out_lists(const fdma_problem *problem, int32_t threads,
                                lists_context *lists) {
    fdma_arena arena = fdma_arena_of(problem);
    const int64_t heads = problem->batch * problem->kv_heads, tiles = count_tiles(problem);
    const int64_t wanted = heads > 0 ? (threads + heads - 1) / heads : 1;
    const int64_t chunk_tiles = (tiles + wanted - 1) / wanted;
    *lists = (lists_context){
        .problem = problem,
        .chunk_tiles = chunk_tiles,
        .chunks = chunk_tiles > 0 ? (tiles + chunk_tiles - 1) / chunk_tiles : 1,
        .places = places_of(problem),
    };
    lists->tables = fdma_arena_take(&arena, (size_t)threads * (size_t)(lists->places + 1) *
                                                sizeof *lists->tables);
    return arena;
}

static size_t lists_workspace(const fdma_problem *problem) {
    lists_context lists;
    const fdma_arena arena = lay_out_lists(problem, lists_threads(problem), &lists);
    return fdma_arena_size(&arena);
}

static fdma_status run_lists(const fdma_problem *problem) {
    lists_context lists;
    const int32_t threads = lists_threads(problem);
    lay_out_lists(problem, threads, &lists);
    const int64_t heads = problem->batch * problem->kv_heads;
    fdma_parallel_for(threads, heads * lists.chunks, list_chunk, &lists);
    return FDMA_OK;
}

#endif
