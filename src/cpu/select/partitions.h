/* Selection in parallel: where threads outnumber the (b, g), the keys of each are cut into partitions.
 *
 * In causal scope a partition needs the set that is kept when it begins: the best of all keys before
 * it. The best of each partition are found without a pass (of the first one: by its pass), and merged
 * from partition to partition. Then each partition makes a pass of its own from that set, in which
 * keys get slots that are numbered within the partition; these are renamed when all passes are done.
 * Global scope needs only the best keys of all. Results do not depend on where keys are cut. */
#ifndef FDMA_CPU_SELECT_PARTITIONS_H
#define FDMA_CPU_SELECT_PARTITIONS_H

#include "core/integers.h"
#include "cpu/parallel.h"
#include "cpu/select/best_keys.h"

typedef struct select_context {
    const fdma_problem *problem;
    int64_t heads; /* batch * kv_heads */
    int32_t threads;
    int32_t slots;          /* min(window, kv_len) */
    int32_t partitions;     /* of each (b, g) */
    int32_t partition_keys; /* keys of each partition but the last */
    /* arrays of [heads][partitions]: */
    int64_t *best;   /* [slots] orders of its best keys; once merged, of the best up to its end */
    int32_t *count;  /* how many of these there are */
    int32_t *expiry; /* [slots] of the keys kept when it began, as far as it decides them */
    int32_t *true_slot; /* [slots] of the slots 0, 1, ... that its pass numbered */
    uint8_t *scratch;   /* [threads][scratch_size] */
    size_t scratch_size;
} select_context;

enum {
    least_partitions = 3,           /* of two, the second would wait for the first */
    least_partition_keys = 1 << 17, /* fewer take no longer than waking threads in every phase */
    partition_windows = 64,         /* in keys: each slot costs a partition as much as many keys */
    keys_a_microsecond = 500,       /* that a thread selects from, about */
};

/* How many partitions of each (b, g) pay: one more than the threads that it gets, because while the
 * first one is passed over, the best of the next ones are found. */
static int64_t count_select_partitions(const fdma_problem *problem) {
    const int64_t heads = max(problem->batch * problem->kv_heads, 1);
    const int64_t threads = fdma_thread_count(problem->exec.threads, INT32_MAX);
    const int64_t slots = min(problem->window, problem->kv_len);
    const int64_t most = problem->kv_len / max(partition_windows * slots, least_partition_keys);
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

/* The rows of one (b, g). */
typedef struct select_rows {
    const float *score;
    const uint8_t *valid;
    int32_t *expiry, *slot; /* slot: NULL if the caller does not ask for slots */
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

static key_range find_range(const select_context *select, const select_rows *rows, int32_t nth) {
    const int32_t first = nth * select->partition_keys;
    const int32_t left = (int32_t)select->problem->kv_len - first;
    return (key_range){
        .score = rows->score + first,
        .valid = rows->valid ? rows->valid + first : NULL,
        .first = first,
        .count = left < select->partition_keys ? left : select->partition_keys,
    };
}

/* Scratch memory for one task: the buffer or the rest. */
typedef struct select_scratch {
    order_buffer buffer;
    kept_set set;
    int32_t *slot; /* [partition_keys], where the caller does not ask for slots */
} select_scratch;

static size_t lay_out_best(const select_context *select, uint8_t *base, select_scratch *scratch) {
    fdma_arena arena = {.base = base};
    const int64_t capacity = buffer_capacity(select->slots, select->partition_keys);
    scratch->buffer = (order_buffer){
        .orders = fdma_arena_take(&arena, (size_t)capacity * sizeof(int64_t)),
        .spare = fdma_arena_take(&arena, (size_t)capacity * sizeof(int64_t)),
        .capacity = capacity,
    };
    return arena.used;
}

static size_t lay_out_pass(const select_context *select, uint8_t *base, select_scratch *scratch) {
    fdma_arena arena = {.base = base};
    const size_t keys = is_present(&select->problem->slot) ? 0 : (size_t)select->partition_keys;
    const size_t tree = (size_t)tree_size(select->slots);
    const uint32_t ring = queue_ring(select->slots);
    scratch->set = (kept_set){
        .slots = select->slots,
        .ring = ring,
        .tree = fdma_arena_take(&arena, tree * sizeof(int64_t)),
        .queue = fdma_arena_take(&arena, ((size_t)ring + 1) * sizeof(int64_t)),
    };
    scratch->slot = fdma_arena_take(&arena, keys * sizeof(int32_t));
    return arena.used;
}

static fdma_arena lay_out_select(select_context *select) {
    const bool global = select->problem->scope == FDMA_SCOPE_GLOBAL, split = select->partitions > 1;
    const size_t all = (size_t)select->heads * (size_t)select->partitions;
    const size_t kept = all * (size_t)select->slots;
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
        select->true_slot = fdma_arena_take(&arena, kept * sizeof *select->true_slot);
    }
    select->threads =
        fdma_worthwhile_threads(select->problem->exec.threads, select->heads * select->partitions,
                                select->heads * select->problem->kv_len / keys_a_microsecond);
    select->scratch_size = best_size > pass_size ? best_size : pass_size;
    select->scratch = fdma_arena_take(&arena, (size_t)select->threads * select->scratch_size);
    return arena;
}

static uint8_t *thread_scratch(const select_context *select, int32_t thread) {
    return select->scratch + (size_t)thread * select->scratch_size;
}

/* The index of a partition's first element in the arrays of [slots] elements. */
static int64_t partition_offset(const select_context *select, int64_t head, int32_t nth) {
    return (head * select->partitions + nth) * select->slots;
}

static void find_partition_best(const select_context *select, int64_t head, int32_t nth,
                                int32_t thread) {
    const select_rows rows = find_select_rows(select->problem, head);
    const key_range keys = find_range(select, &rows, nth);
    select_scratch scratch;
    lay_out_best(select, thread_scratch(select, thread), &scratch);
    select->count[head * select->partitions + nth] = find_best(
        &keys, select->slots, scratch.buffer, select->best + partition_offset(select, head, nth));
}

/* The pass over the first partition. Its kept keys are its best: these are sorted for merge_task(),
 * in the memory of the set. */
static void pass_first(const select_context *select, int64_t head, int32_t thread) {
    const select_rows rows = find_select_rows(select->problem, head);
    select_scratch scratch;
    lay_out_pass(select, thread_scratch(select, thread), &scratch);
    const select_pass pass = {
        .keys = find_range(select, &rows, 0),
        .kv_len = (int32_t)select->problem->kv_len,
        .expiry = rows.expiry,
        .slot = rows.slot != NULL ? rows.slot : scratch.slot,
    };
    select_keys(&pass, &scratch.set);
    if (select->partitions == 1)
        return;
    if (pass.keys.count <= select->slots) { // the set has not been stored
        find_partition_best(select, head, 0, thread);
        return;
    }
    int64_t *const best = select->best + partition_offset(select, head, 0);
    order_buffer kept = {.orders = best, .spare = scratch.set.tree};
    kept.count = list_kept(&scratch.set, best);
    sort_orders(&kept, 0);
    memmove(best, kept.orders, (size_t)kept.count * sizeof *best);
    select->count[head * select->partitions] = kept.count;
}

/* The pass of a later partition. */
static void pass_partition(const select_context *select, int64_t head, int32_t nth,
                           int32_t thread) {
    const select_rows rows = find_select_rows(select->problem, head);
    const int64_t at = partition_offset(select, head, nth);
    select_scratch scratch;
    lay_out_pass(select, thread_scratch(select, thread), &scratch);
    const select_pass pass = {
        .keys = find_range(select, &rows, nth),
        .kv_len = (int32_t)select->problem->kv_len,
        .before = select->count[head * select->partitions + nth - 1],
        .kept = select->best + at - select->slots,
        .kept_expiry = select->expiry + at,
        .expiry = rows.expiry + (int64_t)nth * select->partition_keys,
        .slot =
            rows.slot != NULL ? rows.slot + (int64_t)nth * select->partition_keys : scratch.slot,
    };
    select_keys(&pass, &scratch.set);
}

/* For each (b, g) the pass over its first nth, which takes longest, then the best of every other
 * partition but the last. */
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
    pass_partition(select, index / later, 1 + (int32_t)(index % later), thread);
}

/* Turns the best of each partition into the best of all keys up to its end. Causal scope has no use for
 * those of the last. */
static void merge_task(const void *context, int64_t head, int32_t thread) {
    const select_context *const select = context;
    const int32_t partitions = select->partitions - (select->problem->scope == FDMA_SCOPE_CAUSAL);
    int32_t *const count = select->count + head * select->partitions;
    select_scratch scratch;
    lay_out_best(select, thread_scratch(select, thread), &scratch);
    int64_t *const merged = scratch.buffer.orders;
    for (int32_t n = 1; n < partitions; n++) {
        int64_t *const best = select->best + partition_offset(select, head, n);
        count[n] =
            merge_best(best - select->slots, count[n - 1], best, count[n], select->slots, merged);
        memcpy(best, merged, (size_t)count[n] * sizeof *best);
    }
}

static int32_t *true_slots(const select_context *select, int64_t head, int32_t nth) {
    return select->true_slot + partition_offset(select, head, nth);
}

/* A key that was kept when a partition began keeps the true slot that it had in its own partition. The
 * free slots of a set that was not full were numbered truly. */
static void find_true_slots(const select_context *select, const select_rows *rows, int64_t head,
                            int32_t nth) {
    const int64_t offset = partition_offset(select, head, nth);
    const int64_t *const kept = select->best + offset - select->slots;
    const int32_t count = select->count[head * select->partitions + nth - 1];
    int32_t *const slot = true_slots(select, head, nth);
    for (int32_t n = 0; n < count; n++) {
        const int32_t key = key_of(kept[n]);
        slot[n] = true_slots(select, head, key / select->partition_keys)[rows->slot[key]];
    }
    for (int32_t n = count; n < select->slots; n++)
        slot[n] = n;
}

static void true_slot_task(const void *context, int64_t head, int32_t thread) {
    const select_context *const select = context;
    const select_rows rows = find_select_rows(select->problem, head);
    (void)thread;
    for (int32_t n = 0; n < select->slots; n++)
        true_slots(select, head, 0)[n] = n;
    for (int32_t nth = 1; nth < select->partitions; nth++)
        find_true_slots(select, &rows, head, nth);
}

/* Renames the slots of a later nth, and writes the expiry of the keys that were kept when it began
 * and that it evicted. No other partition evicts these. */
static void finish_task(const void *context, int64_t index, int32_t thread) {
    const select_context *const select = context;
    const int64_t head = index / (select->partitions - 1);
    const int32_t nth = 1 + (int32_t)(index % (select->partitions - 1));
    const select_rows rows = find_select_rows(select->problem, head);
    const key_range keys = find_range(select, &rows, nth);
    const int64_t at = partition_offset(select, head, nth);
    const int64_t *const kept = select->best + at - select->slots;
    const int32_t count = select->count[head * select->partitions + nth - 1];
    const int32_t *const true_slot = true_slots(select, head, nth);
    (void)thread;
    for (int32_t n = 0; n < count; n++)
        if (select->expiry[at + n] < (int32_t)select->problem->kv_len)
            rows.expiry[key_of(kept[n])] = select->expiry[at + n];
    for (int32_t j = keys.first; rows.slot != NULL && j < keys.first + keys.count; j++)
        if (rows.slot[j] >= 0)
            rows.slot[j] = true_slot[rows.slot[j]];
}

/* Global scope: keeps the keys of a partition that are among the best of all. Slots are numbered in the
 * order of the keys. */
static void mark_task(const void *context, int64_t index, int32_t thread) {
    const select_context *const select = context;
    const int64_t head = index / select->partitions, last = (head + 1) * select->partitions - 1;
    const select_rows rows = find_select_rows(select->problem, head);
    const key_range keys = find_range(select, &rows, (int32_t)(index % select->partitions));
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
        const bool stays = valid && key_order(keys.score[n], j) >= least;
        rows.expiry[j] = stays ? (int32_t)select->problem->kv_len : j;
        if (rows.slot != NULL)
            rows.slot[j] = stays ? slot : -1;
        slot += stays;
    }
}

static void select_global(const select_context *select) {
    const int64_t partitions = select->heads * select->partitions;
    fdma_parallel_for(select->threads, partitions, find_task, select);
    fdma_parallel_for(select->threads, select->heads, merge_task, select);
    fdma_parallel_for(select->threads, partitions, mark_task, select);
}

static void select_causal(const select_context *select) {
    const int64_t later = select->heads * (select->partitions - 1);
    fdma_parallel_for(select->threads, max(later, select->heads), prepare_task, select);
    if (later == 0)
        return;
    fdma_parallel_for(select->threads, select->heads, merge_task, select);
    fdma_parallel_for(select->threads, later, pass_task, select);
    if (is_present(&select->problem->slot))
        fdma_parallel_for(select->threads, select->heads, true_slot_task, select);
    fdma_parallel_for(select->threads, later, finish_task, select);
}

static void select_partitions(const select_context *select) {
    if (select->problem->scope == FDMA_SCOPE_GLOBAL)
        select_global(select);
    else
        select_causal(select);
}

#endif
