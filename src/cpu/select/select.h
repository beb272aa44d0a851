/* Selection in as many partitions as pay off. */
#pragma once

#include "cpu/select/partitions.h"

static select_context plan_select(const fdma_problem *problem) {
    return cut_partitions(problem, count_select_partitions(problem));
}

/* Fewer keys may be cut into fewer, longer partitions, or into none. */
static size_t any_select_workspace(const fdma_problem *problem) {
    select_context whole = cut_partitions(problem, 1), cut = plan_select(problem);
    const size_t bytes = lay_out_select(&whole);
    if (cut.partitions == 1)
        return bytes;
    cut.partition_keys = (int32_t)divide_up(problem->kv_len, least_partitions);
    const size_t cut_bytes = lay_out_select(&cut);
    return bytes > cut_bytes ? bytes : cut_bytes;
}

static size_t select_workspace(const fdma_problem *problem) {
    select_context select = plan_select(problem);
    return problem->any_len ? any_select_workspace(problem) : lay_out_select(&select);
}

static fdma_status run_select(const fdma_problem *problem) {
    select_context select = plan_select(problem);
    lay_out_select(&select);
    select_partitions(&select);
    return FDMA_OK;
}
