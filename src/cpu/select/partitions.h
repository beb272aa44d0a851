/* Selection: if threads outnumber the (b, g), the keys of each are cut into partitions.
 *
 * In causal scope a partition needs the set that is kept when it begins: the best of all keys
 * before it. The best of each partition are found without a pass (of the first one: by its pass),
 * and merged from partition to partition. Then each partition makes a pass of its own from that
 * set. Its keys get slots that are numbered within the partition; these are renamed when all passes
 * are done. Global scope needs only the best keys of all. Results do not depend on where keys are
 * cut. */
#pragma once

#include "core/integers.h"
#include "cpu/common/memory.h"
#include "cpu/parallel.h"
#include "cpu/select/kept_set.h"

/* ---- the rule `gap` ---- */

/* The rule `gap`: a key leaves the selection that the other rules make once its score is more than
 * `gap` below the best score so far, unless it is a sink or among the `recent` newest keys.
 *
 * The best score only rises, so the position from which on a score is too low is found by binary
 * search in the best scores of all prefixes. */

/* Fills best[] with the highest score of the valid keys up to each position, -inf before the first.
 * Returns the last one. */
static float find_best_scores(const float *score, const uint8_t *valid, int64_t kv_len,
                              float *best) {
    float highest = -INFINITY;
    for (int64_t j = 0; j < kv_len; j++) {
        const bool rises = (valid == NULL || valid[j] != 0) && score[j] > highest; // not if NaN
        best[j] = highest = rises ? score[j] : highest;
    }
    return highest;
}

/* The first position from `first` to `end` - 1 at which a score is too low, or `end`. */
static int32_t find_too_low(const float *best, int32_t first, int32_t end, float score,
                            double gap) {
    while (first < end) {
        const int32_t middle = first + (end - first) / 2;
        if (falls_below((double)score, (double)best[middle], gap))
            end = middle;
        else
            first = middle + 1;
    }
    return end;
}

/* The position of the first valid key from j on; kv_len if there is none. */
static int64_t next_valid(const uint8_t *valid, int64_t j, int64_t kv_len) {
    while (j < kv_len && valid != NULL && valid[j] == 0)
        j++;
    return j;
}

/* Applies the rule to the selection of one (b, g), whose valid keys before `sinks_end` are sinks.
 * best: [kv_len], scratch. */
static void keep_near_best(const fdma_problem *problem, int64_t head, int32_t sinks_end,
                           float *best) {
    const int64_t b = head / problem->kv_heads, g = head % problem->kv_heads;
    const int64_t kv_len = problem->kv_len;
    const uint8_t *const valid = valid_keys(problem, b);
    const float *const score = float_at(&problem->score, b, g, 0);
    int32_t *const expiry = int_at(&problem->expiry, b, g, 0);
    int32_t *const slot = is_present(&problem->slot) ? int_at(&problem->slot, b, g, 0) : NULL;
    const double highest = (double)find_best_scores(score, valid, kv_len, best);
    int64_t j = next_valid(valid, 0, kv_len), from = j; // where j is no longer among the newest
    for (int64_t n = 0; n < problem->recent && from < kv_len; n++)
        from = next_valid(valid, from + 1, kv_len);
    for (; from < kv_len; j = next_valid(valid, j + 1, kv_len)) {
        if (j >= sinks_end && expiry[j] > from &&
            falls_below((double)score[j], highest, problem->gap))
            expiry[j] = find_too_low(best, (int32_t)from, expiry[j], score[j], problem->gap);
        if (slot != NULL && expiry[j] == j)
            slot[j] = -1;
        from = next_valid(valid, from + 1, kv_len);
    }
}

/* ---- the rule `recent` ---- */

/* The rule `recent`: a query keeps the `recent` newest valid keys, and the best `window` of the
 * older ones.
 *
 * A key competes by score only once `recent` valid keys have followed it. So the selection is the
 * one without the rule, delayed by `recent` valid keys: each expiry moves by that many. If the
 * arrival of valid key n drops a key without the rule, that key now leaves when valid key n +
 * recent arrives, which takes over its slot. The first window + recent valid keys take free
 * slots. */

/* Valid keys are numbered in ascending order. */
typedef struct recent_keys {
    int32_t *number;   /* [kv_len] of each valid key; NULL: all keys are valid */
    int32_t *position; /* [kv_len] by number; NULL likewise */
    int32_t *evicted;  /* [kv_len]: the key that the window drops as valid key n arrives */
} recent_keys;

static recent_keys take_recent(fdma_arena *arena, const fdma_problem *problem) {
    const int64_t mapped = is_present(&problem->key_valid) ? problem->kv_len : 0;
    recent_keys keys = {0};
    int32_t *const number = take_ints(arena, mapped), *const position = take_ints(arena, mapped);
    keys.evicted = take_ints(arena, is_present(&problem->slot) ? problem->kv_len : 0);
    if (mapped > 0)
        keys.number = number, keys.position = position;
    return keys;
}

/* Numbers the valid keys of a sequence. Returns their number. */
static int32_t number_keys(const fdma_problem *problem, const uint8_t *valid, recent_keys keys) {
    int32_t count = 0;
    if (valid == NULL)
        return (int32_t)problem->kv_len;
    for (int32_t j = 0; j < (int32_t)problem->kv_len; j++) {
        keys.number[j] = count;
        keys.position[count] = j;
        count += valid[j] != 0;
    }
    return count;
}

static inline int32_t position_of(recent_keys keys, int32_t number) {
    return keys.position != NULL ? keys.position[number] : number;
}

static inline int32_t number_of(recent_keys keys, int32_t position) {
    return keys.number != NULL ? keys.number[position] : position;
}

/* Moves the expiries of the valid keys by `recent` valid keys, and fills keys.evicted. */
static void move_expiries(const fdma_problem *problem, recent_keys keys, int32_t count,
                          int32_t *expiry, bool wants_slots) {
    const int32_t kv_len = (int32_t)problem->kv_len;
    const int64_t recent = min(problem->recent, problem->kv_len);
    for (int32_t n = 0; n < count; n++) {
        const int32_t j = position_of(keys, n);
        const int32_t end = expiry[j] < kv_len ? number_of(keys, expiry[j]) : count;
        expiry[j] = end < count - recent ? position_of(keys, (int32_t)(end + recent)) : kv_len;
        if (wants_slots && end < count)
            keys.evicted[end] = n;
    }
}

static void number_slots(const fdma_problem *problem, const uint8_t *valid, recent_keys keys,
                         int32_t count, int32_t *slot) {
    const int64_t slots = problem->slots, recent = problem->recent;
    for (int64_t j = 0; valid != NULL && j < problem->kv_len; j++)
        slot[j] = -1;
    for (int32_t n = 0; n < count; n++)
        slot[position_of(keys, n)] =
            n < slots ? n : slot[position_of(keys, keys.evicted[n - recent])];
}

static void keep_recent(const fdma_problem *problem, int64_t head, recent_keys keys) {
    const int64_t b = head / problem->kv_heads, g = head % problem->kv_heads;
    const uint8_t *const valid = valid_keys(problem, b);
    const bool wants_slots = is_present(&problem->slot);
    const int32_t count = number_keys(problem, valid, keys);
    move_expiries(problem, keys, count, int_at(&problem->expiry, b, g, 0), wants_slots);
    if (wants_slots)
        number_slots(problem, valid, keys, count, int_at(&problem->slot, b, g, 0));
}

/* ---- partitions ---- */

typedef struct select_context {
    const fdma_problem *problem;
    int64_t heads; /* batch * kv_heads */
    int32_t threads;
    int32_t slots;          /* slots for keys that are kept by score: at most the window */
    int32_t partitions;     /* partitions of each (b, g) */
    int32_t partition_keys; /* keys of each partition but the last */
    /* arrays of [heads][partitions]: */
    int64_t *best;   /* [slots] orders of its best keys; once merged, of the best up to its end */
    int32_t *count;  /* the number of these */
    int32_t *expiry; /* [slots] of the keys kept when it began, as far as it decides them */
    int32_t *true_slot; /* [slots] of the slots 0, 1, ... that its pass numbered */
    uint8_t *scratch;   /* [threads][scratch_size] */
    size_t scratch_size;
    size_t
        rule_size; /* of a thread's scratch in recent_task() and gap_task(), in the same memory */
} select_context;

enum {
    least_partitions = 3,           /* with two, the second would wait for the first */
    least_partition_keys = 1 << 17, /* fewer take no longer than waking threads in every phase */
    partition_windows = 64,         /* in keys: each slot costs a partition as much as many keys */
    keys_per_microsecond = 500,     /* selected from by one thread, about */
};

/* The number of partitions of each (b, g) that pays off: one more than its threads, because the
 * best of the next partitions are found during the pass over the first. */
static int64_t count_select_partitions(const fdma_problem *problem) {
    const int64_t heads = max(problem->batch * problem->kv_heads, 1);
    const int64_t threads = fdma_thread_count(problem->exec.threads, INT32_MAX);
    const int64_t window = min(problem->window, problem->kv_len);
    const int64_t least = max(partition_windows * window, least_partition_keys);
    const int64_t most = problem->kv_len / least;
    const int64_t partitions = min(most, threads / heads + 1);
    return partitions < least_partitions ? 1 : partitions;
}

static select_context cut_partitions(const fdma_problem *problem, int64_t partitions) {
    const int64_t keys = max(divide_up(problem->kv_len, partitions), 1);
    return (select_context){
        .problem = problem,
        .heads = problem->batch * problem->kv_heads,
        .slots = (int32_t)min(problem->window, problem->kv_len),
        .partition_keys = (int32_t)keys,
        .partitions = (int32_t)max(divide_up(problem->kv_len, keys), 1),
    };
}

/* The tensors' elements of one partition, and its number among the partitions of all (b, g). */
typedef struct select_partition {
    int64_t index;
    key_range keys;
    int32_t *expiry, *slot; /* [keys.count]; slot: NULL if the passes need not keep slots */
} select_partition;

/* True if the passes write the caller's slots; with `recent`, number_slots() writes them later. */
static bool keeps_slots(const fdma_problem *problem) {
    return is_present(&problem->slot) && problem->recent == 0;
}

/* Number of keys, at most `count`, up to the last sink of a sequence, padding included. */
static int32_t find_sinks_end(const fdma_problem *problem, const uint8_t *valid, int64_t count) {
    int64_t sinks = min(problem->sinks, problem->kv_len), n = 0;
    if (valid == NULL)
        return (int32_t)min(sinks, count);
    for (; n < count && sinks > 0; n++)
        sinks -= valid[n] != 0;
    return (int32_t)n;
}

static select_partition find_partition(const select_context *select, int64_t head, int32_t nth) {
    const fdma_problem *const problem = select->problem;
    const int64_t b = head / problem->kv_heads, g = head % problem->kv_heads;
    const int32_t first = nth * select->partition_keys;
    const uint8_t *const valid = valid_keys(problem, b);
    const int64_t count = min(problem->kv_len - first, select->partition_keys);
    const int32_t sinks_end = find_sinks_end(problem, valid, first + count);
    return (select_partition){
        .index = head * select->partitions + nth,
        .keys = {.score = float_at(&problem->score, b, g, first),
                 .valid = valid != NULL ? valid + first : NULL,
                 .first = first,
                 .count = (int32_t)count,
                 .sinks_end = sinks_end > first ? sinks_end - first : 0},
        .expiry = int_at(&problem->expiry, b, g, first),
        .slot = keeps_slots(problem) ? int_at(&problem->slot, b, g, first) : NULL,
    };
}

static int64_t *take_orders(fdma_arena *arena, int64_t count) {
    return fdma_arena_take(arena, (size_t)count * sizeof(int64_t));
}

static order_buffer take_buffer(fdma_arena *arena, const select_context *select) {
    order_buffer buffer = {.capacity = buffer_capacity(select->slots, select->partition_keys)};
    buffer.orders = take_orders(arena, buffer.capacity);
    buffer.spare = take_orders(arena, buffer.capacity);
    return buffer;
}

static kept_set take_set(fdma_arena *arena, const select_context *select, int32_t **slot) {
    kept_set set = {.slots = select->slots, .ring = queue_ring(select->slots)};
    set.tree = take_orders(arena, tree_size(select->slots));
    set.queue = take_orders(arena, (int64_t)set.ring + 1);
    *slot = take_ints(arena, keeps_slots(select->problem) ? 0 : select->partition_keys);
    return set;
}

/* Divides the workspace, and returns the bytes that the call needs of it. A thread has scratch
 * memory for one task at a time. */
static size_t lay_out_select(select_context *select) {
    const bool global = select->problem->scope == FDMA_SCOPE_GLOBAL, split = select->partitions > 1;
    const int64_t all = select->heads * select->partitions, kept = all * select->slots;
    fdma_arena arena = fdma_arena_of(select->problem), best = {0}, pass = {0};
    fdma_arena recent = {0}, gap = {0};
    int32_t *slot;
    if (global || split) {
        take_buffer(&best, select);
        select->best = take_orders(&arena, kept);
        select->count = take_ints(&arena, all);
    }
    if (!global)
        take_set(&pass, select, &slot);
    if (!global && split) {
        select->expiry = take_ints(&arena, kept);
        select->true_slot = take_ints(&arena, kept);
    }
    if (select->problem->recent > 0)
        take_recent(&recent, select->problem);
    if (select->problem->gap > 0)
        take_floats(&gap, select->problem->kv_len);
    select->threads =
        fdma_worthwhile_threads(select->problem->exec.threads, all,
                                select->heads * select->problem->kv_len / keys_per_microsecond);
    select->scratch_size = best.used > pass.used ? best.used : pass.used;
    select->rule_size = recent.used > gap.used ? recent.used : gap.used;
    const size_t scratch = (size_t)select->threads * select->scratch_size;
    const size_t of_rules = (size_t)min(select->threads, select->heads) * select->rule_size;
    select->scratch = fdma_arena_take(&arena, scratch > of_rules ? scratch : of_rules);
    return fdma_arena_size(&arena);
}

static fdma_arena select_scratch(const select_context *select, int32_t thread) {
    return scratch_of_thread(select->scratch, select->scratch_size, thread);
}

/* The orders of the best keys of a partition; once merged, of all keys up to its end. */
static int64_t *best_of(const select_context *select, const select_partition *partition) {
    return select->best + partition->index * select->slots;
}

static void find_partition_best(const select_context *select, int64_t head, int32_t nth,
                                int32_t thread) {
    const select_partition partition = find_partition(select, head, nth);
    fdma_arena arena = select_scratch(select, thread);
    select->count[partition.index] = find_best(
        &partition.keys, select->slots, take_buffer(&arena, select), best_of(select, &partition));
}

/* Passes over a partition, and returns the set after it. The keys that were kept when it began are
 * the best of all keys before it. */
static kept_set pass_partition(const select_context *select, const select_partition *partition,
                               int32_t thread) {
    fdma_arena arena = select_scratch(select, thread);
    int32_t *unasked;
    kept_set set = take_set(&arena, select, &unasked);
    select_pass pass = {
        .keys = partition->keys,
        .kv_len = (int32_t)select->problem->kv_len,
        .expiry = partition->expiry,
        .slot = partition->slot != NULL ? partition->slot : unasked,
    };
    if (partition->keys.first > 0) {
        pass.before = select->count[partition->index - 1];
        pass.kept = best_of(select, partition) - select->slots;
        pass.kept_expiry = select->expiry + partition->index * select->slots;
    }
    select_keys(&pass, &set);
    return set;
}

/* Passes over the first partition. Its kept keys are its best keys. They are sorted for
 * merge_task(), in the memory of the set. */
static void pass_first(const select_context *select, int64_t head, int32_t thread) {
    const select_partition first = find_partition(select, head, 0);
    const kept_set set = pass_partition(select, &first, thread);
    if (select->partitions == 1)
        return;
    if (first.keys.count <= select->slots) { // the set has not been stored
        find_partition_best(select, head, 0, thread);
        return;
    }
    int64_t *const best = best_of(select, &first);
    order_buffer kept = {.orders = best, .spare = set.tree};
    kept.count = list_kept(&set, best);
    sort_orders(&kept, 0);
    memmove(best, kept.orders, (size_t)kept.count * sizeof *best);
    select->count[first.index] = kept.count;
}

/* For each (b, g), passes over the first partition, which takes longest, then finds the best of
 * every other partition except the last. */
static void prepare_task(const void *context, int64_t index, int32_t thread) {
    const select_context *const select = context;
    const int64_t heads = select->heads;
    if (index < heads)
        pass_first(select, index, thread);
    else
        find_partition_best(select, index % heads, (int32_t)(index / heads), thread);
}

static void find_task(const void *context, int64_t index, int32_t thread) {
    const select_context *const select = context;
    find_partition_best(select, index / select->partitions, (int32_t)(index % select->partitions),
                        thread);
}

static void pass_task(const void *context, int64_t index, int32_t thread) {
    const select_context *const select = context;
    const int32_t later = select->partitions - 1;
    const select_partition partition =
        find_partition(select, index / later, 1 + (int32_t)(index % later));
    pass_partition(select, &partition, thread);
}

/* Turns the best of each partition into the best of all keys up to its end. Causal scope does not
 * use the best of the last. */
static void merge_task(const void *context, int64_t head, int32_t thread) {
    const select_context *const select = context;
    const int32_t partitions = select->partitions - (select->problem->scope == FDMA_SCOPE_CAUSAL);
    int32_t *const count = select->count + head * select->partitions;
    fdma_arena arena = select_scratch(select, thread);
    int64_t *const merged = take_buffer(&arena, select).orders;
    for (int32_t n = 1; n < partitions; n++) {
        const select_partition partition = find_partition(select, head, n);
        int64_t *const best = best_of(select, &partition);
        count[n] =
            merge_best(best - select->slots, count[n - 1], best, count[n], select->slots, merged);
        memcpy(best, merged, (size_t)count[n] * sizeof *best);
    }
}

/* Finds the true slots of the slots of each pass. A key that was kept when a partition began keeps
 * the true slot that it had in its own partition. Free slots of a set that was not full have their
 * true numbers. */
static void true_slot_task(const void *context, int64_t head, int32_t thread) {
    const select_context *const select = context;
    const select_partition first = find_partition(select, head, 0);
    const int64_t slots = select->slots;
    (void)thread;
    for (int32_t nth = 0; nth < select->partitions; nth++) {
        const int64_t index = first.index + nth;
        const int64_t *const kept = select->best + (index - 1) * slots;
        const int32_t count = nth > 0 ? select->count[index - 1] : 0;
        int32_t *const slot = select->true_slot + index * slots;
        for (int32_t n = 0; n < count; n++) {
            const int32_t key = key_of(kept[n]), own = key / select->partition_keys;
            slot[n] = select->true_slot[(first.index + own) * slots + first.slot[key]];
        }
        for (int32_t n = count; n < slots; n++)
            slot[n] = n;
    }
}

/* Renames the slots of a later partition. Writes the expiry of the keys that were kept when it
 * began and that it evicted; no other partition evicts them. */
static void finish_task(const void *context, int64_t index, int32_t thread) {
    const select_context *const select = context;
    const int32_t later = select->partitions - 1, nth = 1 + (int32_t)(index % later);
    const select_partition partition = find_partition(select, index / later, nth);
    const int64_t *const kept = best_of(select, &partition) - select->slots;
    const int32_t count = select->count[partition.index - 1];
    const int32_t *const expiry = select->expiry + partition.index * select->slots;
    const int32_t *const true_slot = select->true_slot + partition.index * select->slots;
    int32_t *const slot = partition.slot;
    (void)thread;
    for (int32_t n = 0; n < count; n++)
        if (expiry[n] < (int32_t)select->problem->kv_len)
            partition.expiry[key_of(kept[n]) - partition.keys.first] = expiry[n];
    for (int32_t n = 0; slot != NULL && n < partition.keys.count; n++)
        if (slot[n] >= 0)
            slot[n] = true_slot[slot[n]];
}

/* Global scope: keeps the keys of a partition that are among the best of all. Slots are numbered
 * in the order of the keys. */
static void mark_task(const void *context, int64_t index, int32_t thread) {
    const select_context *const select = context;
    const int64_t head = index / select->partitions, last = (head + 1) * select->partitions - 1;
    const select_partition partition =
        find_partition(select, head, (int32_t)(index % select->partitions));
    const key_range keys = partition.keys;
    const int64_t *const best = select->best + last * select->slots;
    const int32_t count = select->count[last];
    const int64_t least = count < select->slots ? INT64_MIN : count > 0 ? best[0] : INT64_MAX;
    int32_t slot = 0;
    (void)thread;
    for (int32_t n = 0; n < count; n++)
        slot += key_of(best[n]) < keys.first;
    for (int32_t n = 0; n < keys.count; n++) {
        const int32_t j = keys.first + n;
        const bool valid = keys.valid == NULL || keys.valid[n];
        const bool stays = valid && order_in_range(&keys, n, j) >= least;
        partition.expiry[n] = stays ? (int32_t)select->problem->kv_len : j;
        if (partition.slot != NULL)
            partition.slot[n] = stays ? slot : -1;
        slot += stays;
    }
}

static void select_global(const select_context *select) {
    const int64_t partitions = select->heads * select->partitions;
    fdma_parallel_for(select->problem->exec.parallel, select->threads, partitions, find_task,
                      select);
    fdma_parallel_for(select->problem->exec.parallel, select->threads, select->heads, merge_task,
                      select);
    fdma_parallel_for(select->problem->exec.parallel, select->threads, partitions, mark_task,
                      select);
}

static void select_causal(const select_context *select) {
    const int64_t later = select->heads * (select->partitions - 1);
    fdma_parallel_for(select->problem->exec.parallel, select->threads, max(later, select->heads),
                      prepare_task, select);
    if (later == 0)
        return;
    fdma_parallel_for(select->problem->exec.parallel, select->threads, select->heads, merge_task,
                      select);
    fdma_parallel_for(select->problem->exec.parallel, select->threads, later, pass_task, select);
    if (keeps_slots(select->problem))
        fdma_parallel_for(select->problem->exec.parallel, select->threads, select->heads,
                          true_slot_task, select);
    fdma_parallel_for(select->problem->exec.parallel, select->threads, later, finish_task, select);
}

/* Turns the selection by score into one that also keeps the newest keys. */
static void recent_task(const void *context, int64_t head, int32_t thread) {
    const select_context *const select = context;
    fdma_arena arena = scratch_of_thread(select->scratch, select->rule_size, thread);
    keep_recent(select->problem, head, take_recent(&arena, select->problem));
}

/* Turns it into one whose keys also leave because their scores are too low. */
static void gap_task(const void *context, int64_t head, int32_t thread) {
    const select_context *const select = context;
    const fdma_problem *const problem = select->problem;
    const uint8_t *const valid = valid_keys(problem, head / problem->kv_heads);
    const int32_t sinks_end = find_sinks_end(problem, valid, problem->kv_len);
    fdma_arena arena = scratch_of_thread(select->scratch, select->rule_size, thread);
    keep_near_best(problem, head, sinks_end, take_floats(&arena, problem->kv_len));
}

static void select_partitions(const select_context *select) {
    if (select->problem->scope == FDMA_SCOPE_GLOBAL)
        select_global(select);
    else
        select_causal(select);
    if (select->problem->recent > 0)
        fdma_parallel_for(select->problem->exec.parallel, select->threads, select->heads,
                          recent_task, select);
    if (select->problem->gap > 0)
        fdma_parallel_for(select->problem->exec.parallel, select->threads, select->heads, gap_task,
                          select);
}
