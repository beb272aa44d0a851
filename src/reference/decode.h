/* Decoding with a cache, by its definition: the new tokens of a stream are selected with the
 * cache's table and attended to with its keys. */
#pragma once

#include "core/adapter.h"
#include "core/cache.h"
#include "reference/forward.h"

static size_t any_select_workspace(const fdma_problem *problem) {
    return fdma_reference_select_workspace(problem);
}

static const fdma_kernel plain_select = {.workspace = any_select_workspace,
                                         .run = fdma_reference_select};
static const adapted_kernel select_kernel = {&plain_select, fdma_host_adapters};

static fdma_problem selection_of(const decode_head *head, const head_selection *selection) {
    const fdma_problem *const problem = head->problem;
    const fdma_table *const table = &problem->cache.table;
    const int64_t rows = problem->carried_len, kv_len = rows + head->tokens;
    fdma_problem one = *problem;
    one.operation = operation_select;
    one.batch = one.kv_heads = 1;
    one.new_len = head->tokens;
    one.kv_len = kv_len;
    one.dtype = problem->score.dtype;
    one.score = fdma_tensor_3d(NULL, one.dtype, 1, 1, head->tokens);
    one.table_in.score = fdma_tensor_3d(NULL, one.dtype, 1, 1, rows);
    one.table_in.position = fdma_tensor_3d(NULL, FDMA_INT32, 1, 1, rows);
    one.table_in.seen = fdma_tensor_1d(NULL, FDMA_INT32, 1);
    one.expiry = fdma_tensor_3d(selection->expiry, FDMA_INT32, 1, 1, kv_len);
    one.slot = fdma_tensor_3d(selection->slot, FDMA_INT32, 1, 1, kv_len);
    if (head->sequence < 0)
        return one; // only its sizes are needed
    one.score.data =
        (uint8_t *)problem->score.data +
        (size_t)offset_of(&problem->score, head->b, head->g, 0) * fdma_dtype_size(one.dtype);
    one.table_in.score.data =
        (uint8_t *)table->score.data +
        (size_t)offset_of(&table->score, head->sequence, head->g, 0) * fdma_dtype_size(one.dtype);
    one.table_in.position.data =
        (int32_t *)table->position.data + offset_of(&table->position, head->sequence, head->g, 0);
    one.table_in.seen.data = (int32_t *)table->seen.data + head->sequence;
    return one;
}

static size_t decode_workspace(const fdma_problem *problem) {
    fdma_arena arena = {0};
    const head_selection selection = fdma_take_selection(&arena, problem);
    const decode_head head = {.problem = problem, .sequence = -1, .tokens = problem->new_len};
    const fdma_problem select = selection_of(&head, &selection);
    const size_t selecting = fdma_adapted_workspace(&select_kernel, &select, check_shapes);
    const size_t attending = forward_workspace(problem);
    return fdma_arena_size(&arena) + (selecting > attending ? selecting : attending);
}

static fdma_status decode_one(const fdma_problem *problem, int64_t b, int64_t g) {
    const decode_head head = fdma_decode_head(problem, b, g);
    fdma_arena arena = fdma_arena_of(problem);
    const head_selection selection = fdma_take_selection(&arena, problem);
    fdma_clear_queries(&head);
    if (head.sequence < 0 || head.tokens == 0)
        return FDMA_OK;
    fdma_problem select = selection_of(&head, &selection);
    fdma_set_aside(&select.exec, &arena);
    const fdma_status status = fdma_run_adapted(&select_kernel, &select);
    fdma_hide_missing_rows(&head, &selection);
    fdma_fill_bias(&head, &selection);
    fdma_problem forward = fdma_decode_forward(&head, &selection);
    forward.exec = select.exec;
    if (status == FDMA_OK)
        run_forward(&forward);
    fdma_commit_tokens(&head, &selection);
    return status;
}

static fdma_status run_decode(const fdma_problem *problem) {
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t g = 0; g < problem->kv_heads; g++) {
            const fdma_status status = decode_one(problem, b, g);
            if (status != FDMA_OK)
                return status;
        }
    fdma_count_committed(problem);
    return FDMA_OK;
}
