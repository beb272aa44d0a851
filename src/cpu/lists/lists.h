/* Tile lists: the keys that each tile of queries visits, found from the slots alone.
 *
 * A slot that has been taken is never empty again: when its key is evicted, the next one takes it
 * at the same position. So the kept set is a table of the last key of each slot, in which each
 * arriving key changes one entry. A tile's list is a copy of the table at the tile's first
 * position, followed by the keys that arrive after it. If threads divide the tiles of one (b, g),
 * each has a range of tiles, and begins with the table after the keys before its range.
 *
 * In a selection with a gap, slots may be empty: only the live ones among the last keys of the
 * slots are listed. */
#pragma once

#include "cpu/common/memory.h"
#include "cpu/parallel.h"

#include <string.h>

/* Approximate keys per microsecond that a thread passes over, or copies. */
enum { passed_keys = 1000, copied_keys = 2000 };

typedef struct lists_context {
    const fdma_problem *problem;
    int64_t ranges;      /* ranges of the tiles of each (b, g) */
    int64_t range_tiles; /* tiles of each range but the last */
    int64_t slots;
    int32_t threads;
    int32_t *tables; /* [threads][slots + 1] */
} lists_context;

/* The table of one (b, g) after all keys before `next`. */
typedef struct slot_table {
    int32_t *key;        /* [slots + 1]: the last key of each slot, and of keys without a slot */
    const int32_t *slot; /* [kv_len] */
    int64_t slots;
    int64_t first;   /* first position of the sequence of these keys */
    int64_t next;    /* the first key that the table does not know */
    int64_t arrived; /* keys from `first` to before `next` that took a slot */
} slot_table;

/* The slot of a key; `slots` for -1 and any other number that is no slot. */
INLINE int64_t table_slot(const slot_table *table, int64_t j) {
    const int64_t slot = (int64_t)(uint32_t)table->slot[j]; // -1 is beyond all slots
    return slot < table->slots ? slot : table->slots;
}

/* Starts anew if `position` is in another packed sequence than the position before. The last tile
 * may have passed over some keys of the new sequence; they are passed over again. */
static void enter_sequence(const fdma_problem *problem, slot_table *table, int64_t position) {
    const int64_t first = position < 0 ? 0 : sequence_at(problem, position).first;
    if (first == table->first)
        return;
    table->first = table->next = first;
    table->arrived = 0;
}

static void pass_keys(slot_table *table, int64_t end) {
    for (; table->next < end; table->next++) {
        const int64_t slot = table_slot(table, table->next);
        table->key[slot] = (int32_t)table->next;
        table->arrived += slot < table->slots;
    }
}

/* pass_keys() that also lists the keys that take a slot. Each key is written to a small buffer
 * unconditionally, because a branch would be unpredictable. */
static int64_t pass_and_list(slot_table *table, int64_t end, int32_t *list) {
    enum { buffer_keys = 64 };
    int32_t buffer[buffer_keys];
    int64_t used = 0;
    while (table->next < end) {
        const int64_t stop = min(table->next + buffer_keys, end);
        int64_t count = 0;
        for (; table->next < stop; table->next++) {
            const int64_t slot = table_slot(table, table->next);
            table->key[slot] = buffer[count] = (int32_t)table->next;
            count += slot < table->slots;
        }
        memcpy(list + used, buffer, (size_t)count * sizeof *list);
        used += count;
    }
    table->arrived += used;
    return used;
}

/* Lists the key of each slot that is live at a position, and -1 for the empty slots in between.
 * Returns the number of entries. The table may also hold later keys, and keys of the sequence
 * before. */
static int64_t list_live(const slot_table *table, const int32_t *expiry, int64_t position,
                         int32_t *list) {
    const int64_t most = min(table->slots, position + 1); // slots that position + 1 keys can take
    int64_t used = 0;
    for (int64_t s = 0; s < most; s++) {
        const int32_t j = table->key[s];
        if (j < 0 || j > position || expiry[j] <= position)
            continue;
        for (; used < s; used++)
            list[used] = -1;
        list[used++] = j;
    }
    return used;
}

/* Slots are taken in the order 0, 1, ... and stay taken, so that the used entries are the first
 * ones of the table. A list has room for them, because it holds no more keys than have passed.
 * Packed sequences begin without taken slots. */
static void list_tile(const fdma_problem *problem, slot_table *table, int64_t b, int64_t g,
                      int64_t t) {
    int32_t *const count = int_at(&problem->count, b, g, t);
    count[0] = count[1] = 0;
    if (table->slots == 0)
        return; // the tensors of slots and lists may have no memory
    int32_t *const list = int_at(&problem->list, b, g, t);
    const tile_span span = span_of(problem, t);
    enter_sequence(problem, table, span.first);
    pass_keys(table, span.first + 1);
    int64_t live = min(table->arrived, table->slots);
    if (problem->gap > 0)
        live = list_live(table, int_at(&problem->expiry, b, g, 0), span.first, list);
    else
        memcpy(list, table->key, (size_t)live * sizeof *list);
    count[0] = (int32_t)live;
    count[1] = (int32_t)(live + pass_and_list(table, span.last + 1, list + live));
}

/* The last ranges come first, because most keys precede them. */
static void list_range(const void *context, int64_t index, int32_t thread) {
    const lists_context *const lists = context;
    const fdma_problem *const problem = lists->problem;
    const int64_t head = index / lists->ranges, range = lists->ranges - 1 - index % lists->ranges;
    const int64_t b = head / problem->kv_heads, g = head % problem->kv_heads;
    const int64_t first = range * lists->range_tiles;
    const int64_t end = min(first + lists->range_tiles, count_tiles(problem));
    slot_table table = {
        .key = lists->tables + thread * (lists->slots + 1),
        .slot = lists->slots > 0 ? int_at(&problem->slot, b, g, 0) : NULL,
        .slots = lists->slots,
    };
    // in a corrupt selection slots may stay empty, and then list key 0
    const int empty = problem->gap > 0 ? 0xff : 0; // each byte of -1
    memset(table.key, empty, (size_t)(lists->slots + 1) * sizeof *table.key);
    for (int64_t t = first; t < end; t++)
        list_tile(problem, &table, b, g, t);
}

/* Divides the workspace, and returns the bytes that the call needs of it. */
static size_t plan_lists(const fdma_problem *problem, lists_context *lists) {
    const int64_t heads = problem->batch * problem->kv_heads, tiles = count_tiles(problem);
    const int64_t slots = slots_of(problem), copied = tiles * slots;
    const int64_t microseconds = heads * (problem->kv_len / passed_keys + copied / copied_keys);
    const int32_t threads =
        fdma_worthwhile_threads(problem->exec.threads, heads * tiles, microseconds);
    const int64_t range_tiles = divide_up(tiles, heads > 0 ? divide_up(threads, heads) : 1);
    fdma_arena arena = fdma_arena_of(problem);
    *lists = (lists_context){
        .problem = problem,
        .range_tiles = range_tiles,
        .ranges = range_tiles > 0 ? divide_up(tiles, range_tiles) : 1,
        .slots = slots,
        .threads = threads,
        .tables = take_ints(&arena, threads * (slots + 1)),
    };
    return fdma_arena_size(&arena);
}

static size_t lists_workspace(const fdma_problem *problem) {
    lists_context lists;
    return plan_lists(problem, &lists);
}

static fdma_status run_lists(const fdma_problem *problem) {
    lists_context lists;
    plan_lists(problem, &lists);
    const int64_t heads = problem->batch * problem->kv_heads;
    fdma_parallel_for(lists.threads, heads * lists.ranges, list_range, &lists);
    return FDMA_OK;
}
