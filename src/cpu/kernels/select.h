/* Select: one pass over the keys of a (b, g), in the order of their positions. The kept keys are
 * the leaves of a loser tree, leaf = slot, that finds the worst of them; a key that outranks it
 * takes its slot and replays one path of log2(window) matches, without a branch that depends on
 * data. */
#ifndef FDMA_CPU_KERNELS_SELECT_H
#define FDMA_CPU_KERNELS_SELECT_H

#include "core/plan.h"
#include "cpu/parallel.h"

#include <string.h>

/* The total order of keys as a number, greater being better: the score's bits in the order of the
 * reals above (NaN 0, both zeros alike), the key's index below. */
static inline uint64_t rank_of(float score, int32_t j) {
    const float canonical = score + 0.0f; // -0 + 0 = 0
    uint32_t bits;
    memcpy(&bits, &canonical, sizeof bits);
    const uint32_t flip = (uint32_t)((int32_t)bits >> 31) | 0x80000000u;
    const uint32_t order = canonical != canonical ? 0 : bits ^ flip;
    return (uint64_t)order << 32 | (uint32_t)j;
}

/* entries[leaves + slot] holds the ranks: makes entries[1] to [leaves - 1] the losers of the
 * matches at those nodes (children of n: 2n, 2n + 1) and returns the overall worst. */
static uint64_t build_tree(uint64_t *entries, int64_t leaves) {
    for (int64_t n = leaves - 1; n > 0; n--) {
        const uint64_t left = entries[2 * n], right = entries[2 * n + 1];
        entries[n] = left < right ? left : right;
    }
    const uint64_t worst = entries[1]; // with one leaf that is the leaf
    for (int64_t n = 1; n < leaves; n++) {
        const uint64_t left = entries[2 * n], right = entries[2 * n + 1];
        entries[n] = left < right ? right : left;
    }
    return worst;
}

/* Puts `rank` at leaf `slot`, where the overall worst was, and returns the new worst. */
static inline uint64_t replay(uint64_t *entries, int64_t leaves, int64_t slot, uint64_t rank) {
    for (int64_t n = (leaves + slot) / 2; n > 0; n /= 2) {
        const uint64_t other = entries[n];
        entries[n] = other < rank ? rank : other;
        rank = other < rank ? other : rank;
    }
    return rank;
}

typedef struct select_context {
    const fdma_problem *problem;
    int64_t leaves; /* min(window, kv_len) */
    uint8_t *scratch;
    size_t scratch_size; /* of one thread */
} select_context;

typedef struct select_scratch {
    uint64_t *entries; /* [2 * leaves] */
    int32_t *slot;     /* [kv_len], where the caller wants none */
} select_scratch;

static select_scratch take_select_scratch(fdma_arena *arena, const fdma_problem *problem,
                                          int64_t leaves) {
    const bool given = is_present(&problem->slot);
    return (select_scratch){
        .entries = fdma_arena_take(arena, (size_t)leaves * 2 * sizeof(uint64_t)),
        .slot = fdma_arena_take(arena, given ? 0 : (size_t)problem->kv_len * sizeof(int32_t)),
    };
}

/* Takes the first `leaves` valid keys as they come; returns the position after them. */
static int32_t fill_set(const float *score, const uint8_t *valid, int32_t kv_len, int64_t leaves,
                        uint64_t *entries, int32_t *expiry, int32_t *slot) {
    int32_t count = 0, j = 0;
    for (; j < kv_len && count < leaves; j++) {
        const bool taken = !valid || valid[j];
        expiry[j] = taken ? kv_len : j;
        slot[j] = taken ? count : -1;
        entries[leaves + count] = rank_of(score[j], j);
        count += taken;
    }
    return j;
}

static void select_causal(const float *score, const uint8_t *valid, int32_t kv_len, int64_t leaves,
                          uint64_t *entries, int32_t *expiry, int32_t *slot) {
    int32_t j = fill_set(score, valid, kv_len, leaves, entries, expiry, slot);
    // the set is full if keys are left; with no leaves no key is ever better than the worst
    uint64_t worst = leaves == 0 ? UINT64_MAX : j < kv_len ? build_tree(entries, leaves) : 0;
    for (; j < kv_len; j++) {
        const uint64_t rank = rank_of(score[j], j);
        const bool enters = rank > worst && (!valid || valid[j]);
        expiry[j] = enters ? kv_len : j;
        slot[j] = -1;
        if (!enters)
            continue;
        const uint32_t evicted = (uint32_t)worst;
        expiry[evicted] = j;
        slot[j] = slot[evicted];
        worst = replay(entries, leaves, slot[j], rank);
    }
}

/* Global scope: the keys that a causal pass keeps to the end, for every query. */
static void keep_survivors(int32_t kv_len, int32_t *expiry, int32_t *slot) {
    int32_t kept = 0;
    for (int32_t j = 0; j < kv_len; j++) {
        const bool stays = slot[j] >= 0 && expiry[j] == kv_len;
        expiry[j] = stays ? kv_len : j;
        slot[j] = stays ? kept : -1;
        kept += stays;
    }
}

static void select_head(const void *context, int64_t head, int32_t thread) {
    const select_context *const select = context;
    const fdma_problem *const problem = select->problem;
    const fdma_tensor *const valid = &problem->key_valid, *const score = &problem->score;
    const fdma_tensor *const expiry = &problem->expiry, *const slots = &problem->slot;
    const int64_t b = head / problem->kv_heads, g = head % problem->kv_heads;
    fdma_arena arena = {.base = select->scratch + (size_t)thread * select->scratch_size};
    const select_scratch scratch = take_select_scratch(&arena, problem, select->leaves);
    const uint8_t *const valid_row =
        is_present(valid) ? (const uint8_t *)valid->data + b * valid->stride[0] : NULL;
    const float *const scores =
        (const float *)score->data + b * score->stride[0] + g * score->stride[1];
    int32_t *const ends = (int32_t *)expiry->data + b * expiry->stride[0] + g * expiry->stride[1];
    int32_t *const slot = is_present(slots)
                              ? (int32_t *)slots->data + b * slots->stride[0] + g * slots->stride[1]
                              : scratch.slot;
    const int32_t kv_len = (int32_t)problem->kv_len;
    select_causal(scores, valid_row, kv_len, select->leaves, scratch.entries, ends, slot);
    if (problem->scope == FDMA_SCOPE_GLOBAL)
        keep_survivors(kv_len, ends, slot);
}

static fdma_arena lay_out_select(const fdma_problem *problem, int32_t threads,
                                 select_context *context) {
    const int64_t leaves = problem->window < problem->kv_len ? problem->window : problem->kv_len;
    fdma_arena one = {0}, arena = fdma_arena_of(problem);
    take_select_scratch(&one, problem, leaves);
    *context = (select_context){.problem = problem, .leaves = leaves, .scratch_size = one.used};
    context->scratch = fdma_arena_take(&arena, one.used * (size_t)threads);
    return arena;
}

static int32_t select_threads(const fdma_problem *problem) {
    return fdma_thread_count(problem->exec.threads, problem->batch * problem->kv_heads);
}

static size_t select_workspace(const fdma_problem *problem) {
    select_context context;
    const fdma_arena arena = lay_out_select(problem, select_threads(problem), &context);
    return fdma_arena_size(&arena);
}

static fdma_status run_select(const fdma_problem *problem) {
    select_context context;
    const int32_t threads = select_threads(problem);
    lay_out_select(problem, threads, &context);
    fdma_parallel_for(threads, problem->batch * problem->kv_heads, select_head, &context);
    return FDMA_OK;
}

#endif
