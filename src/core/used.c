/* Sequences in which only the first kv_used keys exist, for kernels that do not take `kv_used`.
 * Each is run as a problem of its own, whose tensors are views that end with the last key that
 * exists. If equally many keys exist in every sequence, all sequences are one problem. Such
 * problems do not write the outputs of keys that do not exist nor, under a causal mask, of queries
 * before the first key. These outputs are filled in here.
 *
 * Scores and their gradients do not depend on positions. For them a key that does not exist is a
 * key that is not valid, and all sequences are one problem. */
#include "core/adapter.h"
#include "core/checks.h"
#include "core/element.h"
#include "core/error.h"
#include "core/integers.h"
#include "core/packed.h"
#include "core/signatures.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

/* The batch entries from `b` to b + batch - 1. In each of them the first `keys` keys exist, and the
 * first `before` queries stand before every key. */
typedef struct used_entries {
    int64_t b, batch, keys, before;
} used_entries;

/* Cuts an axis of a tensor to `count` elements, from `first` on. */
static void cut_axis(fdma_tensor *tensor, int axis, int64_t first, int64_t count) {
    const size_t before = (size_t)(first * tensor->stride[axis]);
    if (tensor->data != NULL)
        tensor->data = (uint8_t *)tensor->data + before * fdma_dtype_size(tensor->dtype);
    tensor->shape[axis] = count;
}

/* The ranges of entries, queries and keys that a tensor is cut to. */
typedef struct tensor_ranges {
    int64_t b, batch, first_query, queries, first_key, keys;
} tensor_ranges;

static void cut_tensor(fdma_tensor *tensor, const tensor_entry *entry,
                       const tensor_ranges *ranges) {
    for (int axis = 0; axis < tensor->rank; axis++) {
        const char dim = entry->dims[axis];
        if (may_broadcast(dim) && tensor->stride[axis] == 0)
            continue;
        if (dim == 'b' || dim == 'B')
            cut_axis(tensor, axis, ranges->b, ranges->batch);
        else if (dim == 'i' || dim == 'I')
            cut_axis(tensor, axis, ranges->first_query, ranges->queries);
        else if (dim == 'j' || dim == 'n' || dim == 'J')
            cut_axis(tensor, axis, ranges->first_key, ranges->keys);
    }
}

static used_entries entries_at(const fdma_problem *whole, int64_t b, int64_t batch) {
    const int64_t keys = ((const int32_t *)whole->kv_used.data)[b];
    // with a sink logit these queries are run: they have an lse and a gradient
    const bool before =
        whole->causal && is_attending(whole->operation) && !is_present(&whole->sink_logit);
    return (used_entries){b, batch, keys, before ? max(whole->q_len - keys, 0) : 0};
}

/* The problem of the keys that exist, without the queries before the first key. */
static fdma_problem cut_problem(const fdma_problem *whole, const used_entries *entries) {
    const tensor_table table = fdma_tensors[whole->operation];
    const tensor_ranges own = {.b = entries->b,
                               .batch = entries->batch,
                               .first_query = entries->before,
                               .queries = whole->q_len - entries->before,
                               .keys = entries->keys};
    fdma_problem one = *whole;
    one.kv_used = (fdma_tensor){0};
    one.first_entry = entries->b;
    for (size_t t = 0; t < table.count; t++)
        cut_tensor(problem_tensor(&one, &table.entries[t]), &table.entries[t], &own);
    one.batch = own.batch;
    one.q_len = own.queries;
    one.kv_len = one.new_len = own.keys;
    return one;
}

/* ---- outputs without keys ---- */

/* Value of an output for a key that does not exist, or for a query that sees no key. */
static double value_without_keys(const tensor_entry *entry) {
    switch (entry->member) {
    case offsetof(fdma_problem, lse):
        return -INFINITY;
    case offsetof(fdma_problem, slot):
        return -1;
    default:
        return 0;
    }
}

/* Fills the last axis of a tensor. */
static void fill_row(const fdma_tensor *tensor, int64_t offset, int64_t count, double value) {
    const size_t size = fdma_dtype_size(tensor->dtype);
    if (count == 0) // the tensor may have no memory
        return;
    if (value == 0)
        memset((uint8_t *)tensor->data + (size_t)offset * size, 0, (size_t)count * size);
    else if (tensor->dtype == FDMA_INT32)
        for (int64_t n = 0; n < count; n++)
            ((int32_t *)tensor->data)[offset + n] = (int32_t)value;
    else
        for (int64_t n = 0; n < count; n++)
            fdma_store(tensor, offset + n, value);
}

/* Fills a tensor of rank 3 or 4. */
static void fill_tensor(const fdma_tensor *tensor, double value) {
    const int last = tensor->rank - 1;
    const int64_t rows = last == 3 ? tensor->shape[2] : 1;
    for (int64_t x0 = 0; x0 < tensor->shape[0] && !is_empty(tensor); x0++)
        for (int64_t x1 = 0; x1 < tensor->shape[1]; x1++)
            for (int64_t x2 = 0; x2 < rows; x2++)
                fill_row(tensor, offset_of(tensor, x0, x1, x2), tensor->shape[last], value);
}

/* Keys that are never kept have their own index as expiry. */
static void number_keys(const fdma_tensor *expiry, int64_t first) {
    for (int64_t b = 0; b < expiry->shape[0]; b++)
        for (int64_t g = 0; g < expiry->shape[1]; g++)
            for (int64_t j = 0; j < expiry->shape[2]; j++)
                ((int32_t *)expiry->data)[offset_of(expiry, b, g, j)] = (int32_t)(first + j);
}

static bool has_axis(const tensor_entry *entry, const char *letters) {
    return strpbrk(entry->dims, letters) != NULL;
}

/* dbias is the one gradient that is never added to what its tensor holds. */
static bool is_added(const fdma_problem *whole, const tensor_entry *entry) {
    return whole->accumulate && entry->member != offsetof(fdma_problem, dbias);
}

/* Fills one range of an output. */
static void fill_range(const fdma_problem *whole, const tensor_entry *entry,
                       const tensor_ranges *range) {
    fdma_tensor tensor = *tensor_at(whole, entry->member);
    cut_tensor(&tensor, entry, range);
    if (entry->member == offsetof(fdma_problem, expiry))
        number_keys(&tensor, range->first_key);
    else
        fill_tensor(&tensor, value_without_keys(entry));
}

/* Fills in the outputs that the problem of these entries does not write: for keys that do not
 * exist, and for queries before the first key. Probabilities have both axes. */
static void fill_rest(const fdma_problem *whole, const used_entries *entries) {
    const tensor_table table = fdma_tensors[whole->operation];
    const tensor_ranges before = {.b = entries->b,
                                  .batch = entries->batch,
                                  .queries = entries->before,
                                  .keys = whole->kv_len};
    const tensor_ranges after = {.b = entries->b,
                                 .batch = entries->batch,
                                 .queries = whole->q_len,
                                 .first_key = entries->keys,
                                 .keys = whole->kv_len - entries->keys};
    for (const tensor_entry *entry = table.entries; entry < table.entries + table.count; entry++) {
        const bool is_output = entry->role == role_output || entry->role == role_optional_output;
        if (!is_output || !is_present(tensor_at(whole, entry->member)) || is_added(whole, entry))
            continue;
        if (has_axis(entry, "i"))
            fill_range(whole, entry, &before);
        if (has_axis(entry, "jn"))
            fill_range(whole, entry, &after);
    }
}

/* ---- scores ---- */

static bool is_of_scores(const fdma_problem *problem) {
    return problem->operation == operation_score || problem->operation == operation_score_backward;
}

/* A problem in which `valid` [batch, kv_len] marks the keys that do not exist as padding. */
static fdma_problem mask_problem(const fdma_problem *whole, uint8_t *valid) {
    fdma_problem one = *whole;
    one.kv_used = (fdma_tensor){0};
    one.key_valid = fdma_tensor_2d(valid, FDMA_UINT8, whole->batch, whole->kv_len);
    return one;
}

static uint8_t *take_valid(fdma_arena *arena, const fdma_problem *whole) {
    return fdma_arena_take(arena, (size_t)(whole->batch * whole->kv_len));
}

static fdma_status run_masked(const adapted_kernel *inner, const fdma_problem *whole) {
    const int32_t *const used = whole->kv_used.data;
    fdma_arena arena = fdma_arena_of(whole);
    uint8_t *const valid = take_valid(&arena, whole);
    for (int64_t b = 0; b < whole->batch; b++)
        for (int64_t j = 0; j < whole->kv_len; j++)
            valid[b * whole->kv_len + j] = j < used[b] && is_valid_key(whole, b, j);
    fdma_problem one = mask_problem(whole, valid);
    fdma_set_aside(&one.exec, &arena);
    return fdma_run_adapted(inner, &one);
}

/* ---- all operations ---- */

/* Batch entries per problem: all if equally many keys exist in each, otherwise one. */
static int64_t count_entries(const fdma_problem *whole) {
    const int32_t *const used = whole->kv_used.data;
    for (int64_t b = 1; b < whole->batch; b++)
        if (used[b] != used[0])
            return 1;
    return max(whole->batch, 1);
}

static size_t entries_workspace(const adapted_kernel *inner, const fdma_problem *whole,
                                const used_entries *entries, check_depth depth) {
    fdma_problem one = cut_problem(whole, entries);
    one.any_len = depth == check_shapes;
    return fdma_adapted_workspace(inner, &one, depth);
}

/* The workspace of the problem that needs the largest one. */
static size_t most_workspace(const adapted_kernel *inner, const fdma_problem *whole) {
    const int64_t batch = count_entries(whole);
    size_t most = 0;
    for (int64_t b = 0; b < whole->batch; b += batch) {
        const used_entries entries = entries_at(whole, b, batch);
        const size_t bytes = entries_workspace(inner, whole, &entries, check_all);
        most = bytes > most ? bytes : most;
    }
    return most;
}

/* A workspace that suffices for every kv_used, whether the problem has all entries or one. */
static size_t any_workspace(const adapted_kernel *inner, const fdma_problem *whole) {
    const used_entries all = {.batch = whole->batch, .keys = whole->kv_len};
    const used_entries one = {.batch = min(whole->batch, 1), .keys = whole->kv_len};
    const size_t of_all = entries_workspace(inner, whole, &all, check_shapes);
    const size_t of_one = entries_workspace(inner, whole, &one, check_shapes);
    return of_all > of_one ? of_all : of_one;
}

static bool applies(const fdma_kernel *kernel, const fdma_problem *problem) {
    (void)kernel;
    return is_present(&problem->kv_used);
}

static size_t workspace(const adapted_kernel *inner, const fdma_problem *problem,
                        check_depth depth) {
    if (!is_of_scores(problem))
        return depth == check_all ? most_workspace(inner, problem) : any_workspace(inner, problem);
    fdma_arena arena = {0};
    take_valid(&arena, problem);
    const fdma_problem one = mask_problem(problem, NULL);
    return fdma_arena_size(&arena) + fdma_adapted_workspace(inner, &one, depth);
}

static fdma_status run_entries(const adapted_kernel *inner, const fdma_problem *problem) {
    const int64_t batch = count_entries(problem);
    const fdma_problem whole = fdma_prepare_cuts(problem);
    for (int64_t b = 0; b < whole.batch; b += batch) {
        const used_entries entries = entries_at(&whole, b, batch);
        const fdma_problem one = cut_problem(&whole, &entries);
        if (!whole.only_checks)
            fill_rest(&whole, &entries);
        if (fdma_cut_has_work(&one))
            FDMA_TRY(fdma_run_adapted(inner, &one));
    }
    return FDMA_OK;
}

static fdma_status run(const adapted_kernel *inner, const fdma_problem *problem) {
    return is_of_scores(problem) ? run_masked(inner, problem) : run_entries(inner, problem);
}

const kernel_adapter fdma_used_adapter = {applies, workspace, run};
