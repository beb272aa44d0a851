/* Runs a problem through its adapters, and has the adapters of the CPU. */
#include "core/adapter.h"

#include "core/checks.h"
#include "core/element.h"
#include "core/error.h"
#include "core/integers.h"
#include "core/rotary.h"
#include "core/signatures.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

/* Returns the first adapter that applies, or NULL. `inner` becomes the chain behind it. */
static const kernel_adapter *find_adapter(const adapted_kernel *adapted,
                                          const fdma_problem *problem, adapted_kernel *inner) {
    *inner = *adapted;
    while (*inner->adapters != NULL) {
        const kernel_adapter *const adapter = *inner->adapters++;
        if (adapter->applies(adapted->kernel, problem))
            return adapter;
    }
    return NULL;
}

size_t fdma_adapted_workspace(const adapted_kernel *adapted, const fdma_problem *problem,
                              check_depth depth) {
    adapted_kernel inner;
    const kernel_adapter *const adapter = find_adapter(adapted, problem, &inner);
    return adapter != NULL ? adapter->workspace(&inner, problem, depth)
                           : adapted->kernel->workspace(problem);
}

fdma_status fdma_run_adapted(const adapted_kernel *adapted, const fdma_problem *problem) {
    adapted_kernel inner;
    const kernel_adapter *const adapter = find_adapter(adapted, problem, &inner);
    return adapter != NULL ? adapter->run(&inner, problem) : adapted->kernel->run(problem);
}

/* ---- a check before the run ---- */

static bool is_checked_first(const fdma_kernel *kernel, const fdma_problem *problem) {
    return has_trait(kernel, trait_checks_selection) && problem->selected && !problem->only_checks;
}

/* All sequences are checked before the gradients of one are written. */
static fdma_status check_and_run(const adapted_kernel *inner, const fdma_problem *problem) {
    fdma_problem look = *problem;
    look.only_checks = true;
    FDMA_TRY(fdma_run_adapted(inner, &look));
    return fdma_run_adapted(inner, problem);
}

static const kernel_adapter check_adapter = {is_checked_first, fdma_adapted_workspace,
                                             check_and_run};

/* ---- cuts of a problem ---- */

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

static void cut_tensors(fdma_problem *problem, const tensor_ranges *ranges) {
    const tensor_table table = fdma_tensors[problem->operation];
    for (size_t t = 0; t < table.count; t++)
        cut_tensor(problem_tensor(problem, &table.entries[t]), &table.entries[t], ranges);
}

/* Prepares a problem for cutting. Every cut adds its rows to dsink_logit and its pairs to
 * dattn_bias. Clears both first, dsink_logit only if the call does not add to it. */
static fdma_problem prepare_cuts(const fdma_problem *problem) {
    const fdma_tensor *const dsinks = &problem->dsink_logit;
    fdma_problem whole = *problem;
    whole.add_dsinks = true;
    whole.add_dattn_bias = true;
    if (problem->only_checks)
        return whole;
    if (is_present(&problem->dattn_bias))
        fdma_clear_tensor(&problem->dattn_bias);
    if (is_present(dsinks) && !problem->add_dsinks)
        memset(dsinks->data, 0, (size_t)problem->q_heads * fdma_dtype_size(dsinks->dtype));
    return whole;
}

/* ---- starts ---- */

/* Packed sequences, for kernels that do not take `starts`: each sequence is run as a problem of its
 * own, whose tensors are views. Only `expiry` holds positions: a given one is copied relative to
 * the sequence's start, and one that select writes is moved afterwards. */

/* Workspace of cutting. Its size does not depend on where the sequences start. */
typedef struct packed_scratch {
    int32_t *expiry;  /* [kv_heads, kv_len]: of one sequence, relative to its start */
    uint8_t *invalid; /* [kv_len] zeros: key_valid of the positions after the last sequence */
} packed_scratch;

static bool reads_expiry(const fdma_problem *packed) {
    return packed->selected && packed->operation != operation_select;
}

static packed_scratch take_packed(fdma_arena *arena, const fdma_problem *packed) {
    const size_t keys = (size_t)packed->kv_len;
    const size_t copied = reads_expiry(packed) ? (size_t)packed->kv_heads * keys : 0;
    packed_scratch scratch;
    scratch.expiry = fdma_arena_take(arena, copied * sizeof *scratch.expiry);
    scratch.invalid = fdma_arena_take(arena, keys);
    return scratch;
}

/* The positions of a sequence, or those after the last sequence, where no key is valid. */
typedef struct packed_range {
    sequence_range own;
    bool is_sequence;
} packed_range;

static packed_range range_at(const fdma_problem *packed, int64_t n) {
    const int32_t *const starts = packed->starts.data;
    const bool is_last = n + 1 == packed->starts.shape[0];
    return (packed_range){{starts[n], is_last ? packed->kv_len : starts[n + 1]}, !is_last};
}

static fdma_problem cut_sequence(const fdma_problem *packed, const packed_range *range,
                                 const packed_scratch *scratch) {
    const sequence_range own = range->own;
    const int64_t count = own.end - own.first;
    const tensor_ranges ranges = {.batch = packed->batch,
                                  .first_query = own.first,
                                  .queries = count,
                                  .first_key = own.first,
                                  .keys = count};
    fdma_problem one = *packed;
    cut_tensors(&one, &ranges);
    one.starts = (fdma_tensor){0};
    one.first_position = own.first;
    one.q_len = min(packed->q_len, count);
    one.kv_len = one.new_len = count;
    if (reads_expiry(packed))
        one.expiry = fdma_tensor_3d(scratch->expiry, FDMA_INT32, 1, packed->kv_heads, count);
    if (!range->is_sequence)
        one.key_valid = fdma_tensor_2d(scratch->invalid, FDMA_UINT8, 1, count);
    return one;
}

/* Copies the expiry of the keys at `own`, relative to the first of them. */
static void copy_expiry(const fdma_problem *packed, sequence_range own, int32_t *to) {
    const fdma_tensor *const expiry = &packed->expiry;
    const int64_t count = own.end - own.first;
    for (int64_t g = 0; g < packed->kv_heads; g++) {
        const int32_t *const from =
            (const int32_t *)expiry->data + g * expiry->stride[1] + own.first;
        for (int64_t j = 0; j < count; j++)
            to[g * count + j] = (int32_t)min(max(from[j] - own.first, 0), count);
    }
}

/* Moves the expiry that select wrote for the keys at `own` to positions of the packed problem. */
static void move_expiry(const fdma_problem *packed, sequence_range own) {
    const fdma_tensor *const expiry = &packed->expiry;
    for (int64_t g = 0; g < packed->kv_heads; g++)
        for (int64_t j = own.first; j < own.end; j++)
            ((int32_t *)expiry->data)[g * expiry->stride[1] + j] += (int32_t)own.first;
}

static size_t range_workspace(const adapted_kernel *inner, const fdma_problem *packed,
                              const packed_range *range, check_depth depth) {
    const packed_scratch none = {0};
    fdma_problem one = cut_sequence(packed, range, &none);
    one.any_len = depth == check_shapes;
    return one.kv_len > 0 ? fdma_adapted_workspace(inner, &one, depth) : 0;
}

/* With check_all the workspace of the range that needs most. With check_shapes one that suffices
 * for every sequence and for the positions after the last. */
static size_t largest_workspace(const adapted_kernel *inner, const fdma_problem *packed,
                                check_depth depth) {
    const packed_range any[] = {{{0, packed->kv_len}, true}, {{0, packed->kv_len}, false}};
    const int64_t count = depth == check_all ? packed->starts.shape[0] : 2;
    size_t most = 0;
    for (int64_t n = 0; n < count; n++) {
        const packed_range range = depth == check_all ? range_at(packed, n) : any[n];
        const size_t bytes = range_workspace(inner, packed, &range, depth);
        most = bytes > most ? bytes : most;
    }
    return most;
}

static size_t packed_workspace(const adapted_kernel *inner, const fdma_problem *problem,
                               check_depth depth) {
    fdma_arena arena = {0};
    take_packed(&arena, problem);
    return fdma_arena_size(&arena) + largest_workspace(inner, problem, depth);
}

static fdma_status run_range(const adapted_kernel *inner, const fdma_problem *packed,
                             const packed_range *range, const packed_scratch *scratch) {
    const fdma_problem one = cut_sequence(packed, range, scratch);
    if (!fdma_cut_has_work(&one))
        return FDMA_OK;
    if (reads_expiry(packed))
        copy_expiry(packed, range->own, scratch->expiry);
    const fdma_status status = fdma_run_adapted(inner, &one);
    if (packed->operation == operation_select)
        move_expiry(packed, range->own);
    return status;
}

static bool packed_applies(const fdma_kernel *kernel, const fdma_problem *problem) {
    return is_present(&problem->starts) && has_trait(kernel, trait_one_sequence);
}

static fdma_status packed_run(const adapted_kernel *inner, const fdma_problem *problem) {
    fdma_problem packed = prepare_cuts(problem);
    fdma_arena arena = fdma_arena_of(problem);
    const packed_scratch scratch = take_packed(&arena, problem);
    fdma_set_aside(&packed.exec, &arena);
    if (packed.kv_len > 0) // otherwise there may be no workspace
        memset(scratch.invalid, 0, (size_t)packed.kv_len);
    for (int64_t n = 0; n < packed.starts.shape[0]; n++) {
        const packed_range range = range_at(&packed, n);
        FDMA_TRY(run_range(inner, &packed, &range, &scratch));
    }
    return FDMA_OK;
}

static const kernel_adapter packed_adapter = {packed_applies, packed_workspace, packed_run};

/* ---- kv_used ---- */

/* Sequences in which only the first kv_used keys exist, for kernels that do not take `kv_used`.
 * Each is run as a problem of its own, whose tensors are views that end with the last key that
 * exists. If equally many keys exist in every sequence, all sequences are one problem. Such
 * problems do not write the outputs of keys that do not exist nor, under a causal mask, of queries
 * before the first key. These outputs are filled in here.
 *
 * Scores and their gradients do not depend on positions. For them a key that does not exist is a
 * key that is not valid, and all sequences are one problem. */

/* The batch entries from `b` to b + batch - 1. In each of them the first `keys` keys exist, and the
 * first `before` queries stand before every key. */
typedef struct used_entries {
    int64_t b, batch, keys, before;
} used_entries;

static used_entries entries_at(const fdma_problem *whole, int64_t b, int64_t batch) {
    const int64_t keys = ((const int32_t *)whole->kv_used.data)[b];
    // with a sink logit these queries are run: they have an lse and a gradient
    const bool before =
        whole->causal && is_attending(whole->operation) && !is_present(&whole->sink_logit);
    return (used_entries){b, batch, keys, before ? max(whole->q_len - keys, 0) : 0};
}

/* The problem of the keys that exist, without the queries before the first key. */
static fdma_problem cut_problem(const fdma_problem *whole, const used_entries *entries) {
    const tensor_ranges own = {.b = entries->b,
                               .batch = entries->batch,
                               .first_query = entries->before,
                               .queries = whole->q_len - entries->before,
                               .keys = entries->keys};
    fdma_problem one = *whole;
    one.kv_used = (fdma_tensor){0};
    one.first_entry = entries->b;
    cut_tensors(&one, &own);
    one.batch = own.batch;
    one.q_len = own.queries;
    one.kv_len = one.new_len = own.keys;
    return one;
}

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
                *int_at(expiry, b, g, j) = (int32_t)(first + j);
}

static bool has_axis(const tensor_entry *entry, const char *letters) {
    return strpbrk(entry->dims, letters) != NULL;
}

/* dbias is the one gradient that is never added to what its tensor holds. */
static bool is_added(const fdma_problem *whole, const tensor_entry *entry) {
    return whole->accumulate && entry->member != offsetof(fdma_problem, dbias);
}

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

static bool is_of_scores(const fdma_problem *problem) {
    return problem->operation == operation_score || problem->operation == operation_score_backward;
}

fdma_problem fdma_padded_problem(const fdma_problem *whole, uint8_t *valid) {
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
    fdma_problem one = fdma_padded_problem(whole, valid);
    fdma_set_aside(&one.exec, &arena);
    return fdma_run_adapted(inner, &one);
}

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

static bool used_applies(const fdma_kernel *kernel, const fdma_problem *problem) {
    (void)kernel;
    return is_present(&problem->kv_used);
}

static size_t used_workspace(const adapted_kernel *inner, const fdma_problem *problem,
                             check_depth depth) {
    if (!is_of_scores(problem))
        return depth == check_all ? most_workspace(inner, problem) : any_workspace(inner, problem);
    fdma_arena arena = {0};
    take_valid(&arena, problem);
    const fdma_problem one = fdma_padded_problem(problem, NULL);
    return fdma_arena_size(&arena) + fdma_adapted_workspace(inner, &one, depth);
}

static fdma_status run_entries(const adapted_kernel *inner, const fdma_problem *problem) {
    const int64_t batch = count_entries(problem);
    const fdma_problem whole = prepare_cuts(problem);
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

static fdma_status used_run(const adapted_kernel *inner, const fdma_problem *problem) {
    return is_of_scores(problem) ? run_masked(inner, problem) : run_entries(inner, problem);
}

static const kernel_adapter used_adapter = {used_applies, used_workspace, used_run};

/* ---- dattn_bias in 16 bits ---- */

/* Kernels of the CPU add to float32 sums in the workspace in place of a 16-bit dattn_bias. */

static bool pair_sums_applies(const fdma_kernel *kernel, const fdma_problem *problem) {
    (void)kernel;
    return has_short_pairs(problem);
}

/* Replaces dattn_bias by sums from the arena. */
static fdma_problem sum_problem(const fdma_problem *problem, fdma_arena *arena) {
    const size_t count = (size_t)count_elements(&problem->dattn_bias);
    float *const sums = fdma_arena_take(arena, count * sizeof *sums);
    fdma_problem summed = *problem;
    summed.dattn_bias = dense_pairs(&problem->dattn_bias, sums, FDMA_FLOAT32);
    fdma_set_aside(&summed.exec, arena);
    return summed;
}

static void round_sums(const float *from, const fdma_tensor *to) {
    for (int64_t x0 = 0; x0 < to->shape[0] && !is_empty(to); x0++)
        for (int64_t x1 = 0; x1 < to->shape[1]; x1++)
            for (int64_t x2 = 0; x2 < to->shape[2]; x2++, from += to->shape[3])
                fdma_store_row(to, offset_of(to, x0, x1, x2), from, to->shape[3]);
}

static size_t pair_sums_workspace(const adapted_kernel *inner, const fdma_problem *problem,
                                  check_depth depth) {
    fdma_arena arena = {0};
    const fdma_problem summed = sum_problem(problem, &arena);
    return fdma_arena_size(&arena) + fdma_adapted_workspace(inner, &summed, depth);
}

static fdma_status pair_sums_run(const adapted_kernel *inner, const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const fdma_problem summed = sum_problem(problem, &arena);
    FDMA_TRY(fdma_run_adapted(inner, &summed));
    round_sums(summed.dattn_bias.data, &problem->dattn_bias);
    return FDMA_OK;
}

static const kernel_adapter pair_sums_adapter = {pair_sums_applies, pair_sums_workspace,
                                                 pair_sums_run};

/* ---- select with a table ---- */

/* The keys of a table, sorted by position, followed by the keys of the call, form a sequence.
 * Selecting from this sequence gives the selection of the stream: a key that is not in the table
 * was evicted and does not compete any more. So a kernel that does not take tables selects from a
 * copy of the scores in this order, in which each (b, g) is a sequence of its own. Its slots become
 * rows of the table.
 *
 * Empty rows stand first, as keys that are not valid, so that the keys of the call keep their
 * indices. */

typedef struct stream_scratch {
    stream_tensors sequences;
    int32_t *row;          /* [heads, rows]: the row of each carried key */
    int64_t *keys, *spare; /* [rows] each: of the head that is sorted */
} stream_scratch;

static stream_scratch take_stream(fdma_arena *arena, const fdma_problem *stream) {
    const size_t heads = (size_t)(stream->batch * stream->kv_heads);
    const size_t rows = (size_t)stream->carried_len, keys = heads * (size_t)stream->kv_len;
    stream_scratch scratch;
    stream_tensors *const to = &scratch.sequences;
    to->score = fdma_arena_take(arena, keys * fdma_dtype_size(stream->dtype));
    to->valid = fdma_arena_take(arena, keys);
    to->expiry = fdma_arena_take(arena, keys * sizeof *to->expiry);
    to->slot = fdma_arena_take(arena, keys * sizeof *to->slot);
    scratch.row = fdma_arena_take(arena, heads * rows * sizeof *scratch.row);
    scratch.keys = fdma_arena_take(arena, rows * sizeof *scratch.keys);
    scratch.spare = fdma_arena_take(arena, rows * sizeof *scratch.spare);
    return scratch;
}

fdma_problem fdma_stream_sequences(const fdma_problem *stream, const stream_tensors *tensors) {
    const int64_t heads = stream->batch * stream->kv_heads, len = stream->kv_len;
    fdma_problem one = *stream;
    one.table_in = one.table_out = (fdma_table){0};
    one.batch = heads;
    one.kv_heads = 1;
    one.new_len = len;
    one.carried_len = 0;
    one.score = fdma_tensor_3d(tensors->score, stream->dtype, heads, 1, len);
    one.key_valid = fdma_tensor_2d(tensors->valid, FDMA_UINT8, heads, len);
    one.expiry = fdma_tensor_3d(tensors->expiry, FDMA_INT32, heads, 1, len);
    one.slot = fdma_tensor_3d(tensors->slot, FDMA_INT32, heads, 1, len);
    return one;
}

/* Merge sort. Returns the buffer that holds the sorted numbers. */
static int64_t *sort_numbers(int64_t *numbers, int64_t *spare, int64_t count) {
    for (int64_t run = 1; run < count; run *= 2) {
        for (int64_t first = 0; first < count; first += 2 * run) {
            const int64_t middle = min(first + run, count), end = min(first + 2 * run, count);
            int64_t left = first, right = middle;
            for (int64_t n = first; n < end; n++) {
                const bool from_left =
                    left < middle && (right == end || numbers[left] <= numbers[right]);
                spare[n] = from_left ? numbers[left++] : numbers[right++];
            }
        }
        int64_t *const sorted = spare;
        spare = numbers;
        numbers = sorted;
    }
    return numbers;
}

static void sort_rows(const fdma_problem *stream, int64_t b, int64_t g,
                      const stream_scratch *scratch, int32_t *row) {
    const fdma_tensor *const tensor = &stream->table_in.position;
    const int32_t *const position = int_at(tensor, b, g, 0);
    for (int64_t n = 0; n < stream->carried_len; n++)
        scratch->keys[n] = max(position[n], -1) * ((int64_t)1 << 32) + n;
    const int64_t *const sorted = sort_numbers(scratch->keys, scratch->spare, stream->carried_len);
    for (int64_t n = 0; n < stream->carried_len; n++)
        row[n] = (int32_t)(sorted[n] & INT32_MAX);
}

static void fill_sequence(const fdma_problem *stream, int64_t b, int64_t g, const int32_t *row,
                          fdma_problem *one) {
    const fdma_table *const table = &stream->table_in;
    const size_t size = fdma_dtype_size(stream->dtype);
    const int64_t rows = stream->carried_len, head = b * stream->kv_heads + g;
    uint8_t *const score = (uint8_t *)one->score.data + (size_t)(head * stream->kv_len) * size;
    uint8_t *const valid = (uint8_t *)one->key_valid.data + head * stream->kv_len;
    for (int64_t n = 0; n < rows; n++) {
        const int64_t from = offset_of(&table->score, b, g, row[n]);
        const int64_t position = offset_of(&table->position, b, g, row[n]);
        memcpy(score + (size_t)n * size, (const uint8_t *)table->score.data + (size_t)from * size,
               size);
        valid[n] = ((const int32_t *)table->position.data)[position] >= 0;
    }
    if (stream->new_len > 0) // otherwise the score may have no memory
        memcpy(score + (size_t)rows * size,
               (const uint8_t *)stream->score.data +
                   (size_t)offset_of(&stream->score, b, g, 0) * size,
               (size_t)stream->new_len * size);
    for (int64_t j = 0; j < stream->new_len; j++)
        valid[rows + j] = is_valid_key(stream, b, j);
}

/* Row of a slot. The first slots belong to the valid carried keys, which keep their rows; each
 * later slot takes the next empty row. */
static int32_t row_of_slot(const int32_t *row, int64_t rows, int64_t empty, int32_t slot) {
    return slot < rows - empty ? row[empty + slot] : row[slot - (rows - empty)];
}

/* Writes the selection of one (b, g) from the selection of its sequence. Slots become rows of the
 * table if the table has a row for each slot. Some carried keys may be evicted by others before the
 * keys of the call. */
static void write_selection(const fdma_problem *stream, int64_t b, int64_t g, const int32_t *row,
                            const fdma_problem *one) {
    const int64_t rows = stream->carried_len;
    const int64_t first = (b * stream->kv_heads + g) * stream->kv_len;
    const uint8_t *const valid = (const uint8_t *)one->key_valid.data + first;
    const int32_t *const expiry = (const int32_t *)one->expiry.data + first;
    const int32_t *const slot = (const int32_t *)one->slot.data + first;
    int32_t *const to = int_at(&stream->expiry, b, g, 0);
    int32_t *const to_slot = int_at(&stream->slot, b, g, 0);
    const bool slots_are_rows = rows == stream->slots;
    int64_t empty = 0;
    for (int64_t n = 0; n < rows; n++) {
        const bool is_kept = valid[n] && expiry[n] >= rows;
        to[row[n]] = is_kept ? expiry[n] : row[n];
        to_slot[row[n]] = !is_kept ? -1 : slots_are_rows ? row[n] : slot[n];
        empty += !valid[n];
    }
    memcpy(to + rows, expiry + rows, (size_t)stream->new_len * sizeof *to);
    for (int64_t j = rows; j < stream->kv_len; j++)
        to_slot[j] =
            slot[j] < 0 || !slots_are_rows ? slot[j] : row_of_slot(row, rows, empty, slot[j]);
}

/* Writes one row of table_out. Score -inf and position -1 make it empty. */
static void write_row(const fdma_problem *stream, int64_t b, int64_t g, int64_t row, double score,
                      int32_t position) {
    const fdma_table *const table = &stream->table_out;
    *int_at(&table->position, b, g, row) = position;
    fdma_store(&table->score, offset_of(&table->score, b, g, row), score);
}

/* Writes table_out of one (b, g): the keys that are kept to the end. */
static void write_table(const fdma_problem *stream, int64_t b, int64_t g) {
    const fdma_table *const in = &stream->table_in;
    const int64_t rows = stream->carried_len;
    const int64_t head = offset_of(&stream->expiry, b, g, 0), end = stream->kv_len;
    const int32_t *const expiry = (const int32_t *)stream->expiry.data + head;
    const int32_t *const slot = int_at(&stream->slot, b, g, 0);
    const int32_t seen = is_present(&in->seen) ? ((const int32_t *)in->seen.data)[b] : 0;
    for (int64_t n = 0; n < stream->slots; n++)
        write_row(stream, b, g, n, -INFINITY, -1);
    for (int64_t j = 0; j < end; j++) {
        const int64_t own = j - rows; // among the keys of the call
        if (expiry[j] < end)
            continue;
        if (own < 0)
            write_row(stream, b, g, j, fdma_load(&in->score, offset_of(&in->score, b, g, j)),
                      *int_at(&in->position, b, g, j));
        else
            write_row(stream, b, g, slot[j],
                      fdma_load(&stream->score, offset_of(&stream->score, b, g, own)),
                      (int32_t)(seen + own));
    }
    ((int32_t *)stream->table_out.seen.data)[b] = (int32_t)(seen + stream->new_len);
}

static fdma_status select_carried(const adapted_kernel *inner, const fdma_problem *stream) {
    fdma_arena arena = fdma_arena_of(stream);
    const stream_scratch scratch = take_stream(&arena, stream);
    fdma_problem one = fdma_stream_sequences(stream, &scratch.sequences);
    const int64_t heads = one.batch, rows = stream->carried_len;
    fdma_set_aside(&one.exec, &arena);
    for (int64_t head = 0; head < heads; head++) {
        int32_t *const row = scratch.row + head * rows;
        const int64_t b = head / stream->kv_heads, g = head % stream->kv_heads;
        sort_rows(stream, b, g, &scratch, row);
        fill_sequence(stream, b, g, row, &one);
    }
    const fdma_status status = fdma_run_adapted(inner, &one);
    for (int64_t head = 0; head < heads && status == FDMA_OK; head++)
        write_selection(stream, head / stream->kv_heads, head % stream->kv_heads,
                        scratch.row + head * rows, &one);
    return status;
}

static bool stream_applies(const fdma_kernel *kernel, const fdma_problem *problem) {
    (void)kernel;
    return has_table(problem);
}

static size_t stream_workspace(const adapted_kernel *inner, const fdma_problem *stream,
                               check_depth depth) {
    if (!is_present(&stream->table_in.score))
        return fdma_adapted_workspace(inner, stream, depth);
    fdma_arena arena = {0};
    const stream_scratch scratch = take_stream(&arena, stream);
    const fdma_problem one = fdma_stream_sequences(stream, &scratch.sequences);
    return fdma_arena_size(&arena) + fdma_adapted_workspace(inner, &one, depth);
}

static fdma_status stream_run(const adapted_kernel *inner, const fdma_problem *stream) {
    const bool carried = is_present(&stream->table_in.score);
    const fdma_status status =
        carried ? select_carried(inner, stream) : fdma_run_adapted(inner, stream);
    if (status != FDMA_OK || !is_present(&stream->table_out.score))
        return status;
    for (int64_t b = 0; b < stream->batch; b++)
        for (int64_t g = 0; g < stream->kv_heads; g++)
            write_table(stream, b, g);
    return FDMA_OK;
}

static const kernel_adapter stream_adapter = {stream_applies, stream_workspace, stream_run};

/* ---- a rotation of q and k ---- */

/* Kernels that rotate one tensor run once for q and once for k. */

static bool both_apply(const fdma_kernel *kernel, const fdma_problem *problem) {
    (void)kernel;
    return rotates_k(problem);
}

static size_t both_workspace(const adapted_kernel *inner, const fdma_problem *problem,
                             check_depth depth) {
    const fdma_problem q = fdma_rotation_of_q(problem), k = fdma_rotation_of_k(problem);
    const size_t of_q = fdma_adapted_workspace(inner, &q, depth);
    const size_t of_k = fdma_adapted_workspace(inner, &k, depth);
    return of_q > of_k ? of_q : of_k;
}

static fdma_status both_run(const adapted_kernel *inner, const fdma_problem *problem) {
    const fdma_problem q = fdma_rotation_of_q(problem), k = fdma_rotation_of_k(problem);
    FDMA_TRY(fdma_run_adapted(inner, &q));
    return fdma_run_adapted(inner, &k);
}

static const kernel_adapter both_adapter = {both_apply, both_workspace, both_run};

/* ---- the list ---- */

/* A table of carried keys excludes the others, and kv_used excludes starts. */
const kernel_adapter *const fdma_host_adapters[] = {
    &stream_adapter, &pair_sums_adapter, &check_adapter, &used_adapter,
    &packed_adapter, &both_adapter,      NULL,
};
