/* Selection as a call makes it: in as many partitions as pay. */
#pragma once

#include "cpu/select/partitions.h"

static select_context plan_select(const fdma_problem *problem) {
    return cut_partitions(problem, count_select_partitions(problem));
}

static size_t select_workspace(const fdma_problem *problem) {
    select_context select = plan_select(problem);
    return lay_out_select(&select);
}

static fdma_status run_select(const fdma_problem *problem) {
    select_context select = plan_select(problem);
    lay_out_select(&select);
    select_partitions(&select);
    return FDMA_OK;
}
