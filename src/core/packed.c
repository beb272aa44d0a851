/* A sequence of a packed problem is a problem whose tensors are views. Only `expiry` holds
 * positions: those of a given selection are copied relative to the sequence's start, and those that
 * select writes are moved afterwards. */
#include "core/packed.h"

#include "core/error.h"
#include "core/integers.h"
#include "core/signatures.h"

#include <string.h>

/* What cutting takes of the workspace. Its size does not depend on where the sequences start. */
typedef struct packed_scratch {
    int32_t *expiry;  /* [kv_heads, kv_len]: of one sequence, relative to its start */
    uint8_t *invalid; /* [kv_len] zeros: key_valid of the positions after the last sequence */
} packed_scratch;

static bool reads_expiry(const fdma_problem *packed) {
    return packed->selected && packed->operation != operation_select;
}

static packed_scratch take_scratch(fdma_arena *arena, const fdma_problem *packed) {
    const size_t keys = (size_t)packed->kv_len;
    const size_t copied = reads_expiry(packed) ? (size_t)packed->kv_heads * keys : 0;
    packed_scratch scratch;
    scratch.expiry = fdma_arena_take(arena, copied * sizeof *scratch.expiry);
    scratch.invalid = fdma_arena_take(arena, keys);
    return scratch;
}

/* The part of a tensor that belongs to some positions. */
static void cut_tensor(fdma_tensor *tensor, const tensor_entry *entry, sequence_range own) {
    for (int axis = 0; axis < tensor->rank; axis++) {
        const char dim = entry->dims[axis];
        const bool is_cut = may_broadcast(dim) ? (dim == 'I' || dim == 'J') && tensor->stride[axis]
                                               : strchr("ijn", dim) != NULL;
        if (!is_cut)
            continue;
        const size_t before = (size_t)(own.first * tensor->stride[axis]);
        if (tensor->data != NULL)
            tensor->data = (uint8_t *)tensor->data + before * fdma_dtype_size(tensor->dtype);
        tensor->shape[axis] = own.end - own.first;
    }
}

/* The problem of some positions. Those after the last sequence are no `sequence`: none of their
 * keys is valid. */
static fdma_problem cut_problem(const fdma_problem *packed, sequence_range own, bool sequence,
                                const packed_scratch *scratch) {
    const tensor_table table = fdma_tensors[packed->operation];
    const int64_t count = own.end - own.first;
    fdma_problem one = *packed;
    for (size_t t = 0; t < table.count; t++)
        cut_tensor(problem_tensor(&one, &table.entries[t]), &table.entries[t], own);
    one.starts = (fdma_tensor){0};
    one.first_position = own.first;
    one.q_len = min(packed->q_len, count);
    one.kv_len = one.new_len = count;
    if (reads_expiry(packed))
        one.expiry = fdma_tensor_3d(scratch->expiry, FDMA_INT32, 1, packed->kv_heads, count);
    if (!sequence)
        one.key_valid = fdma_tensor_2d(scratch->invalid, FDMA_UINT8, 1, count);
    return one;
}

/* The positions between two starts; after the last one, those to the end. */
static sequence_range sequence_of_index(const fdma_problem *packed, int64_t n) {
    const int32_t *const starts = packed->starts.data;
    const bool is_last = n + 1 == packed->starts.shape[0];
    return (sequence_range){starts[n], is_last ? packed->kv_len : starts[n + 1]};
}

/* Whether `n` is the index of a sequence, not of the positions after the last one. */
static bool is_sequence(const fdma_problem *packed, int64_t n) {
    return n + 1 < packed->starts.shape[0];
}

/* The expiry of the keys at `own`, relative to the first of them. */
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

/* Makes positions of the packed problem of those that select wrote for the keys at `own`. */
static void move_expiry(const fdma_problem *packed, sequence_range own) {
    const fdma_tensor *const expiry = &packed->expiry;
    for (int64_t g = 0; g < packed->kv_heads; g++)
        for (int64_t j = own.first; j < own.end; j++)
            ((int32_t *)expiry->data)[g * expiry->stride[1] + j] += (int32_t)own.first;
}

static size_t sequence_workspace(const fdma_kernel *kernel, const fdma_problem *packed,
                                 sequence_range own, bool sequence, bool any_len) {
    const packed_scratch none = {0};
    fdma_problem one = cut_problem(packed, own, sequence, &none);
    one.any_len = any_len;
    return own.end > own.first ? kernel->workspace(&one) : 0;
}

/* The workspace of the sequence that needs the largest one. */
static size_t most_workspace(const fdma_kernel *kernel, const fdma_problem *packed) {
    size_t most = 0;
    for (int64_t n = 0; n < packed->starts.shape[0]; n++) {
        const size_t bytes = sequence_workspace(kernel, packed, sequence_of_index(packed, n),
                                                is_sequence(packed, n), false);
        most = bytes > most ? bytes : most;
    }
    return most;
}

/* A workspace that suffices for every sequence, and for the positions after the last one. */
static size_t any_workspace(const fdma_kernel *kernel, const fdma_problem *packed) {
    const sequence_range all = {0, packed->kv_len};
    const size_t sequence = sequence_workspace(kernel, packed, all, true, true);
    const size_t rest = sequence_workspace(kernel, packed, all, false, true);
    return sequence > rest ? sequence : rest;
}

size_t fdma_kernel_workspace(const fdma_kernel *kernel, const fdma_problem *problem,
                             check_depth depth) {
    if (!is_present(&problem->starts) || !has_trait(kernel, trait_one_sequence))
        return kernel->workspace(problem);
    fdma_arena arena = {0};
    take_scratch(&arena, problem);
    return fdma_arena_size(&arena) +
           (depth == check_all ? most_workspace(kernel, problem) : any_workspace(kernel, problem));
}

fdma_problem fdma_prepare_cuts(const fdma_problem *problem, bool only_checks) {
    const fdma_tensor *const dsinks = &problem->dsink_logit;
    fdma_problem whole = *problem;
    whole.only_checks = only_checks;
    whole.add_dsinks = true;
    whole.add_dattn_bias = true;
    if (is_present(&problem->dattn_bias) && !only_checks)
        fdma_clear_tensor(&problem->dattn_bias);
    if (is_present(dsinks) && !problem->add_dsinks && !only_checks)
        memset(dsinks->data, 0, (size_t)problem->q_heads * fdma_dtype_size(dsinks->dtype));
    return whole;
}

bool fdma_cut_has_work(fdma_problem cut) {
    cut.dsink_logit = cut.dattn_bias = (fdma_tensor){0};
    return fdma_has_work(&cut);
}

static fdma_status run_sequence(const fdma_kernel *kernel, const fdma_problem *packed, int64_t n,
                                const packed_scratch *scratch) {
    const sequence_range own = sequence_of_index(packed, n);
    const fdma_problem one = cut_problem(packed, own, is_sequence(packed, n), scratch);
    if (!fdma_cut_has_work(one))
        return FDMA_OK;
    if (reads_expiry(packed))
        copy_expiry(packed, own, scratch->expiry);
    const fdma_status status = kernel->run(&one);
    if (packed->operation == operation_select)
        move_expiry(packed, own);
    return status;
}

static fdma_status run_sequences(const fdma_kernel *kernel, const fdma_problem *problem) {
    if (!is_present(&problem->starts) || !has_trait(kernel, trait_one_sequence))
        return kernel->run(problem);
    fdma_problem packed = fdma_prepare_cuts(problem, problem->only_checks);
    fdma_arena arena = fdma_arena_of(problem);
    const packed_scratch scratch = take_scratch(&arena, problem);
    fdma_set_aside(&packed.exec, &arena);
    if (packed.kv_len > 0) // otherwise there may be no workspace
        memset(scratch.invalid, 0, (size_t)packed.kv_len);
    for (int64_t n = 0; n < packed.starts.shape[0]; n++) {
        const fdma_status status = run_sequence(kernel, &packed, n, &scratch);
        if (status != FDMA_OK)
            return status;
    }
    return FDMA_OK;
}

bool fdma_looks_first(const fdma_kernel *kernel, const fdma_problem *problem) {
    return has_trait(kernel, trait_one_sequence) && problem->operation == operation_backward &&
           problem->selected;
}

fdma_status fdma_run_kernel(const fdma_kernel *kernel, const fdma_problem *problem) {
    fdma_problem look = *problem;
    look.only_checks = true;
    if (fdma_looks_first(kernel, problem))
        FDMA_TRY(run_sequences(kernel, &look));
    return run_sequences(kernel, problem);
}
