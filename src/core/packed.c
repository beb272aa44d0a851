/* Packed sequences, for kernels that do not take `starts`: each sequence is run as a problem of its
 * own, whose tensors are views. Only `expiry` holds positions: a given one is copied relative to
 * the sequence's start, and one that select writes is moved afterwards. */
#include "core/packed.h"

#include "core/adapter.h"
#include "core/checks.h"
#include "core/error.h"
#include "core/integers.h"
#include "core/signatures.h"

#include <string.h>

/* Workspace of cutting. Its size does not depend on where the sequences start. */
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

/* Cuts a tensor to a range of positions. */
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

static fdma_problem cut_problem(const fdma_problem *packed, const packed_range *range,
                                const packed_scratch *scratch) {
    const tensor_table table = fdma_tensors[packed->operation];
    const sequence_range own = range->own;
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
    fdma_problem one = cut_problem(packed, range, &none);
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

static size_t workspace(const adapted_kernel *inner, const fdma_problem *problem,
                        check_depth depth) {
    fdma_arena arena = {0};
    take_scratch(&arena, problem);
    return fdma_arena_size(&arena) + largest_workspace(inner, problem, depth);
}

fdma_problem fdma_prepare_cuts(const fdma_problem *problem) {
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

static fdma_status run_range(const adapted_kernel *inner, const fdma_problem *packed,
                             const packed_range *range, const packed_scratch *scratch) {
    const fdma_problem one = cut_problem(packed, range, scratch);
    if (!fdma_cut_has_work(&one))
        return FDMA_OK;
    if (reads_expiry(packed))
        copy_expiry(packed, range->own, scratch->expiry);
    const fdma_status status = fdma_run_adapted(inner, &one);
    if (packed->operation == operation_select)
        move_expiry(packed, range->own);
    return status;
}

static bool applies(const fdma_kernel *kernel, const fdma_problem *problem) {
    return is_present(&problem->starts) && has_trait(kernel, trait_one_sequence);
}

static fdma_status run(const adapted_kernel *inner, const fdma_problem *problem) {
    fdma_problem packed = fdma_prepare_cuts(problem);
    fdma_arena arena = fdma_arena_of(problem);
    const packed_scratch scratch = take_scratch(&arena, problem);
    fdma_set_aside(&packed.exec, &arena);
    if (packed.kv_len > 0) // otherwise there may be no workspace
        memset(scratch.invalid, 0, (size_t)packed.kv_len);
    for (int64_t n = 0; n < packed.starts.shape[0]; n++) {
        const packed_range range = range_at(&packed, n);
        FDMA_TRY(run_range(inner, &packed, &range, &scratch));
    }
    return FDMA_OK;
}

const kernel_adapter fdma_packed_adapter = {applies, workspace, run};
