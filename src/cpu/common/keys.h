/* Which keys a tile visits, a block at a time: in ascending order those that live throughout, then
 * those that expire inside, the last one first, then in ascending order those that arrive inside.
 * So the rows of a tile that do not keep a key are the same ones for its neighbours.
 *
 * Causal positions only ever lose keys, so the keys that any row of a tile keeps are those alive at
 * its first position and those that arrive up to its last. Snapshots of the live keys every
 * `step` positions make finding them O(window) for every tile. */
#ifndef FDMA_CPU_COMMON_KEYS_H
#define FDMA_CPU_COMMON_KEYS_H

#include "cpu/common/tile.h"

/* Snapshot n (from 1) holds the keys before position n * step that are still alive there. */
typedef struct snapshots {
    int64_t step;
    int64_t count;    /* of each (b, g) */
    int64_t capacity; /* keys of one */
    int32_t *keys;    /* [batch * kv_heads][count][capacity] */
    int32_t *length;  /* [batch * kv_heads][count] */
} snapshots;

enum { min_snapshot_step = 128 };

static snapshots take_snapshots(fdma_arena *arena, const fdma_problem *problem) {
    const int64_t window = problem->window < problem->kv_len ? problem->window : problem->kv_len;
    const int64_t heads = problem->batch * problem->kv_heads;
    const int64_t step = window / 2 > min_snapshot_step ? window / 2 : min_snapshot_step;
    snapshots all = {.step = step, .capacity = window};
    // a window that holds every key leaves nothing out, so that its tiles start from the first key
    if (problem->selected && window < problem->kv_len)
        all.count = (problem->kv_len - 1) / step;
    all.keys = fdma_arena_take(arena, (size_t)(heads * all.count * window) * sizeof *all.keys);
    all.length = fdma_arena_take(arena, (size_t)(heads * all.count) * sizeof *all.length);
    return all;
}

static const int32_t *expiry_row(const fdma_problem *problem, int64_t b, int64_t g) {
    const fdma_tensor *const expiry = &problem->expiry;
    if (!problem->selected || problem->kv_len == 0)
        return NULL;
    return (const int32_t *)expiry->data + b * expiry->stride[0] + g * expiry->stride[1];
}

/* Appends to `to` the keys out of `from` (or first, first + 1, ... if NULL) that outlive
 * `position`. */
static int64_t filter_alive(int32_t *to, int64_t used, int64_t capacity, const int32_t *from,
                            int64_t first, int64_t count, const int32_t *expiry, int64_t position) {
    for (int64_t n = 0; n < count && used < capacity; n++) {
        const int32_t j = from ? from[n] : (int32_t)(first + n);
        to[used] = j;
        used += expiry[j] > position;
    }
    return used;
}

/* Each snapshot is what is left of the one before, and of the keys that came in between. */
static void fill_snapshots(const fdma_problem *problem, const snapshots *all, int64_t head) {
    const int64_t b = head / problem->kv_heads, g = head % problem->kv_heads;
    const int32_t *const expiry = expiry_row(problem, b, g);
    const int32_t *previous = NULL;
    int64_t length = 0;
    for (int64_t n = 0; n < all->count; n++) {
        const int64_t index = head * all->count + n, position = (n + 1) * all->step;
        int32_t *const keys = all->keys + index * all->capacity;
        const int64_t old = length;
        length = old ? filter_alive(keys, 0, all->capacity, previous, 0, old, expiry, position) : 0;
        length = filter_alive(keys, length, all->capacity, NULL, position - all->step, all->step,
                              expiry, position);
        all->length[index] = (int32_t)length;
        previous = keys;
    }
}

/* The keys still to be visited by a tile. */
typedef struct key_walk {
    const int32_t *live; /* from a snapshot */
    int64_t live_count;
    int64_t next, end; /* then these */
    const int32_t *expiry;
    const uint8_t *valid;
    int32_t first_position, last_position;
    int32_t *dying; /* [most_lanes], those that expire inside */
    int32_t dying_count;
    bool is_sorted;
} key_walk;

static key_walk start_walk(const fdma_problem *problem, const snapshots *all,
                           const tile_place *place, int32_t *dying) {
    const fdma_tensor *const valid = &problem->key_valid;
    key_walk walk = {
        .end = place->last_position + 1,
        .expiry = expiry_row(problem, place->b, place->g),
        .first_position = place->first_position,
        .last_position = place->last_position,
        .dying = dying,
    };
    if (is_present(valid) && problem->kv_len > 0)
        walk.valid = (const uint8_t *)valid->data + place->b * valid->stride[0];
    int64_t n = place->first_position < 0 ? 0 : place->first_position / all->step;
    n = n < all->count ? n : all->count;
    if (n > 0) {
        const int64_t index = (place->b * problem->kv_heads + place->g) * all->count + n - 1;
        walk.live = all->keys + index * all->capacity;
        walk.live_count = all->length[index];
        walk.next = n * all->step;
    }
    return walk;
}

/* Whether a row at `first_position` or later may keep key j, by its expiry and validity (either may
 * be NULL). Without a branch on what these say: it is hard to foresee. */
INLINE bool outlives(const int32_t *expiry, const uint8_t *valid, int32_t first_position,
                     int32_t j) {
    const int32_t from = j > first_position ? j : first_position;
    bool kept = true;
    if (expiry)
        kept = expiry[j] > from;
    if (valid)
        kept &= valid[j] != 0;
    return kept;
}

static bool is_visited(const key_walk *walk, int32_t j) {
    return outlives(walk->expiry, walk->valid, walk->first_position, j);
}

/* Lists key j, or puts it aside. A sound selection loses no more keys than there are positions; of
 * another one, those that find no place are listed early. */
static int32_t take_key(key_walk *walk, int32_t *keys, int32_t count, int32_t j) {
    const bool visited = is_visited(walk, j);
    if (visited && walk->expiry && walk->expiry[j] <= walk->last_position &&
        walk->dying_count < most_lanes) {
        walk->dying[walk->dying_count++] = j;
        return count;
    }
    keys[count] = j;
    return count + visited;
}

/* By insertion: they are few. The end, which is taken first, expires last. */
static void sort_dying(key_walk *walk) {
    for (int32_t n = 1; n < walk->dying_count && !walk->is_sorted; n++) {
        const int32_t j = walk->dying[n];
        int32_t to = n;
        for (; to > 0 && walk->expiry[walk->dying[to - 1]] > walk->expiry[j]; to--)
            walk->dying[to] = walk->dying[to - 1];
        walk->dying[to] = j;
    }
    walk->is_sorted = true;
}

/* Writes up to key_block keys; 0 at the end. */
static int32_t next_keys(key_walk *walk, int32_t *keys) {
    int32_t count = 0;
    for (; walk->live_count > 0 && count < key_block; walk->live++, walk->live_count--)
        count = take_key(walk, keys, count, *walk->live);
    for (; walk->next <= walk->first_position && count < key_block; walk->next++)
        count = take_key(walk, keys, count, (int32_t)walk->next);
    if (count == key_block)
        return count;
    sort_dying(walk);
    while (walk->dying_count > 0 && count < key_block)
        keys[count++] = walk->dying[--walk->dying_count];
    for (; walk->next < walk->end && count < key_block; walk->next++) {
        keys[count] = (int32_t)walk->next;
        count += is_visited(walk, (int32_t)walk->next);
    }
    return count;
}

/* A block of keys, ready for the two products. The rows of a tile that keep a key are one range of
 * lanes; of a group of score_keys keys that every row keeps, the ranges are not looked at. */
typedef struct key_list {
    int32_t count;
    bool cut[key_groups];
    int32_t word_size; /* bytes of a word at the sources */
    int32_t key[key_block];
    const void *k_source[key_block]; /* the caller's rows */
    const void *v_source[key_block];
    float bias[key_block];
    int32_t first_lane[key_block];
    int32_t end_lane[key_block];
} key_list;

static int32_t clamp_lane(int64_t lane) {
    return (int32_t)(lane < 0 ? 0 : lane > most_lanes ? most_lanes : lane);
}

/* Rows of a tile keep key j from its own position on, until it expires. */
static void mark_lanes(const fdma_problem *problem, const tile_place *place, key_list *list) {
    const int32_t *const expiry = expiry_row(problem, place->b, place->g);
    const int64_t origin = query_position(problem, 0), group = problem->group;
    for (int32_t n = 0; n < list->count; n++) {
        const int32_t j = list->key[n];
        const bool whole = !problem->causal || (j <= place->first_position &&
                                                (!expiry || expiry[j] > place->last_position));
        if (n % score_keys == 0)
            list->cut[n / score_keys] = false;
        list->first_lane[n] = 0;
        list->end_lane[n] = most_lanes;
        if (whole)
            continue;
        list->cut[n / score_keys] = true;
        list->first_lane[n] = clamp_lane((j - origin) * group - place->first_row);
        if (expiry)
            list->end_lane[n] = clamp_lane((expiry[j] - origin) * group - place->first_row);
    }
}

/* Where the rows of some keys of k or v are. */
static void find_rows(const fdma_tensor *tensor, int64_t b, int64_t g, const int32_t *key,
                      int32_t count, const void **sources) {
    const int64_t step = tensor->stride[1] * (int64_t)fdma_dtype_size(tensor->dtype);
    const uint8_t *const data = row_at(tensor, b * tensor->stride[0] + g * tensor->stride[2]);
    for (int32_t n = 0; n < count; n++)
        sources[n] = data + key[n] * step;
}

/* The bias of some keys, 0 where there is none. */
static void find_bias(const fdma_tensor *bias, int64_t b, int64_t g, const int32_t *key,
                      int32_t count, float *to) {
    const int64_t row = b * bias->stride[0] + g * bias->stride[1];
    for (int32_t n = 0; n < count; n++)
        to[n] = is_present(bias) ? ((const float *)bias->data)[row + key[n]] : 0;
}

/* Asks for a cache line of each of some rows, where one begins at this byte, to be in the L2 cache.
 */
INLINE void prefetch_rows(const void *const *rows, int count, int64_t byte) {
    if (byte % 64 != 0)
        return;
    UNROLL
    for (int n = 0; n < count; n++)
        __builtin_prefetch((const uint8_t *)rows[n] + byte, 0, 2);
}

/* The next block, of no keys at the end. What it lacks is filled up with rows of zeros that none
 * keeps, so that whole groups can be worked on, and asked for ahead. */
static void list_keys(const fdma_problem *problem, const tile_place *place, key_walk *walk,
                      const tile_state *tile, key_list *list) {
    list->count = next_keys(walk, list->key);
    list->word_size = (int32_t)fdma_dtype_size(problem->dtype) * terms;
    mark_lanes(problem, place, list);
    find_rows(&problem->k, place->b, place->g, list->key, list->count, list->k_source);
    find_rows(&problem->v, place->b, place->g, list->key, list->count, list->v_source);
    find_bias(&problem->bias, place->b, place->g, list->key, list->count, list->bias);
    for (int32_t n = list->count; n < key_block; n++) {
        list->cut[n / score_keys] = true;
        list->k_source[n] = list->v_source[n] = tile->zeros;
        list->bias[n] = 0;
        list->first_lane[n] = list->end_lane[n] = 0;
    }
}

static int32_t whole_steps(int32_t keys) { return (keys + key_step - 1) / key_step * key_step; }

/* Rows of the listed keys side by side: where they lie, rows may all fall into the same few sets of
 * the L1 cache, each on a page of its own. Zeros are zeros in every dtype. */
static void load_keys(const fdma_problem *problem, float *rows, const void *const *sources,
                      int32_t count) {
    const int64_t words = problem->head_dim / terms, tile_words = tile_dim(problem) / terms;
    for (int32_t n = 0; n < whole_steps(count); n++) {
        float *const to = rows + n * padded_row(tile_words * terms);
        for (int64_t w = 0; w < tile_words; w += vf_width) {
            const int64_t some = channels_at(w, words);
            const int64_t tile_some = channels_at(w, tile_words);
            vf_store_first(to + w, load_words(sources[n], problem->dtype, w, some), tile_some);
        }
    }
}

#endif
