/* The keys that a tile visits, a block at a time: first, in ascending order, the keys that are live
 * from its first position to its last; then the keys that expire in between, in descending order of
 * expiry; then the keys that arrive in between, in ascending order. Neighbours in this order are
 * kept by nearly the same rows.
 *
 * A key that is not live at a position and arrived before it never becomes live again. So the keys
 * that any row of a tile keeps are live at its first position or arrive up to its last one.
 * Snapshots of the live keys at every `step` positions make finding them O(window) for a tile.
 *
 * With a mask a tile goes through all keys in ascending order and visits those that any of its rows
 * keeps: see mask.h. */
#pragma once

#include "cpu/common/mask.h"

/* Snapshot n (from 1) holds the keys before position n * step that are live there. If a selection
 * keeps more keys than it says, a snapshot may have no room for all of them. It is then incomplete,
 * like all later ones, and tiles start from the last complete snapshot. */
typedef struct snapshots {
    int64_t step;
    int64_t count;    /* snapshots of each (b, g) */
    int64_t capacity; /* keys that one snapshot can hold */
    int32_t *keys;    /* [batch * kv_heads][count][capacity] */
    int32_t *length;  /* [batch * kv_heads][count]; incomplete: not all live keys fit */
} snapshots;

enum { min_snapshot_step = 128, incomplete = -1 };

static snapshots take_snapshots(fdma_arena *arena, const fdma_problem *problem) {
    const int64_t window = slots_of(problem), heads = problem->batch * problem->kv_heads;
    snapshots all = {.step = max(window / 2, min_snapshot_step), .capacity = window};
    // a window that holds every key excludes none: its tiles start from the first key
    if (problem->selected && window < problem->kv_len && !has_mask(problem))
        all.count = (problem->kv_len - 1) / all.step;
    all.keys = take_ints(arena, heads * all.count * window);
    all.length = take_ints(arena, heads * all.count);
    return all;
}

static const int32_t *expiry_of_head(const fdma_problem *problem, int64_t b, int64_t g) {
    const bool any = problem->selected && problem->kv_len > 0;
    return any ? int_at(&problem->expiry, b, g, 0) : NULL;
}

/* Appends to `to` the keys of `from` (or first, first + 1, ... if NULL) that outlive `position`.
 * Returns the new number of keys in `to`, or `incomplete` if they exceed the capacity. */
static int64_t filter_live(int32_t *to, int64_t used, int64_t capacity, const int32_t *from,
                           int64_t first, int64_t count, const int32_t *expiry, int64_t position) {
    int64_t n = 0;
    bool fits = true;
    for (; n < count && used < capacity; n++) {
        const int32_t j = from != NULL ? from[n] : (int32_t)(first + n);
        to[used] = j;
        used += expiry[j] > position;
    }
    for (; n < count; n++)
        fits &= expiry[from != NULL ? from[n] : first + n] <= position;
    return fits ? used : incomplete;
}

/* Fills the snapshots of one (b, g): each holds what is left of the one before and of the keys that
 * arrived since. All snapshots after an incomplete one are incomplete. */
static void fill_snapshots(const fdma_problem *problem, const snapshots *all, int64_t head) {
    const int64_t b = head / problem->kv_heads, g = head % problem->kv_heads;
    const int32_t *const expiry = expiry_of_head(problem, b, g);
    const int32_t *previous = NULL;
    int64_t length = 0;
    for (int64_t n = 0; n < all->count; n++) {
        const int64_t index = head * all->count + n, position = (n + 1) * all->step;
        int32_t *const keys = all->keys + index * all->capacity;
        if (length != incomplete) {
            length = filter_live(keys, 0, all->capacity, previous, 0, length, expiry, position);
            length = filter_live(keys, length, all->capacity, NULL, position - all->step, all->step,
                                 expiry, position);
        }
        all->length[index] = (int32_t)length;
        previous = keys;
    }
}

/* The keys that a tile has not visited yet. */
typedef struct key_cursor {
    const int32_t *live; /* from a snapshot */
    int64_t live_count;
    int64_t next, end; /* then the keys from `next` to `end` - 1 */
    const int32_t *expiry;
    const uint8_t *valid;
    int32_t first_position, last_position;
    int32_t *expiring; /* [most_lanes], keys that expire within the tile */
    int32_t expiring_count;
    bool is_sorted;
    mask_scan mask; /* unused without a mask */
} key_cursor;

/* Starts at the first key of a tile. The caller has set only the cursor's arrays. */
static void start_keys(const fdma_problem *problem, const snapshots *all, const row_range *rows,
                       key_cursor *cursor) {
    *cursor = (key_cursor){
        .end = rows->last_position + 1,
        .expiry = expiry_of_head(problem, rows->b, rows->g),
        .valid = valid_keys(problem, rows->b),
        .first_position = rows->first_position,
        .last_position = rows->last_position,
        .expiring = cursor->expiring,
        .mask = cursor->mask,
    };
    int64_t n = min(max(rows->first_position, 0) / all->step, all->count);
    int64_t index = (rows->b * problem->kv_heads + rows->g) * all->count + n - 1;
    for (; n > 0 && all->length[index] == incomplete; n--)
        index--;
    if (n > 0) {
        cursor->live = all->keys + index * all->capacity;
        cursor->live_count = all->length[index];
        cursor->next = n * all->step;
    }
}

/* True if a row at `first_position` or later may keep key j, by its expiry and validity (either may
 * be NULL). Does not branch on their values, because such a branch would be unpredictable. */
INLINE bool outlives(const int32_t *expiry, const uint8_t *valid, int32_t first_position,
                     int32_t j) {
    const int32_t from = j > first_position ? j : first_position;
    bool kept = true;
    if (expiry != NULL)
        kept = expiry[j] > from;
    if (valid != NULL)
        kept &= valid[j] != 0;
    return kept;
}

static bool is_visited(const key_cursor *cursor, int32_t j) {
    return outlives(cursor->expiry, cursor->valid, cursor->first_position, j);
}

/* Lists key j, or sets it aside if it expires within the tile. In a sound selection no more keys
 * expire there than the tile has positions; keys of a corrupt one that do not fit are listed at
 * once. */
static int32_t add_key(key_cursor *cursor, int32_t *keys, int32_t count, int32_t j) {
    const bool visited = is_visited(cursor, j);
    if (visited && cursor->expiry != NULL && cursor->expiry[j] <= cursor->last_position &&
        cursor->expiring_count < most_lanes) {
        cursor->expiring[cursor->expiring_count++] = j;
        return count;
    }
    keys[count] = j;
    return count + visited;
}

/* Sorts by expiry, ascending, because next_keys() takes keys from the end. Insertion sort suffices
 * for few keys. */
static void sort_expiring(key_cursor *cursor) {
    for (int32_t n = 1; n < cursor->expiring_count && !cursor->is_sorted; n++) {
        const int32_t j = cursor->expiring[n];
        int32_t to = n;
        for (; to > 0 && cursor->expiry[cursor->expiring[to - 1]] > cursor->expiry[j]; to--)
            cursor->expiring[to] = cursor->expiring[to - 1];
        cursor->expiring[to] = j;
    }
    cursor->is_sorted = true;
}

/* Writes the next keys, up to key_block, and returns their number; 0 at the end. */
static int32_t next_keys(key_cursor *cursor, int32_t *keys) {
    int32_t count = 0;
    for (; cursor->live_count > 0 && count < key_block; cursor->live++, cursor->live_count--)
        count = add_key(cursor, keys, count, *cursor->live);
    for (; cursor->next <= cursor->first_position && count < key_block; cursor->next++)
        count = add_key(cursor, keys, count, (int32_t)cursor->next);
    if (count == key_block)
        return count;
    sort_expiring(cursor);
    while (cursor->expiring_count > 0 && count < key_block)
        keys[count++] = cursor->expiring[--cursor->expiring_count];
    for (; cursor->next < cursor->end && count < key_block; cursor->next++) {
        keys[count] = (int32_t)cursor->next;
        count += is_visited(cursor, (int32_t)cursor->next);
    }
    return count;
}

/* A key block, ready for the products. The rows of a tile that keep a key are one range of lanes,
 * or, with a mask, any lanes. A group of group_keys keys is masked unless every row keeps all of
 * them. */
typedef struct key_list {
    int32_t count;
    bool masked[key_groups];
    int32_t word_size; /* bytes of a word in the caller's tensors */
    int32_t key[key_block];
    const void *k_source[key_block]; /* the caller's rows */
    const void *v_source[key_block];
    float bias[key_block];
    uint32_t code[key_block]; /* dropout codes; see core/dropout.h */
    int32_t first_lane[key_block];
    int32_t end_lane[key_block];
    uint64_t *kept; /* [key_block][kept_words]: bits of the lanes that keep each key, instead of
                       masked, first_lane and end_lane; NULL: no mask */
} key_list;

static int32_t clamp_lane(int64_t lane) { return (int32_t)min(max(lane, 0), most_lanes); }

/* The first lane whose position is at or after the expiry of key j. */
static int32_t end_lane_of(const fdma_problem *problem, const row_range *rows,
                           const int32_t *expiry, int64_t j) {
    const int64_t origin = query_position(problem, 0);
    if (!problem->causal || expiry == NULL)
        return most_lanes;
    return clamp_lane((expiry[j] - origin) * problem->group - rows->first);
}

/* Bits of the `count` keys from `first` on that some row may keep, by expiry and validity alone. */
static uint64_t find_candidates(const key_cursor *cursor, int64_t first, int64_t count) {
    uint64_t candidates = 0;
    if (cursor->expiry == NULL && cursor->valid == NULL)
        return lowest_bits(count);
    for (int64_t n = 0; n < count; n++)
        candidates |= (uint64_t)is_visited(cursor, (int32_t)(first + n)) << n;
    return candidates;
}

/* Goes on to the next 64 keys, and scans more of the mask first if it has to. */
static void open_next_columns(const fdma_problem *problem, const row_range *rows,
                              key_cursor *cursor) {
    mask_scan *const scan = &cursor->mask;
    const int64_t first = cursor->next, count = min(cursor->end - first, word_bits);
    if (first >= scan->end)
        scan_mask(problem, rows, scan, first, min(cursor->end, first + scanned_keys));
    open_columns(scan, first, find_candidates(cursor, first, count));
    cursor->next += count;
}

/* next_keys() with a mask. Also writes the bits of the lanes that keep each key. */
static int32_t next_masked_keys(const fdma_problem *problem, const row_range *rows,
                                key_cursor *cursor, key_list *list) {
    mask_scan *const scan = &cursor->mask;
    int32_t count = 0;
    while (count < key_block && (scan->pending != 0 || cursor->next < cursor->end)) {
        if (scan->pending == 0) {
            open_next_columns(problem, rows, cursor);
            continue;
        }
        const int64_t j = scan->first_column + __builtin_ctzll(scan->pending);
        const int32_t end = end_lane_of(problem, rows, cursor->expiry, j);
        scan->pending &= scan->pending - 1;
        list->key[count] = (int32_t)j;
        count += take_column(scan, j, end, list->kept + count * kept_words);
    }
    return count;
}

/* Finds the lanes that keep each key: from its own position on, until it expires. */
static void mark_lanes(const fdma_problem *problem, const row_range *rows, key_list *list) {
    const int32_t *const expiry = expiry_of_head(problem, rows->b, rows->g);
    const int64_t origin = query_position(problem, 0), group = problem->group;
    for (int32_t n = 0; n < list->count; n++) {
        const int32_t j = list->key[n];
        const bool by_all =
            !problem->causal ||
            (j <= rows->first_position && (expiry == NULL || expiry[j] > rows->last_position));
        if (n % group_keys == 0)
            list->masked[n / group_keys] = false;
        list->first_lane[n] = 0;
        list->end_lane[n] = most_lanes;
        if (by_all)
            continue;
        list->masked[n / group_keys] = true;
        list->first_lane[n] = clamp_lane((j - origin) * group - rows->first);
        if (expiry != NULL)
            list->end_lane[n] = clamp_lane((expiry[j] - origin) * group - rows->first);
    }
}

static const void *row_in_pages(const fdma_problem *problem, const fdma_tensor *carried, int64_t b,
                                int64_t g, int64_t j) {
    const key_indices at = indices_of_carried(problem, b, j);
    return head_row(carried, at.first, at.row, g);
}

/* The addresses of the rows of some keys in k or v. `carried` may be absent. */
static void find_rows(const fdma_problem *problem, const fdma_tensor *own,
                      const fdma_tensor *carried, int64_t b, int64_t g, const int32_t *key,
                      int32_t count, const void **sources) {
    const int64_t size = (int64_t)fdma_dtype_size(own->dtype), carried_len = problem->carried_len;
    const int64_t step = own->stride[1] * size, carried_step = carried->stride[1] * size;
    const uint8_t *const rows = problem->new_len > 0 ? head_row(own, b, 0, g) : NULL;
    if (problem->carried_pages.page != NULL) {
        for (int32_t n = 0; n < count; n++)
            sources[n] = key[n] < carried_len ? row_in_pages(problem, carried, b, g, key[n])
                                              : rows + (key[n] - carried_len) * step;
        return;
    }
    const uint8_t *const carried_rows = carried_len > 0 ? head_row(carried, b, 0, g) : NULL;
    for (int32_t n = 0; n < count; n++) { // no branches, so that compilers vectorize it
        const int64_t j = key[n];
        const bool is_carried = j < carried_len;
        sources[n] = (is_carried ? carried_rows : rows) +
                     (is_carried ? j : j - carried_len) * (is_carried ? carried_step : step);
    }
}

static void find_k(const fdma_problem *problem, int64_t b, int64_t g, const int32_t *key,
                   int32_t count, const void **sources) {
    find_rows(problem, &problem->k, &problem->k_carried, b, g, key, count, sources);
}

static void find_v(const fdma_problem *problem, int64_t b, int64_t g, const int32_t *key,
                   int32_t count, const void **sources) {
    find_rows(problem, &problem->v, &problem->v_carried, b, g, key, count, sources);
}

/* True if the keys follow each other. */
static bool are_adjacent(const int32_t *key, int32_t count) {
    bool adjacent = true;
    for (int32_t n = 0; n < count; n++)
        adjacent &= key[n] == key[0] + n;
    return adjacent;
}

/* The bias of some keys; 0 without a bias. */
static void find_bias(const fdma_problem *problem, int64_t b, int64_t g, const int32_t *key,
                      int32_t count, float *to) {
    const fdma_tensor *const own = &problem->bias, *const carried = &problem->bias_carried;
    const int64_t carried_len = problem->carried_len;
    if (!is_present(own) || count == 0) {
        memset(to, 0, (size_t)count * sizeof *to);
        return;
    }
    const float *const bias = problem->new_len > 0 ? float_at(own, b, g, 0) : NULL;
    const float *const carried_bias = carried_len > 0 ? float_at(carried, b, g, 0) : NULL;
    const bool is_carried = key[0] < carried_len;
    if (is_carried == (key[count - 1] < carried_len) && are_adjacent(key, count)) {
        memcpy(to, is_carried ? carried_bias + key[0] : bias + (key[0] - carried_len),
               (size_t)count * sizeof *to);
        return;
    }
    for (int32_t n = 0; n < count; n++)
        to[n] = *(key[n] < carried_len ? carried_bias + key[n] : bias + (key[n] - carried_len));
}

static void find_codes(const fdma_problem *problem, int64_t b, int64_t g, const int32_t *key,
                       int32_t count, uint32_t *to) {
    for (int32_t n = 0; n < count && problem->dropout.threshold != 0; n++)
        to[n] = key_code_of(problem, b, g, key[n]);
}

/* Prefetches into the L2 cache one cache line of each row, if a line begins at this byte. */
INLINE void prefetch_rows(const void *const *rows, int count, int64_t byte) {
    if (byte % 64 != 0)
        return;
    UNROLL
    for (int n = 0; n < count; n++)
        __builtin_prefetch((const uint8_t *)rows[n] + byte, 0, 2);
}

/* Lists the next key block; its count is 0 at the end. Entries beyond the last key are rows of
 * zeros that no lane keeps, because products read whole groups and prefetches read every entry. */
static void list_keys(const fdma_problem *problem, const row_range *rows, key_cursor *cursor,
                      const tile_state *tile, key_list *list) {
    list->count = list->kept != NULL ? next_masked_keys(problem, rows, cursor, list)
                                     : next_keys(cursor, list->key);
    list->word_size = (int32_t)fdma_dtype_size(problem->dtype) * terms;
    if (list->kept == NULL)
        mark_lanes(problem, rows, list);
    else
        memset(list->kept + list->count * kept_words, 0,
               sizeof(uint64_t) * (size_t)((key_block - list->count) * kept_words));
    find_k(problem, rows->b, rows->g, list->key, list->count, list->k_source);
    find_v(problem, rows->b, rows->g, list->key, list->count, list->v_source);
    find_bias(problem, rows->b, rows->g, list->key, list->count, list->bias);
    find_codes(problem, rows->b, rows->g, list->key, list->count, list->code);
    for (int32_t n = list->count; n < key_block; n++) {
        list->masked[n / group_keys] = true;
        list->k_source[n] = list->v_source[n] = tile->zeros;
        list->bias[n] = 0;
        list->code[n] = 0;
        list->first_lane[n] = list->end_lane[n] = 0;
    }
}

/* The current key block of a tile, and the next, so that its rows can be prefetched. */
typedef struct key_blocks {
    key_list *now, *next;
    uint64_t *kept[2]; /* of the two lists */
    key_cursor cursor; /* at the first key after the keys of `next` */
} key_blocks;

static key_blocks take_key_blocks(fdma_arena *arena, const fdma_problem *problem) {
    const size_t kept = has_mask(problem) ? sizeof(uint64_t) * key_block * kept_words : 0;
    key_blocks blocks;
    blocks.now = fdma_arena_take(arena, sizeof *blocks.now);
    blocks.next = fdma_arena_take(arena, sizeof *blocks.next);
    blocks.cursor.expiring = take_ints(arena, most_lanes);
    blocks.cursor.mask = take_mask_scan(arena, problem);
    for (int n = 0; n < 2; n++) {
        blocks.kept[n] = fdma_arena_take(arena, kept);
        if (kept == 0)
            blocks.kept[n] = NULL;
    }
    return blocks;
}

/* Lists the first key block of a tile as `next`, for advance_keys(). The cursor is at the tile's
 * first key; with a mask it restarts and goes through all keys. */
static void start_key_blocks(const fdma_problem *problem, const row_range *rows,
                             const tile_state *tile, key_blocks *blocks) {
    key_cursor *const cursor = &blocks->cursor;
    blocks->now->kept = blocks->kept[0];
    blocks->next->kept = blocks->kept[1];
    blocks->next->count = 0;
    if (problem->kv_len == 0)
        return;
    if (has_mask(problem)) {
        cursor->live_count = cursor->next = 0;
        start_mask(problem, rows, &cursor->mask);
    }
    list_keys(problem, rows, cursor, tile, blocks->next);
}

/* Goes to the next key block, or returns false at the end. */
static bool advance_keys(const fdma_problem *problem, const row_range *rows, const tile_state *tile,
                         key_blocks *blocks) {
    key_list *const done = blocks->now;
    blocks->now = blocks->next;
    blocks->next = done;
    if (blocks->now->count > 0)
        list_keys(problem, rows, &blocks->cursor, tile, blocks->next);
    return blocks->now->count > 0;
}

static int32_t whole_steps(int32_t keys) { return (int32_t)round_up(keys, key_step); }

/* Copies the rows of the listed keys side by side. In the caller's tensor they may all fall into
 * the same few sets of the L1 cache, each on a page of its own. */
static void load_keys(const fdma_problem *problem, float *rows, const void *const *sources,
                      int32_t count) {
    const int64_t words = problem->head_dim / terms, tile_words = tile_dim(problem) / terms;
    for (int32_t n = 0; n < whole_steps(count); n++) {
        float *const to = rows + n * padded_row(tile_words * terms);
        for (int64_t w = 0; w < tile_words; w += vf_width) {
            const vf x = load_words(sources[n], problem->dtype, w, channels_at(w, words));
            vf_store_first(to + w, x, channels_at(w, tile_words));
        }
    }
}
